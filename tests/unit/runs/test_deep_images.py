"""Images of 12 bits in files of 16: the range is the set's, found when it is looked at, and kept with the weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_jobs import plan_train

import vitlab
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.data.auditing import preflight
from vitlab.runs.training.resolve import Job

SMALL = ["train.steps=1", "train.batch_size=4", "data.image_size=[8,8]", "train.precision=fp32"]


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """What a microscope's camera of 12 bits writes: the brightest pixel of all is 3,900."""
    draw = np.random.default_rng(0)
    for i in range(20):
        pixels = draw.integers(0, 2000, (8, 8), dtype=np.uint16)
        pixels[0, 0] = 3900 if i == 13 else 1000
        path = tmp_path / "scans" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "scans"


def plan(data: Path, *more: str, **given: Any) -> Job:
    settings = {"recipe": None, "init": None, "model": "ViT-w16d1m32h2/4", "seed": 0, **given}
    world = World(0, 1, torch.device("cpu"))
    return plan_train(data, overrides=[*SMALL, *more], world=world, console=Console(quiet=True), **settings)


def test_range_is_found_and_reported_and_can_be_given(scans: Path) -> None:
    found = plan(scans)
    assert found.recipe.data.bits == 12
    assert any(note.startswith("data.bits=12: ") for note in found.notes)
    printed = plan(scans, "data.bits=16")
    assert printed.recipe.data.bits == 16 and not any("data.bits" in note for note in printed.notes)
    swept = plan(scans, sweep="optim.lr=0.1,0.2")
    assert swept.sweep is not None and {one.data.bits for one in swept.sweep.recipes} == {12}


def test_range_of_a_large_set_is_found_from_a_sample(scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_AUDITED", 10)
    assert plan(scans).recipe.data.bits == 12


def test_photos_have_no_bits_to_find(scans: Path) -> None:
    for path in scans.rglob("*.png"):
        with Image.open(path) as picture:
            shown = np.asarray(picture).astype(np.uint8)
        Image.fromarray(shown).save(path)
    found = plan(scans)
    assert found.recipe.data.bits == 16 and not any("data.bits" in note for note in found.notes)


def test_weights_bring_the_range_along(scans: Path, tmp_path: Path) -> None:
    done = vitlab.train(
        scans, out=tmp_path / "run", model="ViT-w16d1m32h2/4", overrides=SMALL, device="cpu", threads=1, quiet=True
    )
    assert json.loads((done.bundle / "preprocess.json").read_text())["bits"] == 12
    for name, white in (("deep", np.uint16(4095)), ("plain", np.uint8(255))):
        Image.fromarray(np.full((8, 8), white)).save(tmp_path / f"{name}.png")
    model = vitlab.load(done.bundle, device="cpu")
    deep, plain = (model(tmp_path / f"{name}.png") for name in ("deep", "plain"))
    assert [row.p for row in deep] == [row.p for row in plain], "white in both, and not 15 of 255 in one"


def test_check_says_what_the_files_make_use_of(scans: Path) -> None:
    found = vitlab.check_data(scans, workers=1, quiet=True)
    assert found.bits == 12 and any("make use of 12" in note for note in found.notes)
    assert "duplicate" not in found.counts
