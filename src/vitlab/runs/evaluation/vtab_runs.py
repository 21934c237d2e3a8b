"""VTAB-1k: one model fine-tuned to nineteen tasks of a thousand images, with one setting for all of them.

Runs the tasks whose data is here, says what is missing and how to get it, and goes on where it stopped: a task is done when
its record is there. Groups and mean are those of the paper's Table 9, and only given where every task of them was run.
"""

import dataclasses
import hashlib
import itertools
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, MissingExtra, UsageError
from vitlab.core.session import Session
from vitlab.data.sources.vtab import FINAL, TRAIN, VTAB, VtabTask, find_task, open_vtab
from vitlab.engines.classifier import load
from vitlab.evaluation.records import Record, hash_weights, write_record
from vitlab.report.page import Report, render
from vitlab.report.vtab_page import VtabFacts, build_vtab_page
from vitlab.runs.evaluation.vtab_task import VtabWork, known_records, run_task
from vitlab.runs.training.run_folder import REPORT
from vitlab.runs.training.run_record import RECORDS, pretraining_of


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
class VtabResult:
    """Accuracies are fractions, means over the seeds. `groups` and `mean` are None where a task of them is missing."""

    tasks: Mapping[str, float]
    missing: Mapping[str, str]  # task -> why, and how to get its data
    groups: Mapping[str, float | None]
    mean: float | None
    chosen: tuple[str, ...]  # by the sweep, as overrides
    sweep: tuple[Mapping[str, Any], ...]
    seeds: tuple[int, ...]
    seconds: float
    records: Path
    page: Path

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "records": str(self.records), "page": str(self.page)}

    def sentences(self) -> list[str]:
        """The outcome in words and a small table, for people."""
        width = max(map(len, VTAB)) + 2
        said = [f"{name:<{width}}{100 * top1:5.1f} %" for name, top1 in self.tasks.items()]
        for group, mean in self.groups.items():
            own = [name for name, task in VTAB.items() if task.group == group]
            done = sum(name in self.tasks for name in own)
            told = f"{done} of {len(own)} tasks, so no mean" if mean is None else f"{100 * mean:5.1f} %"
            said.append(f"{f'mean of {group}':<{width}}{told}")
        whole = (
            f"{len(self.tasks)} of {len(VTAB)} tasks, so no mean" if self.mean is None else f"{100 * self.mean:5.1f} %"
        )
        said.append(f"{'mean of all':<{width}}{whole}")
        said += [f"missing: {name}: {why.splitlines()[0]}" for name, why in self.missing.items()]
        if self.missing:
            said.append("`vitlab data list` says which files to put where; --download fetches what has an address.")
        return [*said, f"The records are in {self.records}, the page is {self.page}."]


def run_vtab(
    model: str, rule: VtabRule, session: Session, *, out: str | Path | None = None, pretrained_on: str = ""
) -> VtabResult:
    """Fine-tunes `model` to every VTAB task whose data is here, with the paper's single setting, and tests it.

    The same call goes on with what is in `out`. `pretrained_on` is for the records, where the name of the weights does not
    tell it.
    """
    started = time.perf_counter()
    present, missing = _look(rule.wanted(), rule.download, session.console)
    if not present:
        raise FileProblem(
            f"the data of none of the {len(missing)} VTAB tasks is here",
            hint="\n".join(f"{name}: {why}" for name, why in missing.items()),
        )
    start = load(model, device="cpu", quiet=session.console.quiet)
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
        fsio.write_file(result.page, render(_page(work, result)))
    session.world.barrier()
    return result


def _page(work: VtabWork, result: VtabResult) -> Report:
    groups: dict[str, list[str]] = {}
    for name, task in VTAB.items():
        groups.setdefault(task.group, []).append(name)
    facts = VtabFacts(
        model=work.model,
        command=work.command,
        records=str(result.records),
        groups=groups,
        tasks=result.tasks,
        means=result.groups,
        mean=result.mean,
        missing=result.missing,
        chosen=result.chosen,
        seeds=result.seeds,
        seconds=result.seconds,
    )
    return build_vtab_page(facts)


def sweep_grid(sweep: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of `key=value,value` entries, as overrides; none where nothing is swept."""
    axes: list[list[str]] = []
    for entry in sweep:
        key, equals, values = entry.partition("=")
        each = [value.strip() for value in values.split(",")]
        if not equals or not key.strip() or not all(each):
            raise UsageError(f"'{entry}' is not a sweep", hint="Write key=value,value: for example optim.lr=0.003,0.01")
        axes.append([f"{key.strip()}={value}" for value in each])
    return list(itertools.product(*axes)) if axes else []


def aggregate(values: Mapping[str, Sequence[float]]) -> tuple[dict[str, float | None], float | None]:
    """The means of the three groups and of all tasks, over seeds; None wherever a task is missing."""
    groups: dict[str, float | None] = {}
    for group in dict.fromkeys(task.group for task in VTAB.values()):
        groups[group] = _mean(values, [name for name, task in VTAB.items() if task.group == group])
    return groups, _mean(values, list(VTAB))


def _mean(values: Mapping[str, Sequence[float]], names: Sequence[str]) -> float | None:
    if any(name not in values for name in names):
        return None
    return statistics.fmean(statistics.fmean(values[name]) for name in names)


def _look(wanted: Sequence[VtabTask], download: bool, console: Console) -> tuple[list[VtabTask], dict[str, str]]:
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
    members = {"vtab": list(VTAB)}
    for name, task in VTAB.items():
        members.setdefault(f"vtab:{task.group}", []).append(name)
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
    words = ["vitlab", "evaluate", model, "--vtab", *(["--out", str(out)] if out is not None else [])]
    words += [word for name in rule.tasks for word in ("--task", name)]
    words += [word for entry in rule.sweep for word in ("--sweep", entry)]
    words += [word for entry in rule.overrides for word in ("--set", entry)]
    words += ["--seeds", str(rule.seeds)] if rule.seeds > 1 else []
    return shlex.join([*words, *(["--seed", str(seed)] if seed else [])])
