"""Sections that several pages share: confusion, classes, calibration. Letters: J bins, K classes, A answers, B images."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from vitlab.evaluation.answers import OTHER
from vitlab.evaluation.calibration import BINS, Reliability
from vitlab.report.charts import Chart, Series
from vitlab.report.page import Bar, Bars, Cell, Matrix, Section, Table, percent

_MANY = 30  # classes, beyond which one reads what is confused most before the whole matrix
_ALL_SHOWN = 100  # classes of a matrix; of more, those with the most mistakes
_WORST_SHOWN = 60
_PAIRS = 12
_BARS, _WORST_BARS = 24, 12  # classes with a bar each; of more, so many of the worst


def mistake(predicted: str, confidence: float | Tensor, truth: str) -> str:
    """What stands under the picture of a wrong answer."""
    return f"predicted {predicted} ({100 * confidence:.0f} %), true {truth}"


def licence_in(card: str) -> str:
    """The licence that a model card states; empty where it does not."""
    found = re.search(r"^\| licence \| (.+?) \|$", card, re.MULTILINE)
    return found[1] if found else ""


def confusion(confusion_KA: Tensor, names: Sequence[str]) -> list[Section]:
    """The matrix with its names; of many classes, the most confused pairs before it."""
    matrix = _matrix(confusion_KA, names)
    return [matrix] if len(confusion_KA) <= _MANY else [*_pairs(confusion_KA, names), matrix]


def _matrix(confusion_KA: Tensor, names: Sequence[str]) -> Matrix:
    total, off_KA = len(confusion_KA), confusion_KA.clone()
    off_KA.diagonal().zero_()
    wrong_K = off_KA.sum(dim=1) + off_KA[:, :total].sum(dim=0)  # not recognised, or said of others
    chosen = list(range(total))
    if total > _ALL_SHOWN:
        chosen = sorted(wrong_K.argsort(descending=True, stable=True)[:_WORST_SHOWN].tolist())
    other = [total] if confusion_KA.shape[1] > total and bool(confusion_KA[:, total].any()) else []
    columns = [names[k] for k in chosen] + [OTHER for _ in other]
    counts, support_K = confusion_KA.tolist(), confusion_KA.sum(dim=1).tolist()
    rows = [
        (
            names[k],
            [
                _cell(counts[k][a], support_K[k], names[k], OTHER if a == total else names[a], a == k)
                for a in (*chosen, *other)
            ],
        )
        for k in chosen
    ]
    caption = "Rows are the true class, columns the prediction. A mistake is darker, the more of its row it is."
    if len(chosen) < total:
        caption = f"The {len(chosen)} of {total:,} classes with the most mistakes. {caption}"
    return Matrix(
        "Confusion",
        caption,
        columns,
        rows,
        "true \\ predicted",
        sortable=True,
        errors=[int(wrong_K[k]) for k in chosen],
    )


def _cell(count: int, support: int, truth: str, answer: str, right: bool) -> Cell:
    if not count:
        return Cell("", plain=right)
    hint = f"true {truth}, predicted {answer}: {count:,} of {support:,} ({percent(count / support)})"
    # The square root: one mistake in fifty should still be seen.
    return Cell(str(count), heat=0.0 if right else (count / support) ** 0.5 * 0.8, plain=right, hint=hint)


def most_confused(confusion_KA: Tensor, most: int) -> list[tuple[int, int, int]]:
    """Truth, answer and number of the most frequent mistakes."""
    off_KA = confusion_KA.clone()
    off_KA.diagonal().zero_()
    places = off_KA.flatten().argsort(descending=True, stable=True)[:most].tolist()
    pairs = [divmod(int(place), off_KA.shape[1]) for place in places]
    return [(truth, answer, count) for truth, answer in pairs if (count := int(off_KA[truth, answer]))]


def _pairs(confusion_KA: Tensor, names: Sequence[str]) -> list[Section]:
    rows: list[tuple[str, ...]] = []
    for truth, answer, count in most_confused(confusion_KA, _PAIRS):
        predicted = OTHER if answer == len(confusion_KA) else names[answer]
        rows.append((names[truth], f"{count:,}", percent(count / int(confusion_KA[truth].sum()), 0), predicted))
    if not rows:
        return []
    caption = "The most frequent mistakes, and the share of the class that they are."
    return [Table("Most confused", caption, ("true class", "images", "share", "predicted"), rows)]


def class_bars(confusion_KA: Tensor, names: Sequence[str]) -> Bars:
    """How much of each class is classified correctly, the weakest first, and what the rest is taken for most."""
    rows: list[tuple[str, float, str, str]] = []
    for k, counts in enumerate(confusion_KA.tolist()):
        images, right = sum(counts), counts[k]
        if not images:
            continue
        counts[k] = 0
        most = max(range(len(counts)), key=counts.__getitem__)
        taken = OTHER if most == len(confusion_KA) else names[most]
        note = f"{counts[most]:,} predicted as {taken}" if counts[most] else ""
        rows.append((names[k], right / images, f"{percent(right / images, 0)} of {images:,}", note))
    return bars("Classes", "The share of each class's images that is classified correctly, the weakest first.", rows)


def bars(title: str, caption: str, rows: Sequence[tuple[str, float, str, str]]) -> Bars:
    """Name, value, text and note of each class; those below the mean are marked."""
    ordered = sorted(rows, key=lambda row: row[1])
    mean = sum(row[1] for row in rows) / max(1, len(rows))
    count = len(rows) if len(rows) <= _BARS else _WORST_BARS
    shown = [Bar(name, value, text, value < mean, note) for name, value, text, note in ordered[:count]]
    left = len(rows) - len(shown)
    more = f"and {left:,} more classes, the worst of them at {percent(ordered[count][1], 0)}" if left else ""
    orange = f" Orange is below the mean of {percent(mean, 0)}." if any(bar.marked for bar in shown) else ""
    return Bars(title, caption + orange, shown, more)


def calibration(before: Reliability, after: Reliability | None = None, fitted: str = "") -> Chart:
    """Accuracy over confidence: on the dotted diagonal, a model knows what it knows. `fitted` says how `after` came to be."""
    share_J = before.count_J / before.count_J.sum().clamp(min=1)
    middle_J = (torch.arange(len(share_J)) + 0.5) / len(share_J)
    series = [
        Series("share of the images", list(zip(middle_J.tolist(), share_J.tolist(), strict=True)), "bars", 7),
        Series("perfectly calibrated", [(0, 0), (1, 1)], "guide"),
        Series("accuracy", _filled(before), "dots", 0),
    ]
    if after is not None:
        series.append(Series("with the fitted temperature", _filled(after), "dots", 1))
    caption = (
        f"Below the dotted line the model is too sure of itself. ECE {before.ece:.3f}, {BINS} bins of equal width."
    )
    caption += "" if after is None else f" {fitted}: {after.ece:.3f}."
    return Chart("Calibration", caption, series, "confidence", "share", percent=True, x_range=(0, 1), y_range=(0, 1))


def _filled(table: Reliability) -> list[tuple[float, float]]:
    kept_J = table.count_J > 0
    return list(zip(table.confidence_J[kept_J].tolist(), table.accuracy_J[kept_J].tolist(), strict=True))
