"""Results of `model.features` and `model.attention`, with grid and token names.

So that nobody writes `[:, 1:]` and `14` by hand. Letters: B batch, H heads, Q queries, T tokens, D width, N patches,
K keys that a query sees, Y X rows and columns of keys.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.models.spec import Pair, TokenKind, strided

Queries = Literal["all", "cls", "patches"] | Sequence[int]  # tokens whose attention is wanted


@dataclasses.dataclass(frozen=True)
class Features:
    """Representations by layer: [B, D], or [B, N, D] for `patches` in row order."""

    layers: dict[int, Tensor]  # by the number of the block
    tokens: TokenKind  # which of them these are
    grids: dict[int, Pair]  # rows and columns of patches, by layer

    @property
    def last(self) -> Tensor:
        """Those of the deepest layer."""
        return self.layers[max(self.layers)]

    @property
    def grid(self) -> Pair:
        """Rows and columns of patches of the deepest layer."""
        return self.grids[max(self.grids)]


@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """Softmax weights by layer, [B, H, Q, T]; `tokens` names the T columns."""

    layers: dict[int, Tensor]  # by the number of the block
    heads: tuple[int, ...]  # the H
    queries: tuple[int, ...]  # the Q, as numbers of tokens
    tokens: tuple[str, ...]  # cls, register0, ..., patch(0,0), ...
    grid: Pair  # rows and columns of patches

    @property
    def num_prefix(self) -> int:
        """How many tokens come before the patches."""
        return len(self.tokens) - self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """Where queries and keys of one attention layer lie on the image: grids may shrink from layer to layer."""

    unit: str  # where it stands, as on the tape: block03, stage1/unit01
    grid: Pair  # rows and columns of the queries
    stride: int  # pixels from one query to the next
    pool: int = 1  # side of the cells of places that a key stands for; those at the edge may be smaller
    axis: int | None = None  # 0: a place sees its own column alone; 1: its row; None: every key
    num_prefix: int = 0  # keys before those on the grid: class token and registers

    @property
    def name(self) -> str:
        """The unit, and which of its two directions this is."""
        return self.unit if self.axis is None else f"{self.unit}/{('down', 'across')[self.axis]}"

    @property
    def key_grid(self) -> Pair:
        return strided(self.grid, self.pool)

    @property
    def num_keys(self) -> int:
        """How many keys a query sees, K."""
        return self.num_prefix + (math.prod(self.key_grid) if self.axis is None else self.key_grid[self.axis])

    def key_places(self) -> Tensor:
        """Which keys each query sees, [Q, K] without the prefix: their numbers on `key_grid` in raster order."""
        (rows, cols), (key_rows, key_cols) = self.grid, self.key_grid
        row_Q1 = torch.arange(rows).repeat_interleave(cols)[:, None]
        col_Q1 = torch.arange(cols).repeat(rows)[:, None]
        if self.axis is None:
            return torch.arange(key_rows * key_cols).expand(rows * cols, -1)
        return torch.arange(key_rows) * cols + col_Q1 if self.axis == 0 else row_Q1 * cols + torch.arange(key_cols)


@dataclasses.dataclass(frozen=True)
class GridAttention:
    """Softmax weights of one attention layer, from every place on its grid to the keys that this place sees."""

    index: int  # of the layer, among all that attend
    layer: AttentionLayer
    heads: tuple[int, ...]  # the H
    weights_BHQK: Tensor  # rows sum to 1

    def maps(self, queries: Sequence[int]) -> Tensor:
        """The weights of chosen queries on the grid of keys, [B, H, Q, Y, X]; zero where they cannot look."""
        chosen_BHQK = self.weights_BHQK[:, :, list(queries), self.layer.num_prefix :]
        places_QK = self.layer.key_places()[list(queries)].to(chosen_BHQK.device)
        rows, cols = self.layer.key_grid
        zeros_BHQN = chosen_BHQK.new_zeros(*chosen_BHQK.shape[:3], rows * cols)
        return zeros_BHQN.scatter(-1, places_QK.expand_as(chosen_BHQK), chosen_BHQK).unflatten(-1, (rows, cols))


def token_names(uses_cls: bool, registers: int, grid: Pair) -> tuple[str, ...]:
    """`cls`, `register0` ..., then `patch(row,col)` in raster order."""
    names = ["cls"] * uses_cls + [f"register{i}" for i in range(registers)]
    return (*names, *(f"patch({row},{col})" for row in range(grid[0]) for col in range(grid[1])))


def require_images(x: Tensor, channels: int) -> None:
    """The one check on what a model is called with."""
    if x.ndim != 4 or x.shape[1] != channels:
        raise UsageError(f"the model needs images [batch, {channels}, rows, columns], not {list(x.shape)}")


def resolve_indices(wanted: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    """Indices from either end, as sorted non-negative ones; `None` means all."""
    if wanted is None:
        return tuple(range(count))
    if not isinstance(wanted, Sequence) or not wanted or not all(isinstance(index, int) for index in wanted):
        raise UsageError(f"which {what}s? Give a list of whole numbers, such as [0, -1], not {wanted!r}")
    for index in wanted:
        if not -count <= index < count:
            raise UsageError(
                f"there is no {what} {index}: this model has {count}", hint=f"Use {-count} to {count - 1}."
            )
    return tuple(sorted({index % count for index in wanted}))
