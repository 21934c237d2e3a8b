"""Some 1,500 damaged weight files per format, a million with VITLAB_SOAK=1: an answer that others agree with, or one error.

The damage knows the formats: inside archives it is done before the checksums are made, so that it reaches what lies behind.
"""

import contextlib
import io
import random
import time
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.torch
import torch
from fuzzing import SEED, assert_some, damaged, draws
from slow_cases import slow_after
from torch import Tensor

from vitlab.core.errors import FileProblem
from vitlab.weights.containers import ArrayFile, npz_chunks, parse_arrays, safetensors_chunks

NUMBERS = draws(1_500, 1_000_000)
SLOWEST = 2.0  # seconds of this process's own time for one input

ARRAYS = {
    "embedding/kernel": torch.arange(24.0).reshape(2, 3, 4),
    "cls": torch.ones(1, 1, 3, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3, dtype=torch.float16),
}
WORDS = [
    *(
        b"\x00",
        b"\xff",
        b"{",
        b"}",
        b"(",
        b")",
        b"[",
        b"]",
        b"'",
        b'"',
        b",",
        b":",
        b"-",
        b"9",
        b"e99",
        b"null",
        b"NaN",
        b"\\",
    ),
    *(
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"\x93NUMPY",
        b"|O",
        b">f8",
        b"|V2",
        b"True",
        b"F64",
        b"BF16",
        b"U8",
    ),
    *(
        b"\x80\x02",
        b"\x80\x04",
        b".",
        b"R",
        b"Q",
        b"b",
        b"t",
        b"\x85",
        b"\x86",
        b"0",
        b"2",
        b"a",
        b"e",
        b"s",
        b"u",
        b"h\x00",
    ),
    *(
        b"q\x01",
        b"cos\nsystem\n",
        b"ctorch\nSize\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
    ),
    *(
        b"\x8a\x08" + b"\x7f" * 8,
        b"J\xff\xff\xff\xff",
        b"X\xff\xff\xff\x7f",
        b"]",
        b"}",
        b"\x81",
        b"\x93",
        b"N",
        b"K\xff",
    ),
]


def torch_bytes(value: object, *, legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def packed_npz() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, a=np.zeros((30, 40)), b=np.asfortranarray(np.ones((2, 3), np.float32)), c=np.arange(3))
    return buffer.getvalue()


CHECKPOINT = {"epoch": 3, "state_dict": ARRAYS, "names": ["a", ("b", 1.5)], "turned": ARRAYS["embedding/kernel"].mT}
SEEDS = {
    "npz": [b"".join(npz_chunks(ARRAYS)), packed_npz()],
    "safetensors": [b"".join(safetensors_chunks(ARRAYS, {"format": "pt"})), safetensors.torch.save(ARRAYS)],
    "torch": [torch_bytes(ARRAYS, legacy=False), torch_bytes(CHECKPOINT, legacy=False)],
    "torch-legacy": [torch_bytes(ARRAYS, legacy=True), torch_bytes(CHECKPOINT, legacy=True)],
}


def mutate(data: bytes, draw: random.Random) -> bytes:
    return damaged(data, draw, WORDS)


def draw_file(kind: str, draw: random.Random) -> bytes:
    """One of the files of that kind, damaged as a whole or inside."""
    seed = draw.choice(SEEDS[kind])
    inside = seed.startswith(b"PK") and draw.random() < 0.6
    return (mutate_member if inside else mutate)(seed, draw)


def mutate_member(data: bytes, draw: random.Random) -> bytes:
    """A change to one member of a zip archive, whose checksums and sizes then fit again."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
        method = old.infolist()[0].compress_type
    pickles = [name for name in members if name.endswith("data.pkl")]
    name = pickles[0] if pickles and draw.random() < 0.8 else draw.choice(list(members))
    members[name] = mutate(members[name], draw)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as new:
        for name, content in members.items():
            new.writestr(zipfile.ZipInfo(name), content, compress_type=method)
    return buffer.getvalue()


def same(tensor: Tensor, other: Tensor) -> bool:
    def raw(x: Tensor) -> bytes:
        return bytes(x.contiguous().reshape(-1).view(torch.uint8).numpy())

    return (tensor.dtype, tensor.shape, raw(tensor)) == (other.dtype, other.shape, raw(other))


def agrees_with_numpy(data: bytes, found: ArrayFile) -> None:
    with np.load(io.BytesIO(data)) as file:
        assert [found.prefix + key for key in found.arrays] == list(file)
        for key, tensor in found.arrays.items():
            array = file[found.prefix + key]
            assert tuple(tensor.shape) == array.shape
            kept = array.astype(array.dtype.newbyteorder("<")) if array.dtype.kind != "V" else array
            assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == kept.tobytes()


def agrees_with_safetensors(data: bytes, found: ArrayFile) -> None:
    theirs = safetensors.torch.load(data)
    assert {found.prefix + key for key in found.arrays} == theirs.keys()
    assert all(same(tensor, theirs[found.prefix + key]) for key, tensor in found.arrays.items())


def is_plain(_data: bytes, found: ArrayFile) -> None:
    for tensor in found.arrays.values():
        assert type(tensor) is Tensor
        assert tensor.is_contiguous()
        assert len(bytes(tensor.reshape(-1).view(torch.uint8).numpy())) == tensor.nbytes  # every byte can be touched


JUDGES: dict[str, Callable[[bytes, ArrayFile], None]] = {
    "npz": agrees_with_numpy,
    "safetensors": agrees_with_safetensors,
    "torch": is_plain,
    "torch-legacy": is_plain,
}


def answer(data: bytes) -> ArrayFile | None:
    try:
        return parse_arrays(data, "file")
    except FileProblem:
        return None


@pytest.mark.parametrize("kind", slow_after(3, SEEDS))
def test_damaged_file_is_read_as_others_read_it_or_refused(kind: str, least_seconds: Callable[..., float]) -> None:
    read = 0
    for number in NUMBERS:
        data = draw_file(kind, random.Random(f"{kind} {SEED} {number}"))
        started = time.process_time()
        try:
            found = answer(data)
        except BaseException as error:
            raise AssertionError(
                f"{kind}, seed {SEED}, number {number}: {type(error).__name__} for {data!r}"
            ) from error
        if time.process_time() - started > SLOWEST:  # the input's own fault?
            assert least_seconds(parse_arrays, data, "file") < SLOWEST, data
        if found is not None:
            read += 1
            JUDGES[kind](data, found)
    assert_some(read, len(NUMBERS))


@pytest.mark.parametrize("kind", SEEDS)
def test_seed_itself_is_read(kind: str) -> None:
    for seed in SEEDS[kind]:
        JUDGES[kind](seed, parse_arrays(seed, "file"))


def test_any_bytes_are_refused_or_read() -> None:
    draw = random.Random(0)
    starts = [b"", b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x10\x00\x00\x00\x00\x00\x00\x00{"]
    for _ in NUMBERS:
        with contextlib.suppress(FileProblem):
            parse_arrays(draw.choice(starts) + draw.randbytes(draw.choice((0, 1, 10, 100, 1000))), "file")
