"""The nineteen tasks: their table against the published one, and which images each takes."""

import importlib.util
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.data.dataset import Dataset, Opened, from_arrays, single_labels
from vitlab.data.sources.named import named_sets
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.vtab import VTAB, find_task
from vitlab.data.sources.vtab_opening import open_vtab, stored_order, take_task

_found = importlib.util.spec_from_file_location("vtab_copies", Path(__file__).with_name("vtab_copies.py"))
assert _found and _found.loader
copies = importlib.util.module_from_spec(_found)
_found.loader.exec_module(copies)

DATA = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data")).absolute()

# VTAB's own slices of TensorFlow Datasets' parts: (task, parts with their sizes, validation, test).
SLICES = [
    ("caltech101", {"train": 3060, "test": 6084}, "train[2754:2954]", "test[0:6084]"),
    ("cifar100", {"train": 50_000, "test": 10_000}, "train[45000:45200]", "test[0:10000]"),
    ("dtd", {"train": 1880, "val": 1880, "test": 1880}, "val[0:200]", "test[0:1880]"),
    ("flowers102", {"train": 1020, "val": 1020, "test": 6149}, "val[0:200]", "test[0:6149]"),
    ("oxford-pets", {"train": 3680, "test": 3669}, "train[2944:3144]", "test[0:3669]"),
    ("sun397", {"train": 7612, "val": 1087, "test": 2175}, "val[0:200]", "test[0:2175]"),
    ("svhn", {"train": 73_257, "test": 26_032}, "train[65931:66131]", "test[0:26032]"),
    ("patch-camelyon", {"train": 2621, "val": 327, "test": 327}, "val[0:200]", "test[0:327]"),
    ("eurosat", {"all": 27_000}, "train[16200:16400]", "train[21600:27000]"),
    ("resisc45", {"all": 31_500}, "train[18900:19100]", "train[25200:31500]"),
    ("retinopathy", {"train": 3512, "val": 1090, "test": 4267}, "val[0:200]", "test[0:4267]"),
    ("clevr-count", {"train": 70_000, "val": 15_000}, "train[63000:63200]", "val[0:15000]"),
    ("clevr-distance", {"train": 7_000, "val": 1_500}, "train[6300:6500]", "val[0:1500]"),
    ("dmlab", {"train": 900, "val": 300, "test": 300}, "val[0:200]", "test[0:300]"),
    ("dsprites-location", {"all": 7372}, "train[5897:6097]", "train[6634:7372]"),
    ("dsprites-orientation", {"all": 73_728}, "train[58982:59182]", "train[66355:73728]"),
    ("kitti-distance", {"train": 900, "val": 300, "test": 711}, "val[0:200]", "test[0:711]"),
    ("smallnorb-azimuth", {"train": 24_300, "test": 24_300}, "test[0:200]", "test[12150:24300]"),
    ("smallnorb-elevation", {"train": 2430, "test": 2430}, "test[0:200]", "test[1215:2430]"),
]


def key(image: int) -> bytes:
    return b"%d" % image


def parts(sizes: dict[str, int]) -> Opened:
    """Images that hold their own number, one class each of three."""
    return Opened(
        {
            part: Dataset(
                part, ("a", "b", "c"), [f"x/{part}_{i}.jpg" for i in range(n)], single_labels(torch.arange(n) % 3), key
            )
            for part, n in sizes.items()
        }
    )


def slice_of(text: str, task: str, sizes: dict[str, int]) -> list[int]:
    """The images that a slice such as `train[0:800]` means, in the stored order of that part."""
    part, _, bounds = text.partition("[")
    first, last = (int(number) for number in bounds.rstrip("]").split(":"))
    ours = part if part in sizes else "all"
    names = [f"x/{ours}_{i}.jpg" for i in range(sizes[ours])]
    rule = VTAB[task].names
    if rule == "number":
        names = [str(i) for i in range(sizes[ours])]
    if rule == "joined":
        names = [name.replace("/", "_") for name in names]
    return stored_order(names, {"val": "validation"}.get(part, part))[first:last].tolist()


# The rule is the same for large parts as for small ones, and ordering the names of large ones takes the time.
SMALL_FIRST = sorted(SLICES, key=lambda row: sum(row[1].values()) > 20_000)
SMALL = sum(sum(row[1].values()) <= 20_000 for row in SLICES)


@pytest.mark.parametrize(
    ("task", "sizes", "val", "test"), slow_after(SMALL, SMALL_FIRST), ids=[row[0] for row in SMALL_FIRST]
)
def test_each_task_takes_vtabs_slices(task: str, sizes: dict[str, int], val: str, test: str) -> None:
    opened = take_task(VTAB[task], parts(sizes))
    wanted = {
        part: slice_of(text, task, sizes) for part, text in (("train", "train[0:800]"), ("val", val), ("test", test))
    }
    wanted["trainval"] = wanted["train"] + wanted["val"]
    for part, numbers in wanted.items():
        dataset = opened.part(part)
        assert len(dataset) == len(numbers)
        for i in (0, 1, len(numbers) // 2, len(numbers) - 1):
            assert dataset.read(i) == b"%d" % numbers[i]
            assert dataset.labels[i] == (numbers[i] % 3,)
    assert len(opened.part("train")) == 800 and len(opened.part("val")) == 200


def test_the_table_is_the_published_one() -> None:
    assert [row[0] for row in SLICES] == list(VTAB)
    groups = [task.group for task in VTAB.values()]
    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]
    classes = [102, 100, 47, 102, 37, 397, 10, 2, 10, 45, 5, 8, 6, 6, 16, 16, 4, 18, 9]
    assert [task.classes for task in VTAB.values()] == classes
    assert [named_sets()[name].classes for name in VTAB] == classes
    assert {task.name for task in VTAB.values() if not task.flip} == {
        *("dsprites-location", "dsprites-orientation", "smallnorb-azimuth")
    }
    assert {task.name for task in VTAB.values() if not task.crop} == {
        *("clevr-count", "clevr-distance", "dmlab", "kitti-distance", "dsprites-location")
    }


def test_the_stored_order_is_tensorflow_datasets_own() -> None:
    """The first CIFAR-10 images as its users print them, and the first pet of its version 3.2.0."""
    first = [16399, 1680, 47917, 17307, 27051, 48736, 26263, 1456, 19135, 31598, 12970, 4223]
    assert stored_order([str(i) for i in range(50_000)], "train")[:12].tolist() == first


@pytest.mark.skipif(not (DATA / "oxford_pets").is_dir(), reason="needs the packed pets in VITLAB_DATA")
def test_the_real_pets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(DATA))
    opened = open_vtab("pets", download=False)
    assert {part: len(of) for part, of in opened.parts.items()} == {
        "train": 800,
        "val": 200,
        "trainval": 1000,
        "test": 3669,
    }
    assert opened.part("train").keys[0] == "Sphynx_158"
    assert len({*opened.part("trainval").keys}) == 1000
    assert opened.notes == ()


def test_a_raw_set_becomes_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "dsprites").mkdir()
    factors = np.zeros((3200, 6), np.int64)
    factors[:, 4] = np.arange(3200) % 32
    images = np.zeros((3200, 4, 4), np.uint8)
    images[:, 0, 0] = np.arange(3200) % 32 == 31
    name = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
    np.savez_compressed(tmp_path / "dsprites" / name, imgs=images, latents_classes=factors)
    opened = open_vtab("dsprites-location", download=False)
    trainval = pickle.loads(pickle.dumps(opened.part("trainval")))
    for i in range(0, 1000, 37):
        number = int(trainval.keys[i].rpartition("/")[2])
        assert trainval.labels[i] == (number % 32 // 2,)
        assert int(trainval.read(i).max()) == (255 if number % 32 == 31 else 0)
    assert "dsprites-location: test has 320 of 73,728 images" in opened.notes


def test_unknown_tasks_and_sets_that_are_too_small() -> None:
    with pytest.raises(UnknownName, match="unknown VTAB task 'cifar10'"):
        open_vtab("cifar10")
    small = Opened(
        {part: from_arrays(np.zeros((700, 1, 2, 2), np.uint8), [0] * 700, ["a"]) for part in ("train", "test")}
    )
    with pytest.raises(FileProblem, match="too few for VTAB's svhn"):
        take_task(VTAB["svhn"], small)


# Formats of their own first; the others are folders of images with lists, each of them the work of thousands of files.
RAW = ("svhn", "cifar100", "dsprites", "smallnorb", "dmlab")


@pytest.mark.parametrize("name", slow_after(len(RAW), dict.fromkeys((*RAW, *copies.SETS))))
def test_every_raw_format_gives_the_labels_of_its_tasks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "patch_camelyon":
        pytest.importorskip("h5py", reason="needs the extra hdf5")
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    for task, labels in copies.SETS[name](tmp_path).items():
        opened = open_vtab(task, download=False)
        assert set(labels) == set(range(VTAB[task].classes)) and len(opened.classes) == VTAB[task].classes
        seen: dict[str, set[int]] = {}
        for part in ("train", "val", "test"):
            dataset = opened.part(part)
            numbers = [copies.number_in(dataset.read(i)) for i in range(len(dataset))]
            assert dataset.labels.single().tolist() == [labels[number] for number in numbers]
            seen[part] = set(numbers)
        assert (len(seen["train"]), len(seen["val"])) == (800, 200)
        assert not seen["train"] & seen["val"] and not seen["train"] & seen["test"]
        # Small NORB validates and tests on two halves of its test set; nothing else shares images either.
        assert not seen["val"] & seen["test"]


def test_all_nineteen_tasks_have_a_raw_copy(tmp_path: Path) -> None:
    """So that the test above is a test of all of them."""
    sets = {named_sets()[task].folder for task in VTAB}
    assert sets == set(copies.SETS)


def test_a_number_behind_a_task_takes_what_training_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    copies.svhn(tmp_path)
    whole = open_vtab("svhn", download=False)
    choosing, final = (open_data(f"vtab:svhn/{number}") for number in (800, 1000))
    assert {part: len(of) for part, of in choosing.parts.items()} == {"train": 800, "val": 200}
    assert {part: len(of) for part, of in final.parts.items()} == {"train": 1000, "test": 100}
    assert list(final.part("train").keys) == [*choosing.part("train").keys, *choosing.part("val").keys]
    assert list(final.part("test").keys) == list(whole.part("test").keys)
    assert find_task("SVHN") == (VTAB["svhn"], None)
    with pytest.raises(UsageError, match=r"'svhn/900' .*VTAB task"):
        open_vtab("svhn/900")
