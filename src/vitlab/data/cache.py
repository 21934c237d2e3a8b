"""Caches of decoded pixels, in memory or in one memory-mapped file.

The pixels are exactly the decoder's, at full size, so a cached set trains and tests like the set itself. Letters: N images.
"""

import dataclasses
import functools
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.reading import open_regular
from vitlab.data.dataset import Dataset
from vitlab.data.decode import decode
from vitlab.data.preprocess import Preprocess

Array = np.ndarray[Any, Any]
PIXELS, TABLE = "pixels.bin", "table.npz"
_GIGABYTE = 2**30
_TOGETHER = 64  # synthetic images at once; more is no faster


@dataclasses.dataclass(frozen=True)
class PixelReader:
    """Pixels uint8 [rows, columns, channels] from an array or a mapped file."""

    where: "Array | Path"
    offsets: Array  # int64 [N + 1]
    shapes: Array  # int64 [N, 3]

    def __call__(self, i: int) -> Array:
        if not self.shapes[i].all():
            raise FileProblem("it could not be decoded when the set was cached")
        flat = _mapped(self.where) if isinstance(self.where, Path) else self.where
        return flat[self.offsets[i] : self.offsets[i + 1]].reshape(self.shapes[i])


@functools.lru_cache(maxsize=8)  # the parts of the few sets that one process works with
def _mapped(path: Path) -> Array:
    with open_regular(path) as file:
        return np.memmap(file, np.uint8, mode="r")


def in_memory(dataset: Dataset, rule: Preprocess, *, most_gb: float, console: Console) -> Dataset:
    """The set with its pixels in memory; an error beyond `most_gb`."""
    shapes: list[tuple[int, ...]] = []
    flat = b"".join(_decoded(dataset, rule, most_gb, shapes, console))
    return _cached(dataset, np.frombuffer(flat, np.uint8), shapes)


def in_file(dataset: Dataset, rule: Preprocess, folder: Path, *, most_gb: float, console: Console) -> Dataset:
    """The set with its pixels in `folder`, written once and then memory-mapped."""
    mark = f"{dataset.content_fingerprint(read=False)} {rule.mode} {rule.bits}"
    place = folder / hashlib.sha256(mark.encode()).hexdigest()[:16]
    if not (place / TABLE).is_file():
        shapes: list[tuple[int, ...]] = []
        with fsio.new_folder(place) as new:
            new.write(PIXELS, _decoded(dataset, rule, most_gb, shapes, console))
            buffer = io.BytesIO()
            np.savez(buffer, mark=np.array(mark), shapes=np.array(shapes, np.int64).reshape(-1, 3))
            new.write(TABLE, buffer.getvalue())
    try:
        with open_regular(place / TABLE) as file, np.load(file, allow_pickle=False) as table:
            stored, kept = str(table["mark"]), table["shapes"]
        size = (place / PIXELS).stat().st_size
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise FileProblem(f"{place} is not a readable cache: {error}", hint="Remove that folder.") from None
    if stored != mark or size != int(kept.prod(axis=1).sum()):
        raise FileProblem(f"{place} belongs to other data or is cut short", hint="Remove that folder.")
    return _cached(dataset, place / PIXELS, [tuple(shape) for shape in kept.tolist()])


def _cached(dataset: Dataset, where: "Array | Path", shapes: list[tuple[int, ...]]) -> Dataset:
    table = np.array(shapes, np.int64).reshape(-1, 3)
    offsets = np.concatenate([[0], table.prod(axis=1).cumsum()])
    return dataclasses.replace(dataset, read=PixelReader(where, offsets, table))


def _decoded(
    dataset: Dataset, rule: Preprocess, most_gb: float, shapes: list[tuple[int, ...]], console: Console
) -> Iterator[bytes]:
    """The pixels of one image after the other; a bad image leaves an empty place."""
    total = 0
    with console.progress("cache", len(dataset)) as advance:
        for i, read in enumerate(dataset.readers(_TOGETHER)):
            try:
                pixels = decode(read(), rule.mode, rule.bits).permute(1, 2, 0).contiguous().numpy()
            except (VitlabError, OSError):
                pixels = np.zeros((0, 0, 0), np.uint8)
            shapes.append(pixels.shape)
            total += pixels.nbytes
            if total > most_gb * _GIGABYTE:
                raise UsageError(
                    f"{dataset.name} decoded is larger than {most_gb:g} GB: {i + 1} of {len(dataset)} images fill that",
                    hint="Leave the cache off, or allow more.",
                )
            advance(i + 1, f"{total / _GIGABYTE:.2f} GB")
            yield pixels.tobytes()
