"""The order of training examples: a pure function of (seed, step).

So a run can resume at any step, on any number of ranks. Letters: B batch, K classes.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from vitlab.core import draws
from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator

# Purposes of random numbers: they keep these apart from other uses of the same seed.
_SHUFFLING, _CLASS_DRAWING = 1, 4


class Places(NamedTuple):
    """The examples of a batch: which image, in which epoch, which repetition."""

    ids: Tensor  # int64 [B]
    epochs: Tensor  # int64 [B]
    copies: Tensor  # int64 [B]; 0 unless augmentation is repeated, and another for every draw of balanced classes


@dataclasses.dataclass(frozen=True)
class Order:
    """An endless stream of examples, cut into batches; epochs follow without a gap.

    `repeats` > 1 shows each image so many times in a row, augmented differently each time (repeated augmentation). `balanced`
    draws every class equally often, with replacement, instead of shuffling; it needs `labels`, one per image.
    """

    size: int
    batch_size: int
    seed: int
    repeats: int = 1
    balanced: bool = False
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch_size < 1 or self.repeats < 1:
            raise UsageError(f"an order needs images, a batch size and repeats of at least 1, not {self.size}")
        if self.balanced and (self.labels is None or len(self.labels) != self.size):
            raise UsageError("balanced classes need one label per image")

    def batch(self, step: int) -> Places:
        """The whole batch of `step`, over all ranks."""
        position_B = torch.arange(step * self.batch_size, (step + 1) * self.batch_size)
        # The turn is an example's position in the stream without repetitions.
        turn_B, copy_B = position_B // self.repeats, position_B % self.repeats
        epoch_B = turn_B // self.size
        if self.balanced:
            return Places(self._draw(turn_B), epoch_B, position_B)  # drawn twice in an epoch, augmented twice
        ids_B = torch.empty_like(turn_B)
        for epoch in epoch_B.unique().tolist():
            here_B = epoch_B == epoch
            ids_B[here_B] = _shuffled(self.size, self.seed, epoch)[turn_B[here_B] % self.size]
        return Places(ids_B, epoch_B, copy_B)

    def _draw(self, turn_B: Tensor) -> Tensor:
        """A class, then one of its images, both from the number of the turn."""
        by_class, counts_K, starts_K = self._images_by_class
        u_B2 = draws.uniform(self.seed, _CLASS_DRAWING, turn_B, count=2).double()
        present = counts_K.nonzero()[:, 0]
        class_B = present[(u_B2[:, 0] * len(present)).long()]
        return by_class[starts_K[class_B] + (u_B2[:, 1] * counts_K[class_B]).long()]

    @functools.cached_property
    def _images_by_class(self) -> tuple[Tensor, Tensor, Tensor]:
        """Images ordered by class, how many each class has, and where in that order it begins."""
        assert self.labels is not None
        counts_K = torch.bincount(self.labels)
        return self.labels.argsort(stable=True), counts_K, counts_K.cumsum(0) - counts_K


def rank_part(places: Places, rank: int, world: int) -> Places:
    """The consecutive share of one rank; an error where ranks cannot share evenly."""
    if len(places.ids) % world:
        raise UsageError(f"a batch of {len(places.ids)} cannot be shared evenly by {world} processes")
    share = len(places.ids) // world
    return Places(*(part[rank * share : (rank + 1) * share] for part in places))


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _shuffled(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=generator(seed, _SHUFFLING, epoch))
