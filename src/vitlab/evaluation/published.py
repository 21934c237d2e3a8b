"""The published tables as data: every cell as it was printed, with its source.

Owns `tables/*.toml`. A cell is kept as text, because 99.50 ± 0.06 says more than a number; `parse_cell` reads the numbers out
of it. `about` says what a row or column stands for in vitlab's own words, so that a record of ours finds its cell.
Loads no torch.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, TypeVar

from vitlab.core import config
from vitlab.core.errors import FileProblem, UnknownName

MISSING = "—"
Unit = Literal["per cent", "fraction", "count"]
_CELL = re.compile(r"(?P<value>\d+(?:\.\d+)?)(?P<times>[kM]?)(?: ± (?P<spread>\d+\.\d+))?")
_TWO = re.compile(r"(?P<first>\d+\.\d+)/ ?(?P<second>\d+\.\d+)\*")  # Noisy Student: its own number and a later one
_TIMES = {"": 1.0, "k": 1e3, "M": 1e6}
_GAP = 2  # spaces between printed columns


@dataclasses.dataclass(frozen=True)
class Cell:
    """The numbers in a printed cell, in the table's own unit; none where it has none."""

    text: str
    values: tuple[float, ...] = ()
    spread: float | None = None  # what stands behind ±


@dataclasses.dataclass(frozen=True)
class Column:
    title: str
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True)
class Row:
    title: str
    cells: tuple[Cell, ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    best: int | None = None  # the column printed in bold


Entry = TypeVar("Entry", Row, Column)


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """A training run that a table rests on: what its compute is counted from. No epochs where nobody says how many."""

    model: str
    pretrained_on: str
    epochs: int | None = None


@dataclasses.dataclass(frozen=True)
class PublishedTable:
    name: str
    version: str
    title: str
    source: str
    unit: Unit
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    cost: tuple[Pretraining, ...] = ()

    def about(self, row: Row, column: Column) -> dict[str, Any]:
        """What the cell of that row and column claims."""
        return {**column.about, **row.about}

    def claims(self) -> Iterator[tuple[Row, Column, Cell]]:
        for row in self.rows:
            for column, cell in zip(self.columns, row.cells, strict=True):
                yield row, column, cell

    def lines(self) -> list[str]:
        """The table as it was printed, for a console."""
        rows = [[row.title, *(cell.text for cell in row.cells)] for row in self.rows]
        return aligned([["", *(column.title for column in self.columns)], *rows])


@dataclasses.dataclass(frozen=True)
class Difference:
    """What one version of a table has otherwise than another; an empty text stands for nothing at all."""

    row: str
    column: str
    older: str
    newer: str


@functools.cache
def published_tables() -> Mapping[str, tuple[PublishedTable, ...]]:
    """All tables by name; of one that was printed twice, the newer version first."""
    found: dict[str, tuple[PublishedTable, ...]] = {}
    folder = resources.files("vitlab.evaluation") / "tables"
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(".toml")]
    for name in sorted(names, key=lambda name: (not name.startswith("table"), name)):  # the paper's numbered ones first
        table = read_table((folder / name).read_text(encoding="utf-8"), name)
        found[table.name] = (table, *found.get(table.name, ()))
    return found


def find_table(name: str) -> tuple[PublishedTable, ...]:
    """The versions of one table, the newest first."""
    tables = published_tables()
    plain = name.casefold().replace(" ", "").replace("_", "-")
    if plain not in tables:
        raise UnknownName("table", name, tables, hint="See `vitlab study list`.")
    return tables[plain]


def read_table(text: str, origin: str) -> PublishedTable:
    """A table from its TOML, with as many cells in each row as there are columns."""
    table = config.parse_toml(text, origin)
    rows = [{**row, "cells": [parse_cell(cell) for cell in row["cells"]]} for row in table["rows"]]
    found = config.from_dict(PublishedTable, {**table, "rows": rows})
    for row in found.rows:
        if len(row.cells) != len(found.columns):
            raise FileProblem(
                f"{origin}: the row '{row.title}' has {len(row.cells)} cells for {len(found.columns)} columns"
            )
    return found


def parse_cell(text: str) -> Cell:
    """`88.55 ± 0.04`, `2.5k`, `86M`, `88.4/88.5*`; anything else is text without a number, as the missing `—` is."""
    if found := _CELL.fullmatch(text):
        times = _TIMES[found["times"]]
        return Cell(text, (float(found["value"]) * times,), float(found["spread"]) if found["spread"] else None)
    if found := _TWO.fullmatch(text):
        return Cell(text, (float(found["first"]), float(found["second"])))
    return Cell(text)


def differences(newer: PublishedTable, older: PublishedTable) -> list[Difference]:
    """Cell by cell; rows and columns are the same where they stand for the same, whatever they are called."""
    found: list[Difference] = []
    for column in newer.columns:
        before = _same(column, older.columns)
        if before is None:
            found.append(Difference("", column.title, "", "new column"))
        elif before.title.casefold() != column.title.casefold():
            found.append(Difference("", column.title, before.title, column.title))
    for row in newer.rows:
        same = _same(row, older.rows)
        if same is None:
            found.append(Difference(row.title, "", "", "new row"))
            continue
        if same.title.casefold() != row.title.casefold():
            found.append(Difference(row.title, "", same.title, row.title))
        for column, cell in zip(newer.columns, row.cells, strict=True):
            before = _same(column, older.columns)
            if before is None:
                continue
            was = same.cells[older.columns.index(before)]
            if was.text.replace("/ ", "/") != cell.text:  # the same pair of numbers, set with a space in one version
                found.append(Difference(row.title, column.title, was.text, cell.text))
    return found


def _same(entry: Entry, others: Sequence[Entry]) -> Entry | None:
    return next((other for other in others if other.about == entry.about), None)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text in columns, each as wide as it needs. The first row is the head: a title that ends in parentheses takes a
    second line for them, so that the columns stay as narrow as their numbers. A row of one cell is the title of those below."""
    heads = [_two_lines(text) for text in rows[0]]
    upper, lower = ([pair[line] for pair in heads] for line in (0, 1))
    above = [upper, lower] if any(upper) else [lower]
    table = [*above, *rows[1:]]
    full = [row for row in table if len(row) == len(table[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(table[0]))]
    gap = " " * _GAP
    return [gap.join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in table]


def _two_lines(title: str) -> tuple[str, str]:
    """The lower line is the one next to the numbers."""
    first, opening, second = title.partition(" (")
    return (first, f"({second}") if opening else ("", title)
