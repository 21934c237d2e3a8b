"""The page of two models on the same images: who is better, whether chance could do it, and where they differ."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.core.environment import package_version
from vitlab.data.dataset import Dataset
from vitlab.data.decode import decode
from vitlab.evaluation.answers import OTHER, Answers
from vitlab.evaluation.paired import Comparison
from vitlab.report.evaluation_page import mistake
from vitlab.report.figures import jpeg
from vitlab.report.page import Bar, Bars, Cell, Gallery, Matrix, Report, Section, Tile

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
            "Only the images that one of them gets right and the other does not can tell them apart.",
            ["B right", "B wrong"],
            [
                ("A right", [Cell(f"{result.both_right:,}", plain=True), Cell(f"{result.only_a:,}", heat=0.4)]),
                ("A wrong", [Cell(f"{result.only_b:,}", heat=0.4), Cell(f"{result.both_wrong:,}")]),
            ],
        ),
        _class_bars(result.per_class),
        *_gallery("Only A is right", first.right & ~second.right, second, names, dataset, ids_B),
        *_gallery("Only B is right", second.right & ~first.right, first, names, dataset, ids_B),
    ]
    return Report(
        title=f"{result.a} (A) and {result.b} (B)",
        headline=_headline(result.difference, result.p),
        subline=f"B minus A, 95 % interval: {low:+.1f} to {high:+.1f} points · McNemar p = {result.p:.3g}",
        facts=[
            ("A", f"{result.a}: {result.top1_a:.2%}"),
            ("B", f"{result.b}: {result.top1_b:.2%}"),
            ("data", f"{result.data}, part {result.part}, {result.n:,} images"),
            ("McNemar", f"exact p = {result.p:.4g}, mid-p = {result.p_mid:.4g}"),
            ("command", command),
            *(("note", note) for note in result.notes),
        ],
        sections=sections,
        footer=f"vitlab {package_version('vitlab')} · interval by paired bootstrap · all numbers are in comparison.json",
    )


def _headline(difference: float, p: float) -> str:
    if not difference:
        return "A and B are right equally often"
    better, worse = ("B", "A") if difference > 0 else ("A", "B")
    if p >= _UNLIKELY:
        return f"{better} is right {abs(100 * difference):.1f} points more often, which chance can do"
    return f"{better} is right {abs(100 * difference):.1f} points more often than {worse}"


def _class_bars(rows: Sequence[Mapping[str, Any]]) -> Section:
    ordered = sorted(rows, key=lambda row: -abs(row["difference"]))
    largest = max((abs(row["difference"]) for row in rows), default=0.0) or 1.0
    bars = [
        Bar(row["label"], abs(row["difference"]) / largest, _points(row), marked=row["difference"] < 0)
        for row in ordered[:_BARS]
    ]
    more = f"and {len(rows) - len(bars):,} more classes with smaller differences" if len(rows) > len(bars) else ""
    return Bars(
        "Classes", "The difference in points, the largest first: blue where B is better, orange where A is.", bars, more
    )


def _points(row: Mapping[str, Any]) -> str:
    return f"{100 * row['difference']:+.0f} ({row['n']:,})"


def _gallery(
    title: str, rows_B: Tensor, other: Answers, names: Sequence[str], dataset: Dataset, ids_B: Tensor
) -> list[Section]:
    """The images that the other one is surest of, wrongly."""
    order = torch.where(rows_B, other.confidence_B, -1.0).argsort(descending=True, stable=True)
    chosen = order[: min(_SHOWN, int(rows_B.sum()))].tolist()
    tiles = [
        Tile(
            _picture(dataset, int(ids_B[row])),
            "the other "
            + mistake(names[int(other.answer_B[row])], other.confidence_B[row], names[int(other.truth_B[row])]),
        )
        for row in chosen
    ]
    return [Gallery(title, f"{int(rows_B.sum()):,} images.", tiles, photos=True)] if tiles else []


def _picture(dataset: Dataset, index: int) -> bytes:
    """As it lies there: the two models may see it in different preprocessings."""
    source = dataset.read(index)
    if isinstance(source, np.ndarray) and source.shape[2] not in (1, 3):
        source = source[:, :, :1]  # pixels of other channels have no colours; the first one is shown
    pixels_CYX = decode(source, "RGB")
    return jpeg(Image.fromarray(pixels_CYX.permute(1, 2, 0).numpy()), _SIDE_PX)
