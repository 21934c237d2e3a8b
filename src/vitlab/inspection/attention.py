"""Attention rollout and mean attention distance (appendix D.7 and D.8).

Letters: B batch, H heads, T tokens, Y X grid rows and columns.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.models.model import Model
from vitlab.models.results import AttentionMaps
from vitlab.models.spec import Pair


def rollout(maps: AttentionMaps, *, add_identity: bool = True) -> Tensor:
    """Attention from the output tokens to the input tokens, [B, T, T]; rows sum to 1.

    Heads are averaged and the layers' matrices multiplied. The residual path is half of every layer (Abnar & Zuidema), which
    the paper's sentence leaves out and the method it cites includes: `add_identity=False` follows the sentence.
    """
    if len(maps.queries) != len(maps.tokens):
        raise UsageError("rollout needs the weights of every query token", hint="Call model.attention(queries='all').")
    rolled_BTT: Tensor | None = None
    for _, weights_BHTT in sorted(maps.layers.items()):
        mean_BTT = weights_BHTT.mean(dim=1)
        if add_identity:
            mean_BTT = (mean_BTT + torch.eye(mean_BTT.shape[-1], device=mean_BTT.device)) / 2
        rolled_BTT = mean_BTT if rolled_BTT is None else mean_BTT @ rolled_BTT
    if rolled_BTT is None:
        raise UsageError("rollout needs at least one layer")
    return rolled_BTT


def rollout_heat(model: Model, x_BCYX: Tensor, *, chunk: int | None = None) -> Tensor:
    """Rollout of the class token (or the mean patch) over the patches, [B, Y, X].

    Scaled so that the strongest patch of each image is 1.
    """
    maps = model.attention(x_BCYX, chunk=chunk)
    rolled_BTT = rollout(maps)
    source_BT = rolled_BTT[:, 0] if maps.tokens[0] == "cls" else rolled_BTT[:, maps.num_prefix :].mean(dim=1)
    heat_BYX = source_BT[:, maps.num_prefix :].reshape(-1, *maps.grid)
    return heat_BYX / heat_BYX.amax(dim=(1, 2), keepdim=True)


def upsample_heat(heat_BYX: Tensor, size: Pair) -> Tensor:
    """The grid as a smooth picture of `size`, still at most 1."""
    return F.interpolate(heat_BYX[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def mean_attention_distance(
    maps: AttentionMaps, stride: int, *, prefix: Literal["renormalise", "drop"] = "renormalise"
) -> dict[int, Tensor]:
    """Mean attention distance in pixels, per layer and head [H] (Figure 7, right).

    The paper does not say what becomes of the class token. `renormalise` drops its row and column and lets rows sum to 1
    again; `drop` leaves them short, as the common re-implementation does.
    """
    if maps.queries != tuple(range(len(maps.tokens))):
        raise UsageError("attention distance needs the weights of every query token")
    distance_NN = patch_distances(maps.grid, stride)
    result: dict[int, Tensor] = {}
    for layer, weights_BHTT in maps.layers.items():
        patches_BHNN = weights_BHTT[:, :, maps.num_prefix :, maps.num_prefix :]
        if prefix == "renormalise":
            patches_BHNN = patches_BHNN / patches_BHNN.sum(dim=-1, keepdim=True)
        result[layer] = (patches_BHNN * distance_NN.to(patches_BHNN)).sum(dim=-1).mean(dim=(0, 2))
    return result


def patch_distances(grid: Pair, stride: int) -> Tensor:
    """Distance in pixels between the centres of every two patches, [N, N]."""
    row = torch.arange(grid[0]).repeat_interleave(grid[1])
    col = torch.arange(grid[1]).repeat(grid[0])
    place_N2 = torch.stack([row, col], dim=1).double() * stride
    return torch.cdist(place_N2, place_N2)
