"""Images whose labels are not to be used: loose photos, or any data set."""

import dataclasses
from pathlib import Path

import torch

from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, single_labels, train_part
from vitlab.data.sources.folders import holds_classes, holds_loose
from vitlab.data.sources.loose_images import open_loose
from vitlab.data.sources.opening import Source, open_without_labels

_OTHER_WAYS = ("*.tar", "*.npy", "*.parquet", "*.arrow")  # in which a folder can hold a data set


@dataclasses.dataclass(frozen=True)
class Unlabelled:
    """Images under no label, beside what their source says of them, for reports alone."""

    images: Dataset  # all of class 0, which nothing reads
    truth: Dataset | None  # the same images with the labels of their source; None where it has none of these classes


def open_unlabelled(source: Source, classes: tuple[str, ...], console: Console | None = None) -> Unlabelled:
    """A folder of photos in any depth, or the part to train on of any data set."""
    if isinstance(source, str | Path) and _is_loose(Path(source)):
        return Unlabelled(without_labels(open_loose([source]), classes), None)
    opened = open_without_labels(source, console=console)
    part = opened.parts[train_part(opened.parts)]
    same = part.classes == classes and not part.labels.multi
    return Unlabelled(without_labels(part, classes), part if same else None)


def without_labels(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The same images, of which nobody knows the class."""
    if not len(dataset):
        raise UsageError(f"{dataset.name} holds no images")
    labels = single_labels(torch.zeros(len(dataset), dtype=torch.int64))
    return dataclasses.replace(dataset, classes=classes, labels=labels, groups=None)


def _is_loose(path: Path) -> bool:
    """Whether a folder holds photos that are in no class folders, perhaps beside some, and no data set of another form."""
    if not path.is_dir() or any(any(path.glob(ending)) for ending in _OTHER_WAYS):
        return False
    return holds_loose(path) or not holds_classes(path)
