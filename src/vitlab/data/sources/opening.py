"""One way in for all data: a path, an address or a name -> its parts.

A form in which files hold a data set is one row of `_FORMS`.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.dataset import Dataset, Opened, some_of
from vitlab.data.sources import (
    addresses,
    arrays,
    columnar,
    folders,
    loose_images,
    named_opening,
    packed,
    shards,
    tables,
    torch_sets,
    vtab_opening,
)
from vitlab.data.synthetic.names import open_synthetic
from vitlab.data.synthetic.settings import is_synthetic

_SHOWN = 5  # classes in an error; the number of the others follows

Source = str | Path | Opened | Dataset | Any  # the last: a map-style data set of torch's, or one that looks like it
_VTAB = "vtab:"  # before the name of a set: its thousand images as the benchmark takes them


def _holds_tars(folder: Path) -> bool:
    return any(folder.glob("*.tar"))


def _open_shards(path: Path, _: tables.Columns | None, needs_labels: bool) -> Opened:
    return shards.open_shards(path, needs_labels=needs_labels)


def _open_rows(path: Path, columns: tables.Columns | None, needs_labels: bool) -> Opened:
    """Images inside a table, or a table of their paths."""
    inside = path.is_dir() or (path.suffix.lower() == ".parquet" and columnar.holds_images(path))
    open_it = columnar.open_columnar if inside else tables.open_table
    return open_it(path, columns, needs_labels=needs_labels)


def _open_arrays(path: Path, _: tables.Columns | None, needs_labels: bool) -> Opened:
    """Arrays of pixels, or packed images."""
    if path.is_file() and not arrays.holds_arrays(path):
        return packed.open_packed({"all": path})
    return arrays.open_arrays(path, needs_labels=needs_labels)


class _Form(NamedTuple):
    """A form in which files hold a data set: their endings, whether a folder holds such, and what opens file or folder."""

    suffixes: tuple[str, ...]
    is_in: Callable[[Path], bool]
    opener: Callable[[Path, tables.Columns | None, bool], Opened]


# The first that a folder holds is opened.
_FORMS = (
    _Form((".tar",), _holds_tars, _open_shards),
    _Form(tables.SUFFIXES, columnar.is_columnar, _open_rows),
    _Form((".npz",), arrays.holds_arrays, _open_arrays),  # and .npy in a folder: alone it may be an image
)
FILE_SUFFIXES = tuple(suffix for form in _FORMS for suffix in form.suffixes)  # of a file that holds a data set


class NoSuchData(UsageError):
    """`given` is neither a folder or file that is here nor the name of a set."""

    def __init__(self, given: str, what: str, *, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.given = given


def open_data(where: Source, *, columns: tables.Columns | None = None, console: Console | None = None) -> Opened:
    """The parts of a folder, table, shards, archive of arrays, or a set by name.

    A torch `Dataset` of images with labels is opened too, and what was opened before is given back.

    Args:
        where: A folder of class folders, a table, arrays, shards, a name, or a map-style data set in Python.
        columns: What a table calls its columns: {"path": "filename", "label": "species"}.
        console: Where the progress of a download is shown; default: nowhere.
    """
    return _open(where, columns, console, needs_labels=True)


def open_without_labels(
    where: Source, *, columns: tables.Columns | None = None, console: Console | None = None
) -> Opened:
    """As `open_data`, for whoever needs no labels: tables, shards and arrays may lack them, and addresses may be of images."""
    if isinstance(where, str | Path) and addresses.is_remote(str(where)) and not shards.are_shards(str(where)):
        return Opened({"all": loose_images.open_addresses(str(where))})
    return _open(where, columns, console, needs_labels=False)


def _open(where: Source, columns: tables.Columns | None, console: Console | None, *, needs_labels: bool) -> Opened:
    if not isinstance(where, str | Path):
        return where if isinstance(where, Opened) else Opened({"all": _in_python(where)})
    text, path = str(where), Path(where)
    if columns and not _has_columns(path):
        raise UsageError(f"{where} is not a table, and only tables have columns to name")
    if not text:
        raise UsageError("no data was given", hint="Give a folder, a file or the name of a data set.")
    if addresses.is_remote(text):
        return shards.open_shards(text, needs_labels=needs_labels)
    if path.is_dir():
        return _open_folder(path, columns, needs_labels)
    if path.is_file():
        return _open_file(path, columns, needs_labels)
    if text.startswith(_VTAB):
        return vtab_opening.open_vtab(text.removeprefix(_VTAB), console=console)
    if is_synthetic(text):
        return open_synthetic(text)
    try:
        return named_opening.open_named(text, console=console)
    except UnknownName as error:
        if "/" in text or path.suffix:
            raise NoSuchData(text, f"{where} does not exist") from None
        hint = " ".join(filter(None, (error.hint, "There is no folder of that name either.", _near_folder(text))))
        raise NoSuchData(text, error.what, hint=hint) from None


def open_images(where: Source, *, columns: tables.Columns | None = None, console: Console | None = None) -> Opened:
    """As `open_data`, for whoever needs no labels: a folder of photos need not have class folders."""
    path = Path(where) if isinstance(where, str | Path) else None
    if path is not None and path.is_dir() and folders.holds_loose(path):
        return Opened({"all": loose_images.open_loose([path])})
    return open_data(where, columns=columns, console=console)


def _near_folder(given: str) -> str:
    """A folder here whose name was perhaps mistyped, as a question."""
    try:
        here = [path.name for path in Path().iterdir() if path.is_dir()]
    except OSError:  # of a folder that was removed, or that may not be listed
        return ""
    near = difflib.get_close_matches(given, here, n=1)
    return f"Did you mean the folder {near[0]}?" if near else ""


def _in_python(given: Any) -> Dataset:
    if isinstance(given, Dataset):
        return given
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__") or isinstance(given, Mapping):
        what = f"data must be a path, a name or a data set with __len__ and __getitem__, not {type(given).__name__}"
        raise UsageError(what)
    return torch_sets.from_torch(given)


def require_trainable(train: Dataset, *others: Dataset) -> None:
    """An error, before any work, for data that nothing can be learnt from.

    That is one class, or classes without images. A part to validate or test on may lack classes, as official ones do; it may
    have none that `train` has no image of.
    """
    if len(train.classes) < 2:
        raise FileProblem(f"{train.name} has one class, and training needs at least two: {''.join(train.classes)}")
    counts = train.labels.counts(len(train.classes))
    lacking = [name for name, count in zip(train.classes, counts.tolist(), strict=True) if not count]
    if not lacking:
        return
    shown = some_of(lacking, _SHOWN)
    for other in others:
        if any(other.labels.counts(len(other.classes))[[train.classes.index(name) for name in lacking]]):
            raise FileProblem(f"{other.name} has classes that {train.name} has no image of: {shown}")
    raise FileProblem(
        f"{train.name} has no image of: {shown}",
        hint="Fill the empty folders, remove them, or leave them out with --min-images 1.",
    )


def _has_columns(path: Path) -> bool:
    return columnar.is_columnar(path) if path.is_dir() else path.suffix.lower() in tables.SUFFIXES


def holds_stored_set(path: Path) -> bool:
    """Whether a folder holds shards, a columnar set or arrays, and no class folders that these would be a copy of."""
    return _stored_form(path) is not None


def _stored_form(folder: Path) -> _Form | None:
    form = next((form for form in _FORMS if form.is_in(folder)), None)
    return None if form is None or folders.holds_classes(folder) else form


def _open_folder(path: Path, columns: tables.Columns | None, needs_labels: bool) -> Opened:
    """A stored set, or class folders; a tar beside these is their archive."""
    if (form := _stored_form(path)) is not None:
        return form.opener(path, columns, needs_labels)
    tars = sorted(file.name for file in path.glob("*.tar"))
    opened = folders.open_folder(path)
    return dataclasses.replace(opened, notes=(*opened.notes, f"not used: {tars[0]}")) if tars else opened


def _open_file(path: Path, columns: tables.Columns | None, needs_labels: bool) -> Opened:
    suffix = path.suffix.lower()
    for form in _FORMS:
        if suffix in form.suffixes:
            return form.opener(path, columns, needs_labels)
    if suffix == ".npy":  # one array of a folder of them
        return arrays.open_arrays(path.parent, needs_labels=needs_labels)
    raise FileProblem(
        f"{path} is not a data set that vitlab knows",
        hint=f"Give a folder of class folders, a {', '.join(FILE_SUFFIXES[:-1])} or {FILE_SUFFIXES[-1]}, "
        "or the name of a data set.",
    )
