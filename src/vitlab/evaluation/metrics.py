"""Numbers that say how good a classifier is. Letters: B batch, K classes."""

import math

import torch
from torch import Tensor


def count_correct(logits_BK: Tensor, targets: Tensor, k: int) -> int:
    """How many images have a label among the `k` highest scores; of equal scores the lower index wins, as in argmax.

    `targets` are class numbers [B], or zeros and ones [B, K] where an image may have several labels.
    """
    order_Bk = logits_BK.argsort(dim=1, descending=True, stable=True)[:, :k]
    if targets.ndim == 2:
        return int((targets.gather(1, order_Bk) > 0).any(dim=1).sum())
    return int((order_Bk == targets[:, None]).any(dim=1).sum())


def mean_average_precision(logits_BK: Tensor, targets_BK: Tensor) -> float:
    """Mean over the classes that occur of the average precision: the mean, over a class's images, of the share of that class
    among all images scored at least as high."""
    values: list[Tensor] = []
    for score_B, truth_B in zip(logits_BK.T.double(), targets_BK.T > 0, strict=True):
        if truth_B.any():
            # Equal scores cannot be told apart, so they count as one step of the ranking.
            levels, place_B = score_B.neg().unique(return_inverse=True)
            hits = torch.bincount(place_B, weights=truth_B.double(), minlength=len(levels))
            seen = torch.bincount(place_B, minlength=len(levels)).cumsum(0)
            values.append((hits * hits.cumsum(0) / seen).sum() / truth_B.sum())
    return float(torch.stack(values).mean()) if values else math.nan


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
