"""Numbers that say how good a classifier is. Letters: B batch, K classes."""

import dataclasses
import math

import torch
from torch import Tensor

# Times the images of the smallest class that the largest has: from there on the accuracy says most about the largest, so that
# the mean over classes is reported beside it, as training weighs classes then.
SKEWED = 3.0


def is_among(logits_BK: Tensor, targets: Tensor, k: int) -> Tensor:
    """bool [B]: whether a label is among the `k` highest scores; of equal scores the lower index wins, as in argmax.

    `targets` are class numbers [B], or zeros and ones [B, K] where an image may have several labels.
    """
    order_Bk = logits_BK.argsort(dim=1, descending=True, stable=True)[:, :k]
    if targets.ndim == 2:
        return (targets.gather(1, order_Bk) > 0).any(dim=1)
    return (order_Bk == targets[:, None]).any(dim=1)


def mean_average_precision(logits_BK: Tensor, targets_BK: Tensor) -> float:
    """Mean over the classes that occur of the average precision: the mean, over a class's images, of the share of that class
    among all images scored at least as high."""
    values_K = average_precision(logits_BK, targets_BK)
    occurs_K = ~values_K.isnan()
    return float(values_K[occurs_K].mean()) if occurs_K.any() else math.nan


def average_precision(logits_BK: Tensor, targets_BK: Tensor) -> Tensor:
    """[K]; NaN for a class without images."""
    values_K = torch.full((logits_BK.shape[1],), math.nan, dtype=torch.float64)
    for k, (score_B, truth_B) in enumerate(zip(logits_BK.T.double(), targets_BK.T > 0, strict=True)):
        if truth_B.any():
            # Equal scores cannot be ordered, so they count as one step of the ranking.
            levels, place_B = score_B.neg().unique(return_inverse=True)
            hits = torch.bincount(place_B, weights=truth_B.double(), minlength=len(levels))
            seen = torch.bincount(place_B, minlength=len(levels)).cumsum(0)
            values_K[k] = (hits * hits.cumsum(0) / seen).sum() / truth_B.sum()
    return values_K


def confusion_matrix(answers_B: Tensor, truth_B: Tensor, shape: tuple[int, int]) -> Tensor:
    """Counts: rows are the truth, columns the answer."""
    return torch.bincount(truth_B * shape[1] + answers_B, minlength=shape[0] * shape[1]).reshape(shape)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """95 % interval of an accuracy (Wilson 1927), which stays inside 0 to 1 even for a perfect score."""
    p, z = correct / total, 1.959964
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half))  # rounding must not leave p itself outside


@dataclasses.dataclass(frozen=True)
class ClassScores:
    """One value per class, [K].

    A class without images has `support_K` 0 and a recall of NaN; one that is never predicted has precision and F1 of 0. Means
    weigh all classes that occur equally.
    """

    support_K: Tensor
    precision_K: Tensor
    recall_K: Tensor
    f1_K: Tensor

    def macro(self) -> dict[str, float]:
        rows = {"precision": self.precision_K, "recall": self.recall_K, "f1": self.f1_K}
        occurs_K = self.support_K > 0
        return {name: float(values_K[occurs_K].mean()) for name, values_K in rows.items()}

    @property
    def skew(self) -> float:
        """The images of the largest class as a multiple of those of the smallest."""
        counts = self.support_K[self.support_K > 0]
        return float(counts.max() / counts.min())


def class_scores(confusion_KA: Tensor) -> ClassScores:
    """From counts of truth by answer; columns beyond the classes are answers that are none of them."""
    classes = len(confusion_KA)
    return _class_scores(
        hits_K=confusion_KA.diagonal(), support_K=confusion_KA.sum(dim=1), predicted_K=confusion_KA.sum(dim=0)[:classes]
    )


def label_scores(predicted_BK: Tensor, targets_BK: Tensor) -> ClassScores:
    """The same where an image may have several labels, from yes or no for each."""
    predicted, truth = predicted_BK.bool(), targets_BK > 0
    return _class_scores((predicted & truth).sum(dim=0), truth.sum(dim=0), predicted.sum(dim=0))


def _class_scores(hits_K: Tensor, support_K: Tensor, predicted_K: Tensor) -> ClassScores:
    hits_K, support_K, predicted_K = hits_K.double(), support_K.double(), predicted_K.double()
    precision_K = torch.where(predicted_K > 0, hits_K / predicted_K, 0.0)
    recall_K = hits_K / support_K
    f1_K = torch.where(support_K + predicted_K > 0, 2 * hits_K / (support_K + predicted_K), 0.0)
    return ClassScores(support_K, precision_K, recall_K, f1_K)


def micro_f1(predicted_BK: Tensor, targets_BK: Tensor) -> float:
    """F1 of all decisions together."""
    predicted, truth = predicted_BK.bool(), targets_BK > 0
    return float(2 * (predicted & truth).sum() / max(1, int(predicted.sum() + truth.sum())))


def best_thresholds(logits_BK: Tensor, targets_BK: Tensor) -> Tensor:
    """For each class the score from which on it is predicted, [K]: where its F1 on these images is greatest.

    Halfway to the next score below, so that other images have room; 0, an even chance, where the images do not show one.
    """
    thresholds_K = torch.zeros(logits_BK.shape[1], dtype=torch.float64)
    for k, (score_B, truth_B) in enumerate(zip(logits_BK.T.double(), targets_BK.T > 0, strict=True)):
        if not truth_B.any() or truth_B.all():
            continue
        levels, place_B = score_B.neg().unique(return_inverse=True)
        hits = torch.bincount(place_B, weights=truth_B.double(), minlength=len(levels)).cumsum(0)
        predicted = torch.bincount(place_B, minlength=len(levels)).cumsum(0)
        best = int((2 * hits / (predicted + truth_B.sum())).argmax())
        last = best + 1 == len(levels)  # where it is best to predict the class for every image
        thresholds_K[k] = -levels[best] - 1 if last else -(levels[best] + levels[best + 1]) / 2
    return thresholds_K
