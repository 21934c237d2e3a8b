"""Two and four processes train as one does, grow out of one, stop together, and refuse together."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.weights.containers import read_arrays

pytestmark = pytest.mark.slow
Run = Callable[..., subprocess.CompletedProcess[str]]
FILES = {"config.toml", "env.json", "split.csv", "metrics.jsonl", "metrics.csv", "checkpoints", "bundle", "log.txt"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def worlds(place: Path, run: Run) -> dict[str, Any]:
    script = Path(__file__).with_name("forked_runs.py")
    return json.loads(run([sys.executable, script, "worlds", place], cwd=place).stdout)


@pytest.mark.parametrize("name", ["2", "4", "pieces", "grown"])
def test_loss_and_weights_are_those_of_one_process(worlds: dict[str, Any], name: str) -> None:
    one, many = worlds["1"], worlds[name]
    assert set(many["codes"]) == {0}
    assert len(many["losses"]) == 6
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-6)
    theirs = read_arrays(Path(many["weights"])).arrays
    for key, value in read_arrays(Path(one["weights"])).arrays.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=key)


def test_one_process_writes_for_all(worlds: dict[str, Any]) -> None:
    for name in ("1", "2", "4", "grown"):
        assert set(worlds[name]["files"]) == FILES | {".lock"}, name


def test_batch_that_cannot_be_shared_is_refused_by_all_before_anything_is_made(worlds: dict[str, Any]) -> None:
    assert (worlds["uneven"]["codes"], worlds["uneven"]["files"]) == ([2, 2, 2], [])


def test_numbers_that_are_none_stop_all_and_the_images_of_all_are_named(worlds: dict[str, Any], place: Path) -> None:
    assert worlds["nan"]["codes"] == [1, 1]
    assert "bundle" not in worlds["nan"]["files"]
    noted = json.loads((place / "nan" / "bad_batch.json").read_text())
    assert len(noted["images"]) == 8, "four of each process"


def test_signal_to_one_stops_all_with_one_checkpoint(worlds: dict[str, Any]) -> None:
    found = worlds["signal"]
    assert found["codes"] == [143, 143]
    assert found["saved"] == [f"step-{found['steps']:09d}"]
    assert 3 <= found["steps"] < 200
