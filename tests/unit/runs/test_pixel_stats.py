"""Images of another kind than the training images are warned of, and those of the same kind are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import vitlab
from vitlab.data.pixel_stats import PixelStats, training_stats
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.folders import open_folder
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle

RULE = Preprocess(mode="L", image_size=(16, 16), mean=(0.5,), std=(0.5,))
Pixels = npt.NDArray[Any]
KINDS: dict[str, Callable[[Pixels], Pixels]] = {
    "inverted": lambda image: 255 - image,
    "0 to 1": lambda image: (image > 127).astype(np.uint8),
    "12 of 16 bits": lambda image: image.astype(np.uint16) * 16,
}


def write_images(
    folder: Path, count: int, change: Callable[[Pixels], Pixels] = lambda image: image, seed: int = 0
) -> Path:
    """Bright strokes on a dark ground, as X-rays and handwriting are, of two classes with unequal light."""
    draw = np.random.default_rng(seed)
    for i in range(count):
        image = draw.integers(0, 60, (16, 16)).astype(np.uint8)
        image[4:12, 6 + i % 2 : 10 + 2 * (i % 2)] = draw.integers(180, 256)
        path = folder / "ab"[i % 2] / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(change(image)).save(path)
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    stats = training_stats(open_folder(write_images(folder / "train", 60)).parts["all"], RULE)
    model = create_model("ViT-w16d2m32h2/8", num_classes=2, image_size=16, in_channels=1, seed=0)
    model.head.weight.data.normal_(0, 1)  # pyright: ignore
    save_bundle(folder / "b", Bundle(model, RULE, ("a", "b"), "card", {}, pixels=stats))
    return folder / "b"


def warnings(bundle: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """How often `predict` and `evaluate` warn."""
    vitlab.predict(bundle, images, device="cpu", workers=0)
    printed = capsys.readouterr().err.count("unlike those of training")
    found = vitlab.evaluate(bundle, images, device="cpu", workers=0, resamples=1, quiet=True)
    return printed, sum("unlike those of training" in note for note in found.notes)


@pytest.mark.parametrize("kind", KINDS)
def test_other_images_are_warned_of_once(
    kind: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "new", 40, KINDS[kind], seed=1)
    assert warnings(bundle, images, capsys) == (1, 1)


def test_new_images_of_the_same_kind_pass(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "new", 40, seed=1)
    assert warnings(bundle, images, capsys) == (0, 0)


def test_one_class_alone_passes(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitlab.predict(bundle, write_images(tmp_path / "new", 80, seed=1) / "b", device="cpu", workers=0)
    assert "unlike" not in capsys.readouterr().err


def test_few_images_are_too_few_to_judge_by(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(tmp_path / "new", 31, KINDS["inverted"], seed=1)
    assert warnings(bundle, images, capsys) == (0, 0)


def test_another_preprocessing_is_warned_of(bundle: Path, tmp_path: Path) -> None:
    rule = '{"mode": "L", "image_size": [16, 16], "mean": [0.0], "std": [1.0]}'
    (tmp_path / "raw.json").write_text(rule)
    images = write_images(tmp_path / "new", 40, seed=1)
    raw = str(tmp_path / "raw.json")
    found = vitlab.evaluate(bundle, images, preprocess=raw, device="cpu", workers=0, resamples=1, quiet=True)
    assert any("unlike those of training" in note for note in found.notes)


def test_a_run_stores_its_statistics_and_its_config(transfer: Any) -> None:
    folder = transfer.result.folder
    found = read_bundle(folder / "bundle")
    assert isinstance(found.pixels, PixelStats) and found.pixels.mean_spread > 0
    assert found.recipe == (folder / "config.toml").read_text()


def test_a_bundle_of_before_has_neither(tmp_path: Path) -> None:
    model = create_model("ViT-w16d2m32h2/8", num_classes=2, image_size=16, in_channels=1)
    save_bundle(tmp_path / "b", Bundle(model, RULE, ("a", "b"), "card", {}))
    assert not (tmp_path / "b" / "recipe.toml").exists()
    found = read_bundle(tmp_path / "b")
    assert (found.pixels, found.recipe) == (None, "")
