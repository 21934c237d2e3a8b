"""Arrays of pixels in `.npz` and `.npy` files, and hostile variants of them."""

import io
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.core.errors import FileProblem
from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 6, 3), np.uint8)  # no two sides alike
LABELS = np.array([3, 1, 1, 3, 7, 7, 1])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(path: Path, how: str, **arrays: Any) -> Path:
    """As `np.savez` does, compressed or not, or as files of a folder."""
    if how == "npy":
        path.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
        return path
    path = path.with_suffix(".npz")
    (np.savez_compressed if how == "compressed" else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize("how", ["stored", "compressed", "npy"])
@pytest.mark.parametrize("channels", [None, 1, 3, 5])
def test_images_and_labels(tmp_path: Path, how: str, channels: int | None) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (7, 5, 6, *([] if channels is None else [channels])), np.uint8)
    data = open_data(save(tmp_path / "set", how, images=pixels, labels=LABELS)).parts["all"]
    data = pickle.loads(pickle.dumps(data))  # as worker processes get it
    assert data.classes == ("1", "3", "7")
    assert data.labels.single().tolist() == [1, 0, 0, 1, 2, 2, 0]
    for i in range(7):
        assert np.array_equal(data.read(i), pixels[i] if pixels.ndim == 4 else pixels[i][:, :, None])


@pytest.mark.parametrize("shape", [(7, 3, 20, 3), (7, 3, 20, 4), (7, 3, 4, 20), (7, 2, 20, 20)])
def test_few_rows_alone_are_not_taken_for_channels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = open_data(save(tmp_path / "set", "stored", images=np.zeros(shape, np.uint8), labels=LABELS)).parts["all"]
    assert np.asarray(data.read(0)).shape == shape[1:]


@pytest.mark.parametrize("how", ["stored", "compressed", "npy"])
def test_parts_as_medmnist_has_them(tmp_path: Path, how: str) -> None:
    arrays = {f"{part}_images": PIXELS[:n] for part, n in {"train": 7, "val": 2, "test": 3}.items()}
    arrays |= {
        f"{part}_labels": np.arange(n, dtype=np.uint8)[:, None] % 2
        for part, n in {"train": 7, "val": 2, "test": 3}.items()
    }
    opened = open_data(save(tmp_path / "set", how, **arrays))
    assert {name: len(part) for name, part in opened.parts.items()} == {"train": 7, "val": 2, "test": 3}
    assert opened.classes == ("0", "1")
    assert np.array_equal(opened.parts["test"].read(2), PIXELS[2])
    assert read(opened.parts["val"].read(1), Preprocess(image_size=(8, 8))).shape == (3, 8, 8)


def test_npy_beside_its_labels(tmp_path: Path) -> None:
    folder = save(tmp_path / "set", "npy", images=PIXELS, labels=LABELS)
    assert len(open_data(folder / "images.npy").parts["all"]) == 7


def test_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Lists of ImageNet's names have the crane twice."""
    path = tmp_path / "a.npz"
    names = np.array(["crane", "bee", "crane"])
    np.savez(path, images=np.zeros((3, 4, 4), np.uint8), labels=np.array([2, 0, 1]), classes=names)
    dataset = open_data(path).parts["all"]
    assert dataset.classes == ("crane (0)", "bee", "crane (2)") and dataset.labels.single().tolist() == [2, 0, 1]


@pytest.mark.parametrize("name", ["classes", "label_names"])
def test_classes_have_names(tmp_path: Path, name: str) -> None:
    names = np.array(["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"])
    data = open_data(save(tmp_path / "set", "stored", images=PIXELS, labels=LABELS, **{name: names})).parts["all"]
    assert [data.classes[int(label)] for label in data.labels.single()] == [
        "dog",
        "bee",
        "bee",
        "dog",
        "hen",
        "hen",
        "bee",
    ]


def test_labels_may_be_texts_or_several(tmp_path: Path) -> None:
    texts = np.array(["dog", "cat", "cat", "dog", "ant", "ant", "cat"])
    data = open_data(save(tmp_path / "texts", "stored", images=PIXELS, labels=texts)).parts["all"]
    assert (data.classes, data.labels.single().tolist()) == (("ant", "cat", "dog"), [2, 1, 1, 2, 0, 0, 1])
    rows = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0], [0, 1, 1]])
    data = open_data(save(tmp_path / "rows", "stored", images=PIXELS, labels=rows)).parts["all"]
    assert data.labels.multi and [data.labels[i] for i in range(4)] == [(0, 2), (), (1,), (0, 1, 2)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"images": PIXELS.astype(np.float32)}, r"images(\.npy)? is float32 .* not images"),
        ({"images": np.asfortranarray(PIXELS)}, "column by column"),
        ({"images": PIXELS[0, 0]}, r"uint8 \[6, 3\], not images"),
        ({"images": np.zeros((7, 3, 20, 20), np.uint8)}, "looks like .images, channels, rows, columns"),
        ({"images": PIXELS[:6]}, "6 images do not fit 7 labels"),
        ({"labels": None}, "has images but no labels"),
        ({"labels": LABELS / 2}, "labels is float64"),
        ({"labels": np.array([{}] * 7)}, r"labels(\.npy)? is not an array of numbers or texts"),
        ({"images": np.array([{}] * 7)}, r"images(\.npy)? is object"),
        ({"classes": np.array(["a", "b"])}, "the label 3 is outside its 2 classes"),
        ({"classes": np.arange(8)}, "classes is int64"),
        ({"train_images": PIXELS, "train_labels": LABELS}, "`images` as well as images of parts"),
        (
            {"images": None, "val_images": PIXELS, "val_labels": LABELS, "valid_images": PIXELS, "valid_labels": LABELS},
            "has two arrays for val: val_images and valid_images",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["compressed", "npy"])
def test_what_does_not_fit_is_refused_in_one_sentence(
    tmp_path: Path, how: str, changes: dict[str, Any], reason: str
) -> None:
    arrays = {"images": PIXELS, "labels": LABELS, **changes}
    path = save(tmp_path / "set", how, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(FileProblem, match=reason) as reported:
        open_data(path)
    assert "set" in reported.value.what and "\n" not in reported.value.what


def test_a_pickle_inside_is_never_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path(tmp_path / "sprung").touch, ()

    path = save(tmp_path / "set", "stored", images=PIXELS, labels=np.array([Trap()] * 7, object))
    with pytest.raises(FileProblem):
        open_data(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_forged_shape_takes_no_memory(tmp_path: Path, method: int) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (2**20, 2**10, 2**10, 3)}
    )
    labels = io.BytesIO()
    np.save(labels, LABELS)
    with zipfile.ZipFile(tmp_path / "set.npz", "w", method) as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(1000))
        archive.writestr("labels.npy", labels.getvalue())
    tracemalloc.start()
    with pytest.raises(FileProblem, match="does not match its shape"):
        open_data(tmp_path / "set.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.slow
def test_large_array_is_expanded_in_little_memory_and_once(tmp_path: Path, cache: Path) -> None:
    path = save(
        tmp_path / "set", "compressed", images=np.zeros((300, 256, 256, 3), np.uint8), labels=np.arange(300) % 2
    )
    assert path.stat().st_size < 1_000_000
    tracemalloc.start()
    data = open_data(path).parts["all"]
    assert not data.read(299).any()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000, "the array has 59 MB"
    (expanded,) = cache.rglob("images.npy")
    written = expanded.stat().st_mtime_ns
    open_data(path)
    assert expanded.stat().st_mtime_ns == written


def test_changed_byte_is_the_same_or_an_error_of_ours(tmp_path: Path) -> None:
    whole = save(tmp_path / "set", "compressed", images=PIXELS[:, :2, :2], labels=LABELS).read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        (tmp_path / f"{at}.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            for dataset in open_data(tmp_path / f"{at}.npz").parts.values():
                dataset.read(0)
        except FileProblem:
            refused += 1
    assert refused > len(whole) // 10
