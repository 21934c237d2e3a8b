"""One task of VTAB: its recipe, its runs, and the record that says that it is done."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config
from vitlab.core.session import Session
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset
from vitlab.data.parts import Parts, arrange
from vitlab.data.sources.opening import open_data
from vitlab.data.sources.vtab import FINAL, VtabTask
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.records import Record, new_record, read_records, write_record
from vitlab.models.spec import ModelSpec, ViTSpec
from vitlab.runs.training.execute import execute
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.resolve import Job
from vitlab.runs.training.run_folder import CHECKPOINTS
from vitlab.runs.training.run_record import RECORDS
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
class VtabWork:
    """What all tasks share."""

    model: str
    start: Classifier
    start_hash: str
    pretrained_on: str
    out: Path
    command: str
    session: Session


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
    if not isinstance(spec, ViTSpec):
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
    record = new_record(
        results[0].classifier.model,
        parts.test,
        data=f"vtab:{task.name}",
        part="test" if images == FINAL else "val",
        measure="top1",
        values=[score.top1 for score in scores],
        seeds=seeds,
        interval=scores[0].interval if len(scores) == 1 else None,
        n=scores[0].n,
        settings=settings,
        pretrained_on=work.pretrained_on,
        recipe=RECIPE,
        device=work.session.world.device,
        seconds=sum(result.seconds for result in results),
        command=work.command,
    )
    if work.session.world.is_main:
        write_record(work.out / RECORDS, record)
        for folder in folders.values():  # nineteen times two of them fill a disk, and nothing will go on from them
            remove_after(folder / CHECKPOINTS, -1)
    work.session.world.barrier()
    return record


def _fine_tune(work: VtabWork, recipe: Recipe, parts: Parts, folders: Mapping[int, Path]) -> list[RunResult]:
    """One run for each seed, in its folder; one that was stopped there goes on."""
    try:
        job = Job(recipe=recipe, parts=parts, folder=work.out, command=work.command)
        return [
            execute(
                dataclasses.replace(
                    job, recipe=dataclasses.replace(recipe, seed=seed), folder=folder, resume=folder.exists()
                ),
                work.session,
            )
            for seed, folder in folders.items()
        ]
    except Stopped as stopped:
        stopped.advice = f"What is measured is kept. Resume with:  {work.command}"
        raise


def _settings(work: VtabWork, recipe: Recipe, images: int) -> dict[str, Any]:
    """What tells this measurement from others, and the whole of it as a fingerprint."""
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
    for record in known_records(work):
        same = record.data == f"vtab:{task.name}" and record.seeds == tuple(seeds) and record.settings == settings
        if same and record.fingerprint == test.fingerprint():
            return record
    return None
