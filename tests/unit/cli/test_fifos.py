"""A FIFO in the place of a file is refused at once, wherever it is named or lies: nobody waits for its other end."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitlab.runs.training.training_run import train

Call = Callable[..., Any]
SET = ["train.steps=2", "train.batch_size=4", "data.image_size=8", "train.method=steps"]
PATIENCE = 300  # seconds on the clock, far beyond any load of the machine


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("fifos")
    for name in ("a", "b"):
        (place / "photos" / name).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (8, 8), (number * 30, ord(name), 0)).save(place / "photos" / name / f"{number}.png")
    train(place / "photos", out=place / "run", model="ViT-w8d1m8h2/4", overrides=SET, threads=1, quiet=True)
    return place / "run", place / "photos"


@pytest.fixture(autouse=True)
def no_waiting() -> Generator[None]:
    """A test that waits for ever ends here, by a signal that nobody handles."""
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)


def fifo(path: Path) -> str:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return str(path)


@pytest.mark.parametrize("name", ["x", "x.csv", "x.npz", "x.parquet", "x.tar"])
def test_data_that_is_a_fifo_is_refused(call: Call, tmp_path: Path, name: str) -> None:
    assert call("train", fifo(tmp_path / name), "--dry-run").code == 2


def test_recipe_that_is_a_fifo_is_refused(call: Call, tmp_path: Path, ended: tuple[Path, Path]) -> None:
    code, _, err = call("train", str(ended[1]), "--recipe", fifo(tmp_path / "x.toml"), "--dry-run")
    assert (code, err.splitlines()[0]) == (2, f"vitlab: {tmp_path / 'x.toml'} is a FIFO, not a regular file")
    assert call("recipes", "show", str(tmp_path / "x.toml")).code == 2


@pytest.mark.parametrize("name", ["x", "x.safetensors", "x.npz", "x.bin"])
def test_weights_that_are_a_fifo_are_refused(call: Call, tmp_path: Path, ended: tuple[Path, Path], name: str) -> None:
    assert call("train", str(ended[1]), "--init", fifo(tmp_path / name), "--dry-run").code == 2
    assert call("predict", str(tmp_path / name), str(ended[1] / "a" / "0.png")).code in (1, 2)


def test_image_that_is_a_fifo_is_refused(call: Call, tmp_path: Path, ended: tuple[Path, Path]) -> None:
    assert call("predict", str(ended[0]), fifo(tmp_path / "x.png"), "--workers", "0").code in (1, 2)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.toml", 2),  # no run, then
        *((name, 1) for name in (".lock", "run.json", "metrics.jsonl", "bundle/manifest.json")),
        ("split.csv", 0),  # written anew from the data
        ("env.json", 0),  # for people, as is the log
        ("log.txt", 0),
        # It may hide a whole one: nothing is removed, and the run does not start again.
        *(
            (f"checkpoints/step-000000002/{name}", 1)
            for name in ("manifest.json", "model.safetensors", "progress.json")
        ),
    ],
)
def test_fifo_in_a_run_is_refused_or_replaced(
    call: Call, tmp_path: Path, ended: tuple[Path, Path], name: str, code: int
) -> None:
    shutil.copytree(ended[0], tmp_path / "run")
    fifo(tmp_path / "run" / name)
    resumed = call("train", "--resume", str(tmp_path / "run"), "--threads", "1", "--quiet")
    assert resumed.code == code, resumed.err
    assert "fault in vitlab" not in resumed.err


def test_real_process_answers_at_once(vitlab: str, tmp_path: Path) -> None:
    command = [vitlab, "recipes", "show", fifo(tmp_path / "x.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a FIFO, not a regular file" in done.stderr
