"""Jobs as tests make them: a recipe and its parts without a call, or a call without a run."""

from collections.abc import Generator, Iterable
from pathlib import Path

import torch

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.runtime import Runtime, prepare
from vitlab.core.session import Session
from vitlab.data.loader import Batch
from vitlab.data.parts import Parts
from vitlab.runs.training import execute as execution
from vitlab.runs.training.execute import execute
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.live_run import LiveRun
from vitlab.runs.training.resolve import Job, resolve
from vitlab.training.assemble import Feed, step_rule
from vitlab.training.call import TrainCall
from vitlab.training.loop import StepRule
from vitlab.training.recipe import Recipe


def run_recipe(
    recipe: Recipe,
    parts: Parts,
    folder: Path,
    *,
    runtime: Runtime,
    world: World,
    console: Console,
    command: str = "a test",
    resume: bool = False,
) -> RunResult:
    job = Job(recipe=recipe, parts=parts, folder=folder, command=command, resume=resume)
    return execute(job, Session(runtime, world, console))


def plan_train(
    data: str | Path,
    recipe: str | None = None,
    init: str | None = None,
    model: str | None = None,
    overrides: Iterable[str] = (),
    seed: int = 0,
    world: World | None = None,
    console: Console | None = None,
    *,
    sweep: str | None = None,
) -> Job:
    assert world is not None
    call = TrainCall(
        data=str(data), recipe=recipe, init=init, model=model, overrides=tuple(overrides), seed=seed, sweep=sweep
    )
    return resolve(call, world, console or Console(quiet=True))


def live_run(recipe: Recipe, parts: Parts, folder: Path, *, resume: bool = False) -> LiveRun:
    """A run before its first step."""
    session = Session(prepare("cpu", 0, 1), World(0, 1, torch.device("cpu")), Console(quiet=True))
    return execution._open_run(Job(recipe=recipe, parts=parts, folder=folder, command="a test", resume=resume), session)


def batches_of(run: LiveRun) -> Generator[Batch]:
    feed = Feed(run.recipe, run.parts.train, run.world, run.bad, run.console, run.folder / "cache")
    return feed.batches(range(run.state.step, run.steps))


def rule_of(run: LiveRun) -> StepRule:
    return step_rule(run.recipe, run.parts.train, run.length, run.world, validates=False, quiet=True)
