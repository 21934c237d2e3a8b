"""Which examples a step sees: a pure function of (seed, step), so a run can stop and resume anywhere."""

import torch
from torch import Tensor

from vitlab.core.runtime import generator

_ORDER = 1  # keeps the shuffling apart from other uses of the same seed


def batch_indices(dataset_size: int, batch_size: int, step: int, seed: int) -> Tensor:
    """Indices of batch `step`. Epochs follow each other without a gap: every example is seen once before any is seen twice."""
    first = step * batch_size
    parts: list[Tensor] = []
    while first < (step + 1) * batch_size:
        epoch, offset = divmod(first, dataset_size)
        order = torch.randperm(dataset_size, generator=generator(seed, _ORDER, epoch))
        part = order[offset : offset + (step + 1) * batch_size - first]
        parts.append(part)
        first += len(part)
    return torch.cat(parts)
