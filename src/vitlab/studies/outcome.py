"""What the records of a study say: a mean and interval for each condition, and whether each claim holds. Loads no torch.

From records alone, so that the same records give the same answer anywhere.
"""

import dataclasses
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from vitlab.evaluation.fits import Estimate, Verdict, cost_ratio, estimate, fit_power_law, slope, verdict
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.grid import Cell, Combination, list_cells
from vitlab.studies.study import BEST, ENDS, AxisValue, Claim, Scale, Selection, Study, Test, named_values
from vitlab.studies.units import bounded, count_in_words, goodness, is_share, is_timed, spoken, written

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
    verdict: Verdict
    what: str  # the number in words; without one, why there is none
    seeds: int = 0  # that have every cell that is compared, whether or not these give a number
    by_seed: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])  # the statistic
    found: Estimate | None = None
    number: str = ""  # with its interval
    in_points: bool = False  # shares of images, to be shown as points of a hundred
    records: tuple[str, ...] = ()  # the keys of what it rests on

    @property
    def sentence(self) -> str:
        if self.found is None:
            return self.what
        return f"{self.what}: {self.number}, {count_in_words(self.found, self.test.measure)}"

    @property
    def by_logarithm(self) -> bool:
        """Whether half is as far from one as double."""
        return self.test.statistic.endswith("ratio")


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
        """Those that the verdict rests on: of a claim that fails, of a test that does; else of the test that has fewest."""
        failing = [test.seeds for test in self.tests if test.verdict == FAILS]
        return max(failing) if failing else min((test.seeds for test in self.tests), default=0)


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
    result: ClaimVerdict = NOT_YET if all(test.what == NOT_YET for test in tests) else UNKNOWN
    if FAILS in verdicts:
        result = FAILS
    elif verdicts == {HOLDS}:
        result = HOLDS
    is_begun = any(
        condition.seeds
        for test in tests
        for side in _sides(test.test)
        for condition in _selected(conditions, scale, side)
    )
    return ClaimOutcome(claim, tests, result, is_begun)


def _sides(test: Test) -> tuple[Selection, ...]:
    return (test.a, test.b) if test.compares else (test.a,)


def _test(test: Test, scale: Scale, conditions: Sequence[Condition]) -> TestOutcome:
    measure = test.measure or scale.measure
    a, b = (_resolved(side, measure, scale, conditions) for side in (test.a, test.b))
    test = dataclasses.replace(test, a=a, b=b, measure=measure)
    sides = _sides(test)
    seeds = [
        seed for seed in scale.seeds if all(_is_complete(conditions, scale, seed, side, measure) for side in sides)
    ]
    used = [one for seed in seeds for side in sides for one in _chosen(conditions, scale, seed, side)]
    if not seeds:
        return TestOutcome(test, UNKNOWN, _why_unmeasured(measure, scale, conditions, sides))
    try:
        _require_one_machine(test, used)
        numbers = {
            seed: _statistic(test, [_chosen(conditions, scale, seed, side) for side in sides], seed) for seed in seeds
        }
        found, bound = _estimate(test, list(numbers.values()))
    except _NoNumberError as error:
        return TestOutcome(test, UNKNOWN, str(error), len(seeds))
    in_points = is_share(measure) and test.statistic in ("value", "difference", "slope", "slope-difference")
    signed = test.statistic.endswith("difference") or test.statistic == "slope" or measure == "margin"
    said = bounded(found, measure) if test.statistic == "value" else found
    at = {-1: "at most ", 0: "", 1: "at least "}[bound]
    return TestOutcome(
        test,
        _verdict(test, found, bound),
        _in_words(test, measure, scale),
        seeds=len(seeds),
        by_seed={seed: one.value for seed, one in numbers.items()},
        found=found,
        number=at + written(said, share=in_points, signed=signed),
        in_points=in_points,
        records=tuple(dict.fromkeys(record.key for one in used for record in (*one.before, one.record))),
    )


class _NoNumberError(Exception):
    """What was measured gives no number to test; says why."""


class _Number(NamedTuple):
    """Of one seed. `bound` is 1 where it may be larger, -1 where it may be smaller."""

    value: float
    bound: int = 0


def _why_unmeasured(measure: str, scale: Scale, conditions: Sequence[Condition], sides: Sequence[Selection]) -> str:
    measured = [one for seed in scale.seeds for side in sides for one in _chosen(conditions, scale, seed, side)]
    return (lacks_measure(measured[0].record, measure) if measured else "") or NOT_YET


def lacks_measure(record: CellRecord, measure: str) -> str:
    """What a record has instead of a measure, which may be misspelt; empty where it has it."""
    if measure in record.numbers or measure in ("flops", "seconds"):
        return ""
    names = sorted(name for name in record.numbers if "_layer" not in name)  # of single heads there are hundreds
    return f"its runs have no number {measure}; they have {', '.join(names)}"


def _require_one_machine(test: Test, used: Sequence[Measured]) -> None:
    """Two sides in seconds compare where one machine measured both, with nothing beside it."""
    timed = is_timed(test.measure) or (test.statistic == "cost-ratio" and is_timed(test.cost))
    if not test.compares or not timed:
        return
    records = [record for one in used for record in (*one.before, one.record)]
    machines = sorted({str(record.hardware.get("name", "?")) for record in records})
    if len(machines) > 1:
        raise _NoNumberError(f"not comparable: measured on {' and '.join(machines)}")
    if any(record.workers > 1 for record in records):
        raise _NoNumberError("not comparable: some runs shared their machine with others; --workers 1 runs them alone")


def _estimate(test: Test, numbers: Sequence[_Number]) -> tuple[Estimate, int]:
    """The mean with its interval, and which way it is a bound.

    Ratios by their logarithms, so that half is as far from one as double.
    """
    bounds = {one.bound for one in numbers} - {0}
    if len(bounds) > 1:
        raise _NoNumberError(
            "not comparable: the fronts do not meet, and differ from seed to seed in which is the cheaper"
        )
    values = [one.value for one in numbers]
    if not test.statistic.endswith("ratio"):
        return estimate(values), 0
    found = estimate([math.log(value) for value in values])
    interval = None if found.interval is None else (math.exp(found.interval[0]), math.exp(found.interval[1]))
    return Estimate(math.exp(found.mean), interval, found.n), next(iter(bounds), 0)


def _verdict(test: Test, found: Estimate, bound: int) -> Verdict:
    """Of a bound, one end of the interval is as far as numbers go."""
    low, high = (-math.inf if test.above is None else test.above), (math.inf if test.below is None else test.below)
    if bound and found.interval is not None:
        start, end = found.interval
        found = dataclasses.replace(found, interval=(start, sys.float_info.max) if bound > 0 else (0.0, end))
    return verdict(found, low, high, least=LEAST_SEEDS)


def _statistic(test: Test, sides: Sequence[Sequence[Measured]], seed: int) -> _Number:
    a, b = sides[0], sides[-1]
    match test.statistic:
        case "value":
            return _Number(statistics.fmean(_numbers(a, test.measure)))
        case "difference" | "ratio":
            return _Number(_compared(a, b, test, seed))
        case "slope" | "exponent":
            return _Number(_along(test, a, seed))
        case "slope-difference" | "exponent-difference":
            return _Number(_along(test, a, seed) - _along(test, b, seed))
        case "cost-ratio":
            ratio = cost_ratio(_costs(test, a, seed), _costs(test, b, seed))
            if ratio is None:
                dearer = f"one side has more {spoken(test.measure)} for more {spoken(test.cost)}"
                raise _NoNumberError(f"not comparable: with seed {seed} {dearer}")
            return _Number(ratio.ratio, int(math.copysign(ratio.is_bound, math.log(ratio.ratio))))


def _numbers(side: Iterable[Measured], measure: str) -> list[float]:
    return [value for one in side if (value := one.number(measure)) is not None]


def _costs(test: Test, side: Sequence[Measured], seed: int) -> tuple[list[float], list[float]]:
    costs = _numbers(side, test.cost)
    if min(costs) <= 0:
        raise _NoNumberError(f"not comparable: with seed {seed} a run has no {spoken(test.cost)}")
    return costs, [goodness(test.measure, value) for value in _numbers(side, test.measure)]


def _along(test: Test, side: Sequence[Measured], seed: int) -> float:
    xs = [float(one.cell.values[test.along].x or math.nan) for one in side]
    ys = _numbers(side, test.measure)
    if test.statistic.startswith("slope"):
        return slope(xs, ys)
    if min(ys) <= 0:
        raise _NoNumberError(
            f"with seed {seed} {spoken(test.measure)} is {min(ys):g}, and a power law is of numbers above 0"
        )
    return fit_power_law(xs, ys).exponent


def _compared(a: Sequence[Measured], b: Sequence[Measured], test: Test, seed: int) -> float:
    """a beside b, each with the one that is alike in all other axes; the mean where there are several."""
    axes = {*test.a, *test.b}

    def rest(one: Measured) -> tuple[tuple[str, str], ...]:
        return tuple((axis, label) for axis, label in one.cell.labels.items() if axis not in axes)

    sides: list[dict[tuple[tuple[str, str], ...], list[float]]] = [{}, {}]
    for side, measured in zip(sides, (a, b), strict=True):
        for one in measured:
            side.setdefault(rest(one), []).extend(_numbers([one], test.measure))
    pairs = [(statistics.fmean(x), statistics.fmean(sides[1][key])) for key, x in sides[0].items() if key in sides[1]]
    if not pairs:
        raise _NoNumberError(f"with seed {seed} no cell of one side is like one of the other but for what is compared")
    if test.statistic == "difference":
        return statistics.fmean(x - y for x, y in pairs)
    if min(min(pair) for pair in pairs) <= 0:
        raise _NoNumberError(f"with seed {seed} {spoken(test.measure)} is not above 0, so that there is no ratio")
    return statistics.geometric_mean(x / y for x, y in pairs)


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
