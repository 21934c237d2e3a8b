"""The measures of a classifier as a table: what is computed, stored, printed and shown on the page follows from it.

To add one, write its function here or beside its arithmetic, and its line in `MEASURES`. A measure takes a `OneLabel` or a
`SeveralLabels` (see `answers.py`) and gives an `Estimate`: its value, and its value on any images drawn from them.
Letters: B images, K classes of the data, J bins.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.evaluation.answers import Case, OneLabel, SeveralLabels
from vitlab.evaluation.calibration import BINS, bin_of, brier_scores, yes_or_no_confidence
from vitlab.evaluation.intervals import Array, Interval, bootstrap, mean_of
from vitlab.evaluation.metrics import is_among, mean_average_precision, micro_f1, wilson_interval

TOP = 5
_RANKED_AT_MOST = 200_000  # images times classes, up to which the ranking of every class is worth drawing anew
_RANKINGS = 200  # resamples for it: each sorts every class


class Estimate(NamedTuple):
    value: float
    redrawn: Callable[[Array], float] | None = None  # the value on drawn images, by their numbers: a bootstrap interval
    hits: int | None = None  # of a share of the images, such as an accuracy: Wilson's interval, as after training
    resamples: int | None = None  # at most, where one takes long


@dataclasses.dataclass(frozen=True)
class Measure:
    """`key` names its record and, unless it is `nested` elsewhere, its value in the JSON.

    `line` is its printed line after `title`; no title means no line. `fact` is its row on the page, if it has one.
    """

    key: str
    one_label: Callable[[OneLabel], Estimate] | None = None
    several_labels: Callable[[SeveralLabels], Estimate] | None = None
    form: str = ".4f"
    title: str = ""
    line: str = "{value}{interval}"
    fact: str = ""
    nested: bool = False
    min_labels: int = 0  # fewer labels to choose among, and it is not printed

    def text(self, value: float) -> str:
        return f"{value:{self.form}}"

    def interval_text(self, interval: Interval | None, form: str = " ({low} to {high})") -> str:
        return "" if interval is None else form.format(low=self.text(interval[0]), high=self.text(interval[1]))


class Estimates(NamedTuple):
    """The measures of one set of images, by their keys."""

    values: Mapping[str, float]
    intervals: Mapping[str, Interval]


def estimate(case: Case, *, resamples: int, seed: int = 0) -> Estimates:
    """Every measure that applies, with its 95 % interval: Wilson's of a share of the images, else drawn, on the same images."""
    found = {measure.key: result for measure in MEASURES if (result := _apply(measure, case)) is not None}
    intervals: dict[str, Interval] = {}
    limits = {result.resamples for result in found.values() if result.redrawn is not None}
    for limit in sorted(limits, key=lambda limit: limit is not None):
        statistics = {
            key: result.redrawn
            for key, result in found.items()
            if result.redrawn is not None and result.resamples == limit
        }
        draws = resamples if limit is None else min(resamples, limit)
        intervals |= bootstrap(statistics, case.num_images, resamples=draws, seed=seed)
    for key, result in found.items():
        if result.hits is not None:
            intervals[key] = wilson_interval(result.hits, case.num_images)
    return Estimates({key: result.value for key, result in found.items()}, intervals)


def values_of(case: Case, *keys: str) -> dict[str, float]:
    """The measures of these keys, as far as they apply, without intervals."""
    found = {measure.key: _apply(measure, case) for measure in MEASURES if measure.key in keys}
    return {key: result.value for key, result in found.items() if result is not None}


def _apply(measure: Measure, case: Case) -> Estimate | None:
    if isinstance(case, OneLabel):
        return None if measure.one_label is None else measure.one_label(case)
    return None if measure.several_labels is None else measure.several_labels(case)


def _mean(values_B: Tensor) -> Estimate:
    """The estimate that is a mean over images."""
    return Estimate(float(values_B.double().mean()), mean_of(values_B))


def _share(hits_B: Tensor) -> Estimate:
    return Estimate(float(hits_B.double().mean()), hits=int(hits_B.sum()))


def _ece(case: OneLabel) -> Estimate:
    answers = case.answers
    place = bin_of(answers.confidence_B).numpy()
    gap = (answers.confidence_B - answers.right.double()).numpy()
    return Estimate(
        case.reliability.ece,
        lambda index_B: float(np.abs(np.bincount(place[index_B], gap[index_B])).sum() / len(index_B)),
    )


def _ece_of_several(case: SeveralLabels) -> Estimate:
    """From the gaps that each image adds to each bin: all its classes are drawn together."""
    images, classes = case.logits_BK.shape
    gap_BJ = torch.zeros(images, BINS, dtype=torch.float64)
    confidence_BK, right_BK = yes_or_no_confidence(case.logits_BK, case.targets_BK)
    gap_BJ.scatter_add_(1, bin_of(confidence_BK), confidence_BK - right_BK.double())
    gaps = gap_BJ.numpy()
    return Estimate(
        case.reliability.ece,
        lambda index_B: float(np.abs(_times(index_B, images) @ gaps).sum() / (len(index_B) * classes)),
    )


def _macro(hits_K: Array, predicted_K: Array, support_K: Array) -> float:
    """F1, mean over the classes that occur."""
    occurs = support_K > 0
    f1 = 2 * hits_K[occurs] / (support_K + predicted_K)[occurs]
    return float(f1.mean()) if occurs.any() else float("nan")


def _micro(hits_K: Array, predicted_K: Array, support_K: Array) -> float:
    """F1 of all decisions together."""
    return 2 * float(hits_K.sum()) / max(1.0, float(support_K.sum() + predicted_K.sum()))


def _macro_f1(case: OneLabel) -> Estimate:
    classes, answers = len(case.confusion_KA), case.answers
    truth, answer, right = answers.truth_B.numpy(), answers.answer_B.numpy(), answers.right.numpy()

    def redrawn(index_B: Array) -> float:
        drawn = truth[index_B]
        hits_K = np.bincount(drawn, right[index_B], minlength=classes)
        predicted_K = np.bincount(answer[index_B], minlength=classes + 1)[:classes]
        return _macro(hits_K, predicted_K, np.bincount(drawn, minlength=classes))

    return Estimate(case.classes.macro()["f1"], redrawn)


def _f1_of_several(value: float, case: SeveralLabels, f1: Callable[[Array, Array, Array], float]) -> Estimate:
    """From right yeses, all yeses, and labels, as zeros and ones [B, K]."""
    predicted_BK, truth_BK = case.predicted_BK, case.targets_BK > 0
    tables = [x_BK.double().numpy() for x_BK in (predicted_BK & truth_BK, predicted_BK, truth_BK)]

    def redrawn(index_B: Array) -> float:
        times_B = _times(index_B, len(truth_BK))
        return f1(*(times_B @ table_BK for table_BK in tables))

    return Estimate(value, redrawn)


def _mean_ap_of_several(case: SeveralLabels) -> Estimate:
    logits_BK, targets_BK = case.logits_BK, case.targets_BK
    found = Estimate(mean_average_precision(logits_BK, targets_BK), resamples=_RANKINGS)
    if logits_BK.numel() > _RANKED_AT_MOST:
        return found
    return found._replace(redrawn=lambda index_B: mean_average_precision(logits_BK[index_B], targets_BK[index_B]))


def _times(index_B: Array, images: int) -> Array:
    """How often each image was drawn."""
    return np.bincount(index_B, minlength=images).astype(np.float64)


MEASURES = (
    Measure(
        "top1",
        one_label=lambda case: _share(case.answers.right),
        several_labels=lambda case: _share(is_among(case.logits_BK, case.targets_BK, 1)),
        form=".2%",
        title="top-1",
        line="{value}{interval} of {n:,} images ({part})",
    ),
    Measure(
        "top5",
        one_label=lambda case: _share(case.answers.rank_B < TOP),
        several_labels=lambda case: _mean(is_among(case.logits_BK, case.targets_BK, TOP))._replace(redrawn=None),
        form=".2%",
        title="top-5",
        min_labels=TOP + 1,
    ),
    Measure(
        "loss",
        one_label=lambda case: _mean(case.losses_B),
        several_labels=lambda case: _mean(case.losses_B),
        title="loss",
        fact="loss",
    ),
    Measure(
        "brier",
        one_label=lambda case: _mean(brier_scores(case.logits_BM, case.truth_B, case.match, case.temperature)),
        several_labels=lambda case: _mean((case.logits_BK.sigmoid() - case.targets_BK).square().sum(dim=1)),
        title="Brier",
        fact="Brier score",
    ),
    Measure("mean_ap", several_labels=_mean_ap_of_several, title="mean AP"),
    Measure(
        "macro_f1",
        one_label=_macro_f1,
        several_labels=lambda case: _f1_of_several(case.classes.macro()["f1"], case, _macro),
        form=".2%",
        title="per class",
        line="recall {macro[recall]:.2%}, precision {macro[precision]:.2%}, F1 {value}{interval}, mean over classes{skew}",
        fact="F1 over classes",
        nested=True,  # macro.f1
    ),
    Measure(
        "micro_f1",
        several_labels=lambda case: _f1_of_several(micro_f1(case.predicted_BK, case.targets_BK), case, _micro),
        form=".2%",
    ),
    Measure(
        "ece",
        one_label=_ece,
        several_labels=_ece_of_several,
        title="ECE",
        line=f"{{value}}{{interval}} ({BINS} bins of equal width)",
    ),
    Measure("aurc", one_label=lambda case: Estimate(case.risk.area), nested=True),  # selective.aurc
)
