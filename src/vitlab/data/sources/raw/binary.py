"""Parsers of image sets' binary formats: IDX, NORB, NumPy, MATLAB v5, TFRecord.

Written here because they are short, and because the usual readers would bring a large package, or execute what they read:
CIFAR's Python version is a pickle, so its binary version is used.
"""

import math
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from vitlab.core.errors import FileProblem
from vitlab.core.reading import open_regular

Array = np.ndarray[Any, Any]


def idx_header(data: bytes, name: str, ndim: int) -> tuple[tuple[int, ...], int]:
    """(shape, start of the content) of an IDX file of bytes. Big-endian."""
    if len(data) < 4 + 4 * ndim or data[:4] != bytes((0, 0, 8, ndim)):  # 8 stands for unsigned bytes
        raise FileProblem(f"{name} is not an IDX file of {ndim} dimensions")
    return tuple(int(n) for n in np.frombuffer(data, ">u4", ndim, 4)), 4 + 4 * ndim


def idx_labels(data: bytes, name: str) -> list[int]:
    (count,), start = idx_header(data, name, 1)
    if len(data) != start + count:
        raise FileProblem(
            f"{name} has {len(data) - start:,} labels, but its header says {count:,}", hint="Fetch it again."
        )
    return list(data[start:])


_NORB_TYPES = {0x1E3D4C55: "u1", 0x1E3D4C54: "<i4"}  # the format's own magic numbers for bytes and for integers


def norb_header(data: bytes, name: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """(type, shape, start of the content) of a NORB matrix."""
    head = np.frombuffer(data[: 8 + 4 * 4], "<i4") if len(data) >= 8 + 4 * 4 else np.zeros(2, "<i4")
    if int(head[0]) not in _NORB_TYPES or not 1 <= int(head[1]) <= 4 or (head[2 : 2 + head[1]] < 0).any():
        raise FileProblem(f"{name} is not a NORB matrix")
    ndim = int(head[1])
    return np.dtype(_NORB_TYPES[int(head[0])]), tuple(int(n) for n in head[2 : 2 + ndim]), 8 + 4 * max(3, ndim)


def norb_matrix(data: bytes, name: str) -> Array:
    dtype, shape, start = norb_header(data, name)
    if len(data) - start != int(np.prod(shape)) * dtype.itemsize:
        raise FileProblem(f"{name} is damaged: its size does not match its shape {list(shape)}", hint="Fetch it again.")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def npy_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether columns come first, type) of a `.npy`; its content follows."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning about arrays that Python 2 wrote
            return read(file)
    except Exception:  # a header is an expression of Python's, and NumPy lets out whatever its parser raises
        raise FileProblem(f"{name} is not a NumPy array, or is damaged", hint="Fetch it again.") from None


def npy_array(file: IO[bytes], size: int, name: str) -> Array:
    """The array in a `.npy` of `size` bytes, checked before memory is allocated."""
    shape, fortran, dtype = npy_header(file, name)
    if any(type(side) is not int or side < 0 for side in shape) or dtype.hasobject:
        raise FileProblem(f"{name} is not an array of numbers or texts: {dtype} {list(shape)!r:.60}")
    if math.prod(shape) * dtype.itemsize != size - file.tell():
        raise FileProblem(
            f"{name} is damaged: its size does not match its shape {list(shape)!r:.60}", hint="Fetch it again."
        )
    data = file.read(size)
    return np.ndarray(shape, dtype, data, order="F" if fortran else "C")


# --- MATLAB v5 --------------------------------------------------------------------------------------------------------

_MAT_HEADER = 128
_MAT_BYTES = 2**31  # SVHN's largest array has 0.2 GB; a forged size must not fill the memory
_MAT_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_MAT_ARRAY, _MAT_COMPRESSED = 14, 15
_MAT_NUMBERS = range(6, 16)  # array classes: double to uint64; the others are cells, structs, text


def mat_arrays(data: bytes, name: str) -> dict[str, Array]:
    """The numeric arrays of a MATLAB v5 file by name, in its column-first order."""
    if len(data) < _MAT_HEADER or data[126:128] != b"IM":  # little-endian; nothing that we read is otherwise
        raise FileProblem(f"{name} is not a MATLAB v5 file")
    try:
        return dict(array for kind, part in _elements(data[_MAT_HEADER:]) for array in _mat_array(kind, part))
    except (ValueError, IndexError, KeyError, zlib.error, UnicodeDecodeError) as error:
        raise FileProblem(f"{name} is damaged: {error}", hint="Fetch it again.") from None


def _mat_array(kind: int, part: bytes) -> Iterator[tuple[str, Array]]:
    if kind == _MAT_COMPRESSED:
        unpack = zlib.decompressobj()
        ((kind, part),) = _elements(unpack.decompress(part, _MAT_BYTES))
    if kind != _MAT_ARRAY:
        return
    (_, flags), (_, sizes), (_, label), *rest = _elements(part)
    if flags[0] not in _MAT_NUMBERS or not rest:
        return
    number, values = rest[0]
    shape = tuple(int(n) for n in np.frombuffer(sizes, "<i4"))
    yield label.decode("ascii"), np.frombuffer(values, _MAT_TYPES[number]).reshape(shape, order="F")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, content) of each element; up to four bytes are stored inside its tag."""
    at = 0
    while at + 8 <= len(data):
        kind, size = (int(n) for n in np.frombuffer(data, "<u4", 2, at))
        start = at + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if size > (4 if start == at + 4 else len(data) - start):
            raise ValueError("an element reaches beyond the end")
        yield kind, data[start : start + size]
        at = at + 8 if start == at + 4 else start + size + (0 if kind == _MAT_COMPRESSED else -size % 8)


# --- TFRecord ---------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """One record: its short features, and where in the file its `image` lies."""

    features: dict[str, bytes | int]
    start: int
    size: int


_RECORD_BYTES = 2**26  # a frame has some 30 kB
_VARINT, _BYTES = 0, 2  # wire types of protocol buffers; the two others have fixed widths and are not used here


def tfrecord_examples(path: Path, start: int, size: int) -> Iterator[Example]:
    """The records in `size` bytes of `path`. A SHA-256 covers their CRCs."""
    with open_regular(path) as file:
        at, end = start, start + size
        while at < end:
            file.seek(at)
            length = int.from_bytes(file.read(8), "little")
            body = at + 8 + 4  # the length has a CRC of its own, and the body one after it
            if length > _RECORD_BYTES or body + length + 4 > end:
                what = f"{path} is not a complete TFRecord file: it breaks at byte {at:,}"
                raise FileProblem(what, hint="Fetch it again.")
            file.seek(body)
            try:
                yield _example(file.read(length), body)
            except (ValueError, IndexError, UnicodeDecodeError):
                raise FileProblem(f"{path} holds something other than examples at byte {at:,}") from None
            at = body + length + 4


def _example(data: bytes, start: int) -> Example:
    """Example { Features 1 } -> { map entry 1 } -> { name 1, Feature 2 } -> { bytes 1 | int64 3 } -> { value 1 }."""
    values: dict[str, bytes | int] = {}
    image = (0, 0)
    for features in _fields(data, 0, len(data), 1):
        for entry in _fields(data, *features, 1):
            (name,), (feature,) = _fields(data, *entry, 1), _fields(data, *entry, 2)
            label = data[slice(*name)].decode()
            for value in _fields(data, *feature, 1):
                first, last = _fields(data, *value, 1)[0]
                if label == "image":
                    image = (start + first, last - first)
                else:
                    values[label] = data[first:last]
            for value in _fields(data, *feature, 3):
                # A list of numbers is packed into one field, or each has a field of its own.
                packed = _fields(data, *value, 1)
                values[label] = _varint(data, packed[0][0] if packed else value[0] + 1)[0]
    return Example(values, *image)


def _fields(data: bytes, at: int, end: int, number: int) -> list[tuple[int, int]]:
    """Where each length-delimited field of that number lies between `at` and `end`."""
    places: list[tuple[int, int]] = []
    while at < end:
        tag, at = _varint(data, at)
        if tag & 7 == _VARINT:
            at = _varint(data, at)[1]
            continue
        if tag & 7 != _BYTES:
            raise ValueError("not an example")
        size, at = _varint(data, at)
        if at + size > end:
            raise ValueError("cut short")
        if tag >> 3 == number:
            places.append((at, at + size))
        at += size
    return places


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:  # ten bytes of seven bits hold any 64-bit number
        value |= (data[at] & 127) << shift
        at += 1
        if not data[at - 1] & 128:
            return value, at
        shift += 7
    raise ValueError("not a number")
