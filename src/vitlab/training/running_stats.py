"""Running statistics in training: the buffers of batch norm, which a forward pass changes and no optimiser knows.

A step that is not taken must leave them as they were, and among several processes they must be the same everywhere: each has
seen other images. Models without batch norm have none, and nothing here does anything for them.
"""

# pyright: reportPrivateImportUsage=false
# torch's operations on many tensors at once, `_foreach_...`, have private names only.

import contextlib
from collections.abc import Generator

import torch
from torch import nn

from vitlab.core.dist import World


class RunningStats:
    """The buffers of a model, which stay where they are: compiled graphs hold on to their addresses."""

    def __init__(self, model: nn.Module | None = None) -> None:
        buffers = [] if model is None else list(model.buffers())
        self._stats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._counts = [buffer for buffer in buffers if not buffer.is_floating_point()]  # of batches
        self._before = [torch.empty_like(buffer) for buffer in (*self._stats, *self._counts)]

    def __bool__(self) -> bool:
        return bool(self._before)

    @torch.no_grad()
    def remember(self) -> None:
        """Before a step: what `undo` goes back to."""
        if self:
            torch._foreach_copy_(self._before, [*self._stats, *self._counts])

    @torch.no_grad()
    def undo(self) -> None:
        """As they were when last remembered. A batch with an infinity in it would stay in them for good."""
        if self:
            torch._foreach_copy_([*self._stats, *self._counts], self._before)

    @contextlib.contextmanager
    def preserved(self) -> Generator[None]:
        """For forward passes that are only tried: afterwards nothing is left of them."""
        self.remember()
        try:
            yield
        finally:
            self.undo()

    @torch.no_grad()
    def average(self, world: World) -> None:
        """The mean over all processes, in all of them: each normalises by its own images."""
        if not self or world.size == 1:
            return
        flat = world.all_reduce_mean(torch.cat([stat.flatten() for stat in self._stats]))
        pieces = flat.split([stat.numel() for stat in self._stats])
        torch._foreach_copy_(
            self._stats, [piece.view_as(stat) for piece, stat in zip(pieces, self._stats, strict=True)]
        )
