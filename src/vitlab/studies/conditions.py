"""Cells of a study with their records: by condition, and as the selections of tests name them. Loads no torch."""

import dataclasses
import statistics
from collections.abc import Sequence

from vitlab.evaluation.fits import Estimate, estimate
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.grid import Cell, Combination
from vitlab.studies.inspected import heads_measure
from vitlab.studies.study import BEST, ENDS, Scale, Selection, named_values
from vitlab.studies.units import goodness


@dataclasses.dataclass(frozen=True)
class Measured:
    """A cell with its record, and the records of the runs that it starts from."""

    cell: Cell
    record: CellRecord
    before: tuple[CellRecord, ...]

    @property
    def stages(self) -> tuple[CellRecord, ...]:
        """Of all its runs, the first one first."""
        return (*self.before, self.record)

    def number(self, measure: str) -> float | None:
        """A number of the last stage; flops and seconds are those of all stages."""
        match measure:
            case "flops":
                return sum(one.flops for one in self.stages)
            case "seconds":
                return sum(map(_seconds, self.stages))
            case _:
                return number_of(self.record, measure)


def number_of(record: CellRecord, measure: str) -> float | None:
    """A number of one run, measured or made of what was."""
    if measure == "macs_per_second" and "images_per_second" in record.numbers:
        return record.numbers["macs"] * record.numbers["images_per_second"]
    made = heads_measure(record.numbers, measure)
    return record.numbers.get(measure) if made is None else made


def _seconds(record: CellRecord) -> float:
    """No less than its images at their mean rate: early records of stopped runs have the time of the last try alone."""
    rate = record.numbers.get("images_per_second")
    return max(record.seconds, record.numbers.get("images_seen", 0.0) / rate) if rate else record.seconds


@dataclasses.dataclass(frozen=True)
class Condition(Combination):
    """A combination with all its seeds."""

    seeds: tuple[Measured, ...]

    def numbers(self, measure: str) -> dict[int, float]:
        """By seed."""
        found = {one.cell.seed: one.number(measure) for one in self.seeds}
        return {seed: value for seed, value in found.items() if value is not None}

    def estimate(self, measure: str) -> Estimate | None:
        values = list(self.numbers(measure).values())
        return estimate(values) if values else None

    def mean(self, measure: str) -> float | None:
        values = self.numbers(measure).values()
        return statistics.fmean(values) if values else None


def select(conditions: Sequence[Condition], scale: Scale, selection: Selection) -> list[Condition]:
    """Those that have the labels of a selection."""
    named = {axis: named_values(scale.axes[axis], label) for axis, label in selection.items()}
    return [one for one in conditions if all(one.values[axis] in values for axis, values in named.items())]


def select_seed(conditions: Sequence[Condition], scale: Scale, seed: int, selection: Selection) -> list[Measured]:
    """The cells of one seed that a selection names, as far as they are measured."""
    selected = select(conditions, scale, selection)
    return [one for condition in selected for one in condition.seeds if one.cell.seed == seed]


def is_complete(conditions: Sequence[Condition], scale: Scale, seed: int, selection: Selection, measure: str) -> bool:
    """Whether a seed has every cell of a selection: a mean or a front of some of them is another number."""
    selected = select(conditions, scale, selection)
    return selected != [] and all(seed in condition.numbers(measure) for condition in selected)


def resolve_selection(selection: Selection, measure: str, scale: Scale, conditions: Sequence[Condition]) -> Selection:
    """A selection with the labels that `first`, `last` and `best` stand for: each side may have its own learning rate."""
    ends = [axis for axis, label in selection.items() if label in ENDS]
    selection = {**selection, **{axis: named_values(scale.axes[axis], selection[axis])[0].label for axis in ends}}
    for axis in [axis for axis, label in selection.items() if label == BEST]:
        others = {other: label for other, label in selection.items() if other != axis}
        seeds = [seed for seed in scale.seeds if is_complete(conditions, scale, seed, others, measure)]
        means: dict[str, float] = {}
        for value in scale.axes[axis]:
            selected = select(conditions, scale, {**selection, axis: value.label})
            found = [condition.numbers(measure)[seed] for condition in selected for seed in seeds]
            means |= {value.label: statistics.fmean(found)} if found else {}
        best = max(means, key=lambda label: goodness(measure, means[label]), default=BEST)
        selection = {**selection, axis: best}
    return selection
