"""A head that is fitted at once: what was computed before a stop is not computed again, and the head has the same bits."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import VitlabError
from vitlab.core.runtime import generator
from vitlab.data.dataset import Dataset, from_arrays
from vitlab.evaluation.features import CHUNK_ROWS
from vitlab.runs.recipe import Recipe
from vitlab.runs.training.parts import Parts

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
    assert any(f"features: {number} of 3 chunks are in the cache" in line for line in console.lines) == bool(number)
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
