"""Batch norm, whose running statistics are weights that no gradient trains.

They change in every forward pass in training mode. Two kinds of pass must leave them alone: that of a frozen layer, and
one that only recomputes activations. Letters: B batch, C channels, Y X rows and columns.
"""

import contextlib
from collections.abc import Generator

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError


class BatchNorm(nn.BatchNorm2d):
    """torch's, except that a frozen one keeps its statistics and uses them, as in evaluation.

    Frozen means that its gain needs no gradient: what is not trained must not drift with the images either.
    """

    updates_statistics = True  # off while activations are recomputed: a batch counts once

    def forward(self, input: Tensor) -> Tensor:  # nn.BatchNorm2d's own argument name
        x_BCYX, mean_C, variance_C, count = input, self.running_mean, self.running_var, self.num_batches_tracked
        assert mean_C is not None and variance_C is not None and count is not None and self.momentum is not None
        if not (self.training and self.weight.requires_grad):
            return F.batch_norm(x_BCYX, mean_C, variance_C, self.weight, self.bias, eps=self.eps)
        if x_BCYX.numel() == x_BCYX.shape[1]:
            raise UsageError(
                "batch norm cannot be trained on one image whose features are a single position: it has no variance",
                hint="Take larger images (data.image_size), or more of them at once (train.batch_size, train.micro_batch).",
            )
        if self.updates_statistics:
            count.add_(1)
        else:  # the same operation, so that autograd keeps the same tensors
            mean_C, variance_C = mean_C.clone(), variance_C.clone()
        return F.batch_norm(x_BCYX, mean_C, variance_C, self.weight, self.bias, True, self.momentum, self.eps)


@contextlib.contextmanager
def kept_statistics(module: nn.Module) -> Generator[None]:
    """Forward passes of `module` in training mode that leave its running statistics alone."""
    norms = [norm for norm in module.modules() if isinstance(norm, BatchNorm)]
    for norm in norms:
        norm.updates_statistics = False
    try:
        yield
    finally:
        for norm in norms:
            norm.updates_statistics = True
