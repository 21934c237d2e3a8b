"""VTAB-1k: nineteen tasks of a thousand training images (Zhai et al. 2019).

VTAB took its sets from TensorFlow Datasets, which stores the images of a part in the order of a hash of their names; "the
first 800" means in that order, so it is computed here from the same names.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.dataset import Dataset, Labels, Opened, Reader
from vitlab.data.sources.named import find_named, open_named

TRAIN, VAL = 800, 200  # images to choose settings with
FINAL = TRAIN + VAL  # images that the final number is fitted on
Group = Literal["natural", "specialized", "structured"]
_FULL_NAMES = {"train": "train", "val": "validation", "test": "test"}  # of the parts, as TensorFlow Datasets calls them


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """A task, named like its set.

    `val` and `test` are (part, percent): where in that part they begin. The 200 validation images follow from there, the test
    images go to the end. `names` says how our keys become those of TensorFlow Datasets.
    """

    name: str
    group: Group
    classes: int
    val: tuple[str, int]
    test: tuple[str, int]
    test_images: int
    names: Literal["number", "as is", "joined", "jpg"]
    flip: bool = True  # whether training may mirror an image, or the class would change
    crop: bool = True  # whether training may show a part of it, or what is asked for would be lost


_TASKS = (
    VtabTask("caltech101", "natural", 102, ("train", 90), ("test", 0), 6_084, "as is"),
    VtabTask("cifar100", "natural", 100, ("train", 90), ("test", 0), 10_000, "number"),
    VtabTask("dtd", "natural", 47, ("val", 0), ("test", 0), 1_880, "as is"),
    VtabTask("flowers102", "natural", 102, ("val", 0), ("test", 0), 6_149, "as is"),
    VtabTask("oxford-pets", "natural", 37, ("train", 80), ("test", 0), 3_669, "jpg"),
    VtabTask("sun397", "natural", 397, ("val", 0), ("test", 0), 21_750, "as is"),
    VtabTask("svhn", "natural", 10, ("train", 90), ("test", 0), 26_032, "number"),
    VtabTask("patch-camelyon", "specialized", 2, ("val", 0), ("test", 0), 32_768, "as is"),
    VtabTask("eurosat", "specialized", 10, ("train", 60), ("train", 80), 5_400, "joined"),
    VtabTask("resisc45", "specialized", 45, ("train", 60), ("train", 80), 6_300, "joined"),
    VtabTask("retinopathy", "specialized", 5, ("val", 0), ("test", 0), 42_670, "as is"),
    VtabTask("clevr-count", "structured", 8, ("train", 90), ("val", 0), 15_000, "as is", crop=False),
    VtabTask("clevr-distance", "structured", 6, ("train", 90), ("val", 0), 15_000, "as is", crop=False),
    VtabTask("dmlab", "structured", 6, ("val", 0), ("test", 0), 22_735, "as is", crop=False),
    VtabTask("dsprites-location", "structured", 16, ("train", 80), ("train", 90), 73_728, "number", False, False),
    VtabTask("dsprites-orientation", "structured", 16, ("train", 80), ("train", 90), 73_728, "number", flip=False),
    VtabTask("kitti-distance", "structured", 4, ("val", 0), ("test", 0), 711, "as is", crop=False),
    VtabTask("smallnorb-azimuth", "structured", 18, ("test", 0), ("test", 50), 12_150, "number", flip=False),
    VtabTask("smallnorb-elevation", "structured", 9, ("test", 0), ("test", 50), 12_150, "number"),
)
VTAB = {task.name: task for task in _TASKS}


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


def find_task(name: str) -> tuple[VtabTask, int | None]:
    """The task of `svhn`, `svhn/800` or `svhn/1000`, and its number of images."""
    plain, slash, images = name.partition("/")
    try:
        known = find_named(plain).name
    except UnknownName:
        known = ""
    if known not in VTAB:
        raise UnknownName("VTAB task", plain, VTAB, hint=f"The tasks are {', '.join(VTAB)}.")
    if slash and images not in (str(TRAIN), str(FINAL)):
        raise UsageError(
            f"'{name}' is not a part of a VTAB task",
            hint=f"Write {plain}/{TRAIN} to choose settings, {plain}/{FINAL} to fit.",
        )
    return VTAB[known], int(images) if slash else None


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


@dataclasses.dataclass(frozen=True)
class _Joined:
    first: Reader
    count: int
    second: Reader

    def __call__(self, i: int) -> "bytes | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        return self.first(i) if i < self.count else self.second(i - self.count)


def _joined(first: Dataset, second: Dataset) -> Dataset:
    values = torch.cat([first.labels.values, second.labels.values])
    labels = Labels(values, torch.arange(len(values) + 1))
    keys = [*first.keys, *second.keys]
    reader = _Joined(first.read, len(first), second.read)
    return Dataset(first.name.replace(" train", " trainval"), first.classes, keys, labels, reader)
