"""Packed sets: one `.npz` per part, with all encoded images in one array (`data`, cut by `offsets`), labels, names, classes.

Owns the layout and its checks. Nothing is unpickled, and the images are loaded when the first one is asked for.
"""

import dataclasses
import functools
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.core.errors import FileProblem
from vitlab.data.dataset import Dataset, Opened, single_labels, some_of

Array = np.ndarray[Any, Any]
# What NumPy and zipfile let out of damaged archives.
_DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
_SHOWN = 5  # arrays in an error; the number of the others follows
_KINDS = {"data": "u", "offsets": "i", "labels": "iu", "names": "U", "classes": "U"}  # NumPy's letters for types


@dataclasses.dataclass(frozen=True)
class PackedReader:
    """Cuts images out of `data`. Workers are sent the path and the offsets, and each loads the bytes once."""

    path: Path
    offsets: Array

    def __call__(self, i: int) -> bytes:
        return _bytes(self.path)[self.offsets[i] : self.offsets[i + 1]].tobytes()


@functools.lru_cache(maxsize=8)  # the parts of the few sets that one process works with
def _bytes(path: Path) -> Array:
    return _arrays(path, ("data",))["data"]


def open_packed(parts: Mapping[str, Path]) -> Opened:
    """The archives of one set by part; all must agree on the classes."""
    opened = {part: _open_part(part, path) for part, path in parts.items()}
    first, *others = opened.items()
    for part, dataset in others:
        if dataset.classes != first[1].classes:
            raise FileProblem(f"{parts[part]} has other classes than {parts[first[0]]}")
    return Opened(opened)


def _open_part(part: str, path: Path) -> Dataset:
    found = _arrays(path, ("offsets", "labels", "names", "classes"))
    offsets, labels = found["offsets"].astype(np.int64), found["labels"].astype(np.int64)
    if not len(offsets) == len(labels) + 1 == len(found["names"]) + 1:
        raise FileProblem(
            f"{path} is damaged: {len(labels)} labels and {len(found['names'])} names do not fit {len(offsets)} offsets"
        )
    if offsets[0] != 0 or (np.diff(offsets) <= 0).any() or offsets[-1] != _stored_bytes(path):
        raise FileProblem(f"{path} is damaged: its offsets do not cut its data into images")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(found["classes"]):
        raise FileProblem(f"{path} is damaged: a label lies outside its {len(found['classes'])} classes")
    classes, names = tuple(found["classes"].tolist()), found["names"].tolist()
    return Dataset(f"{path.stem} {part}", classes, names, single_labels(labels.tolist()), PackedReader(path, offsets))


def _arrays(path: Path, names: tuple[str, ...]) -> dict[str, Array]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if missing := sorted(_KINDS.keys() - set(archive.files)):
                raise FileProblem(
                    f"{path} is not a packed image set: it holds {some_of(archive.files, _SHOWN) or 'nothing'}, "
                    f"and lacks {', '.join(missing)}",
                    hint="Expected: encoded images in one array `data`, cut by `offsets`, with `labels`, `names` and "
                    "`classes`. Save arrays of pixels as image files in class folders, or pass them to from_arrays.",
                )
            found = {name: archive[name] for name in names}
    except FileNotFoundError:
        raise FileProblem(f"{path} does not exist") from None
    except _DAMAGE as error:
        raise FileProblem(f"{path} is not a packed image set: {error}", hint="Fetch it again.") from None
    for name, array in found.items():
        if array.ndim != 1 or array.dtype.kind not in _KINDS[name]:
            raise FileProblem(f"{path} is not a packed image set: {name} is {array.dtype} {list(array.shape)}")
    return found


def _stored_bytes(path: Path) -> int:
    """The length of `data` from its header, so that opening a set does not load its images."""
    with zipfile.ZipFile(path) as archive:
        try:
            with archive.open("data.npy") as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(member)
        except _DAMAGE as error:
            raise FileProblem(f"{path} is not a packed image set: {error}", hint="Fetch it again.") from None
    return int(shape[0]) if len(shape) == 1 and dtype == np.uint8 else -1
