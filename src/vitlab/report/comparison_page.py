"""The page of two models on the same images: who is better, whether chance could do it, and where they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.evaluation.answers import OTHER, Answers
from vitlab.evaluation.paired import Comparison
from vitlab.report.figures import thumbnail
from vitlab.report.page import Bar, Bars, Cell, Files, Gallery, Matrix, Report, Section, Snippets, Tile, percent
from vitlab.report.pictures import spread_over_classes
from vitlab.report.sections import mistake

_SHOWN = 12
_BARS = 24  # classes with a bar each; of more, those that differ most
_SIDE_PX = 224  # twice what a phone shows of a tile
_UNLIKELY = 0.05  # the usual line; the number itself stands beside it


def build_comparison_page(
    result: Comparison, command: str, first: Answers, second: Answers, dataset: Dataset, ids_B: Tensor
) -> Report:
    """The page; row i of both answers is about image `ids_B[i]`."""
    low, high = (100 * end for end in result.interval)
    names = (*dataset.classes, OTHER)
    sections: list[Section] = [
        Matrix(
            "Agreement",
            "What sets them apart are the images that one of them gets right and the other does not.",
            ["B right", "B wrong"],
            [
                ("A right", [Cell(f"{result.both_right:,}", plain=True), Cell(f"{result.only_a:,}", heat=0.3)]),
                ("A wrong", [Cell(f"{result.only_b:,}", heat=0.3), Cell(f"{result.both_wrong:,}")]),
            ],
        ),
        _class_bars(result.per_class),
        *_gallery("Only A is right", first.right & ~second.right, second, names, dataset, ids_B),
        *_gallery("Only B is right", second.right & ~first.right, first, names, dataset, ids_B),
    ]
    number, headline = _headline(result.difference, result.p)
    return Report(
        title=f"{result.a} (A) and {result.b} (B) on {result.data}",
        number=number,
        headline=headline,
        subline="",
        stats=[
            ("B − A, 95 % interval", f"{low:+.1f} to {high:+.1f}"),
            ("McNemar p", f"{result.p:.3g}"),
            ("A right", percent(result.top1_a)),
            ("B right", percent(result.top1_b)),
            ("images", f"{result.n:,}"),
            ("took", f"{result.seconds:.1f} s"),
        ],
        facts=[
            ("A", f"{result.a}: {percent(result.top1_a, 2)}"),
            ("B", f"{result.b}: {percent(result.top1_b, 2)}"),
            ("data", f"{result.data}, part {result.part}, {result.n:,} images"),
            ("McNemar", f"exact p = {result.p:.4g}, mid-p = {result.p_mid:.4g}"),
            *(("note", note) for note in result.notes),
        ],
        sections=[
            *sections,
            Snippets("Repeat it", "", [("On the command line", command)]),
            Files(
                "Files",
                "Beside this page.",
                [("comparison.json", "every number"), ("answers.csv", "both answers for every image")],
            ),
        ],
        footer="interval by paired bootstrap · all numbers are in comparison.json",
    )


def _headline(difference: float, p: float) -> tuple[str, str]:
    """The difference, and the sentence that goes with it."""
    if not difference:
        return "±0 points", "A and B are right equally often"
    better, worse = ("B", "A") if difference > 0 else ("A", "B")
    chance = ", which chance can do" if p >= _UNLIKELY else ""
    return f"{abs(100 * difference):.1f} points", f"{better} is right more often than {worse}{chance}"


def _class_bars(rows: Sequence[Mapping[str, Any]]) -> Section:
    ordered = sorted(rows, key=lambda row: -abs(row["difference"]))
    largest = max((abs(row["difference"]) for row in rows), default=0.0) or 1.0
    bars: list[Bar] = []
    for row in ordered[:_BARS]:
        points = f"{100 * row['difference']:+.0f} ({row['n']:,})"
        bars.append(Bar(row["label"], abs(row["difference"]) / largest, points, marked=row["difference"] < 0))
    more = f"and {len(rows) - len(bars):,} more classes with smaller differences" if len(rows) > len(bars) else ""
    return Bars(
        "Classes", "The difference in points, the largest first: blue where B is better, orange where A is.", bars, more
    )


def _gallery(
    title: str, rows_B: Tensor, other: Answers, names: Sequence[str], dataset: Dataset, ids_B: Tensor
) -> list[Section]:
    """Images of every class that the other one is surest of, wrongly."""
    of_B = rows_B.nonzero()[:, 0]
    chosen = of_B[spread_over_classes(other.truth_B[of_B], other.confidence_B[of_B], _SHOWN)].tolist()
    tiles = [
        Tile(
            thumbnail(dataset.read(int(ids_B[row])), _SIDE_PX),  # the two may see it in different preprocessings
            "the other "
            + mistake(names[int(other.answer_B[row])], other.confidence_B[row], names[int(other.truth_B[row])]),
        )
        for row in chosen
    ]
    return [Gallery(title, f"{len(of_B):,} images, spread over the classes.", tiles, photos=True)] if tiles else []
