"""The page of an evaluation: how good, where it fails, whether it knows, and what the mistakes look like.

Owns the choice of what is shown. Letters: B images, K classes, A answers (the classes, and one for anything else).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.core.environment import package_version
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.answers import OTHER, Answers, OneLabel, SeveralLabels
from vitlab.evaluation.calibration import BINS, Reliability
from vitlab.evaluation.measures import MEASURES, TOP
from vitlab.evaluation.metrics import SKEWED, ClassScores
from vitlab.evaluation.result import EvaluationResult
from vitlab.evaluation.scoring import Account
from vitlab.models.names import format_name
from vitlab.report.evaluation_figures import confusion_overview, reliability_diagram, risk_curve, sorted_curve
from vitlab.report.page import Bar, Bars, Cell, Example, Examples, Figure, Gallery, Matrix, Report, Section, Table, Tile
from vitlab.report.pictures import Pictures

_IN_A_TABLE = 30  # classes whose confusion can be read as numbers; beyond, a drawing shows where mistakes gather
_BARS = 24  # classes with a bar each; of more, the worst
_MISTAKES = 12
_PAIRS = 6
_OF_A_PAIR = 4
_LEAST_ROOM = 1e-12  # between a threshold and the end of what a probability can be; against a division by zero
_INTERVAL = " (95 % interval {low} to {high})"
_DARKEST = 0.75  # so that the number in the cell can be read


def build_evaluation_page(
    result: EvaluationResult, classifier: Classifier, command: str, account: Account | None
) -> Report:
    """The page of an evaluation; without an account of the head's answers, that of features alone."""
    headline, subline, sections = _features_page(result)
    if account is not None:
        pictures = Pictures(classifier, account.scored.dataset, account.scored.ids_B)
        calibrated = None if account.calibrated is None else account.calibrated.reliability
        if isinstance(account.case, OneLabel):
            headline, subline, answers = _one_label_page(result, account.case, calibrated, pictures)
            sections = [*answers, *sections]
        else:
            headline, subline, sections = _several_labels_page(result, account.case, calibrated, pictures)
    intervals = "Wilson" if account is None else "bootstrap"
    return Report(
        title=f"{result.model} on {result.data}",
        headline=headline,
        subline=subline,
        facts=_facts(result, classifier, command),
        sections=sections,
        footer=f"vitlab {package_version('vitlab')} · intervals by {intervals} · every number is in evaluation.json as well",
    )


def _one_label_page(
    result: EvaluationResult, case: OneLabel, calibrated: Reliability | None, pictures: Pictures
) -> tuple[str, str, list[Section]]:
    """Headline, the line below it, and sections, where images have one label each."""
    classes, values = pictures.dataset.classes, result.measures
    names = (*classes, OTHER)
    low, high = result.intervals["top1"]
    recall = case.classes.macro()["recall"]
    skewed = f"; {recall:.1%} as a mean over classes" if case.classes.skew >= SKEWED else ""
    # Of five labels or fewer it says nothing.
    top5 = f" · top-5 {values['top5']:.1%}" if len(pictures.classifier.labels) > TOP else ""
    sections: list[Section] = [
        *confusion_section(case.confusion_KA, names),
        _class_bars(case.classes, classes),
        *_class_curve(case.classes),
        _reliability(case.reliability, calibrated, result),
        _risk(case),
        *_confused_pairs(case, names, pictures),
        *_worst(case.answers, names, pictures),
    ]
    subline = f"95 % interval {low:.1%} to {high:.1%}{top5} · ECE {values['ece']:.3f}"
    return f"{values['top1']:.1%} right of {case.num_images:,} images{skewed}", subline, sections


def _several_labels_page(
    result: EvaluationResult, case: SeveralLabels, calibrated: Reliability | None, pictures: Pictures
) -> tuple[str, str, list[Section]]:
    """The same where images may have several labels each."""
    classes, values = pictures.dataset.classes, result.measures
    ranked = [0.0 if value != value else value for value in case.average_precision_K.tolist()]
    sections: list[Section] = [
        _bars(
            "Average precision",
            "Each class by itself: 1 where every image with it stands before every other.",
            [
                (name, value, f"{value:.2f} of {int(count):,}")
                for name, value, count in zip(classes, ranked, case.classes.support_K.tolist(), strict=True)
                if count
            ],
        ),
        _reliability(case.reliability, calibrated, result),
        _class_table(case, classes, result, own_thresholds=bool(pictures.classifier.bundle.thresholds)),
        *_worst_several(case, classes, pictures),
    ]
    low, high = result.intervals.get("mean_ap", (None, None))
    interval = "" if low is None else f"95 % interval {low:.3f} to {high:.3f} · "
    f1 = f"F1 {values['macro_f1']:.1%} over classes, {values['micro_f1']:.1%} over all labels"
    headline = f"Mean average precision {values['mean_ap']:.3f} on {case.num_images:,} images"
    return headline, interval + f1, sections


def _features_page(result: EvaluationResult) -> tuple[str, str, list[Section]]:
    """The same where features alone were measured."""
    rows = result.feature_rows()
    if not rows:
        return "", "", []
    best = max(rows, key=lambda row: row.top1)
    bars = [Bar(row.name, row.top1, row.short()) for row in rows]
    caption = (
        "What simple classifiers make of the model's features, in per cent: few-shot with the range of its draws, "
    )
    section = Bars("Features", caption + "else with the 95 % interval.", bars)
    subline = "Measured on the features of the model; its head was not used"
    return f"{best.top1:.1%} right, by {best.name}", subline, [section]


# --- sections ---------------------------------------------------------------------------------------------------------


def confusion_section(confusion_KA: Tensor, names: Sequence[str]) -> list[Section]:
    """A table that can be read, or, for many classes, a drawing of where mistakes gather."""
    classes = len(confusion_KA)
    if classes > _IN_A_TABLE:
        caption = "Rows are the truth, columns the answer, in the order of the classes. Right answers are left out."
        return [Figure("Confusion", caption, confusion_overview(confusion_KA))]
    other = bool(confusion_KA.shape[1] > classes and confusion_KA[:, classes].any())
    columns = list(names[:classes]) + ([OTHER] if other else [])
    support_K = confusion_KA.sum(dim=1).tolist()
    rows: list[tuple[str, list[Cell]]] = []
    for k, counts in enumerate(confusion_KA.tolist()):
        cells = [
            Cell(str(count) if count else "", plain=True)
            if a == k
            else Cell(str(count) if count else "", heat=_DARKEST * (count / support_K[k]) ** 0.5 if count else 0.0)
            for a, count in enumerate(counts[: len(columns)])
        ]
        rows.append((names[k], cells))
    caption = "Rows are the truth, columns the answer. Right answers are green; a mistake is darker, the more of its row it is."
    return [Matrix("Confusion", caption, columns, rows, "truth \\ answer")]


def _class_bars(scores: ClassScores, classes: Sequence[str]) -> Section:
    columns = (scores.support_K, scores.recall_K, scores.f1_K)
    rows = [
        (name, recall, f"{recall:.0%} of {int(count):,}")
        for name, count, recall, _ in zip(classes, *(column.tolist() for column in columns), strict=True)
        if count
    ]
    return _bars("Classes", "The share of each class's images that is classified correctly, the worst first.", rows)


def _class_table(
    case: SeveralLabels, classes: Sequence[str], result: EvaluationResult, *, own_thresholds: bool
) -> Section:
    """Where every class has a threshold of its own: what it is, and what comes of it."""
    scores = case.classes
    columns = (scores.support_K, case.thresholds_K.sigmoid(), scores.precision_K, scores.recall_K, scores.f1_K)
    rows = [
        (f1, [name, f"{int(n):,}", f"{threshold:.2f}", f"{precision:.0%}", f"{recall:.0%}", f"{f1:.0%}"])
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
    caption = f"All {len(recall_K):,} classes from the worst to the best, by the share that is classified correctly."
    return [Figure("Spread over classes", caption, sorted_curve(recall_K))]


def _bars(title: str, caption: str, rows: Sequence[tuple[str, float, str]]) -> Bars:
    ordered = sorted(rows, key=lambda row: row[1])
    mean = sum(row[1] for row in rows) / max(1, len(rows))
    bars = [Bar(name, value, text, marked=value < mean) for name, value, text in ordered[:_BARS]]
    left = len(rows) - len(bars)
    more = f"and {left:,} more classes, the worst of them at {ordered[_BARS][1]:.0%}" if left else ""
    return Bars(title, f"{caption} Orange is below the mean of {mean:.0%}.", bars, more)


def _reliability(before: Reliability, after: Reliability | None, result: EvaluationResult) -> Section:
    caption = (
        f"Below the dotted line the model is too sure of itself. ECE {before.ece:.3f}, {BINS} bins of equal width."
    )
    if after is not None and result.calibration is not None:
        temperature, fitted_on = result.calibration["temperature"], result.calibration["fitted_on"]
        caption += f" With the temperature {temperature:.2f}, fitted on {fitted_on}: {after.ece:.3f}."
    return Figure("Does it know when it is right?", caption, reliability_diagram(before, after))


def _risk(case: OneLabel) -> Section:
    risk = 0.01  # one mistake in a hundred
    covered = case.risk.coverage_at(risk)
    caption = f"Answering the images it is surest of, it covers {covered:.0%} of them with at most {risk:.0%} mistakes."
    caption += f" Area under the curve (AURC) {case.risk.area:.4f}."
    return Figure("If it may say: I do not know", caption, risk_curve(case.risk))


def _confused_pairs(case: OneLabel, names: Sequence[str], pictures: Pictures) -> list[Section]:
    answers, off_KA = case.answers, case.confusion_KA.clone()
    off_KA.diagonal().zero_()
    order = off_KA.flatten().argsort(descending=True, stable=True)[:_PAIRS].tolist()
    examples: list[Example] = []
    for place in order:
        truth, answer = divmod(place, off_KA.shape[1])
        count = int(off_KA[truth, answer])
        if count < 2:  # what happened once stands among the worst mistakes
            break
        rows_B = ((answers.truth_B == truth) & (answers.answer_B == answer)).nonzero()[:, 0]
        surest = rows_B[answers.confidence_B[rows_B].argsort(descending=True, stable=True)][:_OF_A_PAIR].tolist()
        tiles = [pictures.tile(row, f"{answers.confidence_B[row]:.0%} sure", good=False) for row in surest]
        total = int(case.confusion_KA[truth].sum())
        examples.append(Example(f"{names[truth]} taken for {names[answer]}: {count:,} of {total:,}", tiles))
    if not examples:
        return []
    return [
        Examples("What is taken for what", "The most frequent mistakes, with the images it was surest of.", examples)
    ]


def mistake(predicted: str, confidence: float | Tensor, truth: str) -> str:
    """What stands under the picture of a wrong answer."""
    return f"predicted {predicted} ({100 * confidence:.0f} %), true {truth}"


def _worst(answers: Answers, names: Sequence[str], pictures: Pictures) -> list[Section]:
    wrong_B = ~answers.right
    # The most confident mistakes first: those are the ones that teach something, about the model or about the labels.
    order = torch.where(wrong_B, answers.confidence_B, -1.0).argsort(descending=True, stable=True)
    tiles = [
        pictures.tile_with_rollout(
            row,
            mistake(names[int(answers.answer_B[row])], answers.confidence_B[row], names[int(answers.truth_B[row])]),
            good=False,
        )
        for row in order[: min(_MISTAKES, int(wrong_B.sum()))].tolist()
    ]
    if not tiles:
        return []
    caption = f"{int(wrong_B.sum()):,} of {len(answers):,}, the most confident first."
    caption += " On the right of each what fed the answer (attention rollout) glows." if pictures.has_rollout else ""
    return [Gallery("Worst mistakes", caption, tiles, photos=True, double=pictures.has_rollout)]


def _worst_several(case: SeveralLabels, classes: Sequence[str], pictures: Pictures) -> list[Section]:
    """The images with the surest wrong yes or no: the farthest from the threshold of its class, on the wrong side."""
    p_BK, threshold_K, targets_BK = case.logits_BK.sigmoid(), case.thresholds_K.sigmoid(), case.targets_BK
    beyond_BK = p_BK - threshold_K
    room_BK = torch.where(beyond_BK > 0, 1 - threshold_K, threshold_K).clamp_min(_LEAST_ROOM)
    wrong_BK = (beyond_BK > 0) != (targets_BK > 0)
    worst_B, label_B = torch.where(wrong_BK, beyond_BK.abs() / room_BK, -1.0).max(dim=1)
    order = worst_B.argsort(descending=True, stable=True)[:_MISTAKES].tolist()
    tiles: list[Tile] = []
    for row in order:
        k = int(label_B[row])
        confidence = f"{100 * p_BK[row, k]:.0f} %"
        missed = bool(targets_BK[row, k] > 0)
        caption = (
            f"missed {classes[k]} ({confidence})" if missed else f"predicted {classes[k]} ({confidence}), not true"
        )
        if float(worst_B[row]) >= 0:  # a wrong answer, not a right one that was unsure
            tiles.append(pictures.tile_with_rollout(row, caption, good=False))
    caption = "The surest wrong yes or no of an image."
    return [Gallery("Worst mistakes", caption, tiles, photos=True, double=pictures.has_rollout)] if tiles else []


# --- facts ------------------------------------------------------------------------------------------------------------


def _facts(result: EvaluationResult, classifier: Classifier, command: str) -> list[tuple[str, str]]:
    rule, count = classifier.preprocess, len(classifier.labels)
    size = f"{rule.image_size[0]}x{rule.image_size[1]}"
    features = {} if result.features is None else result.features["features"]
    part = "" if result.part is None else f", part {result.part}, {result.n:,} images"
    rows = [
        ("model", f"{format_name(classifier.model.spec)}, {f'{count:,}' if count else 'no'} classes"),
        ("data", f"{result.data}{part}"),
        ("command", command),
        ("images", f"{size}, {rule.resize}, {rule.filter}, middle {rule.crop_frac:g}"),
        *([("features", _describe_features(features))] if features else []),
        *_measure_facts(result),
    ]
    if result.real is not None:
        rows.append(
            ("ReaL", f"{result.real['top1']:.2%} of {result.real['n']:,}; {result.real['excluded']:,} without labels")
        )
    if result.published is not None:
        published = f"{result.published['top1']:.2%} ({result.published['settings']}; {result.published['source']})"
        rows.append(("published", f"{published}; ours is {100 * result.published['difference']:+.2f} points off"))
    rows.append(("took", f"{result.seconds:.1f} s on {classifier.device}"))
    if result.left_out:
        names = ", ".join(list(result.left_out)[:_MISTAKES])
        rows.append(("left out", f"{len(result.left_out):,} images could not be read: {names}"))
    return rows + [("note", note) for note in dict.fromkeys([*result.notes, *features.get("notes", ())])]


def _measure_facts(result: EvaluationResult) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for measure in MEASURES:
        if measure.fact and measure.key in result.measures:
            value = measure.text(result.measures[measure.key])
            interval = measure.interval_text(result.intervals.get(measure.key), " (95 % interval {low} to {high})")
            rows.append((measure.fact, value + interval))
    if result.macro is not None:
        means = f"recall {result.macro['recall']:.2%}, precision {result.macro['precision']:.2%}"
        rows.append(("mean over classes", means))
    return rows


def _describe_features(features: Mapping[str, Any]) -> str:
    """What the vectors are, who learns from them and who is tested."""
    layers = f"layers {', '.join(map(str, features['layers']))}" if features["layers"] else "what the head sees"
    tokens = f", {features['tokens']} tokens" if features["tokens"] else ""
    images = f"{features['train']:,} images to learn from, {features['test']:,} to test on (part {features['part']})"
    return f"{layers}{tokens}, {features['width']:,} numbers; {images}, {features['classes']:,} classes"
