"""Does a model know when it is right: reliability, the expected calibration error, and the temperature that mends it.

Letters: B images, K classes, M classes of the model, J bins.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.evaluation.label_match import Match

BINS = 15  # of equal width, as Guo et al. 2017 have it and most after them
ROWS = 4096  # images whose scores are float64 at a time: 21,843 classes need no second copy of all scores
_COLDEST, _HOTTEST = 0.05, 20.0  # temperatures; beyond, a set has no mistakes or no right answers to learn from
_HALVINGS = 60  # of that range on a logarithmic scale: what is left is below the last digit of a double


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Mean confidence, share of right answers and number of images in each bin; NaN where a bin is empty."""

    confidence_J: Tensor
    accuracy_J: Tensor
    count_J: Tensor

    @property
    def ece(self) -> float:
        """The gap between confidence and accuracy, weighed by the images in each bin."""
        filled = self.count_J > 0
        gap_J = (self.confidence_J - self.accuracy_J).abs()[filled]
        return float((gap_J * self.count_J[filled]).sum() / self.count_J.sum())


def reliability(confidence_B: Tensor, right_B: Tensor) -> Reliability:
    """Bins of equal width over 0 to 1, each without its lower edge and with its upper one."""
    place_B = bin_of(confidence_B)
    count_J = torch.bincount(place_B, minlength=BINS)
    confidence_J = torch.bincount(place_B, weights=confidence_B.double(), minlength=BINS) / count_J
    accuracy_J = torch.bincount(place_B, weights=right_B.double(), minlength=BINS) / count_J
    return Reliability(confidence_J, accuracy_J, count_J)


def yes_or_no_confidence(logits_BK: Tensor, targets_BK: Tensor) -> tuple[Tensor, Tensor]:
    """[B, K] each, where every class is a yes or no: the probability of the likelier of both, and whether that is right."""
    p_BK = logits_BK.double().sigmoid()
    yes_BK = p_BK >= 0.5
    return p_BK.where(yes_BK, 1 - p_BK), yes_BK == (targets_BK > 0)


def brier_scores(logits_BM: Tensor, truth_B: Tensor, match: Match, temperature: float = 1.0) -> Tensor:
    """float64 [B]: squared distance of the probabilities from the truth, summed over classes (Brier 1950); 0 to 2.

    Classes of the model that are right for the same class of the data count as one.
    """
    members_KW = match.table
    scores: list[Tensor] = []
    for logits_bM, truth_b in zip(logits_BM.split(ROWS), truth_B.split(ROWS), strict=True):
        p_bM = (logits_bM.double() / temperature).softmax(dim=1)
        members_bW = members_KW[truth_b]
        right_bW = p_bM.gather(1, members_bW.clamp(min=0)).masked_fill(members_bW < 0, 0.0)
        others_b = p_bM.square().sum(dim=1) - right_bW.square().sum(dim=1)
        scores.append(others_b + (1 - right_bW.sum(dim=1)).square())
    return torch.cat(scores)


def bin_of(confidence_B: Tensor) -> Tensor:
    edges = torch.from_numpy(np.linspace(0, 1, BINS + 1))
    return torch.bucketize(confidence_B.double(), edges[1:-1])


def fit_temperature(logits_BM: Tensor, truth_B: Tensor, match: Match, prior: float = 0.0) -> float:
    """The temperature by which scores are divided for the least loss on these images (Guo et al. 2017).

    A `prior` adds prior/2·(1/T - 1)² to the summed loss: few images without a mistake would else ask for certainty.
    Never fit it on the images it is then measured on: `runs.evaluation.evaluation_run` takes a validation part.
    """
    members_KW = match.table
    members_BW = members_KW[truth_B]
    right_BW = logits_BM.gather(1, members_BW.clamp(min=0)).masked_fill(members_BW < 0, -torch.inf).double()
    scores_BM = logits_BM.double()

    def slope(inverse: float) -> float:
        return float((_mean_score(scores_BM, inverse) - _mean_score(right_BW, inverse)).mean())

    return _solve(slope, len(truth_B), prior)


def fit_sigmoid_temperature(logits_BK: Tensor, targets_BK: Tensor, prior: float = 0.0) -> float:
    """The same where every class is a yes or no of its own."""
    scores_BK, truth_BK = logits_BK.double(), targets_BK.double()

    def slope(inverse: float) -> float:
        return float((((inverse * scores_BK).sigmoid() - truth_BK) * scores_BK).sum(dim=1).mean())

    return _solve(slope, len(truth_BK), prior)


def _mean_score(scores_BM: Tensor, inverse: float) -> Tensor:
    """Of each image, under the probabilities that the scores give at this inverse temperature."""
    p_BM = (inverse * scores_BM).softmax(dim=1)
    return (p_BM * scores_BM.where(p_BM > 0, 0.0)).sum(dim=1)


def _solve(mean_slope: Callable[[float], float], images: int, prior: float) -> float:
    """Where the loss, which is convex in one over the temperature, is least: its slope is 0 there, and rises."""
    if not images:
        raise UsageError("there are no images to fit a temperature on")
    low, high = 1 / _HOTTEST, 1 / _COLDEST

    def slope(inverse: float) -> float:
        return mean_slope(inverse) + prior / images * (inverse - 1)

    if slope(low) >= 0:
        return _HOTTEST
    if slope(high) <= 0:
        return _COLDEST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / (low * high) ** 0.5


def is_at_the_edge(temperature: float) -> bool:
    """Whether the best temperature lies beyond those that are tried."""
    return temperature in (_COLDEST, _HOTTEST)
