"""What `vitlab train` measures at its end is a record like any other."""

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.evaluation.records import _PRETRAINING, part_to_test, pretraining_of, read_records

ALONE: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
TINY = ["train.steps=2", "train.batch_size=4", "data.image_size=[8,8]", "data.crop.how=whole"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for i in range(24):
        path = tmp_path / "pictures" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"


def test_a_run_leaves_one_record_of_its_test(pictures: Path, tmp_path: Path) -> None:
    done = vitlab.train(pictures, out=tmp_path / "run", model="ViT-w16d1m32h2/4", overrides=TINY, **ALONE)
    (record,) = read_records(tmp_path / "run" / "records")
    assert (record.value, record.n, record.measure, record.part) == (done.test["top1"], done.test["n"], "top1", "test")
    assert record.data == str(pictures) and record.model == "ViT-w16d1m32h2/4" and record.seeds == (0,)
    assert record.interval is not None and record.interval[0] <= record.value <= record.interval[1]
    assert record.settings["start"] == "scratch" and record.command.startswith("vitlab train ")
    file = json.loads((done.run / "run.json").read_text())
    split = (done.run / "split.csv").read_text()
    parts = {part: split.count(f",{part}\n") for part in ("train", "val", "test")}
    assert file["counts"] == {"classes": 2} | {part: count for part, count in parts.items() if count}
    assert file["command"] == record.command and f"--out {done.run}" in record.command
    assert file["repeat"] == record.command.replace(f" --out {done.run}", "")
    assert file["repeat"] in html.unescape(done.report.read_text())


@pytest.mark.slow
def test_several_seeds_are_one_record_with_a_value_for_each(pictures: Path, tmp_path: Path) -> None:
    done = vitlab.train(
        pictures, out=tmp_path / "run", model="ViT-w16d1m32h2/4", overrides=TINY, seeds=2, seed=3, **ALONE
    )
    (record,) = read_records(tmp_path / "run" / "records")
    assert record.seeds == (3, 4) and list(record.values) == [row["test"]["top1"] for row in done.seeds]
    assert record.interval is None and record.spread is not None


def test_images_that_a_head_is_fitted_to_again_are_counted_in_card_and_record(pictures: Path, tmp_path: Path) -> None:
    start = vitlab.train(pictures, out=tmp_path / "start", model="ViT-w16d1m32h2/4", overrides=TINY, **ALONE)
    few = ["data.val_frac=0.9"]  # one image of each class is left to train on: no further folds, which take their time
    done = vitlab.train(pictures, out=tmp_path / "run", init=str(start.run), overrides=few, **ALONE)
    split = (tmp_path / "run" / "split.csv").read_text()
    train, val = (split.count(f",{part}\n") for part in ("train", "val"))
    assert val > 0 and "fitted again on all" in (tmp_path / "run" / "log.txt").read_text()
    assert f": {train + val} training images |" in (done.bundle / "card.md").read_text()
    assert read_records(tmp_path / "run" / "records")[0].settings["train_images"] == train + val
    train = (start.run / "split.csv").read_text().count(",train\n")
    assert f": {train} training images |" in (start.bundle / "card.md").read_text(), "steps are not fitted again"
    assert read_records(start.run / "records")[0].settings["train_images"] == train


def test_several_labels_are_recorded_and_carded_by_their_precision(pictures: Path, tmp_path: Path) -> None:
    files = sorted(pictures.rglob("*.png"))
    rows = [f"{path.relative_to(tmp_path)},{'a;b' if i % 3 else 'b'}" for i, path in enumerate(files)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    done = vitlab.train(tmp_path / "table.csv", out=tmp_path / "run", model="ViT-w16d1m32h2/4", overrides=TINY, **ALONE)
    (record,) = read_records(tmp_path / "run" / "records")
    assert (record.measure, record.value, record.interval) == ("mean_ap", done.test["mean_ap"], None)
    card = (tmp_path / "run" / "bundle" / "card.md").read_text()
    assert f"| test mean average precision | {done.test['mean_ap']:.4f} |" in card


def test_the_part_that_everybody_tests_on() -> None:
    assert [
        part_to_test(data) for data in ("imagenet", "tiny-imagenet", "cifar10", "vtab:svhn/1000", "some/folder")
    ] == [
        *("val", "val", "test", "test", "test"),
    ]


def test_what_published_weights_were_trained_on() -> None:
    starts = (
        "ViT-L/16@i21k",
        "vit-l-16@i21k-i1k-384",
        "ViT-B/16@augreg-i21k",
        "BiT-R50x1@bit-m",
        "runs/mine",
        "scratch",
    )
    assert [pretraining_of(start) for start in starts] == [
        *("imagenet21k", "imagenet21k", "imagenet21k-augreg", "imagenet21k", "", ""),
    ]
    assert set(_PRETRAINING) <= {name.partition("@")[2] for name in vitlab.list_pretrained()}
