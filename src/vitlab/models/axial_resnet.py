"""AxialResNet: a ResNet whose 3x3 convolutions are attention along columns, then along rows (Axial-DeepLab).

The paper's D.6 compares it with Axial-ViT. Order and layout of the parameters are those of the authors' `axialnet.py`.
Letters: B batch, C channels, Y X rows and columns, S lines (rows or columns of all images), L places on a line, H heads,
V channels of a head's value, Q of its query and of its key, K classes.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.models import init, ops
from vitlab.models.batch_norm import BatchNorm
from vitlab.models.bit_family import halved
from vitlab.models.model import StageModel
from vitlab.models.results import AttentionLayer, GridAttention, require_images, resolve_indices
from vitlab.models.spec import AxialResNetSpec, Pair
from vitlab.models.tape import Tape, keep


class LineAttention(nn.Module):
    """Position-sensitive attention within every column (`axis` 0) or row (`axis` 1) of `length` places.

    A query, a key and a value each have learned vectors by offset. There is no scale: batch norms over the three kinds of
    logits set their size, each head's own.
    """

    def __init__(self, channels: int, heads: int, length: int, axis: int) -> None:
        super().__init__()
        self.heads, self.axis = heads, axis
        self.value = channels // heads
        self.qkv = nn.Conv1d(channels, 2 * channels, 1, bias=False)  # query and key are half as wide as the value
        self.qkv_norm = BatchNorm(2 * channels)
        self.logits_norm = BatchNorm(3 * heads)
        self.out_norm = BatchNorm(2 * channels)
        self.relative = nn.Parameter(torch.empty(2 * self.value, 2 * length - 1))

    def init_weights(self, generator: Generator | None) -> None:
        nn.init.normal_(self.qkv.weight, std=math.sqrt(1 / self.qkv.in_channels), generator=generator)
        nn.init.normal_(self.relative, std=math.sqrt(1 / self.value), generator=generator)

    def forward(self, x_BCYX: Tensor, tape: Tape | None = None, name: str = "") -> Tensor:
        lines_BCSL = x_BCYX.transpose(2, 3) if self.axis == 0 else x_BCYX
        batch, channels, lines, length = lines_BCSL.shape
        x_SCL = lines_BCSL.transpose(1, 2).reshape(batch * lines, channels, length)
        qkv_SHcL = self.qkv_norm(self.qkv(x_SCL)).unflatten(1, (self.heads, -1))
        q_SHQL, k_SHQL, v_SHVL = qkv_SHcL.split((self.value // 2, self.value // 2, self.value), dim=2)
        q_QLL, k_QLL, v_VLL = ops.by_offset(self.relative, length).split(
            (self.value // 2, self.value // 2, self.value), dim=0
        )
        logits_ScLL = self.logits_norm(ops.position_sensitive_logits(q_SHQL, k_SHQL, q_QLL, k_QLL))
        weights_SHLL = logits_ScLL.unflatten(1, (3, self.heads)).sum(dim=1).softmax(dim=-1)
        keep(tape, name, weights_SHLL.unflatten(0, (batch, lines)))
        y_SHVcL = ops.position_sensitive_values(weights_SHLL, v_SHVL, v_VLL)
        y_SCcL = self.out_norm(y_SHVcL.reshape(-1, 2 * channels, length)).unflatten(1, (channels, 2))
        y_BCSL = y_SCcL.sum(dim=2).unflatten(0, (batch, lines)).transpose(1, 2)
        return y_BCSL.transpose(2, 3) if self.axis == 0 else y_BCSL


class AxialUnit(nn.Module):
    """A bottleneck with attention along columns and rows in place of its 3x3 convolution."""

    def __init__(self, cin: int, inner: int, heads: int, stride: int, size: Pair) -> None:
        super().__init__()
        cout = 2 * inner
        self.stride = stride
        self.conv1, self.norm1 = _conv(cin, inner), BatchNorm(inner)
        self.down = LineAttention(inner, heads, size[0], axis=0)
        self.across = LineAttention(inner, heads, size[1], axis=1)
        self.conv2, self.norm2 = _conv(inner, cout), BatchNorm(cout)
        self.proj = self.proj_norm = None
        if cin != cout or stride != 1:
            self.proj, self.proj_norm = _conv(cin, cout, stride), BatchNorm(cout)

    def init_weights(self, generator: Generator | None) -> None:
        for conv in (self.conv1, self.conv2, self.proj):
            if conv is not None:
                init.he(conv, generator)

    def zero_init(self) -> None:
        nn.init.zeros_(self.norm2.weight)  # each unit starts as its shortcut

    def forward(self, x: Tensor, tape: Tape | None = None, name: str = "") -> Tensor:
        shortcut = x if self.proj is None or self.proj_norm is None else self.proj_norm(self.proj(x))
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.down(y, tape, f"{name}/down")
        y = self.across(y, tape, f"{name}/across")
        if self.stride != 1:  # rounds up like the shortcut where a side is odd
            y = F.avg_pool2d(y, self.stride, ceil_mode=True)
        y = self.norm2(self.conv2(F.relu(y)))
        return F.relu(y + shortcut)


class AxialResNet(StageModel):
    """An AxialResNet classifier, for images of one size."""

    recompute_units = (AxialUnit,)
    sharding_units = (AxialUnit,)

    def __init__(self, spec: AxialResNetSpec) -> None:
        super().__init__()
        self.spec: AxialResNetSpec = spec  # pyright: ignore[reportIncompatibleVariableOverride]
        self.root = nn.Conv2d(spec.in_channels, spec.width, 7, 2, 3, bias=False)
        self.root_norm = BatchNorm(spec.width)
        self.stages = nn.ModuleList()
        cin, size = spec.width, halved(halved(spec.image_size))
        for stage, count in enumerate(spec.stages):
            units = nn.ModuleList()
            for unit in range(count):
                stride = 2 if stage and unit == 0 else 1
                units.append(AxialUnit(cin, spec.inner(stage), spec.heads, stride, size))
                cin, size = 2 * spec.inner(stage), halved(size) if stride == 2 else size
            self.stages.append(units)
        self.head = nn.Linear(spec.representation_width, spec.num_classes) if spec.num_classes else None

    def init_weights(self, generator: Generator | None) -> None:
        init.he(self.root, generator)

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        """What the head sees, [B, C]: the mean of the last stage."""
        self._require_fit(x_BCYX)
        x = keep(tape, "root", self._begin(x_BCYX))
        for s, stage in enumerate(self.stages):
            for u, unit in enumerate(stage):  # pyright: ignore[reportArgumentType]
                name = f"stage{s}/unit{u:02d}"
                x = keep(tape, name, unit(x, tape, name))
        return keep(tape, "pooled", x.mean(dim=(2, 3)))

    def _require_fit(self, x_BCYX: Tensor) -> None:
        require_images(x_BCYX, self.spec.in_channels)
        self.spec.require_resizable((x_BCYX.shape[2], x_BCYX.shape[3]))

    def _begin(self, x_BCYX: Tensor) -> Tensor:
        """The root and its max-pool: what the first stage sees."""
        return F.max_pool2d(F.relu(self.root_norm(self.root(x_BCYX))), 3, 2, 1)

    @property
    def stage_maps(self) -> tuple[str, ...]:
        """Of each stage its last unit."""
        return tuple(f"stage{i}/unit{count - 1:02d}" for i, count in enumerate(self.spec.stages))

    def first_filters(self) -> tuple[Tensor, str]:
        """Those of the root."""
        return self.root.weight, "first convolution"

    def attention_geometry(self, image_size: Pair) -> tuple[AttentionLayer, ...]:
        """Two layers for each unit, along columns and then along rows; a unit halves its map after both."""
        layers: list[AttentionLayer] = []
        size, stride = halved(halved(image_size)), 4  # after the root and its max-pool
        for s, count in enumerate(self.spec.stages):
            for u in range(count):
                layers += [AttentionLayer(f"stage{s}/unit{u:02d}", size, stride, axis=axis) for axis in (0, 1)]
                size, stride = (halved(size), 2 * stride) if s and u == 0 else (size, stride)
        return tuple(layers)

    def attention_on_grids(
        self, x_BCYX: Tensor, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> Iterator[GridAttention]:
        """Weights within columns (even layers) and rows (odd ones), as the units compute them."""
        self._require_fit(x_BCYX)
        count, width = self.spec.attention_shape
        return self._attention_on_grids(
            x_BCYX, resolve_indices(layers, count, "layer"), resolve_indices(heads, width, "head")
        )

    @torch.no_grad()
    def _attention_on_grids(
        self, x_BCYX: Tensor, layers: Sequence[int], heads: tuple[int, ...]
    ) -> Iterator[GridAttention]:
        x, index = self._begin(x_BCYX), 0
        geometry = self.attention_geometry(self.spec.image_size)
        for unit in (unit for stage in self.stages for unit in stage):  # pyright: ignore[reportGeneralTypeIssues]
            if index > max(layers):
                return
            tape = Tape(f"{geometry[index].unit}/*")
            x = unit(x, tape, geometry[index].unit)
            for i in (index, index + 1):
                if i in layers:
                    weights_BSHLL = tape.pop(geometry[i].name)[:, :, list(heads)]
                    # A line and a place on it are a column and a row, or a row and a column: to raster order.
                    order = (0, 2, 3, 1, 4) if geometry[i].axis == 0 else (0, 2, 1, 3, 4)
                    yield GridAttention(i, geometry[i], heads, weights_BSHLL.permute(order).flatten(2, 3))
            index += 2


def _conv(cin: int, cout: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, 1, stride, bias=False)
