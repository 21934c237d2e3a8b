"""How attention is spread: its distance, its entropy, and what the class token and registers take of it.

Figure 7 (right) and Figure 11 of the paper, for any number of images in constant memory.
Letters: B batch, L layers, H heads, Q queries, T tokens, N patches, S statistics.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.models.model import Model
from vitlab.models.results import AttentionMaps
from vitlab.models.spec import Pair
from vitlab.models.vit import ViT

_MOST_WEIGHTS = 2**25  # of one layer, held at once: 128 MB in float32, and as much again for what is computed from them


@dataclasses.dataclass(frozen=True)
class AttentionStatistics:
    """Means over the patches of all images as queries, per layer and head, in float64 on the CPU.

    The paper does not say what becomes of the class token in its distances, so both conventions are here.
    """

    distance_LH: Tensor  # pixels; class token and registers left out, and the rows renormalised
    distance_with_prefix_LH: (
        Tensor  # pixels; left out too, rows as short as that makes them: the usual re-implementation
    )
    entropy_LH: Tensor  # bits, over all tokens; log2(tokens) if all get the same
    prefix_share_LH: Tensor  # 0 to 1: what goes to the class token and registers
    images: int
    uniform_distance: float  # pixels: the distance of a head that looks everywhere alike
    stride: int  # pixels from one patch to the next; with a hybrid, those of its stem included
    grid: Pair


def attention_statistics(model: Model, batches: Iterable[Tensor], *, chunk: int | None = None) -> AttentionStatistics:
    """Distance, entropy and prefix share of every head, over batches [B, C, Y, X] of one image size.

    One layer of `chunk` images is in memory at a time, on the model's device; batches are taken one by one.
    """
    vit = require_vit(model)
    place = next(vit.parameters())
    grid: Pair | None = None
    distance_NN = torch.empty(0)
    images, sums_LSH = 0, torch.zeros(())
    for batch_BCYX in batches:
        for x_BCYX in batch_BCYX.split(chunk or images_at_once(vit, batch_BCYX)):
            size = vit.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
            if grid is None:
                grid, distance_NN = size, patch_distances(size, vit.spec.stride).to(place.device, torch.float32)
            if size != grid:
                raise UsageError(f"attention statistics need images of one size, not grids of {grid} and {size}")
            layers = vit.attention_layers(x_BCYX.to(place), queries="patches")
            sums = [_statistics(weights_BHNT, distance_NN).sum(dim=1) for _, weights_BHNT in layers]
            sums_LSH = sums_LSH + torch.stack(sums).cpu().double()
            images += len(x_BCYX)
    if grid is None or not images:
        raise UsageError("attention statistics need at least one image")
    distance, short, entropy, share = (sums_LSH / images).unbind(dim=1)
    uniform = patch_distances(grid, vit.spec.stride).mean().item()
    return AttentionStatistics(distance, short, entropy, share, images, uniform, vit.spec.stride, grid)


def mean_attention_distance(
    maps: AttentionMaps, stride: int, *, prefix: Literal["renormalise", "drop"] = "renormalise"
) -> dict[int, Tensor]:
    """Mean attention distance in pixels, per layer and head [H], of weights that are there already.

    `renormalise` leaves out the class token and registers and lets the rows sum to 1 again; `drop` leaves them short.
    """
    if maps.queries != tuple(range(len(maps.tokens))):
        raise UsageError("attention distance needs the weights of every query token")
    distance_NN = patch_distances(maps.grid, stride)
    result: dict[int, Tensor] = {}
    for layer, weights_BHTT in maps.layers.items():
        found_SBH = _statistics(weights_BHTT[:, :, maps.num_prefix :], distance_NN.to(weights_BHTT))
        result[layer] = found_SBH[("renormalise", "drop").index(prefix)].mean(dim=0)
    return result


def patch_distances(grid: Pair, stride: int) -> Tensor:
    """Distance in pixels between the centres of every two patches, [N, N]."""
    row = torch.arange(grid[0]).repeat_interleave(grid[1])
    col = torch.arange(grid[1]).repeat(grid[0])
    place_N2 = torch.stack([row, col], dim=1).double() * stride
    return torch.cdist(place_N2, place_N2)


def require_vit(model: Model) -> ViT:
    """The model as a ViT, plain, hybrid or axial; others have no attention."""
    if not isinstance(model, ViT):
        raise model.no_attention()
    return model


def images_at_once(vit: ViT, x_BCYX: Tensor) -> int:
    """How many images may have their weights of one layer in memory."""
    rows, cols = vit.spec.grid_for((x_BCYX.shape[2], x_BCYX.shape[3]))
    return max(1, _MOST_WEIGHTS // (vit.spec.heads * (rows * cols + vit.spec.num_prefix) ** 2))


def _statistics(weights_BHNT: Tensor, distance_NN: Tensor) -> Tensor:
    """Distance, distance of short rows, entropy and prefix share of patch queries, [S, B, H]."""
    patches_BHNN = weights_BHNT[..., -len(distance_NN) :]
    share_BHN = patches_BHNN.sum(dim=-1)
    short_BHN = (patches_BHNN * distance_NN).sum(dim=-1)
    # A row that gives nothing to patches has no distance; it counts as 0, and not as NaN.
    distance_BHN = short_BHN / share_BHN.clamp(min=torch.finfo(share_BHN.dtype).tiny)
    entropy_BHN = torch.special.entr(weights_BHNT).sum(dim=-1) / math.log(2)
    return torch.stack([distance_BHN, short_BHN, entropy_BHN, 1 - share_BHN]).mean(dim=-1)
