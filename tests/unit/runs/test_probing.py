"""A head that is fitted at once: what was computed before a stop is not computed again, and the head has the same bits."""

import csv
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitlab
from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import VitlabError
from vitlab.core.runtime import generator
from vitlab.data.dataset import Dataset, from_arrays
from vitlab.data.preprocess import Preprocess
from vitlab.evaluation.features import CHUNK_ROWS
from vitlab.models.build import create_model
from vitlab.runs.recipe import Recipe
from vitlab.runs.training.parts import Parts
from vitlab.training.probe import L2_GRID
from vitlab.weights.bundle import Bundle, save_bundle

CLASSES = ("a", "b", "c", "d")
LAST = 40  # images behind two whole chunks; no whole batch


class Killed(BaseException):
    """Nothing in vitlab expects this."""


def noise(count: int, seed: int) -> Dataset:
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator(seed))
    return from_arrays(images, torch.arange(count) % len(CLASSES), CLASSES, f"noise {seed}")


@pytest.fixture(scope="module")
def data() -> Parts:
    return Parts(noise(2 * CHUNK_ROWS + LAST, 0), noise(64, 1), noise(16, 2), ())


@pytest.fixture
def recipe(tiny: Callable[..., Recipe]) -> Recipe:
    return tiny("train.method=probe", "train.batch_size=48")


def kill_at_chunk(number: int) -> fsio.Listener:
    def listener(operation: fsio.Operation, path: Path) -> None:
        if operation == "rename" and path.name.startswith(f"{number:06d}-"):
            raise Killed

    return listener


@pytest.mark.parametrize("number", [0, 1, 2])
def test_resumed_head_has_the_bits_of_one_that_was_never_stopped(
    tmp_path: Path, recipe: Recipe, data: Parts, run: Callable[..., Any], number: int
) -> None:
    with pytest.raises(Killed), fsio.intercept(kill_at_chunk(number)):
        run(recipe, tmp_path / "run", data)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "features" / "train").glob("*.npy")}
    assert len(kept) == number
    console = Console(quiet=True)
    run(recipe, tmp_path / "run", data, resume=True, console=console)
    told = f"features: {number * CHUNK_ROWS:,} of {len(data.train):,} are in the cache"
    assert (told in console.lines) == bool(number)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()), "computed once"
    run(recipe, tmp_path / "whole", data)
    resumed, whole = (tmp_path / name / "bundle" / "model.safetensors" for name in ("run", "whole"))
    assert resumed.read_bytes() == whole.read_bytes()


def test_images_that_cannot_be_read_are_left_out_and_counted(
    tmp_path: Path, tiny: Callable[..., Recipe], run: Callable[..., Any]
) -> None:
    good = noise(24, 0)

    def read(i: int) -> "bytes | np.ndarray[Any, Any]":
        return b"no picture" if i in (3, 17) else good.read(i)

    train = dataclasses.replace(good, read=read)
    parts = Parts(train, None, noise(8, 2), ())
    result = run(tiny("train.method=probe"), tmp_path / "run", parts)
    assert set(result.bad) == {train.keys[3], train.keys[17]}
    with pytest.raises(VitlabError, match=r"2 images could not be read.*\n.*data\.max_bad allows more"):
        run(tiny("train.method=probe", "data.max_bad=1"), tmp_path / "strict", parts)


# --- a real process and a real signal ---------------------------------------------------------------------------------

IMAGES = 96  # all in one chunk, so that what is kept was not whole
AT_ONCE = 8
# `vitlab`, with a model that takes its time, so that it is stopped in the midst of its features.
SLOW = """
import time
from vitlab.models.vit import ViT
plain = ViT.represent
def slow(self, *given):
    time.sleep(0.3)
    return plain(self, *given)
ViT.represent = slow
from vitlab.cli.main import main
main()
"""


def test_signal_in_the_first_chunk_costs_no_more_than_a_batch(tmp_path: Path) -> None:
    model = create_model("ViT-w16d2m32h2/8", num_classes=2, image_size=16, seed=0)
    save_bundle(tmp_path / "start", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b"), "card", {}))
    source, start = f"fractals:categories=4,instances={IMAGES // 4},image_size=16", str(tmp_path / "start")
    overrides = ["train.method=probe", f"train.batch_size={AT_ONCE}", "data.workers=0"]
    command = [sys.executable, "-c", SLOW, "train", source, "--init", start, "--out", str(tmp_path / "run")]
    command += ["--device", "cpu", "--threads", "1", *(part for key in overrides for part in ("--set", key))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    while seen.count("\nfeatures ") < 2:  # the second batch may be lost, the first may not
        line = process.stderr.readline()
        assert line, f"it ended before its features: {seen}"
        seen += line
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=300)[1]
    assert (process.returncode, "Go on with:  vitlab train --resume" in told) == (143, True), told
    (begun,) = (tmp_path / "run" / "features" / "train").glob("*.npy")
    kept = len(np.load(begun))
    assert begun.name.startswith("begun-") and kept and kept % AT_ONCE == 0

    vitlab.train(resume=tmp_path / "run", device="cpu", threads=1, quiet=True)
    assert f"features: {kept} of " in (tmp_path / "run" / "log.txt").read_text()
    out = tmp_path / "whole"
    vitlab.train(source, init=start, out=out, overrides=overrides, device="cpu", threads=1, quiet=True)
    for file in ("features/train/*.npy", "bundle/model.safetensors", "metrics.jsonl", "metrics.csv"):
        (one,), (other,) = ((tmp_path / run).glob(file) for run in ("run", "whole"))
        assert (one.name, one.read_bytes()) == (other.name, other.read_bytes())


# --- what it measured -------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_have_a_row_for_every_strength_that_was_tried(
    tmp_path: Path, tiny: Callable[..., Recipe], parts: Callable[..., Parts], run: Callable[..., Any]
) -> None:
    recipe = tiny("train.method=probe")
    result = run(recipe, tmp_path / "run", parts(val=True))
    found = rows(result.folder)
    assert [row["l2"] for row in found] == list(L2_GRID)
    assert [{name: row[name] for name in row if name != "chosen"} for row in found] == result.evaluations
    assert list(found[0]) == ["step", "l2", "top1", "top5", "loss", "n", "chosen"]
    (chosen,) = (row for row in found if row["chosen"])
    assert chosen["top1"] == max(row["top1"] for row in found)
    assert table(result.folder) == [{name: str(value) for name, value in row.items()} for row in found]
    assert result.records == [], "there are no steps, and the report draws no curve of them"
    again = run(recipe, tmp_path / "run", parts(val=True), resume=True)
    assert (rows(again.folder), len(table(again.folder))) == (found, len(L2_GRID))


def test_metrics_without_tuning_images_have_the_strength_that_was_taken(
    tmp_path: Path, tiny: Callable[..., Recipe], run: Callable[..., Any]
) -> None:
    folder = run(tiny("train.method=probe"), tmp_path / "run").folder
    assert rows(folder) == [{"step": 0, "l2": 1e-3, "chosen": True}]
    assert table(folder) == [{"step": "0", "l2": "0.001", "chosen": "True"}]


@pytest.mark.parametrize("operation", ["write", "rename"])
def test_metrics_are_whole_after_a_kill_and_another_start(
    operation: str, tmp_path: Path, tiny: Callable[..., Recipe], parts: Callable[..., Parts], run: Callable[..., Any]
) -> None:
    """Killed where the lines are written, and where the table is, when the lines already are."""
    recipe = tiny("train.method=probe")
    for name in ("metrics.jsonl", "metrics.csv"):

        def kill(now: fsio.Operation, path: Path, name: str = name) -> None:
            if now == operation and name in path.name:
                raise Killed

        folder = tmp_path / name.removeprefix("metrics.")
        with pytest.raises(Killed), fsio.intercept(kill):
            run(recipe, folder, parts(val=True))
        run(recipe, folder, parts(val=True), resume=True)
        assert len(rows(folder)) == len(table(folder)) == len(L2_GRID)


def test_metrics_that_cannot_be_written_cost_no_head(
    tmp_path: Path, tiny: Callable[..., Recipe], parts: Callable[..., Parts], run: Callable[..., Any]
) -> None:
    def full(operation: fsio.Operation, path: Path) -> None:
        if operation == "write" and "metrics" in path.name:
            raise OSError(28, "No space left on device")

    console = Console(quiet=True)
    with fsio.intercept(full):
        result = run(tiny("train.method=probe"), tmp_path / "run", parts(val=True), console=console)
    assert (result.folder / "bundle" / "model.safetensors").is_file()
    assert any("metrics.jsonl" in line and line.endswith("training goes on without") for line in console.lines)
