"""AxialResNet: a ResNet whose 3x3 convolutions are attention along columns, then along rows (Axial-DeepLab).

The paper's D.6 compares it with Axial-ViT. Order and layout of the parameters are those of the authors' `axialnet.py`.
Letters: B batch, C channels, Y X rows and columns, S lines (rows or columns of all images), L places on a line, H heads,
V channels of a head's value, Q of its query and of its key, K classes.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.core.errors import UsageError, require_choice
from vitlab.models import init, ops
from vitlab.models.batch_norm import BatchNorm
from vitlab.models.bit_family import halved
from vitlab.models.model import Model
from vitlab.models.results import Features, require_images, resolve_indices
from vitlab.models.spec import AxialResNetSpec, Pair, TokenKind
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


class AxialResNet(Model):
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
        require_images(x_BCYX, self.spec.in_channels)
        self.spec.require_resizable((x_BCYX.shape[2], x_BCYX.shape[3]))
        x = F.relu(self.root_norm(self.root(x_BCYX)))
        x = keep(tape, "root", F.max_pool2d(x, 3, 2, 1))
        for s, stage in enumerate(self.stages):
            for u, unit in enumerate(stage):  # pyright: ignore[reportArgumentType]
                name = f"stage{s}/unit{u:02d}"
                x = keep(tape, name, unit(x, tape, name))
        return keep(tape, "pooled", x.mean(dim=(2, 3)))

    def features(self, x_BCYX: Tensor, *, tokens: TokenKind | None = None, layers: Sequence[int] = (-1,)) -> Features:
        """Stage outputs as vectors, per position or averaged."""
        tokens = tokens or "mean"
        require_choice("tokens", tokens, ("cls", "patches", "mean"))
        if tokens == "cls":
            raise UsageError("an AxialResNet has no class token", hint="Use tokens='mean' or 'patches'.")
        stages = self.spec.stages
        names = {i: f"stage{i}/unit{stages[i] - 1:02d}" for i in resolve_indices(layers, self.spec.num_blocks, "stage")}
        tape = Tape(*names.values())
        self(x_BCYX, tape)
        maps = {i: tape[name] for i, name in names.items()}
        grids = {i: (map_BCYX.shape[2], map_BCYX.shape[3]) for i, map_BCYX in maps.items()}
        vectors_BNC = {i: map_BCYX.flatten(2).mT for i, map_BCYX in maps.items()}
        layers_out = {i: v.mean(dim=1) if tokens == "mean" else v for i, v in vectors_BNC.items()}
        return Features(layers=layers_out, tokens=tokens, grids=grids)

    def no_attention(self) -> UsageError:
        """Why there are no maps to show, and where the weights are."""
        return UsageError(
            "an AxialResNet has no attention maps to show: it attends between convolutions, on grids that shrink from stage to "
            "stage",
            hint="Its weights along columns and rows are on the tape: tape['stage0/unit00/down'] after model(x, tape).",
        )


def _conv(cin: int, cout: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(cin, cout, 1, stride, bias=False)
