"""The state of a run on disk: what it takes to resume at the exact step, whatever happened.

A checkpoint is a folder `step-000000123` of safetensors and JSON under a SHA-256 manifest, made whole or not at all. There is
nothing random to store: all randomness is keyed by (seed, step). Saving runs beside training, one at a time.

Where the weights are spread over processes, each writes the rows that it has: `model-2-of-8.safetensors` holds, of every
tensor, the rows that come after those in `model-1-of-8`. A single number stands in the first file alone. Any number of
processes can read any number of files.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlab.core import fsio, reading
from vitlab.core.dist import FailedElsewhere, World
from vitlab.core.errors import FileProblem, Unreadable, VitlabError
from vitlab.training.sharding import to_local
from vitlab.weights.containers import find_nonfinite, read_arrays, safetensors_chunks

MODEL, EMA, OPTIMIZER = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
PROGRESS = "progress.json"
_NAME = re.compile(r"step-(\d{9})")
_PART = re.compile(r"model-\d{1,5}-of-(\d{1,5})\.safetensors")
ALONE = World(0, 1, torch.device("cpu"))
ALL = (0, 1)  # the share of a process that has everything: the first of one
_FORMAT = 1  # of what is in the folder; raised when an older vitlab could no longer read it


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything a resume needs, on the CPU. `progress` is small and JSON: the best result so far, the loss scale.

    Where the weights are spread over processes, these are the rows of one of them.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    progress: dict[str, Any]


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that training can no longer change, of the rows that this process has."""
    return {name: to_local(tensor.detach()).to("cpu", copy=True) for name, tensor in tensors.items()}


def store(folder: Path, snapshot: Snapshot, world: World = ALONE) -> Path:
    """Writes `folder/step-...`; a number that is none is refused before anything is written.

    Where each process of `world` has some rows, all write theirs, then the first publishes. All fail, or none.
    """
    path = folder / f"step-{snapshot.step:09d}"
    world.run_or_fail_everywhere(lambda: _require_finite(snapshot))
    token = world.gather_dict({"token": fsio.NewFolder.new_token()} if world.is_main else {})["token"]
    new = fsio.NewFolder(path, token, size=_nbytes(snapshot))
    try:
        world.run_or_fail_everywhere(lambda: new.make() if world.is_main else None)
        world.run_or_fail_everywhere(lambda: write_part(new, snapshot, (world.rank, world.size)))
        hashes = world.gather_dict(new.hashes)
        world.run_or_fail_everywhere(lambda: new.publish(hashes) if world.is_main else None)
    except BaseException:
        if world.is_main:
            new.discard()
        raise
    return path


def _require_finite(snapshot: Snapshot) -> None:
    for part in (snapshot.model, snapshot.optimizer, snapshot.ema or {}):
        if names := find_nonfinite(part):
            raise VitlabError(f"'{names[0]}' holds NaN or infinity at step {snapshot.step}; nothing was saved")


def _nbytes(snapshot: Snapshot) -> int:
    parts = (snapshot.model, snapshot.optimizer, snapshot.ema or {})
    return sum(tensor.nbytes for part in parts for tensor in part.values())


def write_part(new: fsio.NewFolder, snapshot: Snapshot, share: tuple[int, int]) -> None:
    """The files of one process: `share` says which one, and of how many."""
    rank, size = share
    for name, tensors in ((MODEL, snapshot.model), (OPTIMIZER, snapshot.optimizer), (EMA, snapshot.ema)):
        if tensors is not None:
            rows = tensors if rank == 0 else {key: tensor for key, tensor in tensors.items() if tensor.ndim}
            new.write(_part_name(name, rank, size), safetensors_chunks(rows))
    if rank == 0:
        known = {"format": _FORMAT, "step": snapshot.step, "ema": snapshot.ema is not None}
        new.write_json(PROGRESS, {**known, **snapshot.progress})


def _part_name(name: str, rank: int, size: int) -> str:
    return name if size == 1 else name.replace(".", f"-{rank + 1}-of-{size}.")


def restore(path: Path, share: tuple[int, int] = ALL) -> Snapshot:
    """The snapshot in `path`, after every file agreed with its hash.

    With a `share` (rank, size), only the rows of that process, which then checks its share of the files; the others, theirs.
    """
    counts = {int(found[1]) for file in path.glob("model-*") if (found := _PART.fullmatch(file.name))}
    parts = max(counts, default=1)
    required = [_part_name(name, rank, parts) for name in (MODEL, OPTIMIZER) for rank in range(parts)]
    with fsio.verifying(path, required=(*required, PROGRESS), share=share):
        try:
            progress = reading.read_json(path / PROGRESS)
            version = int(progress.pop("format"))
            step, has_ema = int(progress.pop("step")), progress.pop("ema")
        except OSError as error:
            raise Unreadable(f"{path / PROGRESS} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise FileProblem(f"{path / PROGRESS} cannot be read: {error}") from None
        if version > _FORMAT:
            raise Unreadable(f"{path} was written by a later vitlab: format {version}, and this one reads {_FORMAT}")
        if f"step-{step:09d}" != path.name:
            raise FileProblem(f"{path} was renamed: it holds step {step}")

        def read(name: str) -> dict[str, Tensor]:
            files = [path / _part_name(name, rank, parts) for rank in range(parts)]
            return read_arrays(files[0]).arrays if (parts, share) == (1, ALL) else read_rows(files, share)

        return Snapshot(step, read(MODEL), read(OPTIMIZER), read(EMA) if has_ema else None, progress)


def rows_of(count: int, share: tuple[int, int]) -> tuple[int, int]:
    """First and last+1 of the rows that a process has, as FSDP2 deals them out: equal heaps, the last ones smaller or empty."""
    rank, size = share
    heap = -(-count // size)
    return min(count, rank * heap), min(count, (rank + 1) * heap)


def read_rows(files: Sequence[Path], share: tuple[int, int]) -> dict[str, Tensor]:
    """The rows of one process, of every tensor, from files that hold its rows one after the other. Reads no others."""
    rows: dict[str, Tensor] = {}
    try:
        with contextlib.ExitStack() as opened:
            parts = [opened.enter_context(safe_open(file, "pt")) for file in files]
            for name in parts[0].keys():  # noqa: SIM118, it is not a dictionary
                if not parts[0].get_slice(name).get_shape():
                    rows[name] = parts[0].get_tensor(name)
                    continue
                slices = [part.get_slice(name) for part in parts]
                counts = [piece.get_shape()[0] for piece in slices]
                first, last = rows_of(sum(counts), share)
                pieces: list[Tensor] = [slices[0][0:0]]  # no rows, for a process that has none, but of the right shape
                for piece, count in zip(slices, counts, strict=True):
                    if max(0, first) < min(count, last):
                        pieces.append(piece[max(0, first) : min(count, last)])
                    first, last = first - count, last - count
                rows[name] = torch.cat(pieces)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise FileProblem(f"{files[0].parent} cannot be read: {error}") from None
    return rows


def list_checkpoints(folder: Path) -> list[Path]:
    """By step, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def newest_valid(folder: Path, world: World = ALONE, share: tuple[int, int] = ALL) -> tuple[Snapshot | None, list[str]]:
    """The newest snapshot that is whole for every process, and a sentence for each newer one that is not.

    One that the system does not give out may be whole: that is an error, in all processes.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return world.run_or_fail_everywhere(functools.partial(restore, path, share)), problems
        except (FileProblem, FailedElsewhere) as error:
            if is_transient_read_error(error, world):
                raise
            problems.append(f"{path.name} cannot be used: {error.what}")
    return None, problems


def is_transient_read_error(error: VitlabError, world: World = ALONE) -> bool:
    """Whether some process failed to read what another user, or another moment, might: the same answer for all of them."""
    return bool(world.all_reduce_max(isinstance(error, Unreadable)))


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Removes all but the newest `keep` and the best one. A half-removed one is not a checkpoint: its manifest goes first."""
    for path in list_checkpoints(folder)[:-keep]:
        if best is None or path.name != f"step-{best:09d}":
            fsio.remove_folder(path)


def remove_after(folder: Path, step: int) -> None:
    """Takes away what comes after `step`: damaged ones, which would count as newest and stand in the way of new ones."""
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            fsio.remove_folder(path)


class Saver:
    """Writes snapshots in a thread, one at a time: a second waits for the first, and errors come out at the next call.

    With `async_save` off, the caller waits for each. Where the weights are spread over `world`, each process has one.
    """

    def __init__(self, folder: Path, *, keep: int, async_save: bool = True, world: World = ALONE) -> None:
        self.folder, self.keep, self.async_save = folder, keep, async_save
        self._world = world.new_process_group()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._pending: concurrent.futures.Future[None] | None = None

    def submit(self, snapshot: Snapshot, best: int | None) -> None:
        self.wait()
        self._pending = self._pool.submit(self._store, snapshot, best)
        if not self.async_save:
            self.wait()

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def _store(self, snapshot: Snapshot, best: int | None) -> None:
        store(self.folder, snapshot, self._world)
        if self._world.is_main:
            prune(self.folder, keep=self.keep, best=best)
