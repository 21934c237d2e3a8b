"""`vitlab train`: a folder of photos in, a trained, tested and explained classifier out.

Looks at the data, splits it, picks a recipe and says why, trains, tests, writes bundle and report.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio, launch
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import pick_device, require_threads
from vitlab.core.session import Session, open_session
from vitlab.core.signals import Stopped
from vitlab.data.parts import Parts
from vitlab.data.sources.opening import NoSuchData
from vitlab.report.page import render
from vitlab.runs.training import run_folder
from vitlab.runs.training.deciding import Plan, plan_resume, plan_train
from vitlab.runs.training.run import RunResult, describe, held, run_recipe
from vitlab.runs.training.run_record import record_runs
from vitlab.runs.training.run_report import build_report, warning_lines, write_plots
from vitlab.runs.training.sweep import (
    FINAL,
    SWEEP,
    CarryOut,
    Found,
    try_each,
)
from vitlab.training.recipe import Recipe, read_recipe


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `vitlab train --json` prints. With several seeds, `test` is that of the first, and `seeds` has all.

    `sweep` has a row for each value that was tried, `left_out` why an image could not be read, `warnings` what seemed amiss.
    """

    run: Path
    bundle: Path
    report: Path
    reason: str
    test: dict[str, Any]
    seeds: list[dict[str, Any]]
    sweep: list[dict[str, Any]]
    left_out: dict[str, str]
    warnings: list[str]
    seconds: float
    images_per_second: float

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        said: list[str] = []
        if "mean_ap" in self.test:  # images with several labels
            said.append(f"Mean average precision {self.test['mean_ap']:.3f} on {self.test['n']:,} held-out images.")
            said.append(f"The likeliest label is right for {self.test['top1']:.1%} of them.")
        elif self.test:
            said.append(f"Test accuracy {self.test['top1']:.1%} of {self.test['n']:,} held-out images.")
        else:
            evaluate = shlex.join(["vitlab", "evaluate", str(self.run), "DATA"])
            said.append(f"Not tested, for no images were kept to test on; `{evaluate}` does it with others.")
        if len(self.seeds) > 1 and self.test:
            measure, what, shown = "top1", "mean", ".1%"
            if "mean_ap" in self.test:
                measure, what, shown = "mean_ap", "precision in the mean", ".3f"
            values = [row["test"][measure] for row in self.seeds]
            mean, least, most = (f"{value:{shown}}" for value in (sum(values) / len(values), min(values), max(values)))
            said.append(f"{len(values)} seeds: {what} {mean}, {least} to {most}.")
        said += [
            f"Trial {row['key']}={row['value']} failed: {row['failed']}."
            for row in self.sweep
            if row["failed"] is not None
        ]
        if self.left_out:
            said.append(
                f"Images that could not be read and were left out: {len(self.left_out):,}; the report names them."
            )
        said.append(f"Took {self.seconds:.0f} s. Report: {self.report}")
        return [*said, f"Use it:   vitlab.load({str(self.run)!r})('picture.jpg')"]


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    recipe: str | None = None,
    init: str | None = None,
    model: str | None = None,
    overrides: Iterable[str] = (),
    seeds: int = 1,
    sweep: str | None = None,
    resume: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    threads: int | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains a classifier on `data`: a folder of class folders, a table, shards, or a named set.

    Without `data`, what `recipe` names. Without `recipe`, one is chosen from the data, the start weights `init` and the
    machine, and the reason is said. `overrides` are `key.path=value`. `seeds` repeats the run that often. `sweep`, as
    `optim.lr=0.003,0.01`, tries each value, chooses on held-out training images, trains on all of them and tests once. `resume`
    goes on with the run in that folder, or with all runs of seeds or a sweep there, at the exact step.
    """
    require_threads(threads)
    overrides = list(overrides)
    data = _named_by(recipe) if data is None and resume is None else data
    _require_one_wish(data, seeds, sweep, resume)
    if resume is not None and (recipe or init or model or seed or out is not None):
        raise UsageError(
            "--resume goes on with the run's own recipe, model, start weights, seed and folder; leave yours out"
        )
    if resume is None and launch.may_restart():
        resume = _begun(out)
    with open_session(device, seed, threads, quiet=quiet) as session:
        if resume is not None:
            folder = Path(resume)
            with _told_as_gone(folder):
                plan = plan_resume(folder, overrides, session.console, seeds=seeds, sweep=sweep)
            _require_same_data(folder, plan.recipe.data.source, data)
        else:
            assert data is not None
            folder = _folder(out, data)
            plan = plan_train(data, recipe, init, model, overrides, seed, session.world, session.console, sweep=sweep)
            plan = dataclasses.replace(plan, seeds=seeds)
        if plan.seeds > 1 and plan.recipe.train.method == "probe":
            session.console.say("a linear probe draws nothing at random, so every seed gives the same")
        options = {"recipe": recipe, "init": init, "model": model, "sweep": sweep, "threads": threads}
        options |= {"seeds": seeds if seeds > 1 else None, "seed": seed or None}
        options |= {"device": None if device == "auto" else device}
        began = "" if resume is None else run_folder.recorded_at_start(folder, "command")
        while True:
            command = began or _command(data, {"out": folder, **options}, overrides)
            try:
                return _follow(plan, folder, command, session, resume=resume is not None)
            except fsio.Taken as taken:  # by a run that was started at the same time
                if out is not None or data is None or taken.path != folder or session.world.size > 1:
                    raise
                folder = _folder(None, data)


def _named_by(recipe: str | None) -> str | None:
    """The data that a recipe was written for."""
    data = {} if recipe is None else read_recipe(recipe).get("data")
    source = data.get("source") if isinstance(data, Mapping) else None
    return source if isinstance(source, str) else None


def _require_one_wish(data: str | Path | None, seeds: int, sweep: str | None, resume: str | Path | None = None) -> None:
    if data is None and resume is None:
        raise UsageError("give the data to train on, a --recipe that names some, or --resume with the folder of a run")
    if seeds < 1:
        raise UsageError(f"--seeds must be at least 1, not {seeds}")
    if sweep is not None and seeds > 1:
        raise UsageError("--sweep makes several runs of its own; leave --seeds out")


def _require_same_data(folder: Path, source: str, data: str | Path | None) -> None:
    """An error where the caller names other data than the run in `folder` has. Its own may be named again."""
    if data is not None and str(data) != source and Path(data).resolve() != Path(source).resolve():
        raise UsageError(
            f"the run in {folder} was begun with {source}, not with {data}",
            hint=f"Leave {data} out to resume the run, or --resume to start a new one.",
        )


def _follow(plan: Plan, folder: Path, command: str, session: Session, *, resume: bool) -> TrainResult:
    """All runs of a plan, their reports and their records."""
    runtime, world, console = session

    def carry_out(recipe: Recipe, parts: Parts, inner: Path, said: Sequence[str]) -> RunResult:
        begun = resume and (inner / run_folder.CONFIG).is_file()
        return run_recipe(
            recipe,
            parts,
            inner,
            runtime=runtime,
            world=world,
            console=console,
            command=command,
            resume=begun,
            said=() if begun else said,
        )

    try:
        with contextlib.ExitStack() as stack:
            if plan.several is not None:
                environment = describe(plan.recipe, plan.parts, runtime, world, command)
                whole = (folder, plan.recipe, plan.parts, environment, world)
                stack.enter_context(held(*whole, resume=resume, said=plan.said, runs=plan.several.to_json()))
            results, found = _carry_out_all(plan, folder, carry_out, console, is_main=world.is_main)
            if world.is_main:
                for result in results:
                    _write_report(result, found)
                tested = folder if plan.sweep is None else results[0].folder
                record_runs(results, tested, recipe=_recipe_in(command), command=command)
            world.barrier()
    except Stopped as stopped:  # beside its steps: between two runs, or while the report is written
        if not stopped.advice and (folder / run_folder.CONFIG).is_file():
            stopped.advice = run_folder.resume_command(folder)
        raise
    except FileProblem as problem:
        refused = isinstance(problem.__cause__, OSError)  # by the system, for want of room say: what was saved is whole
        if not refused or str(folder) not in problem.what or not (folder / run_folder.CONFIG).is_file():
            raise
        go_on = run_folder.resume_command(folder)
        raise FileProblem(problem.what, hint=f"Make room, or mend what is wrong there. {go_on}") from problem
    return _result(results, plan.reason, found)


def _carry_out_all(
    plan: Plan, folder: Path, carry_out: CarryOut, console: Console, *, is_main: bool
) -> tuple[list[RunResult], Found | None]:
    """The runs whose test counts: one, one for each seed, or the one that a sweep has found."""
    if plan.sweep is not None:
        found = try_each(plan.sweep, plan.parts, folder, carry_out, console)
        if is_main:
            fsio.write_json(folder / SWEEP, found.rows)
        said = (*plan.said, found.sentence())
        return [carry_out(found.recipe, plan.sweep.final, folder / FINAL, said)], found
    results: list[RunResult] = []
    for number in range(plan.seeds):
        again = dataclasses.replace(plan.recipe, seed=plan.recipe.seed + number)
        inner = folder if plan.seeds == 1 else folder / f"seed-{again.seed}"
        results.append(carry_out(again, plan.parts, inner, plan.said))
    return results, None


def dry_run(
    data: str | Path | None,
    *,
    out: str | Path | None,
    recipe: str | None,
    init: str | None,
    model: str | None,
    overrides: Sequence[str],
    device: str,
    seed: int,
    seeds: int = 1,
    sweep: str | None = None,
) -> tuple[Plan, Path]:
    """All checks and decisions, and nothing else."""
    data = _named_by(recipe) if data is None else data
    _require_one_wish(data, seeds, sweep)
    assert data is not None
    folder, world = _folder(out, data), World(0, 1, pick_device(device))
    plan = plan_train(data, recipe, init, model, overrides, seed, world, Console(quiet=True), sweep=sweep)
    return dataclasses.replace(plan, seeds=seeds), folder


def _begun(out: str | Path | None) -> Path | None:
    """The run to go on with, where the launcher has started the same command before."""
    if out is None:
        raise UsageError("a run that may be started again needs --out")
    return Path(out) if (Path(out) / run_folder.CONFIG).is_file() else None


@contextlib.contextmanager
def _told_as_gone(folder: Path) -> Generator[None]:
    """Data that a run has begun with was there once: an unknown name would be a strange thing to hear."""
    try:
        yield
    except UsageError as error:
        # Elsewhere than it was begun, `plan_resume` has its own hint, with the folder to resume in.
        lost = error if isinstance(error, NoSuchData) else error.__cause__
        if not isinstance(lost, NoSuchData):
            raise
        hint = "Put it back where it was: a run goes on with the images it began with." if lost is error else error.hint
        raise UsageError(f"the data of {folder} is not here any more: {lost.given}", hint=hint) from lost


def _folder(out: str | Path | None, data: str | Path) -> Path:
    number = 1
    while (default := Path("runs") / f"train-{number}").exists():
        number += 1
    folder = default if out is None else Path(out)
    if str(data) and Path(data).is_dir() and folder.resolve().is_relative_to(Path(data).resolve()):
        raise UsageError(
            f"the run would go to {folder}, inside the data folder {data}, which would then hold more than data",
            hint="Give --out a folder elsewhere.",
        )
    return fsio.require_free(folder)


def _command(data: str | Path | None, options: Mapping[str, object], overrides: Sequence[str]) -> str:
    """The call as it can be pasted; what was left out is None."""
    words = [] if data is None else [str(data)]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    words += [word for override in overrides for word in ("--set", override)]
    return shlex.join(["vitlab", "train", *words])


def _recipe_in(command: str) -> str:
    """The name after --recipe; empty where one was chosen. A run that is resumed has only its first command to tell it."""
    words = shlex.split(command)
    return words[words.index("--recipe") + 1] if "--recipe" in words else ""


def _write_report(result: RunResult, found: Found | None) -> None:
    report = build_report(result, tables=() if found is None else (found.table(),))
    if not (result.folder / "plots").exists():
        write_plots(result.folder / "plots", report)
    fsio.write_file(result.folder / run_folder.REPORT, render(report))


def _result(results: Sequence[RunResult], reason: str, found: Found | None) -> TrainResult:
    first = results[0]
    rows = [
        {
            "seed": result.recipe.seed,
            "run": str(result.folder),
            "test": result.scores.test_summary() if result.scores else {},
        }
        for result in results
    ]
    return TrainResult(
        run=first.folder,
        bundle=first.folder / run_folder.BUNDLE,
        report=first.folder / run_folder.REPORT,
        reason=reason,
        test=first.scores.test_summary() if first.scores else {},
        seeds=rows,
        sweep=[] if found is None else found.rows,
        left_out={name: why for result in results for name, why in result.bad.items()},
        warnings=warning_lines(first.folder),
        seconds=round(sum(result.seconds for result in results) + (0.0 if found is None else found.seconds), 1),
        images_per_second=round(first.images_per_second, 1),
    )
