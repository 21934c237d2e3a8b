"""Tar shards as WebDataset writes them: `key.jpg` beside `key.cls`, `key.txt` or `key.json`, many to a file.

Owns the layout and the index: where each image lies, so that any image can be read at once, also from a server. Shards
that `write_shards` made bring their index and checksums with them, and what they hold is checked when it is read; others are
read through once, and have only tar's own checks.
"""

import concurrent.futures
import dataclasses
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, MissingExtra, UsageError, VitlabError
from vitlab.core.reading import open_regular, parse_json, read_bytes, read_json
from vitlab.data.dataset import PART_NAMES, Dataset, Opened, class_order, one_spelling, several_labels, single_labels
from vitlab.data.processes import given, process_pool
from vitlab.data.sources.folders import SUFFIXES
from vitlab.data.sources.tars import tar_members

INDEX = "index.json"
SUMS = "SHA256SUMS"  # of the index and every shard, as `sha256sum --check` reads it
_LABEL_SUFFIXES = (".cls", ".json", ".txt")  # of several, the first is the label: a text may be a caption
_PART = re.compile(rf"(?:^|[^a-z])({'|'.join(PART_NAMES)})(?:[^a-z]|$)")  # `imagenet1k-train-0000.tar`
_LABEL_BYTES = 1_000_000  # a label is a word or a small table; more is not a label
_INDEX_BYTES = 2**30  # of an index: ten million images
_BLOCK = 512  # tar's unit
_GO_ON = "`vitlab data check` lists all such files. Remove them and call again: it goes on where it stopped."
_STARTS = {  # how each format begins, and what its files are called
    rb"\xff\xd8\xff": ".jpg",
    rb"\x89PNG": ".png",
    rb"RIFF.{4}WEBP": ".webp",
    rb"GIF8": ".gif",
    rb"BM": ".bmp",
    rb"II\*\0|MM\0\*": ".tif",
}


class Entry(NamedTuple):
    """One image: its name, where its bytes lie, the text of its labels, its CRC-32 where an index tells it, and its group."""

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

    def __call__(self, i: int) -> bytes:
        shard, offset, size, crc = (int(number) for number in self.places[i])
        data = read_range(self.shards[shard], offset, size)
        if len(data) != size or (crc >= 0 and zlib.crc32(data) != crc):
            raise FileProblem(f"{self.shards[shard]} is damaged at byte {offset:,}", hint="Copy the shard again.")
        return data

    def version(self, i: int) -> str:
        """Size and checksum, where the index has one: every read is held to it."""
        _, _, size, crc = (int(number) for number in self.places[i])
        return "" if crc < 0 else f"{size} {crc}"


def read_range(address: str, offset: int, size: int) -> bytes:
    if is_remote(address):
        return _fsspec(address).cat_file(address, start=offset, end=offset + size)
    with open_regular(address) as file:
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
    """A folder of `.tar` files, one `.tar`, or an address of either; parts by a word in the file name: `cats-train-0.tar`."""
    shards = _find_shards(str(where))
    index = _read_index(str(where), shards)
    parts: dict[str, list[Entry]] = {}
    firsts: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = Path(shard).name
        entries = index.shards[name] if name in index.shards else scan_shard(shard)
        told = _PART.search(name.lower())
        part = PART_NAMES[told[1]] if told else "all"
        firsts.setdefault(part, name)
        parts.setdefault(part, []).extend(entry._replace(shard=number) for entry in entries)
    if "all" in parts and len(parts) > 1:
        some = next(name for part, name in firsts.items() if part != "all")
        raise FileProblem(
            f"{where} holds shards of a part, as {some}, and others, as {firsts['all']}",
            hint="Name the part in every file name or in none, or give one file.",
        )
    every = {label for entries in parts.values() for entry in entries for label in entry.labels}
    # The index knows the order that the classes had; it is the labels' meaning, and must not change on the way.
    classes = (*index.classes, *class_order(every.difference(index.classes)))
    multi = any(len(entry.labels) != 1 for entries in parts.values() for entry in entries)
    return Opened(
        {name: _dataset(f"{where} {name}", found, classes, shards, multi) for name, found in sorted(parts.items())}
    )


def _dataset(
    name: str, entries: Sequence[Entry], classes: tuple[str, ...], shards: Sequence[str], multi: bool
) -> Dataset:
    number = {label: i for i, label in enumerate(classes)}
    rows = [[number[label] for label in entry.labels] for entry in entries]
    labels = several_labels(rows) if multi else single_labels([label for (label,) in rows])
    places = [(entry.shard, entry.offset, entry.size, -1 if entry.crc is None else entry.crc) for entry in entries]
    reader = ShardReader(shards, np.array(places, dtype=np.int64).reshape(-1, 4))
    groups = [entry.group for entry in entries] if any(entry.group for entry in entries) else None
    return Dataset(name, classes, [entry.key for entry in entries], labels, reader, groups)


def scan_shard(shard: str) -> list[Entry]:
    """Reads the headers of one tar; a sample without a label, or a label without an image, is an error that names it."""
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
    if alone := sorted(images.keys() ^ labels.keys()):
        what = "has no label" if alone[0] in images else "has a label, but no image"
        raise FileProblem(f"{shard}: {alone[0]!r:.60} {what} ({len(alone)} of these)")
    return [_entry(shard, key, place, labels[key]) for key, place in images.items()]


def _entry(shard: str, key: str, place: tuple[int, int], told: Mapping[str, bytes]) -> Entry:
    kind = next(kind for kind in _LABEL_SUFFIXES if kind in told)
    labels, group = _parse_label(kind, told[kind], f"{shard}: {key}{kind}")
    return Entry(key, 0, *place, labels, group=group)


def _open_shard(shard: str) -> IO[bytes]:
    try:
        return _fsspec(shard).open(shard, "rb") if is_remote(shard) else open_regular(shard)
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
        found = table.get("label", table.get("labels", table.get("cls"))) if isinstance(table, dict) else table
        values = found if isinstance(found, list) else [found]
        if not all(isinstance(value, str | int) for value in values):
            raise ValueError("no label in it")
        group = table.get("group") if isinstance(table, dict) else None
        return tuple(str(value) for value in values), "" if group is None else str(group)
    except (ValueError, FileProblem) as error:
        raise FileProblem(f"{where!r:.120} is not a label: {error}") from None


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


class _Index(NamedTuple):
    classes: tuple[str, ...] = ()
    shards: Mapping[str, list[Entry]] = {}


def _read_index(where: str, shards: Sequence[str]) -> _Index:
    """The index that `write_shards` left; an empty one where others made the shards."""
    place = where.rpartition("/")[0] or "." if where.endswith(".tar") else where.rstrip("/")
    address = f"{place}/{INDEX}"
    text = _read_if_there(address)
    if text is None:
        return _Index()
    sums = _read_if_there(f"{place}/{SUMS}")  # missing only where the writing was cut off just before its end
    if sums is not None and f"{hashlib.sha256(text).hexdigest()}  {INDEX}".encode() not in sums.splitlines():
        raise FileProblem(f"{address} is damaged: its SHA-256 is not the one in {SUMS}", hint="Copy both again.")
    try:
        table = parse_json(text.decode(), address)
        classes, told = table["classes"], table["shards"]
        sizes = {name: shard["bytes"] for name, shard in told.items()}
        if not _are_texts(classes) or not all(type(size) is int for size in sizes.values()):
            raise ValueError("it does not tell classes and sizes")
        entries = {name: [_listed(row, sizes[name]) for row in shard["entries"]] for name, shard in told.items()}
    except (ValueError, LookupError, TypeError, AttributeError, FileProblem) as error:
        raise FileProblem(f"{address} is not a readable index: {error}", hint="Remove it to read the shards.") from None
    _require_whole(place, shards, sizes, whole=not where.endswith(".tar"))
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


def _require_whole(place: str, shards: Sequence[str], sizes: Mapping[str, int], *, whole: bool) -> None:
    """Every shard of the index is there, in its full length: found now, and not at the image that is missing."""
    there = {Path(shard).name: shard for shard in shards}
    if missing := [name for name in sizes if whole and name not in there]:
        raise FileProblem(f"{place} lacks {missing[0]}, which is in its {INDEX}", hint="Copy the shard again.")
    for name, shard in there.items():
        size = _fsspec(shard).size(shard) if is_remote(shard) else Path(shard).stat().st_size
        if name in sizes and size != sizes[name]:
            told = f"{size:,} bytes instead of {sizes[name]:,}"
            raise FileProblem(f"{shard} is damaged: it has {told}", hint="Copy the shard again.")


def _read_if_there(address: str) -> bytes | None:
    try:
        return _fsspec(address).cat_file(address) if is_remote(address) else read_bytes(address, _INDEX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileProblem(f"{address} cannot be read: {error}") from None


# --- writing ----------------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """One shard: its file name, and which images of which part go into it."""

    name: str
    part: str
    images: range


def write_shards(
    opened: Opened, out: Path, *, per_shard: int, workers: int, advance: Callable[[int, str], None]
) -> dict[str, Any]:
    """Writes every part as `part-00000.tar` …, several shards at a time, then `index.json` and `SHA256SUMS`.

    A shard that is already there and whole is kept: calling again after an interruption goes on where it stopped. What a call
    with other data, or another `per_shard`, left there is not touched, but refused.
    """
    jobs = [
        _Job(f"{part if part != 'all' else 'data'}-{first // per_shard:05d}.tar", part, range(first, last))
        for part, dataset in opened.parts.items()
        for first in range(0, len(dataset), per_shard)
        for last in [min(first + per_shard, len(dataset))]
    ]
    with fsio.locked(fsio.make_folder(out)):
        notes = _notes_of(out, opened, jobs)
        done, table = 0, dict[str, Any]()

        def take(made: tuple[_Job, dict[str, Any]]) -> None:
            nonlocal done
            job, table[job.name] = made
            done += len(job.images)
            advance(done, job.name)

        if workers == 1:
            for job in jobs:
                take(_make_shard(opened, out, job, notes.get(job.name)))
        else:
            _in_processes(opened, out, jobs, notes, workers, take)
        _finish(out, opened.classes, {job.name: table[job.name] for job in jobs})
    return table


def _in_processes(
    opened: Opened,
    out: Path,
    jobs: Sequence[_Job],
    notes: Mapping[str, dict[str, Any]],
    workers: int,
    take: Callable[[tuple[_Job, dict[str, Any]]], None],
) -> None:
    with process_pool(workers, (opened, out)) as pool:
        try:
            running = [pool.submit(_make_shard_there, job, notes.get(job.name)) for job in jobs]
            for future in concurrent.futures.as_completed(running):
                take(future.result())
        except BrokenProcessPool:
            raise VitlabError(
                "a process that writes shards was killed, most likely for want of memory",
                hint="Use fewer --workers, or a smaller --per-shard; what is written is kept.",
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _make_shard_there(job: _Job, note: dict[str, Any] | None) -> tuple[_Job, dict[str, Any]]:
    opened, out = given()
    return _make_shard(opened, out, job, note)


def _make_shard(opened: Opened, out: Path, job: _Job, note: dict[str, Any] | None) -> tuple[_Job, dict[str, Any]]:
    """The shard and what the index tells of it. The note is on the disk first: a shard without one is not ours."""
    if note is not None and _is_whole(out / job.name, note):
        return job, note
    dataset = opened.parts[job.part]
    buffer = io.BytesIO()
    entries: list[list[Any]] = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for i in job.images:
            data, suffix = _encoded(dataset, i)
            labels = [dataset.classes[label] for label in dataset.labels[i]]
            group = [dataset.groups[i]] if dataset.groups is not None else []
            entries.append([dataset.keys[i], buffer.tell() + _BLOCK, len(data), labels, zlib.crc32(data), *group])
            # Numbers, because names of people's files may be longer or stranger than tar allows.
            _add(archive, f"{i:09d}{suffix}", data)
            told = {"labels": labels, "source": dataset.keys[i], **({"group": group[0]} if group else {})}
            _add(archive, f"{i:09d}.json", json.dumps(told, ensure_ascii=False).encode())
    raw = buffer.getbuffer()
    note = {
        "sha256": hashlib.sha256(raw).hexdigest(),
        "bytes": len(raw),
        "made_from": _made_from(dataset, job.images),
        "entries": entries,
    }
    fsio.write_json(out / _note(job.name), note)
    fsio.write_file(out / job.name, [raw])
    return job, note


def _encoded(dataset: Dataset, i: int) -> tuple[bytes, str]:
    """The file as it is, under the suffix of its content; pixels as PNG, which loses nothing."""
    try:
        picture = dataset.read(i)
    except OSError as error:
        raise FileProblem(f"{dataset.keys[i]} cannot be read: {error.strerror or error}", hint=_GO_ON) from None
    if not isinstance(picture, bytes):
        buffer = io.BytesIO()
        Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(buffer, "PNG")
        return buffer.getvalue(), ".png"
    for start, suffix in _STARTS.items():
        if re.match(start, picture, re.DOTALL):
            return picture, suffix
    raise FileProblem(f"{dataset.keys[i]} is not an image, so it goes into no shard", hint=_GO_ON)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)  # and no time, no owner: the same images give the same bytes
    archive.addfile(info, io.BytesIO(data))


def _finish(out: Path, classes: Sequence[str], table: Mapping[str, dict[str, Any]]) -> None:
    text = fsio.json_text({"classes": list(classes), "shards": table})
    sums = {INDEX: hashlib.sha256(text.encode()).hexdigest(), **{name: told["sha256"] for name, told in table.items()}}
    fsio.write_file(out / INDEX, text)
    fsio.write_file(out / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    for name in table:
        fsio.remove_file(out / _note(name))


# --- going on where a call stopped ------------------------------------------------------------------------------------


def _note(name: str) -> str:
    return f".{name}.json"


def _notes_of(out: Path, opened: Opened, jobs: Sequence[_Job]) -> dict[str, dict[str, Any]]:
    """What earlier calls noted about these shards; an error where the folder holds anything else."""
    notes = {name: told for name, told in _parse(out / INDEX).get("shards", {}).items() if isinstance(told, dict)}
    names = {job.name for job in jobs}
    for path in sorted(out.glob(".*.tar.json")):
        notes[path.name[1 : -len(".json")]] = _parse(path)
    ours = {INDEX, SUMS, fsio.LOCK, *notes, *(_note(name) for name in notes)}
    others = [path.name for path in sorted(out.iterdir()) if path.name not in ours]
    made = {job.name: _made_from(opened.parts[job.part], job.images) for job in jobs if job.name in notes}
    others += [name for name, note in notes.items() if name not in names or note.get("made_from") != made[name]]
    if others:
        raise UsageError(
            f"{out} holds {others[0]}, which is not a part of these shards",
            hint="Choose another OUT, or empty this one.",
        )
    return notes


def _parse(path: Path) -> dict[str, Any]:
    """A note or an index. One that cannot be read is none: notes are written whole, so nobody wrote this one."""
    try:
        found = read_json(path, _INDEX_BYTES)
        return found if isinstance(found, dict) else {}
    except (OSError, FileProblem):
        return {}


def _is_whole(path: Path, note: Mapping[str, Any]) -> bool:
    try:
        return path.stat().st_size == note.get("bytes") and fsio.hash_file(path) == note.get("sha256")
    except FileNotFoundError:
        return False


def _made_from(dataset: Dataset, index: range) -> str:
    """Names, classes, labels, groups, what is known of the files, and the first image: a shard is kept only while all that
    went into it is the same, and nothing but that image has to be read to know."""
    groups = dataset.groups or [""] * len(dataset)
    rows = [[dataset.keys[i], dataset.labels[i], groups[i], dataset.version(i)] for i in index]
    text = json.dumps([dataset.classes, rows])
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    digest.update(_encoded(dataset, index[0])[0])
    return digest.hexdigest()
