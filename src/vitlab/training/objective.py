"""Losses. Letters: B batch, K classes."""

import torch.nn.functional as F
from torch import Tensor


def softmax_cross_entropy(logits_BK: Tensor, labels_B: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean over the batch of -Σ y·log ŷ. A zero-initialised head gives exactly ln K at step 0."""
    return F.cross_entropy(logits_BK, labels_B, label_smoothing=label_smoothing)
