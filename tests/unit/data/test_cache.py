"""A cached set is the set: the same pixels, the same labels, the same bad images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.cache import PIXELS, in_file, in_memory
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, eval_batches
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.folders import open_folder

QUIET = Console(quiet=True)


def folder(root: Path) -> Dataset:
    noise = np.random.default_rng(0)
    for i in range(6):
        path = root / "data" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (5 + i, 9 - i, 3), dtype=np.uint8)).save(path)
    (root / "data" / "a" / "bad.png").write_bytes(b"no image")
    return open_folder(root / "data").parts["all"]


def pixels(data: Dataset) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    bad = BadImages(1)
    (batch,) = eval_batches(data, Preprocess(image_size=(8, 8)), batch_size=7, bad=bad, workers=1)
    return batch.images, batch.valid, list(bad.found)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_cached_pixels_are_the_decoders(tmp_path: Path, kind: str) -> None:
    data = folder(tmp_path)
    if kind == "memory":
        cached = in_memory(data, Preprocess(), most_gb=1, console=QUIET)
    else:
        cached = in_file(data, Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)
    (images, valid, bad), (again, still, named) = pixels(data), pixels(cached)
    assert torch.equal(images, again)
    assert torch.equal(valid, still)
    assert bad == named == ["a/bad.png"]
    assert cached.fingerprint() == data.fingerprint()


def test_a_file_cache_is_written_once_and_belongs_to_its_data(tmp_path: Path) -> None:
    data = folder(tmp_path)
    in_file(data, Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)
    (place,) = (tmp_path / "cache").iterdir()
    written = (place / PIXELS).stat().st_mtime_ns
    in_file(data, Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)
    assert (place / PIXELS).stat().st_mtime_ns == written
    in_file(data.subset(torch.arange(3)), Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    (place / PIXELS).write_bytes(b"short")
    with pytest.raises(FileProblem, match="cut short"):
        in_file(data, Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)


def test_too_large_a_set_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    data = folder(tmp_path)
    with pytest.raises(UsageError, match="larger than 1e-07 GB"):
        in_memory(data, Preprocess(), most_gb=1e-7, console=QUIET)
    with pytest.raises(UsageError, match="of 7 images fill that"):
        in_file(data, Preprocess(), tmp_path / "cache", most_gb=1e-7, console=QUIET)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_mended_file_and_another_mode_are_cached_anew(tmp_path: Path) -> None:
    data = folder(tmp_path)
    in_file(data, Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)
    assert (
        in_file(data, Preprocess(mode="L", mean=(0.5,), std=(0.5,)), tmp_path / "cache", most_gb=1, console=QUIET)
        .read(0)
        .shape[2]
        == 1
    )
    Image.new("RGB", (3, 3)).save(tmp_path / "data" / "a" / "bad.png")
    mended = in_file(data.subset(torch.arange(7)), Preprocess(), tmp_path / "cache", most_gb=1, console=QUIET)
    assert mended.read(list(mended.keys).index("a/bad.png")).shape == (3, 3, 3)
