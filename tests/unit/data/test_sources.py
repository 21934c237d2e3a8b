"""Every kind of data comes in by the same door, and what is none is reported in a sentence."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.loader import BadImages, TrainInputs, train_batches
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import NoSuchData, open_data


def test_folder_table_and_shards(tmp_path: Path) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "cat" / "1.png")
    (tmp_path / "list.csv").write_text("path,label\nimages/cat/1.png,cat\n")
    assert open_data(tmp_path / "images").classes == open_data(str(tmp_path / "list.csv")).classes == ("cat",)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileProblem, match=r"notes\.txt is not a data set"):
        open_data(tmp_path / "notes.txt")


def test_a_place_that_is_none_and_a_name_that_is_none(tmp_path: Path) -> None:
    for path in (str(tmp_path / "absent"), "nope.csv"):
        with pytest.raises(NoSuchData, match="does not exist") as wrong:
            open_data(path)
        assert wrong.value.given == path
    with pytest.raises(NoSuchData, match="unknown data set 'cifar11'") as wrong:
        open_data("cifar11")
    assert (wrong.value.given, wrong.value.exit_code) == ("cifar11", 2)
    assert "cifar10" in str(wrong.value) and "no folder of that name" in str(wrong.value)


def test_packed_archive_by_path_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared" / "data"))
    if not (folder / "cifar10").is_dir():
        pytest.skip("the real CIFAR-10 is not there")
    monkeypatch.setenv("VITLAB_DATA", str(folder))
    assert len(open_data(folder / "cifar10" / "cifar10_test.npz").parts["all"]) == 10_000
    assert {name: len(part) for name, part in open_data("cifar10").parts.items()} == {"train": 50_000, "test": 10_000}


def test_drawn_sets_take_settings_and_hold_out_what_training_never_sees() -> None:
    opened = open_data("fractals:categories=5,instances=10,image_size=32,mode=grey,seed=3")
    train, test = opened.parts["train"], opened.parts["test"]
    assert (len(train), len(test), len(train.classes)) == (50, 10, 5)
    assert train.labels.counts(5).tolist() == [10] * 5
    pictures = {np.asarray(part.read(i)).tobytes() for part in (train, test) for i in range(len(part))}
    assert len(pictures) == 60
    assert test.keys[0] == "fractals/5-grey-32x32-3/50"
    assert list(open_data("fractals:categories=4").parts) == ["train"]
    alone = open_data("fractals")
    assert {name: len(part) for name, part in alone.parts.items()} == {"train": 10_000, "test": 2000}
    assert len(alone.classes) == 100 and alone.parts["train"].read(0).shape == (32, 32, 1)
    assert alone.notes == ("fractals alone is fractals:categories=100,instances=100,image_size=32",)
    assert len(open_data("shapes:task=count,count=20,image_size=32").parts["test"]) == 4


def test_drawing_many_is_drawing_each(tmp_path: Path) -> None:
    data = open_data("fractals:categories=5,instances=3,image_size=32").parts["train"]
    chosen = data.subset(torch.tensor([14, 2, 7]))
    many = chosen.read_many([2, 0])
    assert many is not None
    assert np.array_equal(many[0], data.read(7))
    assert np.array_equal(many[1], data.read(14))
    rule = Preprocess(mode="L", image_size=(32, 32), mean=(0.5,), std=(0.5,))
    for workers in (0, 1):
        order = Order(len(data), 4, 0)
        batches = train_batches(TrainInputs(data, rule, CropRule(), order), range(2), bad=BadImages(0), workers=workers)
        assert all(bool(batch.valid.all()) for batch in batches)


@pytest.mark.parametrize("name", ["fractals:categories=0", "fractals:colour=1", "shapes:task=smell", "fractals:seed"])
def test_wrong_settings_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        open_data(name)


def test_class_folders_come_before_a_tar_beside_them_and_an_empty_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "1.png")
    (tmp_path / "photos.tar").write_bytes(b"what the folder was unpacked from")
    opened = open_data(tmp_path)
    assert (opened.classes, opened.notes) == (("cat",), ("not used: photos.tar",))
    with pytest.raises(UsageError, match="no data was given"):
        open_data("")


def test_drawn_sets_of_other_settings_are_other_data() -> None:
    names = (f"fractals:categories=2,instances=2,image_size={size}" for size in ("32", "48", "32,mode=colour"))
    assert len({open_data(name).parts["train"].fingerprint() for name in names}) == 3
