"""Both demo recipes, run once for two steps each, with every look at a config key noted."""

import dataclasses
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from vitlab.core import config
from vitlab.core.console import Console
from vitlab.core.runtime import Runtime, prepare
from vitlab.runs.recipe import Recipe, load_recipe
from vitlab.runs.run import RunResult, run_recipe


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


def _watched(name: str, overrides: list[str], folder: Path, runtime: Runtime, init: Path | None) -> WatchedRun:
    start = [] if init is None else [f"init={init}"]
    recipe, read = load_recipe(name, [*overrides, *start]), set[str]()
    result = run_recipe(
        config.watch(recipe, read), folder, runtime=runtime, console=Console(quiet=True), command="a test"
    )
    return WatchedRun(recipe, result, read)


@pytest.fixture(scope="session")
def pretraining(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> WatchedRun:
    folder = tmp_path_factory.mktemp("runs") / "pretrain"
    return _watched("demo-letters", ["data.count=104", "train.epochs=1.6"], folder, runtime, None)


@pytest.fixture(scope="session")
def transfer(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime, pretraining: WatchedRun) -> WatchedRun:
    folder = tmp_path_factory.mktemp("runs") / "transfer"
    return _watched("demo-digits", ["train.epochs=0.08"], folder, runtime, pretraining.result.folder / "bundle")
