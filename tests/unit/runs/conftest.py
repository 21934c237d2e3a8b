"""Runs for the tests of this folder: tiny ones on noise, and both demo recipes with every look at a config key noted."""

import contextlib
import dataclasses
import multiprocessing
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from config_reads import watch
from run_jobs import run_recipe

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.runtime import Runtime, generator, prepare
from vitlab.data.dataset import from_arrays
from vitlab.data.parts import Parts
from vitlab.runs.training.finish import RunResult
from vitlab.training.recipe import Recipe, read_recipe, recipe_from_dict, with_changes
from vitlab.training.recipe_data import open_recipe

FRACTALS = "data.source=fractals:categories=4,instances=8,image_size=16"
BODY = "model.name=ViT-w16d2m32h2/2"
TABLE: dict[str, Any] = {
    "title": "Noise",
    "data": {"source": "noise", "image_size": [8, 8], "mode": "L"},
    "model": {"name": "ViT-w16d2m32h2/4"},
    "train": {"steps": 8, "batch_size": 8, "save_every": "25%"},
    "optim": {"lr": 1e-2},
}
CLASSES = ("a", "b", "c", "d")


@dataclasses.dataclass(frozen=True)
class WatchedRun:
    recipe: Recipe  # resolved, as it went in
    result: RunResult
    read: set[str]


@pytest.fixture(scope="session")
def runtime() -> Generator[Runtime]:
    """One thread and determinism for the runs of this folder; both are put back afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield prepare("cpu", seed=0, threads=1)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def _noise(name: str, count: int, seed: int) -> Any:
    images = torch.randint(0, 256, (count, 1, 16, 16), dtype=torch.uint8, generator=generator(seed))
    return from_arrays(images, torch.arange(count) % len(CLASSES), CLASSES, name)


def make_parts(*, val: bool = False, test: bool = True) -> Parts:
    return Parts(
        _noise("train", 24, 0), _noise("val", 8, 1) if val else None, _noise("test", 8, 2) if test else None, ()
    )


def make_recipe(*overrides: str) -> Recipe:
    return recipe_from_dict(with_changes(TABLE, overrides), len(CLASSES))


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Recipe]:
    """A recipe of eight steps on noise, with overrides."""
    return make_recipe


@pytest.fixture(scope="session")
def parts() -> Callable[..., Parts]:
    return make_parts


@pytest.fixture(scope="session")
def run(runtime: Runtime) -> Callable[..., RunResult]:
    """Carries a recipe out in a folder."""

    def call(
        recipe: Recipe,
        folder: Path,
        parts: Parts | None = None,
        *,
        resume: bool = False,
        console: Console | None = None,
    ) -> RunResult:
        return run_recipe(
            recipe,
            parts or make_parts(),
            folder,
            runtime=runtime,
            world=World(0, 1, runtime.device),
            console=console or Console(quiet=True),
            command="a test",
            resume=resume,
        )

    return call


def _hold(folder: Path, held: Any, done: Any) -> None:
    with fsio.locked(folder):
        held.set()
        done.wait()


@contextlib.contextmanager
def _held(folder: Path) -> Generator[None]:
    processes = multiprocessing.get_context("fork")  # a fresh interpreter would first import torch
    held, done = processes.Event(), processes.Event()
    holder = processes.Process(target=_hold, args=(folder, held, done))
    with warnings.catch_warnings():  # from 3.12 on: of a fork beside other threads, which a test worker has
        warnings.simplefilter("ignore", DeprecationWarning)
        holder.start()
    try:
        assert held.wait(60)
        yield
    finally:
        holder.kill()
        holder.join()


@pytest.fixture(scope="session")
def held() -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """Another process that works in a folder, and is killed at the end."""
    return _held


def _watched(name: str, overrides: Sequence[str], folder: Path, runtime: Runtime) -> WatchedRun:
    recipe, parts = open_recipe(with_changes(read_recipe(name), overrides))
    read = set[str]()
    result = run_recipe(
        watch(recipe, read),
        parts,
        folder,
        runtime=runtime,
        world=World(0, 1, runtime.device),
        console=Console(quiet=True),
        command="a test",
    )
    return WatchedRun(recipe, result, read)


@pytest.fixture(scope="session")
def pretraining(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> WatchedRun:
    folder = tmp_path_factory.mktemp("runs") / "pretrain"
    return _watched("demo-fractals", [FRACTALS, BODY, "train.steps=2"], folder, runtime)


@pytest.fixture(scope="session")
def transfer(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime, pretraining: WatchedRun) -> WatchedRun:
    folder = tmp_path_factory.mktemp("runs") / "transfer"
    start = f"init={pretraining.result.folder / 'bundle'}"
    return _watched("demo-digits", [start, BODY, "train.steps=2"], folder, runtime)
