"""Images whose labels are not to be used: loose photos, or any data set."""

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path

import torch

from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened, join_without_labels, single_labels, train_part
from vitlab.data.sources.addresses import is_remote
from vitlab.data.sources.folders import holds_classes, holds_loose
from vitlab.data.sources.loose_images import open_loose
from vitlab.data.sources.opening import FILE_SUFFIXES, Source, holds_stored_set, open_without_labels
from vitlab.data.sources.tables import Columns

_OTHER_WAYS = ("*.tar", "*.npy", "*.parquet", "*.arrow")  # in which a folder can hold a data set


@dataclasses.dataclass(frozen=True)
class Unlabelled:
    """Images without labels, and the labels of their source, for reports only."""

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


def open_for_inference(
    sources: str | Path | Sequence[str | Path],
    columns: Columns | None = None,
    console: Console | None = None,
    *,
    class_folders: bool = True,
) -> Opened:
    """Whatever images there are to run a model on: a data set, or files, folders, patterns and addresses, in their order.

    A data set by itself keeps its parts and labels; beside others, their images are one part without labels. A folder of
    class folders is a data set where `class_folders` count, and else its images as they lie.
    """
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    if not any(_is_data_set(str(source), class_folders=class_folders) for source in given):
        return Opened({"all": open_loose(given)})
    if len(given) == 1:
        return open_without_labels(given[0], columns=columns, console=console)
    opened = [open_for_inference(each, columns, console, class_folders=class_folders) for each in given]
    return Opened({"all": join_without_labels([part for one in opened for part in one.parts.values()])})


def _is_data_set(source: str, *, class_folders: bool) -> bool:
    """Whether this is more than loose images: by its name, and the names in it."""
    path = Path(source)
    if is_remote(source):
        return True
    if path.is_dir():
        return holds_stored_set(path) or (class_folders and holds_classes(path))
    if path.is_file():
        return path.suffix.lower() in FILE_SUFFIXES
    return not path.suffix and not glob.has_magic(source)  # the name of a set, or a mistake, which is reported there


def without_labels(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The same images without labels, all of class 0."""
    if not len(dataset):
        raise UsageError(f"{dataset.name} holds no images")
    labels = single_labels(torch.zeros(len(dataset), dtype=torch.int64))
    return dataclasses.replace(dataset, classes=classes, labels=labels, groups=None)


def _is_loose(path: Path) -> bool:
    """Whether a folder holds photos that are in no class folders, perhaps beside some, and no data set of another form."""
    if not path.is_dir() or any(any(path.glob(ending)) for ending in _OTHER_WAYS):
        return False
    return holds_loose(path) or not holds_classes(path)
