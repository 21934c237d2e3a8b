"""The start that a run takes where nobody names one: the cache's weights, downloaded ones, or the package's own."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

import vitlab
from vitlab.core.console import Console
from vitlab.core.environment import CACHE_VARIABLE, OFFLINE_VARIABLE
from vitlab.core.errors import UsageError
from vitlab.training.recipe import SCRATCH
from vitlab.training.start import PREFERRED, SHIPPED, auto_start
from vitlab.weights.catalogue import CATALOGUE_VARIABLE, find

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(OFFLINE_VARIABLE, raising=False)


def publish(folder: Path, monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    """A catalogue whose first choice lies in `folder`, or should."""
    folder.mkdir()
    if there:
        (folder / "weights.pth").write_bytes(b"weights")
    table = f"""[[family]]
tag = "dinov2"
title = "of a test"
format = "dinov2"
folder = "{folder.as_uri()}/"
licence = "Apache-2.0"
sources = []
preprocess = {{ image_size = [224, 224] }}
checkpoints = [{{ model = "ViT-S/14", file = "weights.pth", size = 7 }}]
"""
    (folder / "catalogue.toml").write_text(table)
    monkeypatch.setenv(CATALOGUE_VARIABLE, str(folder / "catalogue.toml"))


def test_weights_in_the_cache_come_first() -> None:
    path = find(PREFERRED[2]).path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    start = auto_start(["photos"], QUIET, fetch=True)
    assert start.init == PREFERRED[2]
    assert "from the cache" in start.note


def test_weights_are_announced_with_size_and_licence_and_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "publisher", monkeypatch, there=True)
    console = Console(quiet=True)
    assert auto_start(["photos"], console, fetch=True).init == PREFERRED[0]
    assert find(PREFERRED[0]).path.read_bytes() == b"weights"
    assert any("Apache-2.0" in line and "--init scratch" in line for line in console.lines)


def test_dry_run_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "publisher", monkeypatch, there=True)
    start = auto_start(["photos"], QUIET, fetch=False)
    assert (start.init, "to be downloaded" in start.note) == (PREFERRED[0], True)
    assert not (tmp_path / "cache").exists()


def test_nothing_is_downloaded_for_data_that_cannot_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "publisher", monkeypatch, there=True)
    for name in ("bee", "ant", "wasp"):
        (tmp_path / "photos" / name).mkdir(parents=True)
    for k in range(4):
        Image.new("RGB", (16, 16), (60 * k, 0, 0)).save(tmp_path / "photos" / ("bee", "ant")[k % 2] / f"{k}.png")
    with pytest.raises(UsageError, match="has no image of: wasp"):
        vitlab.train(tmp_path / "photos", out=tmp_path / "run", quiet=True)
    assert not find(PREFERRED[0]).path.exists()


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_download_the_shipped_weights_start_and_the_better_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    publish(tmp_path / "publisher", monkeypatch, there=offline)  # a download that fails, and one that is forbidden
    if offline:
        monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    start = auto_start(["my photos"], QUIET, fetch=True)
    assert start.init == SHIPPED and find(SHIPPED).path.is_file()
    assert "11 MB" in start.note and "--init scratch" in start.note
    assert f"vitlab train 'my photos' --init {PREFERRED[0]}" in start.note
    unnamed = auto_start([], QUIET, fetch=True).note  # data in Python, which no command names
    assert f"give --init {PREFERRED[0]}" in unnamed and "vitlab train" not in unnamed
    shutil.rmtree(tmp_path / "publisher")


def test_weights_that_cannot_see_the_size_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv2's patches of 14 do not divide 256 pixels; those of 16 do."""
    assert auto_start(["photos"], QUIET, fetch=False, size=(256, 256)).init == "ViT-S/16@augreg-i21k"
    assert auto_start(["photos"], QUIET, fetch=False, size=(224, 224)).init == PREFERRED[0]
    monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    assert auto_start(["photos"], QUIET, fetch=True, size=(256, 256)).init == SHIPPED
    start = auto_start(["photos"], QUIET, fetch=True, size=(98, 98))
    assert (start.init, "patch 16 does not divide" in start.note) == (SCRATCH, True)
