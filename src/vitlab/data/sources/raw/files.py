"""The files of a published set, as one table over folders, tars and zips.

Archives are never unpacked: a plain tar or zip is read in place, so no name inside one can ever reach the disk. What is
gzipped cannot be read in the middle, and is expanded once, into the cache folder.
"""

import bisect
import dataclasses
import functools
import gzip
import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.core.reading import file_version, open_regular
from vitlab.data.dataset import Dataset, Reader, single_labels
from vitlab.data.sources.folders import SUFFIXES
from vitlab.data.sources.tars import tar_members

_CHUNK = 2**20  # bytes at a time while expanding
_ZIP_HEADER = 30  # bytes before the name in a zip's local header; the lengths of name and extra field are its last four
_GZIP = b"\x1f\x8b"
_TABLE_BYTES = 2**31  # no image and no list of labels comes near this; a forged size must not fill the memory
_WHOLE = -1  # as `start`: not a slice of a file but all of it


class Place(NamedTuple):
    """Where one file's bytes are: `size` bytes from `start` of a file on disk."""

    path: Path
    start: int
    size: int
    deflated: bool = False
    zipped: bool = False  # `start` is then that of the zip's local header


def read_place(place: Place) -> bytes:
    with open_regular(place.path) as file:
        if place.start == _WHOLE:
            return file.read()
        file.seek(data_start(place))
        data = file.read(place.size)
    if len(data) != place.size:
        raise FileProblem(f"{place.path} ends too early", hint="Fetch it again.")
    return _inflated(data, place) if place.deflated else data


def _inflated(data: bytes, place: Place) -> bytes:
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        content = unpack.decompress(data, _TABLE_BYTES)
    except zlib.error:
        raise FileProblem(f"{place.path} is damaged at byte {place.start:,}", hint="Fetch it again.") from None
    if not unpack.eof:
        raise FileProblem(f"{place.path} is damaged, or too large to be an image, at byte {place.start:,}")
    return content


def data_start(place: Place) -> int:
    """The first byte of the content, which zips say only in the local header."""
    if not place.zipped:
        return max(0, place.start)
    with open_regular(place.path) as file:
        file.seek(place.start)
        header = file.read(_ZIP_HEADER)
    if len(header) < _ZIP_HEADER or not header.startswith(b"PK\3\4"):
        raise FileProblem(f"{place.path} is damaged at byte {place.start:,}", hint="Fetch it again.")
    return place.start + _ZIP_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


@dataclasses.dataclass(frozen=True)
class PlaceReader:
    """Reads encoded images wherever they lie."""

    places: Sequence[Place]

    def __call__(self, i: int) -> bytes:
        return read_place(self.places[i])


@dataclasses.dataclass(frozen=True)
class RawFiles:
    """All files by name, as if every archive were unpacked where it lies."""

    root: Path
    cache: Path  # where what must be expanded goes
    places: Mapping[str, Place]

    def find(self, name: str) -> str:
        """The full name of the file whose path ends in `name`."""
        if name in self.places:
            return name
        matches = [full for full in self._by_last_word.get(name.rpartition("/")[2], ()) if full.endswith(f"/{name}")]
        if not matches:
            raise FileProblem(f"{self.root} has no {name}", hint="See `vitlab data list` for what belongs there.")
        return min(matches, key=len)

    def has(self, name: str) -> bool:
        try:
            return bool(self.find(name))
        except FileProblem:
            return False

    def read(self, name: str) -> bytes:
        place = self.places[self.find(name)]
        size = place.size if place.start != _WHOLE else place.path.stat().st_size
        if size > _TABLE_BYTES:
            raise FileProblem(f"{place.path}: {name} has {size:,} bytes, more than such a file can have")
        return read_place(place)

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise FileProblem(f"{self.root}: {name} is not text") from None

    def lines(self, name: str) -> list[str]:
        return [line for line in (line.strip() for line in self.text(name).splitlines()) if line]

    def below(self, folder: str) -> dict[str, str]:
        """Images below the folder whose path ends in `folder`: name -> full name."""
        images: dict[str, str] = {}
        for full in self.places:
            at = f"/{full}".find(f"/{folder}/")
            if at >= 0 and full.lower().endswith(SUFFIXES):
                images.setdefault(full[at + len(folder) + 1 :], full)
        if not images:
            raise FileProblem(f"{self.root} has no images in {folder}/", hint="See `vitlab data list`.")
        return dict(sorted(images.items()))

    @functools.cached_property
    def _by_last_word(self) -> dict[str, list[str]]:
        table: dict[str, list[str]] = {}
        for full in self.places:
            table.setdefault(full.rpartition("/")[2], []).append(full)
        return table

    def part(self, part: str, classes: Sequence[str], images: Iterable[tuple[str, str, int]]) -> Dataset:
        """The images of a part: each one's key, file (as `find` takes it) and class."""
        rows = list(images)
        reader = PlaceReader([self.places[self.find(file)] for _, file, _ in rows])
        return self.dataset(part, classes, [key for key, _, _ in rows], [label for _, _, label in rows], reader)

    def dataset(
        self, part: str, classes: Sequence[str], keys: Sequence[str], labels: Sequence[int], read: Reader
    ) -> Dataset:
        if labels and not 0 <= min(labels) <= max(labels) < len(classes):
            hint = "Fetch it again."
            raise FileProblem(f"{self.root}: a label of {part} lies outside the {len(classes)} classes", hint=hint)
        name = self.root.name if part == "all" else f"{self.root.name} {part}"
        return Dataset(name, tuple(classes), keys, single_labels(labels), read)


def scan(root: Path, cache: Path) -> RawFiles:
    """Everything below `root` and inside its archives."""
    places: dict[str, Place] = {}
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                continue
            path = Path(folder) / name
            places |= _inside(path, path.relative_to(root).as_posix(), cache)
    return RawFiles(root, cache, places)


def _inside(path: Path, name: str, cache: Path) -> dict[str, Place]:
    """The file itself, or what it holds, under a folder of its name."""
    lower = name.lower()
    if lower.endswith((".gz", ".tgz")):
        plain = name[:-4] + ".tar" if lower.endswith(".tgz") else name[:-3]
        return _inside(_expanded(path, plain, cache), plain, cache)
    if lower.endswith((".tar", ".zip")):
        return {f"{name[:-4]}/{inner}": place for inner, place in members(path, lower[-4:], cache).items()}
    return {name: Place(path, _WHOLE, 0)}


def members(path: Path, kind: str, cache: Path) -> dict[str, Place]:
    """What a `.tar` or a `.zip` holds, whatever the file is called."""
    try:
        return _tar_members(path) if kind == ".tar" else _zip_members(path, cache)
    except VitlabError:
        raise
    except Exception:  # on damaged archives zipfile lets a dozen types out
        raise FileProblem(
            f"{path} is not a readable archive: it is damaged or cut short", hint="Fetch it again."
        ) from None


def _tar_members(path: Path) -> dict[str, Place]:
    """The members of a tar, and of tars inside it, which is how ImageNet comes."""
    places: dict[str, Place] = {}
    with open_regular(path) as file:
        for member in tar_members(file, str(path)):
            name = _plain_name(member.name)
            if not name.endswith(".tar"):
                places[name] = Place(path, member.offset_data, member.size)
                continue
            with open_regular(path) as inner:
                for image in tar_members(inner, f"{path}: {name}", member.offset_data, member.size):
                    inside = f"{name.removesuffix('.tar')}/{_plain_name(image.name)}"
                    places[inside] = Place(path, member.offset_data + image.offset_data, image.size)
    return places


def _zip_members(path: Path, cache: Path) -> dict[str, Place]:
    places: dict[str, Place] = {}
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.is_dir() or member.filename.startswith("__MACOSX/"):
                continue
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.flag_bits & 1:
                raise FileProblem(f"{path} is encrypted, or uses an unsupported compression; unpack it by hand")
            deflated = member.compress_type == zipfile.ZIP_DEFLATED
            place = Place(path, member.header_offset, member.compress_size, deflated, zipped=True)
            name = _plain_name(member.filename)
            if name.endswith(".tar.gz"):  # Caltech's archive of archives
                inner = name.removesuffix(".gz")
                content = _gunzip(functools.partial(archive.open, member), path)
                places |= _inside(write_once(path, inner, cache, content), inner, cache)
            else:
                places[name] = place
    return places


def _plain_name(name: str) -> str:
    """Names are only looked up, never made into paths; tidied so that `./a` is `a`."""
    return name.replace("\\", "/").removeprefix("./").lstrip("/")


def take_parts(dataset: Dataset, parts: Mapping[str, Sequence[int]]) -> dict[str, Dataset]:
    """The parts of a set that comes in one piece, by the numbers of their images."""
    return {
        part: dataset.subset(torch.tensor(rows, dtype=torch.int64), f"{dataset.name} {part}")
        for part, rows in parts.items()
    }


# --- gzip -------------------------------------------------------------------------------------------------------------


def _expanded(path: Path, name: str, cache: Path) -> Path:
    with open_regular(path) as file:
        if file.read(2) != _GZIP:  # some that are called .tar.gz are plain tars
            return path
    return write_once(path, name, cache, _gunzip(lambda: open_regular(path), path))


def _gunzip(open_packed: Callable[[], IO[bytes]], origin: Path) -> Iterator[bytes]:
    try:
        with open_packed() as packed, gzip.open(packed) as unpacked:
            yield from iter(lambda: unpacked.read(_CHUNK), b"")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileProblem(f"{origin} is damaged: {error}", hint="Fetch it again.") from None


def write_once(origin: Path, name: str, cache: Path, content: Iterator[bytes]) -> Path:
    """The expanded file, whose name depends on the state of its origin, so it is never stale."""
    about = f"{origin.absolute()} {file_version(origin)}"
    key = hashlib.sha256(about.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    plain = cache / key / name.rpartition("/")[2]
    if not plain.is_file():
        fsio.make_folder(plain.parent)
        fsio.write_file(plain, content)
    return plain


# --- records of one size ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RecordReader:
    """Pixels in records of one length, in one file or several, read on demand."""

    starts: Sequence[tuple[Path, int]]  # each file, and the byte where the pixels of its first record begin
    firsts: Sequence[int]  # the number of each file's first image
    stride: int
    shape: tuple[int, int, int]  # channels, rows, columns, as they are stored
    scale: int = 1
    channels_last: bool = False  # stored as rows, columns, channels

    def __call__(self, i: int) -> "np.ndarray[Any, Any]":
        which = bisect.bisect_right(self.firsts, i) - 1
        path, start = self.starts[which]
        size = int(np.prod(self.shape))
        with open_regular(path) as file:
            file.seek(start + (i - self.firsts[which]) * self.stride)
            data = file.read(size)
        if len(data) != size:
            raise FileProblem(f"{path} ends too early", hint="Fetch it again.")
        pixels = np.frombuffer(data, np.uint8).reshape(self.shape)
        pixels = pixels if self.channels_last else pixels.transpose(1, 2, 0)
        return pixels * np.uint8(self.scale)


def stored_plainly(files: RawFiles, name: str) -> tuple[Path, int, int]:
    """(path, first byte, bytes) of a file, expanded first where it is deflated."""
    place = files.places[files.find(name)]
    if place.start == _WHOLE:
        return place.path, 0, place.path.stat().st_size
    if not place.deflated:
        return place.path, data_start(place), place.size
    plain = write_once(place.path, name, files.cache, _inflate(place))
    return plain, 0, plain.stat().st_size


def _inflate(place: Place) -> Iterator[bytes]:
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    left = place.size
    with open_regular(place.path) as file:
        file.seek(data_start(place))
        while left and (chunk := file.read(min(_CHUNK, left))):
            left -= len(chunk)
            try:
                yield unpack.decompress(chunk)
            except zlib.error:
                raise FileProblem(f"{place.path} is damaged at byte {place.start:,}", hint="Fetch it again.") from None
    if not unpack.eof:
        raise FileProblem(f"{place.path} ends too early", hint="Fetch it again.")
