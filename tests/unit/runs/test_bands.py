"""Images of five channels, as of satellites: measured, trained and evaluated as they are."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.auditing.preflight import measured_bands, median_side
from vitlab.data.dataset import from_arrays
from vitlab.data.decode import decode, read
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.folders import read_image
from vitlab.data.sources.loose_images import open_loose
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import load
from vitlab.runs.evaluation.evaluation_run import evaluate
from vitlab.runs.evaluation.prediction import predict
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


def test_images_of_different_channels_are_reported(tmp_path: Path) -> None:
    data = open_data(scenes(tmp_path))
    np.save(tmp_path / "water" / "3.npy", np.zeros((9, 8, 4), np.uint8))
    with pytest.raises(UsageError, match=r"water/3\.npy has 4 channels, .* 5"):
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


# --- more than 8 bits, floats, and TIFF -----------------------------------------------------------------------------------


def deep_scenes(folder: Path, kind: str) -> Path:
    """Twelve of sixteen bits, as sensors have; every channel has a range of its own."""
    for name in ("field", "water"):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            pixels = DRAW.integers(0, 800 * np.arange(1, 6), (9, 8, 5)).astype(np.uint16)
            pixels[0, 0] = 4000
            match kind:
                case "npy":
                    np.save(folder / name / f"{i}.npy", pixels)
                case "float":
                    np.save(folder / name / f"{i}.npy", (pixels / 4095).astype(np.float32))
                case "big-endian":
                    np.save(folder / name / f"{i}.npy", pixels.astype(">u2"))
                case _:
                    planar = "separate" if kind == "planar" else "contig"
                    given = pixels.transpose(2, 0, 1) if kind == "planar" else pixels
                    tifffile.imwrite(
                        folder / name / f"{i}.tif",
                        given,
                        photometric="minisblack",
                        planarconfig=planar,
                        compression="zlib",
                    )
    return folder


@pytest.mark.parametrize("kind", ["npy", "float", "big-endian", "tiff", "planar"])
def test_bands_of_more_than_8_bits_use_the_range_that_they_have(tmp_path: Path, kind: str) -> None:
    data = open_data(deep_scenes(tmp_path, kind)).parts["all"]
    raw = np.stack([data.read(i) for i in range(20)])
    assert raw.shape == (20, 9, 8, 5)
    bands = measured_bands(data)
    assert bands is not None
    assert bands.bits == (None if kind == "float" else 12)
    share = raw.reshape(-1, 5) / (1 if kind == "float" else 4095)
    assert np.allclose(bands.mean, share.mean(axis=0), atol=0.003)
    assert np.allclose(bands.std, share.std(axis=0), atol=0.003)
    seen = read(data.read(0), Preprocess(mode="array", bits=12, image_size=(9, 8), mean=(0.5,) * 5, std=(0.5,) * 5))
    assert np.abs(seen.permute(1, 2, 0).numpy() - share[:72].reshape(9, 8, 5) * 255).max() <= 1


@pytest.mark.parametrize("kind", slow_after(1, ["tiff", "npy", "float"]))
def test_deep_bands_are_trained_evaluated_and_predicted(tmp_path: Path, kind: str) -> None:
    data, run = deep_scenes(tmp_path / "scenes", kind), tmp_path / "run"
    train(data, out=run, model="ViT-w8d1m8h2/4", overrides=SET, threads=1, quiet=True)
    assert ("data.bits=12" in (run / "log.txt").read_text()) == (kind != "float")
    assert load(run).preprocess.bits == (16 if kind == "float" else 12)
    assert evaluate(run, data, part="test", device="cpu", quiet=True).n == 4
    found = predict(run, data / "water", device="cpu", quiet=True)
    assert [Path(row.path).stem for row in found.rows] == [str(i) for i in range(10)] and not found.bad


def test_tiff_of_bands_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(deep_scenes(tmp_path, "tiff")).parts["all"]
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(FileProblem, match=r"TIFF of 5 bands\..* pip install 'vitlab\[tiff\]'"):
        data.read(0)


def test_tiffs_that_pillow_reads_stay_its_own_and_damaged_ones_are_errors(tmp_path: Path) -> None:
    photo = Image.fromarray(DRAW.integers(0, 256, (9, 8, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.tif")
    assert isinstance(read_image(tmp_path / "photo.tif"), bytes)
    whole = (deep_scenes(tmp_path / "deep", "tiff") / "field" / "0.tif").read_bytes()
    for length in (4, 8, 100, len(whole) // 2, len(whole) - 10):
        (tmp_path / "cut.tif").write_bytes(whole[:length])
        with pytest.raises(FileProblem):
            decode(read_image(tmp_path / "cut.tif"), "RGB")


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 5), np.int32), np.zeros((4, 4, 5), bool), np.zeros((4, 4, 5, 2))])
def test_arrays_of_other_kinds_are_errors(tmp_path: Path, pixels: "np.ndarray[Any, Any]") -> None:
    np.save(tmp_path / "x.npy", pixels)
    with pytest.raises(FileProblem, match=r"not uint8, uint16 or float \[rows, columns, channels\]"):
        read_image(tmp_path / "x.npy")


def test_arrays_beside_photos_are_not_predicted(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.zeros(4))
    Image.new("RGB", (4, 4)).save(tmp_path / "photo.png")
    assert [Path(key).name for key in open_loose([tmp_path]).keys] == ["photo.png"]
