"""What the records of a study say: a mean and interval for each condition, and whether each claim holds. Loads no torch.

From records alone, so that the same records give the same answer anywhere.
"""

import dataclasses
import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from vitlab.evaluation.fits import Estimate, Verdict, cost_ratio, estimate, fit_power_law, slope, verdict
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.grid import Cell, Combination, list_cells
from vitlab.studies.study import BEST, ENDS, AxisValue, Claim, Scale, Selection, Study, Test, named_values
from vitlab.studies.units import counted, goodness, is_share, spoken, written

NOT_YET = "not measured yet"
ClaimVerdict = Verdict | Literal["not measured yet"]
HOLDS, FAILS, UNKNOWN = "holds here", "does not hold here", "inconclusive at this scale"
LEAST_SEEDS = 3  # below, chance is not bounded by anything


@dataclasses.dataclass(frozen=True)
class Measured:
    """A cell with its record, and the records of the runs that it starts from."""

    cell: Cell
    record: CellRecord
    before: tuple[CellRecord, ...]

    def number(self, measure: str) -> float | None:
        """A number of the last stage; flops and seconds are those of all stages."""
        stages, numbers = (*self.before, self.record), self.record.numbers
        match measure:
            case "flops":
                return sum(one.flops for one in stages)
            case "seconds":
                return sum(map(_seconds, stages))
            case "macs_per_second" if "images_per_second" in numbers:
                return numbers["macs"] * numbers["images_per_second"]
            case _:
                return numbers.get(measure)


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


@dataclasses.dataclass(frozen=True)
class TestOutcome:
    """The number of a test for each seed, and whether it lies where the claim says."""

    test: Test
    by_seed: Mapping[int, float]  # the statistic
    found: Estimate | None
    verdict: Verdict
    what: str  # the number in words; without one, why there is none
    number: str = ""  # with its interval
    in_points: bool = False  # shares of images, to be shown as points of a hundred
    records: tuple[str, ...] = ()  # the keys of what it rests on

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.number}" if self.number else self.what

    @property
    def by_logarithm(self) -> bool:
        """Whether half is as far from one as double."""
        return self.test.statistic.endswith("ratio") and min(self.by_seed.values(), default=0) > 0


@dataclasses.dataclass(frozen=True)
class ClaimOutcome:
    """A claim with all its tests: it holds if all do, and does not if one does not."""

    claim: Claim
    tests: tuple[TestOutcome, ...]
    verdict: ClaimVerdict
    is_begun: bool = False  # some of the cells that it compares are measured

    @property
    def records(self) -> tuple[str, ...]:
        """The keys of what it rests on."""
        return tuple(dict.fromkeys(key for test in self.tests for key in test.records))

    @property
    def seeds(self) -> int:
        """Of the test that has fewest."""
        return min((len(test.by_seed) for test in self.tests), default=0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the records say about a study at one scale."""

    study: Study
    scale: Scale
    cells: int
    conditions: tuple[Condition, ...]
    claims: tuple[ClaimOutcome, ...]

    @property
    def measured(self) -> int:
        return sum(len(condition.seeds) for condition in self.conditions)


def find_outcome(study: Study, scale: Scale, records: Mapping[str, CellRecord]) -> Outcome:
    """Everything that the records say about one study at one scale."""
    cells = list_cells(scale)
    rows: dict[tuple[str, ...], list[Measured]] = {}
    values: dict[tuple[str, ...], Mapping[str, AxisValue]] = {}
    for cell in cells:
        name = tuple(cell.labels.values())
        values[name] = cell.values
        rows.setdefault(name, [])
        chain = [records.get(run.key) for run in cell.run.chain()]
        if None not in chain:
            *before, last = [record for record in chain if record is not None]
            rows[name].append(Measured(cell, last, tuple(before)))
    conditions = tuple(Condition(values[name], tuple(found)) for name, found in rows.items())
    claims = tuple(_judge(claim, scale, conditions) for claim in study.claims if claim.is_tested_at(scale.name))
    return Outcome(study, scale, len(cells), conditions, claims)


def _judge(claim: Claim, scale: Scale, conditions: Sequence[Condition]) -> ClaimOutcome:
    tests = tuple(_test(test, scale, conditions) for test in claim.tests if scale.name in test.scales)
    verdicts = {test.verdict for test in tests}
    result: ClaimVerdict = NOT_YET if all(test.sentence == NOT_YET for test in tests) else UNKNOWN
    if FAILS in verdicts:
        result = FAILS
    elif verdicts == {HOLDS}:
        result = HOLDS
    sides = [side for test in tests for side in ((test.test.a, test.test.b) if test.test.compares else (test.test.a,))]
    is_begun = any(condition.seeds for side in sides for condition in _selected(conditions, scale, side))
    return ClaimOutcome(claim, tests, result, is_begun)


def _test(test: Test, scale: Scale, conditions: Sequence[Condition]) -> TestOutcome:
    measure = test.measure or scale.measure
    a, b = (_resolved(side, measure, scale, conditions) for side in (test.a, test.b))
    test = dataclasses.replace(test, a=a, b=b)
    by_seed: dict[int, float] = {}
    for seed in scale.seeds:
        value = _statistic(test, scale, seed, conditions)
        if value is not None:
            by_seed[seed] = value
    if not by_seed:
        return TestOutcome(test, {}, None, UNKNOWN, _no_number(test, scale, conditions))
    found = _estimate(test, list(by_seed.values()))
    low, high = (-math.inf if test.above is None else test.above), (math.inf if test.below is None else test.below)
    judged = verdict(found, low, high, least=LEAST_SEEDS)
    used = [one for seed in by_seed for side in (a, b) for one in _chosen(conditions, scale, seed, side)]
    records = tuple(dict.fromkeys(record.key for one in used for record in (*one.before, one.record)))
    in_points = is_share(measure) and test.statistic in ("value", "difference", "slope", "slope-difference")
    signed = test.statistic.endswith("difference") or test.statistic == "slope" or measure == "margin"
    number = written(found, share=in_points, signed=signed, times=counted(measure))
    return TestOutcome(test, by_seed, found, judged, _in_words(test, measure, scale), number, in_points, records)


def _no_number(test: Test, scale: Scale, conditions: Sequence[Condition]) -> str:
    sides = [_chosen(conditions, scale, seed, side) for seed in scale.seeds for side in (test.a, test.b)]
    if test.statistic == "cost-ratio" and all(sides):
        return f"no {spoken(test.measure or scale.measure)} can be compared: one side has more, for more {spoken(test.cost)}"
    measured = [one for side in sides for one in side]
    return lacks_measure(measured[0].record, test.measure or scale.measure) or NOT_YET if measured else NOT_YET


def lacks_measure(record: CellRecord, measure: str) -> str:
    """What a record has instead of a measure, which may be misspelt; empty where it has it."""
    if measure in record.numbers or measure in ("flops", "seconds"):
        return ""
    names = sorted(name for name in record.numbers if "_layer" not in name)  # of single heads there are hundreds
    return f"its runs have no number {measure}; they have {', '.join(names)}"


def _estimate(test: Test, values: Sequence[float]) -> Estimate:
    """The mean with its interval; of ratios by their logarithms, so that half is as far from one as double."""
    if not test.statistic.endswith("ratio") or min(values) <= 0:
        return estimate(values)
    found = estimate([math.log(value) for value in values])
    interval = None if found.interval is None else (math.exp(found.interval[0]), math.exp(found.interval[1]))
    return Estimate(math.exp(found.mean), interval, found.n)


def _statistic(test: Test, scale: Scale, seed: int, conditions: Sequence[Condition]) -> float | None:
    measure = test.measure or scale.measure
    sides = (test.a, test.b) if test.compares else (test.a,)
    if not all(_is_complete(conditions, scale, seed, side, measure) for side in sides):
        return None
    a, b = (_chosen(conditions, scale, seed, side) for side in (test.a, test.b))
    match test.statistic:
        case "value":
            return statistics.fmean(value for one in a if (value := one.number(measure)) is not None)
        case "difference":
            return _compared(a, b, test, measure, operator.sub)
        case "ratio":
            return _compared(a, b, test, measure, operator.truediv)
        case "slope" | "exponent":
            return _along(test, measure, a)
        case "slope-difference" | "exponent-difference":
            of_a, of_b = _along(test, measure, a), _along(test, measure, b)
            return None if of_a is None or of_b is None else of_a - of_b
        case "cost-ratio":
            (costs_a, values_a), (costs_b, values_b) = (_costs(side, test.cost, measure) for side in (a, b))
            return cost_ratio((costs_a, values_a), (costs_b, values_b)) if costs_a and costs_b else None


def _costs(side: Sequence[Measured], cost: str, measure: str) -> tuple[list[float], list[float]]:
    points = [(one.number(cost), one.number(measure)) for one in side]
    known = [(spent, goodness(measure, value)) for spent, value in points if spent and value is not None]
    return [spent for spent, _ in known], [value for _, value in known]


def _along(test: Test, measure: str, side: Sequence[Measured]) -> float | None:
    """A slope over at least two places on the axis; an exponent over at least three."""
    points = [(one.cell.values[test.along].x, one.number(measure)) for one in side]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    if test.statistic.startswith("slope"):
        return slope(xs, ys) if len(set(xs)) > 1 else None
    return fit_power_law(xs, ys).exponent if len(set(xs)) > 2 else None


def _compared(
    a: Sequence[Measured], b: Sequence[Measured], test: Test, measure: str, how: Callable[[float, float], float]
) -> float | None:
    """a beside b, each with the one that is alike in all other axes; the mean where there are several."""
    axes = {*test.a, *test.b}

    def rest(one: Measured) -> tuple[tuple[str, str], ...]:
        return tuple((axis, label) for axis, label in one.cell.labels.items() if axis not in axes)

    sides: list[dict[tuple[tuple[str, str], ...], list[float]]] = [{}, {}]
    for side, measured in zip(sides, (a, b), strict=True):
        for one in measured:
            if (value := one.number(measure)) is not None:
                side.setdefault(rest(one), []).append(value)
    found = [
        how(statistics.fmean(x), statistics.fmean(sides[1][key])) for key, x in sides[0].items() if key in sides[1]
    ]
    return statistics.fmean(found) if found else None


def _selected(conditions: Sequence[Condition], scale: Scale, selection: Selection) -> list[Condition]:
    """Those that have the labels of a selection."""
    named = {axis: named_values(scale.axes[axis], label) for axis, label in selection.items()}
    return [one for one in conditions if all(one.values[axis] in values for axis, values in named.items())]


def _chosen(conditions: Sequence[Condition], scale: Scale, seed: int, selection: Selection) -> list[Measured]:
    """The cells of one seed that a selection names, as far as they are measured."""
    selected = _selected(conditions, scale, selection)
    return [one for condition in selected for one in condition.seeds if one.cell.seed == seed]


def _is_complete(conditions: Sequence[Condition], scale: Scale, seed: int, selection: Selection, measure: str) -> bool:
    """Whether a seed has every cell of a selection: a mean or a front of some of them is another number."""
    selected = _selected(conditions, scale, selection)
    return selected != [] and all(seed in condition.numbers(measure) for condition in selected)


def _resolved(selection: Selection, measure: str, scale: Scale, conditions: Sequence[Condition]) -> Selection:
    """A selection with the labels that `first`, `last` and `best` stand for: each side may have its own learning rate."""
    ends = [axis for axis, label in selection.items() if label in ENDS]
    selection = {**selection, **{axis: named_values(scale.axes[axis], selection[axis])[0].label for axis in ends}}
    for axis in [axis for axis, label in selection.items() if label == BEST]:
        others = {other: label for other, label in selection.items() if other != axis}
        seeds = [seed for seed in scale.seeds if _is_complete(conditions, scale, seed, others, measure)]
        means: dict[str, float] = {}
        for value in scale.axes[axis]:
            selected = _selected(conditions, scale, {**selection, axis: value.label})
            found = [condition.numbers(measure)[seed] for condition in selected for seed in seeds]
            means |= {value.label: statistics.fmean(found)} if found else {}
        best = max(means, key=lambda label: goodness(measure, means[label]), default=BEST)
        selection = {**selection, axis: best}
    return selection


def _in_words(test: Test, measure: str, scale: Scale) -> str:
    """`test accuracy, 1-D minus none (stem)`: what a and b have in common comes last."""
    both = {axis: label for axis, label in test.a.items() if test.b.get(axis) == label}
    a, b = (", ".join(_labels({x: y for x, y in side.items() if x not in both}, scale)) for side in (test.a, test.b))
    what = {
        "value": f"{spoken(measure)} of {a or 'all'}",
        "difference": f"{spoken(measure)}, {a} minus {b}",
        "ratio": f"{spoken(measure)} of {a}, as a multiple of that of {b}",
        "slope": f"{spoken(measure)} for each doubling of {test.along}, {a or 'all'}",
        "slope-difference": f"{spoken(measure)} for each doubling of {test.along}, {a} minus {b}",
        "cost-ratio": f"{spoken(test.cost)} of {b} for the same {spoken(measure)}, as a multiple of those of {a}",
        "exponent": f"exponent of {spoken(measure)} over {test.along}{f', {a}' if a else ''}",
        "exponent-difference": f"exponent of {spoken(measure)} over {test.along}, {a} minus {b}",
    }[test.statistic]
    common = f" ({', '.join(_labels(both, scale))})" if both else ""
    return what + common


def _labels(selection: Selection, scale: Scale) -> list[str]:
    """Numbers with what they are of, and what has a comma in quotation marks."""
    numbers = {axis for axis in selection if all(value.x is not None for value in scale.axes[axis])}
    words = {axis: f"“{label}”" if ", " in label else label for axis, label in selection.items()}
    return [f"{word} {axis}" if axis in numbers else word for axis, word in words.items()]


def count_verdicts(verdicts: Iterable[ClaimVerdict]) -> tuple[str, str]:
    """As a number and what it is of: `19 of 30`, `claims hold here, 3 do not, 8 are inconclusive at this scale`."""
    counts = Counter(verdicts)
    parts = ["claims hold here"]
    if counts[FAILS]:
        parts.append(f"{counts[FAILS]} {'does' if counts[FAILS] == 1 else 'do'} not")
    parts += [
        f"{counts[verdict]} {'is' if counts[verdict] == 1 else 'are'} {verdict}"
        for verdict in (UNKNOWN, NOT_YET)
        if counts[verdict]
    ]
    return f"{counts[HOLDS]} of {counts.total()}", ", ".join(parts)
