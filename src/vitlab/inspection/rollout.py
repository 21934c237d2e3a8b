"""Attention rollout: attention followed through the layers, from the output to the patches (paper D.8).

Streams: never more than one layer's weights of a few images are in memory. Letters: B batch, H heads, T tokens, Y X grid.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.inspection.attention import images_at_once, require_vit
from vitlab.models.model import Model
from vitlab.models.spec import Pair
from vitlab.models.vit import ViT


def rollout(
    model: Model, x_BCYX: Tensor, *, add_identity: bool = True, depth: int | None = None, chunk: int | None = None
) -> Tensor:
    """Attention from the tokens after `depth` layers (default: all) to the input tokens, [B, T, T]; rows sum to 1.

    Heads are averaged and the layers' matrices multiplied. The residual path is half of every layer (Abnar & Zuidema 2020),
    which the paper's sentence leaves out and the method it cites includes: `add_identity=False` follows the sentence.
    """
    vit = require_vit(model)
    layers = range(_checked_depth(vit, depth))
    parts = x_BCYX.split(chunk or images_at_once(vit, x_BCYX))
    return torch.cat([_rolled(vit, part_BCYX, layers, add_identity) for part_BCYX in parts])


def rollout_rows(
    model: Model, x_BCYX: Tensor, *, add_identity: bool = True, depth: int | None = None, chunk: int | None = None
) -> Tensor:
    """The output's row of the rollout on the patch grid, [B, Y, X]: what `output_row` chooses, without prefix tokens."""
    vit = require_vit(model)
    layers = range(_checked_depth(vit, depth))
    rows = [
        output_row(vit, part_BCYX, _rolled(vit, part_BCYX, layers, add_identity), layers=len(layers))
        for part_BCYX in x_BCYX.split(chunk or images_at_once(vit, x_BCYX))
    ]
    return on_grid(vit, x_BCYX, torch.cat(rows))


def rollout_heat(
    model: Model, x_BCYX: Tensor, *, add_identity: bool = True, depth: int | None = None, chunk: int | None = None
) -> Tensor:
    """`rollout_rows`, scaled so that the strongest patch of each image is 1."""
    heat_BYX = rollout_rows(model, x_BCYX, add_identity=add_identity, depth=depth, chunk=chunk)
    return heat_BYX / heat_BYX.amax(dim=(1, 2), keepdim=True)


def upsample_heat(heat_BYX: Tensor, size: Pair) -> Tensor:
    """The grid as a smooth picture of `size`, still at most 1."""
    return F.interpolate(heat_BYX[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def multiply_layers(layers: Iterable[Tensor], *, add_identity: bool = True) -> Tensor:
    """Rollout of weights [B, H, T, T], first layer first, to [B, T, T]."""
    rolled_BTT: Tensor | None = None
    for _, rolled_BTT in rolled_layers(layers, add_identity=add_identity):
        pass
    if rolled_BTT is None:
        raise UsageError("rollout needs at least one layer")
    return rolled_BTT


def rolled_layers(layers: Iterable[Tensor], *, add_identity: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """The weights of one layer after the other, each with the rollout [B, T, T] up to it."""
    rolled_BTT: Tensor | None = None
    for weights_BHTT in layers:
        mean_BTT = weights_BHTT.mean(dim=1)
        if add_identity:
            mean_BTT = (mean_BTT + torch.eye(mean_BTT.shape[-1], device=mean_BTT.device)) / 2
        rolled_BTT = mean_BTT if rolled_BTT is None else mean_BTT @ rolled_BTT
        yield weights_BHTT, rolled_BTT


def output_row(vit: ViT, x_BCYX: Tensor, matrix_BTT: Tensor, *, layers: int) -> Tensor:
    """The row of [B, T, T] that stands for the output, [B, T].

    That of the class token; without one the mean of the patches' rows, since their mean is what the head sees; with attention
    pooling the rows weighted by the pooling head's own attention, unless the last layers are left out of the matrix.
    """
    if vit.spec.uses_cls:
        return matrix_BTT[:, 0]
    if vit.spec.pool == "map" and layers == vit.spec.num_blocks:
        pooling_B1T = vit.pooling_weights(x_BCYX).mean(dim=1, keepdim=True).to(matrix_BTT.dtype)
        return (pooling_B1T @ matrix_BTT)[:, 0]
    return matrix_BTT[:, vit.spec.num_prefix :].mean(dim=1)


def on_grid(vit: ViT, x_BCYX: Tensor, row_BT: Tensor) -> Tensor:
    """One value per token as one per patch, [B, Y, X]."""
    grid = vit.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    return row_BT[:, vit.spec.num_prefix :].reshape(-1, *grid)


def _rolled(vit: ViT, x_BCYX: Tensor, layers: range, add_identity: bool) -> Tensor:
    weights = (weights_BHTT for _, weights_BHTT in vit.attention_layers(x_BCYX, layers=layers))
    return multiply_layers(weights, add_identity=add_identity)


def _checked_depth(vit: ViT, depth: int | None) -> int:
    if depth is not None and not 1 <= depth <= vit.spec.num_blocks:
        raise UsageError(f"depth must be from 1 to {vit.spec.num_blocks} layers, not {depth}")
    return depth or vit.spec.num_blocks
