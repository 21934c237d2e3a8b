"""Attention rollout: attention followed through the layers, from the output to the patches (paper D.8).

Streams: never more than one layer's weights of a few images are in memory. Letters: B batch, H heads, T tokens, Y X grid.
"""

import collections
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
    rolled = _rolled_parts(require_vit(model), x_BCYX, add_identity, depth, chunk)
    return torch.cat([matrix_BTT for _, matrix_BTT in rolled])


def rollout_rows(
    model: Model, x_BCYX: Tensor, *, add_identity: bool = True, depth: int | None = None, chunk: int | None = None
) -> Tensor:
    """The output's row of the rollout on the patch grid, [B, Y, X]: what `output_row` chooses, without prefix tokens."""
    vit = require_vit(model)
    rolled = _rolled_parts(vit, x_BCYX, add_identity, depth, chunk)
    layers = depth or vit.spec.num_blocks
    rows = [output_row(vit, part_BCYX, matrix_BTT, layers=layers) for part_BCYX, matrix_BTT in rolled]
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
    last = collections.deque(rolled_layers(layers, add_identity=add_identity), maxlen=1)
    if not last:
        raise UsageError("rollout needs at least one layer")
    return last[0][1]


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


def _rolled_parts(
    vit: ViT, x_BCYX: Tensor, add_identity: bool, depth: int | None, chunk: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """A few images at a time, with their rollout [B, T, T] through the first `depth` layers."""
    if depth is not None and not 1 <= depth <= vit.spec.num_blocks:
        raise UsageError(f"depth must be from 1 to {vit.spec.num_blocks} layers, not {depth}")
    for part_BCYX in x_BCYX.split(chunk or images_at_once(vit, x_BCYX)):
        layers = vit.attention_layers(part_BCYX, layers=range(depth or vit.spec.num_blocks))
        yield part_BCYX, multiply_layers((weights for _, weights in layers), add_identity=add_identity)
