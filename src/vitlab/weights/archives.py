"""Zip archives and torch's pickles, checked before a library reads them.

Owns the one place where `torch.load` is called, what is checked before it, and how the table of weights is found in what it
returns. `torch.load(weights_only=True)` keeps code from running, but 1 MB of tuples still crashes it; hence the checks.
"""

import dataclasses
import io
import pickletools
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self, cast

import torch
from torch import Tensor, nn

from vitlab.core.errors import FileProblem

MODELS = ("state_dict", "model", "model_state_dict", "model_ema", "ema", "teacher", "student", "module", "params")

_CHUNK = 2**20  # bytes read at a time
# The limits keep a hostile file at twice its size plus 64 MB; each is ten times what the largest published model needs.
_LISTING_LIMIT = 2**21  # bytes of a zip's list of members, which takes 15 times as many once parsed
_ZIP_GROWTH = 4  # times its size to which an archive may unpack: bfloat16 kept in float32 needs 2.6
_ZIP_SLACK = 2**24  # bytes beyond that, for small models full of zeros
_PICKLE_LIMIT, _OPCODE_LIMIT = 2**23, 400_000  # bytes and instructions; a tensor takes about 35, so 10,000 tensors
_DEPTH_LIMIT = 100  # of values in values; checkpoints reach ten
_COST_LIMIT = 50  # values, with all that is inside them, that an instruction may take from the stack on average
_NESTING = 6  # tables in tables before the weights; a trusted file could nest forever
_COPY_SLACK = 2**20  # bytes beyond the file's size that copies of views may take
_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number as a pickle, after two bytes of protocol
_LEGACY_PICKLES = 5  # magic number, version, machine, the object, the names of its storages
_PROTOCOL = 3  # of pickle; torch writes 2, and its weights-only reader knows no later ones
_AGAIN = "Download or copy it again."
_SAFER = "Ask its author for a .safetensors file."

# Fewer than torch allows: the rest makes tensors that are not plain, or memory out of nothing (`bytearray(10**9)`, `encode`).
_ALLOWED = re.compile(
    r"collections (OrderedDict|Counter)|(builtins|__builtin__) set|torch\.nn\.parameter Parameter|torch (Size|device)|"
    r"torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)|torch\.storage UntypedStorage|"
    r"torch(\.cuda)? (Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool)Storage|torch (u?int|b?float)\w+|torch bool"
)
# What training programs keep beside the weights. `_Inert` stands in for all of it, and `encode` makes bytes of a short text.
_INERT = (
    *("argparse.Namespace", "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
)
_ENCODE, _SCALAR_LIMIT = "_codecs encode", 32  # characters; numpy's widest number has 32 bytes
_NOT_PLAIN = re.compile(r"torch\S*\.(\w*Tensor|\w+Storage|_rebuild_\w+)")  # sparse, quantised, complex, without numbers
_CALLS = ("GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4")  # instructions that name code; torch writes only the first
_ADDS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")  # instructions that change the lowest value they take
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)


def open_zip(file: io.BufferedIOBase, size: int, name: str) -> zipfile.ZipFile:
    """Open the archive, once its directory agrees with the file's size."""
    file.seek(-min(size, 98), io.SEEK_END)
    tail = file.read()  # 22 bytes of end record; before it, in large archives, 20 of locator and 56 of zip64 record
    if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise FileProblem(f"{name} is cut short: a zip archive (.npz, .pth) without its end", hint=_AGAIN)
    fields = (tail[-66:-58], tail[-58:-50]) if tail[-42:-38] == b"PK\6\7" else (tail[-12:-10], tail[-10:-6])
    count, listing = (int.from_bytes(field, "little") for field in fields)
    if listing > _LISTING_LIMIT:  # zipfile would parse it all before anybody could count
        raise FileProblem(f"{name} lists more members than any model has")
    archive = zipfile.ZipFile(cast(IO[bytes], file))
    infos = archive.infolist()
    if len(infos) != count:  # zipfile does not compare; a wrong length in one entry of the list can hide the next
        raise FileProblem(f"{name} has lost a member from its list", hint=_AGAIN)
    if len({info.orig_filename for info in infos}) != len(infos):
        raise FileProblem(f"{name} holds two members of the same name", hint=_AGAIN)
    for info in infos:
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if info.flag_bits & 1 or not (stored or info.compress_type == zipfile.ZIP_DEFLATED):
            raise FileProblem(f"{name} packs {info.orig_filename!r:.60} in a way that is not read", hint=_AGAIN)
    # Of members that lie over one another, which is how the smallest bombs are made, the sum is too large.
    if sum(info.compress_size for info in infos) > size:
        raise FileProblem(f"{name} claims members larger than itself", hint=_AGAIN)
    if (unpacked := sum(info.file_size for info in infos)) > _ZIP_GROWTH * size + _ZIP_SLACK:
        raise FileProblem(f"{name} has {size:,} bytes and would unpack to {unpacked:,}, which no real weights do")
    return archive


def is_torch(head: bytes, members: Sequence[str]) -> bool:
    """Whether torch wrote it, by its first bytes or the members of the archive."""
    legacy = head[:1] == b"\x80" and head[2:].startswith(_MAGIC)
    return legacy or any(member.endswith("/data.pkl") for member in members)


def read_torch(
    file: io.BufferedIOBase,
    archive: zipfile.ZipFile | None,
    size: int,
    name: str,
    *,
    trust_pickle: bool,
    part: str | None,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read the weights of a torch file, and the names of what else it holds."""
    file.seek(0)
    head = _check_archive(archive, name) if archive else file.read(_PICKLE_LIMIT)
    if not trust_pickle:
        _check_pickles(io.BytesIO(head), 1 if archive else _LEGACY_PICKLES, name)
    storages = _Storages(size, name, unfilled=archive is None)
    file.seek(0)
    # Never retried with more trust: whether code may run is decided by the caller alone, not by the file.
    with torch.serialization.safe_globals([] if trust_pickle else [(_Inert, code) for code in _INERT]):
        value = torch.load(cast(IO[bytes], file), storages.place, weights_only=not trust_pickle, mmap=False)
    found, ignored = _unwrap(value, part, name)
    plain = {key: _plain(tensor, f"{name}: {key!r:.60}") for key, tensor in found.items()}
    moved = [key for key, tensor in plain.items() if not _is_settled(tensor)]
    if storages.grew() or sum(plain[key].nbytes for key in moved) > size + _COPY_SLACK:
        raise FileProblem(f"{name} claims larger arrays than the file holds", hint=_AGAIN)
    plain |= {key: plain[key].clone(memory_format=torch.contiguous_format) for key in moved}
    return plain, ignored


class _Inert:
    """A stand-in for settings beside the weights; ignores whatever it is given."""

    __slots__ = ()

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class _Storages:
    """Keeps what torch allocates on the CPU and within the file's size."""

    def __init__(self, limit: int, name: str, *, unfilled: bool) -> None:
        self.limit, self.name, self.unfilled, self.total = limit, name, unfilled, 0
        self.placed: list[tuple[Any, int]] = []

    def place(self, storage: Any, _device: str) -> Any:
        self.total += storage.nbytes()
        if self.total > self.limit:
            raise FileProblem(f"{self.name} claims larger arrays than the file holds", hint=_AGAIN)
        self.placed.append((storage, storage.nbytes()))
        # A hostile file of the old form can leave it unfilled; what the memory held before must not show.
        return storage.fill_(0) if self.unfilled else storage

    def grew(self) -> bool:
        """torch lets a view enlarge what it looks at, with memory that nobody filled."""
        return any(storage.nbytes() != nbytes for storage, nbytes in self.placed)


# --- before torch sees it ---------------------------------------------------------------------------------------------


def _check_archive(archive: zipfile.ZipFile, name: str) -> bytes:
    """Compare every member with its checksum (torch does not); return the pickle."""
    infos = archive.infolist()
    if any(info.orig_filename.endswith("/constants.pkl") for info in infos):
        raise FileProblem(f"{name} is a TorchScript program", hint="Give the state dict that it was made from.")
    names = [info.orig_filename.lower() for info in infos]  # torch looks for them without regard to case
    if sum(member.endswith("data.pkl") for member in names) != 1:
        raise FileProblem(f"{name} holds several pickles", hint=_AGAIN)
    unchecked = not any(info.CRC for info in infos)  # torch can be set to write zeros in place of checksums
    head = b""
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED:  # torch never packs, and would unpack without a bound
            raise FileProblem(f"{name} was packed again after torch wrote it", hint=_AGAIN)
        if unchecked:
            del info.CRC  # zipfile checks the members that have one
        try:
            with archive.open(info, mode="r") as member:
                if info.orig_filename.endswith("/data.pkl"):
                    head = member.read(_PICKLE_LIMIT)
                while member.read(_CHUNK):
                    pass
        except (zipfile.BadZipFile, EOFError) as error:
            raise FileProblem(f"{name}: the part {info.orig_filename!r:.60} is damaged", hint=_AGAIN) from error
    return head


@dataclasses.dataclass(slots=True)
class _Value:
    """What is known of a value that a pickle would make."""

    size: int = 1
    depth: int = 1
    inside: bool = False  # of another value; then it may not change any more, or the other's size would be wrong
    says: object = None  # a text, the name of code, or a pair of these


def _check_pickles(file: io.BytesIO, count: int, name: str) -> None:
    """Check the instructions without executing them; refuse all but plain tables.

    A tuple nested a million deep overflows the C stack when it becomes a key; one that holds the one before it twice, sixty
    times over, is hashed or printed forever. So each value's size and depth are kept, and what instructions take is summed up.
    """
    steps = cost = 0
    for _ in range(count):
        stack: list[_Value | None] = []  # None is a mark
        memo: dict[int, _Value | None] = {}
        for op, arg, _ in pickletools.genops(file):
            steps += 1
            if op.proto > _PROTOCOL or op.name in _CALLS:
                _check_call(op, arg, name)
            if op.name.endswith("PUT"):
                memo[cast(int, arg)] = stack[-1]
            elif op.name.endswith("GET"):
                stack.append(memo[cast(int, arg)])
            else:
                result, added = _apply(stack, op, arg)
                cost += added
                if steps > _OPCODE_LIMIT or result.depth > _DEPTH_LIMIT or cost > _COST_LIMIT * steps + 1000:
                    raise FileProblem(f"{name} is not a table of weights: it is too large or too deeply nested")
                if op.stack_after:
                    stack.append(None if op.name == "MARK" else result)


def _apply(stack: list[_Value | None], op: pickletools.OpcodeInfo, arg: object) -> tuple[_Value, int]:
    """The value that the instruction makes or changes, and the size it adds."""
    if not op.stack_before:
        return _Value(says=arg), 0
    taken: list[_Value | None] = []
    single = len(op.stack_before)
    if pickletools.markobject in op.stack_before:
        while (value := stack.pop()) is not None:
            taken.append(value)
        single = op.stack_before.index(pickletools.markobject)
    taken += [stack.pop() for _ in range(single)]
    values = [value for value in taken if value is not None]
    if len(values) != len(taken):
        raise ValueError("a mark where a value must be")
    if op.name == "REDUCE":
        _check_encode(*(value.says for value in values))
    pair = (values[1].says, values[0].says) if op.name == "TUPLE2" else None
    result = values.pop() if op.name in _ADDS else _Value(says=pair)
    for value in values:
        value.inside = True
    if result.inside:
        raise ValueError("a value that changes after it was put into another, or into itself")
    size = sum(value.size for value in values)
    result.size += size
    result.depth = max(result.depth, 1 + max((value.depth for value in values), default=0))
    return result, size


def _check_encode(arguments: object, code: object) -> None:
    """Allow the encoding of a few bytes only: others can expand a thousandfold."""
    if code == _ENCODE:
        text, encoding = arguments if isinstance(arguments, tuple) else (None, None)
        if not isinstance(text, str) or len(text) > _SCALAR_LIMIT or encoding != "latin1":
            raise ValueError("an encoding that no number needs")


def _check_call(op: pickletools.OpcodeInfo, arg: object, name: str) -> None:
    what = str(arg).replace(" ", ".") if op.name in ("GLOBAL", "INST") else op.name
    if op.name == "GLOBAL" and (_ALLOWED.fullmatch(str(arg)) or what in _INERT or arg == _ENCODE):
        return
    if op.proto > _PROTOCOL:
        what = f"pickle protocol {op.proto}"
    if _NOT_PLAIN.fullmatch(what):
        raise FileProblem(f"{name} holds tensors that are not plain arrays of numbers ({what:.80})", hint=_SAFER)
    raise FileProblem(
        f"{name} wants to run code while it is read ({what:.80}), so it was not read",
        hint=f"{_SAFER} Only if you trust its author with this machine: vitlab convert --trust-pickle.",
    )


# --- after torch has read it ------------------------------------------------------------------------------------------


def _unwrap(value: object, part: str | None, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Find the table of weights in a checkpoint, and name what lies beside it."""
    ignored: list[str] = []
    table: Any = {}
    for _ in range(_NESTING):
        table = value.state_dict() if isinstance(value, nn.Module) else value
        if not isinstance(table, Mapping):
            raise FileProblem(f"{name} holds a {type(value).__name__}, not a table of weights")
        parts = [key for key in MODELS if _has_tensors(table.get(key))]
        if part is not None and not _has_tensors(table.get(part)):
            raise FileProblem(
                f"{name} has no part '{part}' with weights", hint=f"It has: {', '.join(parts) or 'none'}."
            )
        if part is None and len(parts) > 1:
            raise FileProblem(
                f"{name} holds several models: {', '.join(parts)}",
                hint=f"Name the one you want, as in vitlab convert --part {parts[0]} (in Python: part={parts[0]!r}).",
            )
        chosen = part or next(iter(parts), None)
        if chosen is None:
            break
        ignored += [_label(key) for key in table if key != chosen]
        value, part = table[chosen], None
    arrays = {key: value for key, value in table.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if not arrays:
        raise FileProblem(
            f"{name} holds no weights", hint=f"It has: {', '.join(map(_label, list(table)[:5])) or 'nothing'}."
        )
    return arrays, (*ignored, *(_label(key) for key in table if key not in arrays))


def _label(key: object) -> str:
    """A key as text that is safe to show on a terminal."""
    return text if (text := str(key)).isprintable() else ascii(text)


def _has_tensors(value: object, depth: int = _NESTING) -> bool:
    """Whether this is a model or a table with weights, maybe inside further tables."""
    if isinstance(value, nn.Module):
        return True
    if not isinstance(value, Mapping):
        return False
    inner = any(isinstance(item, Tensor) for item in value.values())
    return inner or (depth > 0 and any(_has_tensors(value.get(key), depth - 1) for key in MODELS))


def _plain(tensor: Tensor, name: str) -> Tensor:
    x = Tensor.detach(tensor)  # by the class, because a file can hang attributes of any name on a parameter
    odd = x.layout is not torch.strided or x.is_nested or x.device.type != "cpu" or x.is_neg()
    if odd or x.dtype not in _DTYPES:
        raise FileProblem(f"{name} is not a plain array of numbers ({x.dtype}, {x.layout}, {x.device})")
    return x


def _is_settled(tensor: Tensor) -> bool:
    """Whether it is contiguous and 64-byte aligned, on which rounding depends."""
    return tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
