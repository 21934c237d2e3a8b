"""Tiny copies of the sets that come as pixels in binary files, made here in their published forms."""

import gzip
import io
import itertools
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from vitlab.core.errors import FileProblem, MissingExtra
from vitlab.data.dataset import Dataset
from vitlab.data.sources.raw import pixels as raw_pixels
from vitlab.data.sources.raw.files import RawFiles, scan

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 255, shape).astype(np.uint8)


def lay(root: Path, files: dict[str, bytes]) -> RawFiles:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return scan(root, root / ".cache")


def same(dataset: Dataset, images: np.ndarray[Any, Any], labels: list[int]) -> bool:
    """`images` as [N, rows, columns, channels]."""
    read = np.stack([np.asarray(dataset.read(i)) for i in range(len(dataset))])
    return np.array_equal(read, images) and dataset.labels.single().tolist() == labels


def cifar_bytes(labels: list[list[int]], images: np.ndarray[Any, Any]) -> bytes:
    return b"".join(bytes(row) + image.tobytes() for row, image in zip(labels, images, strict=True))


def in_tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_joins_five_files(tmp_path: Path, packed: bool) -> None:
    images = pixels(12, 3, 32, 32)
    labels = [i % 10 for i in range(12)]
    bounds = [0, 1, 3, 6, 8, 10]
    files = {
        f"cifar-10-batches-bin/data_batch_{i + 1}.bin": cifar_bytes([[n] for n in labels[a:b]], images[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    }
    files["cifar-10-batches-bin/test_batch.bin"] = cifar_bytes([[n] for n in labels[10:]], images[10:])
    files["cifar-10-batches-bin/batches.meta.txt"] = b"\n".join(b"class %d" % i for i in range(10)) + b"\n\n"
    opened = raw_pixels.cifar10(lay(tmp_path, {"cifar-10-binary.tar.gz": in_tar(files)} if packed else files))
    as_rows = images.transpose(0, 2, 3, 1)
    assert same(opened.part("train"), as_rows[:10], labels[:10])
    assert same(opened.part("test"), as_rows[10:], labels[10:])
    assert opened.classes[3] == "class 3"


def cifar100(root: Path, **changes: bytes) -> RawFiles:
    images = pixels(2, 3, 32, 32)
    files = {
        "train.bin": cifar_bytes([[19, 7], [0, 99]], images),
        "test.bin": cifar_bytes([[1, 2]], images[:1]),
        "fine_label_names.txt": b"\n".join(b"f%d" % i for i in range(100)),
    }
    return lay(root, files | {name.replace("_bin", ".bin"): data for name, data in changes.items()})


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    assert raw_pixels.cifar100(cifar100(tmp_path)).part("train").labels.single().tolist() == [7, 99]
    with pytest.raises(FileProblem, match="not a multiple of a record's 3,074"):
        raw_pixels.cifar100(cifar100(tmp_path, train_bin=b"x" * 3073))
    with pytest.raises(FileProblem, match="outside the 100 classes"):
        raw_pixels.cifar100(cifar100(tmp_path, train_bin=cifar_bytes([[0, 100]], pixels(1, 3, 32, 32))))
    with pytest.raises(FileProblem, match="not a multiple"):
        raw_pixels.cifar100(cifar100(tmp_path, train_bin=b""))


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def test_fashion_mnist(tmp_path: Path) -> None:
    images = pixels(3, 28, 28)
    labels = np.array([9, 0, 4], np.uint8)
    files = {
        f"{stem}-{kind}-ubyte.gz": gzip.compress(idx(of))
        for stem in ("train", "t10k")
        for kind, of in (("images-idx3", images), ("labels-idx1", labels))
    }
    opened = raw_pixels.fashion_mnist(lay(tmp_path, files))
    assert same(opened.part("train"), images[..., None], [9, 0, 4])
    assert opened.classes[9] == "Ankle boot"
    for wrong in (idx(images)[:-1], idx(images[:2]), idx(labels), b""):
        (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(wrong))
        with pytest.raises(FileProblem, match="t10k-images-idx3-ubyte"):
            raw_pixels.fashion_mnist(scan(tmp_path, tmp_path / ".cache"))


def test_svhn_turns_columns_into_rows_and_ten_into_zero(tmp_path: Path) -> None:
    images = pixels(32, 32, 3, 4)
    for part in ("train", "test"):
        labels = np.array([[10], [1], [9], [10]], np.uint8)
        scipy.io.savemat(tmp_path / f"{part}_32x32.mat", {"X": images, "y": labels}, do_compression=True)
    opened = raw_pixels.svhn(scan(tmp_path, tmp_path / ".cache"))
    assert same(opened.part("test"), images.transpose(3, 0, 1, 2), [0, 1, 9, 0])
    scipy.io.savemat(tmp_path / "test_32x32.mat", {"X": images[..., :3], "y": np.ones((4, 1), np.uint8)})
    with pytest.raises(FileProblem, match="does not hold 32x32 images"):
        raw_pixels.svhn(scan(tmp_path, tmp_path / ".cache"))


def norb(array: np.ndarray[Any, Any]) -> bytes:
    magic = {"uint8": 507333717, "int32": 507333716}[str(array.dtype)]
    return np.array([magic, array.ndim, *array.shape, *[1] * (3 - array.ndim)], "<i4").tobytes() + array.tobytes()


def test_smallnorb_has_the_left_eye_and_two_questions(tmp_path: Path) -> None:
    images = pixels(3, 2, 96, 96)
    info = np.array([[4, 0, 0, 5], [6, 8, 34, 0], [9, 3, 2, 1]], np.int32)  # instance, elevation, azimuth, lighting
    files = {
        f"smallnorb-5x{who}x9x18x6x2x96x96-{part}-{kind}.mat.gz": gzip.compress(norb(of))
        for who, part in (("46789", "training"), ("01235", "testing"))
        for kind, of in (("dat", images), ("info", info))
    }
    raw = lay(tmp_path, files)
    assert same(raw_pixels.smallnorb_azimuth(raw).part("train"), images[:, 0, :, :, None], [0, 17, 1])
    elevation = raw_pixels.smallnorb_elevation(raw)
    assert elevation.part("test").labels.single().tolist() == [0, 8, 3]
    assert (len(raw_pixels.smallnorb_azimuth(raw).classes), len(elevation.classes)) == (18, 9)
    name = "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat.gz"
    for wrong in (norb(images[:2]), norb(images)[:-5], norb(images[:, :1])):
        with pytest.raises(FileProblem, match="does not hold pairs"):
            raw_pixels.smallnorb_elevation(lay(tmp_path, {name: gzip.compress(wrong)}))


def dsprites(root: Path, images: np.ndarray[Any, Any], factors: np.ndarray[Any, Any]) -> RawFiles:
    root.mkdir(exist_ok=True)
    # The published archive also has a pickled dictionary, which is left alone.
    metadata = np.array({"title": "never read"}, object)
    np.savez_compressed(root / "dsprites_tiny.npz", imgs=images, latents_classes=factors, metadata=metadata)
    return scan(root, root / ".cache")


def test_dsprites_is_made_white_and_its_factors_are_joined(tmp_path: Path) -> None:
    images = RNG.integers(0, 2, (4, 8, 8)).astype(np.uint8)
    factors = np.array([[0, 1, 2, 0, 0, 5], [0, 0, 0, 2, 1, 5], [0, 0, 0, 3, 2, 5], [0, 2, 5, 39, 31, 31]])
    raw = dsprites(tmp_path, images, factors)
    assert same(raw_pixels.dsprites_location(raw).part("all"), images[..., None] * 255, [0, 0, 1, 15])
    assert raw_pixels.dsprites_orientation(raw).part("all").labels.single().tolist() == [0, 0, 1, 15]
    with pytest.raises(FileProblem, match="images do not fit its 3 labels"):
        raw_pixels.dsprites_location(dsprites(tmp_path / "b", images, factors[:3]))
    with pytest.raises(FileProblem, match="does not hold bytes"):
        raw_pixels.dsprites_location(dsprites(tmp_path / "c", images.astype(np.int64), factors))


@pytest.mark.parametrize(
    ("value", "location", "orientation"), [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 1), (31, 15, 12)]
)
def test_neighbouring_values_are_joined_as_vtab_does(value: int, location: int, orientation: int) -> None:
    assert raw_pixels.merge_neighbours(value, 32, 16) == location
    assert raw_pixels.merge_neighbours(value, 40, 16) == orientation


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(filename: bytes, label: int, image: bytes) -> bytes:
    kinds = {
        "image": field(1, field(1, image)),
        "filename": field(1, field(1, filename)),
        "label": field(3, field(1, varint(label))),
    }
    body = field(1, b"".join(field(1, field(1, name.encode()) + field(2, kind)) for name, kind in kinds.items()))
    return len(body).to_bytes(8, "little") + b"crc!" + body + b"crc!"


def test_dmlab_reads_records_inside_the_tar(tmp_path: Path) -> None:
    shards = {
        "dmlab-train.tfrecord-00000-of-00002": record(b"a.jpg", 0, b"first") + record(b"b.jpg", 5, b"second"),
        "dmlab-train.tfrecord-00001-of-00002": record(b"c.jpg", 3, b"third"),
        "dmlab-validation.tfrecord": record(b"d.jpg", 1, b"fourth"),
        "dmlab-test.tfrecord": record(b"e.jpg", 2, b"fifth"),
    }
    train = raw_pixels.dmlab(lay(tmp_path, {"dmlab.tar.gz": in_tar(shards)})).part("train")
    assert (list(train.keys), train.labels.single().tolist()) == (["a.jpg", "b.jpg", "c.jpg"], [0, 5, 3])
    assert [train.read(i) for i in range(3)] == [b"first", b"second", b"third"]
    shards["dmlab-test.tfrecord"] = b""
    del shards["dmlab-validation.tfrecord"]
    with pytest.raises(FileProblem, match=r"has no dmlab-validation\.tfrecord"):
        raw_pixels.dmlab(lay(tmp_path / "b", shards))


def test_camelyon_without_h5py_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)  # Python's own way to make an import fail
    words = [f"camelyonpatch_level_2_split_{part}_{kind}.h5" for part in ("train", "valid", "test") for kind in "xy"]
    with pytest.raises(MissingExtra, match=r"pip install 'vitlab\[hdf5\]'"):
        raw_pixels.patch_camelyon(lay(tmp_path, dict.fromkeys(words, b"")))


def test_camelyon(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra hdf5")
    images = pixels(2, 96, 96, 3)
    for part in ("train", "valid", "test"):
        for kind, of in (("x", images), ("y", np.array([1, 0], np.uint8).reshape(2, 1, 1, 1))):
            with h5py.File(tmp_path / f"camelyonpatch_level_2_split_{part}_{kind}.h5", "w") as file:
                file[kind] = of
    val = raw_pixels.patch_camelyon(scan(tmp_path, tmp_path / ".cache")).part("val")
    assert same(val, images, [1, 0])
    assert list(val.keys) == ["valid_0", "valid_1"]
