"""The number of a test for one seed, and their mean with its interval. Loads no torch."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vitlab.evaluation.fits import Estimate, cost_ratio, estimate, fit_power_law, slope
from vitlab.studies.conditions import Measured
from vitlab.studies.study import Selection, Test
from vitlab.studies.units import goodness, is_timed, measure_label


class NoNumberError(Exception):
    """What was measured gives no number to test; says why."""


class Number(NamedTuple):
    """Of one seed. `bound` is 1 where it may be larger, -1 where it may be smaller."""

    value: float
    bound: int = 0


def sides_of(test: Test) -> tuple[Selection, ...]:
    return (test.a, test.b) if test.compares else (test.a,)


def require_one_machine(test: Test, used: Sequence[Measured]) -> None:
    """Seconds compare, with each other and along an axis, where one machine measured all, with nothing beside it."""
    if not is_timed(test.measure) and not (test.statistic == "cost-ratio" and is_timed(test.cost)):
        return
    records = [record for one in used for record in one.stages]
    machines = {tuple(str(record.hardware.get(key, "?")) for key in ("name", "cpus", "threads")) for record in records}
    if len(machines) > 1:  # the same processor with other cores or threads is another machine
        names = {name for name, *_ in machines}
        said = (
            names
            if len(names) > 1
            else {f"{name} with {threads} threads of {cpus} cores" for name, cpus, threads in machines}
        )
        raise NoNumberError(f"not comparable: measured on {' and '.join(sorted(said))}")
    if any(record.workers > 1 for record in records):
        raise NoNumberError("not comparable: some runs shared their machine with others; --workers 1 runs them alone")


def find_number(test: Test, sides: Sequence[Sequence[Measured]], seed: int) -> Number:
    a, b = sides[0], sides[-1]
    match test.statistic:
        case "value":
            return Number(statistics.fmean(_numbers(a, test.measure)))
        case "difference" | "ratio":
            return Number(_compared(a, b, test, seed))
        case "slope" | "exponent":
            return Number(_along(test, a, seed))
        case "slope-difference" | "exponent-difference":
            return Number(_along(test, a, seed) - _along(test, b, seed))
        case "cost-ratio":
            ratio = cost_ratio(_costs(test, a, seed), _costs(test, b, seed))
            if ratio is None:
                dearer = f"one side has more {measure_label(test.measure)} for more {measure_label(test.cost)}"
                raise NoNumberError(f"not comparable: with seed {seed} {dearer}")
            return Number(ratio.ratio, int(math.copysign(ratio.is_bound, math.log(ratio.ratio))))


def _numbers(side: Iterable[Measured], measure: str) -> list[float]:
    return [value for one in side if (value := one.number(measure)) is not None]


def _costs(test: Test, side: Sequence[Measured], seed: int) -> tuple[list[float], list[float]]:
    costs = _numbers(side, test.cost)
    if min(costs) <= 0:
        raise NoNumberError(f"not comparable: with seed {seed} a run has no {measure_label(test.cost)}")
    return costs, [goodness(test.measure, value) for value in _numbers(side, test.measure)]


def _along(test: Test, side: Sequence[Measured], seed: int) -> float:
    xs = [float(one.cell.values[test.along].x or math.nan) for one in side]
    ys = _numbers(side, test.measure)
    if test.statistic.startswith("slope"):
        return slope(xs, ys)
    if min(ys) <= 0:
        raise NoNumberError(
            f"with seed {seed} {measure_label(test.measure)} is {min(ys):g}, and a power law is of numbers above 0"
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
        raise NoNumberError(f"with seed {seed} no cell of one side is like one of the other but for what is compared")
    if test.statistic == "difference":
        return statistics.fmean(x - y for x, y in pairs)
    if min(min(pair) for pair in pairs) <= 0:
        raise NoNumberError(f"with seed {seed} {measure_label(test.measure)} is not above 0, so that there is no ratio")
    return statistics.geometric_mean(x / y for x, y in pairs)


def estimate_numbers(test: Test, numbers: Sequence[Number]) -> tuple[Estimate, int]:
    """The mean with its interval, and which way it is a bound.

    Ratios by their logarithms, so that half is as far from one as double.
    """
    bounds = {one.bound for one in numbers} - {0}
    if len(bounds) > 1:
        raise NoNumberError(
            "not comparable: the fronts do not meet, and differ from seed to seed in which is the cheaper"
        )
    values = [one.value for one in numbers]
    if not test.statistic.endswith("ratio"):
        return estimate(values), 0
    found = estimate([math.log(value) for value in values])
    interval = None if found.interval is None else (math.exp(found.interval[0]), math.exp(found.interval[1]))
    return Estimate(math.exp(found.mean), interval, found.n), next(iter(bounds), 0)
