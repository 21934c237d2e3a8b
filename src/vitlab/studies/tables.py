"""`vitlab study`: the published tables beside our own measurements.

A cell that nobody measured stays empty.
"""

import dataclasses
import html
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError
from vitlab.evaluation.published import (
    MISSING,
    Difference,
    PublishedTable,
    aligned,
    differences,
    find_table,
)
from vitlab.evaluation.records import read_records
from vitlab.report.page import Report, Table, render
from vitlab.studies.cells import ComparedCell, compare_cells, rounded
from vitlab.studies.cost import GPU, TPU_SHARE, CostRow, cost_rows
from vitlab.studies.study_file import list_study_names, read_study

RECORDS = Path("docs") / "results" / "records"


@dataclasses.dataclass(frozen=True)
class TableReport:
    """What `vitlab study report TABLE --json` prints; the newest version is first."""

    versions: tuple[PublishedTable, ...]  # the table as printed, the newest first
    changed: tuple[Difference, ...]  # between versions
    compared: tuple[ComparedCell, ...]  # cells beside our own records
    cost: tuple[CostRow, ...]  # of each row: what training it takes
    records: str  # the folder that was looked in
    out: Path | None  # the file that was written

    def measured(self) -> str:
        """How many of the cells are ours too."""
        return f"{sum(one.record is not None for one in self.compared)} of {len(self.compared)} cells measured"

    def text(self) -> str:
        """For a console."""
        parts = [f"{self.versions[0].name}: {self.versions[0].title}"]
        for table in self.tables():
            rows = [table.header, *table.rows]
            parts += ["", table.title, "-" * len(table.title), *aligned(rows), *table.notes]
        return "\n".join(parts)

    def markdown(self) -> str:
        parts = [f"# {self.versions[0].name}: {self.versions[0].title}", ""]
        for table in self.tables():
            rows = [_markdown_row(row, i, table.bold) for i, row in enumerate(table.rows)]
            head = _markdown_row(table.header, -1, ())
            parts += [f"## {table.title}", "", head, "|" + " --- |" * len(table.header), *rows, ""]
            parts += [f"{in_cell(note)}  " for note in table.notes] + [""]
        return "\n".join(parts)

    def page(self) -> str:
        newest = self.versions[0]
        title = f"{newest.name}: {newest.title}"
        return render(Report(title, self.measured(), newest.source, [], self.tables()))

    def sentences(self) -> list[str]:
        return [self.text()] if self.out is None else [self.measured(), f"Written to {self.out}."]

    def to_json(self) -> dict[str, Any]:
        return {
            "table": self.versions[0].name,
            "title": self.versions[0].title,
            "versions": [
                {
                    "version": table.version,
                    "source": table.source,
                    "unit": table.unit,
                    "notes": list(table.notes),
                    "columns": [column.title for column in table.columns],
                    "rows": [[row.title, *(cell.text for cell in row.cells)] for row in table.rows],
                }
                for table in self.versions
            ],
            "differences": [dataclasses.asdict(found) for found in self.changed],
            "cells": [compared.to_dict() for compared in self.compared],
            "cost": [dataclasses.asdict(row) for row in self.cost],
            "records": self.records,
            "out": None if self.out is None else str(self.out),
        }

    def tables(self) -> list[Table]:
        """Everything there is to show."""
        tables = [printed_table(table) for table in self.versions]
        if self.changed:
            rows = [(one.row, one.column, one.older or MISSING, one.newer) for one in self.changed]
            new, old = self.versions[0].version, self.versions[-1].version
            tables.append(Table(f"From {old} to {new}", "", ("row", "column", old, new), rows))
        if self.compared:
            tables.append(self._side_by_side())
        if self.cost:
            tables.append(self._costs())
        return tables

    def _side_by_side(self) -> Table:
        names = [table.version for table in reversed(self.versions)]
        by_column = any("model" in column.about for column in self.versions[0].columns)
        head = ("", *(f"paper {name}" for name in names), "vitlab", "setting")
        rows: list[tuple[str, ...]] = []
        group = ""
        for one in self.compared:
            model, title = (one.column, one.row) if by_column else (one.row, one.column)
            if model != group:
                rows.append((model,))
                group = model
            rows.append((title, *(one.paper.get(name, "") for name in names), one.ours, one.setting))
        where = f"the records are in {self.records}" if self.records else "there is no folder of records here"
        notes = [f"{self.measured()}: {where}. What was not measured is empty."]
        studies = [name for name in list_study_names() if read_study(name).table == self.versions[0].name]
        notes += [f"The same question at other scales: vitlab study report {name}" for name in studies]
        return Table("Paper and vitlab", "", head, rows, notes)

    def _costs(self) -> Table:
        names = sorted({name for row in self.cost for name in row.printed_core_days})
        head = ("model", "trained on", "epochs", "exaFLOPs printed", "counted")
        head += (*(f"TPUv3 core-days {name}" for name in names), "counted", "share of peak", f"{GPU} days")
        rows = [
            (
                *(row.model, row.pretrained_on, str(row.epochs or ""), row.printed_exaflops, rounded(row.exaflops)),
                *(row.printed_core_days.get(name, "") for name in names),
                *(rounded(row.core_days), "" if row.implied_share is None else f"{row.implied_share:.0%}"),
                rounded(row.gpu_days),
            )
            for row in self.cost
        ]
        speeds = sorted({round(row.gpu_tflops) for row in self.cost if row.gpu_tflops is not None}, reverse=True)
        notes = [
            "Counted, not measured: 6 x multiply-adds x epochs x images, without convolution taps on padding.",
            f"Core-days counted at {TPU_SHARE:.0%} of 61.5 TFLOP/s per core; the share is what the printed days imply.",
            f"{GPU} days at {', '.join(map(str, speeds))} TFLOP/s sustained: vitlab's own step, by kind of model.",
        ]
        return Table("Cost of the pre-training", "", head, rows, notes)


def printed_table(table: PublishedTable) -> Table:
    """A published table as it was printed."""
    head = ("", *(column.title for column in table.columns))
    rows = [(row.title, *(cell.text for cell in row.cells)) for row in table.rows]
    notes = [f"Source: {table.source}. In {table.unit}.", *table.notes]
    bold = frozenset((i, row.best + 1) for i, row in enumerate(table.rows) if row.best is not None)
    return Table(f"As printed, {table.version}", "", head, rows, notes, bold)


def report_table(
    table: str, *, records: str | Path | None = None, out: str | Path | None = None, gpu_tflops: float | None = None
) -> TableReport:
    """A published table beside our records, also as a new .md or .html file `out`.

    Args:
        table: One of `list_studies`.
        records: A folder of records; default docs/results/records below the current folder, then in vitlab's own checkout.
        out: A new .md or .html file.
        gpu_tflops: Sustained speed of a GPU to count training days with.
    """
    versions = find_table(table)
    place = require_file(out)
    folder = _folder(records)
    known = [] if folder is None else read_records(folder)
    report = TableReport(
        versions=versions,
        changed=tuple(differences(versions[0], versions[-1])) if len(versions) > 1 else (),
        compared=tuple(compare_cells(versions, known)),
        cost=tuple(cost_rows(versions, gpu_tflops)),
        records="" if folder is None else str(folder),
        out=place,
    )
    if place is not None:
        fsio.make_folder(place.parent)
        fsio.write_new_file(place, report.markdown() if place.suffix == ".md" else report.page())
    return report


def require_file(out: str | Path | None) -> Path | None:
    """Where a report is written, if anywhere; an error for a file that is there, or of another kind."""
    place = None if out is None else fsio.require_free(Path(out))
    if place is not None and place.suffix not in (".md", ".html"):
        raise UsageError(f"{place} should end in .md or .html", hint="That decides what is written.")
    return place


def _folder(records: str | Path | None) -> Path | None:
    if records is not None:
        if not Path(records).is_dir():
            raise FileProblem(f"{records} is not a folder of records")
        return Path(records)
    checkout = Path(__file__).parents[3] / RECORDS
    return next((folder for folder in (RECORDS, checkout) if folder.is_dir()), None)


# --- writing ----------------------------------------------------------------------------------------------------------


def in_cell(text: str) -> str:
    """Markdown has no other way to say a bar inside a table, and takes HTML for HTML."""
    return html.escape(text, quote=False).replace("|", "\\|").replace("*", "\\*")


def _markdown_row(row: Sequence[str], number: int, bold: Collection[tuple[int, int]]) -> str:
    if len(row) == 1:
        return f"| **{in_cell(row[0])}** |"
    cells = (_in_bold(text) if (number, i) in bold else in_cell(text) for i, text in enumerate(row))
    return f"| {' | '.join(cells)} |"


def _in_bold(text: str) -> str:
    """The number, without its ±."""
    number, space, spread = text.partition(" ")
    return f"**{in_cell(number)}**{space}{in_cell(spread)}"
