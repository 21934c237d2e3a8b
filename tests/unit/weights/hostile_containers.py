"""Files that want to run code, take all memory, crash or hang whoever reads them as weights.

`make_corpus` makes them; run as a script with two folders (for the files and for canaries), it reads them all in a process of
its own, under an audit hook and a memory limit, and prints what happened as JSON.
"""

import collections
import contextlib
import io
import json
import os
import pickle
import resource
import struct
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

GIB = 2**30
GOOD = {"b.weight": torch.arange(12.0).reshape(3, 4), "b.bias": torch.ones(3, dtype=torch.bfloat16)}


# --- building blocks --------------------------------------------------------------------------------------------------


def npy(descr: object = "<f4", shape: object = (3,), data: bytes = bytes(12), header: str | None = None) -> bytes:
    text = header or f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) + 1) + text.encode("latin-1") + b"\n" + data


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return buffer.getvalue()


def torch_bytes(value: object, *, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def with_pickle(program: bytes, **more: bytes) -> bytes:
    """A torch file of today's form around a pickle of ours."""
    members = {"archive/data.pkl": program, "archive/byteorder": b"little", "archive/version": b"3\n"}
    return archive(members | {f"archive/{name}": data for name, data in more.items()})


LEGACY_START = torch_bytes({}, legacy=True).removesuffix(b"\x80\x02}q\x00.\x80\x02]q\x00.")


def with_legacy_pickle(program: bytes, keys: bytes = b"\x80\x02].", data: bytes = b"") -> bytes:
    return LEGACY_START + program + keys + data


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: object = (3,), begin: object = 0, end: object = 12, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# --- code in pickles --------------------------------------------------------------------------------------------------


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def payloads(canaries: Path) -> dict[str, object]:
    def command(name: str) -> str:
        return f"open({str(canaries / name)!r}, 'w').close()"

    system = Call(os.system, f"touch {canaries / 'system'}")
    return {
        "system": system,
        "eval": Call(eval, command("eval")),
        "exec": Call(exec, command("exec")),
        "open": Call(open, str(canaries / "open"), "w"),
        "mkdir": Call(os.mkdir, str(canaries / "mkdir")),
        "nested": {"state_dict": {"w": torch.ones(2), "x": [(Call(eval, command("nested")),)]}},
        "beside": collections.OrderedDict(w=torch.ones(2), x=Call(exec, command("beside"))),
        "as-key": {Call(Path, str(canaries)): torch.ones(2), "run": Call(eval, command("as-key"))},
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "wrapped": Call(torch._tensor._rebuild_from_type_v2, exec, dict, (command("wrapped"),), {}),
        "load": Call(torch.load, str(canaries / "absent")),
        "map": Call(list, Call(map, exec, [command("map")])),
    }


RAW_PROGRAMS = {
    "inst": b"(S'exit 0'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'exit 0'\no.",
    "global-text": b"cos\nsystem\n(S'exit 0'\ntR.",
    "stack-global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x06exit 0\x85R.",
    "dotted": b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c\x06exit 0\x85R.",
    "extension": b"\x80\x02\x82\x01.",
    "torch-internals": b"\x80\x02ctorch.serialization\nos.system\n(X\x06\x00\x00\x00exit 0tR.",
    "persistent": b"\x80\x02cos\nsystem\nQ.",
    "newobj": b"\x80\x02csubprocess\nPopen\n(X\x04\x00\x00\x00truet\x81.",
    "build": b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\x00\x00\x00__setstate__cos\nsystem\nsb.",
}


def code_files(canaries: Path) -> Iterator[tuple[str, bytes]]:
    for name, payload in payloads(canaries).items():
        yield f"code-{name}.pth", torch_bytes(payload)
        yield f"code-{name}-legacy.pth", torch_bytes(payload, legacy=True)
        yield f"code-{name}-plain.bin", pickle.dumps(payload)
        yield f"code-{name}-array.npz", object_npz(payload)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for member in ("storages", "tensors", "pickle"):
                info = tarfile.TarInfo(member)
                info.size = len(data := pickle.dumps(payload))
                tar.addfile(info, io.BytesIO(data))
        yield f"code-{name}-tar.pth", buffer.getvalue()
    for name, program in RAW_PROGRAMS.items():
        yield f"code-{name}.pt", with_pickle(program)
        yield f"code-{name}-legacy.pt", with_legacy_pickle(program)
        yield f"code-{name}-first.pt", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + program


def object_npz(payload: object) -> bytes:
    array = np.empty(1, dtype=object)
    array[0] = payload
    buffer = io.BytesIO()
    np.savez(buffer, w=np.ones(2), x=array)
    return buffer.getvalue()


# --- pickles that exhaust the reader ----------------------------------------------------------------------------------


def put(slot: int) -> bytes:
    return b"r" + struct.pack("<I", slot)


def get(slot: int) -> bytes:
    return b"j" + struct.pack("<I", slot)


def doubled(opening: bytes, join: bytes, levels: int = 60) -> bytes:
    """Each value holds the one before it twice."""
    program = b"\x80\x02" + opening + put(0)
    for level in range(levels):
        program += join % (get(level), get(level)) + put(level + 1)
    return program


def pickle_with_tensor(around: bytes) -> bytes:
    """`around` with an empty tensor in place of its %s."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\0tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02" + around % (
        b"ctorch._utils\n_rebuild_tensor_v2\n(%sK\0K\0\x85K\x01\x85\x89%stR" % (storage, hooks)
    )


def exhausting_pickles() -> Iterator[tuple[str, bytes]]:
    large = b"\x8a\x05" + (10**10).to_bytes(5, "little")
    deep = b"\x80\x02})" + b"\x85" * 1_000_000
    yield "deep-key", deep + b"Ns."
    yield "deep-padded", b"\x80\x02" + b"N" * 300_000 + b"})" + b"\x85" * 90_000 + b"Ns."
    yield "deep-hidden", b"\x80\x02" + b"N" * 300_000 + b"})" + b"\x85" * 3000 + b"Ns."  # cheap on average
    yield "double-key", doubled(b")", b"%s%s\x86") + b"}" + get(60) + b"Ns."
    yield "double-set", doubled(b")", b"%s%s\x86") + b"\x85" + b"c__builtin__\nset\n" + get(60) + b"\x85\x85R."
    yield "double-printed", doubled(b"]", b"](%s%se") + b")R."
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + get(60) + b"X\x03\x00\x00\x00cpuK\x01tQ."
    yield "double-storage", doubled(b")", b"%s%s\x86") + storage
    heavy = b"\x80\x02(" + b"N" * 100_000 + b"t" + put(0)
    filled_later = b"\x80\x02" + b"".join(b"]" + put(level) for level in range(61))
    filled_later += b"".join(get(level) + b"(" + 2 * get(level + 1) + b"e" for level in range(60))
    yield "filled-later-printed", filled_later + get(0) + b")R."
    yield "filled-later-new", filled_later + get(0) + b")\x81."
    yield (
        "filled-later-deep",
        b"".join(
            [b"\x80\x02", *(b"}" + put(level) for level in range(50_000))]
            + [get(level) + b"X\x05\0\0\0model" + get(level + 1) + b"s" for level in range(49_999)]
            + [get(0), b"."]
        ),
    )
    yield "heavy-keys", heavy + (b"}" + get(0) + b"Ns") * 100_000 + b"."
    yield "empty-sets", b"\x80\x02" + b"\x8f" * 390_000 + b"."
    yield "dicts", b"\x80\x02" + b"}" * 390_000 + b"."
    yield "too-many-dicts", b"\x80\x02" + b"}" * 8_000_000 + b"."
    yield "sets", b"\x80\x02c__builtin__\nset\n" + put(0) + (get(0) + b")R") * 130_000 + b"."
    yield (
        "ordered-dicts",
        b"\x80\x02ccollections\nOrderedDict\n" + put(0) + (get(0) + b")R") * 130_000 + b".",
    )
    yield "bytearray", b"\x80\x02cbuiltins\nbytearray\n" + large + b"\x85R."
    yield "tensor-class", b"\x80\x02ctorch\nTensor\n" + large + b"\x85R."
    yield "float-tensor", b"\x80\x02ctorch\nFloatTensor\n" + large + b"\x85R."
    yield "untyped-storage", b"\x80\x02ctorch.storage\nUntypedStorage\n" + large + b"\x85R."
    hexed = b"X\x02\x00\x00\x00abX\x06\x00\x00\x00latin1\x86R" + b"X\x03\x00\x00\x00hex\x86R" * 35
    yield "hex", b"\x80\x02" + b"c_codecs\nencode\n" * 36 + hexed + b"."
    yield "long-string", b"\x80\x02X\xff\xff\xff\xff" + b"a" * 100 + b"."
    yield "memo-index", b"\x80\x02Nr\xff\xff\xff\xff."
    yield "memo-missing", b"\x80\x02h\x07."
    yield "underflow", b"\x80\x02tR."
    yield "mark-as-value", b"\x80\x02((\x86."
    yield "no-stop", b"\x80\x02}"
    yield "many-marks", b"\x80\x02" + b"(" * 390_000 + b"."
    yield "surrogate-key", pickle.dumps({"\ud800": 1}, protocol=2)
    yield "recursive-list", b"\x80\x02]q\x00h\x00a."
    yield "recursive-dict", b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s."
    yield "recursive-weights", pickle_with_tensor(b"}q\x64X\x05\0\0\0modelh\x64sX\x01\0\0\0w%ss.")
    yield "recursive-tuple", b"\x80\x02]q\x00h\x00\x85q\x01a}h\x01Ns."


def forged_torch() -> Iterator[tuple[str, bytes]]:
    zipped, old = torch_bytes(GOOD), torch_bytes(GOOD, legacy=True)

    def changed(before: bytes, after: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(zipped)) as file:
            members = {name: file.read(name) for name in file.namelist()}
        assert before in members["archive/data.pkl"]
        members["archive/data.pkl"] = members["archive/data.pkl"].replace(before, after)
        return archive(members)

    yield "numel.pth", changed(b"K\x0ct", b"K\xc8t")
    yield "numel-huge.pth", changed(b"K\x0ct", b"\x8a\x06\x00\x00\x00\x00\x00\x10t")
    yield "size.pth", changed(b"K\x03K\x04\x86", b"K\xc8K\xc8\x86")
    yield "expanded.pth", torch_bytes({"w": torch.zeros(1).expand(10**12)})
    yield "windows.pth", torch_bytes({"w": torch.zeros(1000).unfold(0, 500, 1).expand(10**6, -1, -1)})
    yield "key-elsewhere.pth", changed(b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x009q")
    yield "offset.pth", changed(b"QK\x00K\x03K\x04", b"QK\xffK\x03K\x04")
    yield "negative.pth", changed(b"K\x03K\x04\x86", b"J\xff\xff\xff\xffK\x04\x86")
    yield "no-storage.pth", with_pickle(changed(b"cpu", b"cpu")[:0] + b"\x80\x02}.")
    yield "numel-legacy.pth", old.replace(b"K\x0cN", b"\x8a\x06\x00\x00\x00\x00\x00\x10N")
    yield "size-legacy.pth", old.replace(b"K\x03K\x04\x86", b"K\xc8K\xc8\x86")
    yield (
        "unfilled-grown.pth",
        old[: old.rindex(b"\x80\x02]")].replace(b"K\x03K\x04\x86", b"K\xc8K\xc8\x86") + b"\x80\x02].",
    )
    large = pickle_with_tensor(b"}X\x01\0\0\0w%ss.").replace(
        b"cpuK\0t", b"cpu\x8a\x04\x00\xc2\xeb\x0bNt"
    )  # 800 MB, unfilled
    yield "unfilled-large.pth", with_legacy_pickle(large)
    yield "sparse.pth", torch_bytes({"w": torch.eye(3).to_sparse()})
    yield "complex.pth", torch_bytes({"w": torch.ones(2, dtype=torch.complex64)})
    yield "meta.pth", torch_bytes({"w": torch.empty(10**12, device="meta")})
    yield "two-pickles.pth", archive({"archive/data.pkl": b"\x80\x02}.", "archive/DATA.PKL": b"cos\nsystem\n."})
    yield "elsewhere.pth", archive({"archive/x/data.pkl": b"\x80\x02}.", "archive/DATA.PKL": b"cos\nsystem\n."})
    yield "script.pth", archive({"archive/data.pkl": b"\x80\x02}.", "archive/constants.pkl": b"\x80\x02)."})
    yield (
        "deflated.pth",
        archive({"archive/data.pkl": b"\x80\x02}.", "archive/data/0": bytes(2**20)}, zipfile.ZIP_DEFLATED),
    )
    yield "byteorder.pth", archive({"archive/data.pkl": b"\x80\x02}.", "archive/byteorder": b"\xff" * 9})
    yield "alignment.pth", with_pickle(b"\x80\x02}.", **{".storage_alignment": b"x"})
    yield "version.pth", archive({"archive/data.pkl": b"\x80\x02}.", "archive/version": b"9" * 99})
    yield "a-list.pth", torch_bytes([torch.ones(3)])
    yield "a-number.pth", torch_bytes(5)
    yield "nothing.pth", torch_bytes({"epoch": 3})
    yield "nul-name.pth", torch_bytes({"a\0b": torch.ones(2)})


# --- npz --------------------------------------------------------------------------------------------------------------


def patched(data: bytes, offset: int, value: bytes) -> bytes:
    """`data` with other bytes at `offset` into the (only) entry of its central directory."""
    at = data.index(b"PK\1\2") + offset
    return data[:at] + value + data[at + len(value) :]


def bomb(size: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file, file.open("x.npy", "w") as member:
        member.write(npy("|u1", (size,), b""))
        for _ in range(size // 2**20):
            member.write(bytes(2**20))
    return buffer.getvalue()


def overlapping(count: int) -> bytes:
    """Every entry of the directory points to the same packed megabyte."""
    one = archive({"a.npy": npy("|u1", (2**20,), bytes(2**20))}, zipfile.ZIP_DEFLATED)
    start = one.index(b"PK\1\2")
    head = one[start : start + 28] + struct.pack("<H", 9) + one[start + 30 : start + 46]
    directory = b"".join(head + b"%05d.npy" % i for i in range(count))
    return one[:start] + directory + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), start, 0)


def listing(count: int) -> bytes:
    """A directory of tiny entries, all without data behind them."""
    head = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    directory = b"".join(head + b"%05x" % i for i in range(count))
    printed = min(count, 2**16 - 1)
    return b"PK\3\4" + directory + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, printed, printed, len(directory), 4, 0)


def hostile_npz() -> Iterator[tuple[str, bytes]]:
    yield "bomb", bomb(2**28)
    yield "forged-32-gib", archive({"x.npy": npy("<f8", (2**32,), b"")})
    yield "forged-data", archive({"x.npy": npy("<f8", (2**32,), bytes(64))})
    plain = archive({"x.npy": npy()})
    yield "claims-4-gib", patched(patched(plain, 20, b"\xf0\xff\xff\xff"), 24, b"\xf0\xff\xff\xff")
    yield "unpacks-to-4-gib", patched(patched(plain, 10, b"\x08\0"), 24, b"\xf0\xff\xff\xff")
    yield "encrypted", patched(plain, 8, b"\1\0")
    yield "method-lzma", patched(plain, 10, b"\x0e\0")
    yield "method-none", patched(plain, 10, b"\x63\0")
    yield "not-deflate", patched(plain, 10, b"\x08\0")
    yield "offset-outside", patched(plain, 42, b"\xff\xff\xff\x7f")
    yield "other-local-name", plain.replace(b"x.npy", b"y.npy", 1)
    yield "wrong-checksum", patched(plain, 16, b"\0\0\0\1")
    yield "overlapping", overlapping(2000)
    yield "listing", listing(40_000)
    yield "listing-long", listing(1_000_000)
    yield "nested", archive({"x.npy": npy(), "inner.npz": plain})
    yield "nested-as-array", archive({"x.npy": plain})
    yield "nul", archive({"x#y.npy": npy()}).replace(b"x#y", b"x\0y")
    yield "nul-hides", archive({"x.npy": npy(), "x.npy#z.npy": npy()}).replace(b"#", b"\0")
    yield "twice", archive({"x.npy": npy(), "y.npy": npy()}).replace(b"y.npy", b"x.npy")
    yield "comment", plain[:-2] + b"\4\0abcd"
    yield "end-twice", plain + plain[plain.index(b"PK\5\6") :]
    for name, descr in {
        "object": "|O",
        "text": "<U4",
        "bytes": "|S4",
        "void": "|V4",
        "date": "<M8[s]",
        "complex": "<c8",
    }.items():
        yield f"type-{name}", archive({"x.npy": npy(descr)})
    for name, descr in {"record": [("a", "<f4")], "number": 4, "none": None, "empty": "", "long": "<f4" * 99}.items():
        yield f"type-{name}", archive({"x.npy": npy(descr)})
    shapes = ("(-3,)", "(True, 3)", "3", "(3.0,)", "('3',)", "((3,),)", f"({2**62}, {2**62})", f"(0, {2**62})")
    for number, shape in enumerate((*shapes, f"({'1, ' * 65}3)", f"(0, {'2147483648, ' * 8})", "None", "{3}")):
        yield f"shape-{number}", archive({"x.npy": npy(shape=shape)})
    headers = {
        "call": "__import__('os').system('exit 0')",
        "names": "{'descr': f4, 'fortran_order': False, 'shape': (3,)}",
        "parentheses": "(" * 5000,
        "brackets": "[" * 9000 + "]" * 9000,
        "minus": "-" * 9000 + "1",
        "digits": "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 9000 + ",)}",
        "missing": "{'descr': '<f4'}",
        "list": "[1, 2]",
        "text": "'descr'",
        "unhashable": "{[]: 1}",
        "nothing": " ",
        "escape": "{'descr': '\\N{BULLET}', 'fortran_order': False, 'shape': (3,)}",
        "long": " " * 60_000,
        "if": "1if 1else{'descr': '<f4'}",
    }
    for name, header in headers.items():
        yield f"header-{name}", archive({"x.npy": npy(header=header)})
    for name, data in {
        "empty": b"",
        "short": b"\x93NUM",
        "version": b"\x93NUMPY\4\0" + bytes(99),
        "text": b"hello",
    }.items():
        yield f"npy-{name}", archive({"x.npy": data})
    yield "npy-header-length", archive({"x.npy": b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(99)})
    yield "many-headers", archive({f"{i}.npy": npy(header=" " * 9000) for i in range(300)}, zipfile.ZIP_DEFLATED)


# --- safetensors ------------------------------------------------------------------------------------------------------


def hostile_safetensors() -> Iterator[tuple[str, bytes]]:
    whole = bytes(12)
    yield "past-end", safetensors({"x": entry()}, whole, length=10**6)
    yield "length-nan", safetensors({"x": entry()}, whole, length=2**64 - 1)
    yield "length-tebi", safetensors({"x": entry()}, whole, length=2**39)
    yield "length-zero", safetensors({"x": entry()}, whole, length=0)
    yield "overlap", safetensors({"x": entry(), "y": entry()}, whole)
    yield "overlap-partly", safetensors({"x": entry(), "y": entry(begin=8, end=20)}, bytes(20))
    yield "hole", safetensors({"x": entry(), "y": entry(begin=16, end=28)}, bytes(28))
    yield "hole-first", safetensors({"x": entry(begin=4, end=16)}, bytes(16))
    yield "trailing", safetensors({"x": entry()}, whole + b"x")
    yield "short", safetensors({"x": entry()}, whole[:-1])
    yield "overflow", safetensors({"x": entry(shape=(2**32, 2**32), end=2**64)}, whole)
    yield "overflow-shape", safetensors({"x": entry(shape=(2**62, 4, 3), end=12)}, whole)
    yield "zero-overflow", safetensors({"x": entry(shape=(0, 2**62), end=0)})
    yield "backwards", safetensors({"x": entry(begin=12, end=0)}, whole)
    yield "twice", safetensors(b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), whole)
    yield "field-twice", safetensors(b'{"x":{"dtype":"F32","dtype":"F32","shape":[3],"data_offsets":[0,12]}}', whole)
    odd: list[object] = [-1, 1.5, 12.0, True, None, "12", [], {}, float("nan"), float("inf"), 10**400]
    for number, value in enumerate(odd):
        yield f"shape-{number}", safetensors({"x": entry(shape=[value])}, whole)
        yield f"begin-{number}", safetensors({"x": entry(begin=value)}, whole)
        yield f"end-{number}", safetensors({"x": entry(end=value)}, whole) if value != 12 or value is True else b"{"
        yield f"dtype-{number}", safetensors({"x": entry(dtype=value)}, whole)
        yield f"entry-{number}", safetensors({"x": value}, whole)
        yield (
            f"metadata-{number}",
            safetensors({"__metadata__": value if value != {} else {"a": 1}, "x": entry()}, whole),
        )
    yield "dtype-unknown", safetensors({"x": entry(dtype="F99")}, whole)
    yield "deep", safetensors(b'{"x":' + b"[" * 10**6)
    yield "deep-metadata", safetensors(b'{"__metadata__":' + b'{"a":' * 10**5)
    yield "digits", safetensors(b'{"x":' + b"9" * 10**6 + b"}")
    yield "many", safetensors({f"{i:x}": entry(shape=(0,), end=0) for i in range(30_000)}, b"x")
    yield "long-shape", safetensors({"x": entry(shape=[1] * 10**6)}, whole)
    yield "too-long", safetensors(b"{" + b" " * (3 * 2**20))
    yield "utf-16", safetensors("{}".encode("utf-16-le"))
    yield "latin-1", safetensors(b'{"\xe9":' + json.dumps(entry()).encode() + b"}", whole)
    yield "surrogate", safetensors(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", whole)
    yield "nul", safetensors({"a\0b": entry()}, whole)
    yield "cut-json", safetensors(b'{"x":')
    yield "two-values", safetensors(b"{}{}")


# --- other files, and damage ------------------------------------------------------------------------------------------

OTHERS = {
    "empty": b"",
    "one-byte": b"P",
    "page.npz": b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "page-late.pth": b"\n\n  <HTML>404</HTML>",
    "pointer.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "keras.h5": b"\x89HDF\r\n\x1a\n" + bytes(99),
    "gzip.npz": b"\x1f\x8b\x08\0" + bytes(99),
    "array.npy": npy(),
    "model.onnx": b"\x08\x07\x12\x07pytorch" + bytes(99),
    "saved_model.pb": b"\x08\x01\x12\x99" + bytes(99),
    "lite.bin": b"\x1c\0\0\0TFL3" + bytes(99),
    "flax.msgpack": b"\x81\xa6params\x80",
    "model.gguf": b"GGUF\3\0\0\0" + bytes(99),
    "config.json": b'{"architectures": ["ViT"]}',
    "zip-of-text.npz": archive({"readme.txt": b"hello"}),
    "empty-zip.npz": b"PK\5\6" + bytes(18),
    "zeros.bin": bytes(4096),
    "ones.bin": b"\xff" * 4096,
    "text.bin": b"hello, these are my weights",
}


def damaged() -> Iterator[tuple[str, bytes]]:
    """Twelve lengths and twelve flipped bits of a good file of each kind."""
    arrays = {name: tensor.float().numpy() for name, tensor in GOOD.items()}
    plain, packed = io.BytesIO(), io.BytesIO()
    np.savez(plain, **arrays)
    np.savez_compressed(packed, **arrays)
    good = {"npz": plain.getvalue(), "packed.npz": packed.getvalue(), "pth": torch_bytes(GOOD)}
    for kind, data in good.items():
        for number in range(12):
            at = len(data) * (number + 1) // 14
            yield f"cut-{number}.{kind}", data[:at]
            yield f"flip-{number}.{kind}", data[:at] + bytes([data[at] ^ 1 << number % 8]) + data[at + 1 :]


SOAK = os.environ.get("VITLAB_SOAK") == "1"
SLOW_COUSINS = {"ordered-dicts", "deep-padded"}  # of "sets" and "deep-hidden", at half a second and more each


def make_corpus(folder: Path, canaries: Path) -> None:
    def files() -> Iterator[tuple[str, bytes]]:
        yield from code_files(canaries)
        for name, program in exhausting_pickles():
            if name in SLOW_COUSINS and not SOAK:
                continue
            yield f"pickle-{name}.pth", with_pickle(program, **{"data/0": b""})
            if len(program) < 10_000:  # of the slow ones, one form is enough
                yield f"pickle-{name}-legacy.pth", with_legacy_pickle(program)
        yield from ((f"forged-{name}", data) for name, data in forged_torch())
        yield from ((f"{name}.npz", data) for name, data in hostile_npz())
        yield from ((f"{name}.safetensors", data) for name, data in hostile_safetensors())
        yield from OTHERS.items()
        yield from damaged()

    for name, data in files():
        path = folder / name
        assert not path.exists(), name
        path.write_bytes(data)
    with (folder / "header-over-100-mb.safetensors").open("wb") as file:  # a hole on disk, no bytes
        file.write(struct.pack("<Q", 110 * 10**6) + b"{")
        file.truncate(120 * 10**6)


# --- reading them, in a process that may be lost ----------------------------------------------------------------------

WATCHED = ("os.", "subprocess.", "pickle.", "socket.", "shutil.", "ctypes.", "webbrowser.", "pty.", "code.")


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(folder: Path, canaries: Path) -> None:
    from vitlab.weights.containers import npz_chunks, read_arrays, safetensors_chunks

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    good = folder.parent / "good"
    written = (b"".join(write(GOOD)) for write in (npz_chunks, safetensors_chunks))
    for data in (torch_bytes(GOOD), torch_bytes(GOOD, legacy=True), *written):
        good.write_bytes(data)
        assert read_arrays(good).arrays.keys() == {"b.weight", "b.bias"}  # and everything that is imported late, is
    make_corpus(folder, canaries)
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + GIB, resource.RLIM_INFINITY))

    events: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        runs_text = event == "exec" and arguments[0].co_filename == "<string>"
        if event.startswith(WATCHED) or writes or runs_text:
            events.append(f"{event} {arguments!r:.80}")

    sys.addaudithook(watch)
    results: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        watching = False
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is used now
        before, started = status("VmRSS"), time.process_time()
        watching = True
        try:
            error = repr(sorted(read_arrays(path).arrays))
            kind = "read"
        except Exception as problem:
            kind, error = type(problem).__name__, str(problem)
        watching = False
        peak = status("VmHWM") - before
        seconds = time.process_time() - started
        results[path.name] = {
            "kind": kind,
            "text": error,
            "seconds": seconds,
            "peak": peak,
            "size": path.stat().st_size,
        }

    left = sorted(path.name for path in canaries.iterdir())
    for name in payloads(canaries):  # what was refused above is live: asked to, the same files do run
        for form in ("", "-legacy"):
            with contextlib.suppress(Exception):
                read_arrays(folder / f"code-{name}{form}.pth", trust_pickle=True)
    ran = sorted(path.name for path in canaries.iterdir())
    print(json.dumps({"results": results, "events": events, "canaries": left, "trusted": ran}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
