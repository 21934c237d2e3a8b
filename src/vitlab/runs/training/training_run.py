"""`vitlab train`: a folder of photos in, a trained, tested and explained classifier out.

Looks at the data, splits it, picks a recipe and says why, trains, tests, writes bundle and report.
"""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitlab.core import config, dist, fsio, launch
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.runtime import pick_device, prepare, require_threads, unchanged
from vitlab.data.auditing.audit import SERIOUS, TITLES, audit
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.decode import opened as opened_image
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import load
from vitlab.models.names import format_name
from vitlab.report.page import render
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
from vitlab.runs.training import run_folder
from vitlab.runs.training.choice import choose, gather_facts, tell
from vitlab.runs.training.health import coarse_grid
from vitlab.runs.training.micro_batch import by_estimate
from vitlab.runs.training.parts import Parts, arrange, assemble
from vitlab.runs.training.planning import free_memory
from vitlab.runs.training.run import RunResult, require_possible, run_recipe
from vitlab.runs.training.run_record import record_runs
from vitlab.runs.training.run_report import build_report, careful_lines, write_plots
from vitlab.runs.training.sweep import FINAL, SWEEP, Found, Sweep, read_sweep, settle_sweep, try_each, with_dev_split
from vitlab.runs.training.trackers import require_trackers

_AUDITED = 50_000  # images; larger sets are audited by `vitlab data check`, when one has the time
_SAMPLED = 200  # images of a larger set whose size is looked at
_USUAL_SIDE = 224  # where none could be


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `vitlab train --json` prints. With several seeds, `test` is that of the first, and `seeds` has all.

    `sweep` has a row for each value that was tried, `careful` what seemed amiss.
    """

    run: Path
    bundle: Path
    report: Path
    reason: str
    test: dict[str, Any]
    seeds: list[dict[str, Any]]
    sweep: list[dict[str, Any]]
    careful: list[str]
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
    counts: str = ""  # who trains, tunes and tests; with `notes`, empty where a run goes on that has told it before
    notes: tuple[str, ...] = ()  # where the parts come from, what the audit found, what would do better
    sweep: Sweep | None = None

    @property
    def said(self) -> tuple[str, ...]:
        """All of it in sentences, for the log."""
        return (self.counts, f"Chosen: {self.reason}.", *self.notes) if self.counts else ()


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

    Without `recipe`, one is chosen from the data, the start weights `init` and the machine, and the reason is said. `overrides`
    are `key.path=value`. `seeds` repeats the run that often. `sweep`, as `optim.lr=0.003,0.01`, tries each value, chooses on
    held-out training images, trains on all of them and tests once. `resume` goes on with the run in that folder, at the
    exact step.
    """
    require_threads(threads)
    overrides = list(overrides)
    if (data is None) == (resume is None):
        raise UsageError("give the data to train on, or --resume with the folder of a run")
    if resume is not None and (recipe or init or model or seed or out is not None):
        raise UsageError(
            "--resume goes on with the run's own recipe, model, start weights, seed and folder; leave yours out"
        )
    if seeds < 1 or (seeds > 1 and resume is not None):
        raise UsageError("--seeds must be at least 1, and goes with new runs only")
    if sweep is not None and (seeds > 1 or resume is not None):
        raise UsageError("--sweep makes several new runs of its own; leave --seeds and --resume out")
    if data is not None and launch.may_restart():
        resume = _begun(out, several=seeds > 1 or sweep is not None)
    with unchanged():
        runtime = prepare(device, seed, threads)
        with dist.join(runtime.device) as world:
            console = Console(quiet=quiet or not world.leads)
            if resume is not None:
                plan = plan_resume(Path(resume), overrides, console)
                folder = Path(resume)
            else:
                assert data is not None
                folder = _folder(out)
                plan = plan_train(
                    data,
                    recipe,
                    init,
                    model,
                    overrides,
                    seed,
                    world.device,
                    console,
                    processes=world.size,
                    leads=world.leads,
                    sweep=sweep,
                )
            if seeds > 1 and plan.recipe.train.method == "probe":
                console.say("a head that is fitted at once draws nothing at random, so every seed gives the same")
            options = {
                "out": folder,
                "recipe": recipe,
                "init": init,
                "model": model,
                "sweep": sweep,
                "threads": threads,
            }
            options |= {"seeds": seeds if seeds > 1 else None, "seed": seed or None}
            options |= {"device": None if device == "auto" else device}
            began = "" if resume is None else run_folder.told_at_start(folder, "command")
            command = began or _command(data, options, overrides)

            def carry_out(recipe: Recipe, parts: Parts, place: Path, said: Sequence[str]) -> RunResult:
                return run_recipe(
                    recipe,
                    parts,
                    place,
                    runtime=runtime,
                    world=world,
                    console=console,
                    command=command,
                    resume=resume is not None,
                    said=said,
                )

            found: Found | None = None
            if plan.sweep is not None:
                found = try_each(plan.sweep, plan.parts, folder, carry_out)
                if world.leads:
                    fsio.write_json(folder / SWEEP, found.rows)
                said = (*plan.said, found.sentence())
                results = [carry_out(found.recipe, plan.sweep.final, folder / FINAL, said)]
            else:
                results: list[RunResult] = []
                for number in range(seeds):
                    again = dataclasses.replace(plan.recipe, seed=plan.recipe.seed + number)
                    place = folder if seeds == 1 else folder / f"seed-{again.seed}"
                    results.append(carry_out(again, plan.parts, place, plan.said))
            if world.leads:
                for result in results:
                    _write_report(result, found)
                record_runs(results, results[0].folder if seeds == 1 else folder, recipe=recipe or "", command=command)
            world.meet()
            return _result(results, plan.reason, found)


def plan_train(
    data: str | Path,
    recipe: str | None,
    init: str | None,
    model: str | None,
    overrides: Sequence[str],
    seed: int,
    device: torch.device,
    console: Console,
    *,
    processes: int = 1,
    leads: bool = True,
    sweep: str | None = None,
) -> Plan:
    """Opens the data, settles the recipe and audits; whatever can be wrong is found here.

    Of several `processes`, the one that `leads` audits for all: nothing is decided by what it finds.
    """
    with _told_as_a_wrong_call(Path(data).exists()):
        opened = open_data(data, console=console)
    if model is not None and init not in (None, SCRATCH):
        raise UsageError("the start weights decide the model; leave --model or --init out")
    given: dict[str, Any] = {"seed": seed, "data": {"source": str(data)}}
    given |= {} if init is None else {"init": init}
    given |= {} if model is None else {"model": {"name": model}}
    with _told_as_a_wrong_call(True):
        learnt = arrange(opened, _held_out(given, overrides)).train
    table, because, advice = {} if recipe is None else read_recipe(recipe), None, ""
    start = None
    if recipe is None and init is not None and init != SCRATCH:
        with _told_as_a_wrong_call("@" not in init):
            weights = load(init, device="cpu", quiet=console.quiet)
        start = weights.model.spec, weights.preprocess
    if recipe is None:
        memory = free_memory(torch.device("cpu"))
        facts = gather_facts(learnt, _median_side(learnt), device, memory, processes)
        table, because, advice = choose(facts, start)
        table["title"] = f"{Path(data).name}"
    table = with_changes(merged(table, given), overrides)
    tried = None if sweep is None else read_sweep(sweep, table)
    if tried is not None:
        table = with_dev_split(table)
    parts = arrange(opened, config.from_dict(DataConfig, table["data"], "data."))
    whole = recipe_from_dict(table, len(parts.train.classes))
    require_trackers(whole.train.log)
    require_possible(whole, parts, processes)
    whole, smaller = by_estimate(whole, device, processes)
    settled = None
    if tried is not None:
        settled = settle_sweep(tried, whole, arrange(opened, dataclasses.replace(whole.data, val_frac=0.0)))
    found = _audited(opened, console) if leads else []  # last, for it takes longest: a wrong call is told before
    reason = f"the recipe {recipe}, as asked" if because is None else tell(whole, len(parts.train), because)
    counts = f"{len(parts.train):,} to train on"
    counts += "" if parts.val is None else f", {len(parts.val):,} to tune on"
    counts += "" if parts.test is None else f", {len(parts.test):,} to test on"
    notes = [*parts.said, *found, *(sentence for sentence in (advice, smaller) if sentence)]
    return Plan(whole, parts, reason, f"{len(parts.train.classes)} classes: {counts}", tuple(notes), settled)


@contextlib.contextmanager
def _told_as_a_wrong_call(named_here: bool) -> Generator[None]:
    """Files that the caller named and that cannot be trained on are a wrong call; a download that fails is not."""
    try:
        yield
    except FileProblem as problem:
        if not named_here:
            raise
        raise UsageError(problem.what, hint=problem.hint) from problem


def _held_out(given: Mapping[str, Any], overrides: Sequence[str]) -> DataConfig:
    """What decides, before there is a recipe, which images are kept for the test."""
    asked = with_changes({"data": {}}, overrides)["data"]
    if not isinstance(asked, Mapping):
        raise UsageError("data is a table of keys; write --set data.KEY=VALUE")
    kept = {key: asked[key] for key in ("test_frac", "split_seed") if key in asked}
    return config.from_dict(DataConfig, {**given["data"], "image_size": [1, 1], **kept}, "data.")


def plan_resume(folder: Path, overrides: Sequence[str], console: Console) -> Plan:
    """The recipe of a run that was stopped, from its own folder. What may not change is told when it is compared."""
    if not (folder / run_folder.CONFIG).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{run_folder.CONFIG}"))
        hint = f"It has several, each of which can be resumed: {', '.join(inside)}." if inside else None
        raise UsageError(f"{folder} is no run: it has no {run_folder.CONFIG}", hint=hint)
    table = with_changes(config.load_toml(folder / run_folder.CONFIG), overrides)
    try:
        recipe, parts = assemble(table, console)
    except VitlabError as error:
        began = run_folder.told_at_start(folder, "folder")
        if not began or Path(began) == Path.cwd():
            raise
        hint = f"The run was begun in {began}, where its names of files count from: resume it there."
        raise UsageError(error.what, hint=hint) from error
    require_trackers(recipe.train.log)
    return Plan(recipe, parts, "the run's own recipe")


def describe_plan(plan: Plan, folder: Path) -> dict[str, str | list[str]]:
    """For --dry-run."""
    recipe = plan.recipe
    told: dict[str, str | list[str]] = {
        "out": str(folder),
        "model": format_name(recipe.model),
        "start": recipe.init,
        "images": plan.counts,
        "chosen": plan.reason,
    }
    if plan.notes:
        told["notes"] = list(plan.notes)
    if plan.sweep is not None:
        told["sweep"] = plan.sweep.sentence()
    careful = coarse_grid(recipe.model)
    return told if careful is None else {**told, "careful": careful}


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
    sweep: str | None = None,
) -> tuple[Plan, Path]:
    """All checks and decisions, and nothing else."""
    folder, chosen = _folder(out), pick_device(device)
    return plan_train(data, recipe, init, model, overrides, seed, chosen, Console(quiet=True), sweep=sweep), folder


def _begun(out: str | Path | None, *, several: bool) -> Path | None:
    """The run to go on with, where the launcher has started the same command before."""
    if out is None or several:
        raise UsageError("a run that may be started again needs --out, and cannot have --seeds or --sweep")
    return Path(out) if (Path(out) / run_folder.CONFIG).is_file() else None


def _folder(out: str | Path | None) -> Path:
    if out is not None:
        return fsio.require_free(Path(out))
    number = 1
    while (path := Path("runs") / f"train-{number}").exists():
        number += 1
    return fsio.require_free(path)


def _command(data: str | Path | None, options: Mapping[str, object], overrides: Sequence[str]) -> str:
    """The call as it can be pasted; what was left out is None."""
    words = [] if data is None else [str(data)]
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    words += [word for override in overrides for word in ("--set", override)]
    return shlex.join(["vitlab", "train", *words])


def _audited(opened: Opened, console: Console) -> list[str]:
    """What the audit finds, in a line for each kind."""
    if sum(map(len, opened.parts.values())) > _AUDITED:
        return ["a large set: not audited; `vitlab data check` does it"]
    found = audit(opened, workers=max(1, (os.cpu_count() or 1)), console=console)
    said = [f"{'!!' if kind in SERIOUS else '--'} {TITLES[kind]}: {count:,}" for kind, count in found.counts.items()]
    return [*said, "`vitlab data check DATA --out DIR` shows them"] if said else []


def _median_side(dataset: Dataset) -> int:
    """Of a sample, by the files' headers."""
    sides: list[int] = []
    for i in torch.linspace(0, len(dataset) - 1, min(_SAMPLED, len(dataset))).long().tolist():
        # What cannot be read is met again in training, and counted there.
        with contextlib.suppress(VitlabError, OSError), opened_image(dataset.read(i)) as image:
            sides.append(min(image.size))
    return sorted(sides)[len(sides) // 2] if sides else _USUAL_SIDE


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
        sweep=[] if found is None else found.rows,
        careful=careful_lines(first.folder),
        seconds=round(sum(result.seconds for result in results), 1),
        images_per_second=round(first.images_per_second, 1),
    )
