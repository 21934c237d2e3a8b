"""From a classifier and a data set to every number of an evaluation, by the names that they have in its JSON.

Letters: B images, K classes of the data, A answers, M classes of the model.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.session import Session
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.data.pixel_stats import InputWatch
from vitlab.engines.classifier import Classifier, tell_zero_head
from vitlab.engines.inference import InferenceOptions, dataset_batches, inference_progress, run_model
from vitlab.evaluation.answers import OTHER, Case, OneLabel, SeveralLabels
from vitlab.evaluation.calibration import BINS, fit_sigmoid_temperature, fit_temperature, is_at_the_edge
from vitlab.evaluation.label_match import Match, match_by_file, match_by_name
from vitlab.evaluation.measures import estimate
from vitlab.evaluation.metrics import ClassScores, best_thresholds

MAX_BAD = 100  # images that may be unreadable, as in training
_RISKS = (0.01, 0.05, 0.1)  # shares of mistakes that people ask for


@dataclasses.dataclass(frozen=True)
class Scored:
    """`logits_BM` and `targets` (int64 [B], or [B, K] of zeros and ones) of the images that could be read."""

    dataset: Dataset
    match: Match
    logits_BM: Tensor
    targets: Tensor
    ids_B: Tensor
    bad: dict[str, str]
    seconds: float
    unlike: str | None = None  # a warning where the images are not of the kind that the model was trained on

    @property
    def several(self) -> bool:
        return self.targets.ndim == 2

    def in_data_classes(self) -> Tensor:
        """The scores of the data's classes, [B, K]: for images of several labels, where each class stands for one."""
        table_KW = self.match.table
        if table_KW.shape[1] > 1:
            raise UsageError(
                "where images have several labels, a label map can name one label of the model for each class"
            )
        return self.logits_BM[:, table_KW[:, 0]]

    def restricted(self) -> "Scored":
        """The same as if the model had no other classes than those of the data."""
        match, kept_m = self.match.restricted(self.logits_BM.shape[1])
        return dataclasses.replace(self, match=match, logits_BM=self.logits_BM[:, kept_m])


def require_answers(classifier: Classifier, *, force: bool) -> None:
    """Raise an error where a head cannot answer, before an image is read."""
    if not classifier.labels:
        raise UsageError(
            "this model has no classes, so it has no accuracy",
            hint="Measure its features: --knn, --few-shot 5 or --probe. Or train a head: vitlab train DATA --init MODEL.",
        )
    if tell_zero_head(classifier.bundle) and not force:
        raise UsageError(
            "the head is all zeros: every class would get the same score, and the first would always be the answer",
            hint="Train it first (vitlab train DATA --init MODEL), or measure the features with --knn; --force continues.",
        )


def match_classes(classifier: Classifier, dataset: Dataset, label_map: Path | None, *, data: str) -> Match:
    """Which classes of the model are meant by those of the data."""
    if label_map is not None:
        return match_by_file(label_map, dataset.classes, classifier.labels)
    occurring = {*dataset.labels.values.tolist()}
    empty = [name for k, name in enumerate(dataset.classes) if k not in occurring]  # such as an empty folder
    # Where images have several labels, each class is a question of its own, and must be one that the model answers.
    return match_by_name(dataset.classes, classifier.labels, data, () if dataset.labels.multi else empty)


def known_images(dataset: Dataset, match: Match) -> Dataset:
    """The images of the classes that the model knows."""
    if bool(match.known.all()):
        return dataset
    if dataset.labels.multi:
        raise UsageError("where images have several labels, a label map must name all classes")
    kept = match.known[dataset.labels.single()].nonzero()[:, 0]
    if not len(kept):
        raise UsageError(f"{dataset.name} has no image of a class that is in the label map")
    return dataset.subset(kept)


def score_images(
    classifier: Classifier, dataset: Dataset, match: Match, options: InferenceOptions, session: Session, label: str
) -> Scored:
    """Score every image of `dataset` that can be read, in its order."""
    bad, watch = BadImages(MAX_BAD), InputWatch(classifier.bundle.pixels)
    started = time.perf_counter()
    with inference_progress(session.console, label, len(dataset), options) as advance:
        rule, world = classifier.preprocess, session.world
        batches = watch.watching(dataset_batches(dataset, rule, options, world, bad), rule)
        logits_BM, targets, ids_B = run_model(classifier.model, batches, rule, world, advance=advance)
    bad.share(session.world)
    _require_finite(logits_BM, ids_B, dataset)
    seconds = time.perf_counter() - started
    return Scored(dataset, match, logits_BM, targets, ids_B, bad.found, seconds, watch.sentence())


def _require_finite(logits_BM: Tensor, ids_B: Tensor, dataset: Dataset) -> None:
    odd_B = ~logits_BM.isfinite().all(dim=1)
    if bool(odd_B.any()):
        first = dataset.keys[int(ids_B[odd_B][0])]
        raise VitlabError(
            f"the model answers NaN or infinity for {int(odd_B.sum()):,} of {len(ids_B):,} images, the first is {first}",
            hint="Its weights or its preprocessing are wrong; no number would mean anything.",
        )


# --- from scores to numbers -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CountRule:
    """`temperature` is the bundle's own, by which its probabilities are made, and so are `thresholds`, where it has any."""

    temperature: float
    thresholds: tuple[float, ...]
    resamples: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Account:
    """The numbers, and what page and files are made of. `calibrated` is the case at the fitted temperature."""

    scored: Scored
    case: Case
    calibrated: Case | None
    numbers: dict[str, Any]
    seconds: float = 0.0  # from the first image to the last number


def count(scored: Scored, fit: Scored | None, fit_part: str, rule: CountRule) -> Account:
    """Count everything about the images in `scored`; temperature and thresholds are fitted on those in `fit`."""
    cases = _several_labels if scored.several else _one_label
    case, calibrated, fitted = cases(scored, fit, rule)
    estimates = estimate(case, resamples=rule.resamples, seed=rule.seed)
    numbers: dict[str, Any] = {
        "n": case.num_images,
        "measures": dict(estimates.values),
        "intervals": dict(estimates.intervals),
        "macro": case.classes.macro(),
        "skew": case.classes.skew,
        "per_class": _class_rows(case.classes, scored.dataset.classes),
        "calibration": _calibration(case, calibrated, rule.temperature, fitted, fit_part),
        "notes": _temperature_notes(fitted, rule.temperature, fit_part),
    }
    if isinstance(case, OneLabel):
        risks = {f"{risk:g}": case.risk.coverage_at(risk) for risk in _RISKS}
        numbers |= {
            "labels": scored.logits_BM.shape[1],
            "confused": _confused(case.confusion_KA, (*scored.dataset.classes, OTHER)),
            "selective": {"aurc": case.risk.area, "coverage_at_risk": risks},
        }
    else:
        numbers["labels"] = len(scored.dataset.classes)
        columns = (case.average_precision_K.tolist(), case.thresholds_K.sigmoid().tolist())
        for row, ap, threshold in zip(numbers["per_class"], *columns, strict=True):
            row |= {"average_precision": None if math.isnan(ap) else ap, "threshold": threshold}
    return Account(scored, case, calibrated, numbers)


def _one_label(scored: Scored, fit: Scored | None, rule: CountRule) -> tuple[OneLabel, OneLabel | None, float | None]:
    """The images that are measured, also at the temperature that is fitted on the others."""
    case = OneLabel(scored.logits_BM, scored.targets, scored.match, rule.temperature)
    if fit is None:
        return case, None, None
    fitted = fit_temperature(fit.logits_BM, fit.targets, fit.match)
    return case, OneLabel(scored.logits_BM, scored.targets, scored.match, fitted), fitted


def _several_labels(
    scored: Scored, fit: Scored | None, rule: CountRule
) -> tuple[SeveralLabels, SeveralLabels | None, float | None]:
    logits_BK = scored.in_data_classes().double()
    thresholds_K, calibrated, fitted = _own_thresholds(scored, rule), None, None
    if fit is not None:
        thresholds_K = best_thresholds(fit.in_data_classes() / rule.temperature, fit.targets)
        fitted = fit_sigmoid_temperature(fit.in_data_classes(), fit.targets)
        calibrated = SeveralLabels.of(logits_BK / fitted, scored.targets)
    return SeveralLabels.of(logits_BK / rule.temperature, scored.targets, thresholds_K), calibrated, fitted


def _own_thresholds(scored: Scored, rule: CountRule) -> Tensor | None:
    """Those of the bundle, for scores that are divided by its temperature."""
    if not rule.thresholds:
        return None
    thresholds_M = torch.tensor(rule.thresholds, dtype=torch.float64)
    return thresholds_M[scored.match.table[:, 0]] / rule.temperature


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
    case: Case, after: Case | None, temperature: float, fitted: float | None, fit_part: str
) -> dict[str, Any]:
    before = case.reliability
    rows = zip(before.confidence_J.tolist(), before.accuracy_J.tolist(), before.count_J.tolist(), strict=True)
    return {
        "bins": BINS,
        "binning": "equal width, of the confidence in the answer",
        "temperature_before": temperature,
        "temperature": fitted,
        "fitted_on": fit_part or None,
        "ece_after": None if after is None else after.reliability.ece,
        "loss_after": None if after is None else float(after.losses_B.mean()),
        "reliability": [
            {"confidence": confidence, "accuracy": accuracy, "n": count}
            for confidence, accuracy, count in rows
            if count
        ],
    }


def _temperature_notes(fitted: float | None, temperature: float, fit_part: str) -> list[str]:
    if fitted is None and temperature != 1:
        return [f"the bundle's own temperature {temperature:.3g} is used"]
    if fitted is None:
        return ["no temperature was fitted: there is no validation part beside the one that is measured"]
    if is_at_the_edge(fitted):
        cold = "it makes hardly a mistake there, or its scores hardly differ"
        why = cold if fitted < 1 else "its answers are no better than chance there"
        return [f"the best temperature on {fit_part} lies beyond those tried ({fitted:g}): {why}"]
    return []
