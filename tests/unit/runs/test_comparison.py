"""`vitlab.compare`: the same images for both, every number held to its reference."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

import vitlab
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.evaluation.paired import Comparison
from vitlab.evaluation.records import hash_weights, read_records
from vitlab.models.build import create_model
from vitlab.runs.training import run_folder
from vitlab.weights.bundle import Bundle, save_bundle

CLASSES = ("a", "b", "c")


def make_model(path: Path, labels: tuple[str, ...], seed: int, size: int) -> Path:
    model = create_model("ViT-w16d1m32h2/8", num_classes=len(labels), image_size=size, seed=seed).eval()
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    save_bundle(path, Bundle(model, Preprocess(image_size=(size, size)), labels, "card", {}))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("compare")
    noise = np.random.default_rng(0)
    for name in CLASSES:
        (root / "data" / name).mkdir(parents=True)
        for i in range(12):
            Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(root / "data" / name / f"{i}.png")
    make_model(root / "first", CLASSES, 1, 16)
    make_model(root / "second", ("c", "a", "b"), 2, 24)  # other preprocessing, other order of labels
    return root


def compare(*given: Any, **options: Any) -> Comparison:
    return vitlab.compare(*given, **{"device": "cpu", "threads": 1, "quiet": True, "resamples": 50, **options})


def right(place: Path, name: str) -> np.ndarray:
    classifier = vitlab.load(place / name, device="cpu")
    return np.array([classifier(file)[0].label == file.parent.name for file in sorted((place / "data").rglob("*.png"))])


def test_numbers_are_those_of_asking_both_image_by_image(place: Path) -> None:
    found = compare(place / "first", place / "second", place / "data")
    a, b = right(place, "first"), right(place, "second")
    assert (found.n, found.top1_a, found.top1_b) == (36, pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert found.difference == pytest.approx(b.mean() - a.mean())
    assert (found.only_a, found.only_b) == (int((a & ~b).sum()), int((b & ~a).sum()))
    assert (found.both_right, found.both_wrong) == (int((a & b).sum()), int((~a & ~b).sum()))
    assert found.p == pytest.approx(stats.binomtest(found.only_a, found.only_a + found.only_b).pvalue)
    assert found.interval[0] <= found.difference <= found.interval[1]
    for row in found.per_class:
        assert row["difference"] == pytest.approx(row["b"] - row["a"])
        assert row["n"] == 12


def test_model_beside_itself_does_not_differ(place: Path) -> None:
    found = compare(place / "first", place / "first", place / "data")
    assert (found.difference, found.interval, found.p, found.p_mid) == (0, (0, 0), 1, 1)
    assert found.same_answer == found.n


def test_exchange_of_the_two_turns_the_sign_alone(place: Path) -> None:
    one = compare(place / "first", place / "second", place / "data")
    other = compare(place / "second", place / "first", place / "data")
    assert (one.difference, one.only_a, one.p) == (-other.difference, other.only_b, other.p)


def test_folder_holds_numbers_answers_and_a_page_with_the_images_that_one_gets_right(
    place: Path, tmp_path: Path
) -> None:
    found = compare(place / "first", place / "second", place / "data", out=tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert stored["difference"] == found.difference
    with (tmp_path / "out" / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(row["a"] == row["truth"] != row["b"] for row in rows) == found.only_a
    page = (tmp_path / "out" / "report.html").read_text()
    assert "McNemar" in page and page.count("<script") == 1
    assert page.count("data:image/jpeg") == min(12, found.only_a) + min(12, found.only_b)


def test_difference_and_what_chance_makes_of_it_become_records(place: Path, tmp_path: Path) -> None:
    found = compare(place / "first", place / "second", place / "data", out=tmp_path / "out", seed=3)
    records = {record.measure: record for record in read_records(tmp_path / "out" / "records")}
    values = {name: record.value for name, record in records.items()}
    assert values == {"top1-difference": found.difference, "mcnemar-p": found.p, "mcnemar-p-mid": found.p_mid}
    record = records["top1-difference"]
    assert (record.interval, record.n, record.part, record.seconds) == (found.interval, found.n, "all", found.seconds)
    assert record.fingerprint == open_data(place / "data").part("all").fingerprint()
    hashes = [hash_weights(vitlab.load(place / name, device="cpu").model) for name in ("first", "second")]
    assert [record.settings[which]["weights"] for which in "ab"] == hashes and record.weights == hashes[1]
    assert record.command.endswith("--part all --resamples 50 --seed 3") and record.hardware["device"] == "cpu"


def test_both_models_are_checked_before_the_first_is_run(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stranger = make_model(tmp_path / "stranger", ("a", "x"), 1, 16)
    for second, error, text in (
        (tmp_path / "nowhere", UsageError, "nowhere.*not exist"),
        (place / "data", UsageError, "data.*no bundle"),
        (stranger, UsageError, r"B \(.*stranger\).*2 of the 3 classes"),
    ):
        with pytest.raises(error, match=text):
            compare(place / "first", second, place / "data", quiet=False)
    assert "images/s" not in capfd.readouterr().err  # the progress of asking


def test_numbers_that_nobody_keeps_say_how_to_keep_them(place: Path, tmp_path: Path) -> None:
    given = (place / "first", place / "second", place / "data")
    assert any("--out DIR" in line for line in compare(*given).sentences())
    assert not any("--out DIR" in line for line in compare(*given, out=tmp_path / "out").sentences())


def test_image_that_cannot_be_read_is_left_out_for_both(place: Path, tmp_path: Path) -> None:
    for name in CLASSES:
        (tmp_path / "d" / name).mkdir(parents=True)
        (tmp_path / "d" / name / "0.png").write_bytes((place / "data" / name / "0.png").read_bytes())
    (tmp_path / "d" / "a" / "1.png").write_bytes(b"no picture")
    assert compare(place / "first", place / "second", tmp_path / "d").n == 3


def test_model_that_lacks_a_class_and_missing_data_are_reported(place: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", ("a", "b", "x"), 3, 16)
    with pytest.raises(UsageError, match="1 of the 3 classes"):
        compare(place / "first", tmp_path / "other", place / "data")
    with pytest.raises(UsageError, match="give the data"):
        compare(place / "first", place / "second")
    with pytest.raises(VitlabError, match="not exist"):
        compare(place / "first", tmp_path / "none", place / "data")
    with pytest.raises(UsageError, match="--resamples"):
        compare(place / "first", place / "second", place / "data", resamples=0)


def make_run(folder: Path, data: Path, model: Path, held_out: set[int]) -> Path:
    """What a run on a folder without parts leaves: its config, who was held out, and the bundle."""
    config = f'init = "ViT-B/16@i21k"\n[data]\nsource = "{data}"\n'
    rows = [f"{name}/{i}.png,{name},{'test' if i in held_out else 'train'}" for name in CLASSES for i in range(12)]
    split = "\n".join(["path,label,split", *rows]) + "\n"
    run_folder.start(folder, config, split, run_folder.RunFile("a test", ""), [])
    shutil.copytree(model, folder / "bundle")
    return folder


def test_runs_of_other_splits_are_compared_on_what_both_held_out(place: Path, tmp_path: Path) -> None:
    data = place / "data"
    a = make_run(tmp_path / "a", data, place / "first", {0, 1, 2, 3})
    b = make_run(tmp_path / "b", data, place / "second", {2, 3, 4, 5})
    found = compare(a, b)
    assert (found.n, found.part) == (6, "test")
    assert any("6 of 12 images" in note for note in found.notes)
    assert compare(a, a).n == 12
    assert compare(place / "first", b, data).n == 12  # nothing is known of the first, so what B held out
    with pytest.raises(UsageError, match="both runs held out"):
        compare(a, make_run(tmp_path / "c", data, place / "second", {7, 8}))


def test_bundle_inside_a_run_is_measured_as_the_run(place: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", place / "data", place / "first", {0, 1, 2, 3})
    plain, inside = (
        vitlab.evaluate(model, device="cpu", threads=1, quiet=True, resamples=5) for model in (run, run / "bundle")
    )
    assert (inside.n, inside.part, inside.top1) == (12, "test", plain.top1)


def test_data_before_the_models_is_reported(place: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)model comes first.*second holds one"):
        compare(place / "data", place / "first", place / "second")
