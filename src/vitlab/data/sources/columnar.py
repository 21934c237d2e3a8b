"""Images inside parquet files, and data sets that Hugging Face's `datasets` saved to disk.

An image is a column of encoded bytes, or of `{bytes, path}` as `datasets` has it. Only labels and names are read when data is
opened. Of parquet, a process holds so many bytes of row groups and no more; Arrow files are mapped into memory. Needs pyarrow,
and not `datasets`.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from vitlab.core.errors import FileProblem, MissingExtra, UsageError, VitlabError
from vitlab.core.reading import open_regular, parse_json, read_json
from vitlab.data.dataset import PART_NAMES, PARTS, Dataset, Opened, one_for_each, part_in_name, some_of
from vitlab.data.sources.numbering import number_labels

COLUMNS = ("image", "label", "split", "group")
_DICT, _STATE = "dataset_dict.json", "state.json"  # what `save_to_disk` writes for several splits, and for each
_USUAL_LABELS = ("label", "labels")
_NO_LABEL = -1  # of test images whose labels are kept secret
_WHOLE = -1  # as a row group: all of an Arrow file
_HELD_BYTES = 2**28  # of row groups that a process keeps: a few of the usual hundred images
_GROUP_BYTES = 2**31  # of one row group, which is read at once
_SHOWN = 8


def holds_images(path: Path) -> bool:
    """Whether a parquet file has images in it, and not only their paths."""
    return bool(_image_columns(_open(path).schema))


def is_columnar(folder: Path) -> bool:
    """Whether a folder holds parquet files, or was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in (_DICT, _STATE)) or bool(_parquets(folder))


def open_columnar(path: Path, columns: Mapping[str, str] | None = None, *, needs_labels: bool = True) -> Opened:
    """The images of a parquet file, of a folder of them, or of a saved data set, by part. See `open_table` for the labels."""
    files, notes = _files(path)
    schema = _open(next(iter(files.values()))[0]).schema
    named = _columns(path, schema, columns or {}, needs_labels)
    rows = {part: _rows(paths, named) for part, paths in files.items()}
    if not needs_labels and all(value == _NO_LABEL for own in rows.values() for value in own.labels):
        rows = {part: own._replace(labels=[[] for _ in own.names]) for part, own in rows.items()}
    if bare := [part for part, own in rows.items() if all(value == _NO_LABEL for value in own.labels)]:
        notes.append(f"not used, since there are no labels: {', '.join(bare)}")
    rows = {part: own for part, own in rows.items() if part not in bare}
    if not rows:
        raise FileProblem(f"{path} holds no images with labels")
    values = {part: own.labels for part, own in rows.items()}
    classes, labels = number_labels(path, values, _class_names(schema, named.get("label", "")))
    parts: dict[str, Dataset] = {}
    for part in (part for part in (*PARTS, "all") if part in rows):
        own, name = rows[part], str(path) if part == "all" else f"{path} {part}"
        keys = ["/".join(filter(None, (part, str(i), file))) for i, file in enumerate(own.names)]
        parts[part] = Dataset(name, classes, keys, labels[part], own.read, own.groups if any(own.groups) else None)
    if "split" in named and list(parts) == ["all"]:
        parts = _by_split(path, parts["all"], rows["all"].splits)
    return Opened(parts, tuple(notes))


def _by_split(path: Path, whole: Dataset, splits: Sequence[str]) -> dict[str, Dataset]:
    index: dict[str, list[int]] = {}
    for i, split in enumerate(splits):
        index.setdefault(PART_NAMES.get(split.strip().lower(), split), []).append(i)
    if unknown := sorted(index.keys() - set(PARTS)):
        raise FileProblem(f"{path} has the split '{unknown[0]}'", hint=f"Known: {', '.join(PARTS)}.")
    return {part: whole.subset(torch.tensor(index[part]), f"{path} {part}") for part in PARTS if part in index}


# --- which files ------------------------------------------------------------------------------------------------------


def _files(path: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The files of every part, and notes of what is not used."""
    notes: list[str] = []
    if path.is_file():
        parts = {"all": [path]}
    elif (path / _STATE).is_file():
        parts = {"all": _saved(path)}
    elif (path / _DICT).is_file():
        splits = [str(name) for name in _listed(path / _DICT, "splits")]
        known = one_for_each(path, "splits", ((PART_NAMES[name], name) for name in splits if name in PART_NAMES))
        parts = {part: _saved(path / name) for part, name in known.items()}
        notes = [f"not used: {name}" for name in splits if name not in PART_NAMES]
    else:
        parts = {}
        for file in _parquets(path):
            parts.setdefault(part_in_name(file.stem), []).append(file)
    if "all" in parts and len(parts) > 1:
        raise FileProblem(
            f"{path} mixes files named after a part with others, such as {parts['all'][0].name}",
            hint="Name the part in every file name or in none, or give one file.",
        )
    if not any(parts.values()):
        raise FileProblem(f"{path} holds no files with images", hint=f"Parts are called {', '.join(PARTS)}.")
    return {part: files for part, files in parts.items() if files}, notes


def _parquets(folder: Path) -> list[Path]:
    """Those of the folder, or of `data` in it, where the hub has them."""
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of one split, in their order."""
    names = [
        file.get("filename") if isinstance(file, dict) else None for file in _listed(folder / _STATE, "_data_files")
    ]
    if not all(isinstance(name, str) and PurePosixPath(name).name == name for name in names):
        raise FileProblem(f"{folder / _STATE} does not list files of its own folder", hint="Save the data set again.")
    return [folder / str(name) for name in names]


def _listed(path: Path, key: str) -> list[Any]:
    table = read_json(path)
    found = table.get(key) if isinstance(table, dict) else None
    if not isinstance(found, list):
        raise FileProblem(f"{path} has no list '{key}'", hint="Save the data set again.")
    return found


# --- which columns ----------------------------------------------------------------------------------------------------


def _columns(path: Path, schema: Any, given: Mapping[str, str], needs_labels: bool) -> dict[str, str]:
    """What the files call `image` and `label`, and `split` and `group` where they have them."""
    if unknown := sorted(given.keys() - set(COLUMNS)):
        raise UsageError(f"images in a table have no column for '{unknown[0]}'", hint=f"Known: {', '.join(COLUMNS)}.")
    names, images = list(schema.names), _image_columns(schema)
    classes = [name for name in names if _class_names(schema, name) is not None]
    label = next((name for name in _USUAL_LABELS if name in names), classes[0] if len(classes) == 1 else "label")
    found = {"image": images[0] if len(images) == 1 else "image", "label": label}
    found |= {name: name for name in ("split", "group") if name in names} | dict(given)
    if not needs_labels and label not in names and "label" not in given:
        del found["label"]
    for theirs in found.values():
        if theirs not in names:
            raise FileProblem(
                f"{path} has no column '{theirs}'; it has: {some_of(names, _SHOWN)}",
                hint=f"Name the columns: --columns image=NAME,label=NAME; known: {', '.join(COLUMNS)}.",
            )
    if found["image"] not in images:
        raise FileProblem(
            f"{path}: '{found['image']}' is a column of {schema.field(found['image']).type}, not of images"
        )
    return found


def _image_columns(schema: Any) -> list[str]:
    return [field.name for field in schema if _is_bytes(field.type)]


def _is_bytes(kind: Any) -> bool:
    types = _arrow().types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_bytes(kind.field("bytes").type)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _class_names(schema: Any, column: str) -> list[str] | None:
    """The names that `datasets` stores beside whole numbers, of one label or of a list of them."""
    try:
        feature = parse_json((schema.metadata or {})[b"huggingface"].decode(), "")["info"]["features"][column]
        feature = feature[0] if isinstance(feature, list) else feature
        names = feature.get("feature", feature)["names"]
    except (VitlabError, LookupError, TypeError, AttributeError, UnicodeDecodeError):  # of another program, or none
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


# --- what is read -----------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What is known of the images of a part without reading them."""

    labels: list[Any]
    names: list[str]
    splits: list[str]
    groups: list[str]
    read: "ColumnReader"


def _rows(paths: Sequence[Path], named: Mapping[str, str]) -> _Rows:
    values: dict[str, list[Any]] = {name: [] for name in ("label", "split", "group")}
    names, pieces, counts = list[str](), list[_Piece](), list[int]()
    for path in paths:
        file = _open(path)
        if missing := sorted(set(named.values()) - set(file.schema.names)):
            raise FileProblem(f"{path} has no column '{missing[0]}', which {paths[0].name} has")
        with _as_file_problem(path):
            for name in values.keys() & named.keys():
                values[name] += file.read(named[name]).to_pylist()
            names += (PurePosixPath(name or "").name for name in _file_names(file, named["image"]))
        pieces += (_Piece(path, file.size, group) for group in file.counts)
        counts += file.counts.values()
    split, group = ([_text(value) for value in values[name]] for name in ("split", "group"))
    reader = ColumnReader(pieces, [0, *itertools.accumulate(counts)][:-1], named["image"])
    return _Rows(values["label"], names, split, group, reader)


def _text(value: Any) -> str:
    return "" if value is None else str(value)  # 0 is a group like any other


def _file_names(file: "_File", image: str) -> list[str | None]:
    kind = file.schema.field(image).type
    if not _arrow().types.is_struct(kind) or kind.get_field_index("path") < 0:
        return [None] * sum(file.counts.values())
    from pyarrow import compute

    return compute.struct_field(file.read(image, "path"), "path").to_pylist()  # pyright: ignore[reportAttributeAccessIssue]


class _Piece(NamedTuple):
    """A row group of a parquet file, or an Arrow file; `size` is that of the file when it was opened."""

    path: Path
    size: int
    group: int


@dataclasses.dataclass(frozen=True)
class ColumnReader:
    """Reads encoded images out of pieces: row groups of parquet files, or Arrow files."""

    pieces: Sequence[_Piece]
    firsts: Sequence[int]  # the number of each piece's first image
    column: str

    def __call__(self, i: int) -> bytes:
        which = bisect.bisect_right(self.firsts, i) - 1
        path, size, group = self.pieces[which]
        with _as_file_problem(path):
            file = _version(path)
            if file.size != size:  # its rows are others; the time alone may differ, as after `touch`
                raise FileProblem(f"{path} was rewritten after it had been opened", hint="Open the data again.")
            column = _mapped_column(file, self.column) if group == _WHOLE else _row_group(file, group, self.column)
            value = column[i - self.firsts[which]].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(value, bytes):
            raise FileProblem(f"has no bytes in {path}", hint="Save the data set with the images inside.")
        return value


class _File(NamedTuple):
    """One file: its columns, how many rows each piece has, and a way to read a column, or a field of one."""

    schema: Any
    size: int
    counts: dict[int, int]
    read: Callable[..., Any]


class _Version(NamedTuple):
    """A file as it is now: what is remembered of it must not outlive a rewrite, since reading cut-off pages kills."""

    path: Path
    mtime_ns: int
    size: int


def _version(path: Path) -> _Version:
    found = path.stat()
    return _Version(path, found.st_mtime_ns, found.st_size)


def _open(path: Path) -> _File:
    with _as_file_problem(path):
        version = _version(path)
        if path.suffix.lower() != ".parquet":
            table = _mapped(version)
            counts = {_WHOLE: table.num_rows}
            return _File(table.schema, version.size, counts, lambda column, _="": _mapped_column(version, column))
        file = _parquet(version)
        counts = {i: file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)}

        def read(column: str, field: str = "") -> Any:
            return file.read(columns=[f"{column}.{field}" if field else column], use_threads=False).column(0)

        return _File(file.schema_arrow, version.size, counts, read)


# Files are mapped, never open: forked processes would share the place at which an open one is read.
@functools.lru_cache(maxsize=64)
def _parquet(file: _Version) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(_map(file.path))


_held: dict[tuple[_Version, int, str], Any] = {}  # row groups of this process, the longest unused first


def _row_group(file: _Version, group: int, column: str) -> Any:
    found = _held.pop((file, group, column), None)
    if found is None:
        opened = _parquet(file)
        size = opened.metadata.row_group(group).total_byte_size
        if size > _GROUP_BYTES:
            raise FileProblem(
                f"{file.path} has a row group of {size:,} bytes", hint="Write it with smaller row groups."
            )
        found = opened.read_row_group(group, columns=[column], use_threads=False).column(0)
    _held[file, group, column] = found
    while len(_held) > 1 and sum(held.nbytes for held in _held.values()) > _HELD_BYTES:
        _held.pop(next(iter(_held)))
    return found


@functools.lru_cache(maxsize=256)
def _mapped(file: _Version) -> Any:
    """A file of `datasets`; what is compressed would not be mapped but unpacked, and is refused beyond a limit."""
    arrow, batches = _arrow(), list[Any]()
    before = arrow.total_allocated_bytes()
    with arrow.ipc.open_stream(_map(file.path)) as stream:
        for batch in stream:
            batches.append(batch)
            if arrow.total_allocated_bytes() - before > _HELD_BYTES:
                raise FileProblem(
                    f"{file.path} is compressed, and too large to be held in memory", hint="Save it as parquet."
                )
        return arrow.Table.from_batches(batches, stream.schema)


@functools.lru_cache(maxsize=256)
def _mapped_column(file: _Version, column: str) -> Any:
    found = _mapped(file).column(column)
    found.validate(full=True)  # its offsets are of the file, and could lead anywhere
    return found


def _map(path: Path) -> Any:
    with open_regular(path):  # for its errors: a FIFO, say, must not be mapped
        return _arrow().memory_map(str(path))


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "reading images in parquet or Arrow files") from None
    return pyarrow


@contextlib.contextmanager
def _as_file_problem(path: Path) -> Generator[None]:
    try:
        yield
    except (VitlabError, MemoryError):
        raise
    except FileNotFoundError:
        raise FileProblem(f"{path} does not exist") from None
    except Exception as error:  # pyarrow has its own family, with internals in the text
        raise FileProblem(f"{path} is damaged or has the wrong extension ({type(error).__name__})") from None
