"""The images of a VTAB task: a thousand of its set, in the order of TensorFlow Datasets."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem
from vitlab.data.dataset import Dataset, Opened, join, single_labels
from vitlab.data.sources.named_opening import open_named
from vitlab.data.sources.vtab import FINAL, TRAIN, VAL, VtabTask, find_task

_FULL_NAMES = {"train": "train", "val": "validation", "test": "test"}  # of the parts, as TensorFlow Datasets calls them


def open_vtab(name: str, *, download: bool = True, console: Console | None = None) -> Opened:
    """One task: `train` (800), `val` (200), `trainval` (both) and `test`.

    `svhn/800` has only `train` and `val`, to choose settings; `svhn/1000` only `trainval`, as `train`, and `test`.
    """
    task, images = find_task(name)
    opened = take_task(task, open_named(task.name, download=download, console=console))
    if images is None:
        return opened
    chosen = {"train": "trainval", "test": "test"} if images == FINAL else {"train": "train", "val": "val"}
    return dataclasses.replace(opened, parts={part: opened.part(of) for part, of in chosen.items()})


def take_task(task: VtabTask, opened: Opened) -> Opened:
    """The task's images out of the parts of its set."""
    parts = {part: _in_stored_order(task, part, opened) for part in {"train", task.val[0], task.test[0]}}
    train = _slice(task, parts["train"], 0, TRAIN)
    val = _slice(task, parts[task.val[0]], task.val[1], VAL)
    test = _slice(task, parts[task.test[0]], task.test[1], None)
    notes = list(opened.notes)
    if len(test) != task.test_images:
        notes.append(f"{task.name}: test has {len(test):,} of {task.test_images:,} images")
    parts = {"train": train, "val": val, "trainval": _joined(train, val), "test": test}
    return Opened(parts, tuple(notes), sparse=True)


def _in_stored_order(task: VtabTask, part: str, opened: Opened) -> Dataset:
    """A set that its makers do not split is all `train` to TensorFlow Datasets."""
    dataset = opened.part(part, "all") if part == "train" else opened.part(part)
    order = stored_order(_names(task, dataset.keys), _FULL_NAMES[part])
    return dataset.subset(torch.from_numpy(order), f"{task.name} {part}")


def _names(task: VtabTask, keys: Sequence[str]) -> list[str]:
    if task.names == "number":
        return [str(i) for i in range(len(keys))]
    if task.names == "joined":
        return [key.replace("/", "_") for key in keys]
    if task.names == "jpg":  # packed archives keep the names without it
        return [key if key.endswith(".jpg") else f"{key}.jpg" for key in keys]
    return list(keys)


def stored_order(names: Sequence[str], part: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The order of TensorFlow Datasets: by the MD5 of part and name."""
    salt = hashlib.md5(part.encode(), usedforsecurity=False)
    digests: list[bytes] = []
    for name in names:
        digest = salt.copy()
        digest.update(name.encode("utf-8", "surrogateescape"))
        digests.append(digest.digest())
    return np.array(sorted(range(len(names)), key=digests.__getitem__), dtype=np.int64)


def _slice(task: VtabTask, dataset: Dataset, percent: int, count: int | None) -> Dataset:
    first = percent * len(dataset) // 100
    last = len(dataset) if count is None else first + count
    if last > len(dataset) or first == last:
        raise FileProblem(f"{dataset.name} has {len(dataset):,} images, too few for VTAB's {task.name}")
    return dataset.subset(torch.arange(first, last))


def _joined(first: Dataset, second: Dataset) -> Dataset:
    labels = single_labels(torch.cat([first.labels.values, second.labels.values]))
    return join((first, second), labels, first.classes, first.name.replace(" train", " trainval"))
