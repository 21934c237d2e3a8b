"""Data as WebDataset shards: tars of images and labels, an index, checksums.

An interrupted call, made again, ends in the same bytes.
"""

import concurrent.futures
import hashlib
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.reading import read_json
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.processes import process_pool, worker_state
from vitlab.data.sources.shards import INDEX, INDEX_BYTES, SUMS

_BLOCK = 512  # tar's unit
_MEND = "`vitlab data check` lists all such files. Remove them and call again: it resumes where it stopped."
_STARTS = {  # how each format begins, and what its files are called
    rb"\xff\xd8\xff": ".jpg",
    rb"\x89PNG": ".png",
    rb"RIFF.{4}WEBP": ".webp",
    rb"GIF8": ".gif",
    rb"BM": ".bmp",
    rb"II\*\0|MM\0\*": ".tif",
}


class _Job(NamedTuple):
    """One shard: its file name, and which images of which part go into it."""

    name: str
    part: str
    images: range


_Note = dict[str, Any]  # what the index says of a shard
_Made = tuple[_Job, _Note]


def write_shards(
    opened: Opened, out: Path, *, per_shard: int, workers: int, advance: Callable[[int, str], None]
) -> dict[str, Any]:
    """Write every part as `part-00000.tar` …, then `index.json` and `SHA256SUMS`.

    A complete shard that is already there is kept: the same call after an interruption resumes. What a call with other data, or
    another `per_shard`, left there is refused.
    """
    jobs = [
        _Job(f"{part if part != 'all' else 'data'}-{first // per_shard:05d}.tar", part, range(first, last))
        for part, dataset in opened.parts.items()
        for first in range(0, len(dataset), per_shard)
        for last in [min(first + per_shard, len(dataset))]
    ]
    with fsio.locked(fsio.make_folder(out)):
        notes = _notes_of(out, opened, jobs)
        todo = [(job, notes.get(job.name)) for job in jobs]
        made = (_make_shard(opened, out, *each) for each in todo)
        done, table = 0, dict[str, Any]()
        for job, note in made if workers == 1 else _in_processes(opened, out, todo, workers):
            table[job.name] = note
            done += len(job.images)
            advance(done, job.name)
        _finish(out, opened.classes, {job.name: table[job.name] for job in jobs})
    return table


def _in_processes(
    opened: Opened, out: Path, todo: Sequence[tuple[_Job, _Note | None]], workers: int
) -> Iterator[_Made]:
    with process_pool(workers, (opened, out)) as pool:
        try:
            running = [pool.submit(_make_shard_there, *each) for each in todo]
            yield from (future.result() for future in concurrent.futures.as_completed(running))
        except BrokenProcessPool:
            raise VitlabError(
                "a process that writes shards was killed, probably out of memory",
                hint="Use fewer --workers, or a smaller --per-shard; what is written is kept.",
            ) from None


def _make_shard_there(job: _Job, note: _Note | None) -> _Made:
    opened, out = worker_state()
    return _make_shard(opened, out, job, note)


def _make_shard(opened: Opened, out: Path, job: _Job, note: _Note | None) -> _Made:
    """The shard, and its note for the index, which is on the disk first."""
    if note is not None and _is_complete(out / job.name, note):
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
            # Numbers, because users' file names may be longer or stranger than tar allows.
            _add(archive, f"{i:09d}{suffix}", data)
            about = {"labels": labels, "source": dataset.keys[i], **({"group": group[0]} if group else {})}
            _add(archive, f"{i:09d}.json", json.dumps(about, ensure_ascii=False).encode())
    raw = buffer.getbuffer()
    digest, source = hashlib.sha256(raw).hexdigest(), _made_from(dataset, job.images)
    note = {"sha256": digest, "bytes": len(raw), "made_from": source, "entries": entries}
    fsio.write_json(out / _note(job.name), note)
    fsio.write_file(out / job.name, [raw])
    return job, note


def _encoded(dataset: Dataset, i: int) -> tuple[bytes, str]:
    """The file under the suffix of its content; pixels as PNG, without loss."""
    try:
        picture = dataset.read(i)
    except OSError as error:
        raise FileProblem(f"{dataset.keys[i]} cannot be read: {error.strerror or error}", hint=_MEND) from None
    if not isinstance(picture, bytes):
        buffer = io.BytesIO()
        Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(buffer, "PNG")
        return buffer.getvalue(), ".png"
    for start, suffix in _STARTS.items():
        if re.match(start, picture, re.DOTALL):
            return picture, suffix
    raise FileProblem(f"{dataset.keys[i]} is not an image and cannot be packed", hint=_MEND)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)  # and no time, no owner: the same images give the same bytes
    archive.addfile(info, io.BytesIO(data))


def _finish(out: Path, classes: Sequence[str], table: Mapping[str, _Note]) -> None:
    text = fsio.json_text({"classes": list(classes), "shards": table})
    sums = {INDEX: hashlib.sha256(text.encode()).hexdigest(), **{name: note["sha256"] for name, note in table.items()}}
    fsio.write_file(out / INDEX, text)
    fsio.write_file(out / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    for name in table:
        fsio.remove_file(out / _note(name))


# --- resuming ---------------------------------------------------------------------------------------------------------


def _note(name: str) -> str:
    return f".{name}.json"


def _notes_of(out: Path, opened: Opened, jobs: Sequence[_Job]) -> dict[str, _Note]:
    """Notes of earlier calls about these shards; an error for any other file."""
    notes = {name: note for name, note in _parse(out / INDEX).get("shards", {}).items() if isinstance(note, dict)}
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


def _parse(path: Path) -> _Note:
    """A note or an index; empty where it cannot be read: then vitlab did not write it."""
    try:
        table = read_json(path, INDEX_BYTES)
        return table if isinstance(table, dict) else {}
    except (OSError, FileProblem):
        return {}


def _is_complete(path: Path, note: _Note) -> bool:
    try:
        return path.stat().st_size == note.get("bytes") and fsio.hash_file(path) == note.get("sha256")
    except FileNotFoundError:
        return False


def _made_from(dataset: Dataset, index: range) -> str:
    """A hash of all that goes into a shard, which is kept only while this is the same.

    Names, classes, labels, groups, file versions, and the first image, so that little has to be read to know.
    """
    part = dataset.subset(torch.tensor(index))
    text = json.dumps([part.content_fingerprint(read=False), part.groups])
    return hashlib.sha256(text.encode() + _encoded(dataset, index[0])[0]).hexdigest()
