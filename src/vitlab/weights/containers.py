"""Files of named arrays, read and written: `.npz`, `.safetensors`, `.pth`.

Owns the containers, not what the names in them mean. Such files come from strangers: their content decides what they are,
sizes are compared with one another before memory is taken, nothing in them is run, and only `FileProblem` comes out.
"""

import dataclasses
import io
import itertools
import json
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import numpy.lib.format as npy
import torch
from torch import Tensor

from vitlab.core.console import Advance
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.reading import open_regular, unique_keys
from vitlab.core.stream_buffer import StreamBuffer
from vitlab.weights import archives

Container = Literal["npz", "safetensors", "torch"]
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "opt/target/", "params/", "state_dict.")

_CHUNK = 2**18  # bytes read at a time: large enough for full speed, small enough for a processor's cache
_JSON_LIMIT = 2**21  # bytes of a safetensors header: 15,000 arrays; at the library's 100 MB, parsing would take 2 GB
_NPY_LIMIT = 10_000  # bytes of a .npy header, as in numpy
_NPY_HEADERS = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,  # differs in the encoding of field names, which numbers have none of
}
_UNIX = 3  # in a zip archive, whatever this machine is

_NPY = {
    **{torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "|V2", torch.bool: "|b1"},
    **{torch.int64: "<i8", torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1"},
    **{torch.uint64: "<u8", torch.uint32: "<u4", torch.uint16: "<u2", torch.uint8: "|u1"},
}
_FROM_NPY = {kind[1:]: dtype for dtype, kind in _NPY.items()}
_FROM_JSON = {
    **{f"{kind[0].upper()}{8 * int(kind[1])}": dtype for kind, dtype in _FROM_NPY.items() if kind[0] in "fiu"},
    **{"BF16": torch.bfloat16, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_JSON = {dtype: kind for kind, dtype in _FROM_JSON.items()}

_AGAIN = "Download or copy it again."
_PLAIN = "Ask for a file of plain numbers; if it should be one, download or copy it again."
_ACCEPTED = "Give an .npz, a .safetensors or a torch .pth file."
_OTHERS: tuple[tuple[bytes, str, str], ...] = (  # a pattern for the first bytes, what that is, what to do
    (rb"\Z", "empty", _AGAIN),
    (rb"PK[\3\5][\4\6]", "a zip archive without arrays", _ACCEPTED),
    (rb"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file with `git lfs pull`."),
    (rb"(?i:\s*<(!doctype|html|\?xml|head))", "a web page, not weights", "Download the file, not the page about it."),
    (rb"\x93NUMPY", "a single .npy array, which has no name", _ACCEPTED),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes", _ACCEPTED),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!", "a compressed file", "Unpack it first."),
    (rb".{257}ustar", "a tar archive", "Unpack it first; torch's own tar form is from before 2017 and not read."),
    (rb".{4}TFL3|\x08[\x00-\x02]\x12", "a TensorFlow model", _ACCEPTED),
    (rb"\x08[\x03-\x1f][\x12\x1a\x22\x3a\x42]", "an ONNX model", "Give the weights that it was exported from."),
    (rb"GGUF", "a GGUF file", _ACCEPTED),
    (rb"\x80[\x02-\x05]", "a plain Python pickle, which only running its code could read", _ACCEPTED),
    (rb"([\x80-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9]", "a msgpack file, as Flax writes", _ACCEPTED),
    (rb"\s*[{\[]", "a JSON text", "Give the file with the weights, which lies beside it."),
    (rb"", "not a file of weights that vitlab knows", _ACCEPTED),
)


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    arrays: dict[str, Tensor]
    container: Container
    prefix: str = ""  # what every name began with, and was taken off
    metadata: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    ignored: tuple[str, ...] = ()  # what stood beside the arrays in a torch file: epoch, optimizer, other parts


def read_arrays(path: Path, *, trust_pickle: bool = False, part: str | None = None) -> ArrayFile:
    """Read all arrays of the file at `path`, bit for bit, to the CPU.

    `part` picks one of several models in a torch checkpoint. `trust_pickle` lets such a file run any code it likes: it may come
    from a person's command line, never from a file.
    """
    try:
        if path.is_dir():
            raise FileProblem(f"{path} is a folder", hint="Give the file in it that holds the weights.")
        with open_regular(path) as file:
            return _read(file, str(path), trust_pickle, part)
    except (FileNotFoundError, NotADirectoryError):
        raise FileProblem(f"{path} does not exist") from None
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from error


def parse_arrays(data: bytes, name: str, *, trust_pickle: bool = False, part: str | None = None) -> ArrayFile:
    """As `read_arrays`, from bytes in memory; `name` is for the errors."""
    return _read(io.BytesIO(data), name, trust_pickle, part)


def find_nonfinite(arrays: Mapping[str, Tensor]) -> list[str]:
    """The names of the arrays that hold NaN or infinity."""
    return [name for name, tensor in arrays.items() if tensor.is_floating_point() and not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    """Check the extremes, which carry NaN: 30 times faster than `isfinite().all()`."""
    extremes = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor) if tensor.numel() else ()
    return all(bool(torch.isfinite(extreme)) for extreme in extremes)


def _read(file: io.BufferedIOBase, name: str, trust_pickle: bool, part: str | None) -> ArrayFile:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the libraries remark about odd files does not help their readers
            found = _read_any(file, name, trust_pickle, part)
        for key in found.arrays:
            if not key.isprintable():  # zero bytes, half characters, codes that a terminal would follow
                raise FileProblem(f"{name} gives an array the name {key!r:.60}, which cannot be printed")
        return _without_prefix(found)
    except FileProblem:
        raise
    except MemoryError as error:
        raise FileProblem(f"{name} asks for more memory than there is", hint=_AGAIN) from error
    except Exception as error:  # on damaged files zipfile, json, pickletools and torch raise two dozen types
        raise FileProblem(f"{name} is damaged or cut short", hint=_AGAIN) from error


def _read_any(file: io.BufferedIOBase, name: str, trust_pickle: bool, part: str | None) -> ArrayFile:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(512)
    archive = archives.open_zip(file, size, name) if head.startswith(b"PK\3\4") else None
    members = [info.orig_filename for info in archive.infolist()] if archive else []
    if archives.is_torch(head, members):
        arrays, ignored = archives.read_torch(file, archive, size, name, trust_pickle=trust_pickle, part=part)
        return ArrayFile(arrays, "torch", ignored=ignored)
    if part is not None:
        raise FileProblem(f"{name} has no part '{part}'", hint="Only torch checkpoints have parts.")
    if archive and any(member.endswith(".npy") for member in members):
        return ArrayFile(_read_npz(archive, name), "npz")
    if head[8:9] == b"{" and head[5:8] == b"\0\0\0":  # eight bytes of length, then JSON
        return _read_safetensors(file, size, name)
    what, hint = next((what, hint) for pattern, what, hint in _OTHERS if re.match(pattern, head, re.DOTALL))
    raise FileProblem(f"{name} is {what}", hint=hint)


def _without_prefix(found: ArrayFile) -> ArrayFile:
    """Strip the prefixes of wrappers (data parallel, compiled, Lightning, Flax)."""
    arrays, stripped = found.arrays, ""
    while prefix := next((word for word in PREFIXES if arrays and all(key.startswith(word) for key in arrays)), ""):
        arrays, stripped = {key.removeprefix(prefix): tensor for key, tensor in arrays.items()}, stripped + prefix
    return dataclasses.replace(found, arrays=arrays, prefix=stripped)


class _Refusal(Exception):
    """Why an array is not read; the caller adds the file's and the array's name."""


# --- npz ---------------------------------------------------------------------------------------------------------------


def _read_npz(archive: zipfile.ZipFile, name: str) -> dict[str, Tensor]:
    arrays: dict[str, Tensor] = {}
    for info in archive.infolist():
        key = info.orig_filename.removesuffix(".npy")
        if key == info.orig_filename:
            raise FileProblem(f"{name} holds {key!r:.60}, which is not an array", hint=_AGAIN)
        try:
            with archive.open(info, mode="r") as member:
                arrays[key] = _read_npy(cast(io.BufferedIOBase, member), info.file_size)
                member.read(1)  # zipfile compares the checksum when it has reached the end
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise FileProblem(f"{name}: the array {key!r:.60} is damaged", hint=_AGAIN) from error
        except _Refusal as reason:
            raise FileProblem(f"{name}: the array {key!r:.60} {reason}", hint=_PLAIN) from None
    return arrays


def _read_npy(member: io.BufferedIOBase, size: int) -> Tensor:
    try:
        read_header = _NPY_HEADERS[npy.read_magic(member)]
        shape, is_fortran, kind = read_header(member, max_header_size=_NPY_LIMIT)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise
    except Exception:  # on damaged headers numpy raises half a dozen types
        raise _Refusal("has no readable header") from None
    dtype = _FROM_NPY.get(kind.str[1:]) if kind.names is None and kind.subdtype is None else None
    if dtype is None:
        raise _Refusal(f"is of type {kind.str!r:.60}; only numbers are read")
    dims, nbytes = _extent(shape, dtype)
    if nbytes != size - member.tell():
        raise _Refusal(f"claims the shape {shape!r:.60}, which its {size - member.tell():,} bytes do not fill")
    tensor = _filled(member, dims[::-1] if is_fortran else dims, dtype, swap=kind.str[0] == ">")
    return tensor.permute(*reversed(range(len(dims)))).contiguous() if is_fortran else tensor


def _extent(shape: Any, dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """The dimensions and their size in bytes, checked to fit 64-bit integers."""
    dims: tuple[Any, ...] = tuple(shape) if isinstance(shape, list | tuple) else (None,)
    is_possible = len(dims) <= 64 and all(type(dim) is int and 0 <= dim < 2**48 for dim in dims)
    if not is_possible or math.prod(max(dim, 1) for dim in dims) * dtype.itemsize >= 2**63:
        raise _Refusal(f"has no possible shape: {shape!r:.60}")
    return dims, math.prod(dims) * dtype.itemsize


def _filled(source: io.BufferedIOBase, dims: tuple[int, ...], dtype: torch.dtype, *, swap: bool = False) -> Tensor:
    """Read the next bytes into aligned memory, on which rounding depends."""
    flat = torch.empty(math.prod(dims) * dtype.itemsize, dtype=torch.uint8)
    view, at = flat.numpy().data, 0
    while at < len(view):
        got = source.readinto(view[at : at + _CHUNK])
        if not got:
            raise EOFError
        at += got
    flat = flat.view(-1, dtype.itemsize).flip(1).reshape(-1) if swap else flat
    return flat.view(dtype).reshape(dims)


# --- safetensors ------------------------------------------------------------------------------------------------------


def _read_safetensors(file: io.BufferedIOBase, size: int, name: str) -> ArrayFile:
    """Read without a mapping of the file, by the library's rules (decision 016)."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")  # of the header; what is left after it are the numbers
    if length > size - 8:
        raise FileProblem(f"{name} is cut short: a safetensors file whose header ends past the file", hint=_AGAIN)
    if length > _JSON_LIMIT:
        raise FileProblem(f"{name} has a header of {length:,} bytes; the limit is {_JSON_LIMIT:,}")
    arrays, at, key = dict[str, Tensor](), 0, ""
    try:
        header: dict[str, Any] = json.loads(file.read(length).decode(), object_pairs_hook=unique_keys)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            kind, (begin, end) = entry["dtype"], entry["data_offsets"]
            if kind not in _FROM_JSON:
                raise _Refusal(f"is of type {kind!r:.60}; only numbers are read")
            dims, nbytes = _extent(entry["shape"], _FROM_JSON[kind])
            if not type(begin) is type(end) is int or (begin, end) != (at, at + nbytes):
                raise _Refusal("lies at a place that does not fit its shape")
            if end > size - 8 - length:
                raise FileProblem(f"{name} is cut short: the array {key!r:.60} ends past the file", hint=_AGAIN)
            arrays[key], at = _filled(file, dims, _FROM_JSON[kind]), at + nbytes
    except _Refusal as reason:
        raise FileProblem(f"{name}: the array {key!r:.60} {reason}", hint=_PLAIN) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileProblem(f"{name} has a damaged safetensors header", hint=_AGAIN) from error
    if at != size - 8 - length:
        raise FileProblem(f"{name} holds bytes that belong to no array", hint=_AGAIN)
    return ArrayFile(arrays, "safetensors", metadata=metadata)


# --- writing ----------------------------------------------------------------------------------------------------------
# A file is made in pieces, so that one array at a time is copied. What cannot be written is refused before the first piece.
# `advance` hears how many arrays have been written.


def npz_chunks(arrays: Mapping[str, Tensor], advance: Advance | None = None) -> Iterator[bytes | memoryview]:
    """An uncompressed `.npz`; equal arrays give equal bytes on any day and machine."""
    heads = {key: _npy_head(tensor, _kind(tensor, _NPY, key, "an .npz")) for key, tensor in arrays.items()}
    return _zip_chunks(arrays, heads, advance)


def safetensors_chunks(
    arrays: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, advance: Advance | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes the library would write, in the order of `arrays`, uncopied."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, tensor in arrays.items():
        kind = _kind(tensor, _JSON, key, "a safetensors file")
        header[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # as the library does, so that the numbers are aligned
    return itertools.chain([len(text).to_bytes(8, "little"), text], (raw for _, raw in _raw_arrays(arrays, advance)))


def _npy_head(tensor: Tensor, kind: str) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {tuple(tensor.shape)}, }}"
    text += " " * (-(10 + len(text) + 1) % 64) + "\n"  # numpy aligns the numbers to 64 bytes
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode("ascii")


def _zip_chunks(arrays: Mapping[str, Tensor], heads: Mapping[str, bytes], advance: Advance | None) -> Iterator[bytes]:
    file = StreamBuffer()
    with zipfile.ZipFile(file, "w") as archive:
        for key, raw in _raw_arrays(arrays, advance):
            info = zipfile.ZipInfo(f"{key}.npy")  # of 1 January 1980, whatever today is
            info.create_system = _UNIX
            archive.writestr(info, b"".join((heads[key], raw)))
            yield file.take()
    yield file.take()


def _raw_arrays(arrays: Mapping[str, Tensor], advance: Advance | None) -> Iterator[tuple[str, memoryview]]:
    written = 0
    for count, (key, tensor) in enumerate(arrays.items(), start=1):
        yield key, _raw(tensor)
        written += tensor.nbytes
        if advance is not None:
            advance(count, f"{written / 1e6:.0f} MB")


def _kind(tensor: Tensor, kinds: Mapping[torch.dtype, str], key: str, target: str) -> str:
    if tensor.dtype not in kinds or "\0" in key:
        raise UsageError(f"{target} cannot hold {key!r:.60} of type {tensor.dtype}")
    return kinds[tensor.dtype]


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
