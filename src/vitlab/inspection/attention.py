"""How attention is spread: its distance, its entropy, and what the class token and registers take of it.

Figure 7 (right) and Figure 11 of the paper, for any number of images in constant memory, and for whatever attends: ViTs,
AxialResNets along their lines, non-local blocks in a ResNet. Also where a unit of these looks from one place.
Letters: B batch, L layers, H heads, Q queries, T tokens, N patches, K keys that a query sees, S statistics, Y X grid.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.models.model import Model
from vitlab.models.results import AttentionLayer, AttentionMaps, GridAttention
from vitlab.models.spec import Pair
from vitlab.models.vit import ViT

_MOST_WEIGHTS = 2**25  # of one layer, held at once: 128 MB in float32, and as much again for what is computed from them


@dataclasses.dataclass(frozen=True)
class AttentionStatistics:
    """Means over the patches of all images as queries, per layer and head, in float64 on the CPU.

    The paper does not say what becomes of the class token in its distances, so both conventions are here.
    """

    distance_LH: Tensor  # pixels; class token and registers left out, and the rows renormalised
    distance_with_prefix_LH: Tensor  # pixels; left out too, the rows as short as that makes them: as mostly elsewhere
    entropy_LH: Tensor  # bits, over all keys; see uniform_entropy_L
    prefix_share_LH: Tensor  # 0 to 1: what goes to the class token and registers
    images: int
    layers: tuple[AttentionLayer, ...]  # with the grid of each
    uniform_distance_L: tuple[float, ...]  # pixels: the distance of a head that looks at all it can see alike

    @property
    def uniform_entropy_L(self) -> tuple[float, ...]:
        """Bits of a head that looks at all it can see alike: log2 of the keys, class token and registers included."""
        return tuple(math.log2(layer.num_keys) for layer in self.layers)

    @property
    def uniform_distance(self) -> float:
        """Of the first layer, as `stride` and `grid`; in a ViT, of every layer."""
        return self.uniform_distance_L[0]

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next; with a hybrid, those of its stem included."""
        return self.layers[0].stride

    @property
    def grid(self) -> Pair:
        return self.layers[0].grid


def attention_statistics(model: Model, batches: Iterable[Tensor], *, chunk: int | None = None) -> AttentionStatistics:
    """Distance, entropy and prefix share of every head, over batches [B, C, Y, X] of one image size.

    One layer of `chunk` images is in memory at a time, on the model's device; batches are taken one by one.
    """
    if not model.spec.attention_shape[0]:
        raise model.no_attention()
    place = next(model.parameters())
    layers: tuple[AttentionLayer, ...] = ()
    distances: list[Tensor] = []
    images, sums_LSH = 0, torch.zeros(())
    for batch_BCYX in batches:
        for x_BCYX in batch_BCYX.split(chunk or images_at_once(model, batch_BCYX)):
            here = model.attention_geometry((x_BCYX.shape[2], x_BCYX.shape[3]))
            if not layers:
                layers = here
                distances = [each.to(place.device, torch.float32) for each in _distances(layers)]
            if here != layers:
                grids = f"{layers[0].grid} and {here[0].grid}"
                raise UsageError(f"attention statistics need images of one size, not grids of {grids}")
            found = model.attention_on_grids(x_BCYX.to(place))
            sums = [_statistics(each.weights_BHQK, distances[each.index]).sum(dim=1) for each in found]
            sums_LSH = sums_LSH + torch.stack(sums).cpu().double()
            images += len(x_BCYX)
    if not images:
        raise UsageError("attention statistics need at least one image")
    distance, short, entropy, share = (sums_LSH / images).unbind(dim=1)
    uniform = tuple(distance_QK.mean().item() for distance_QK in _distances(layers))
    return AttentionStatistics(distance, short, entropy, share, images, layers, uniform)


def unit_maps(
    model: Model, x_BCYX: Tensor, place: tuple[float, float], units: Sequence[str] | None = None
) -> Iterator[tuple[AttentionLayer, Tensor]]:
    """Where each unit that attends looks from one place of the image, [B, Y, X] on its grid of keys; sums to 1.

    `place` is how far down and how far across, 0 to 1. The mean of the heads. A unit that attends along columns and then along
    rows reaches the whole grid in both together: the place's row of weights times the column of each place in that row, which
    is rollout within the unit. As there, what norms and values do in between is left out.
    """
    wanted = [i for i, layer in enumerate(_geometry(model, x_BCYX)) if units is None or layer.unit in units]
    along_columns: GridAttention | None = None
    for found in model.attention_on_grids(x_BCYX, layers=wanted):
        if found.layer.axis == 0:
            along_columns = found
            continue
        query = place_number(found.layer.grid, place)
        mean_BYX = found.maps([query])[:, :, 0].mean(dim=1)
        if along_columns is not None:
            row, cols = query // found.layer.grid[1], found.layer.grid[1]
            column_BXY = along_columns.weights_BHQK[:, :, row * cols : (row + 1) * cols].mean(dim=1)
            mean_BYX = column_BXY.mT * mean_BYX[:, row : row + 1]
            along_columns = None
        yield found.layer, mean_BYX


def place_number(grid: Pair, place: tuple[float, float]) -> int:
    """Which place of a grid lies so far down and across the image, in raster order."""
    row, col = (min(side - 1, int(share * side)) for share, side in zip(place, grid, strict=True))
    return row * grid[1] + col


def _geometry(model: Model, x_BCYX: Tensor) -> tuple[AttentionLayer, ...]:
    return model.attention_geometry((x_BCYX.shape[2], x_BCYX.shape[3]))


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


def layer_distances(layer: AttentionLayer) -> Tensor:
    """Distance in pixels from every query of a layer to the centre of each key that it sees, [Q, K] without the prefix."""
    if layer.pool == 1 and layer.axis is None:
        return patch_distances(layer.grid, layer.stride)
    query_places, key_places = ([_centres(side, pool) for side in layer.grid] for pool in (1, layer.pool))
    query_Q2, key_N2 = (torch.cartesian_prod(*places) * layer.stride for places in (query_places, key_places))
    return (query_Q2[:, None] - key_N2[layer.key_places()]).norm(dim=2)


def _distances(layers: Sequence[AttentionLayer]) -> list[Tensor]:
    """Of every layer; layers on the same grid share a table."""
    tables = {each: layer_distances(each) for each in {_shape(layer) for layer in layers}}
    return [tables[_shape(layer)] for layer in layers]


def _shape(layer: AttentionLayer) -> AttentionLayer:
    """All but the name."""
    return dataclasses.replace(layer, unit="")


def _centres(side: int, pool: int) -> Tensor:
    """The middle of each cell of `pool` places along a side; the last may have fewer."""
    first = torch.arange(0, side, pool).double()
    return (first + (first + pool - 1).clamp(max=side - 1)) / 2


def require_vit(model: Model) -> ViT:
    """The model as a ViT, plain, hybrid or axial; others have no tokens."""
    if not isinstance(model, ViT):
        raise model.no_attention()
    return model


def images_at_once(model: Model, x_BCYX: Tensor) -> int:
    """How many images may have their weights of one layer in memory."""
    queries_keys = [(math.prod(each.grid) + each.num_prefix) * each.num_keys for each in _geometry(model, x_BCYX)]
    return max(1, _MOST_WEIGHTS // max(1, model.spec.attention_shape[1] * max(queries_keys, default=0)))


def _statistics(weights_BHNT: Tensor, distance_NN: Tensor) -> Tensor:
    """Distance, distance of short rows, entropy and prefix share of patch queries, [S, B, H]."""
    patches_BHNN = weights_BHNT[..., -distance_NN.shape[1] :]
    share_BHN = patches_BHNN.sum(dim=-1)
    short_BHN = (patches_BHNN * distance_NN).sum(dim=-1)
    # A row that gives nothing to patches has no distance; it counts as 0, and not as NaN.
    distance_BHN = short_BHN / share_BHN.clamp(min=torch.finfo(share_BHN.dtype).tiny)
    entropy_BHN = torch.special.entr(weights_BHNT).sum(dim=-1) / math.log(2)
    return torch.stack([distance_BHN, short_BHN, entropy_BHN, 1 - share_BHN]).mean(dim=-1)
