"""The page of a Noisy Student: accuracy by generation, what was pseudo-labelled, and what the teacher was surest of."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.core.errors import amount
from vitlab.data.dataset import Dataset
from vitlab.engines.classifier import Classifier
from vitlab.report.charts import Chart, Series
from vitlab.report.page import Files, Gallery, Report, Section, Snippets, Table, Tile, percent, percent_range
from vitlab.report.pictures import Pictures, spread_over_classes
from vitlab.training.pseudo_labels import PseudoLabels, Selection

_SHOWN = 18  # pictures of a generation: three rows
_MOST_ROWS = 60  # classes in the table

Row = Mapping[str, Any]


def confident_tiles(classifier: Classifier, images: Dataset, labels: PseudoLabels, selection: Selection) -> list[Tile]:
    """The surest pseudo-labels, spread over the classes, as the teacher saw the images."""
    rows = selection.rows.unique()
    shown = rows[spread_over_classes(labels.answer_N[rows], labels.confidence_N[rows], _SHOWN)].tolist()
    pictures = Pictures(classifier, images, rows.new_tensor(range(len(images))))
    tiles: list[Tile] = []
    for row in shown:
        name, sure = labels.classes[int(labels.answer_N[row])], float(labels.confidence_N[row])
        tile = pictures.tile(row, f"{name} ({percent(sure, 0)})", good=True)
        tiles.append(dataclasses.replace(tile, good=None))  # nobody knows whether it is right
    return tiles


def build_noisy_student_page(record: Row, tiles: Sequence[Sequence[Tile]], *, title: str) -> Report:
    """`record` is what `noisy_student.json` has; `tiles` are the pictures of each generation."""
    rows: list[Row] = list(record["generations"])
    finish: Row | None = record["finish"]
    last = finish if finish is not None and record["delivered"] == finish["run"] else rows[-1]
    first, tested = record["teacher"]["test"], last["test"]
    sections: list[Section] = [*_chart(record, rows, finish), _table(record, rows, finish)]
    for row, shown in zip(rows, tiles, strict=True):
        caption = "What the teacher was surest of, as it saw the images; they are trained on under noise."
        sections.append(Gallery(f"Pseudo-labels {row['generation']}", caption, shown))
    sections += [
        _counts(rows[-1]),
        Snippets("Repeat it", "", [("On the command line", record["command"])]),
        _files(record, rows, finish),
    ]
    number = percent(tested["top1"]) if tested else ""
    beside = (
        f"of {tested['n']:,} test images right; the first teacher {percent(first['top1'])}" if tested and first else ""
    )
    return Report(
        title=f"{title}: Noisy Student",
        number=number,
        headline=beside or "Trained; there was nothing to test on",
        subline=f"{last['model']}, after {amount(len(rows), 'generation')}",
        stats=_stats(rows[-1], tested),
        facts=[
            ("images", record["counts"]),
            ("chosen", record["reason"]),
            *(("note", note) for note in record["notes"]),
        ],
        sections=sections,
        footer="all numbers are in noisy_student.json",
        warnings=record["warnings"],
    )


def _stats(row: Row, tested: Row) -> list[tuple[str, str]]:
    found = row["pseudo_labels"]
    stats = [] if not tested else [("95 % interval", percent_range(*tested["top1_interval"]))]
    return [
        *stats,
        ("labelled images", f"{row['labelled_images']:,}"),
        ("unlabelled images", f"{found['images']:,}"),
        ("kept", f"{found['different']:,}"),
        ("labelled share of an epoch", percent(row["labelled_share"])),
    ]


def _chart(record: Row, rows: Sequence[Row], finish: Row | None) -> list[Section]:
    first = record["teacher"]["test"]
    if not first:
        return []
    tests = [first, *(row["test"] for row in rows), *([] if finish is None else [finish["test"]])]
    points = [(float(number), float(test["top1"])) for number, test in enumerate(tests)]
    ends = [[(float(number), float(test["top1_interval"][end])) for number, test in enumerate(tests)] for end in (0, 1)]
    series = [
        Series("test accuracy", points, "dots"),
        Series("95 % interval, lower end", ends[0], "dashed", 1),
        Series("upper end", ends[1], "dashed", 1),
    ]
    caption = "Generation 0 is the first teacher" + ("." if finish is None else "; the last point is the finish.")
    return [Chart("Accuracy", caption, series, "generation", "test accuracy", percent=True, wide=True, whole_x=True)]


def _table(record: Row, rows: Sequence[Row], finish: Row | None) -> Table:
    header = ("", "model", "accuracy", "95 % interval", "over its teacher", "p", "kept", "right")
    first = record["teacher"]
    lines = [("teacher", first["model"], *_accuracy(first["test"]), "", "", "", "")]
    for row in rows:
        found = row["pseudo_labels"]
        right = "" if found["accuracy"] is None else percent(found["accuracy"]["kept"])
        lines.append((f"generation {row['generation']}", *_result(row), f"{found['different']:,}", right))
    if finish is not None:
        lines.append(("finish", *_result(finish), "", ""))
    caption = (
        "Each student on the test images, beside its teacher on the same ones: the difference in points with its 95 % "
        "interval (paired bootstrap), and McNemar's exact p; the different pseudo-labelled images that were kept. The test "
        "images chose nothing."
    )
    notes = ["How many of these are right is known from labels of the source, which serve this column alone."]
    known = any(row["pseudo_labels"]["accuracy"] is not None for row in rows)
    return Table("Generations", caption, header, lines, notes=notes if known else ())


def _accuracy(test: Row) -> tuple[str, str]:
    return (percent(test["top1"], 2), percent_range(*test["top1_interval"])) if test else ("", "")


def _result(row: Row) -> tuple[str, str, str, str, str]:
    margin = row["margin"]
    if margin is None:
        return row["model"], *_accuracy(row["test"]), "", ""
    low, high = margin["interval"]
    points = f"{100 * margin['difference']:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
    return row["model"], *_accuracy(row["test"]), points, f"{margin['p']:.3g}"


def _counts(row: Row) -> Table:
    found = row["pseudo_labels"]
    header = ("class", "confident", "kept", "of these copies", "left out")
    ordered = sorted(found["classes"], key=lambda one: one["confident"])
    lines = [
        (one["label"], *(f"{one[name]:,}" for name in ("confident", "kept", "duplicated", "dropped")))
        for one in ordered[:_MOST_ROWS]
    ]
    caption = (
        f"Generation {row['generation']}, the rarest first: images at a confidence of {found['threshold']:g} or more, and "
        f"{found['per_class']:,} of each class, the most confident of many, copies of few. {found['below_threshold']:,} "
        f"images were below, and {found['left_out']:,} were copies of labelled or test images."
    )
    if len(ordered) > len(lines):
        caption += f" These are the first {len(lines)} of {len(ordered):,} classes; noisy_student.json has all."
    return Table("Classes", caption, header, lines)


def _files(record: Row, rows: Sequence[Row], finish: Row | None) -> Files:
    links = [("noisy_student.json", "every number"), ("recipe.toml", "the recipe of teacher and students")]
    if record["teacher"]["run"] == "generation-0":  # and not a model that was given
        links.append(("generation-0/report.html", "the run of the first teacher"))
    for row in rows:
        links.append((row["pseudo_labels"]["file"], f"the teacher's probabilities for generation {row['generation']}"))
        links.append((f"{row['run']}/report.html", f"the run of generation {row['generation']}"))
    links += [] if finish is None else [(f"{finish['run']}/report.html", "the run of the finish")]
    return Files("Files", "Beside this page.", links)
