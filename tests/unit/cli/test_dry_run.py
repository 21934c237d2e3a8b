"""`--dry-run`: every check that is cheap, a few lines about what would happen, and not one file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.core.planned import Planned
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

CPU = ("--device", "cpu")
CALLS: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluate", "bundle", "photos", "--knn", "--out", "new", *CPU),
    "compare": ("compare", "bundle", "bundle", "photos", "--out", "new", *CPU),
    "predict": ("predict", "bundle", "photos", "--out", "new.csv", *CPU),
    "embed": ("embed", "bundle", "photos", "--out", "new.npz", "--cache", "kept", *CPU),
    "convert": ("convert", "bundle", "new.npz", "--to", "google-npz", "--classes", "3"),
    "split": ("data", "split", "photos", "--out", "new.csv"),
    "shard": ("data", "shard", "photos", "new", "--per-shard", "15"),
}
ROWS = {
    "evaluate": {
        "model": "ViT-w16d2m32h2/8, 16x16, 2 labels, on cpu",
        "data": "photos, all part: 20 images of 2 classes",
        "measures": "answers of the head, kNN",
        "out": "new",
    },
    "compare": {
        "A": "ViT-w16d2m32h2/8, 16x16, 2 labels, on cpu",
        "B": "ViT-w16d2m32h2/8, 16x16, 2 labels, on cpu",
        "data": "photos, all part: 20 images of 2 classes",
        "out": "new",
    },
    "predict": {"model": "ViT-w16d2m32h2/8, 16x16, 2 labels, on cpu", "images": "20 images", "out": "new.csv"},
    "embed": {"model": "ViT-w16d2m32h2/8, 16x16, 2 labels, on cpu", "images": "20 images", "out": "new.npz"},
    "split": {
        "data": "photos: 20 images of 2 classes",
        "parts": "train 16, val 2, test 2, before copies are brought together",
        "out": "new.csv",
    },
    "shard": {"data": "photos: 20 images of 2 classes", "shards": "2 of 15 images at most", "out": "new"},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a bundle and twenty photos of two classes, in which the calls are made."""
    draw = np.random.default_rng(0)
    model = create_model("ViT-w16d2m32h2/8", num_classes=2, image_size=16, seed=0)
    model.head.weight.data.normal_(0, 1)  # pyright: ignore
    save_bundle(tmp_path / "bundle", Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee"), "card", {}))
    for i in range(20):
        path = tmp_path / "photos" / ("ant", "bee")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("verb", CALLS)
def test_dry_run_reports_what_would_happen_and_writes_nothing(verb: str, place: Path, call: Callable[..., Any]) -> None:
    before = files(place)
    printed = call(*CALLS[verb], "--dry-run", "--json")
    assert printed.code == 0, printed.err
    found = json.loads(printed.out)
    assert found["out"] and (verb not in ROWS or found == ROWS[verb])
    printed = call(*CALLS[verb], "--dry-run")
    assert [line.split(maxsplit=1)[0] for line in printed.out.splitlines()] == list(found)
    assert files(place) == before


def test_convert_reports_the_changes(place: Path, call: Callable[..., Any]) -> None:
    found = json.loads(call(*CALLS["convert"], "--dry-run", "--json").out)
    assert found["changes"].startswith("head replaced 2 -> 3")
    assert (found["to"], found["out"]) == ("google-npz", "new.npz")


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(("of", "other"), [("photos", "gone-photos"), ("bundle", "gone-bundle")])
def test_what_is_not_there_is_an_error_as_without_it(
    verb: str, of: str, other: str, place: Path, call: Callable[..., Any]
) -> None:
    words = [other if word == of else word for word in CALLS[verb]]
    if other not in words:
        pytest.skip(f"{verb} takes no {of}")
    wet, dry = call(*words), call(*words, "--dry-run")
    assert dry.code == wet.code != 0
    assert dry.err and set(dry.err.splitlines()) <= set(wet.err.splitlines())


@pytest.mark.parametrize("verb", [verb for verb in CALLS if verb != "shard"])  # which resumes
def test_a_place_that_is_taken_is_an_error(verb: str, place: Path, call: Callable[..., Any]) -> None:
    (out,) = (word for word in CALLS[verb] if word.startswith("new"))
    (place / out).write_text("mine")
    printed = call(*CALLS[verb], "--dry-run")
    assert printed.code != 0 and out in printed.err


@pytest.mark.parametrize("verb", ["evaluate", "predict", "embed", "convert"])
def test_nothing_is_downloaded(
    verb: str, place: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(place / "cache"))
    monkeypatch.delenv("VITLAB_OFFLINE", raising=False)
    before = files(place)
    words = ["ViT-S/14@dinov2" if word == "bundle" else word for word in CALLS[verb]]
    found = json.loads(call(*words, "--dry-run", "--json").out)
    assert found["model"].startswith("ViT-S/14@dinov2, to be downloaded from https://")
    assert files(place) == before


def test_in_python_the_result_is_the_plan(place: Path) -> None:
    found: Any = vitlab.predict("bundle", "photos", dry_run=True, device="cpu", quiet=True)
    assert isinstance(found, Planned) and found.would["images"] == "20 images"
    assert isinstance(vitlab.evaluate("bundle", vtab=True, dry_run=True, device="cpu", quiet=True), Planned)
