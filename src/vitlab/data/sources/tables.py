"""Images listed in a CSV or parquet table: `path,label[,split,group]`.

Several labels are separated by `;`. Paths count from the table's folder, so that both can be moved together.
"""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core.errors import FileProblem, MissingExtra, UsageError, VitlabError, amount
from vitlab.core.reading import open_regular
from vitlab.data.dataset import (
    PART_NAMES,
    PARTS,
    Dataset,
    Opened,
    class_order,
    one_spelling,
    several_labels,
    single_labels,
    some_of,
)
from vitlab.data.sources.folders import FileReader

SUFFIXES = (".csv", ".tsv", ".parquet")
COLUMNS = ("path", "label", "split", "group")
Columns = Mapping[str, str]  # what a table calls its columns, by our names: {"path": "filename"}
_SEPARATOR = ";"
_MISTAKEN = "|,"  # what other programs have between labels
_REST = "\0"  # where the reader puts values that have no column; no column can be called so
_COLUMNS_SHOWN = 8
_SHOWN = 3  # names in an error; the number of the others follows


class Row(NamedTuple):
    """One image, and `where` in the table it stands."""

    path: str
    label: str
    split: str
    group: str
    where: str


def open_table(path: Path, columns: Columns | None = None, *, needs_labels: bool = True) -> Opened:
    """The images of a table, by its `split` column, or all in one part. Only unless `needs_labels` may the labels lack."""
    read = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
    rows = read(path, columns or {}, needs_labels)
    if not rows:
        raise FileProblem(f"{path} lists no images")
    _require_files(path, rows)
    multi = any(_SEPARATOR in row.label for row in rows) or not (needs_labels or all(row.label for row in rows))
    if not multi and (bare := [row.where for row in rows if not row.label]):
        raise FileProblem(
            f"{path}, {bare[0]}: no label ({amount(len(bare), 'such row')})",
            hint=f"Only where images have several labels, separated by '{_SEPARATOR}', may one have none.",
        )
    spelled = [_labels(row.label) if multi else (row.label,) for row in rows]
    classes = class_order({name for names in spelled for name in names})
    number = {name: i for i, name in enumerate(classes)}
    parts: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        parts.setdefault(PART_NAMES.get(row.split, row.split) or "all", []).append(i)
    _require_parts(path, parts)
    opened: dict[str, Dataset] = {}
    for name in filter(parts.__contains__, (*PARTS, "all")):
        keys = [rows[i].path for i in parts[name]]
        labels = [[number[label] for label in spelled[i]] for i in parts[name]]
        groups = [rows[i].group for i in parts[name]]
        opened[name] = Dataset(
            str(path) if name == "all" else f"{path} {name}",
            tuple(classes),
            keys,
            several_labels(labels) if multi else single_labels([label for (label,) in labels]),
            FileReader(path.parent, keys),
            groups if any(groups) else None,
        )
    return Opened(opened, () if multi else _combined(path, classes))


def _combined(path: Path, classes: Sequence[str]) -> tuple[str, ...]:
    """A note where labels look like several in one, which only `;` would tell apart."""
    phrases = [name for name in classes if len(re.findall(rf"[^\s{_MISTAKEN}]+", name)) > 1]
    for sign in _MISTAKEN:
        combined = [name for name in phrases if sign in name]
        if 2 * len(combined) > len(phrases):
            name = combined[0]
            several = _SEPARATOR.join(word.strip() for word in name.split(sign))
            return (f"{path}: '{sign}' does not separate labels: '{name}' is one class; write '{several}' for several",)
    return ()


def _labels(text: str) -> tuple[str, ...]:
    """`cat;dog` -> both; an image may have none."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(_SEPARATOR) if name.strip()))


def _read_csv(path: Path, columns: Columns, needs_labels: bool) -> list[Row]:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            delimiter = _delimiter(file.readline())
            file.seek(0)
            table = csv.DictReader(file, delimiter=delimiter, strict=True, restkey=_REST)
            present = [(name or "").strip().lower() for name in table.fieldnames or ()]
            table.fieldnames = _renamed(path, present, columns, needs_labels)
            return [_row(path, f"line {table.line_num}", entry) for entry in table]
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, csv.Error) as error:
        raise FileProblem(f"{path} cannot be read as a table: {error}") from None


def _delimiter(header: str) -> str:
    """By the header: `;` is between columns where the decimal sign is the comma."""
    if "\t" in header:
        return "\t"
    return ";" if ";" in header and "," not in header else ","


def _read_parquet(path: Path, columns: Columns, needs_labels: bool) -> list[Row]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", f"reading {path}") from None
    try:
        with open_regular(path) as file:
            table: Any = parquet.read_table(file)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        entries = table.rename_columns(_renamed(path, list(table.column_names), columns, needs_labels)).to_pylist()
    except VitlabError:
        raise
    except Exception as error:  # pyarrow has its own family, with internals in the text
        raise FileProblem(f"{path} cannot be read as parquet ({type(error).__name__})") from None
    return [_row(path, f"row {i}", entry) for i, entry in enumerate(entries)]


def _row(path: Path, where: str, entry: dict[str, Any]) -> Row:
    if _REST in entry or (entry.get("path") or "") == "":
        raise FileProblem(f"{path}, {where}: {'more values than columns' if _REST in entry else 'no path'}")
    label = entry.get("label")
    text = _SEPARATOR.join(_text(name) for name in (label if isinstance(label, list) else [label]))
    given = (entry.get(name) for name in ("split", "group"))
    split, group = ("" if value is None else str(value).strip() for value in given)  # 0 is a group like any other
    return Row(str(entry["path"]), one_spelling(text.strip()), split.lower(), group, where)


def _text(label: Any) -> str:
    """A label as text; parquet may hold numbers, whole ones even as floats."""
    if label is None or label != label:
        return ""
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def _renamed(path: Path, present: Sequence[str], columns: Columns, needs_labels: bool) -> list[str]:
    """The columns by our names. One that has such a name by chance, where `columns` says another, loses it."""
    if unknown := sorted(columns.keys() - set(COLUMNS)):
        raise UsageError(f"tables have no column for '{unknown[0]}'", hint=f"Known: {', '.join(COLUMNS)}.")
    if len(set(present)) != len(present):
        raise FileProblem(f"{path} names a column twice: {', '.join(present)}")
    ours = {theirs.strip().lower(): name for name, theirs in columns.items()}
    if len(ours) != len(columns):
        raise UsageError(f"two columns of {path} cannot be the same one: {_spelled(columns)}")
    plain = [name.strip().lower() for name in present]
    for name in ("path", *(["label"] if needs_labels else []), *columns):
        theirs = columns.get(name, name)
        if theirs.strip().lower() not in plain:
            raise FileProblem(
                f"{path} has no column '{theirs}'; it has: {some_of(present, _COLUMNS_SHOWN) or 'none'}",
                hint=f"Name the columns: --columns {_spelled({'path': 'NAME', 'label': 'NAME', **columns})}; "
                f"known: {', '.join(COLUMNS)}.",
            )
    return [
        ours.get(own, f"{_REST}{name}" if own in columns else name) for own, name in zip(plain, present, strict=True)
    ]


def _spelled(columns: Columns) -> str:
    return ",".join(f"{name}={theirs}" for name, theirs in columns.items())


def _require_parts(path: Path, parts: dict[str, list[int]]) -> None:
    if unknown := [name for name in parts if name not in (*PARTS, "all")]:
        raise FileProblem(f"{path} has the split '{unknown[0]}'", hint=f"Known: {', '.join(PARTS)}.")
    if "all" in parts and len(parts) > 1:
        raise FileProblem(
            f"{path}: {amount(len(parts['all']), 'row')} without a split, though others have one",
            hint="Fill in the column, or leave it out.",
        )


def _require_files(path: Path, rows: Sequence[Row]) -> None:
    """Check before any work, not an hour into training."""
    root = str(path.parent)
    missing = [row.path for row in rows if not os.path.isfile(os.path.join(root, row.path))]  # noqa: PTH113, PTH118 (100,000 of them)
    if missing:
        raise FileProblem(
            f"{path} lists {amount(len(missing), 'file')} that cannot be found: {some_of(missing, _SHOWN)}",
            hint=f"Paths count from {path.parent.resolve()}.",
        )
