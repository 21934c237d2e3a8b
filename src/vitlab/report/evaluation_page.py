"""The page of an evaluation: how good, where it fails, whether it knows, and what the mistakes look like.

Owns the choice of what is shown. Letters: B images, K classes, A answers (the classes, and one for anything else).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vitlab.core.command import command_line
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.answers import OTHER, Answers, OneLabel, SeveralLabels
from vitlab.evaluation.calibration import Reliability
from vitlab.evaluation.measures import MEASURES, TOP
from vitlab.evaluation.metrics import SKEWED, ClassScores
from vitlab.evaluation.result import EvaluationResult
from vitlab.evaluation.scoring import Account
from vitlab.models.names import format_name
from vitlab.report.charts import Chart, Series
from vitlab.report.page import (
    Bar,
    Bars,
    Example,
    Examples,
    Files,
    Gallery,
    Report,
    Section,
    Snippets,
    Table,
    percent,
    percent_range,
)
from vitlab.report.pictures import Pictures, spread_over_classes
from vitlab.report.sections import bars, calibration, class_bars, confusion, licence_in, mistake, most_confused

_IN_A_TABLE = 30  # classes with a row each; of more, the worst
_BARS = 24  # classes with a bar each; of more, a curve shows them all
_SHOWN = 12  # pictures of a gallery
_PAIRS = 6
_OF_A_PAIR = 4
_POINTS = 300  # of a curve: as many as a screen shows
_LEAST_ROOM = 1e-12  # between a threshold and the end of what a probability can be; against a division by zero


class _Story(NamedTuple):
    """The top of the page, and its sections."""

    number: str
    headline: str
    subline: str
    stats: list[tuple[str, str]]
    sections: list[Section]


def build_evaluation_page(
    result: EvaluationResult, classifier: Classifier, command: str, account: Account | None
) -> Report:
    """The page of an evaluation; without an account of the head's answers, that of features alone."""
    story = _features_page(result)
    links = [("evaluation.json", "every number"), ("card.md", "the model card with these measurements")]
    if account is not None:
        pictures = Pictures(classifier, account.scored.dataset, account.scored.ids_B)
        calibrated = None if account.calibrated is None else account.calibrated.reliability
        links.append(("answers.csv", "the answer for every image"))
        if isinstance(account.case, OneLabel):
            features, story = story.sections, _one_label_page(result, account.case, calibrated, pictures)
            story.sections.extend(features)
            links.append(("confusion.csv", "the confusion matrix"))
        else:
            story = _several_labels_page(result, account.case, calibrated, pictures)
    intervals = "Wilson" if account is None else "bootstrap"
    use = [
        ("Repeat this evaluation", command),
        ("Classify your own pictures", command_line("predict", result.model, "picture.jpg")),
    ]
    return Report(
        title=f"{result.model} on {result.data}",
        number=story.number,
        headline=story.headline,
        subline=story.subline or format_name(classifier.model.spec),
        stats=[*story.stats, ("took", f"{result.seconds:.1f} s")],
        facts=_facts(result, classifier),
        sections=[*story.sections, Snippets("Use it", "", use), Files("Files", "Beside this page.", links)],
        footer=f"intervals by {intervals} · every number is in evaluation.json as well",
    )


def _one_label_page(
    result: EvaluationResult, case: OneLabel, calibrated: Reliability | None, pictures: Pictures
) -> _Story:
    """Where images have one label each."""
    classes, values = pictures.dataset.classes, result.measures
    names = (*classes, OTHER)
    low, high = result.intervals["top1"]
    recall = case.classes.macro()["recall"]
    skewed = f"; {percent(recall)} as a mean over classes" if case.classes.skew >= SKEWED else ""
    stats = [
        ("95 % interval", percent_range(low, high)),
        ("images", f"{case.num_images:,}"),
        ("classes", f"{len(classes):,}"),
        # Of five labels or fewer it says nothing.
        *([("top-5", percent(values["top5"]))] if len(pictures.classifier.labels) > TOP else []),
        ("ECE", f"{values['ece']:.3f}"),
    ]
    first, *rest = confusion(case.confusion_KA, names)  # of many classes, the pairs stand beside the bars
    sections: list[Section] = [
        first,
        class_bars(case.confusion_KA, names),
        *rest,
        *_class_curve(case.classes),
        _calibration(case.reliability, calibrated, result),
        _risk(case),
        *_worst(case.answers, names, pictures),
        *_confused_pairs(case, names, pictures),
        *_answers(case.answers, names, pictures),
    ]
    headline = f"of {case.num_images:,} images classified correctly{skewed}"
    return _Story(percent(values["top1"]), headline, "", stats, sections)


def _several_labels_page(
    result: EvaluationResult, case: SeveralLabels, calibrated: Reliability | None, pictures: Pictures
) -> _Story:
    """Where images may have several labels each."""
    classes, values = pictures.dataset.classes, result.measures
    ranked = [0.0 if value != value else value for value in case.average_precision_K.tolist()]
    sections: list[Section] = [
        bars(
            "Average precision",
            "Each class by itself: 1 where every image with it stands before every other.",
            [
                (name, value, f"{value:.2f} of {int(count):,}", "")
                for name, value, count in zip(classes, ranked, case.classes.support_K.tolist(), strict=True)
                if count
            ],
        ),
        _calibration(case.reliability, calibrated, result),
        _class_table(case, classes, result, own_thresholds=bool(pictures.classifier.bundle.thresholds)),
        *_worst_several(case, classes, pictures),
    ]
    low, high = result.intervals.get("mean_ap", (None, None))
    stats = [
        *([] if low is None else [("95 % interval", f"{low:.3f} to {high:.3f}")]),
        ("images", f"{case.num_images:,}"),
        ("classes", f"{len(classes):,}"),
        ("F1 over classes", percent(values["macro_f1"])),
        ("F1 over all labels", percent(values["micro_f1"])),
    ]
    headline = f"mean average precision on {case.num_images:,} images"
    return _Story(f"{values['mean_ap']:.3f}", headline, "", stats, sections)


def _features_page(result: EvaluationResult) -> _Story:
    """Where features alone were measured."""
    rows = result.feature_rows()
    if not rows:
        return _Story("", "", "", [], [])
    best = max(rows, key=lambda row: row.top1)
    caption = (
        "What simple classifiers make of the model's features, in per cent: few-shot with the range of its draws, "
        "else with the 95 % interval."
    )
    section = Bars("Features", caption, [Bar(row.name, row.top1, row.short()) for row in rows])
    subline = "Measured on the features of the model; its head was not used"
    return _Story(percent(best.top1), f"of the images classified correctly, by {best.name}", subline, [], [section])


# --- sections ---------------------------------------------------------------------------------------------------------


def _class_table(
    case: SeveralLabels, classes: Sequence[str], result: EvaluationResult, *, own_thresholds: bool
) -> Section:
    """Where every class has a threshold of its own: what it is, and what comes of it."""
    scores = case.classes
    columns = (scores.support_K, case.thresholds_K.sigmoid(), scores.precision_K, scores.recall_K, scores.f1_K)
    rows = [
        (f1, [name, f"{int(n):,}", f"{threshold:.2f}", *(percent(share, 0) for share in (precision, recall, f1))])
        for name, n, threshold, precision, recall, f1 in zip(classes, *(x_K.tolist() for x_K in columns), strict=True)
        if n
    ]
    fitted_on = (result.calibration or {}).get("fitted_on")
    unfitted = "those of the model" if own_thresholds else "an even chance"
    how = f"fitted on {fitted_on}" if fitted_on else unfitted
    caption = f"A class is predicted from its threshold on ({how}). The worst first."
    caption += f" {_IN_A_TABLE} of {len(rows):,} classes." if len(rows) > _IN_A_TABLE else ""
    shown = [row for _, row in sorted(rows, key=lambda pair: pair[0])[:_IN_A_TABLE]]
    return Table("Thresholds", caption, ["class", "images", "threshold", "precision", "recall", "F1"], shown)


def _class_curve(scores: ClassScores) -> list[Section]:
    """All classes at a glance, where the bars cannot hold them."""
    recall_K = scores.recall_K[scores.support_K > 0]
    if len(recall_K) <= _BARS:
        return []
    caption = f"All {len(recall_K):,} classes from the worst to the best; the dotted line is their mean."
    mean, last = float(recall_K.mean()), len(recall_K)
    series = [
        Series("classified correctly", list(enumerate(recall_K.sort().values.tolist(), start=1))),
        Series("mean", [(1, mean), (last, mean)], "guide"),
    ]
    return [
        Chart("Spread over classes", caption, series, "classes, the worst first", "share", percent=True, y_range=(0, 1))
    ]


def _calibration(before: Reliability, after: Reliability | None, result: EvaluationResult) -> Chart:
    if after is None or result.calibration is None:
        return calibration(before)
    fitted = (
        f"With the temperature {result.calibration['temperature']:.2f}, fitted on {result.calibration['fitted_on']}"
    )
    return calibration(before, after, fitted)


def _risk(case: OneLabel) -> Chart:
    risk = 0.01  # one mistake in a hundred
    covered = percent(case.risk.coverage_at(risk), 0)
    caption = (
        f"Answering the images it is surest of, it covers {covered} of them with at most {percent(risk, 0)} mistakes."
    )
    caption += f" Area under the curve (AURC) {case.risk.area:.4f}."
    total = len(case.risk.risk_B)
    rows = torch.linspace(0, total - 1, min(_POINTS, total)).round().long()
    points = [((row + 1) / total, float(case.risk.risk_B[row])) for row in rows.tolist()]
    across = "share of the images answered, the surest first"
    series = [Series("share of mistakes", points)]
    return Chart("If it may say: I do not know", caption, series, across, "mistakes", percent=True, x_range=(0, 1))


def _confused_pairs(case: OneLabel, names: Sequence[str], pictures: Pictures) -> list[Section]:
    if int((~case.answers.right).sum()) <= _SHOWN:  # all of them stand among the worst
        return []
    answers, examples = case.answers, list[Example]()
    for truth, answer, count in most_confused(case.confusion_KA, _PAIRS):
        if count < 2:  # what happened once stands among the worst mistakes
            break
        rows_B = ((answers.truth_B == truth) & (answers.answer_B == answer)).nonzero()[:, 0]
        surest = rows_B[answers.confidence_B[rows_B].argsort(descending=True, stable=True)][:_OF_A_PAIR].tolist()
        tiles = [
            pictures.tile(row, f"{percent(float(answers.confidence_B[row]), 0)} sure", good=False) for row in surest
        ]
        total = int(case.confusion_KA[truth].sum())
        examples.append(Example(f"{names[truth]} taken for {names[answer]}: {count:,} of {total:,}", tiles))
    if not examples:
        return []
    return [
        Examples("What is taken for what", "The most frequent mistakes, with the images it was surest of.", examples)
    ]


def _worst(answers: Answers, names: Sequence[str], pictures: Pictures) -> list[Section]:
    wrong_B = (~answers.right).nonzero()[:, 0]
    # The most confident mistakes first: those are the ones that teach something, about the model or about the labels.
    rows = wrong_B[spread_over_classes(answers.truth_B[wrong_B], answers.confidence_B[wrong_B], _SHOWN)].tolist()
    if not rows:
        return []
    captions = [
        mistake(names[int(answers.answer_B[row])], answers.confidence_B[row], names[int(answers.truth_B[row])])
        for row in rows
    ]
    caption = f"{len(wrong_B):,} of {len(answers):,}, spread over the classes, the most confident first."
    tiles = [(row, below, False) for row, below in zip(rows, captions, strict=True)]
    return [pictures.rollout_gallery("Worst mistakes", caption, tiles)]


def _answers(answers: Answers, names: Sequence[str], pictures: Pictures) -> list[Section]:
    """Right answers; the wrong ones stand above."""
    right_B = answers.right.nonzero()[:, 0]
    rows = spread_over_classes(answers.truth_B[right_B], 1 - answers.confidence_B[right_B], _SHOWN)
    tiles = [
        pictures.tile(
            row, f"{names[int(answers.answer_B[row])]} ({percent(float(answers.confidence_B[row]), 0)})", good=True
        )
        for row in right_B[rows].tolist()
    ]
    caption = "Right answers, spread over the classes, the least sure first."
    return [Gallery("Answers", caption, tiles, pictures.are_photos)] if tiles else []


def _worst_several(case: SeveralLabels, classes: Sequence[str], pictures: Pictures) -> list[Section]:
    """The images with the surest wrong yes or no: the farthest from the threshold of its class, on the wrong side."""
    p_BK, threshold_K, targets_BK = case.logits_BK.sigmoid(), case.thresholds_K.sigmoid(), case.targets_BK
    beyond_BK = p_BK - threshold_K
    room_BK = torch.where(beyond_BK > 0, 1 - threshold_K, threshold_K).clamp_min(_LEAST_ROOM)
    wrong_BK = (beyond_BK > 0) != (targets_BK > 0)
    worst_B, label_B = torch.where(wrong_BK, beyond_BK.abs() / room_BK, -1.0).max(dim=1)
    order = worst_B.argsort(descending=True, stable=True)[:_SHOWN].tolist()
    rows: list[tuple[int, str, bool]] = []
    for row in order:
        k = int(label_B[row])
        confidence = f"{100 * p_BK[row, k]:.0f} %"
        missed = bool(targets_BK[row, k] > 0)
        caption = (
            f"missed {classes[k]} ({confidence})" if missed else f"predicted {classes[k]} ({confidence}), not true"
        )
        if float(worst_B[row]) >= 0:  # a wrong answer, not a right one that was unsure
            rows.append((row, caption, False))
    caption = "The surest wrong yes or no of an image."
    return [pictures.rollout_gallery("Worst mistakes", caption, rows)] if rows else []


# --- facts ------------------------------------------------------------------------------------------------------------


def _facts(result: EvaluationResult, classifier: Classifier) -> list[tuple[str, str]]:
    rule, count = classifier.preprocess, len(classifier.labels)
    size = f"{rule.image_size[0]}x{rule.image_size[1]}"
    features = {} if result.features is None else result.features["features"]
    part = "" if result.part is None else f", part {result.part}, {result.n:,} images"
    rows = [
        ("model", f"{format_name(classifier.model.spec)}, {f'{count:,}' if count else 'no'} classes"),
        ("data", f"{result.data}{part}"),
        ("images", f"{size}, {rule.resize}, {rule.filter}, middle {rule.crop_frac:g}"),
        *([("features", _describe_features(features))] if features else []),
        *_measure_facts(result),
    ]
    if result.real is not None:
        without = f"{result.real['excluded']:,} without labels"
        rows.append(("ReaL", f"{percent(result.real['top1'], 2)} of {result.real['n']:,}; {without}"))
    if result.published is not None:
        published = (
            f"{percent(result.published['top1'], 2)} ({result.published['settings']}; {result.published['source']})"
        )
        rows.append(("published", f"{published}; ours is {100 * result.published['difference']:+.2f} points off"))
    rows.append(("took", f"{result.seconds:.1f} s on {classifier.device}"))
    if licence := licence_in(classifier.bundle.card):
        rows.append(("licence", licence))
    if result.left_out:
        names = ", ".join(list(result.left_out)[:_SHOWN])
        rows.append(("left out", f"{len(result.left_out):,} images could not be read: {names}"))
    return rows + [("note", note) for note in dict.fromkeys([*result.notes, *features.get("notes", ())])]


def _measure_facts(result: EvaluationResult) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for measure in MEASURES:
        if measure.fact and measure.key in result.measures:
            value = measure.text(result.measures[measure.key])
            interval = measure.interval_text(result.intervals.get(measure.key), " ({low} to {high})")
            rows.append((measure.fact, (value + interval).replace("%", " %")))  # as in all else on the page
    if result.macro is not None:
        means = f"recall {percent(result.macro['recall'], 2)}, precision {percent(result.macro['precision'], 2)}"
        rows.append(("mean over classes", means))
    return rows


def _describe_features(features: Mapping[str, Any]) -> str:
    """What the vectors are, who learns from them and who is tested."""
    layers = f"layers {', '.join(map(str, features['layers']))}" if features["layers"] else "what the head sees"
    tokens = f", {features['tokens']} tokens" if features["tokens"] else ""
    images = f"{features['train']:,} images to learn from, {features['test']:,} to test on (part {features['part']})"
    return f"{layers}{tokens}, {features['width']:,} numbers; {images}, {features['classes']:,} classes"
