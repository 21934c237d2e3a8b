"""Packed archives: made here, hostile variants of them, and the real ones where they lie."""

import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import slow_after

from vitlab.core.errors import FileProblem
from vitlab.data.decode import decode
from vitlab.data.sources.packed import open_packed

IMAGES = [b"first", b"second image", b"3"]
DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))


def arrays(**changes: Any) -> dict[str, Any]:
    return {
        "data": np.frombuffer(b"".join(IMAGES), np.uint8),
        "offsets": np.cumsum([0, *map(len, IMAGES)]),
        "labels": np.array([1, 0, 1], np.int16),
        "names": np.array(["a.png", "b.png", "ü.png"]),
        "classes": np.array(["cat", "dog"]),
        **changes,
    }


def packed(folder: Path, name: str = "set.npz", **changes: Any) -> Path:
    kept = {key: value for key, value in arrays(**changes).items() if value is not None}
    np.savez_compressed(folder / name, **kept)
    return folder / name


def test_images_labels_names_and_classes_come_back_also_in_another_process(tmp_path: Path) -> None:
    opened = open_packed({"train": packed(tmp_path), "test": packed(tmp_path, "other.npz")})
    train = pickle.loads(pickle.dumps(opened.part("train")))
    assert [train.read(i) for i in range(3)] == IMAGES
    assert train.labels.single().tolist() == [1, 0, 1]
    assert (train.classes, train.keys) == (("cat", "dog"), ["a.png", "b.png", "ü.png"])
    assert list(opened.parts) == ["train", "test"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": np.array([1, 0, 2])}, "outside its 2 classes"),
        ({"labels": np.array([1, 0, -1])}, "outside its 2 classes"),
        ({"labels": np.array([1, 0])}, "2 labels and 3 names do not fit 4 offsets"),
        ({"offsets": np.array([0, 5, 4, 18])}, "offsets do not cut"),
        ({"offsets": np.array([0, 5, 17, 99])}, "offsets do not cut"),
        ({"offsets": np.array([0.0, 5, 17, 18])}, "offsets is float64"),
        ({"names": np.array([b"a", b"b", b"c"], object)}, "names is not an array of numbers or texts"),
        ({"classes": None}, "not a packed image set"),
        ({"data": None}, "not a packed image set"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FileProblem, match=reason) as caught:
        open_packed({"train": packed(tmp_path, **changes)})
    assert "set.npz" in caught.value.what and "\n" not in caught.value.what


def test_archive_of_other_arrays_is_refused_with_what_it_holds_and_what_is_expected(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", images=np.zeros((2, 28, 28, 3), np.uint8), y=np.zeros(2, np.int64))
    with pytest.raises(FileProblem) as caught:
        open_packed({"all": tmp_path / "mine.npz"})
    assert "it holds images, y, and lacks classes, data, labels, names, offsets" in caught.value.what
    assert "from_arrays" in str(caught.value.hint) and "Fetch it again" not in str(caught.value)


@pytest.mark.parametrize("start", slow_after(1, range(4)))
def test_d20_an_archive_with_any_byte_changed_is_the_same_or_refused(tmp_path: Path, start: int) -> None:
    """Every byte, in four turns."""
    whole = packed(tmp_path).read_bytes()
    refused, places = 0, range(start, len(whole), 4)
    for at in places:
        path = tmp_path / f"{at}.npz"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            train = open_packed({"train": path}).part("train")
            assert [train.read(i) for i in range(len(train))] == IMAGES
            assert (train.labels.single().tolist(), train.classes) == ([1, 0, 1], ("cat", "dog"))
            assert train.keys == ["a.png", "b.png", "ü.png"]
        except FileProblem as error:
            refused += 1
            assert path.name in error.what
    assert refused > len(places) / 2, "times and remarks in a zip may change and mean nothing"


def test_cut_files_other_files_and_other_classes(tmp_path: Path) -> None:
    whole = packed(tmp_path).read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "cut.npz").write_bytes(whole[:size])
        with pytest.raises(FileProblem, match=r"cut\.npz"):
            open_packed({"train": tmp_path / "cut.npz"})
    with pytest.raises(FileProblem, match="does not exist"):
        open_packed({"train": tmp_path / "none.npz"})
    other = packed(tmp_path, "other.npz", classes=np.array(["dog", "cat"]))
    with pytest.raises(FileProblem, match=r"other\.npz has other classes than .*set\.npz"):
        open_packed({"train": tmp_path / "set.npz", "test": other})


@pytest.mark.skipif(not (DATA / "cifar10").is_dir(), reason="needs the packed sets in VITLAB_DATA")
def test_real_archives_have_their_official_counts() -> None:
    cifar = open_packed({part: DATA / "cifar10" / f"cifar10_{part}.npz" for part in ("train", "test")})
    assert {part: len(of) for part, of in cifar.parts.items()} == {"train": 50_000, "test": 10_000}
    assert cifar.part("train").labels.counts(10).tolist() == [5000] * 10
    assert cifar.classes[:2] == ("airplane", "automobile")
    assert decode(cifar.part("test").read(9_999), "RGB").shape == (3, 32, 32)


@pytest.mark.parametrize(
    "header",
    [
        *(
            f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({n},), }}"
            for n in ("2**62", "-3", "9" * 30, "a.b", "4L")
        ),
        *(f"{{'descr': {t}, 'fortran_order': False, 'shape': (4,), }}" for t in ("'<U999999999'", "'|O'", "1.5", "''")),
        *(
            "((" * 40,
            "{'descr': '<i8'",
            "'a'.b",
            "\\",
            "f''",
        ),
    ],
)
def test_headers_that_numpy_stumbles_over_are_refused_without_its_words(tmp_path: Path, header: str) -> None:
    members = {f"{name}.npy": npy(array) for name, array in arrays().items()}
    text = header.encode() + b"\n"
    members["offsets.npy"] = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(32)
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(FileProblem, match=r"set\.npz") as caught:
        open_packed({"train": tmp_path / "set.npz"})
    assert not re.search("ast|malformed|Error|node", str(caught.value))


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_names_that_are_not_text_are_refused(tmp_path: Path) -> None:
    names = np.frombuffer(np.array([0xD800, 65, 66], np.uint32).tobytes(), "<U1")
    with pytest.raises(FileProblem, match="a name in it is not text"):
        open_packed({"train": packed(tmp_path, names=names)})


@pytest.mark.slow
def test_arrays_that_unpack_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"would unpack names to 100,000,\d+ bytes"):
        open_packed({"train": packed(tmp_path, names=np.zeros(25_000_000, "<U1"))})
