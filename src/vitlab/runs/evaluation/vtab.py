"""VTAB-1k: one model fine-tuned to nineteen tasks of a thousand images, with one setting for all of them.

Runs the tasks whose data is here, says what is missing and how to get it, and resumes where it stopped: a task is done when its
record is there. Groups and mean are those of the paper's Table 9, and only given where every task of them was run.
"""

import dataclasses
import hashlib
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, fsio
from vitlab.core.command import command_line
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, MissingExtra, UsageError
from vitlab.core.session import Session
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset
from vitlab.data.parts import Parts, arrange
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.vtab import FINAL, TRAIN, VTAB, VtabTask, find_task
from vitlab.data.sources.vtab_opening import open_vtab
from vitlab.engines.classifier import Classifier, load, require_weights
from vitlab.evaluation.records import (
    RECORDS,
    Record,
    Subject,
    hash_weights,
    new_record,
    pretraining_of,
    read_records,
    write_record,
)
from vitlab.evaluation.vtab import VtabResult, aggregate, task_groups
from vitlab.models.spec import ModelSpec
from vitlab.report.page import render
from vitlab.report.vtab_page import build_vtab_page
from vitlab.runs.training.execute import execute
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.resolve import Job
from vitlab.runs.training.run_folder import CHECKPOINTS, REPORT
from vitlab.training.checkpoint import remove_after
from vitlab.training.choice import start_from
from vitlab.training.recipe import (
    Recipe,
    merged,
    read_data_config,
    read_recipe,
    recipe_from_dict,
    recipe_to_dict,
    with_changes,
)

RECIPE = "transfer-vtab"


@dataclasses.dataclass(frozen=True)
class VtabRule:
    """What is run: `tasks` by name, or all of them, `seeds` times, with `overrides` of the recipe.

    `sweep` are settings to choose between, as `optim.lr=0.003,0.01`: every combination is trained on 800 images of each task,
    and the one with the best mean on the other 200 is used for all. `download` fetches data that has an address.
    """

    tasks: Sequence[str] = ()
    sweep: Sequence[str] = ()
    overrides: Sequence[str] = ()
    seeds: int = 1
    download: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UsageError(f"--seeds must be at least 1, not {self.seeds}")
        sweep_grid(self.sweep)
        self.wanted()

    def wanted(self) -> list[VtabTask]:
        return [find_task(name)[0] for name in self.tasks] or list(VTAB.values())


@dataclasses.dataclass(frozen=True)
class VtabWork:
    """What all tasks share."""

    model: str
    start: Classifier
    start_hash: str
    pretrained_on: str
    out: Path
    command: str
    session: Session


def run_vtab(model: str, rule: VtabRule, session: Session, *, out: str | Path | None, pretrained_on: str) -> VtabResult:
    """Fine-tunes `model` to every VTAB task whose data is here, with the paper's single setting, and tests it.

    The same call resumes from what is in `out`. `pretrained_on` is for the records, where the name of the weights does not
    say it.
    """
    started = time.perf_counter()
    present, missing = _find_data(rule.wanted(), rule.download, session.console)
    if not present:
        raise FileProblem(
            f"the data of none of the {len(missing)} VTAB tasks is here",
            hint="\n".join(f"{name}: {why}" for name, why in missing.items()),
        )
    start = load(model, device="cpu", quiet=session.console.quiet)
    require_weights(start)
    work = VtabWork(
        model=model,
        start=start,
        start_hash=hash_weights(start.model),
        pretrained_on=pretrained_on or pretraining_of(model),
        out=Path("runs") / "vtab" if out is None else Path(out),
        command=_command(model, out, rule, session.runtime.seed),
        session=session,
    )
    seeds = tuple(range(session.runtime.seed, session.runtime.seed + rule.seeds))
    grid = sweep_grid(rule.sweep)
    tried = [_try(work, present, [*rule.overrides, *setting], setting, seeds[:1]) for setting in grid]
    chosen = max(zip(tried, grid, strict=True), key=lambda pair: pair[0]["mean"])[1] if grid else ()
    if chosen:
        session.console.say(f"chosen on the {FINAL - TRAIN} validation images of each task: {' '.join(chosen)}")
    final = {task.name: run_task(work, task, FINAL, [*rule.overrides, *chosen], seeds) for task in present}
    groups, mean = aggregate({name: record.values for name, record in final.items()})
    _record_means(work, final)
    result = VtabResult(
        tasks={name: record.value for name, record in final.items()},
        missing=missing,
        groups=groups,
        mean=mean,
        chosen=tuple(chosen),
        sweep=tuple(tried),
        seeds=seeds,
        seconds=round(time.perf_counter() - started, 1),
        records=work.out / RECORDS,
        page=work.out / REPORT,
    )
    if session.world.is_main:
        fsio.write_file(result.page, render(build_vtab_page(result, model, work.command)))
    session.world.barrier()
    return result


def sweep_grid(sweep: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of `key=value,value` entries, as overrides; none where nothing is swept."""
    axes: list[list[str]] = []
    for entry in sweep:
        key, values = config.split_sweep(entry)
        axes.append([f"{key}={value}" for value in values])
    return list(itertools.product(*axes)) if axes else []


def _find_data(wanted: Sequence[VtabTask], download: bool, console: Console) -> tuple[list[VtabTask], dict[str, str]]:
    """Which tasks can be run, and what stands in the way of the others."""
    present: list[VtabTask] = []
    missing: dict[str, str] = {}
    for task in wanted:
        try:
            open_vtab(task.name, download=download, console=console)
        except (FileProblem, MissingExtra) as error:
            missing[task.name] = str(error)
        else:
            present.append(task)
    return present, missing


def _try(
    work: VtabWork, tasks: Sequence[VtabTask], overrides: Sequence[str], setting: Sequence[str], seeds: Sequence[int]
) -> dict[str, Any]:
    """One setting of the sweep: its score on the validation images of every task, and their mean."""
    scores = {task.name: run_task(work, task, TRAIN, overrides, seeds).value for task in tasks}
    return {"setting": list(setting), "mean": statistics.fmean(scores.values()), "tasks": scores}


def _record_means(work: VtabWork, final: Mapping[str, Record]) -> None:
    """One record for each group that is whole and one for all nineteen, seed by seed, where there is none yet."""
    members = {"vtab": list(VTAB)} | {f"vtab:{group}": names for group, names in task_groups().items()}
    for data, names in members.items():
        if any(name not in final for name in names) or not work.session.world.is_main:
            continue
        records = [final[name] for name in names]
        together = hashlib.sha256("".join(record.fingerprint for record in records).encode()).hexdigest()
        config_hash = hashlib.sha256("".join(str(one.settings["config"]) for one in records).encode()).hexdigest()
        kept = ("start", "start_weights", "train_images", "image_size", "batch_size", "lr", "precision")
        settings = {key: records[0].settings[key] for key in kept} | {"config": config_hash}
        record = dataclasses.replace(
            records[0],
            weights=work.start_hash,
            data=data,
            fingerprint=together,
            n=sum(one.n for one in records),
            values=tuple(statistics.fmean(column) for column in zip(*(one.values for one in records), strict=True)),
            interval=None,
            settings=settings,
            seconds=sum(one.seconds for one in records),
        )
        if not any(
            (one.data, one.settings, one.seeds) == (data, settings, record.seeds) for one in known_records(work)
        ):
            write_record(work.out / RECORDS, record)


def _command(model: str, out: str | Path | None, rule: VtabRule, seed: int) -> str:
    options = {"vtab": True, "out": out, "task": [*rule.tasks], "sweep": [*rule.sweep], "set": [*rule.overrides]}
    options |= {"seeds": rule.seeds if rule.seeds > 1 else None, "seed": seed or None}
    return command_line("evaluate", model, options=options)


# --- one task ---------------------------------------------------------------------------------------------------------


def task_table(task: VtabTask, images: int, model: str, start: Classifier, overrides: Sequence[str]) -> dict[str, Any]:
    """The recipe of one task: the paper's setting, the start's own normalisation, and what the task forbids."""
    spec = start.model.spec
    table = start_from(read_recipe(RECIPE), spec, start.preprocess).table
    del table["expect"]  # of the checkpoint that the recipe names
    size = _fitting_size(spec, table["data"]["image_size"])
    data: dict[str, Any] = {"source": f"vtab:{task.name}/{images}", "image_size": size}
    if not task.flip:
        data["augment"] = {"mirror": 0.0}
    if not task.crop:
        data["crop"] = {"how": "whole"}
    given = {"title": f"VTAB {task.name}, {images} images", "init": model, "data": data}
    return with_changes(merged(table, given), overrides)


def _fitting_size(spec: ModelSpec, size: Sequence[int]) -> list[int]:
    """The recipe's size, or the next smaller one that the patches fill: 378 instead of 384 for patches of 14."""
    if spec.num_tokens is None:  # a CNN takes any size
        return list(size)
    step = spec.image_size[0] // spec.grid[0], spec.image_size[1] // spec.grid[1]
    return [side // pixels * pixels for side, pixels in zip(size, step, strict=True)]


def run_task(work: VtabWork, task: VtabTask, images: int, overrides: Sequence[str], seeds: Sequence[int]) -> Record:
    """The record of one task, measured now unless it is there already. With 800 images, the score is on the other 200."""
    table = task_table(task, images, work.model, work.start, overrides)
    data = read_data_config(table)
    parts = arrange(open_data(data.source), data)
    recipe = recipe_from_dict({**table, "seed": seeds[0]}, len(parts.train.classes))
    settings = _settings(work, recipe, images)
    assert parts.test is not None  # VTAB's tasks have one
    if (known := _find(work, task, settings, seeds, parts.test)) is not None:
        work.session.console.say(f"{recipe.title}: measured before, {100 * known.value:.1f} %")
        return known
    name = "final" if images == FINAL else f"sweep-{settings['config'][:8]}"
    folders = {number: work.out / name / task.name / f"seed-{number}" for number in seeds}
    results = _fine_tune(work, recipe, parts, folders)
    scores = [result.scores for result in results if result.scores is not None]
    subject = Subject(
        model=results[0].classifier.model,
        dataset=parts.test,
        data=f"vtab:{task.name}",
        part="test" if images == FINAL else "val",
        settings=settings,
        pretrained_on=work.pretrained_on,
        recipe=RECIPE,
        device=work.session.world.device,
        seconds=sum(result.seconds for result in results),
        command=work.command,
    )
    interval = scores[0].interval if len(scores) == 1 else None
    record = new_record(
        subject, "top1", [score.top1 for score in scores], seeds=seeds, interval=interval, n=scores[0].n
    )
    if work.session.world.is_main:
        write_record(work.out / RECORDS, record)
        for folder in folders.values():  # nineteen times two of them fill a disk, and nothing will resume from them
            remove_after(folder / CHECKPOINTS, -1)
    work.session.world.barrier()
    return record


def _fine_tune(work: VtabWork, recipe: Recipe, parts: Parts, folders: Mapping[int, Path]) -> list[RunResult]:
    """One run for each seed, in its folder; one that was stopped there resumes."""
    try:
        jobs = [
            Job(
                recipe=dataclasses.replace(recipe, seed=seed),
                parts=parts,
                folder=folder,
                command=work.command,
                resume=folder.exists(),
            )
            for seed, folder in folders.items()
        ]
        return [execute(job, work.session) for job in jobs]
    except Stopped as stopped:
        stopped.advice = f"What is measured is kept. Resume with:  {work.command}"
        raise


def _settings(work: VtabWork, recipe: Recipe, images: int) -> dict[str, Any]:
    """What distinguishes this measurement from others, and the whole of it as a fingerprint."""
    return {
        "start": work.model,
        "start_weights": work.start_hash,
        "train_images": images,
        "image_size": list(recipe.data.image_size),
        "steps": recipe.train.in_steps(images, recipe.train.batch_size),
        "batch_size": recipe.train.batch_size,
        "lr": recipe.optim.lr,
        "precision": recipe.train.precision,
        "mirror": recipe.data.augment.mirror,
        "crop": recipe.data.crop.how,
        "config": config.fingerprint(recipe_to_dict(recipe)),
    }


def known_records(work: VtabWork) -> list[Record]:
    folder = work.out / RECORDS
    return read_records(folder) if folder.is_dir() else []


def _find(
    work: VtabWork, task: VtabTask, settings: Mapping[str, Any], seeds: Sequence[int], test: Dataset
) -> Record | None:
    wanted = (f"vtab:{task.name}", tuple(seeds), settings, test.fingerprint())
    known = known_records(work)
    return next((one for one in known if (one.data, one.seeds, one.settings, one.fingerprint) == wanted), None)
