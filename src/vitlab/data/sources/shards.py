"""WebDataset tar shards: `key.jpg` beside `key.cls`, `key.txt` or `key.json`.

Owns reading and the index: where each image lies, so that any image can be read at once, also from a server. Shards of
`shard_writing` bring index and checksums, against which every read is checked; others are read through once.
"""

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vitlab.core.errors import FileProblem, amount
from vitlab.core.reading import file_version, open_regular, parse_json, read_bytes
from vitlab.data.dataset import Dataset, Opened, class_order, one_spelling, part_in_name, several_labels, single_labels
from vitlab.data.sources.addresses import (
    ask_store,
    file_system,
    is_remote,
    open_address,
    read_address,
    size_of,
    version_of,
)
from vitlab.data.sources.folders import SUFFIXES
from vitlab.data.sources.tars import tar_members

INDEX = "index.json"
SUMS = "SHA256SUMS"  # of the index and every shard, as `sha256sum --check` reads it
_LABEL_SUFFIXES = (".cls", ".json", ".txt")  # of several, the first is the label: a text may be a caption
_LABEL_BYTES = 1_000_000  # a label is a word or a small table; more is not a label
INDEX_BYTES = 2**30  # of an index: ten million images


class Entry(NamedTuple):
    """One image: its name, place, labels, CRC-32 if known, and group."""

    key: str
    shard: int
    offset: int
    size: int
    labels: tuple[str, ...]
    crc: int | None = None
    group: str = ""


@dataclasses.dataclass(frozen=True)
class ShardReader:
    """Reads byte ranges; files stay open per process, and addresses go through fsspec."""

    shards: Sequence[str]
    places: "np.ndarray[Any, Any]"  # int64 [N, 4]: shard, offset, size, CRC-32 or -1
    versions: Sequence[str]  # of each shard

    def __call__(self, i: int) -> bytes:
        shard, offset, size, crc = (int(number) for number in self.places[i])
        data = read_range(self.shards[shard], offset, size)
        if len(data) != size or (crc >= 0 and zlib.crc32(data) != crc):
            raise FileProblem(f"{self.shards[shard]} is damaged at byte {offset:,}", hint="Copy the shard again.")
        return data

    def version(self, i: int) -> str:
        """Size and checksum, which every read checks, where the index has one; else the shard's version and the place in it."""
        shard, offset, size, crc = (int(number) for number in self.places[i])
        if crc >= 0:
            return f"{size} {crc}"
        return f"{self.versions[shard]} {offset} {size}" if self.versions[shard] else ""


def read_range(address: str, offset: int, size: int) -> bytes:
    if is_remote(address):
        return read_address(address, offset, offset + size)
    with open_regular(address) as file:
        file.seek(offset)
        return file.read(size)


# --- reading ----------------------------------------------------------------------------------------------------------


def open_shards(where: str | Path, *, needs_labels: bool = True) -> Opened:
    """The tars of a folder, one `.tar`, or an address of either.

    The part of a shard is a word in its file name: `cats-train-0.tar`. Images may lack labels unless `needs_labels`.
    """
    shards = _find_shards(str(where))
    index = _read_index(str(where), shards)
    parts: dict[str, list[Entry]] = {}
    firsts: dict[str, str] = {}
    version = {shard: version_of if is_remote(shard) else file_version for shard in shards}
    versions = ["" if Path(shard).name in index.shards else version[shard](shard) for shard in shards]
    for number, shard in enumerate(shards):
        name = Path(shard).name
        entries = index.shards[name] if name in index.shards else scan_shard(shard, needs_labels=needs_labels)
        part = part_in_name(name)
        firsts.setdefault(part, name)
        parts.setdefault(part, []).extend(entry._replace(shard=number) for entry in entries)
    if "all" in parts and len(parts) > 1:
        named = next(name for part, name in firsts.items() if part != "all")
        raise FileProblem(
            f"{where} mixes shards named after a part, such as {named}, with others, such as {firsts['all']}",
            hint="Name the part in every file name or in none, or give one file.",
        )
    every = {label for entries in parts.values() for entry in entries for label in entry.labels}
    # The index knows the order that the classes had; it is the labels' meaning, and must not change on the way.
    classes = (*index.classes, *class_order(every.difference(index.classes)))
    multi = any(len(entry.labels) != 1 for entries in parts.values() for entry in entries)
    read = functools.partial(ShardReader, shards, versions=versions)
    return Opened(
        {name: _dataset(f"{where} {name}", entries, classes, read, multi) for name, entries in sorted(parts.items())}
    )


def _dataset(
    name: str,
    entries: Sequence[Entry],
    classes: tuple[str, ...],
    reader: "Callable[[np.ndarray[Any, Any]], ShardReader]",
    multi: bool,
) -> Dataset:
    number = {label: i for i, label in enumerate(classes)}
    rows = [[number[label] for label in entry.labels] for entry in entries]
    labels = several_labels(rows) if multi else single_labels([label for (label,) in rows])
    places = [(entry.shard, entry.offset, entry.size, -1 if entry.crc is None else entry.crc) for entry in entries]
    read = reader(np.array(places, dtype=np.int64).reshape(-1, 4))
    groups = [entry.group for entry in entries] if any(entry.group for entry in entries) else None
    return Dataset(name, classes, [entry.key for entry in entries], labels, read, groups)


def scan_shard(shard: str, *, needs_labels: bool = True) -> list[Entry]:
    """The entries of one tar, by its headers; an error for images without labels, if these are needed."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, dict[str, bytes]] = {}
    with _open_shard(shard) as file:
        for member in tar_members(file, shard):
            folder, _, name = member.name.rpartition("/")
            stem, dot, suffix = name.partition(".")
            key, kind = f"{folder}/{stem}" if folder else stem, f".{suffix.lower()}" if dot else ""
            if (kind in SUFFIXES and key in images) or kind in labels.get(key, ()):
                what = "images" if kind in SUFFIXES else f"{kind} files"
                raise FileProblem(f"{shard}: {key!r:.60} has two {what}", hint="Give each image its own key.")
            if kind in SUFFIXES:
                images[key] = (member.offset_data, member.size)
            elif kind in _LABEL_SUFFIXES:
                if member.size > _LABEL_BYTES:
                    raise FileProblem(f"{shard}: the label {member.name!r:.60} has {member.size:,} bytes")
                file.seek(member.offset_data)
                labels.setdefault(key, {})[kind] = file.read(member.size)
    if needs_labels and (alone := sorted(images.keys() ^ labels.keys())):
        what = "has no label" if alone[0] in images else "has a label, but no image"
        raise FileProblem(f"{shard}: {alone[0]!r:.60} {what} ({amount(len(alone), 'such file')})")
    entries: list[Entry] = []
    for key, place in images.items():
        kind = next((kind for kind in _LABEL_SUFFIXES if kind in labels.get(key, ())), None)
        names, group = ((), "") if kind is None else _parse_label(kind, labels[key][kind], f"{shard}: {key}{kind}")
        entries.append(Entry(key, 0, *place, names, group=group))
    return entries


def _open_shard(shard: str) -> IO[bytes]:
    try:
        return open_address(shard) if is_remote(shard) else open_regular(shard)
    except OSError as error:
        raise FileProblem(f"{shard} cannot be read: {error.strerror or error}") from None


def _parse_label(kind: str, data: bytes, where: str) -> tuple[tuple[str, ...], str]:
    """The labels, and the group where a table names one."""
    try:
        text = one_spelling(data.decode().strip())
        if not text:
            raise ValueError("it is empty")
        if kind != ".json":
            return (text,), ""
        table = parse_json(text, "it")
        label = table.get("label", table.get("labels", table.get("cls"))) if isinstance(table, dict) else table
        values = label if isinstance(label, list) else [label]
        if not all(isinstance(value, str | int) for value in values):
            raise ValueError("no label in it")
        group = table.get("group") if isinstance(table, dict) else None
        return tuple(str(value) for value in values), "" if group is None else str(group)
    except (ValueError, FileProblem) as error:
        raise FileProblem(f"{where!r:.120} is not a label: {error}") from None


def are_shards(address: str) -> bool:
    """Whether an address is that of a tar, or of a folder with tars in it."""
    return address.endswith(".tar") or ("*" not in address and bool(_remote_tars(address)))


def _find_shards(where: str) -> list[str]:
    if is_remote(where):
        names = [where] if where.endswith(".tar") and "*" not in where else _remote_tars(where)
        scheme = where.partition("://")[0]
        names = [name if is_remote(name) else f"{scheme}://{name}" for name in names]
    else:
        names = [where] if Path(where).is_file() else [str(path) for path in Path(where).glob("*.tar")]
    if not names:
        raise FileProblem(f"{where} holds no .tar shards")
    return sorted(names)


def _remote_tars(where: str) -> list[str]:
    store, pattern = file_system(where), where if "*" in where else where.rstrip("/") + "/*.tar"
    try:
        return ask_store(where, lambda: store.glob(pattern))
    except OSError as error:
        raise FileProblem(f"{where} cannot be read: {error.strerror or error}") from None


class _Index(NamedTuple):
    classes: tuple[str, ...] = ()
    shards: Mapping[str, list[Entry]] = {}


def _read_index(where: str, shards: Sequence[str]) -> _Index:
    """The index that `write_shards` left; an empty one where others made the shards."""
    place = where.rpartition("/")[0] or "." if where.endswith(".tar") else where.rstrip("/")
    address = f"{place}/{INDEX}"
    text = _read_if_present(address)
    if text is None:
        return _Index()
    sums = _read_if_present(f"{place}/{SUMS}")  # missing only where the writing was cut off just before its end
    if sums is not None and f"{hashlib.sha256(text).hexdigest()}  {INDEX}".encode() not in sums.splitlines():
        raise FileProblem(f"{address} is damaged: its SHA-256 is not the one in {SUMS}", hint="Copy both again.")
    try:
        table = parse_json(text.decode(), address)
        classes, tars = table["classes"], table["shards"]
        sizes = {name: shard["bytes"] for name, shard in tars.items()}
        if not _are_texts(classes) or not all(type(size) is int for size in sizes.values()):
            raise ValueError("classes or sizes are missing")
        entries = {name: [_listed(row, sizes[name]) for row in shard["entries"]] for name, shard in tars.items()}
    except (ValueError, LookupError, TypeError, AttributeError, FileProblem) as error:
        raise FileProblem(f"{address} is not a readable index: {error}", hint="Remove it to read the shards.") from None
    _require_complete(place, shards, sizes, every=not where.endswith(".tar"))
    return _Index(tuple(classes), entries)


def _listed(row: Any, size: int) -> Entry:
    """One line of an index about a shard of `size` bytes."""
    key, start, length, labels, crc, *group = row
    places = type(start) is type(length) is int and 0 <= start <= start + length <= size
    sums = crc is None or (type(crc) is int and 0 <= crc < 2**32)
    if not (places and sums and len(group) < 2 and _are_texts(labels) and _are_texts([key, *group])):
        raise ValueError(f"an entry is {row!r:.60}")
    return Entry(key, 0, start, length, tuple(labels), crc, *group)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _require_complete(place: str, shards: Sequence[str], sizes: Mapping[str, int], *, every: bool) -> None:
    """An error where a shard of the index is missing or has another length."""
    present = {Path(shard).name: shard for shard in shards}
    if missing := [name for name in sizes if every and name not in present]:
        raise FileProblem(f"{place} lacks {missing[0]}, which is in its {INDEX}", hint="Copy the shard again.")
    for name, shard in present.items():
        size = size_of(shard) if is_remote(shard) else Path(shard).stat().st_size
        if size != sizes.get(name, size):
            what = f"{shard} is damaged: it has {size:,} bytes instead of {sizes[name]:,}"
            raise FileProblem(what, hint="Copy the shard again.")


def _read_if_present(address: str) -> bytes | None:
    try:
        return read_address(address) if is_remote(address) else read_bytes(address, INDEX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileProblem(f"{address} cannot be read: {error}") from None
