"""VTAB-1k as numbers: the accuracy of each task, and the means of the paper's Table 9 where no task of them is missing."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.data.sources.vtab import VTAB


def task_groups() -> dict[str, list[str]]:
    """The names of the tasks of each group."""
    groups: dict[str, list[str]] = {}
    for name, task in VTAB.items():
        groups.setdefault(task.group, []).append(name)
    return groups


def aggregate(values: Mapping[str, Sequence[float]]) -> tuple[dict[str, float | None], float | None]:
    """The means of the three groups and of all tasks, over seeds; None wherever a task is missing."""
    return {group: _mean(values, names) for group, names in task_groups().items()}, _mean(values, list(VTAB))


def _mean(values: Mapping[str, Sequence[float]], names: Sequence[str]) -> float | None:
    if any(name not in values for name in names):
        return None
    return statistics.fmean(statistics.fmean(values[name]) for name in names)


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
        lines = [f"{name:<{width}}{100 * top1:5.1f} %" for name, top1 in self.tasks.items()]
        means = [(group, mean, task_groups()[group]) for group, mean in self.groups.items()]
        for group, mean, names in (*means, ("all", self.mean, list(VTAB))):
            done = sum(name in self.tasks for name in names)
            value = f"{done} of {len(names)} tasks, so no mean" if mean is None else f"{100 * mean:5.1f} %"
            lines.append(f"{f'mean of {group}':<{width}}{value}")
        lines += [f"missing: {name}: {why.splitlines()[0]}" for name, why in self.missing.items()]
        if self.missing:
            lines.append("`vitlab data list` says which files to put where; --download fetches what has an address.")
        return [*lines, f"The records are in {self.records}, the page is {self.page}."]
