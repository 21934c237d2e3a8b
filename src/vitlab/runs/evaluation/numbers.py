"""From a model's scores to everything that an evaluation says about them. Letters: B images, K classes, A answers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.evaluation.answers import Answers, judge
from vitlab.evaluation.calibration import (
    BINS,
    Reliability,
    fit_sigmoid_temperature,
    fit_temperature,
    is_at_the_edge,
    reliability,
)
from vitlab.evaluation.metrics import ClassScores, best_thresholds
from vitlab.evaluation.summary import SeveralSummary, Summary, summarise, summarise_several
from vitlab.report.evaluation_page import OTHER
from vitlab.runs.evaluation.answering import Scored
from vitlab.runs.evaluation.evaluated_parts import Measured

_RISKS = (0.01, 0.05, 0.1)  # shares of mistakes that people ask for


@dataclasses.dataclass(frozen=True)
class CountRule:
    """`temperature` is the bundle's own, by which its probabilities are made, and so are `thresholds`, where it has any."""

    temperature: float
    thresholds: tuple[float, ...]
    resamples: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Found:
    """The numbers by the names they have in the result, and what page and files are made of."""

    chosen: Measured
    scored: Scored
    numbers: dict[str, Any]
    summary: Summary | SeveralSummary
    answers: Answers | None
    calibrated: Reliability | None
    seconds: float = 0.0  # from the first image to the last number


def count(scored: Scored, fit: Scored | None, chosen: Measured, rule: CountRule) -> Found:
    """Every number of the images in `scored`; temperature and thresholds are fitted on those in `fit`."""
    return (_several if scored.several else _single)(scored, fit, chosen, rule)


def _single(scored: Scored, fit: Scored | None, chosen: Measured, rule: CountRule) -> Found:
    classes, temperature = scored.dataset.classes, rule.temperature
    answers = judge(scored.logits_BM, scored.targets, scored.match, temperature)
    summary = summarise(answers, len(classes), resamples=rule.resamples, seed=rule.seed)
    fitted = None if fit is None else fit_temperature(fit.logits_BM, fit.targets, fit.match)
    calibrated, after = None, None
    if fitted is not None:
        after = judge(scored.logits_BM, scored.targets, scored.match, fitted)
        calibrated = reliability(after.confidence_B, after.right)
    names = (*classes, OTHER)
    numbers = {
        **_shared_numbers(summary, summary.classes, classes),
        "labels": scored.logits_BM.shape[1],
        "confused": _confused(summary.confusion_KA, names),
        "calibration": _calibration(
            summary.reliability, temperature, fitted, calibrated, chosen, None if after is None else after.loss_B
        ),
        "selective": {
            "aurc": summary.risk.area,
            "coverage_at_risk": {f"{risk:g}": summary.risk.coverage_at(risk) for risk in _RISKS},
        },
        "notes": _temperature_notes(fitted, temperature, chosen),
    }
    return Found(chosen, scored, numbers, summary, answers, calibrated)


def _several(scored: Scored, fit: Scored | None, chosen: Measured, rule: CountRule) -> Found:
    classes, temperature = scored.dataset.classes, rule.temperature
    logits_BK = scored.in_data_classes().double() / temperature
    thresholds_K = _own_thresholds(scored, rule)
    fitted, calibrated, after = None, None, None
    if fit is not None:
        thresholds_K = best_thresholds(fit.in_data_classes() / temperature, fit.targets)
        fitted = fit_sigmoid_temperature(fit.in_data_classes(), fit.targets)
        cooled_BK = scored.in_data_classes().double() / fitted
        calibrated = summarise_several(cooled_BK, scored.targets, None, resamples=1).reliability
        after = F.binary_cross_entropy_with_logits(cooled_BK, scored.targets.double(), reduction="none").sum(dim=1)
    summary = summarise_several(logits_BK, scored.targets, thresholds_K, resamples=rule.resamples, seed=rule.seed)
    per_class = _class_rows(summary.classes, classes)
    for row, ap, threshold in zip(
        per_class, summary.average_precision_K.tolist(), summary.thresholds_K.sigmoid().tolist(), strict=True
    ):
        row |= {"average_precision": None if math.isnan(ap) else ap, "threshold": threshold}
    numbers = {
        **_shared_numbers(summary, summary.classes, classes),
        "labels": len(classes),
        "mean_ap": summary.mean_ap,
        "micro_f1": summary.micro_f1,
        "per_class": per_class,
        "calibration": _calibration(summary.reliability, temperature, fitted, calibrated, chosen, after),
        "notes": _temperature_notes(fitted, temperature, chosen),
    }
    return Found(chosen, scored, numbers, summary, None, calibrated)


def _own_thresholds(scored: Scored, rule: CountRule) -> Tensor | None:
    """Those of the bundle, for scores that are divided by its temperature."""
    if not rule.thresholds:
        return None
    thresholds_M = torch.tensor(rule.thresholds, dtype=torch.float64)
    return thresholds_M[scored.match.table[:, 0]] / rule.temperature


def _shared_numbers(summary: Summary | SeveralSummary, scores: ClassScores, classes: Sequence[str]) -> dict[str, Any]:
    return {
        "n": summary.n,
        "top1": summary.top1,
        "top5": summary.top5,
        "loss": summary.loss,
        "ece": summary.ece,
        "intervals": summary.intervals,
        "macro": scores.macro(),
        "skew": scores.skew,
        "per_class": _class_rows(scores, classes),
    }


def _class_rows(scores: ClassScores, classes: Sequence[str]) -> list[dict[str, Any]]:
    columns = (scores.support_K, scores.recall_K, scores.precision_K, scores.f1_K)
    return [
        {
            "label": name,
            "n": int(support),
            "accuracy": None if not support else recall,
            "precision": precision,
            "recall": None if not support else recall,
            "f1": f1,
        }
        for name, support, recall, precision, f1 in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def _confused(confusion_KA: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """Every kind of mistake, the most frequent first."""
    places = confusion_KA.nonzero().tolist()
    rows = [(int(confusion_KA[k, a]), names[k], names[a]) for k, a in places if k != a]
    return [{"truth": k, "answer": a, "count": count} for count, k, a in sorted(rows, key=lambda row: -row[0])]


def _calibration(
    before: Reliability,
    temperature: float,
    fitted: float | None,
    after: Reliability | None,
    chosen: Measured,
    loss_after_B: Tensor | None,
) -> dict[str, Any]:
    rows = zip(before.confidence_J.tolist(), before.accuracy_J.tolist(), before.count_J.tolist(), strict=True)
    return {
        "bins": BINS,
        "binning": "equal width, of the confidence in the answer",
        "temperature_before": temperature,
        "temperature": fitted,
        "fitted_on": chosen.fit_part or None,
        "ece_after": None if after is None else after.ece,
        "loss_after": None if loss_after_B is None else float(loss_after_B.mean()),
        "reliability": [
            {"confidence": confidence, "accuracy": accuracy, "n": count}
            for confidence, accuracy, count in rows
            if count
        ],
    }


def _temperature_notes(fitted: float | None, own: float, chosen: Measured) -> list[str]:
    if fitted is None and own != 1:
        return [f"the bundle's own temperature {own:.3g} is used"]
    if fitted is None:
        return ["no temperature was fitted: there is no validation part beside the one that is measured"]
    if is_at_the_edge(fitted):
        cold = "it makes hardly a mistake there, or its scores hardly differ"
        why = cold if fitted < 1 else "its answers are no better than chance there"
        return [f"the best temperature on {chosen.fit_part} lies beyond those tried ({fitted:g}): {why}"]
    return []
