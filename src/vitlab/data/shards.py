"""Tar shards as WebDataset writes them: `key.jpg` beside `key.cls`, `key.txt` or `key.json`, many to a file.

Owns the layout and the index: where each image lies, so that any image can be read at once, also from a server. Shards
that `write_shards` made bring their index and checksums with them; others are read through once.
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, MissingExtra
from vitlab.data.dataset import Dataset, Opened, several_labels, single_labels
from vitlab.data.folders import SUFFIXES

INDEX = "index.json"
_LABEL_SUFFIXES = (".cls", ".txt", ".json")
_LABEL_BYTES = 1_000_000  # a label is a word or a small table; more is no label
_BLOCK = 512  # tar's unit
_STARTS = {  # how each format begins, and what its files are called
    rb"\xff\xd8\xff": ".jpg",
    rb"\x89PNG": ".png",
    rb"RIFF.{4}WEBP": ".webp",
    rb"GIF8": ".gif",
    rb"BM": ".bmp",
    rb"II\*\0|MM\0\*": ".tif",
}


class Entry(NamedTuple):
    """One image: its name, where its bytes lie, and the text of its label."""

    key: str
    shard: int
    offset: int
    size: int
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardReader:
    """Reads byte ranges; files stay open per process, and addresses go through fsspec."""

    shards: Sequence[str]
    places: "np.ndarray[Any, Any]"  # int64 [N, 3]: shard, offset, size

    def __call__(self, i: int) -> bytes:
        shard, offset, size = (int(number) for number in self.places[i])
        return read_range(self.shards[shard], offset, size)


def read_range(address: str, offset: int, size: int) -> bytes:
    if is_remote(address):
        return _fsspec(address).cat_file(address, start=offset, end=offset + size)
    with open(address, "rb") as file:  # noqa: PTH123 (an address, not a path)
        file.seek(offset)
        return file.read(size)


def is_remote(address: str) -> bool:
    return re.match(r"[a-z][a-z0-9+]+://", address) is not None


def _fsspec(address: str) -> Any:
    try:
        import fsspec  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("fsspec", "remote", f"reading {address}") from None
    return fsspec.core.url_to_fs(address)[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


# --- reading ----------------------------------------------------------------------------------------------------------


def open_shards(where: str | Path) -> Opened:
    """A folder of `.tar` files, one `.tar`, or an address of either; parts by file name: `train-00000.tar`."""
    shards = _find_shards(str(where))
    index = _read_index(str(where))
    parts: dict[str, list[Entry]] = {}
    for number, shard in enumerate(shards):
        name = Path(shard).name
        entries = index[name] if name in index else scan_shard(shard)
        part = re.match(r"(train|val|test)\b", name)
        parts.setdefault(part[1] if part else "all", []).extend(entry._replace(shard=number) for entry in entries)
    if "all" in parts and len(parts) > 1:
        raise FileProblem(f"{where} holds shards of parts and others: {shards[0]}")
    every = {label for entries in parts.values() for entry in entries for label in entry.labels}
    classes = tuple(sorted(every, key=_class_order))
    opened = {name: _dataset(f"{where} {name}", entries, classes, shards) for name, entries in sorted(parts.items())}
    return Opened(opened)


def _dataset(name: str, entries: Sequence[Entry], classes: tuple[str, ...], shards: Sequence[str]) -> Dataset:
    number = {label: i for i, label in enumerate(classes)}
    rows = [[number[label] for label in entry.labels] for entry in entries]
    multi = any(len(row) != 1 for row in rows)
    labels = several_labels(rows) if multi else single_labels([label for (label,) in rows])
    places = np.array([(entry.shard, entry.offset, entry.size) for entry in entries], dtype=np.int64).reshape(-1, 3)
    return Dataset(name, classes, [entry.key for entry in entries], labels, ShardReader(shards, places))


def _class_order(label: str) -> tuple[int, int, str]:
    """Numbers by value, then words."""
    return (0, int(label), "") if label.isdecimal() else (1, 0, label)


def scan_shard(shard: str) -> list[Entry]:
    """Reads the headers of one tar; a sample without a label, or a label without an image, is an error that names it."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, tuple[str, ...]] = {}
    try:
        with _open_tar(shard) as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")
                key, kind = f"{folder}/{stem}" if folder else stem, f".{suffix.lower()}" if dot else ""
                if kind in SUFFIXES:
                    images[key] = (member.offset_data, member.size)
                elif kind in _LABEL_SUFFIXES and (key not in labels or kind == ".cls"):
                    if member.size > _LABEL_BYTES:
                        raise FileProblem(f"{shard}: the label {member.name!r:.60} has {member.size:,} bytes")
                    taken = archive.extractfile(member)
                    labels[key] = _parse_label(kind, taken.read() if taken else b"", f"{shard}: {member.name}")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FileProblem(f"{shard} is no readable tar: {error}") from None
    if alone := sorted(images.keys() ^ labels.keys()):
        what = "has no label" if alone[0] in images else "has a label, but no image"
        raise FileProblem(f"{shard}: {alone[0]!r:.60} {what} ({len(alone)} of these)")
    return [Entry(key, 0, *place, labels[key]) for key, place in images.items()]


def _open_tar(shard: str) -> tarfile.TarFile:
    if not is_remote(shard):
        return tarfile.open(shard, "r:")
    return tarfile.open(fileobj=_fsspec(shard).open(shard, "rb"), mode="r:")


def _parse_label(kind: str, data: bytes, where: str) -> tuple[str, ...]:
    try:
        text = data.decode().strip()
        if kind != ".json":
            return (text,)
        table = json.loads(text)
        found = table.get("label", table.get("labels", table.get("cls"))) if isinstance(table, dict) else table
        values = found if isinstance(found, list) else [found]
        if not all(isinstance(value, str | int) for value in values):
            raise ValueError("no label in it")
        return tuple(str(value) for value in values)
    except (ValueError, RecursionError) as error:
        raise FileProblem(f"{where!r:.120} is no label: {error}") from None


def _find_shards(where: str) -> list[str]:
    if is_remote(where):
        found = [where] if where.endswith(".tar") else _fsspec(where).glob(where.rstrip("/") + "/*.tar")
        scheme = where.partition("://")[0]
        found = [name if is_remote(name) else f"{scheme}://{name}" for name in found]
    else:
        found = [where] if Path(where).is_file() else [str(path) for path in Path(where).glob("*.tar")]
    if not found:
        raise FileProblem(f"{where} holds no .tar shards")
    return sorted(found)


def _read_index(where: str) -> dict[str, list[Entry]]:
    """The index that `write_shards` left, by shard name; none where others made the shards."""
    place = where.rpartition("/")[0] if where.endswith(".tar") else where.rstrip("/")
    address = f"{place}/{INDEX}"
    try:
        text = _fsspec(address).cat_file(address) if is_remote(address) else Path(address).read_bytes()
        table = json.loads(text)["shards"]
        return {
            name: [Entry(key, 0, offset, size, tuple(labels)) for key, offset, size, labels in told["entries"]]
            for name, told in table.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileProblem(f"{address} is no readable index: {error}", hint="Remove it to read the shards.") from None


# --- writing ----------------------------------------------------------------------------------------------------------


def write_shards(
    opened: Opened, out: Path, *, per_shard: int, workers: int, advance: Callable[[int, str], None]
) -> dict[str, Any]:
    """Writes every part as `part-00000.tar` …, several shards at a time, and `index.json` last.

    A shard that is already there and whole is kept: calling again after an interruption goes on where it stopped.
    """
    fsio.make_folder(out)
    jobs = [
        (f"{part if part != 'all' else 'data'}-{first // per_shard:05d}.tar", dataset, range(first, last))
        for part, dataset in opened.parts.items()
        for first in range(0, len(dataset), per_shard)
        for last in [min(first + per_shard, len(dataset))]
    ]
    done = 0
    table: dict[str, Any] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_make_shard, out, *job): job for job in jobs}
        for future in concurrent.futures.as_completed(running):
            name, _, index = running[future]
            table[name] = future.result()
            done += len(index)
            advance(done, name)
    table = {name: table[name] for name, _, _ in jobs}
    fsio.write_json(out / INDEX, {"classes": list(opened.classes), "shards": table})
    for name in table:
        fsio.remove_file(out / _note(name))
    return table


def _make_shard(out: Path, name: str, dataset: Dataset, index: range) -> dict[str, Any]:
    return _read_note(out, name, dataset, index) or _write_shard(out, name, dataset, index)


def _write_shard(out: Path, name: str, dataset: Dataset, index: range) -> dict[str, Any]:
    buffer = io.BytesIO()
    entries: list[list[Any]] = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for i in index:
            data, suffix = _encoded(dataset.read(i), dataset.keys[i])
            labels = [dataset.classes[label] for label in dataset.labels[i]]
            entries.append([dataset.keys[i], buffer.tell() + _BLOCK, len(data), labels])
            # Numbers, because names of people's files may be longer or stranger than tar allows.
            _add(archive, f"{i:09d}{suffix}", data)
            told = {"labels": labels, "source": dataset.keys[i]}
            _add(archive, f"{i:09d}.json", json.dumps(told, ensure_ascii=False).encode())
    raw = buffer.getbuffer()
    note = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw), "entries": entries}
    fsio.write_file(out / name, [raw])
    fsio.write_json(out / _note(name), {**note, "made_from": _made_from(dataset, index)})
    return note


def _encoded(picture: "bytes | np.ndarray[Any, Any]", key: str) -> tuple[bytes, str]:
    """The file as it is, under the suffix of its content; pixels as PNG, which loses nothing."""
    if not isinstance(picture, bytes):
        buffer = io.BytesIO()
        Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(buffer, "PNG")
        return buffer.getvalue(), ".png"
    for start, suffix in _STARTS.items():
        if re.match(start, picture, re.DOTALL):
            return picture, suffix
    raise FileProblem(f"{key} is no image", hint="`vitlab data check` lists all such files.")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)  # and no time, no owner: the same images give the same bytes
    archive.addfile(info, io.BytesIO(data))


def _note(name: str) -> str:
    return f".{name}.json"


def _read_note(out: Path, name: str, dataset: Dataset, index: range) -> dict[str, Any] | None:
    """What was noted about a shard that an interrupted call finished, if it is still that shard."""
    try:
        note: dict[str, Any] = json.loads((out / _note(name)).read_bytes())
        same = note.pop("made_from") == _made_from(dataset, index)
        whole = (out / name).stat().st_size == note["bytes"] and fsio.hash_file(out / name) == note["sha256"]
        return note if same and whole else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _made_from(dataset: Dataset, index: range) -> str:
    text = json.dumps([[dataset.keys[i], dataset.labels[i]] for i in index])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def verify_shards(folder: Path) -> Mapping[str, Any]:
    """Every shard against the checksum in its index; names the first that differs."""
    table = json.loads((folder / INDEX).read_bytes())["shards"]
    for name, told in table.items():
        if not os.path.isfile(folder / name) or fsio.hash_file(folder / name) != told["sha256"]:  # noqa: PTH113
            raise FileProblem(f"{folder / name} is damaged: its SHA-256 is not the one in {INDEX}")
    return table
