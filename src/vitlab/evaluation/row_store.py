"""One row of numbers per image, for every image of a set, computed once and kept: vectors, or answers.

A set is cut into chunks of a fixed number of images; each chunk is one file that carries its own SHA-256 in its name and
appears whole or not at all, so that whoever is killed resumes with the first chunk that is missing. Whoever is stopped by a
signal leaves what there is of the next chunk as well. Of several processes each computes its share of the missing chunks, and
what is in a chunk does not depend on who does. Chunks are mapped into memory, never loaded together.
Letters: N images, B batch, D numbers in a row.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import io
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.core.reading import load_json
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.data.pixel_stats import InputWatch
from vitlab.data.preprocess import Preprocess
from vitlab.engines.inference import InferenceOptions, ModelFunction, infer, inference_progress, unpadded_batches

CHUNK_ROWS = 1024  # images: 1.5 MB of ViT-S features, and what a kill can cost; a GPU would wait for smaller files
ABOUT = "about.json"
_LONGEST_WAIT = datetime.timedelta(days=30)  # of one process for another
_PARTIAL = "partial-"  # before the name of a chunk that is not whole
_REASONS = "bad-"  # before the name of a chunk: why images of it could not be read
_KEY_LETTERS = 32  # of a SHA-256 in names: 128 bits, more than chance can meet

Array = np.ndarray[Any, Any]
Kept = TypeVar("Kept")


@dataclasses.dataclass(frozen=True)
class ImageRows:
    """`chunks` together are float32 [N, D], in the order of the data set; an image that could not be read is a row of NaN."""

    chunks: Sequence[Tensor]
    bad: Mapping[str, str]  # the reason, by the name of the image
    computed: int  # images that the model was run on; the others were in the cache
    seconds: float

    @property
    def width(self) -> int:
        return self.chunks[0].shape[1]

    def readable(self) -> Tensor:
        """bool [N]."""
        return torch.cat([~chunk[:, 0].isnan() for chunk in self.chunks])

    def rows(self, index: Tensor) -> list[Tensor]:
        """The rows of chosen images, in that order, again in chunks."""
        if len(index) == sum(map(len, self.chunks)) and torch.equal(index, torch.arange(len(index))):
            return list(self.chunks)  # all of them: nothing is copied
        return [pick_rows(self.chunks, part) for part in index.split(CHUNK_ROWS)]


def pick_rows(chunks: Sequence[Tensor], index: Tensor) -> Tensor:
    """Chosen rows of what the chunks are together."""
    ends = torch.tensor([len(chunk) for chunk in chunks]).cumsum(0)
    number = torch.bucketize(index, ends, right=True)
    rows = torch.empty(len(index), chunks[0].shape[1], dtype=chunks[0].dtype)
    for i in number.unique().tolist():
        here = number == i
        rows[here] = chunks[i][index[here] - (ends[i] - len(chunks[i]))]
    return rows


class RowStore(NamedTuple):
    """The folder of one set of rows, and what its about.json says of them."""

    folder: Path
    about: Mapping[str, Any]


def named_store(cache: Path, key: Mapping[str, Any], dataset: Dataset) -> RowStore:
    """The folder in `cache` for what follows from `key` and the images."""
    key = {**key, "data": dataset.content_fingerprint()}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_KEY_LETTERS]
    return RowStore(cache / name, key | {"name": dataset.name, "images": len(dataset)})


def _as_it_is(output_BD: Tensor) -> Tensor:
    return output_BD


@dataclasses.dataclass(frozen=True)
class RowWork:
    """What is computed of a batch: `function` on the device, then `finish` on the CPU, which gives the rows."""

    function: ModelFunction
    preprocess: Preprocess
    finish: Callable[[Tensor], Tensor] = _as_it_is
    watch: InputWatch | None = None  # sees the images of this process


def compute_rows(
    work: RowWork,
    dataset: Dataset,
    options: InferenceOptions,
    *,
    store: RowStore | None,
    world: World,
    console: Console,
    label: str = "features",
) -> ImageRows:
    """Compute the row of every image that is not in the store yet, and return all of them; without a store, in memory.

    All processes of the `world` must call it, and see the same folder. Each gets all rows.
    """
    if not len(dataset):
        raise FileProblem(f"{dataset.name} holds no images")
    started = time.perf_counter()
    job = _Job(work, dataset, options, world, console, label)
    if store is None:
        chunks = [torch.from_numpy(rows_ND) for _, rows_ND in job.compute(job.sizes, {}, lambda _, rows, __: rows)]
        reasons, computed = job.bad.found, len(dataset)
    else:
        paths, computed = _fill(job, store)
        chunks = [mapped(path) for path in paths]
        reasons = stored_reasons(store.folder) | job.bad.found
    found = ImageRows(chunks, {}, computed, time.perf_counter() - started)
    found = dataclasses.replace(found, bad=unread(found, dataset, reasons))
    if len(found.bad) and not found.readable().any():
        raise none_readable(len(dataset), *next(iter(found.bad.items())))
    return found


def none_readable(count: int, first: str, why: str) -> VitlabError:
    if count == 1:
        return VitlabError(f"{first} {why}")
    return VitlabError(f"none of the {count:,} images could be read, the first is {first}: {why}")


def unread(found: ImageRows, dataset: Dataset, reasons: Mapping[str, str]) -> dict[str, str]:
    """Why images have no row, by their names, in their order."""
    names = (str(dataset.keys[i]) for i in (~found.readable()).nonzero()[:, 0].tolist())
    return {name: reasons.get(name, "could not be read when its row was computed") for name in names}


# --- from images to rows ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """One call of `compute_rows`."""

    work: RowWork
    dataset: Dataset
    options: InferenceOptions
    world: World
    console: Console
    label: str

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """The images in each chunk, by its number."""
        total = len(self.dataset)
        return {i: min(CHUNK_ROWS, total - i * CHUNK_ROWS) for i in range(-(-total // CHUNK_ROWS))}

    @functools.cached_property
    def bad(self) -> BadImages:
        """What this process could not read."""
        return BadImages(most=len(self.dataset))

    def compute(
        self, sizes: Mapping[int, int], partial: Mapping[int, Array], keep: Callable[[int, Array, int], Kept]
    ) -> Generator[tuple[int, Kept]]:
        """What `keep(number, rows, size)` makes of each chunk, from its partial rows and the rows that are left.

        Whoever is stopped keeps what there is of a chunk, too.
        """
        firsts = {i: i * CHUNK_ROWS for i in sizes}
        runs = [range(firsts[i] + len(partial.get(i, ())), firsts[i] + size) for i, size in sizes.items()]
        rows = self._rows(runs)
        for number, size in sizes.items():
            done = [partial[number]] if number in partial else []
            try:
                while sum(map(len, done)) < size:
                    done.append(next(rows))
                kept = keep(number, np.concatenate(done), size)
            except (Stopped, KeyboardInterrupt):
                if any(map(len, done)):
                    with contextlib.suppress(FileProblem):  # a full disk keeps nobody who wants to leave
                        keep(number, np.concatenate(done), size)
                raise
            yield number, kept

    @torch.inference_mode()
    def _rows(self, runs: Sequence[range]) -> Generator[Array]:
        """Rows float32 [B, D], batch after batch."""
        rule, device, total, done = self.work.preprocess, self.world.device, sum(map(len, runs)), 0
        batches: Iterator[Any] = unpadded_batches(self.dataset, rule, self.options, device, self.bad, runs)
        if self.work.watch is not None:
            batches = self.work.watch.watching(batches, rule)
        with inference_progress(self.console, self.label, total, self.options) as advance, _exact_convolutions():
            for output_BD, batch in infer(self.work.function, batches, rule, device):
                rows_BD = self.work.finish(output_BD.cpu()).float()
                broken_B = batch.valid & ~rows_BD.isfinite().all(dim=1)
                if broken_B.any():
                    name = self.dataset.keys[int(batch.ids[broken_B][0])]
                    raise VitlabError(f"the model's output for {name} is not finite", hint="Are the weights complete?")
                rows_BD[~batch.valid] = torch.nan
                done += len(rows_BD)
                advance(done)
                yield np.ascontiguousarray(rows_BD.numpy())


@contextlib.contextmanager
def _exact_convolutions() -> Generator[None]:
    """A GPU rounds the inputs of convolutions to 10 bits by default, and the patch embedding is one."""
    rule: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    before = rule.fp32_precision
    rule.fp32_precision = "ieee"
    try:
        yield
    finally:
        rule.fp32_precision = before


# --- chunks on the disk -----------------------------------------------------------------------------------------------


def _fill(job: _Job, store: RowStore) -> tuple[list[Path], int]:
    """The files of all chunks, those that were missing computed now, and how many images that were."""
    folder, count = store.folder, len(job.sizes)
    # One may be done hours before another, or wait for the lock of another call. One that dies is noticed at once by gloo.
    world = job.world.new_process_group(_LONGEST_WAIT)
    with contextlib.ExitStack() as until_filled:
        # The first process looks, and holds the lock for all; what it found is what all work by.
        found = world.gather_dict(world.run_or_fail_everywhere(lambda: _scan_store(job, store, until_filled)))
        paths = {int(number): folder / name for number, name in found.items() if number.isdecimal()}
        missing = [number for number in range(count) if number not in paths]
        partial = {
            i: np.load(folder / found[f"{_PARTIAL}{i}"], allow_pickle=False)
            for i in missing
            if f"{_PARTIAL}{i}" in found
        }
        computed = sum(job.sizes[i] - len(partial.get(i, ())) for i in missing)
        if missing:
            world.run_or_fail_everywhere(lambda: _require_shared(folder, world))
            mine = missing[world.rank :: world.size]
            written = job.compute(
                {i: job.sizes[i] for i in mine}, partial, functools.partial(_write_chunk, folder, job)
            )
            new = world.gather_dict({str(number): path.name for number, path in written})
            paths |= {int(number): folder / name for number, name in new.items()}
            if world.is_main:
                _clear_others(folder, list(paths.values()))
    return [paths[number] for number in range(count)], computed


def _scan_store(job: _Job, store: RowStore, until_filled: contextlib.ExitStack) -> dict[str, str]:
    """The names of the chunks that are there, whole or partial, by number; the folder is locked where some are missing."""
    if not job.world.is_main:
        return {}
    folder, count, total = store.folder, len(job.sizes), len(job.dataset)
    paths = whole_chunks(folder, count)
    if not all(paths):
        fsio.make_folder(folder)
        until_filled.enter_context(fsio.locked(folder))
        paths = whole_chunks(folder, count)  # another process may have been at work until now
    partial = {number: path for number, path in _partial_chunks(folder).items() if number < count and not paths[number]}
    if all(paths):
        job.console.say(f"{job.label}: all {total:,} are in the cache")
    else:
        _clear_others(folder, [*paths, *partial.values()])
        fsio.write_json(folder / ABOUT, dict(store.about))
        kept = sum(job.sizes[i] for i, path in enumerate(paths) if path)
        kept += sum(len(mapped(path)) for path in partial.values())
        if kept:
            job.console.say(f"{job.label}: {kept:,} of {total:,} are in the cache")
    whole = {str(number): path.name for number, path in enumerate(paths) if path is not None}
    return whole | {f"{_PARTIAL}{number}": path.name for number, path in partial.items()}


def _require_shared(folder: Path, world: World) -> None:
    if not (folder / ABOUT).is_file():
        raise FileProblem(
            f"process {world.rank} does not see {folder}, which the first one has made",
            hint="Give --cache a folder on a file system that all machines share.",
        )


def _write_chunk(folder: Path, job: _Job, number: int, rows_ND: Array, size: int) -> Path:
    """Called partial where there are too few rows for a whole one. Why images could not be read is written first."""
    names = [str(job.dataset.keys[number * CHUNK_ROWS + i]) for i in np.isnan(rows_ND[:, 0]).nonzero()[0].tolist()]
    if reasons := {name: job.bad.found[name] for name in names if name in job.bad.found}:
        path = folder / f"{_REASONS}{number:06d}.json"
        fsio.write_file(path, json.dumps(_read_reasons(path) | reasons))  # names may hold bytes that are not text
    buffer = io.BytesIO()
    np.save(buffer, rows_ND)
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()[:_KEY_LETTERS]
    path = folder / f"{'' if len(rows_ND) == size else _PARTIAL}{number:06d}-{digest}.npy"
    fsio.write_file(path, data)
    return path


def stored_reasons(folder: Path) -> dict[str, str]:
    """Why images could not be read, by their names."""
    return {name: why for path in sorted(folder.glob(f"{_REASONS}*.json")) for name, why in _read_reasons(path).items()}


def _read_reasons(path: Path) -> dict[str, str]:
    try:
        table = load_json(path)
    except (OSError, VitlabError):  # none yet, or damaged: the images stay bad, without a reason
        return {}
    return {str(name): str(why) for name, why in table.items()} if isinstance(table, dict) else {}


def _clear_others(folder: Path, kept: Sequence[Path | None]) -> None:
    """Takes away what is damaged, and the partial file of a chunk that is whole by now."""
    for path in folder.glob("*.npy"):
        if path not in kept:
            fsio.remove_file(path)


def whole_chunks(folder: Path, count: int) -> list[Path | None]:
    """The file of every chunk, or None where there is none whose content is what its name says."""
    found: list[Path | None] = [None] * count
    for path in sorted(folder.glob("*-*.npy")):
        number = path.stem.partition("-")[0]
        if number.isdecimal() and int(number) < count and _is_intact(path):
            found[int(number)] = path
    return found


def _partial_chunks(folder: Path) -> dict[int, Path]:
    """The longest file of every partial chunk, by its number."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"{_PARTIAL}*-*.npy"), key=lambda path: path.stat().st_size):
        number = path.stem.removeprefix(_PARTIAL).partition("-")[0]
        if number.isdecimal() and _is_intact(path):
            found[int(number)] = path
    return found


def _is_intact(path: Path) -> bool:
    """Whether its content is what its name says."""
    return fsio.hash_file(path)[:_KEY_LETTERS] == path.stem.rpartition("-")[2]


def mapped(path: Path) -> Tensor:
    """The rows of a file. "c": private to this process, so that torch may have a tensor of it; the file stays as it is."""
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
