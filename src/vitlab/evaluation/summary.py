"""Everything that is said of a model on one set of images, as numbers: accuracy, classes, calibration, with intervals.

Letters: B images, K classes of the data, A answers (the classes of the data, and one for anything else).
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.evaluation.answers import Answers
from vitlab.evaluation.calibration import BINS, Reliability, bin_of, reliability, yes_or_no_confidence
from vitlab.evaluation.intervals import Array, Interval, bootstrap, mean_of
from vitlab.evaluation.metrics import (
    ClassScores,
    average_precision,
    class_scores,
    count_correct,
    label_scores,
    mean_average_precision,
    micro_f1,
    wilson_interval,
)
from vitlab.evaluation.selective import RiskCoverage, risk_coverage

_TOP = 5
_RANKED_AT_MOST = 200_000  # images times classes, up to which the ranking of every class is worth drawing anew
_RANKINGS = 200  # resamples for it: each sorts every class


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of images with one label each."""

    n: int
    top1: float
    top5: float
    loss: float
    intervals: dict[str, Interval]
    confusion_KA: Tensor
    classes: ClassScores
    reliability: Reliability
    risk: RiskCoverage

    @property
    def ece(self) -> float:
        return self.reliability.ece


def summarise(answers: Answers, classes: int, *, resamples: int, seed: int = 0) -> Summary:
    right_B, loss_B = answers.right, answers.loss_B
    flat_B = answers.truth_B * (classes + 1) + answers.answer_B
    confusion_KA = torch.bincount(flat_B, minlength=classes * (classes + 1)).reshape(classes, classes + 1)
    statistics = {
        "top1": mean_of(right_B),
        "top5": mean_of(answers.rank_B < _TOP),
        "loss": mean_of(loss_B),
        "ece": _ece_of(answers.confidence_B, right_B),
        "macro_f1": _macro_f1_of(answers, classes),
    }
    intervals = bootstrap(statistics, len(answers), resamples=resamples, seed=seed)
    for name, hits in (("top1", int(right_B.sum())), ("top5", int((answers.rank_B < _TOP).sum()))):
        if hits in (0, len(answers)):  # every draw is alike then, which would promise that the next image is too
            intervals[name] = wilson_interval(hits, len(answers))
    return Summary(
        n=len(answers),
        top1=float(right_B.double().mean()),
        top5=float((answers.rank_B < _TOP).double().mean()),
        loss=float(loss_B.mean()),
        intervals=intervals,
        confusion_KA=confusion_KA,
        classes=class_scores(confusion_KA),
        reliability=reliability(answers.confidence_B, right_B),
        risk=risk_coverage(answers.confidence_B, right_B),
    )


def _ece_of(confidence_B: Tensor, right_B: Tensor) -> Callable[[Array], float]:
    place, gap = bin_of(confidence_B).numpy(), (confidence_B - right_B.double()).numpy()
    return lambda index_B: float(np.abs(np.bincount(place[index_B], gap[index_B])).sum() / len(index_B))


def _macro_f1_of(answers: Answers, classes: int) -> Callable[[Array], float]:
    truth, answer, right = answers.truth_B.numpy(), answers.answer_B.numpy(), answers.right.numpy()

    def macro_f1(index_B: Array) -> float:
        drawn = truth[index_B]
        support_K = np.bincount(drawn, minlength=classes)
        hits_K = np.bincount(drawn, right[index_B], minlength=classes)
        given_K = np.bincount(answer[index_B], minlength=classes + 1)[:classes]
        occurs = support_K > 0
        return float((2 * hits_K[occurs] / (support_K + given_K)[occurs]).mean())

    return macro_f1


@dataclasses.dataclass(frozen=True)
class SeveralSummary:
    """Of images that may have several labels; a class is said where its score is above its threshold."""

    n: int
    top1: float
    top5: float
    loss: float
    mean_ap: float
    micro_f1: float
    intervals: dict[str, Interval]
    average_precision_K: Tensor
    thresholds_K: Tensor
    classes: ClassScores
    reliability: Reliability  # of every yes and no

    @property
    def ece(self) -> float:
        return self.reliability.ece


def summarise_several(
    logits_BK: Tensor, targets_BK: Tensor, thresholds_K: Tensor | None, *, resamples: int, seed: int = 0
) -> SeveralSummary:
    """`thresholds_K` are scores, fitted on other images; without them, a class is said from an even chance on."""
    n, classes = logits_BK.shape
    thresholds_K = torch.zeros(classes, dtype=torch.float64) if thresholds_K is None else thresholds_K
    given_BK = logits_BK.double() > thresholds_K
    losses_BK = F.binary_cross_entropy_with_logits(logits_BK.double(), targets_BK.double(), reduction="none")
    best_B = targets_BK.gather(1, logits_BK.argsort(dim=1, descending=True, stable=True)[:, :1])[:, 0] > 0
    sure_BK, right_BK = yes_or_no_confidence(logits_BK, targets_BK)
    statistics = {
        "top1": mean_of(best_B),
        "loss": mean_of(losses_BK.sum(dim=1)),
        "ece": _several_ece_of(sure_BK, right_BK),
        **_several_f1_of(given_BK, targets_BK > 0),
    }
    intervals = bootstrap(statistics, n, resamples=resamples, seed=seed)
    if n * classes <= _RANKED_AT_MOST:

        def mean_ap(index_B: Array) -> float:
            return mean_average_precision(logits_BK[index_B], targets_BK[index_B])

        intervals |= bootstrap({"mean_ap": mean_ap}, n, resamples=min(resamples, _RANKINGS), seed=seed)
    return SeveralSummary(
        n=n,
        top1=count_correct(logits_BK, targets_BK, 1) / n,
        top5=count_correct(logits_BK, targets_BK, _TOP) / n,
        loss=float(losses_BK.sum(dim=1).mean()),
        mean_ap=mean_average_precision(logits_BK, targets_BK),
        micro_f1=micro_f1(given_BK, targets_BK),
        intervals=intervals,
        average_precision_K=average_precision(logits_BK, targets_BK),
        thresholds_K=thresholds_K,
        classes=label_scores(given_BK, targets_BK),
        reliability=reliability(sure_BK.flatten(), right_BK.flatten()),
    )


def _several_ece_of(sure_BK: Tensor, right_BK: Tensor) -> Callable[[Array], float]:
    """From the gaps that each image adds to each bin, J of them: all its classes are drawn together."""
    images, classes = sure_BK.shape
    gap_BJ = torch.zeros(images, BINS, dtype=torch.float64)
    gap_BJ.scatter_add_(1, bin_of(sure_BK), sure_BK.double() - right_BK.double())
    gaps = gap_BJ.numpy()
    return lambda index_B: float(np.abs(_times(index_B, images) @ gaps).sum() / (len(index_B) * classes))


def _several_f1_of(given_BK: Tensor, truth_BK: Tensor) -> dict[str, Callable[[Array], float]]:
    images = len(truth_BK)
    hits, given, truth = (x_BK.double().numpy() for x_BK in (given_BK & truth_BK, given_BK, truth_BK))

    def macro_f1(index_B: Array) -> float:
        times_B = _times(index_B, images)
        support_K, occurs = times_B @ truth, times_B @ truth > 0
        if not occurs.any():
            return float("nan")
        return float((2 * (times_B @ hits)[occurs] / (support_K + times_B @ given)[occurs]).mean())

    def micro_f1(index_B: Array) -> float:
        times_B = _times(index_B, images)
        total = float((times_B @ truth).sum() + (times_B @ given).sum())
        return 2 * float((times_B @ hits).sum()) / max(1.0, total)

    return {"macro_f1": macro_f1, "micro_f1": micro_f1}


def _times(index_B: Array, images: int) -> Array:
    """How often each image was drawn."""
    return np.bincount(index_B, minlength=images).astype(np.float64)
