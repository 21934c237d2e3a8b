"""Answers for many images: those of the classifier, in order, whatever lies among them."""

import csv
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image
from slow_cases import slow_after

import vitlab
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.runs.evaluation.prediction import Predictions
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle

LABELS = ("ant", "bee", "cat", "a dog, wet")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "b"
    model = create_model("ViT-w16d2m32h2/8", num_classes=4, image_size=16, seed=0)
    model.head.weight.data.normal_(0, 1)  # a new head is zero, and would find everything equal  # pyright: ignore
    save_bundle(path, Bundle(model, Preprocess(image_size=(16, 16)), LABELS, "card", {}))
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of many shapes and modes."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(150):
        shape = (16 + i % 40, 20 + i % 7, 3) if i % 5 else (16 + i % 40, 20)
        picture = Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8))
        picture.save(folder / f"{i:03d}.{'jpg' if i % 2 else 'png'}")
    return folder


@pytest.fixture
def predict(bundle: Path) -> Callable[..., Predictions]:
    def call(images: Any, **options: Any) -> Predictions:
        return vitlab.predict(bundle, images, **{"device": "cpu", "threads": 1, "quiet": True} | options)

    return call


@pytest.mark.parametrize(("batch_size", "workers"), slow_after(1, [(7, 2), (64, 0), (1, 0)]))
def test_answers_are_those_of_the_classifier(
    batch_size: int, workers: int, bundle: Path, photos: Path, predict: Callable[..., Predictions]
) -> None:
    found = predict(photos, top=3, batch_size=batch_size, workers=workers)
    paths = sorted(photos.iterdir())
    assert [row.path for row in found.rows] == [str(path) for path in paths]
    clf = vitlab.load(bundle, device="cpu", quiet=True)
    for row, path in zip(found.rows, paths, strict=True):
        wanted = clf(path, top=3)
        assert [answer.label for answer in row.top] == [answer.label for answer in wanted]
        # The pixels are the same bits; a batch of another size is summed in another order.
        assert [answer.p for answer in row.top] == pytest.approx([answer.p for answer in wanted], abs=1e-6)


def test_same_batch_gives_the_same_bits(bundle: Path, photos: Path, predict: Callable[..., Predictions]) -> None:
    paths = sorted(photos.iterdir())[:64]
    clf = vitlab.load(bundle, device="cpu", quiet=True)
    found = predict(paths, batch_size=64, workers=0)
    assert [row.top for row in found.rows] == clf(paths)


def test_bad_files_are_skipped_and_the_order_is_kept(
    photos: Path, predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    good = sorted(photos.iterdir())
    given = [good[5], tmp_path / "text.jpg", good[2], tmp_path / "gone.png", good[9], good[5]]
    found = predict(given, batch_size=2)
    assert [row.path for row in found.rows] == [str(good[i]) for i in (5, 2, 9, 5)]
    assert found.bad[str(tmp_path / "gone.png")] == "does not exist"
    assert "not a readable image" in found.bad[str(tmp_path / "text.jpg")]
    alone = predict([good[5], good[0]], batch_size=2)
    assert found.rows[0].top == alone.rows[0].top  # a bad neighbour changes no bit


def test_all_bad_is_an_error(predict: Callable[..., Predictions], tmp_path: Path) -> None:
    with pytest.raises(VitlabError, match="none of the 2 images") as raised:
        predict([tmp_path / "a.png", tmp_path / "a.png"])
    assert raised.value.exit_code == 1


def test_answers_can_be_stored_in_three_forms(
    photos: Path, predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    paths = sorted(photos.iterdir())[:3]
    found = predict(paths, top=4, out=tmp_path / "a.json")
    predict(paths, top=4, out=tmp_path / "new" / "a.csv")
    predict(paths, top=4, out=tmp_path / "a.parquet")
    assert json.loads((tmp_path / "a.json").read_text()) == found.to_json()
    rows = [
        (row.path, rank, answer.label, answer.index, answer.p)
        for row in found.rows
        for rank, answer in enumerate(row.top, start=1)
    ]
    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert list(zip(*table.values(), strict=True)) == rows
    with (tmp_path / "new" / "a.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(r["path"], int(r["rank"]), r["label"], int(r["index"]), float(r["p"])) for r in read] == rows


def test_file_name_that_is_not_utf8_is_stored_in_every_form(
    photos: Path, predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    folder = os.fsencode(tmp_path / "odd")
    os.mkdir(folder)  # noqa: PTH102 (bytes)
    picture = sorted(photos.iterdir())[0]
    shutil.copy(picture, folder + b"/caf\xe9.png")
    shutil.copy(picture, folder + b"/plain.png")
    for suffix in (".json", ".csv", ".parquet"):
        assert len(predict(tmp_path / "odd", top=1, out=tmp_path / f"odd{suffix}").rows) == 2
    table = parquet.read_table(tmp_path / "odd.parquet").to_pydict()
    assert table["path"] == [f"{tmp_path}/odd/caf\\xe9.png", f"{tmp_path}/odd/plain.png"]


def test_files_that_were_skipped_are_reported_beside_what_was_stored(
    photos: Path, predict: Callable[..., Predictions], tmp_path: Path
) -> None:
    good = sorted(photos.iterdir())[:2]
    assert (
        predict([*good, tmp_path / "gone.png"], out=tmp_path / "a.csv")
        .stored()
        .endswith("1 skipped because they could not be read")
    )
    assert "skipped because" not in predict(good, out=tmp_path / "b.csv").stored()


def test_json_is_as_promised(photos: Path, predict: Callable[..., Predictions]) -> None:
    (row,) = predict(sorted(photos.iterdir())[0], top=2).to_json()
    assert list(row) == ["path", "top"]
    assert [list(answer) for answer in row["top"]] == [["label", "index", "p"]] * 2
    assert row["top"][0]["p"] > row["top"][1]["p"]


def test_more_answers_than_classes_are_all_of_them(photos: Path, predict: Callable[..., Predictions]) -> None:
    (row,) = predict(sorted(photos.iterdir())[0], top=50).rows
    assert sorted(answer.label for answer in row.top) == sorted(LABELS)
    assert sum(answer.p for answer in row.top) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({"top": 0}, "--top"),
        ({"batch_size": 0}, "--batch-size"),
        ({"workers": -1}, "--workers"),
        ({"out": "answers.txt"}, r"\.json.*\.csv.*\.parquet"),
    ],
    ids=str,
)
def test_wrong_call_is_refused(
    options: dict[str, Any], printed: str, photos: Path, predict: Callable[..., Predictions]
) -> None:
    with pytest.raises(UsageError, match=printed):
        predict(photos, **options)


def test_model_without_classes_is_refused(photos: Path, tmp_path: Path) -> None:
    model = create_model("ViT-w16d2m32h2/8", num_classes=0, image_size=16, seed=0)
    save_bundle(tmp_path / "b", Bundle(model, Preprocess(image_size=(16, 16)), (), "card", {}))
    with pytest.raises(UsageError, match="no classes"):
        vitlab.predict(tmp_path / "b", photos, device="cpu", quiet=True)


def test_labels_that_an_image_has_are_reported_in_every_form(photos: Path, bundle: Path, tmp_path: Path) -> None:
    several = dataclasses.replace(read_bundle(bundle), thresholds=(-0.5, 0.0, 0.5, 1.0))
    save_bundle(tmp_path / "several", several)
    files = sorted(photos.iterdir())[:12]
    expected = [[row.has for row in rows] for rows in vitlab.load(tmp_path / "several", device="cpu")(files, top=4)]
    assert {True, False} == {has for row in expected for has in row}
    options: dict[str, Any] = {"top": 4, "device": "cpu", "threads": 1, "quiet": True}
    found = vitlab.predict(tmp_path / "several", files, out=tmp_path / "a.csv", **options)
    assert [[answer["has"] for answer in row["top"]] for row in found.to_json()] == expected
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["has"] for row in rows] == [str(has) for row in expected for has in row]
    *table, legend = found.sentences()
    assert "\n".join(table).count("*") == sum(map(sum, expected)) and "by the model's thresholds" in legend


def test_model_of_one_label_reports_nothing_of_several(photos: Path, predict: Callable[..., Predictions]) -> None:
    found = predict(sorted(photos.iterdir())[:2])
    assert found.to_json()[0]["top"][0].keys() == {"label", "index", "p"}
    assert not any("*" in line for line in found.sentences())


def test_images_before_the_model_are_reported(photos: Path, bundle: Path) -> None:
    one = next(photos.iterdir())
    for images in (photos, one):
        with pytest.raises(UsageError, match=r"(?s)model comes first.* holds one"):
            vitlab.predict(images, bundle, device="cpu", quiet=True)


def test_model_that_is_none_is_a_wrong_call(photos: Path, tmp_path: Path) -> None:
    for model, printed in ((photos, "no bundle"), (tmp_path / "nowhere", "nowhere.*not exist")):
        with pytest.raises(UsageError, match=printed):
            vitlab.predict(model, photos, device="cpu", quiet=True)


def test_truncated_file_is_reported_as_such(photos: Path, predict: Callable[..., Predictions], tmp_path: Path) -> None:
    good = sorted(photos.iterdir())[0]
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:60])
    found = predict([good, tmp_path / "cut.png"])
    assert found.bad == {str(tmp_path / "cut.png"): "is not a readable image: it is damaged or cut short"}
