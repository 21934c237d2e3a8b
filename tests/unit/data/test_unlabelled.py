"""Which images keep their labels, where unlabelled ones come from, and which of them show what must not be learnt."""

import dataclasses
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import generator
from vitlab.data.auditing.overlap import shared_pictures
from vitlab.data.dataset import Dataset, from_arrays, several_labels
from vitlab.data.parts import _LABELLED, Parts, keep_labels
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.unlabelled import open_unlabelled

CLASSES = ("a", "b", "c")
QUIET = Console(quiet=True)


def noise(count: int, seed: int, side: int = 24) -> torch.Tensor:
    """Blobs, no two alike, that survive resizing."""
    small = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(small, size=side, mode="bilinear") * 255).to(torch.uint8)


def images(labels: list[int], seed: int = 0) -> Dataset:
    return from_arrays(noise(len(labels), seed), labels, CLASSES, "set")


# --- labels that are kept ---------------------------------------------------------------------------------------------


def test_kept_labels_are_stratified_and_as_many_as_asked() -> None:
    labelled, rest = keep_labels(images([0] * 50 + [1] * 30 + [2] * 20), 0, count=10)
    assert labelled.labels.counts(3).tolist() == [5, 3, 2]
    assert not set(labelled.keys) & set(rest.keys)
    assert len(labelled) + len(rest) == 100


@pytest.mark.parametrize("count", range(3, 20))
def test_every_class_keeps_one_and_the_sum_is_exact(count: int) -> None:
    labelled, _ = keep_labels(images([0] * 17 + [1] * 2 + [2]), 0, count=count)
    assert len(labelled) == count
    assert min(labelled.labels.counts(3).tolist()) >= 1


def test_a_number_for_each_class_takes_all_of_a_small_one() -> None:
    labelled, rest = keep_labels(images([0] * 9 + [1] * 2 + [2] * 4), 0, per_class=3)
    assert labelled.labels.counts(3).tolist() == [3, 2, 3]
    assert rest.labels.counts(3).tolist() == [6, 0, 1]


def test_the_seed_decides_which() -> None:
    data = images([0, 1, 2] * 20)
    keys = [tuple(keep_labels(data, seed, count=6)[0].keys) for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("count", [2, 61])
def test_a_number_that_cannot_be_kept_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=rf"{count} .*cannot be taken from set: it has 60\b"):
        keep_labels(images([0, 1, 2] * 20), 0, count=count)


def test_none_left_without_a_label_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing remains unlabelled"):
        keep_labels(images([0, 1, 2]), 0, per_class=1)


def test_a_split_lists_unlabelled_images_without_their_labels() -> None:
    labelled, rest = keep_labels(images([0, 1, 2] * 4), 0, count=3)
    rows = Parts(labelled, None, None, (), unlabelled=rest).table().splitlines()[1:]
    assert len(rows) == 12
    assert sorted(rows)[0].startswith("set/0,")
    assert {row.split(",")[1:][0] for row in rows if row.endswith("unlabelled")} == {""}


# --- where they come from ---------------------------------------------------------------------------------------------


def save_photos(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{i}.png" for i in range(count)]
    for path, pixels in zip(paths, noise(count, 5), strict=True):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return paths


def test_loose_photos(tmp_path: Path) -> None:
    save_photos(tmp_path / "photos", 3)
    found = open_unlabelled(tmp_path / "photos", CLASSES)
    assert (len(found.images), found.images.classes, found.truth) == (3, CLASSES, None)
    assert found.images.labels.targets(torch.arange(3), 3).tolist() == [0, 0, 0]


def test_photos_beside_folders_of_photos_are_taken_with_them(tmp_path: Path) -> None:
    for name, count in ((".", 2), ("a", 3), ("b/c", 1)):
        save_photos(tmp_path / "photos" / name, count)
    assert len(open_unlabelled(tmp_path / "photos", CLASSES).images) == 6


def test_class_folders_give_labels_to_the_report_alone_where_the_classes_are_the_same(tmp_path: Path) -> None:
    for name in CLASSES:
        save_photos(tmp_path / "same" / name, 2)
        save_photos(tmp_path / "others" / f"{name}{name}", 2)
    same, others = (open_unlabelled(tmp_path / name, CLASSES) for name in ("same", "others"))
    assert same.images.labels.single().tolist() == [0] * 6
    assert same.truth is not None
    assert same.truth.labels.single().tolist() == [0, 0, 1, 1, 2, 2]
    assert (len(others.images), others.truth) == (6, None)


def test_arrays_with_and_without_labels(tmp_path: Path) -> None:
    pixels = noise(4, 0).permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "bare.npz", images=pixels)
    np.savez(tmp_path / "labelled.npz", images=pixels, labels=[0, 1, 2, 0], classes=list(CLASSES))
    bare, labelled = (open_unlabelled(tmp_path / f"{name}.npz", CLASSES) for name in ("bare", "labelled"))
    assert (len(bare.images), bare.truth) == (4, None)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "images.npy", pixels)
    assert len(open_unlabelled(tmp_path / "folder", CLASSES).images) == 4
    assert labelled.truth is not None
    assert labelled.truth.labels.single().tolist() == [0, 1, 2, 0]


def test_tables_with_and_without_labels(tmp_path: Path) -> None:
    save_photos(tmp_path / "p", 3)
    (tmp_path / "bare.csv").write_text("path\np/0.png\np/1.png\np/2.png\n")
    (tmp_path / "some.csv").write_text("path,label\np/0.png,a\np/1.png,\n")
    (tmp_path / "all.csv").write_text("path,label\np/0.png,a\np/1.png,b\np/2.png,c\n")
    bare, some, every = (open_unlabelled(tmp_path / f"{name}.csv", CLASSES) for name in ("bare", "some", "all"))
    assert (len(bare.images), bare.truth, len(some.images), some.truth) == (3, None, 2, None)
    assert every.truth is not None
    with pytest.raises(FileProblem, match="no column 'label'"):
        open_data(tmp_path / "bare.csv")


def test_shards_with_and_without_labels(tmp_path: Path) -> None:
    photos = save_photos(tmp_path / "p", 3)
    for name, labels in (("bare", ""), ("all", "abc")):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for photo in photos:
                tar.add(photo, photo.name)
            for i, label in enumerate(labels):
                (tmp_path / "label").write_text(label)
                tar.add(tmp_path / "label", f"{i}.txt")
    bare, every = (open_unlabelled(tmp_path / f"{name}.tar", CLASSES) for name in ("bare", "all"))
    assert (len(bare.images), bare.truth) == (3, None)
    assert every.truth is not None
    with pytest.raises(FileProblem, match="has no label"):
        open_data(tmp_path / "bare.tar")


def test_images_in_parquet_with_and_without_labels(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    encoded = [photo.read_bytes() for photo in save_photos(tmp_path / "p", 3)]
    columns = {"bare": {}, "secret": {"label": [-1] * 3}, "all": {"label": list(CLASSES)}}
    for name, more in columns.items():
        parquet.write_table(pyarrow.table({"image": encoded, **more}), tmp_path / f"{name}.parquet")
    bare, secret, every = (open_unlabelled(tmp_path / f"{name}.parquet", CLASSES) for name in columns)
    assert (len(bare.images), bare.truth, len(secret.images), secret.truth) == (3, None, 3, None)
    assert bare.images.read(0) == encoded[0]
    assert every.truth is not None
    with pytest.raises(FileProblem, match="no column 'label'"):
        open_data(tmp_path / "bare.parquet")


def test_a_data_set_in_python_with_several_labels_has_no_truth() -> None:
    several = dataclasses.replace(images([0, 1]), labels=several_labels([[0, 1], [2]]))
    assert open_unlabelled(several, CLASSES).truth is None


# --- pictures that must not be learnt ---------------------------------------------------------------------------------


def test_copies_are_found_however_they_are_stored(tmp_path: Path) -> None:
    pixels = noise(12, 3, side=48)
    test = from_arrays(pixels[:3], [0, 1, 2], CLASSES, "test")
    train = from_arrays(pixels[3:6], [0, 1, 2], CLASSES, "train")
    folder = tmp_path / "photos"
    folder.mkdir()
    pictures = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in pixels]
    pictures[0].save(folder / "0-same.png")
    pictures[1].save(folder / "1-encoded.jpg", quality=80)
    pictures[2].resize((96, 96), Image.Resampling.NEAREST).save(folder / "2-larger.png")
    pictures[3].save(folder / "3-trained.png")
    pictures[7].save(folder / "4-new.png")
    loose = open_unlabelled(folder, CLASSES).images
    found = shared_pictures(loose, {"train": train, "test": test}, console=QUIET, workers=1)
    assert found == {0: "test", 1: "test", 2: "test", 3: "train"}


def test_images_none_of_which_can_be_read_are_an_error(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(b"not a picture")
    loose = open_unlabelled(tmp_path, CLASSES).images
    with pytest.raises(FileProblem, match=r"none of the 3 images .*\bread\b.*0\.jpg"):
        shared_pictures(loose, {"train": images([0, 1])}, console=QUIET, workers=1)
    save_photos(tmp_path / "more", 1)
    loose = open_unlabelled(tmp_path, CLASSES).images
    assert shared_pictures(loose, {"train": images([0, 1])}, console=QUIET, workers=1) == {}


def test_what_is_shared_with_two_parts_counts_for_the_last() -> None:
    pixels = noise(2, 4)
    one, other = (from_arrays(pixels, [0, 1], CLASSES, name) for name in ("train", "test"))
    found = shared_pictures(images([0, 1], seed=9), {"train": one, "test": other}, console=QUIET, workers=1)
    assert found == {}
    found = shared_pictures(
        from_arrays(pixels, [0, 0], CLASSES, "same"), {"train": one, "test": other}, console=QUIET, workers=1
    )
    assert found == {0: "test", 1: "test"}


@pytest.mark.parametrize("rule", [{"count": 40}, {"per_class": 3}])
def test_each_class_keeps_its_first_images_of_one_random_order(rule: dict[str, int]) -> None:
    """As written down: class by class. The source sorts once instead, for a million images of a thousand classes."""
    data = images([i * i % 7 % 3 for i in range(150)])
    labelled, _ = keep_labels(data, 3, **rule)
    values_N = data.labels.single()
    order_N = torch.randperm(len(data), generator=generator(3, _LABELLED))
    kept_K = labelled.labels.counts(len(data.classes)).tolist()
    first = [order_N[values_N[order_N] == k][:kept] for k, kept in enumerate(kept_K)]
    assert labelled.keys == [data.keys[i] for i in torch.cat(first).sort().values.tolist()]
    assert 9 <= len(labelled) == sum(kept_K) < len(data)
