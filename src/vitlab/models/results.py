"""Results of `model.features` and `model.attention`, with grid and token names.

So that nobody writes `[:, 1:]` and `14` by hand. Letters: B batch, H heads, Q queries, T tokens, D width, N patches.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.models.spec import Pair, TokenKind

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


def token_names(uses_cls: bool, registers: int, grid: Pair) -> tuple[str, ...]:
    """`cls`, `register0` ..., then `patch(row,col)` in raster order."""
    names = ["cls"] * uses_cls + [f"register{i}" for i in range(registers)]
    return (*names, *(f"patch({row},{col})" for row in range(grid[0]) for col in range(grid[1])))


def require_images(x: Tensor, channels: int) -> None:
    """The one check on what a model is called with."""
    if x.ndim != 4 or x.shape[1] != channels:
        raise UsageError(f"the model wants images [batch, {channels}, rows, columns], not {list(x.shape)}")


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
