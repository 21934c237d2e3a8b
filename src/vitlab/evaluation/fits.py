"""The statistics of scaling studies: seeds, power laws, and the cost of quality.

NumPy alone, so that a table of results is read without torch. Letters: N points.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from vitlab.core.errors import require

CONFIDENCE = 0.95  # what papers report
_LEAST_X = 3  # two points lie on every power law: they cannot speak against one
_HALVINGS = 60  # of the bracket of a quantile, after which it is as narrow as a double is exact
_LARGEST_LOG = 700.0  # exp of more than 709 is not a double

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]
Verdict = Literal["holds here", "does not hold here", "inconclusive at this scale"]


# --- estimates over seeds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its t interval; a single value has none."""

    mean: float
    interval: Interval | None
    n: int


@functools.cache
def t_quantile(p: float, df: int) -> float:
    """The quantile `p` of Student's t with `df` degrees of freedom."""
    if p < 1 / 2:
        return -t_quantile(1 - p, df)
    low, high = 0.0, math.pi / 2  # the angle whose tangent is t / √df: bounded where t is not
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, df) < 2 * p - 1 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def _t_within(angle: float, df: int) -> float:
    """The probability of |t| < √df · tan(angle).

    Abramowitz and Stegun 26.7.3 and 26.7.4, whose terms are all positive: nothing cancels.
    """
    odd = df % 2
    k = np.arange(1, (df - odd) // 2)
    factors = (2 * k - 1 + odd) / (2 * k + odd) * math.cos(angle) ** 2
    series = math.sin(angle) * (1 + float(np.cumprod(factors).sum()))
    if not odd:
        return series
    return 2 / math.pi * (angle + (series * math.cos(angle) if df > 1 else 0.0))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of values, one per seed, and its t interval."""
    require(len(values) > 0, "an estimate needs at least one value")
    require(all(map(math.isfinite, values)), "an estimate needs finite values")
    exact = [float(value) for value in values]
    mean, n = statistics.mean(exact), len(exact)  # rounded once: equal values have exactly their own mean
    if n < 2:
        return Estimate(mean, None, n)
    half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * statistics.stdev(exact) / math.sqrt(n)
    return Estimate(mean, (mean - half, mean + half), n)


def verdict(found: Estimate, low: float, high: float, *, least: int = 3) -> Verdict:
    """Whether an estimate agrees with the claim that its number lies between low and high.

    Only an interval that lies wholly inside or wholly outside decides. Under `least` values none does: two seeds that
    happen to agree have an interval of almost no width.
    """
    require(low <= high, f"a claim needs a range from low to high, not from {low} to {high}")
    if found.interval is None or found.n < least:
        return "inconclusive at this scale"
    start, end = found.interval
    if low < start and end < high:
        return "holds here"
    return "does not hold here" if end < low or start > high else "inconclusive at this scale"


# --- power laws ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PowerLaw:
    """y = scale · x ^ exponent, with the 95 % interval of the exponent. A steep one has a scale that only its log can hold."""

    log_scale: float
    exponent: float
    exponent_interval: Interval

    @property
    def scale(self) -> float:
        return self.at(1.0)

    def at(self, x: float) -> float:
        """The value of the curve at x; infinity where no double is as large."""
        height = self.log_scale + self.exponent * math.log(x)
        return math.exp(height) if height < _LARGEST_LOG else math.inf


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The power law nearest to the points in log space, where it is a straight line, with its t interval."""
    x_N, y_N = _columns(x, y, "x", "y")
    require(bool((x_N > 0).all() and (y_N > 0).all()), "a power law needs x and y above 0")
    distinct = len(np.unique(x_N))
    require(distinct >= _LEAST_X, f"a power law needs at least {_LEAST_X} different x, not {distinct}")
    n, log_x_N, log_y_N = len(y_N), np.log(x_N), np.log(y_N)
    middle, height = float(log_x_N.mean()), float(log_y_N.mean())
    if not np.ptp(y_N):  # level to the bit: what rounding leaves of its slope must not be taken for a measured one
        return PowerLaw(height, 0.0, (0.0, 0.0))
    across_N, up_N = log_x_N - middle, log_y_N - height
    spread = float(across_N @ across_N)
    exponent = float(across_N @ up_N) / spread
    left_N = up_N - exponent * across_N
    half = t_quantile((1 + CONFIDENCE) / 2, n - 2) * math.sqrt(float(left_N @ left_N) / (n - 2) / spread)
    # At log x = 0, the line's height is the log of the scale.
    return PowerLaw(height - exponent * middle, exponent, (exponent - half, exponent + half))


# --- cost and value -----------------------------------------------------------------------------------------------------


def pareto_front(cost: Sequence[float], value: Sequence[float]) -> list[int]:
    """The indices of the points that no other beats, by rising cost.

    A point beats another that costs no less and is worth no more, and differs. Equal points do not beat each other: all
    of them are listed, in their order.
    """
    cost_N, value_N = _columns(cost, value, "costs", "values")
    front: list[int] = []
    for i in np.lexsort((-value_N, cost_N)):  # the cheapest first; of equal cost the best; stable
        last = front[-1] if front else None
        if last is None or value_N[i] > value_N[last] or (cost_N[i], value_N[i]) == (cost_N[last], value_N[last]):
            front.append(int(i))
    return front


def cost_to_reach(cost: Sequence[float], value: Sequence[float], target: float) -> float | None:
    """What the target costs along the Pareto front; None where no point reaches it.

    Between two points of the front the log of the cost is linear in the value. A target below the front costs what its
    cheapest point does.
    """
    require(not math.isnan(target), "the target must be a number, not NaN")
    require(all(number > 0 for number in cost), "costs must be above 0: they are compared by their ratios")
    front = pareto_front(cost, value)
    for last, i in zip([None, *front], front, strict=False):
        if value[i] >= target:
            if last is None:
                return float(cost[i])
            share = (target - value[last]) / (value[i] - value[last])
            return math.exp((1 - share) * math.log(cost[last]) + share * math.log(cost[i]))
    return None


@dataclass(frozen=True)
class CostRatio:
    """How many times more one of two costs; a bound says that it is at least as far from one, on the same side."""

    ratio: float
    is_bound: bool = False


def cost_ratio(
    a: tuple[Sequence[float], Sequence[float]], b: tuple[Sequence[float], Sequence[float]]
) -> CostRatio | None:
    """How many times more `b` costs than `a` for the same value.

    Both are (costs, values). The geometric mean over all values that both fronts reach. Where one front lies wholly above
    the other, its cheapest point beside the other's best, if that costs less: a bound. None where nothing can be compared.
    """
    reached = [sorted({values[i] for i in pareto_front(costs, values)}) for costs, values in (a, b)]
    if not all(reached):
        return None
    low, high = max(values[0] for values in reached), min(values[-1] for values in reached)
    if low > high:
        bound = _log_ratio(a, b, high)
        towards = 1 if reached[0][0] > high else -1  # the better of the two is the cheaper one, too
        return CostRatio(math.exp(bound), is_bound=True) if bound * towards > 0 else None
    # Between the values of the points the log of the ratio is linear, so that the trapezoid rule is exact.
    levels = sorted({low, high, *(value for values in reached for value in values if low < value < high)})
    logs = [_log_ratio(a, b, level) for level in levels]
    if low == high:
        return CostRatio(math.exp(logs[0]))
    areas = ((x + y) / 2 * (end - start) for (x, y), (start, end) in zip(pairwise(logs), pairwise(levels), strict=True))
    return CostRatio(math.exp(math.fsum(areas) / (high - low)))


def _log_ratio(
    a: tuple[Sequence[float], Sequence[float]], b: tuple[Sequence[float], Sequence[float]], level: float
) -> float:
    cost_a, cost_b = cost_to_reach(*a, level), cost_to_reach(*b, level)
    assert cost_a is not None and cost_b is not None  # no level lies above either front
    return math.log(cost_b) - math.log(cost_a)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """How much y rises when x doubles: least squares of y on log2 x."""
    x_N, y_N = _columns(x, y, "x", "y")
    require(bool((x_N > 0).all()), "a slope per doubling needs x above 0")
    require(len(np.unique(x_N)) >= 2, "a slope needs at least 2 different x")
    across_N = np.log2(x_N) - np.log2(x_N).mean()
    return float(across_N @ (y_N - y_N.mean()) / (across_N @ across_N))


def _columns(first: Sequence[float], second: Sequence[float], a: str, b: str) -> tuple[Array, Array]:
    """Two sequences as arrays of finite numbers, one of each per point."""
    require(len(first) == len(second), f"{len(first)} {a} and {len(second)} {b} cannot be paired")
    first_N, second_N = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    require(bool(np.isfinite(first_N).all() and np.isfinite(second_N).all()), f"{a} and {b} must be finite numbers")
    return first_N, second_N
