"""Layouts of published sets of raw pixels: their files, records and labels.

One function per set. Images without names have their number as the key.
"""

import dataclasses
import functools
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.core.errors import FileProblem, MissingExtra
from vitlab.core.reading import open_regular
from vitlab.data.dataset import ArrayReader, Dataset, Opened, Reader
from vitlab.data.sources.raw.binary import (
    idx_header,
    idx_labels,
    mat_arrays,
    norb_header,
    norb_matrix,
    npy_array,
    npy_header,
    tfrecord_examples,
)
from vitlab.data.sources.raw.files import (
    Place,
    PlaceReader,
    RawFiles,
    RecordReader,
    members,
    read_place,
    stored_plainly,
)

Array = np.ndarray[Any, Any]
_DSPRITES_CLASSES = 16
_HEADER = 256  # bytes that hold the header of any of these files


def cifar(files: RawFiles, train: Sequence[str], test: str, names: str, label_bytes: int) -> Opened:
    """The binary version: each record is its labels, ours last, then 32x32 pixels."""
    classes = files.lines(names)
    return Opened(
        {part: _cifar_part(files, part, of, classes, label_bytes) for part, of in (("train", train), ("test", [test]))}
    )


def _cifar_part(files: RawFiles, part: str, names: Sequence[str], classes: Sequence[str], label_bytes: int) -> Dataset:
    stride = label_bytes + 3 * 32 * 32
    starts: list[tuple[Path, int]] = []
    firsts: list[int] = []
    labels: list[int] = []
    for name in names:
        path, start, size = stored_plainly(files, name)
        if size == 0 or size % stride:
            raise FileProblem(f"{path}: {name} has {size:,} bytes, not a multiple of a record's {stride:,}")
        firsts.append(len(labels))
        with open_regular(path) as file:
            records = np.memmap(file, np.uint8, "r", start, (size // stride, stride))
        labels += records[:, label_bytes - 1].tolist()
        starts.append((path, start + label_bytes))
    return _numbered(files, part, classes, labels, RecordReader(starts, firsts, stride, (3, 32, 32)))


def cifar10(files: RawFiles) -> Opened:
    return cifar(files, [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin", "batches.meta.txt", 1)


def cifar100(files: RawFiles) -> Opened:
    """With the fine labels; the coarse ones stand before them."""
    return cifar(files, ["train.bin"], "test.bin", "fine_label_names.txt", 2)


_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def fashion_mnist(files: RawFiles) -> Opened:
    parts: dict[str, Dataset] = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        labels = idx_labels(files.read(f"{stem}-labels-idx1-ubyte"), f"{stem}-labels-idx1-ubyte")
        path, start, size = stored_plainly(files, f"{stem}-images-idx3-ubyte")
        (count, rows, columns), header = idx_header(_beginning(path, start), str(path), 3)
        if count != len(labels) or size != header + count * rows * columns:
            what = f"{path} has {size:,} bytes, which does not fit {len(labels):,} labels"
            raise FileProblem(what, hint="Fetch it again.")
        reader = RecordReader([(path, start + header)], [0], rows * columns, (1, rows, columns))
        parts[part] = _numbered(files, part, _FASHION, labels, reader)
    return Opened(parts)


def svhn(files: RawFiles) -> Opened:
    """Cropped digits, stored column-first; the maker's label 10 is the digit 0."""
    parts: dict[str, Dataset] = {}
    for part in ("train", "test"):
        arrays = mat_arrays(files.read(f"{part}_32x32.mat"), f"{part}_32x32.mat")
        pixels, labels = arrays.get("X"), arrays.get("y")
        if pixels is None or labels is None or pixels.shape != (32, 32, 3, labels.size) or pixels.dtype != np.uint8:
            raise FileProblem(f"{files.root}: {part}_32x32.mat does not hold 32x32 images with labels")
        reader = ArrayReader(pixels.transpose(3, 2, 0, 1))
        parts[part] = _numbered(files, part, "0123456789", (labels.ravel() % 10).tolist(), reader)
    return Opened(parts)


def smallnorb(files: RawFiles, column: int, step: int, classes: Sequence[str]) -> Opened:
    """The left camera's images, and one factor (a column) in units of `step`."""
    parts: dict[str, Dataset] = {}
    for part, stem in (
        ("train", "smallnorb-5x46789x9x18x6x2x96x96-training"),
        ("test", "smallnorb-5x01235x9x18x6x2x96x96-testing"),
    ):
        factors = norb_matrix(files.read(f"{stem}-info.mat"), f"{stem}-info.mat")
        path, start, size = stored_plainly(files, f"{stem}-dat.mat")
        dtype, shape, header = norb_header(_beginning(path, start), str(path))
        pairs = (len(factors), 2, 96, 96)
        if factors.ndim != 2 or dtype != np.uint8 or shape != pairs or size != header + int(np.prod(pairs)):
            raise FileProblem(f"{path} does not hold pairs of 96x96 images for {len(factors):,} labels")
        reader = RecordReader([(path, start + header)], [0], 2 * 96 * 96, (1, 96, 96))
        parts[part] = _numbered(files, part, classes, (factors[:, column] // step).tolist(), reader)
    return Opened(parts)


def smallnorb_azimuth(files: RawFiles) -> Opened:
    """Stored as 0, 2, 4 … 34, each 10 degrees."""
    return smallnorb(files, 2, 2, [f"{20 * i} degrees" for i in range(18)])


def smallnorb_elevation(files: RawFiles) -> Opened:
    return smallnorb(files, 1, 1, [f"{30 + 5 * i} degrees" for i in range(9)])


def dsprites(files: RawFiles, column: int, values: int) -> Opened:
    """All images in one part; `values` of a factor joined into VTAB's 16 classes."""
    archives = [place.path for name, place in files.places.items() if re.search(r"dsprites[^/]*\.npz$", name)]
    if not archives:
        raise FileProblem(f"{files.root} has no dsprites_….npz")
    archive = archives[0]
    inside = RawFiles(files.root, files.cache, members(archive, ".zip", files.cache))
    raw = read_place(inside.places[inside.find("latents_classes.npy")])
    factors = npy_array(io.BytesIO(raw), len(raw), str(archive))
    path, start, size = stored_plainly(inside, "imgs.npy")
    shape, header = _npy_header(_beginning(path, start), path)
    if len(shape) != 3 or factors.ndim != 2 or shape[0] != len(factors) or size != header + int(np.prod(shape)):
        raise FileProblem(f"{archive} is damaged: its images do not fit its {len(factors):,} labels")
    reader = RecordReader([(path, start + header)], [0], shape[1] * shape[2], (1, shape[1], shape[2]), scale=255)
    labels = [merge_neighbours(int(value), values, _DSPRITES_CLASSES) for value in factors[:, column]]
    return Opened({"all": _numbered(files, "all", [str(i) for i in range(_DSPRITES_CLASSES)], labels, reader)})


def merge_neighbours(value: int, values: int, classes: int) -> int:
    """VTAB's joining of neighbouring values into fewer classes."""
    return int(value // (values / classes))


def dsprites_location(files: RawFiles) -> Opened:
    return dsprites(files, 4, 32)


def dsprites_orientation(files: RawFiles) -> Opened:
    return dsprites(files, 3, 40)


@dataclasses.dataclass(frozen=True)
class _HdfReader:
    path: Path

    def __call__(self, i: int) -> Array:
        return np.asarray(_hdf(self.path)["x"][i])


@functools.lru_cache(maxsize=8)  # the files that one process works with stay open
def _hdf(path: Path) -> Any:
    try:
        import h5py  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("h5py", "hdf5", "reading PatchCamelyon") from None
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise FileProblem(f"{path} is not a readable HDF5 file: {error}", hint="Fetch it again.") from None


def patch_camelyon(files: RawFiles) -> Opened:
    parts: dict[str, Dataset] = {}
    for part, word in (("train", "train"), ("val", "valid"), ("test", "test")):
        images, labels = (files.places[files.find(f"camelyonpatch_level_2_split_{word}_{kind}.h5")] for kind in "xy")
        values = np.asarray(_hdf(labels.path)["y"]).ravel().tolist()
        keys = [f"{word}_{i}" for i in range(len(values))]
        parts[part] = files.dataset(part, ("no tumour", "tumour"), keys, values, _HdfReader(images.path))
    return Opened(parts)


def dmlab(files: RawFiles) -> Opened:
    parts: dict[str, Dataset] = {}
    for part, word in (("train", "train"), ("val", "validation"), ("test", "test")):
        start = f"dmlab-{word}.tfrecord"
        names = sorted(name for name in files.places if name.rpartition("/")[2].startswith(start))
        if not names:
            raise FileProblem(f"{files.root} has no {start}")
        keys: list[str] = []
        labels: list[int] = []
        places: list[Place] = []
        for name in names:
            path, start, size = stored_plainly(files, name)
            for features, at, length in tfrecord_examples(path, start, size):
                key, label = features.get("filename"), features.get("label")
                if not isinstance(key, bytes) or not isinstance(label, int) or not length:
                    raise FileProblem(f"{path}: a record has no image, file name or label")
                keys.append(key.decode(errors="replace"))
                labels.append(label)
                places.append(Place(path, at, length))
        parts[part] = files.dataset(part, "012345", keys, labels, PlaceReader(places))
    return Opened(parts)


def _numbered(files: RawFiles, part: str, classes: Sequence[str], labels: Sequence[int], read: Reader) -> Dataset:
    """For images without names: their number is the key."""
    return files.dataset(part, classes, [f"{part}/{i}" for i in range(len(labels))], labels, read)


def _beginning(path: Path, start: int) -> bytes:
    with open_regular(path) as file:
        file.seek(start)
        return file.read(_HEADER)


def _npy_header(data: bytes, path: Path) -> tuple[tuple[int, ...], int]:
    """(shape, first byte of the content) of a `.npy` of bytes."""
    file = io.BytesIO(data)
    shape, fortran, dtype = npy_header(file, str(path))
    if fortran or dtype.itemsize != 1:
        raise FileProblem(f"{path} does not hold bytes, row by row")
    return shape, file.tell()


LAYOUTS = {
    function.__name__: function
    for function in (
        *(cifar10, cifar100, fashion_mnist, svhn, dsprites_location),
        *(dsprites_orientation, smallnorb_azimuth, smallnorb_elevation, patch_camelyon, dmlab),
    )
}
