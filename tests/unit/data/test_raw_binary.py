"""Binary tables against writers of others where there are any (SciPy for MATLAB's), and against damage."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from vitlab.core.errors import FileProblem
from vitlab.data.sources.raw.binary import idx_header, idx_labels, mat_arrays, norb_matrix, tfrecord_examples

RNG = np.random.default_rng(0)


def mat_bytes(compressed: bool, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, arrays, do_compression=compressed)
    return buffer.getvalue()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "f4", "f8", "i8"])
def test_numeric_arrays_of_matlab_files(compressed: bool, dtype: str) -> None:
    x, y = RNG.integers(0, 99, (4, 3, 2, 5)).astype(dtype), RNG.integers(0, 9, (1, 7)).astype(dtype)
    found = mat_arrays(mat_bytes(compressed, X=x, y=y, text="passed over", table={"a": 1}), "f.mat")
    assert sorted(found) == ["X", "y"]
    assert np.array_equal(found["X"], x) and np.array_equal(found["y"], y)


def test_damaged_matlab_files_are_named() -> None:
    whole = mat_bytes(True, X=RNG.integers(0, 99, (30, 30)))
    with pytest.raises(FileProblem, match=r"f\.mat is not a MATLAB v5 file"):
        mat_arrays(b"MATLAB 7.3", "f.mat")
    for at in range(128, len(whole), 5):
        for data in (whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]):
            try:
                mat_arrays(data, "f.mat")
            except FileProblem as error:
                assert "f.mat" in error.what


def test_idx_files() -> None:
    header = bytes((0, 0, 8, 3)) + np.array([5, 4, 3], ">u4").tobytes()
    assert idx_header(header, "x", 3) == ((5, 4, 3), 16)
    labels = bytes((0, 0, 8, 1)) + np.array([3], ">u4").tobytes() + b"\1\2\3"
    assert idx_labels(labels, "x") == [1, 2, 3]
    for wrong in (labels[:-1], labels + b"\0", labels[:6], b"\0\0\x0d\1" + labels[4:], header):
        with pytest.raises(FileProblem, match=r"^x "):
            idx_labels(wrong, "x")


def norb_bytes(array: np.ndarray[Any, Any]) -> bytes:
    magic = {"uint8": 507333717, "int32": 507333716}[str(array.dtype)]
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return np.array([magic, array.ndim, *sizes], "<i4").tobytes() + array.tobytes()


def test_norb_matrices() -> None:
    for array in (RNG.integers(0, 255, (3, 2, 4, 4)).astype(np.uint8), np.arange(8, dtype=np.int32).reshape(2, 4)):
        assert np.array_equal(norb_matrix(norb_bytes(array), "x"), array)
        for wrong in (norb_bytes(array)[:-1], b"\0" * 40, norb_bytes(array)[:9], b"\0" + norb_bytes(array)[1:]):
            with pytest.raises(FileProblem, match=r"^x is"):
                norb_matrix(wrong, "x")


def varint(value: int) -> bytes:
    rest, low = value >> 7, value & 127
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(features: dict[str, bytes | int]) -> bytes:
    entries = b""
    for name, value in features.items():
        kind = field(1, field(1, value)) if isinstance(value, bytes) else field(3, field(1, varint(value)))
        entries += field(1, field(1, name.encode()) + field(2, kind))
    body = field(1, entries)
    return len(body).to_bytes(8, "little") + b"crc!" + body + b"crc!"


def test_tfrecords_give_the_offset_of_the_image(tmp_path: Path) -> None:
    images = [bytes(RNG.integers(0, 255, size).astype(np.uint8)) for size in (3, 300, 70_000)]
    rows = [{"label": i, "image": image, "filename": b"f%d" % i} for i, image in enumerate(images)]
    data = b"before" + b"".join(record(row) for row in rows) + b"after"
    (tmp_path / "r").write_bytes(data)
    found = list(tfrecord_examples(tmp_path / "r", 6, len(data) - 11))
    assert [example.features for example in found] == [{"label": i, "filename": b"f%d" % i} for i in range(3)]
    assert [data[start : start + size] for _, start, size in found] == images


def test_tfrecords_that_break_off_or_are_none(tmp_path: Path) -> None:
    whole = record({"label": 5, "image": b"x" * 20})
    for data in (whole[:-1], whole[:10], b"\xff" * 40, whole[:14] + b"\xff" * 12 + whole[26:]):
        (tmp_path / "r").write_bytes(data)
        with pytest.raises(FileProblem, match=r"r (is not a complete TFRecord|holds something other)"):
            list(tfrecord_examples(tmp_path / "r", 0, len(data)))
