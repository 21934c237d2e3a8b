"""The module that is exported: images in, scores out, and nothing in it that only training needs.

Letters: B batch, C channels, Y X rows and columns, N patches, D width, L position tables, K classes.
"""

import copy
import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.exporting.resampling import grid_matrices, picture_matrix
from vitlab.models.efficientnet import Conv
from vitlab.models.model import Model
from vitlab.models.names import format_name
from vitlab.models.resnet import RootPool, StdConv
from vitlab.models.spec import AxialResNetSpec, Pair, ViTSpec
from vitlab.models.vit import Positions, ViT
from vitlab.weights.bundle import Bundle

_MOST_BATCH, _MOST_CELLS, _MOST_SIDE = 2**16, 2**12, 2**16


@dataclasses.dataclass(frozen=True)
class GraphRule:
    """What the graph takes: how many images, of which sizes, prepared or not."""

    batch: int | None = None  # None: any number
    dynamic_size: bool = False
    preprocess_inside: bool = False


class Graph(nn.Module):
    """Prepared images [B, C, Y, X] -> logits, features; or uint8 [B, Y, X, C] -> probabilities, logits, features, pixels.

    Features are what the head sees, so that an exported file can embed too. A model without a head has no logits. `pixels` is
    the tensor that the model sees, from which on a reader that prepares images itself can use the rest of the graph.
    """

    def __init__(self, bundle: Bundle, rule: GraphRule, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        require_exportable(bundle.model, rule)
        self.model = frozen(bundle.model, dynamic_size=rule.dynamic_size).to(dtype)
        self.prepare = Prepare(bundle.preprocess) if rule.preprocess_inside else None
        self.dtype, self.temperature, self.several = dtype, bundle.temperature, bool(bundle.thresholds)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x_BCYX = images if self.prepare is None else self.prepare(images)
        features_BD = self.model.represent(x_BCYX.to(self.dtype))
        outputs = [features_BD.float()]
        if self.model.head is not None:
            logits_BK = self.model.head(features_BD).float()
            outputs.insert(0, logits_BK)
            if self.prepare is not None:
                scaled_BK = logits_BK / self.temperature
                outputs.insert(0, scaled_BK.sigmoid() if self.several else scaled_BK.softmax(dim=1))
        return (*outputs, x_BCYX) if self.prepare is not None else tuple(outputs)


def output_names(model: Model, rule: GraphRule) -> tuple[str, ...]:
    """What `Graph` gives, in order."""
    scores = () if model.head is None else ("probabilities", "logits") if rule.preprocess_inside else ("logits",)
    return (*scores, "features", *(("pixels",) if rule.preprocess_inside else ()))


def require_exportable(model: Model, rule: GraphRule) -> None:
    """An error, before any work, for sizes that the model cannot change."""
    spec = model.spec
    if rule.dynamic_size and (
        isinstance(spec, AxialResNetSpec) or (isinstance(spec, ViTSpec) and spec.pos == "relative")
    ):
        raise UsageError(
            f"an exported {format_name(spec)} takes one image size: its relative positions are learned for that size",
            hint="Leave --dynamic-size out; --image-size exports it for another size.",
        )
    if rule.dynamic_size and any(side % spec.stride for side in spec.image_size):
        rows, cols = (max(1, round(side / spec.stride)) * spec.stride for side in spec.image_size)
        raise UsageError(
            f"with --dynamic-size, sides of images are multiples of {spec.stride}, and those of {format_name(spec)} are "
            f"{spec.image_size[0]}x{spec.image_size[1]}",
            hint=f"Export it for such a size: --image-size {rows},{cols}.",
        )
    if rule.dynamic_size and rule.preprocess_inside:
        raise UsageError(
            "with its preprocessing inside, a graph takes images of any size anyway, and the model sees one size",
            hint="Leave --dynamic-size or --preprocess-inside out.",
        )
    if rule.batch is not None and rule.batch < 1:
        raise UsageError(f"--batch-size must be at least 1, not {rule.batch}")


def traced(graph: Graph, bundle: Bundle, rule: GraphRule) -> torch.export.ExportedProgram:
    """The graph as torch.export records it: the common start of all formats."""
    spec, (rows, cols) = bundle.model.spec, bundle.preprocess.image_size
    batch = rule.batch or 2
    # An example that is like no other size: what stays open must not look as if it were given.
    if rule.preprocess_inside:
        images = torch.zeros(batch, rows + 5, cols + 3, spec.in_channels, dtype=torch.uint8)
    elif rule.dynamic_size:
        images = torch.zeros(batch, spec.in_channels, rows + 2 * spec.stride, cols + 3 * spec.stride)
    else:
        images = torch.zeros(batch, spec.in_channels, rows, cols)
    with torch.no_grad():
        return torch.export.export(graph.eval(), (images,), dynamic_shapes=(_open_dimensions(spec.stride, rule),))


def _open_dimensions(stride: int, rule: GraphRule) -> dict[int, Any]:
    dim = torch.export.Dim
    sizes: dict[int, Any] = {} if rule.batch else {0: dim("batch", min=1, max=_MOST_BATCH)}
    if rule.preprocess_inside:
        sizes |= {1: dim("rows", min=1, max=_MOST_SIDE), 2: dim("columns", min=1, max=_MOST_SIDE)}
    elif rule.dynamic_size:
        sizes |= {2: stride * dim("grid_rows", min=1, max=_MOST_CELLS)}
        sizes |= {3: stride * dim("grid_columns", min=1, max=_MOST_CELLS)}
    return sizes


# --- preparing images -------------------------------------------------------------------------------------------------


class Prepare(nn.Module):
    """`data.preprocess` as a graph: resize, cut out the middle, normalise. At most one grey level from it, by rounding."""

    mean: Tensor
    std: Tensor

    def __init__(self, rule: Preprocess) -> None:
        super().__init__()
        self.rule = rule
        self.register_buffer("mean", torch.tensor(rule.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(rule.std).view(-1, 1, 1), persistent=False)

    def forward(self, images_BYXC: Tensor) -> Tensor:
        rule, (height, width) = self.rule, images_BYXC.shape[1:3]
        down_IY, across_IX = self._matrices(height, width)
        x_BCYX = images_BYXC.permute(0, 3, 1, 2).float() @ across_IX.mT
        if rule.filter == "area":  # a mean is rounded once, at the end; all else in each direction, as Pillow does
            x_BCYX = (down_IY @ x_BCYX).round().clamp(0.0, 255.0)
        else:
            x_BCYX = _to_grey_levels(down_IY @ _to_grey_levels(x_BCYX))
        return (x_BCYX / 255 - self.mean) / self.std

    def _matrices(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Down and across. Only those rows and columns are computed that are left after the crop."""
        rule, (rows, cols) = self.rule, self.rule.image_size
        given_h, given_w = (torch.full((), side, dtype=torch.int64) for side in (height, width))
        scaled_h, scaled_w = (torch.full((), round(side / rule.crop_frac), dtype=torch.int64) for side in (rows, cols))
        if rule.resize == "shorter-side":  # by the larger factor: the other side gets more than it needs
            by_rows, by_cols = _rounded(given_w * scaled_h, given_h), _rounded(given_h * scaled_w, given_w)
            scaled_h, scaled_w = torch.maximum(scaled_h, by_cols), torch.maximum(scaled_w, by_rows)
        return (
            picture_matrix(rows, scaled_h, height, rule.filter, rule.antialias),
            picture_matrix(cols, scaled_w, width, rule.filter, rule.antialias),
        )


def _rounded(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A quotient of whole numbers, a half to the even one, as Python's `round`: the other one would move the picture."""
    doubled = 2 * numerator + denominator
    quotient = doubled // (2 * denominator)
    is_half = quotient * 2 * denominator == doubled
    return quotient - (is_half & (quotient // 2 * 2 != quotient)).to(torch.int64)


def _to_grey_levels(x: Tensor) -> Tensor:
    return (x + 0.5).floor().clamp(0.0, 255.0)  # half upwards, as Pillow and torch round bytes


# --- the model as it is used -------------------------------------------------------------------------------------------


def frozen(model: Model, *, dynamic_size: bool) -> Model:
    """A copy with every standardised kernel computed; with `dynamic_size`, one whose shapes follow from any size that fits."""
    fixed = copy.deepcopy(model).float().eval().requires_grad_(False)
    for module in list(fixed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, StdConv):
                child = _fixed(child)
                setattr(module, name, child)
            if isinstance(child, nn.MaxPool2d) and isinstance(child.kernel_size, int):
                setattr(module, name, _WholeCells(child.kernel_size))
            if dynamic_size and (strided := _strided(child)) is not None:
                setattr(module, name, strided)
    if dynamic_size and isinstance(fixed, ViT):
        fixed.pos = _OpenPositions(fixed.pos)  # pyright: ignore[reportAttributeAccessIssue] (called alike)
    return fixed


def _fixed(conv: StdConv) -> Conv:
    """A `StdConv` whose kernel is standardised once, and not in every call."""
    plain = Conv(conv.trunk.padding, conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0])
    plain.weight = nn.Parameter(conv.float_kernel().detach(), requires_grad=False)
    return plain


def _strided(module: nn.Module) -> nn.Module | None:
    """The module as one whose result has exactly 1 / stride of the rows and columns; None for all other kinds."""
    if isinstance(module, RootPool):
        before = 1 if module.padding == "fixed" else _same_before(module.kernel, module.stride)
        return _Strided(
            nn.MaxPool2d(module.kernel, module.stride), module.kernel, module.stride, before, module.outside
        )
    if not isinstance(module, Conv) or module.stride[0] == 1:
        return None
    kernel, stride = module.kernel_size[0], module.stride[0]
    before = int(module.padding[0]) if module.pads_itself else _same_before(kernel, stride)
    plain = nn.Conv2d(
        module.in_channels, module.out_channels, kernel, stride, groups=module.groups, bias=module.bias is not None
    )
    plain.weight, plain.bias = module.weight, module.bias
    return _Strided(plain, kernel, stride, before, 0.0)


def _same_before(kernel: int, stride: int) -> int:
    """What `pad_same` puts before an image whose sides are multiples of the stride."""
    return max(0, kernel - stride) // 2


class _Strided(nn.Module):
    """A window with a stride, on images whose sides are multiples of it, padded so that the division has no remainder.

    Rows and columns after the last window, which nothing looks at, are left out. With them, every stage would round its
    size, and torch.export takes minutes to find out that the rounded sizes are equal.
    """

    def __init__(self, window: nn.Module, kernel: int, stride: int, before: int, outside: float) -> None:
        super().__init__()
        self.window, self.before, self.after, self.outside = window, before, kernel - stride - before, outside

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return self.window(F.pad(x_BCYX, (self.before, self.after) * 2, value=self.outside))


class _WholeCells(nn.Module):
    """Pooling in whole cells, to which maps are padded: OpenVINO (2026.4) computes something else for a map of one row."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x_BCYX: Tensor) -> Tensor:
        further = self.side - 1  # enough for every size; of cells that are whole without it, nothing looks at it
        return F.max_pool2d(F.pad(x_BCYX, (0, further, 0, further), value=-math.inf), self.side)


class _OpenPositions(nn.Module):
    """`Positions` on a grid that the graph learns from its input, by the spec's own rule."""

    def __init__(self, pos: Positions) -> None:
        super().__init__()
        self.pos, self.spec = pos, pos.spec

    def forward(self, grid: Pair, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        pos, spec = self.pos, self.spec
        down_YR, across_XR = grid_matrices(spec.grid, grid, spec.pos_resize)
        if pos.table is not None:
            slots = pos.table.shape[1] - spec.grid[0] * spec.grid[1]
            table_LRSD = pos.table[:, slots:].float().unflatten(1, spec.grid)
            table_LDYX = down_YR @ table_LRSD.permute(0, 3, 1, 2) @ across_XR.mT
            patches_LND = table_LDYX.flatten(2).mT.to(like.dtype)
            return (pos.table[:, :1] if slots else None), patches_LND
        if pos.rows is not None and pos.cols is not None:
            rows_LYD = (down_YR @ pos.rows.float()).to(like.dtype)
            cols_LXD = (across_XR @ pos.cols.float()).to(like.dtype)
            rows_LYXD = rows_LYD[:, :, None].expand(-1, -1, grid[1], -1)
            cols_LYXD = cols_LXD[:, None].expand(-1, grid[0], -1, -1)
            return pos.cls, torch.cat([cols_LYXD, rows_LYXD], dim=3).flatten(1, 2)
        return pos(grid, like)  # none, or computed for any grid
