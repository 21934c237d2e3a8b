"""The state of a run on disk: what it takes to go on at the exact step, whatever happened.

A checkpoint is a folder `step-000000123` of safetensors and JSON under a SHA-256 manifest, made whole or not at all. There is
nothing random to store: all randomness is keyed by (seed, step). Saving goes on beside training, one at a time.
"""

import concurrent.futures
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.weights.containers import find_nonfinite, read_arrays, safetensors_chunks

MODEL, AVERAGE, OPTIMIZER, PROGRESS = (
    "model.safetensors",
    "average.safetensors",
    "optimizer.safetensors",
    "progress.json",
)
_NAME = re.compile(r"step-(\d{9})")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything a resume needs, on the CPU. `progress` is small and JSON: the best result so far, the loss scale."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor] | None
    progress: dict[str, Any]


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that training can no longer change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def store(folder: Path, snapshot: Snapshot) -> Path:
    """Writes `folder/step-...`; a number that is none is refused before anything is written."""
    for part in (snapshot.model, snapshot.optimizer, snapshot.average or {}):
        if names := find_nonfinite(part):
            raise VitlabError(f"'{names[0]}' holds NaN or infinity at step {snapshot.step}; nothing was saved")
    path = folder / f"step-{snapshot.step:09d}"
    with fsio.new_folder(path) as new:
        new.write(MODEL, safetensors_chunks(snapshot.model))
        new.write(OPTIMIZER, safetensors_chunks(snapshot.optimizer))
        if snapshot.average is not None:
            new.write(AVERAGE, safetensors_chunks(snapshot.average))
        new.write_json(PROGRESS, {"step": snapshot.step, "averaged": snapshot.average is not None, **snapshot.progress})
    return path


def restore(path: Path) -> Snapshot:
    """The snapshot in `path`, after every file agreed with its hash."""
    with fsio.verifying(path, required=(MODEL, OPTIMIZER, PROGRESS)):
        try:
            progress = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
            step, averaged = int(progress.pop("step")), progress.pop("averaged")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileProblem(f"{path / PROGRESS} cannot be read: {error}") from None
        if f"step-{step:09d}" != path.name:
            raise FileProblem(f"{path} was renamed: it holds step {step}")
        average = read_arrays(path / AVERAGE).arrays if averaged else None
        return Snapshot(step, read_arrays(path / MODEL).arrays, read_arrays(path / OPTIMIZER).arrays, average, progress)


def list_checkpoints(folder: Path) -> list[Path]:
    """By step, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def newest_valid(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest snapshot that is whole, and a sentence for each newer one that is not."""
    said: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return restore(path), said
        except FileProblem as error:
            said.append(f"{path.name} cannot be used: {error.what}")
    return None, said


def prune(folder: Path, *, keep: int, best: int | None) -> None:
    """Removes all but the newest `keep` and the best one. A half-removed one is no checkpoint: its manifest goes first."""
    for path in list_checkpoints(folder)[:-keep]:
        if best is None or path.name != f"step-{best:09d}":
            fsio.remove_folder(path)


def remove_after(folder: Path, step: int) -> None:
    """Takes away what comes after `step`: damaged ones, which would count as newest and stand in the way of new ones."""
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            fsio.remove_folder(path)


class Saver:
    """Writes snapshots in a thread, one at a time: a second waits for the first, and errors come out at the next call."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._pending: concurrent.futures.Future[None] | None = None

    def submit(self, snapshot: Snapshot, best: int | None) -> None:
        self.wait()
        self._pending = self._pool.submit(self._store, snapshot, best)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def _store(self, snapshot: Snapshot, best: int | None) -> None:
        store(self.folder, snapshot)
        prune(self.folder, keep=self.keep, best=best)
