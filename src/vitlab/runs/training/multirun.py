"""The runs of a `Job` with several: one for each seed, or a sweep's trials and the run with the best of them.

Several share a folder, which has what a run has before its first step; stopped anywhere, one `--resume` continues them. The
test images are in no trial. A value whose training is not finite has failed; the others continue.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core import fsio, reading
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.core.session import Session
from vitlab.report.page import Table
from vitlab.runs.training import run_folder
from vitlab.runs.training.execute import describe, execute, open_run_dir
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.live_run import best_of, describe_validation
from vitlab.runs.training.resolve import Job
from vitlab.training.loop import NonFinite
from vitlab.training.recipe import Recipe
from vitlab.training.sweep import Grid

SWEEP = "sweep.json"
FINAL = "final"  # the folder of the run that is tested, beside try-1, try-2, ...
_SCORES = ("top1", "loss", "n")  # of each trial; of images with several labels `mean_ap` too


@dataclasses.dataclass(frozen=True)
class SweepResult:
    key: str
    # A trial each: key, value, step, top1, loss, n, with several labels mean_ap; and failed, which says why others are None.
    rows: list[dict[str, Any]]
    seconds: float  # that the trials took, save for those that failed

    @property
    def best(self) -> dict[str, Any]:
        return dict(best_of([row for row in self.rows if row["failed"] is None]))

    def sentence(self) -> str:
        best = self.best
        chosen = f"{self.key}={best['value']} was the best of {len(self.rows)}: {describe_validation(best)}"
        return f"{chosen}; trained again on all training images"

    def table(self) -> Table:
        best = self.best
        caption = f"On {best['n']} images held out of the training part. {self.key}={best['value']} was taken."
        metric = "mean average precision" if "mean_ap" in best else "right"
        return Table("Sweep", caption, (self.key, metric, "loss", "at step"), [_table_row(row) for row in self.rows])


def _table_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    value, step = str(row["value"]), str(row["step"])
    if row["failed"] is not None:
        return value, "failed", "not finite", step
    metric = f"{row['mean_ap']:.3f}" if "mean_ap" in row else f"{row['top1']:.1%}"
    return value, metric, f"{row['loss']:.4f}", step


class MultiRun(NamedTuple):
    """The runs whose test counts, and the sweep that led to the last of them."""

    results: list[RunResult]
    sweep: SweepResult | None = None


def execute_several(job: Job, session: Session) -> MultiRun:
    """Execute every run of a job with several, in folders below its own."""
    with open_run_dir(job, describe(job, session), session, job.opening):
        if job.sweep is not None:
            done = _execute_sweep(job, session)
        else:
            seeds = range(job.recipe.seed, job.recipe.seed + job.seeds)
            jobs = [_inner(job, f"seed-{seed}", dataclasses.replace(job.recipe, seed=seed)) for seed in seeds]
            done = MultiRun([execute(one, session) for one in jobs])
        if session.world.is_main:
            file = run_folder.read_run(job.folder)
            file.progress = {"finished": True}
            file.write(job.folder)
        return done


def _execute_sweep(job: Job, session: Session) -> MultiRun:
    assert job.sweep is not None
    grid = job.sweep.grid
    found = _chosen_before(job.folder, grid) or _run_trials(job, session)
    if session.world.is_main:
        fsio.write_json(job.folder / SWEEP, found.rows)
    final = dataclasses.replace(
        _inner(job, FINAL, job.sweep.final_recipe(found.best["value"])),
        parts=job.sweep.final,
        notes=(*job.notes, found.sentence()),
    )
    return MultiRun([execute(final, session)], found)


def _chosen_before(folder: Path, grid: Grid) -> SweepResult | None:
    """The trials by which the final run was chosen, where that has begun: another machine could choose otherwise."""
    path = folder / SWEEP
    if not (folder / FINAL / run_folder.CONFIG).is_file():
        return None
    try:
        rows = reading.read_json(path)
        if [row["value"] for row in rows] != list(grid.values):
            raise ValueError("it has other values")
        found = SweepResult(grid.key, rows, 0.0)
        if not math.isfinite(found.best["top1"] + found.best["loss"] + found.best["n"] + found.best["step"]):
            raise ValueError("a score is not a number")
        found.table()
    except (FileProblem, OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise FileProblem(f"{path} does not say what was chosen: {error}") from None
    return found


def _run_trials(job: Job, session: Session) -> SweepResult:
    assert job.sweep is not None
    grid, rows, seconds = job.sweep.grid, list[dict[str, Any]](), 0.0
    blind = dataclasses.replace(job.parts, test=None)
    for number, (value, recipe) in enumerate(zip(grid.values, job.sweep.recipes, strict=True), start=1):
        sentence = f"trial {number} of {len(grid.values)}: {grid.key}={value}"
        trial = dataclasses.replace(
            _inner(job, f"try-{number}", recipe), parts=blind, inner=True, notes=(sentence,), warnings=()
        )
        row = {"key": grid.key, "value": value}
        try:
            result = execute(trial, session)
        except NonFinite as error:
            session.console.say(f"trial {grid.key}={value} failed: {error.what}")
            rows.append({**row, "step": error.step, **dict.fromkeys(_SCORES), "failed": error.what})
            continue
        best, seconds = best_of(result.evaluations), seconds + result.seconds
        scores = {name: best[name] for name in (*_SCORES, "mean_ap") if name in best}
        rows.append({**row, "step": best["step"], **scores, "failed": None})
    if all(row["failed"] for row in rows):
        raise VitlabError(
            f"none of the {len(rows)} values of {grid.key} could be trained; {rows[0]['value']}: {rows[0]['failed']}",
            hint="A lower optim.lr or a longer warm-up usually helps.",
        )
    return SweepResult(grid.key, rows, seconds)


def _inner(job: Job, name: str, recipe: Recipe) -> Job:
    """One run of the job, in a folder below its own."""
    folder = job.folder / name
    resume = job.resume and (folder / run_folder.CONFIG).is_file()
    return dataclasses.replace(job, recipe=recipe, folder=folder, seeds=1, sweep=None, resume=resume)


def mean_and_range(values: Sequence[float], shown: str) -> str:
    mean, least, most = (f"{value:{shown}}" for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean}, {least} to {most}"
