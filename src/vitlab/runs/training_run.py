"""`vitlab train`: a folder of photos in, a trained, tested and explained classifier out.

Looks at the data, splits it, picks a recipe and says why, trains, tests, writes bundle and report.
"""

import dataclasses
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitlab.core import config, dist, fsio
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import pick_device, prepare, require_threads, unchanged
from vitlab.data.audit import TITLES, audit
from vitlab.data.dataset import Opened
from vitlab.data.sources import open_data, require_trainable
from vitlab.engines.classifier import load
from vitlab.models.names import format_name
from vitlab.report.page import render
from vitlab.runs import run_folder
from vitlab.runs.choice import choose, gather_facts
from vitlab.runs.parts import Parts, arrange, assemble
from vitlab.runs.recipe import (
    SCRATCH,
    DataConfig,
    Recipe,
    merged,
    read_recipe,
    recipe_from_dict,
    recipe_to_dict,
    with_changes,
)
from vitlab.runs.run import RunResult, run_recipe
from vitlab.runs.run_report import build_report, write_plots

_AUDITED = 50_000  # images; larger sets are audited by `vitlab data check`, when one has the time
_USUAL_SIDE = 224  # where no image was looked at


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `vitlab train --json` prints. With several seeds, `test` is that of the first, and `seeds` has all."""

    run: Path
    bundle: Path
    report: Path
    reason: str
    test: dict[str, Any]
    seeds: list[dict[str, Any]]
    seconds: float
    images_per_second: float

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        said: list[str] = []
        if self.test:
            said.append(f"Test accuracy {self.test['top1']:.1%} of {self.test['n']:,} held-out images.")
        if len(self.seeds) > 1:
            values = [row["test"]["top1"] for row in self.seeds]
            said.append(
                f"{len(values)} seeds: mean {sum(values) / len(values):.1%}, {min(values):.1%} to {max(values):.1%}."
            )
        said.append(f"Took {self.seconds:.0f} s. Look at {self.report}")
        return [*said, f"Use it:   vitlab.load({str(self.run)!r})('picture.jpg')"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first step."""

    recipe: Recipe
    parts: Parts
    reason: str
    said: tuple[str, ...]


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    recipe: str | None = None,
    init: str | None = None,
    model: str | None = None,
    overrides: Iterable[str] = (),
    seeds: int = 1,
    resume: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    threads: int | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains a classifier on `data`: a folder of class folders, a table, shards, or a named set.

    Without `recipe`, one is chosen from the data, the start weights `init` and the machine, and the reason is said. `overrides`
    are `key.path=value`. `seeds` repeats the run that often. `resume` goes on with the run in that folder, at the exact step.
    """
    require_threads(threads)
    overrides = list(overrides)
    if (data is None) == (resume is None):
        raise UsageError("give the data to train on, or --resume with the folder of a run")
    if seeds < 1 or (seeds > 1 and resume is not None):
        raise UsageError("--seeds must be at least 1, and goes with new runs only")
    with unchanged():
        runtime = prepare(device, seed, threads)
        with dist.join(runtime.device) as world:
            console = Console(quiet=quiet or not world.leads)
            if resume is not None:
                plan = plan_resume(Path(resume), console)
                folder = Path(resume)
            else:
                assert data is not None
                folder = _folder(out)
                plan = plan_train(data, recipe, init, model, overrides, seed, world.device, console)
            for sentence in plan.said:
                console.say(sentence)
            chosen = {"out": folder, "recipe": recipe, "init": init, "model": model, "seed": seed or None}
            words = [word for name, value in chosen.items() if value is not None for word in (f"--{name}", str(value))]
            words += [word for override in overrides for word in ("--set", override)]
            given = [str(data), *words] if resume is None else ["--resume", str(folder)]
            command = shlex.join(["vitlab", "train", *given])
            results: list[RunResult] = []
            for number in range(seeds):
                again = dataclasses.replace(plan.recipe, seed=plan.recipe.seed + number)
                place = folder if seeds == 1 else folder / f"seed-{again.seed}"
                results.append(
                    run_recipe(
                        again,
                        plan.parts,
                        place,
                        runtime=runtime,
                        world=world,
                        console=console,
                        command=command,
                        resume=resume is not None,
                    )
                )
            if world.leads:
                for result in results:
                    _write_report(result)
            world.meet()
            return _result(results, plan.reason)


def plan_train(
    data: str | Path,
    recipe: str | None,
    init: str | None,
    model: str | None,
    overrides: Sequence[str],
    seed: int,
    device: torch.device,
    console: Console,
) -> Plan:
    """Opens and audits the data, and settles the recipe; whatever can be wrong is found here."""
    opened = open_data(data, console=console)
    train_part = opened.parts.get("train", opened.parts.get("all"))
    if train_part is None:
        raise UsageError(f"the data has {', '.join(opened.parts)}, but nothing to train on")
    require_trainable(train_part, *(part for part in opened.parts.values() if part is not train_part))
    said, side = _look(opened, console)
    start = None
    if init is not None and init != SCRATCH:
        weights = load(init, device="cpu", quiet=console.quiet)
        start = weights.model.spec, weights.preprocess
    if recipe is None:
        table, reason = choose(gather_facts(train_part, side, device), start)
        table["title"] = f"{Path(data).name}"
    else:
        table, reason = read_recipe(recipe), f"the recipe {recipe}, as asked"
    given: dict[str, Any] = {"seed": seed, "data": {"source": str(data)}}
    if init is not None:
        given["init"] = init
    if model is not None:
        if start is not None:
            raise UsageError("the start weights decide the model; leave --model or --init out")
        given["model"] = {"name": model}
    table = with_changes(merged(table, given), overrides)
    settled = config.from_dict(DataConfig, table["data"], "data.")
    parts = arrange(opened, settled)
    whole = recipe_from_dict(table, len(parts.train.classes))
    counts = f"{len(parts.train):,} to train on"
    counts += "" if parts.val is None else f", {len(parts.val):,} to tune on"
    counts += "" if parts.test is None else f", {len(parts.test):,} to test on"
    told = (f"{len(parts.train.classes)} classes: {counts}", *parts.said, *said, f"Chosen: {reason}.", *_health(whole))
    return Plan(whole, parts, reason, told)


def plan_resume(folder: Path, console: Console) -> Plan:
    """The recipe of a run that was stopped, from its own folder."""
    if not (folder / run_folder.CONFIG).is_file():
        raise FileProblem(f"{folder} is no run: it has no {run_folder.CONFIG}")
    recipe, parts = assemble(config.load_toml(folder / run_folder.CONFIG), console)
    return Plan(recipe, parts, "the run's own recipe", ())


def describe_plan(plan: Plan, folder: Path) -> dict[str, str]:
    """For --dry-run."""
    recipe = plan.recipe
    return {
        "out": str(folder),
        "model": format_name(recipe.model),
        "start": recipe.init,
        "images": f"{len(plan.parts.train):,} of {len(plan.parts.train.classes)} classes",
        "chosen": plan.reason,
    }


def recipe_table(plan: Plan) -> Mapping[str, Any]:
    """For --print-config."""
    return recipe_to_dict(plan.recipe)


def dry_run(
    data: str | Path,
    *,
    out: str | Path | None,
    recipe: str | None,
    init: str | None,
    model: str | None,
    overrides: Sequence[str],
    device: str,
    seed: int,
) -> tuple[Plan, Path]:
    """All checks and decisions, and nothing else."""
    console = Console(quiet=True)
    return plan_train(data, recipe, init, model, overrides, seed, pick_device(device), console), _folder(out)


def _folder(out: str | Path | None) -> Path:
    if out is not None:
        return fsio.require_free(Path(out))
    number = 1
    while (path := Path("runs") / f"train-{number}").exists():
        number += 1
    return fsio.require_free(path)


def _look(opened: Opened, console: Console) -> tuple[list[str], int]:
    """What the audit finds, in a line for each kind, and the median side of the images."""
    if sum(map(len, opened.parts.values())) > _AUDITED:
        return ["a large set: not audited; `vitlab data check` does it"], _USUAL_SIDE
    found = audit(opened, workers=max(1, (os.cpu_count() or 1)), console=console)
    said = [f"{'!!' if kind in _SERIOUS else '--'} {TITLES[kind]}: {count:,}" for kind, count in found.counts.items()]
    if said:
        said.append("`vitlab data check DATA --out DIR` shows them")
    return said, found.median_side


_SERIOUS = ("unreadable", "damaged", "leak", "contradiction")


def _health(recipe: Recipe) -> list[str]:
    """What is known to go wrong before it does."""
    said: list[str] = []
    grid = recipe.model.grid
    if grid[0] * grid[1] < 16:  # a 4x4 grid is the least that has a middle and an edge
        said.append(f"careful: {format_name(recipe.model)} sees a {grid[0]}x{grid[1]} grid; a smaller patch sees more")
    return said


def _write_report(result: RunResult) -> None:
    report = build_report(result)
    if not (result.folder / "plots").exists():
        write_plots(result.folder / "plots", report)
    fsio.write_file(result.folder / run_folder.REPORT, render(report))


def _result(results: Sequence[RunResult], reason: str) -> TrainResult:
    first = results[0]
    rows = [
        {
            "seed": result.recipe.seed,
            "run": str(result.folder),
            "test": result.scores.summary() if result.scores else {},
        }
        for result in results
    ]
    return TrainResult(
        run=first.folder,
        bundle=first.folder / run_folder.BUNDLE,
        report=first.folder / run_folder.REPORT,
        reason=reason,
        test=first.scores.summary() if first.scores else {},
        seeds=rows,
        seconds=round(sum(result.seconds for result in results), 1),
        images_per_second=round(first.images_per_second, 1),
    )
