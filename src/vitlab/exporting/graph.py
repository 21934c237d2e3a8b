"""The module that is exported: images in, scores out, and nothing in it that only training needs.

Letters: B batch, C channels, Y X rows and columns, N patches, D width, L position tables, K classes.
"""

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.exporting.resampling import grid_matrices, picture_matrix
from vitlab.models.model import Model
from vitlab.models.names import format_name
from vitlab.models.ops import pad_same
from vitlab.models.resnet import StdConv
from vitlab.models.spec import Pair, ViTSpec
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
    # The sizes of a convolutional stage are rounded layer by layer, which torch.export takes minutes to simplify.
    can_change = isinstance(spec, ViTSpec) and spec.stem is None and spec.pos != "relative"
    if rule.dynamic_size and not can_change:
        raise UsageError(
            f"an exported {format_name(spec)} takes one image size: only ViTs without convolutions and relative positions "
            "can leave it open",
            hint="Leave --dynamic-size out; --image-size exports it for another size.",
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
        if rule.filter != "area":  # a mean is rounded once, at the end; all else in each direction, as Pillow does
            x_BCYX = _to_grey_levels(x_BCYX)
        x_BCYX = _to_grey_levels(down_IY @ x_BCYX)
        return (x_BCYX / 255 - self.mean) / self.std

    def _matrices(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Down and across. Only those rows and columns are computed that are left after the crop."""
        rule, (rows, cols) = self.rule, self.rule.image_size
        # In float64: a scaled side that is rounded the other way would move the picture by half a pixel.
        given_h, given_w = (torch.full((), side, dtype=torch.float64) for side in (height, width))
        scaled_h, scaled_w = (
            torch.full((), round(side / rule.crop_frac), dtype=torch.float64) for side in (rows, cols)
        )
        if rule.resize == "shorter-side":
            factor = torch.maximum(scaled_h / given_h, scaled_w / given_w)
            scaled_h = torch.maximum(scaled_h, (given_h * factor).round())
            scaled_w = torch.maximum(scaled_w, (given_w * factor).round())
        return tuple(  # pyright: ignore[reportReturnType] (two of them)
            picture_matrix(
                torch.arange(kept, dtype=torch.float32) + ((scaled - kept) / 2).floor().float(),
                (given / scaled).float(),
                length,
                rule.filter,
                rule.antialias,
            )
            for kept, scaled, given, length in ((rows, scaled_h, given_h, height), (cols, scaled_w, given_w, width))
        )


def _to_grey_levels(x: Tensor) -> Tensor:
    return (x + 0.5).floor().clamp(0.0, 255.0)  # half upwards, as Pillow and torch round bytes


# --- the model as it is used -------------------------------------------------------------------------------------------


def frozen(model: Model, *, dynamic_size: bool) -> Model:
    """A copy with every standardised kernel computed, and with positions for a size that is not known yet where asked for."""
    fixed = copy.deepcopy(model).float().eval().requires_grad_(False)
    for module in list(fixed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, StdConv):
                setattr(module, name, _FixedConv(child))
    if dynamic_size and isinstance(fixed, ViT):
        fixed.pos = _OpenPositions(fixed.pos)  # pyright: ignore[reportAttributeAccessIssue] (called alike)
    return fixed


class _FixedConv(nn.Module):
    """A `StdConv` whose kernel is standardised once, and not in every call."""

    def __init__(self, conv: StdConv) -> None:
        super().__init__()
        self.kernel = nn.Parameter(conv.float_kernel().detach(), requires_grad=False)
        self.side, self.stride, self.padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
        self.pads = conv.trunk.padding == "same"

    def forward(self, x_BCYX: Tensor) -> Tensor:
        x_BCYX = pad_same(x_BCYX, self.side, self.stride) if self.pads else x_BCYX
        return F.conv2d(x_BCYX, self.kernel, None, self.stride, self.padding)


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
            rows_LYD, cols_LXD = (
                (down_YR @ pos.rows.float()).to(like.dtype),
                (across_XR @ pos.cols.float()).to(like.dtype),
            )
            rows_LYXD = rows_LYD[:, :, None].expand(-1, -1, grid[1], -1)
            cols_LYXD = cols_LXD[:, None].expand(-1, grid[0], -1, -1)
            return pos.cls, torch.cat([cols_LYXD, rows_LYXD], dim=3).flatten(1, 2)
        return pos(grid, like)  # none, or computed for any grid
