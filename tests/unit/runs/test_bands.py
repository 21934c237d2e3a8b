"""Images of five channels, as of satellites: measured, trained and evaluated as they are."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.data.auditing.preflight import measured_bands, median_side
from vitlab.data.dataset import from_arrays
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import load
from vitlab.runs.evaluation.evaluation_run import evaluate
from vitlab.runs.training.training_run import train

SET = ["train.steps=2", "train.batch_size=4", "data.image_size=8", "data.workers=0", "train.method=steps"]
DRAW = np.random.default_rng(0)


def scenes(folder: Path, channels: int = 5) -> Path:
    for name in ("field", "water"):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            # Every channel has a range of its own, so that means that are mixed up are seen.
            pixels = DRAW.integers(0, 20 + 40 * np.arange(channels), (9, 8, channels)).astype(np.uint8)
            np.save(folder / name / f"{i}.npy", pixels)
    return folder


def test_mean_and_std_are_those_of_every_channel(tmp_path: Path) -> None:
    data = open_data(scenes(tmp_path)).parts["all"]
    pixels = np.stack([data.read(i) for i in range(20)]).reshape(-1, 5) / 255
    bands = measured_bands(data)
    assert bands is not None
    assert np.allclose(bands.mean, pixels.mean(axis=0), atol=1e-4) and np.allclose(
        bands.std, pixels.std(axis=0), atol=1e-4
    )
    assert median_side(data) == 8


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_colour_are_not_measured(channels: int) -> None:
    assert measured_bands(from_arrays(torch.zeros(2, channels, 4, 4, dtype=torch.uint8), [0, 1], "ab")) is None


def test_images_of_different_channels_are_told(tmp_path: Path) -> None:
    data = open_data(scenes(tmp_path))
    np.save(tmp_path / "water" / "3.npy", np.zeros((9, 8, 4), np.uint8))
    with pytest.raises(UsageError, match=r"water/3.npy has 4 channels, where others have 5"):
        measured_bands(data.parts["all"])


def test_training_takes_all_channels_and_evaluation_too(tmp_path: Path) -> None:
    data, run = scenes(tmp_path / "scenes"), tmp_path / "run"
    overrides = [*SET, "data.augment.hue=0.1"]
    train(data, out=run, model="ViT-w8d1m8h2/4", overrides=overrides, threads=1, quiet=True)
    log = (run / "log.txt").read_text()
    assert "images of 5 channels: data.mode=array" in log
    assert re.search("off, for they are for colours: .*hue\n", log)
    model = load(run)
    assert model.model.spec.in_channels == model.preprocess.channels == 5
    assert model.preprocess.mean[0] < model.preprocess.mean[4]
    assert evaluate(run, data, threads=1, quiet=True).n == 4
