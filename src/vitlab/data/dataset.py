"""Labelled images by number: what every data source becomes.

A `Dataset` holds names and labels, and reads an image's bytes on demand. It knows nothing of decoding, order or batches.
Letters: N images, K classes, B batch.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.data.decode import decode

# What `read` gives: an encoded file, or pixels uint8 [rows, columns, channels]. It is pickled into worker processes.
Reader = Callable[[int], "bytes | np.ndarray[Any, Any]"]

_LAST_CHANNELS = (1, 3, 4)  # grey, colour, with alpha: as the last of four axes, they are not a number of columns
PARTS = ("train", "val", "test")
LEARNT_FROM = ("train", "all")  # the part to train on, by the name that it has
PART_NAMES: Mapping[str, str] = {  # what people call them, in small letters
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

_PART_WORD = re.compile(rf"(?:^|[^a-z])({'|'.join(PART_NAMES)})(?:[^a-z]|$)")


def part_in_name(name: str) -> str:
    """The part that a word in a file's name says, as in `cats-train-0.tar`; `all` where none does."""
    word = _PART_WORD.search(name.lower())
    return PART_NAMES[word[1]] if word else "all"


def one_for_each(where: object, what: str, named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The name of each part, from (part, name); an error where a part has two of what is named."""
    name_of: dict[str, str] = {}
    for part, name in named:
        if part in name_of:
            raise FileProblem(
                f"{where} has two {what} for {part}: {name_of[part]} and {name}", hint="Merge or rename one."
            )
        name_of[part] = name
    return name_of


def one_spelling(name: str) -> str:
    """The name with every accent in one form (NFC), which systems differ in."""
    return unicodedata.normalize("NFC", name)


def some_of(names: Sequence[str], shown: int, between: str = ", ") -> str:
    """`a, b and 3 more`: a list that fits into a message."""
    return between.join(names[:shown]) + (f" and {len(names) - shown:,} more" if len(names) > shown else "")


def class_order(names: Iterable[str]) -> list[str]:
    """Class names, each there once, in order: by value where all are whole numbers, else as text."""
    ordered = sorted(names, key=lambda name: (one_spelling(name), name))
    if not all(name.isascii() and name.isdecimal() for name in ordered):
        return ordered
    return sorted(ordered, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))


@dataclasses.dataclass(frozen=True)
class Shares:
    """Soft labels: how much of each class an image is. Images with equal labels, as copies have, point to one row."""

    table_MK: Tensor  # float32, rows that sum to 1
    row_N: Tensor  # int64, of each image

    def __post_init__(self) -> None:
        if len(self.row_N) and not 0 <= int(self.row_N.min()) <= int(self.row_N.max()) < len(self.table_MK):
            raise UsageError(f"a soft label lies outside its table of {len(self.table_MK):,} rows")

    @functools.cached_property
    def counts_K(self) -> Tensor:
        """float64: the sum of the shares of each class."""
        times_M = torch.bincount(self.row_N, minlength=len(self.table_MK)).double()
        return times_M @ self.table_MK.double()


@dataclasses.dataclass(frozen=True)
class Labels:
    """The classes of every image: one each or, where `multi`, any number. With `soft`, shares of all classes.

    Soft labels are what a teacher has answered; `values` then has the class of the largest share.
    """

    values: Tensor  # int64 [sum of counts]
    offsets: Tensor  # int64 [N + 1]
    multi: bool = False
    soft: Shares | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.values[self.offsets[index] : self.offsets[index + 1]].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """All in order, far faster than one by one: a tensor's slice costs as much as a thousand numbers of a list."""
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return (tuple(values[first:last]) for first, last in itertools.pairwise(offsets))

    def subset(self, index_B: Tensor) -> "Labels":
        counts = self.offsets[1:] - self.offsets[:-1]
        kept = counts[index_B]
        starts = self.offsets[:-1][index_B].repeat_interleave(kept)
        offsets = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
        within = torch.arange(len(starts)) - offsets[:-1].repeat_interleave(kept)
        soft = None if self.soft is None else Shares(self.soft.table_MK, self.soft.row_N[index_B])
        return Labels(self.values[starts + within], offsets, self.multi, soft)

    def single(self) -> Tensor:
        """int64 [N]; an error where images may have several classes."""
        if self.multi:
            raise UsageError("these images have several labels each, where one is needed")
        return self.values

    def targets(self, index_B: Tensor, classes: int) -> Tensor:
        """Targets of a loss: int64 [B] for one class each, else float [B, K]."""
        if self.soft is not None:
            return self.soft.table_MK[self.soft.row_N[index_B]]
        if not self.multi:
            return self.values[index_B]
        chosen = self.subset(index_B)
        rows = torch.arange(len(index_B)).repeat_interleave(chosen.offsets[1:] - chosen.offsets[:-1])
        return torch.zeros(len(index_B), classes).index_put((rows, chosen.values), torch.ones(()))

    def counts(self, classes: int) -> Tensor:
        """Images per class [K]: int64, or float64 sums of shares where labels are soft."""
        return torch.bincount(self.values, minlength=classes) if self.soft is None else self.soft.counts_K


def keep_classes(dataset: "Dataset", kept_K: Tensor) -> "Dataset":
    """The set with only these classes, bool [K]; images of one class each go with theirs, of several stay without it."""
    if dataset.labels.soft is not None:
        raise UsageError(f"{dataset.name} has soft labels, of which no class can be left out")
    number_K = kept_K.cumsum(0) - 1
    if not dataset.labels.multi:
        dataset = dataset.subset(kept_K[dataset.labels.values].nonzero()[:, 0])
        labels = single_labels(number_K[dataset.labels.values])
    else:
        labels = several_labels(
            [[int(number_K[c]) for c in dataset.labels[i] if kept_K[c]] for i in range(len(dataset))]
        )
    classes = tuple(name for name, kept in zip(dataset.classes, kept_K.tolist(), strict=True) if kept)
    return dataclasses.replace(dataset, classes=classes, labels=labels)


def single_labels(values: Sequence[int] | Tensor) -> Labels:
    """One class per image."""
    flat = torch.as_tensor(values, dtype=torch.int64)
    return Labels(flat, torch.arange(len(flat) + 1))


def soft_labels(table_MK: Tensor, row_N: Tensor) -> Labels:
    """Shares of the classes: image i has row `row_N[i]` of the table. Of equal shares, the lower class counts as its class."""
    if table_MK.ndim != 2 or not (table_MK >= 0).all() or not torch.allclose(table_MK.sum(dim=1), torch.ones(())):
        raise UsageError("soft labels are shares of the classes [M, K]: at least 0, and 1 in sum")
    top_M = (table_MK == table_MK.amax(dim=1, keepdim=True)).int().argmax(dim=1)  # the first of several 1s
    return Labels(top_M[row_N], torch.arange(len(row_N) + 1), soft=Shares(table_MK.float(), row_N))


def several_labels(rows: Sequence[Sequence[int]]) -> Labels:
    """Any number of classes per image, none included."""
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = torch.tensor([label for row in rows for label in row], dtype=torch.int64)
    return Labels(flat, torch.cat([counts.new_zeros(1), counts.cumsum(0)]), multi=True)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images 0 to N-1 with labels; `keys` name them: paths, or names in an archive."""

    name: str
    classes: tuple[str, ...]  # names, each there once; a label is a number in this list
    keys: Sequence[str]  # what each image is called, mostly its path
    labels: Labels  # labels[i] has the numbers of image i's classes
    read: Reader  # read(i) gives the bytes of image i, or its pixels: uint8 [rows, columns, channels]
    groups: Sequence[str] | None = None  # whose images must stay together when data is split: patients, videos
    transform: Callable[[Tensor], Any] | None = None  # of what `dataset[i]` gives; training has its own preprocessing

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.labels) or (self.groups is not None and len(self.groups) != len(self.keys)):
            raise UsageError(f"{self.name}: {len(self.keys)} names do not fit {len(self.labels)} labels")
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for i, name in enumerate(self.classes) if name in self.classes[:i])
            raise UsageError(f"{self.name}: two classes have the name {twice!r}", hint="Give each class its own name.")
        values = self.labels.values
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < len(self.classes):
            raise UsageError(f"{self.name}: a label lies outside its {len(self.classes)} classes")

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<Dataset {self.name}: {len(self):,} images, {len(self.classes):,} classes>"

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        """An image, uint8 [C, Y, X] or what `transform` makes of it, and its label, for torch's `DataLoader`.

        The label is a number; where images have several, it is a row of 0 and 1, and where it is soft, of shares: float [K].
        """
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        source = self.read(i)
        image_CYX = decode(source, "RGB" if isinstance(source, bytes) else "array")
        label = self.labels.targets(torch.tensor([i]), len(self.classes))[0]
        return self.transform(image_CYX) if self.transform else image_CYX, label if label.ndim else int(label)

    def with_transform(self, transform: Callable[[Tensor], Any]) -> "Dataset":
        """The same set, with `transform` applied to every image that `dataset[i]` gives."""
        return dataclasses.replace(self, transform=transform)

    def read_many(
        self, index: Sequence[int], device: torch.device | str = "cpu"
    ) -> "list[np.ndarray[Any, Any]] | None":
        """Several images at once, generated by `device`; None where it is not faster."""
        many = getattr(self.read, "many", None)
        return None if many is None else many(index, device)

    def readers(
        self, together: int, device: torch.device | str = "cpu"
    ) -> "Iterator[Callable[[], bytes | np.ndarray[Any, Any]]]":
        """How to read one image after the other; synthetic ones are generated `together` at a time."""
        for start in range(0, len(self), together):
            index = range(start, min(start + together, len(self)))
            images = self.read_many(index, device)
            for i in index:
                yield functools.partial(*((self.read, i) if images is None else (images.__getitem__, i - start)))

    def version(self, i: int) -> str:
        """What changes with an image and is known without reading it, if anything."""
        return _version(self.read, i)

    def subset(self, index_B: Tensor, name: str | None = None) -> "Dataset":
        rows = index_B.tolist()
        return dataclasses.replace(
            self,
            name=name or self.name,
            keys=[self.keys[i] for i in rows],
            labels=self.labels.subset(index_B),
            read=(_ChosenMany if hasattr(self.read, "many") else _Chosen)(self.read, index_B.numpy()),
            groups=None if self.groups is None else [self.groups[i] for i in rows],
        )

    def fingerprint(self) -> str:
        """SHA-256 over names, labels and classes: what a resumed run compares."""
        digest = hashlib.sha256()
        for text in (*self.classes, *self.keys):
            digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(self.labels.values.numpy().tobytes() + self.labels.offsets.numpy().tobytes())
        if (soft := self.labels.soft) is not None:
            digest.update(soft.table_MK.numpy().tobytes() + soft.row_N.numpy().tobytes())
        return digest.hexdigest()

    def content_fingerprint(self, *, read: bool = True) -> str:
        """SHA-256 of `fingerprint` and of each image's version, or else its content.

        Without `read`, images without a version count by their names alone.
        """
        digest = hashlib.sha256(self.fingerprint().encode())
        for i in range(len(self)):
            digest.update(self._mark(i, read=read))
        return digest.hexdigest()

    def image_fingerprints(self) -> list[bytes]:
        """16 bytes for each image, of its name and its version, or else its content: the same in every part of a set."""
        return [
            hashlib.sha256(str(key).encode("utf-8", "surrogateescape") + b"\0" + self._mark(i, read=True)).digest()[:16]
            for i, key in enumerate(self.keys)
        ]

    def _mark(self, i: int, *, read: bool) -> bytes:
        mark = self.version(i) or (self._content_hash(i) if read else "")
        return mark.encode("utf-8", "surrogateescape") + b"\0"  # a path may not be UTF-8

    def _content_hash(self, i: int) -> str:
        try:
            content = self.read(i)
        except (OSError, VitlabError):
            return "unreadable"
        return hashlib.sha256(content if isinstance(content, bytes) else np.ascontiguousarray(content).data).hexdigest()


def _version(read: Reader, i: int) -> str:
    version = getattr(read, "version", None)
    return "" if version is None else version(i)


@dataclasses.dataclass(frozen=True)
class _Joined:
    """The images of several sets, one set after the other."""

    reads: tuple[Reader, ...]
    ends: tuple[int, ...]  # number of the first image behind each set

    def __call__(self, i: int) -> "bytes | np.ndarray[Any, Any]":
        read, own = self._locate(i)
        return read(own)

    def version(self, i: int) -> str:
        return _version(*self._locate(i))

    def _locate(self, i: int) -> tuple[Reader, int]:
        """The reader of the image's set, and its number there."""
        part = bisect.bisect_right(self.ends, i)
        return self.reads[part], i - (self.ends[part - 1] if part else 0)


def join(datasets: Sequence[Dataset], labels: Labels, classes: tuple[str, ...], name: str) -> Dataset:
    """The images of several sets, concatenated, under `labels` for all of them."""
    keys = [key for dataset in datasets for key in dataset.keys]
    ends = tuple(itertools.accumulate(map(len, datasets)))
    return Dataset(name, classes, keys, labels, _Joined(tuple(dataset.read for dataset in datasets), ends))


def join_without_labels(datasets: Sequence[Dataset]) -> Dataset:
    """The same without labels: classes of the sets need have nothing to do with each other."""
    count = sum(map(len, datasets))
    none = Labels(torch.zeros(0, dtype=torch.int64), torch.zeros(count + 1, dtype=torch.int64), multi=True)
    return join(datasets, none, (), " and ".join(dataset.name for dataset in datasets))


@dataclasses.dataclass(frozen=True)
class _Chosen:
    read: Reader
    index: "np.ndarray[Any, Any]"

    def __call__(self, i: int) -> "bytes | np.ndarray[Any, Any]":
        return self.read(int(self.index[i]))

    def version(self, i: int) -> str:
        return _version(self.read, int(self.index[i]))


@dataclasses.dataclass(frozen=True)
class _ChosenMany(_Chosen):
    def many(self, index: Sequence[int], device: torch.device | str = "cpu") -> "list[np.ndarray[Any, Any]]":
        return self.read.many([int(self.index[i]) for i in index], device)  # pyright: ignore[reportFunctionMemberAccess]


@dataclasses.dataclass(frozen=True)
class Opened:
    """The parts of some data: `train`, `val`, `test`, or `all` where nothing is split."""

    parts: Mapping[str, Dataset]  # by name: train, val, test, or all
    notes: tuple[str, ...] = ()  # what seemed odd while opening
    sparse: bool = False  # a benchmark that has no training image of some classes, and means it: 1,000 for 397, say
    synthetic: bool = False  # generated by a formula: there is nothing to find wrong with the images
    copies: Sequence[Sequence[str]] = ()  # of the part to train on, once looked for: the names of each picture's copies

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {len(part):,}" for name, part in self.parts.items())
        return f"<Opened {parts} images, {len(self.classes):,} classes>"

    @property
    def classes(self) -> tuple[str, ...]:
        return next(iter(self.parts.values())).classes

    def __getitem__(self, which: str | int) -> Any:
        """A part by its name; by a number, that image of the part to train on, as `Dataset` gives it."""
        return self.part(which) if isinstance(which, str) else self.parts[train_part(self.parts)][which]

    def __len__(self) -> int:
        """Of the part to train on, so that this too can be given to torch's `DataLoader`."""
        return len(self.parts[train_part(self.parts)])

    def part(self, *names: str) -> Dataset:
        """The first of these parts that there is."""
        if present := [name for name in names if name in self.parts]:
            return self.parts[present[0]]
        raise UsageError(f"there is no {' or '.join(names)} part", hint=f"There is: {', '.join(self.parts)}.")


def train_part(parts: Collection[str]) -> str:
    """The name of the part that is learnt from."""
    for name in LEARNT_FROM:
        if name in parts:
            return name
    raise UsageError(f"the data has {', '.join(parts)}, but nothing to train on")


@dataclasses.dataclass(frozen=True)
class ArrayReader:
    """Pixels that are in memory, or mapped from a file, uint8 [N, C, Y, X]."""

    images: "Tensor | np.ndarray[Any, Any]"

    def __call__(self, i: int) -> "np.ndarray[Any, Any]":
        return np.asarray(self.images[i]).transpose(1, 2, 0)


def from_arrays(
    images: "Tensor | np.ndarray[Any, Any]",
    labels: Sequence[int] | Tensor,
    classes: Sequence[str],
    name: str = "arrays",
) -> Dataset:
    """Images from Python, uint8 [N, C, Y, X], with one label each."""
    if images.ndim != 4 or str(images.dtype).removeprefix("torch.") != "uint8":
        raise UsageError(f"images must be uint8 [N, C, Y, X], not {images.dtype} {list(images.shape)}")
    if images.shape[3] in _LAST_CHANNELS and min(images.shape[1:3]) > max(_LAST_CHANNELS):
        raise UsageError(
            f"images must be [N, C, Y, X], and {list(images.shape)} looks like [N, Y, X, C]",
            hint="Put the channels second: images.transpose(0, 3, 1, 2) in NumPy, images.permute(0, 3, 1, 2) in torch.",
        )
    keys = [f"{name}/{i}" for i in range(len(images))]
    return Dataset(name, tuple(classes), keys, single_labels(labels), ArrayReader(images))
