"""What `vitlab.train` gives back can be read on in Python: its history, its curves and its classifier."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import vitlab
from vitlab.core.errors import FileProblem
from vitlab.core.planned import Planned
from vitlab.runs.training.training_run import TrainResult

TINY: dict[str, Any] = {
    "model": "ViT-w16d2m32h2/8",
    "image_size": 16,
    "overrides": ["train.steps=3", "train.batch_size=4"],
    "device": "cpu",
    "threads": 1,
    "quiet": True,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(12):
        path = folder / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def result(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return vitlab.train(pictures, out=tmp_path_factory.mktemp("runs") / "run", init="scratch", **TINY)


def test_history_has_a_row_for_each_step(result: TrainResult) -> None:
    lines = (result.run / "metrics.jsonl").read_text().splitlines()
    assert result.history == [json.loads(line) for line in lines]
    assert [row["step"] for row in result.history] == [1, 2, 3]
    assert all({"loss", "lr", "grad_norm", "images_per_second"} <= row.keys() for row in result.history)


def test_load_gives_the_trained_classifier(result: TrainResult, pictures: Path) -> None:
    picture = pictures / "class0" / "0.png"
    ours, theirs = result.load(), vitlab.load(result.bundle, quiet=True)
    assert ours.labels == ("class0", "class1")
    assert torch.equal(ours.logits([picture]), theirs.logits([picture]))


def test_plot_draws_loss_and_rate_of_every_step(result: TrainResult) -> None:
    figure = result.plot()
    assert isinstance(figure, Figure)
    loss, rate = (axes.lines[0] for axes in figure.axes)
    assert list(loss.get_ydata()) == [row["loss"] for row in result.history]
    assert list(rate.get_ydata()) == [row["lr"] for row in result.history]


def test_plot_writes_a_file_on_request(result: TrainResult, tmp_path: Path) -> None:
    result.plot(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_bytes().startswith(b"<?xml")


def test_a_dry_run_gives_a_plan_instead_of_a_result(pictures: Path) -> None:
    planned: Any = vitlab.train(pictures, init="scratch", dry_run=True, **TINY)
    assert isinstance(planned, Planned) and planned.would["start"] == "scratch"
    assert planned.sentences()[0] == f"out{'':8}{planned.would['out']}"


def test_a_missing_history_is_reported_with_its_file(result: TrainResult, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"holds no metrics\.jsonl"):
        _ = dataclasses.replace(result, run=tmp_path).history
