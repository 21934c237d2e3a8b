"""Arrays of pixels: one `.npz`, or `.npy` files in a folder, with `images` and `labels`, or those of parts, `train_images` …

Nothing is unpickled, and images are read one by one from where they lie; an array that is compressed is expanded once, to a
file of ours. Letters: N images, K classes.
"""

import dataclasses
import functools
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.core.environment import cache_folder
from vitlab.core.errors import FileProblem
from vitlab.core.reading import open_regular
from vitlab.data.dataset import PART_NAMES, PARTS, Dataset, Opened, one_for_each, some_of
from vitlab.data.sources.numbering import Numbered, number_labels
from vitlab.data.sources.packed import npz_member, npz_names
from vitlab.data.sources.raw.binary import npy_array, npy_header
from vitlab.data.sources.raw.files import Place, RecordReader, data_start, write_once

Array = np.ndarray[Any, Any]
_NAME = re.compile(rf"(?:({'|'.join(PART_NAMES)})_)?images")
_CLASSES = ("classes", "label_names")  # in the order in which they are looked for
_LABEL_BYTES = 2**31  # no list of labels comes near this; a forged size must not fill the memory
_CHUNK = 2**20  # bytes at a time while expanding
_CHANNELS = (1, 3, 4)  # second of four axes, they are most likely channels
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class _Stored:
    """The arrays of an `.npz`, or of a folder, by name."""

    path: Path

    @functools.cached_property
    def names(self) -> list[str]:
        if self.path.is_dir():
            return sorted(file.stem for file in self.path.glob("*.npy"))
        return npz_names(self.path)

    def read(self, name: str) -> Array:
        """A small array, into memory."""
        where = self._where(name)
        if self.path.is_dir():
            size = (self.path / f"{name}.npy").stat().st_size
            with open_regular(self.path / f"{name}.npy") as file:
                return npy_array(file, _bounded(size, where), where)
        with npz_member(self.path, name) as (member, info):
            return npy_array(member, _bounded(info.file_size, where), where)

    def pixels(self, name: str) -> tuple[Path, int, tuple[int, ...]]:
        """The file that holds a large array as it is, its first byte there, and its shape, which fits the file's size."""
        where = self._where(name)
        if self.path.is_dir():
            path = self.path / f"{name}.npy"
            with open_regular(path) as file:
                shape, header = _pixels_header(file, path.stat().st_size, where)
            return path, header, shape
        with npz_member(self.path, name) as (member, info):
            shape, header = _pixels_header(member, info.file_size, where)
            if info.compress_type == zipfile.ZIP_STORED:
                start = data_start(Place(self.path, info.header_offset, info.file_size, zipped=True))
                return self.path, start + header, shape
        with npz_member(self.path, name) as (member, _):
            chunks = iter(functools.partial(member.read, _CHUNK), b"")
            return write_once(self.path, f"{name}.npy", cache_folder() / "arrays", chunks), header, shape

    def _where(self, name: str) -> str:
        return str(self.path / f"{name}.npy") if self.path.is_dir() else f"{self.path}: {name}"


def holds_arrays(path: Path) -> bool:
    """Whether an `.npz`, or a folder, has images in an array."""
    return any(map(_NAME.fullmatch, _Stored(path).names))


def open_arrays(path: Path, *, needs_labels: bool = True) -> Opened:
    """The parts of an `.npz` or a folder of `.npy`; all of it where there are no parts.

    Without `needs_labels`, images that have none are all of one class, 0.
    """
    stored = _Stored(path)
    images = _images_by_part(stored)
    if not images:
        raise FileProblem(
            f"{path} has no array of images",
            hint="Expected: `images` and `labels`, or `train_images`, `train_labels`, ….",
        )
    if "all" in images and len(images) > 1:
        raise FileProblem(f"{path} has `images` as well as images of parts", hint="Remove or rename one.")
    labels = {part: _labels_of(stored, name, needed=needs_labels) for part, name in images.items()}
    classes, numbered = _classes(stored, labels)
    parts: dict[str, Dataset] = {}
    for part in (part for part in (*PARTS, "all") if part in images):
        file, start, shape = stored.pixels(images[part])
        own = numbered[part]
        if shape[0] != len(own):
            raise FileProblem(f"{path}: {shape[0]:,} images do not fit {len(own):,} labels ({images[part]})")
        rows, cols, channels = (*shape[1:], 1)[:3]
        reader = RecordReader([(file, start)], [0], rows * cols * channels, (rows, cols, channels), channels_last=True)
        name = str(path) if part == "all" else f"{path} {part}"
        parts[part] = Dataset(name, classes, [f"{part}/{i}" for i in range(len(own))], own, reader)
    return Opened(parts)


def _images_by_part(stored: _Stored) -> dict[str, str]:
    """The name of the array with the images of each part."""
    found = filter(None, map(_NAME.fullmatch, stored.names))
    return one_for_each(stored.path, "arrays", ((PART_NAMES.get(match[1], "all"), match[0]) for match in found))


def _bounded(size: int, where: str) -> int:
    if size > _LABEL_BYTES:
        raise FileProblem(f"{where} has {size:,} bytes, too many for labels")
    return size


def _pixels_header(file: Any, size: int, where: str) -> tuple[tuple[int, ...], int]:
    """Shape and length of the header, of images that fill the `size` of their file."""
    shape, fortran, dtype = npy_header(file, where)
    header = file.tell()
    if dtype != np.uint8 or fortran or len(shape) not in (3, 4) or not all(type(n) is int and n > 0 for n in shape):
        raise FileProblem(
            f"{where} is {dtype} {list(shape)!r:.60}{', column by column' if fortran else ''}, not images",
            hint="Expected: uint8, row by row, [images, rows, columns] or [images, rows, columns, channels].",
        )
    if len(shape) == 4 and shape[1] in _CHANNELS and min(shape[2:]) > max(_CHANNELS):
        raise FileProblem(
            f"{where} is {list(shape)}, which looks like [images, channels, rows, columns]",
            hint="Put the channels last: images.transpose(0, 2, 3, 1), made contiguous.",
        )
    if header + math.prod(shape) != size:
        raise FileProblem(
            f"{where} is damaged: its size does not match its shape {list(shape)}", hint="Fetch it again."
        )
    return shape, header


def _labels_of(stored: _Stored, images: str, *, needed: bool) -> Array:
    """Whole numbers or texts [N], or 0 and 1 for each class [N, K]; of [N, 1], as MedMNIST has them, [N]."""
    name = images.removesuffix("images") + "labels"
    if name not in stored.names and not needed:
        return np.zeros(stored.pixels(images)[2][0], np.int64)
    if name not in stored.names:
        raise FileProblem(
            f"{stored.path} has {images} but no {name}", hint=f"It holds: {some_of(stored.names, _SHOWN)}."
        )
    labels = stored.read(name)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    several = labels.ndim == 2 and labels.dtype.kind in "iub" and np.isin(labels, (0, 1)).all()
    if not several and (labels.ndim != 1 or labels.dtype.kind not in "iuU"):
        raise FileProblem(
            f"{stored.path}: {name} is {labels.dtype} {list(labels.shape)}, not labels",
            hint="Expected: a whole number or a text for each image, or 0 and 1 for each image and class.",
        )
    return labels


def _classes(stored: _Stored, labels: Mapping[str, Array]) -> Numbered:
    """The classes, and the labels of each part by their numbers."""
    given = next((_texts(stored, name) for name in _CLASSES if name in stored.names), None)
    columns = {own.shape[1:] for own in labels.values()}
    if len(columns) > 1:
        raise FileProblem(f"{stored.path}: the labels of its parts are of different kinds")
    ((*several,),) = columns
    if not several:
        return number_labels(stored.path, {part: own.tolist() for part, own in labels.items()}, given)
    names = given or [str(i) for i in range(several[0])]
    if len(names) != several[0]:
        raise FileProblem(f"{stored.path}: {len(names)} classes do not fit labels of {several[0]}")
    rows = {part: [np.flatnonzero(row).tolist() for row in own] for part, own in labels.items()}
    return number_labels(stored.path, rows, names)


def _texts(stored: _Stored, name: str) -> list[str]:
    array = stored.read(name)
    if array.ndim != 1 or array.dtype.kind != "U":
        raise FileProblem(f"{stored.path}: {name} is {array.dtype} {list(array.shape)}, not a list of texts")
    return array.tolist()
