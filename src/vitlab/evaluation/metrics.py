"""Numbers that say how good a classifier is. Letters: B batch, K classes."""

import math

import torch
from torch import Tensor


def count_correct(logits_BK: Tensor, labels_B: Tensor, k: int) -> int:
    """How many labels are among the `k` highest scores; of equal scores the lower index wins, as in argmax."""
    order_BK = logits_BK.argsort(dim=1, descending=True, stable=True)[:, :k]
    return int((order_BK == labels_B[:, None]).any(dim=1).sum())


def confusion_matrix(predicted_B: Tensor, labels_B: Tensor, num_classes: int) -> Tensor:
    """[K, K] counts: rows are the truth, columns the answer."""
    flat = torch.bincount(labels_B * num_classes + predicted_B, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)


def wilson_interval(correct: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of an accuracy (Wilson 1927), which stays inside 0 to 1 even for a perfect score."""
    p = correct / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)
