"""Packed sets: one `.npz` per part with all encoded images in one array.

The arrays are `data`, cut by `offsets`, `labels`, `names` and `classes`. Nothing is unpickled, and images load on demand.
"""

import contextlib
import dataclasses
import functools
import zipfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from vitlab.core.errors import FileProblem, VitlabError
from vitlab.core.reading import open_regular
from vitlab.data.dataset import Dataset, Opened, single_labels, some_of
from vitlab.data.sources.numbering import distinct_names
from vitlab.data.sources.raw.binary import npy_array, npy_header

Array = np.ndarray[Any, Any]
_KINDS = {"data": "u", "offsets": "i", "labels": "iu", "names": "U", "classes": "U"}  # NumPy's letters for types
_SHOWN = 5  # arrays in an error; the number of the others follows
_SLACK = 2**26  # bytes beyond the archive's size that one array may unpack to: names shrink well, encoded images do not


@dataclasses.dataclass(frozen=True)
class PackedReader:
    """Cuts images out of `data`, which each worker loads once."""

    path: Path
    offsets: Array

    def __call__(self, i: int) -> bytes:
        return _bytes(self.path)[self.offsets[i] : self.offsets[i + 1]].tobytes()


@functools.lru_cache(maxsize=8)  # the parts of the few sets that one process works with
def _bytes(path: Path) -> Array:
    return _array(path, "data")


def open_packed(parts: Mapping[str, Path]) -> Opened:
    """The archives of one set by part; all must agree on the classes."""
    opened = {part: _open_part(part, path) for part, path in parts.items()}
    first, *others = opened.items()
    for part, dataset in others:
        if dataset.classes != first[1].classes:
            raise FileProblem(f"{parts[part]} has other classes than {parts[first[0]]}")
    return Opened(opened)


def _open_part(part: str, path: Path) -> Dataset:
    offsets, labels = (_array(path, name).astype(np.int64) for name in ("offsets", "labels"))
    names, classes = (_texts(path, _array(path, name)) for name in ("names", "classes"))
    if not len(offsets) == len(labels) + 1 == len(names) + 1:
        lengths = f"{len(labels)} labels and {len(names)} names do not fit {len(offsets)} offsets"
        raise FileProblem(f"{path} is damaged: {lengths}")
    if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] != _stored_bytes(path):
        raise FileProblem(f"{path} is damaged: its offsets do not cut its data into images")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise FileProblem(f"{path} is damaged: a label lies outside its {len(classes)} classes")
    return Dataset(
        f"{path.stem} {part}",
        distinct_names(classes),
        names,
        single_labels(labels.tolist()),
        PackedReader(path, offsets),
    )


def _array(path: Path, name: str) -> Array:
    with _member(path, name) as (file, size):
        array = npy_array(file, size, f"{path}: {name}")
    if array.ndim != 1 or array.dtype.kind not in _KINDS[name]:
        raise FileProblem(f"{path} is not a packed image set: {name} is {array.dtype} {list(array.shape)}")
    return array


def _stored_bytes(path: Path) -> int:
    """The length of `data` from its header, without loading it."""
    with _member(path, "data") as (file, _):
        shape, _, dtype = npy_header(file, f"{path}: data")
    return int(shape[0]) if len(shape) == 1 and dtype == np.uint8 else -1


@contextlib.contextmanager
def _member(path: Path, name: str) -> Generator[tuple[IO[bytes], int]]:
    """One array of a packed set, not yet unpacked, and its size in bytes."""
    names = npz_names(path)
    if missing := sorted(_KINDS.keys() - set(names)):
        raise FileProblem(
            f"{path} is not a packed image set: it holds {some_of(names, _SHOWN) or 'nothing'}, "
            f"and lacks {', '.join(missing)}",
            hint="Expected: encoded images in one array `data`, cut by `offsets`, with `labels`, `names` and `classes`; "
            "or pixels in `images` with `labels`, or `train_images`, `train_labels`, …; from_arrays takes others.",
        )
    with npz_member(path, name) as (member, info):
        if info.file_size > path.stat().st_size + _SLACK:
            raise FileProblem(f"{path} would unpack {name} to {info.file_size:,} bytes, too many for an image set")
        yield member, info.file_size


def npz_names(path: Path) -> list[str]:
    """The names of an archive's arrays."""
    with _archive(path) as archive:
        return [entry.removesuffix(".npy") for entry in archive.namelist()]


@contextlib.contextmanager
def npz_member(path: Path, name: str) -> Generator[tuple[IO[bytes], zipfile.ZipInfo]]:
    """One array of an archive, not yet unpacked, and what the archive says of it."""
    with _archive(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FileProblem(f"{path} is not an image set: {name} uses an unsupported compression")
        with archive.open(info, mode="r") as member:
            yield member, info


@contextlib.contextmanager
def _archive(path: Path) -> Generator[zipfile.ZipFile]:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except VitlabError:
        raise
    except FileNotFoundError:
        raise FileProblem(f"{path} does not exist") from None
    except Exception:  # on damaged archives NumPy and zipfile let a dozen types out
        raise FileProblem(f"{path} is not a readable set of images, or is damaged", hint="Fetch it again.") from None


def _texts(path: Path, array: Array) -> list[str]:
    try:
        texts = array.tolist()
        "".join(texts).encode()  # NumPy takes any number for a character
    except (ValueError, SystemError):
        raise FileProblem(f"{path} is damaged: a name in it is not text", hint="Fetch it again.") from None
    return texts
