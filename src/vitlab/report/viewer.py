"""The attention viewer: every head of every layer from every patch, inside the page; `viewer.js` unpacks and draws it.

The softmax weights of a layer are packed in three steps, which the script undoes from the last to the first.

1. Cells. Large grids are pooled: queries are averaged over cells of patches and keys summed, so that rows still sum to 1.
2. Levels. Let r be a weight in units of the equal share 1/K. Level k stands for `OFFSET * (exp(k * STEP) / cosh(STEP / 2) - 1)`
   (level 0 for none): steps of r that are nearly even below `OFFSET`, and grow with r above. No weight is further from its
   level than `ERROR * (r + OFFSET)`: 5 % of itself and 0.15 of the equal share.
3. Order. Levels are sorted by what their neighbours (the query and the key before, in the row and in the column) make one
   expect, and deflated in runs: after equal expectations follow alike levels, so that each segment has short codes of its own.

On photos, DINOv2 ViT-S/14 takes 0.2 bytes a weight, and 0.27 as the page's base64. A lossless WebP of the same levels is a
fifth larger, and plain deflate a third. Besides, WebP has to be read back from a canvas, to which several browsers add noise.

Letters: H heads, T tokens, Q queries, K keys, Y X rows and columns.
"""

import base64
import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.inspection.colours import table
from vitlab.models.spec import Pair

Array = np.ndarray[Any, Any]

ERROR, OFFSET = 0.05, 3.0
STEP = math.log((1 + ERROR) / (1 - ERROR))  # so wide that the harmonic middle of a level is ERROR from both of its ends
EXPECTATIONS = 128  # by which levels are sorted; greater ones share the last
QUERY_WEIGHT = 2  # in an expectation: neighbouring queries are more alike than neighbouring keys
_VALUES = 46_000_000  # of a model in a page, some 12 MB
_LAYER_VALUES = 4_000_000  # of a layer of one photo, which a phone unpacks at once
_MOST_QUERY_CELL = 3  # times the side of a key's: maps should be sharp, and one has to be able to aim
_COLOURS = "ember"

CAPTION = (
    "Point at a patch, or tap it, to see where every head of every layer looks from there. Colour is the share of that token's "
    "attention; what gets no more than an equal share stays uncoloured. A map shows what one head collects, and does not "
    "prove what the answer depends on: later layers may use it or not."
)


class Cell(NamedTuple):
    """Sides of the squares of patches that are taken together."""

    query: int
    key: int


PATCHES = Cell(1, 1)  # none are taken together


@dataclasses.dataclass(frozen=True)
class ViewedModel:
    """A model whose attention is shown; `grid` is that of its patches, before they are pooled to cells."""

    name: str
    layers: tuple[int, ...]  # block indices
    heads: int
    prefix: tuple[str, ...]  # "cls", "register0" and so on
    grid: Pair
    cell: Cell = PATCHES

    @property
    def queries(self) -> Pair:
        return _cells(self.grid, self.cell.query)

    @property
    def keys(self) -> Pair:
        return _cells(self.grid, self.cell.key)

    @property
    def equal_share(self) -> float:
        """What a cell of keys gets where attention is uniform."""
        return self.cell.key**2 / (len(self.prefix) + math.prod(self.grid))

    @property
    def stored_share(self) -> float:
        """The unit of the levels: an equal share of what is stored."""
        return 1 / (len(self.prefix) + math.prod(self.keys))


@dataclasses.dataclass(frozen=True)
class PhotoAttention:
    """What a model made of a photo: its likeliest classes, and a `pack_attention` for each of its layers."""

    predictions: tuple[tuple[str, float], ...]
    layers: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class ViewedPhoto:
    """What the models saw of a photo, no more; it may be sharper than it was for them."""

    name: str
    picture: bytes  # JPEG or PNG
    attention: tuple[PhotoAttention, ...]  # one per model
    label: str = ""  # the true class, where it is known
    second: bytes | None = None  # of the second model, where it saw another part of the photo, or another shape


@dataclasses.dataclass(frozen=True)
class Viewer:
    """A section of the page, with one model or with two beside each other."""

    title: str
    caption: str
    models: Sequence[ViewedModel]
    photos: Sequence[ViewedPhoto]

    @property
    def settings(self) -> str:
        """What the script needs to know, as JSON."""
        return json.dumps(
            {
                "models": [_described(model) for model in self.models],
                "photos": [
                    {"name": one.name, "label": one.label, "predictions": [each.predictions for each in one.attention]}
                    for one in self.photos
                ],
                "colours": base64.b64encode(table(_COLOURS).tobytes()).decode(),
                **{"step": STEP, "offset": OFFSET, "expectations": EXPECTATIONS, "queryWeight": QUERY_WEIGHT},
            }
        )

    @property
    def remarks(self) -> list[str]:
        """How exact the shares are, and what was pooled; the same for both models, once."""
        remarks = [_remark(model) for model in self.models]
        if len(set(remarks)) == 1:
            return remarks[:1]
        return [f"{model.name}: {remark}" for model, remark in zip(self.models, remarks, strict=True)]

    def packed(self) -> Iterator[tuple[str, str]]:
        """The layers as base64, each with the places of its photo, its model and itself."""
        for i, photo in enumerate(self.photos):
            for j, attention in enumerate(photo.attention):
                for k, layer in enumerate(attention.layers):
                    yield f"{i} {j} {k}", base64.b64encode(layer).decode()


def pack_attention(weights_HTT: Tensor, grid: Pair, num_prefix: int, cell: Cell = PATCHES) -> bytes:
    """The softmax weights of one layer for one photo, for `PhotoAttention.layers`."""
    queries, keys = _cells(grid, cell.query), _cells(grid, cell.key)
    level_HQK = to_levels(pool(weights_HTT.detach().float().cpu(), grid, num_prefix, cell).numpy())
    patches = level_HQK[:, num_prefix:, num_prefix:].reshape(-1, *queries, *keys)
    order, counts = _sort_by_expectation(patches)
    # Matches, which are slow to find, would not make it smaller.
    data = zlib.compressobj(strategy=zlib.Z_RLE, memLevel=7)
    parts = [
        counts.astype("<u4"),
        patches.ravel()[order],
        level_HQK[:, num_prefix:, :num_prefix].ravel(),
        level_HQK[:, :num_prefix].ravel(),
    ]
    return b"".join([*(data.compress(part.tobytes()) for part in parts), data.flush()])


def cell_size(model: ViewedModel, photos: int, *, models: int = 1) -> Cell:
    """The cells that keep a page of `photos` and `models` small enough: none but single patches where that can be.

    Cells of queries grow first, since those of keys are what one sees.
    """
    most = min(_VALUES // max(1, models * photos * len(model.layers)), _LAYER_VALUES) // model.heads
    sides = range(1, max(model.grid) + 1)
    choices = [
        Cell(query, key) for key, query in itertools.product(sides, sides) if key <= query <= _MOST_QUERY_CELL * key
    ]
    fitting = [cell for cell in choices if _stored(model, cell) <= most]
    return min(fitting or choices[-1:], key=lambda cell: (cell.query * cell.key**2, cell.query))


def pool(weights_HTT: Tensor, grid: Pair, num_prefix: int, cell: Cell) -> Tensor:
    """Queries averaged over their cells and keys summed, [H, Q, K]; prefix tokens stay as they are."""
    for dim, side in ((1, cell.query), (2, cell.key)):
        if side == 1:
            continue
        rows, cols = (torch.arange(size) // side for size in grid)
        cell_N = (rows[:, None] * _cells(grid, side)[1] + cols).flatten()
        place_T = torch.cat([torch.arange(num_prefix), num_prefix + cell_N])
        size = list(weights_HTT.shape)
        size[dim] = num_prefix + math.prod(_cells(grid, side))
        summed = weights_HTT.new_zeros(size).index_add_(dim, place_T, weights_HTT)
        weights_HTT = summed / place_T.bincount()[:, None] if dim == 1 else summed
    return weights_HTT


def to_levels(weights_HQK: Array) -> Array:
    return np.rint(np.log1p(weights_HQK * (weights_HQK.shape[-1] / OFFSET)) / STEP).astype(np.uint8)


def _sort_by_expectation(levels_HYXYX: Array) -> tuple[Array, Array]:
    """The order in which levels are stored, and how many have each expectation.

    The script, which has the neighbours by the time, knows from which segment to take the next one.
    """
    expected = np.zeros(levels_HYXYX.shape, np.uint16)
    for axis in range(1, 5):
        after, before = ([slice(None)] * 5 for _ in range(2))
        after[axis], before[axis] = slice(1, None), slice(-1)
        weight = QUERY_WEIGHT if axis <= 2 else 1
        expected[tuple(after)] += weight * levels_HYXYX[tuple(before)].astype(np.uint16)
    expected = np.minimum(expected, EXPECTATIONS - 1).astype(np.uint8).ravel()
    return np.argsort(expected, kind="stable"), np.bincount(expected, minlength=EXPECTATIONS)


def _described(model: ViewedModel) -> dict[str, Any]:
    return {
        **{name: getattr(model, name) for name in ("name", "layers", "heads", "prefix", "grid", "queries", "keys")},
        **{"queryCell": model.cell.query, "keyCell": model.cell.key},
        **{"equal": model.equal_share, "unit": model.stored_share},
    }


def _remark(model: ViewedModel) -> str:
    points = 100 * ERROR * OFFSET * model.stored_share
    remark = f"Shares are exact to {100 * ERROR:.0f} % of themselves plus {points:.2g} percentage points."
    query, key = model.cell
    if query > 1 or key > 1:
        keys = f"keys in cells of {key}x{key} (summed)" if key > 1 else "keys are single patches"
        remark += f" To keep the file small, queries are taken together in cells of {query}x{query} patches (averaged), {keys}."
    return remark


def _cells(grid: Pair, side: int) -> Pair:
    return -(-grid[0] // side), -(-grid[1] // side)


def _stored(model: ViewedModel, cell: Cell) -> int:
    """Weights of one head of one layer, once pooled."""
    queries, keys = (len(model.prefix) + math.prod(_cells(model.grid, side)) for side in cell)
    return queries * keys
