"""The cells of a study, and the runs behind them. Loads no torch.

A run is named by what decides it: its recipe with every change, its seed, and the run it starts from. Two cells, of one study
or of two, that need the same run share it; a recipe that is changed gives another name, so that no old result is taken for it.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitlab.core import config
from vitlab.studies.study import AxisValue, Scale, Stage, Study, changed_stage, list_combinations
from vitlab.training.recipe import read_recipe, with_changes

_DIGITS = 16  # of the hash: enough to tell a billion runs apart
_NOT_LEARNED = ("title", "expect", "sweep")  # keys of a recipe that change no weight


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """One run, to be done once. `start` is the run whose weights it begins with."""

    key: str
    stage: Stage
    seed: int
    start: "StudyRun | None"

    def chain(self) -> "list[StudyRun]":
        """The runs that it builds on, itself last."""
        return [*([] if self.start is None else self.start.chain()), self]


@dataclasses.dataclass(frozen=True)
class Combination:
    """One value of every axis."""

    values: Mapping[str, AxisValue]

    @property
    def labels(self) -> dict[str, str]:
        return {axis: value.label for axis, value in self.values.items()}

    @property
    def name(self) -> str:
        return ", ".join(value.label for value in self.values.values())


@dataclasses.dataclass(frozen=True)
class Cell(Combination):
    """A combination with a seed; `run` is the last of its stages, whose numbers count."""

    seed: int
    run: StudyRun


def list_cells(scale: Scale) -> list[Cell]:
    """Every cell, seed by seed: an early look has all conditions."""
    cells: list[Cell] = []
    runs: dict[str, StudyRun] = {}
    read = functools.cache(read_recipe)  # once for all cells: hundreds of them have a few recipes
    for seed in scale.seeds:
        for chosen in list_combinations(scale):
            run: StudyRun | None = None
            for name, stage in scale.stages.items():
                for value in chosen.values():
                    stage = changed_stage(stage, value.changes.get(name, {}))
                run = _run(stage, seed, run, read)
                run = runs.setdefault(run.key, run)
            assert run is not None
            cells.append(Cell(chosen, seed, run))
    return cells


def list_runs(studies: Sequence[tuple[Study, Scale]]) -> list[StudyRun]:
    """The runs of all cells, each once, those that others start from first."""
    found: dict[str, StudyRun] = {}
    for _, scale in studies:
        for cell in list_cells(scale):
            for run in cell.run.chain():
                found.setdefault(run.key, run)
    return list(found.values())


def _run(stage: Stage, seed: int, before: StudyRun | None, read: Callable[[str], Mapping[str, Any]]) -> StudyRun:
    """A stage that names its own start weights does not begin with the run before."""
    start = None if stage.init else before
    decided: dict[str, Any] = {
        "verb": stage.verb,
        "data": stage.data,
        "init": stage.init,
        "start": "" if start is None else start.key,
        "seed": seed,
        "config": _settings(stage, read),
    }
    text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
    return StudyRun(hashlib.sha256(text.encode()).hexdigest()[:_DIGITS], stage, seed, start)


def _settings(stage: Stage, read: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """What the recipe says after the changes; of a stage without a recipe, the changes alone."""
    if not stage.recipe:
        return dict(stage.set)
    table = with_changes(read(stage.recipe), config.override_texts(stage.set))
    return {key: value for key, value in table.items() if key not in _NOT_LEARNED}
