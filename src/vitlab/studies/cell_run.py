"""Carry out one run of a study: resolve it to a `Job`, execute it, and make its record."""

import contextlib
import datetime
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core import config, fsio
from vitlab.core.command import command_line
from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.runtime import pick_device
from vitlab.core.session import open_session
from vitlab.engines.classifier import load
from vitlab.evaluation.records import describe_hardware, describe_versions
from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec
from vitlab.pipelines.noisy_student_run import noisy_student
from vitlab.runs.evaluation.evaluation_run import evaluate
from vitlab.runs.inspection_run import inspect
from vitlab.runs.training import run_folder
from vitlab.runs.training.execute import execute
from vitlab.runs.training.resolve import resolve
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.grid import StudyRun
from vitlab.studies.inspected import numbers_of
from vitlab.studies.speed import measure_speed
from vitlab.studies.study import SpeedRule
from vitlab.training.call import TrainCall
from vitlab.training.pretext_rules import count_task_macs

_CURVE_POINTS = 60  # of a training curve in a record: as many as a small drawing shows
_TRAIN_FLOPS_PER_MAC = 6  # two for the product, and a backward pass costs two forward ones
_FIGURES = ("filters", "positions", "distance")
_FEW_SHOT = 5  # images of each class, as in Figures 4, 8, 9 and Table 8


def execute_run(
    run: StudyRun,
    place: Path,
    start: Path | None,
    *,
    device: str = "auto",
    threads: int | None = None,
    workers: int = 1,
) -> CellRecord:
    """Do it in the folder `place`, resuming what was begun there; `start` is the folder of the run it begins with."""
    began = time.perf_counter()
    machine: dict[str, Any] = {"device": device, "threads": threads, "quiet": True}
    done = _do(run, place, start, machine)
    return CellRecord(
        key=run.key,
        verb=run.stage.verb,
        model=format_name(done.model),
        data=done.data,
        seed=run.seed,
        numbers={**done.numbers, "params": float(count_params(done.model)), "macs": float(count_macs(done.model))},
        flops=done.flops,
        seconds=round(max(time.perf_counter() - began, done.seconds), 3),
        workers=workers,
        curve=done.curve,
        command=done.command,
        hardware=describe_hardware(pick_device(device)),
        versions=describe_versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


class _Done(NamedTuple):
    model: ModelSpec
    data: str
    numbers: dict[str, float]
    command: str
    flops: float = 0.0
    seconds: float = 0.0  # where the verb itself knows those of earlier tries
    curve: tuple[tuple[float, float], ...] = ()


def _do(run: StudyRun, place: Path, start: Path | None, machine: Mapping[str, Any]) -> _Done:
    match run.stage.verb:
        case "train":
            return _train(run, place, start, machine)
        case "noisy-student":
            return _noisy_student(run, place, machine)
        case "few-shot":
            return _few_shot(run, place, start, machine)
        case "inspect":
            return _inspect(run, place, start, machine)
        case "speed":
            return _speed(run, machine)


def _train(run: StudyRun, place: Path, start: Path | None, machine: Mapping[str, Any]) -> _Done:
    stage = run.stage
    if (place / run_folder.CONFIG).is_file():
        call = TrainCall(resume=place, **machine)
    else:
        given: dict[str, Any] = {"recipe": stage.recipe or None, "init": stage.init or start, "overrides": stage.set}
        call = TrainCall(stage.data or None, out=place, seed=run.seed, **given, **machine)
    with open_session(call.device, run.seed, call.threads, quiet=True) as session:
        try:
            job = resolve(call, session.world, session.console)
        except VitlabError as error:
            if call.resume is None:
                raise
            damaged = f"If it is the run folder that is damaged, remove {place}: the study then begins this run again."
            raise VitlabError(error.what, hint=" ".join(filter(None, (error.hint, damaged)))) from error
        result = execute(job, session)  # without the report of a single run: a study has one of its own
    test = result.scores.test_summary() if result.scores is not None else {}
    test |= {} if result.knn is None else {"knn": result.knn, "n": result.knn["n"]}
    seen = len(result.records) * job.recipe.train.batch_size
    macs = count_task_macs(job.recipe.objective, job.recipe.model)
    images = {"train_images": float(len(job.parts.learnt)), "images_seen": float(seen)}
    return _Done(
        model=job.recipe.model,
        data=job.recipe.data.source,
        numbers={**tested(test), **images, "images_per_second": result.images_per_second},
        command=job.command,
        flops=float(_TRAIN_FLOPS_PER_MAC * macs * seen),
        seconds=result.seconds,
        curve=thinned_curve([(record.step, record.loss) for record in result.records]),
    )


def _noisy_student(run: StudyRun, place: Path, machine: Mapping[str, Any]) -> _Done:
    stage = run.stage
    if (place / run_folder.NOISY_STUDENT).is_file():
        result = noisy_student(resume=place, **machine)
    else:
        given: dict[str, Any] = {"recipe": stage.recipe or None, "overrides": stage.set, "seed": run.seed}
        result = noisy_student(stage.data or None, out=place, **given, **machine)
    teacher = {f"teacher_{name}": value for name, value in tested(result.teacher["test"]).items()}
    begun = run_folder.read_run(result.run)
    spec = load(result.run, device="cpu", quiet=True).model.spec
    numbers = {**tested(result.test), **teacher}
    margin = {} if "top1" not in numbers else {"margin": numbers["top1"] - numbers["teacher_top1"]}
    return _Done(spec, stage.data or stage.recipe, {**numbers, **margin}, begun.command)


def _few_shot(run: StudyRun, place: Path, start: Path | None, machine: Mapping[str, Any]) -> _Done:
    model, data = _measured(run, place, start), run.stage.data or None
    result = evaluate(model, data, few_shot=(_FEW_SHOT,), seed=run.seed, out=place, **machine)
    assert result.few_shot is not None
    numbers = {f"few_shot_{shots}": float(value) for shots, value in result.few_shot.items()}
    command = command_line("evaluate", model, *([data] if data else []), options={"few_shot": _FEW_SHOT})
    return _Done(load(model, device="cpu", quiet=True).model.spec, result.data, numbers, command)


def _inspect(run: StudyRun, place: Path, start: Path | None, machine: Mapping[str, Any]) -> _Done:
    model, data = _measured(run, place, start), run.stage.data
    # Published weights are the same for every seed: what it chooses is the photos. Trained ones are all shown the same.
    seed = run.seed if run.stage.init else 0
    result = inspect(model, data or (), figures=_FIGURES, out=place, photos=1, seed=seed, **machine)
    uniform_px = result.numbers["model"].get("attention", {}).get("uniform_distance_px")
    options = {"figures": ",".join(_FIGURES), "seed": seed or None}
    command = command_line("inspect", model, *([data] if data else []), options=options)
    numbers = numbers_of(result.arrays, uniform_px)
    return _Done(load(model, device="cpu", quiet=True).model.spec, data, numbers, command)


def _measured(run: StudyRun, place: Path, start: Path | None) -> str | Path:
    """What a stage without training is about; what an earlier try left in `place` goes."""
    model = run.stage.init or start
    if model is None:
        raise UsageError(f"a stage {run.stage.verb} is about the run before it, or about what init names")
    if place.exists():
        fsio.remove_folder(place)
    return model


def _speed(run: StudyRun, machine: Mapping[str, Any]) -> _Done:
    rule = config.from_dict(SpeedRule, run.stage.set)
    with open_session(machine["device"], run.seed, machine["threads"], quiet=True) as session:
        model, numbers = measure_speed(rule, session.world.device)
    command = command_line("models info", rule.model, options={"image_size": rule.image_size})
    return _Done(model.spec, "", {**numbers, "image_size": float(rule.image_size)}, command)


def tested(test: Mapping[str, Any]) -> dict[str, float]:
    """The plain numbers of a test; of a run without labels, what its nearest neighbours say."""
    flat = {**test, **({"knn": test["knn"]["top1"]} if "knn" in test else {})}
    return {name: float(value) for name, value in flat.items() if isinstance(value, int | float)}


def thinned_curve(points: Sequence[tuple[int, float]]) -> tuple[tuple[float, float], ...]:
    """Loss by step, as means over equally many steps: a single one is mostly noise."""
    if not points:
        return ()
    steps = -(-len(points) // _CURVE_POINTS)
    parts = [points[i : i + steps] for i in range(0, len(points), steps)]
    return tuple((float(part[-1][0]), round(sum(loss for _, loss in part) / len(part), 5)) for part in parts)


def forget_checkpoints(place: Path) -> None:
    """A finished run needs none, and those of a few hundred would fill a disk."""
    for folder in sorted(place.rglob(run_folder.CHECKPOINTS)):
        with contextlib.suppress(FileNotFoundError):
            for saved in sorted(folder.iterdir()):
                fsio.remove_folder(saved)
