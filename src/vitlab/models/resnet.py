"""ResNets with GroupNorm and weight standardisation: hybrid stems and BiT.

Owns both unit types, the non-local block and the BiT classifier.
Letters: B batch, C channels, Y X rows and columns, N positions, K classes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.models import init
from vitlab.models.batch_norm import BatchNorm
from vitlab.models.bit_family import halved
from vitlab.models.model import StageModel
from vitlab.models.ops import STANDARDISATIONS, attend, attention_weights, pad_same
from vitlab.models.results import AttentionLayer, GridAttention, require_images, resolve_indices
from vitlab.models.spec import BiTSpec, Padding, Pair, TrunkSpec
from vitlab.models.tape import Tape, keep

_GROUPS = 32  # BiT section 3.1; the hybrids use the same
_NON_LOCAL_STD = 0.01  # video-nonlocal-net
_NON_LOCAL_POOL = 2  # side of the cells whose maximum is looked at; the same source


class StdConv(nn.Conv2d):
    """A convolution with a standardised kernel, padded by the spec's rule."""

    def __init__(self, trunk: TrunkSpec, cin: int, cout: int, kernel: int, stride: int = 1) -> None:
        fixed = {"same": 0, "fixed": kernel // 2}[trunk.padding]  # SAME depends on the image
        super().__init__(cin, cout, kernel, stride, padding=fixed, bias=False)
        self.trunk = trunk
        self.standardize = STANDARDISATIONS[trunk.ws]

    def init_weights(self, generator: Generator | None) -> None:
        init.lecun(self, generator)

    def float_kernel(self) -> Tensor:
        """The kernel as it is applied, whatever precision it is stored in."""
        return self.standardize(self.weight.float(), self.trunk.ws_eps)

    def forward(self, input: Tensor) -> Tensor:  # nn.Conv2d's own argument name
        x_BCYX = input
        if self.trunk.padding == "same":
            x_BCYX = pad_same(x_BCYX, self.kernel_size[0], self.stride[0])
        kernel = self.standardize(self.weight, self.trunk.ws_eps)
        return F.conv2d(x_BCYX, kernel, None, self.stride, self.padding)  # pyright: ignore[reportArgumentType]


class PostActUnit(nn.Module):
    """The hybrids' bottleneck (ResNet v1): norm after each convolution."""

    def __init__(self, trunk: TrunkSpec, cin: int, mid: int, stride: int) -> None:
        super().__init__()
        cout = 4 * mid
        self.conv1, self.norm1 = StdConv(trunk, cin, mid, 1), _norm(trunk, mid)
        self.conv2, self.norm2 = StdConv(trunk, mid, mid, 3, stride), _norm(trunk, mid)
        self.conv3, self.norm3 = StdConv(trunk, mid, cout, 1), _norm(trunk, cout)
        self.proj, self.proj_norm = None, None
        if cin != cout or stride != 1:
            self.proj, self.proj_norm = StdConv(trunk, cin, cout, 1, stride), _norm(trunk, cout)

    def zero_init(self) -> None:
        nn.init.zeros_(self.norm3.weight)  # each unit starts as its shortcut

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.proj_norm(self.proj(x)) if self.proj is not None and self.proj_norm is not None else x
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(shortcut + self.norm3(self.conv3(y)))


class NonLocal(nn.Module):
    """Every position looks at every second one along both axes (Wang et al. 2018): embedded Gaussian, one head.

    The last norm starts at zero, and with it the block as the identity.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Conv2d(channels, channels // 2, 1)
        self.key = nn.Conv2d(channels, channels // 2, 1)
        self.value = nn.Conv2d(channels, channels // 2, 1)
        self.out = nn.Conv2d(channels // 2, channels, 1)
        self.norm = BatchNorm(channels)
        self.pool = nn.MaxPool2d(_NON_LOCAL_POOL, ceil_mode=True)  # a map of one row has one left

    def init_weights(self, generator: Generator | None) -> None:
        for conv in (self.query, self.key, self.value, self.out):
            assert conv.bias is not None
            nn.init.normal_(conv.weight, std=_NON_LOCAL_STD, generator=generator)
            nn.init.zeros_(conv.bias)

    def zero_init(self) -> None:
        nn.init.zeros_(self.norm.weight)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        pooled = self.pool(x_BCYX)
        q, k, v = (_as_head(part) for part in (self.query(x_BCYX), self.key(pooled), self.value(pooled)))
        y_BCYX = attend(q, k, v)[:, 0].mT.unflatten(2, x_BCYX.shape[2:])
        return x_BCYX + self.norm(self.out(y_BCYX))

    def weights(self, x_BCYX: Tensor) -> Tensor:
        """The softmax matrix that `forward` applies, [B, 1, places, cells]."""
        return attention_weights(_as_head(self.query(x_BCYX)), _as_head(self.key(self.pool(x_BCYX))))


def _as_head(x_BCYX: Tensor) -> Tensor:
    """A map as the sequence of a single head, [B, 1, N, C]."""
    return x_BCYX.flatten(2).mT[:, None]


class PreActUnit(nn.Module):
    """BiT's bottleneck (ResNet v2): norm and ReLU before each convolution; a non-local block may follow."""

    def __init__(self, trunk: TrunkSpec, cin: int, mid: int, stride: int, *, non_local: bool = False) -> None:
        super().__init__()
        cout = 4 * mid
        self.norm1, self.conv1 = _norm(trunk, cin), StdConv(trunk, cin, mid, 1)
        self.norm2, self.conv2 = _norm(trunk, mid), StdConv(trunk, mid, mid, 3, stride)
        self.norm3, self.conv3 = _norm(trunk, mid), StdConv(trunk, mid, cout, 1)
        self.proj = StdConv(trunk, cin, cout, 1, stride) if cin != cout or stride != 1 else None
        self.non_local = NonLocal(cout) if non_local else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bottleneck(x)
        return y if self.non_local is None else self.non_local(y)

    def bottleneck(self, x: Tensor) -> Tensor:
        """The unit without its non-local block."""
        y = F.relu(self.norm1(x))
        # The projection starts from the pre-activated tensor, the identity shortcut from the raw one.
        shortcut = x if self.proj is None else self.proj(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.norm2(y)))
        return shortcut + self.conv3(F.relu(self.norm3(y)))


UNITS = (PreActUnit, PostActUnit)


class RootPool(nn.Module):
    """The maximum of every 3x3 window, at every second place, padded by the spec's rule."""

    kernel, stride = 3, 2

    def __init__(self, trunk: TrunkSpec) -> None:
        super().__init__()
        assert trunk.pool_padding is not None, "settled with the spec"
        self.padding: Padding = trunk.padding
        self.outside = {"zero": 0.0, "neg-inf": -math.inf}[trunk.pool_padding]  # zeros take part in the maximum

    def forward(self, x_BCYX: Tensor) -> Tensor:
        match self.padding:
            case "same":
                x_BCYX = pad_same(x_BCYX, self.kernel, self.stride, self.outside)
            case "fixed":
                x_BCYX = F.pad(x_BCYX, (1, 1, 1, 1), value=self.outside)
            case _:
                assert_never(self.padding)
        return F.max_pool2d(x_BCYX, self.kernel, self.stride)


class Trunk(nn.Module):
    """Root and stages; returns the last stage's feature map."""

    def __init__(self, trunk: TrunkSpec, in_channels: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.root = StdConv(trunk, in_channels, trunk.root_width, 7, 2)
        self.root_norm = None if trunk.preact else _norm(trunk, trunk.root_width)
        self.root_pool = RootPool(trunk)
        self.stages = nn.ModuleList()
        cin = trunk.root_width
        for stage, count in enumerate(trunk.stages):
            mid = trunk.root_width * 2**stage
            units = nn.ModuleList()
            for i in range(count):
                sizes = cin if i == 0 else 4 * mid, mid, 2 if stage and i == 0 else 1
                if trunk.preact:
                    units.append(PreActUnit(trunk, *sizes, non_local=trunk.follows_non_local(stage, i)))
                else:
                    units.append(PostActUnit(trunk, *sizes))
            self.stages.append(units)
            cin = 4 * mid

    def begin(self, x_BCYX: Tensor) -> Tensor:
        """The root and its max-pool: what the first stage sees."""
        x = self.root(x_BCYX)
        if self.root_norm is not None:
            x = F.relu(self.root_norm(x))
        return self.root_pool(x)

    def forward(self, x_BCYX: Tensor, tape: Tape | None = None, prefix: str = "") -> Tensor:
        x = keep(tape, f"{prefix}root", self.begin(x_BCYX))
        for s, stage in enumerate(self.stages):
            for u, unit in enumerate(stage):  # pyright: ignore[reportArgumentType]
                x = keep(tape, f"{prefix}stage{s}/unit{u:02d}", unit(x))
        return x


class BiT(StageModel):
    """A BiT ResNet classifier."""

    recompute_units = UNITS
    sharding_units = UNITS

    def __init__(self, spec: BiTSpec) -> None:
        super().__init__()
        self.spec: BiTSpec = spec  # pyright: ignore[reportIncompatibleVariableOverride]
        self.trunk = Trunk(spec.trunk, spec.in_channels)
        self.norm = _norm(spec.trunk, spec.trunk.out_channels)
        self.head = nn.Linear(spec.trunk.out_channels, spec.num_classes) if spec.num_classes else None

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        """What the head sees, [B, C]: the mean of the normalised last stage."""
        require_images(x_BCYX, self.spec.in_channels)
        x = keep(tape, "encoded", F.relu(self.norm(self.trunk(x_BCYX, tape))))
        return keep(tape, "pooled", x.mean(dim=(2, 3)))

    @property
    def stage_maps(self) -> tuple[str, ...]:
        """Of each stage its last unit; of the last one what is pooled, normalised and rectified."""
        stages = self.spec.trunk.stages
        return (*(f"stage{i}/unit{count - 1:02d}" for i, count in enumerate(stages[:-1])), "encoded")

    def first_filters(self) -> tuple[Tensor, str]:
        """Those of the root, standardised as they are applied."""
        return self.trunk.root.float_kernel(), "first convolution"

    def attention_geometry(self, image_size: Pair) -> tuple[AttentionLayer, ...]:
        """The non-local blocks: every place sees all cells of 2x2 places."""
        layers: list[AttentionLayer] = []
        size, stride = halved(halved(image_size)), 4  # after the root and its max-pool
        for s, count in enumerate(self.spec.trunk.stages):
            size, stride = (halved(size), 2 * stride) if s else (size, stride)
            units = [u for u in range(count) if self.spec.trunk.follows_non_local(s, u)]
            layers += [AttentionLayer(f"stage{s}/unit{u:02d}", size, stride, pool=_NON_LOCAL_POOL) for u in units]
        return tuple(layers)

    def attention_on_grids(
        self, x_BCYX: Tensor, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> Iterator[GridAttention]:
        """Weights of the non-local blocks, recomputed beside the fused kernel; without any, an error."""
        count, width = self.spec.attention_shape
        if not count:
            raise self.no_attention()
        require_images(x_BCYX, self.spec.in_channels)
        wanted = resolve_indices(layers, count, "layer"), resolve_indices(heads, width, "head")
        return self._attention_on_grids(x_BCYX, *wanted)

    @torch.no_grad()
    def _attention_on_grids(
        self, x_BCYX: Tensor, layers: Sequence[int], heads: tuple[int, ...]
    ) -> Iterator[GridAttention]:
        geometry = self.attention_geometry((x_BCYX.shape[2], x_BCYX.shape[3]))
        x, index = self.trunk.begin(x_BCYX), 0
        for unit in (unit for stage in self.trunk.stages for unit in stage):  # pyright: ignore[reportGeneralTypeIssues]
            assert isinstance(unit, PreActUnit)
            x = unit.bottleneck(x)
            if unit.non_local is None:
                continue
            if index in layers:
                yield GridAttention(index, geometry[index], heads, unit.non_local.weights(x))
            index += 1
            if index > max(layers):
                return
            x = unit.non_local(x)


def _norm(trunk: TrunkSpec, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, channels, eps=trunk.gn_eps)
