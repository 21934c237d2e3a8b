"""The statistics of scaling studies: seeds, power laws, and the cost of quality.

NumPy alone, so that a table of results is read without torch.
Letters: N points, D distinct x, G groups, R resamples, K floors tried at a time.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vitlab.core.errors import require

CONFIDENCE = 0.95  # what papers report
LEVELS = 25  # values at which two fronts are compared: the mean ratio of smooth fronts no longer changes with more
_LEAST_X = 3  # two points lie on every power law: they cannot speak against one
_PARAMETERS = 3  # of a power law with a floor: scale, exponent and floor
_HALVINGS = 60  # of the bracket of a quantile, after which it is as narrow as a double is exact
_FLOORS = 11  # floors tried at a time: fine enough that the best one's neighbours enclose the minimum
_ZOOMS = 5  # each leaves a fifth of the range of floors: at last, steps of a 10,000th of the mean of y
_STEPS = 8  # damped Gauss-Newton steps per floor, which start close: more change nothing that a double shows
_SMALLEST_EXCESS = 0.05  # share of y that is taken to lie above a floor, where a start needs the logarithm of the rest
_DAMPING = 1e-2  # of the first step: where y falls to its floor at once, free steps go off to any exponent
_DAMPING_DECAY = 0.1  # per step; the last ones are free, and exact
_RIDGE = 1e-12  # keeps a system solvable whose points all lie on the floor, and is too small to move any other
_LARGEST_LOG = 700.0  # exp of more than 709 is not a double

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]
Verdict = Literal["holds here", "does not hold here", "cannot be told at this scale"]


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
    require(0 < p < 1, f"a quantile needs a probability between 0 and 1, not {p}")
    require(df >= 1, f"Student's t needs at least 1 degree of freedom, not {df}")
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


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The mean of values, one per seed, and its t interval."""
    require(len(values) > 0, "an estimate needs at least one value")
    require(all(map(math.isfinite, values)), "an estimate needs finite values")
    require(0 < confidence < 1, f"a confidence lies between 0 and 1, not at {confidence}")
    exact = [float(value) for value in values]
    mean, n = statistics.mean(exact), len(exact)  # rounded once: equal values have exactly their own mean
    if n < 2:
        return Estimate(mean, None, n)
    half = t_quantile((1 + confidence) / 2, n - 1) * statistics.stdev(exact) / math.sqrt(n)
    return Estimate(mean, (mean - half, mean + half), n)


def verdict(found: Estimate, low: float, high: float, *, least: int = 3) -> Verdict:
    """Whether an estimate agrees with the claim that its number lies between low and high.

    Only an interval that lies wholly inside or wholly outside decides. Under `least` values none does: two seeds that
    happen to agree have an interval of almost no width.
    """
    require(low <= high, f"a claim needs a range from low to high, not from {low} to {high}")
    if found.interval is None or found.n < least:
        return "cannot be told at this scale"
    start, end = found.interval
    if low < start and end < high:
        return "holds here"
    return "does not hold here" if end < low or start > high else "cannot be told at this scale"


# --- power laws ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PowerLaw:
    """y = floor + scale · x ^ exponent, with 95 % intervals.

    `residual` is the rms of log y minus the log of the curve.
    """

    scale: float
    exponent: float
    floor: float
    exponent_interval: Interval
    scale_interval: Interval
    residual: float
    n: int

    def at(self, x: float) -> float:
        """The value of the curve at x."""
        return self.floor + self.scale * x**self.exponent


@dataclass(frozen=True)
class _Lines:
    """Curves floor + exp(height + exponent · log x), and their squared log errors.

    Arrays of one shape, with a curve per element.
    """

    floor: Array
    height: Array
    exponent: Array
    error: Array

    def at(self, log_x_D: Array) -> Array:
        return np.log(self.floor[..., None] + _excess(self.height, self.exponent, log_x_D))


def fit_power_law(
    x: Sequence[float],
    y: Sequence[float],
    *,
    floor: float | None = 0.0,
    groups: Sequence[int] | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> PowerLaw:
    """The power law nearest to the points in log space, with intervals.

    With a given `floor` (an irreducible error), log(y - floor) is a straight line in log x, and the intervals are t
    intervals. With `floor=None` a floor of at least 0 is fitted too, and the intervals come from a bootstrap: of residuals,
    or of whole `groups`. Points of a group (a seed, say) may err alike; then groups, not points, count as independent.
    """
    log_x_N, y_N, group_N = _checked(x, y, floor, groups)
    if floor is not None:
        return _straight(log_x_N, y_N, floor, group_N)
    require(resamples >= 1, f"a bootstrap interval needs at least one resample, not {resamples}")
    return _with_floor(log_x_N, np.log(y_N), group_N, resamples, np.random.default_rng(seed))


def _checked(
    x: Sequence[float], y: Sequence[float], floor: float | None, groups: Sequence[int] | None
) -> tuple[Array, Array, Array | None]:
    x_N, y_N = _columns(x, y, "x", "y")
    require(bool((x_N > 0).all() and (y_N > 0).all()), "a power law needs x and y above 0")
    distinct = len(np.unique(x_N))
    require(distinct >= _LEAST_X, f"a power law needs at least {_LEAST_X} different x, not {distinct}")
    if floor is None:
        require(len(x_N) > _LEAST_X, f"a power law with a fitted floor needs more than {_LEAST_X} points")
    else:
        require(0 <= floor < math.inf, f"the floor of a power law is a finite number of at least 0, not {floor}")
        require(bool((y_N > floor).all()), f"a power law needs every y above its floor, {floor}")
    if groups is None:
        return np.log(x_N), y_N, None
    require(len(groups) == len(x_N), f"{len(groups)} groups do not fit {len(x_N)} points")
    group_N = np.unique(np.asarray(groups), return_inverse=True)[1]
    require(
        bool(group_N.any()), "intervals over groups need at least 2 groups; leave groups out for independent points"
    )
    return np.log(x_N), y_N, group_N


def _straight(log_x_N: Array, y_N: Array, floor: float, group_N: Array | None) -> PowerLaw:
    n, middle = len(y_N), float(log_x_N.mean())
    design_N2 = np.stack([np.ones(n), log_x_N - middle], axis=1)
    inverse_22 = np.diag(1 / (design_N2**2).sum(axis=0))  # the columns are orthogonal
    target_N = np.log(y_N - floor)
    line_2 = inverse_22 @ design_N2.T @ target_N
    left_N = target_N - design_N2 @ line_2
    if group_N is None:
        df = n - 2
        spread_22 = inverse_22 * (left_N @ left_N) / df
    else:  # cluster-robust: errors may agree within a group, and are independent between groups (Liang and Zeger 1986)
        df = int(group_N.max())
        score_G2 = _sums_by(group_N, design_N2 * left_N[:, None])
        spread_22 = inverse_22 @ score_G2.T @ score_G2 @ inverse_22 * (df + 1) / df
    t = t_quantile((1 + CONFIDENCE) / 2, df)
    origin_2 = np.array([1.0, -middle])  # log x = 0, where the line's height is the log of the scale
    log_scale, half_scale = float(origin_2 @ line_2), t * _root(origin_2 @ spread_22 @ origin_2)
    exponent, half_exponent = float(line_2[1]), t * _root(spread_22[1, 1])
    # Of log y, not log(y - floor): so that fits with different floors can be compared.
    ratio_N = np.log(y_N) - np.log(floor + np.exp(design_N2 @ line_2))
    return PowerLaw(
        scale=_exp(log_scale),
        exponent=exponent,
        floor=float(floor),
        exponent_interval=(exponent - half_exponent, exponent + half_exponent),
        scale_interval=(_exp(log_scale - half_scale), _exp(log_scale + half_scale)),
        residual=_root(np.mean(ratio_N**2)),
        n=n,
    )


def _with_floor(
    log_x_N: Array, log_y_N: Array, group_N: Array | None, resamples: int, draw: np.random.Generator
) -> PowerLaw:
    log_x_D, place_N = np.unique(log_x_N, return_inverse=True)
    # Points at the same x enter the squared error by their mean and number alone, which makes every fit small.
    count_D = np.bincount(place_N)
    best = _search_floor(log_x_D, (np.bincount(place_N, log_y_N) / count_D)[None], count_D[None])
    left_N = log_y_N - best.at(log_x_D)[0, place_N]
    if group_N is None:
        mean_RD = best.at(log_x_D) + _drawn_residuals(left_N, place_N, resamples, draw)
        weight_RD = np.broadcast_to(count_D, mean_RD.shape)
        widening = _widening(len(log_y_N) - _PARAMETERS)
    else:
        mean_RD, weight_RD = _drawn_groups(log_y_N, place_N, group_N, resamples, draw)
        groups = int(group_N.max()) + 1
        widening = _widening(groups - 1) * math.sqrt(groups / (groups - 1))
    drawn = _search_floor(log_x_D, mean_RD, weight_RD)
    log_scale, exponent = float(best.height[0]), float(best.exponent[0])
    low, high = _widened(drawn.height, log_scale, widening)
    law = PowerLaw(
        scale=_exp(log_scale),
        exponent=exponent,
        floor=float(best.floor[0]),
        exponent_interval=_widened(drawn.exponent, exponent, widening),
        scale_interval=(_exp(low), _exp(high)),
        residual=_root(np.mean(left_N**2)),
        n=len(log_y_N),
    )
    if np.mean(drawn.floor == 0) <= (1 - CONFIDENCE) / 2:
        return law
    # The floor is not distinguishable from 0, beyond which no resample goes: alone, they cover a true floor of 0 too rarely.
    without = _straight(log_x_N, np.exp(log_y_N), 0.0, group_N)
    return dataclasses.replace(
        law,
        exponent_interval=_enclosing(law.exponent_interval, without.exponent_interval),
        scale_interval=_enclosing(law.scale_interval, without.scale_interval),
    )


def _drawn_residuals(left_N: Array, place_N: Array, resamples: int, draw: np.random.Generator) -> Array:
    """Mean residuals per x, drawn with replacement."""
    n = len(left_N)
    # Wider by what the fit took from them.
    wider_N = (left_N - left_N.mean()) * math.sqrt(n / (n - _PARAMETERS))
    one_hot_ND = np.eye(int(place_N.max()) + 1)[place_N]
    return wider_N[draw.integers(0, n, (resamples, n))] @ (one_hot_ND / one_hot_ND.sum(axis=0))


def _drawn_groups(
    log_y_N: Array, place_N: Array, group_N: Array, resamples: int, draw: np.random.Generator
) -> tuple[Array, Array]:
    """Mean log y and number of points per x, of groups drawn with replacement."""
    one_hot_ND = np.eye(int(place_N.max()) + 1)[place_N]
    count_GD, sum_GD = _sums_by(group_N, one_hot_ND), _sums_by(group_N, one_hot_ND * log_y_N[:, None])
    groups = len(count_GD)
    times_RG = draw.multinomial(groups, np.full(groups, 1 / groups), resamples)
    weight_RD = times_RG @ count_GD
    usable_R = (weight_RD > 0).sum(axis=1) >= _LEAST_X
    require(bool(usable_R.any()), f"no resample of the groups has {_LEAST_X} different x; give larger groups, or none")
    weight_RD = weight_RD[usable_R]
    return (times_RG[usable_R] @ sum_GD) / np.maximum(weight_RD, 1), weight_RD


def _widening(df: int) -> float:
    """How much wider a t interval is than a normal one.

    The percentiles of a bootstrap resemble the normal one, too narrow for few points or groups (Hesterberg 2015).
    """
    p = (1 + CONFIDENCE) / 2
    return t_quantile(p, df) / statistics.NormalDist().inv_cdf(p)


def _widened(values_R: Array, centre: float, widening: float) -> Interval:
    low, high = (float(end) for end in np.quantile(values_R, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)))
    # A skewed bootstrap may lie beside the estimate, which belongs to its interval all the same.
    return min(centre, centre + widening * (low - centre)), max(centre, centre + widening * (high - centre))


def _enclosing(a: Interval, b: Interval) -> Interval:
    return min(a[0], b[0]), max(a[1], b[1])


def _search_floor(log_x_D: Array, mean_RD: Array, weight_RD: Array) -> _Lines:
    """The best curve for every row of mean log y, its floor included.

    The floor lies between 0 and the geometric mean of y: it may be above some points, which err in both directions, but
    not above the average one.
    """
    top_R = np.exp((mean_RD * weight_RD).sum(axis=1) / weight_RD.sum(axis=1))
    # Squares lie close to each other near 0: y may span decades, and the floor is about the smallest at most.
    lines = _fit_above(top_R[:, None] * np.linspace(0, 1, _FLOORS) ** 2, log_x_D, mean_RD, weight_RD)
    rows = np.arange(len(mean_RD))
    for _ in range(_ZOOMS):
        best_R = lines.error.argmin(axis=1)
        low_R = lines.floor[rows, np.maximum(best_R - 1, 0)]
        high_R = lines.floor[rows, np.minimum(best_R + 1, _FLOORS - 1)]
        lines = _fit_above(np.linspace(low_R, high_R, _FLOORS, axis=1), log_x_D, mean_RD, weight_RD)
    best_R = lines.error.argmin(axis=1)
    return _Lines(*(part[rows, best_R] for part in (lines.floor, lines.height, lines.exponent, lines.error)))


def _fit_above(floor_RK: Array, log_x_D: Array, mean_RD: Array, weight_RD: Array) -> _Lines:
    """The best height and exponent for every given floor, by damped Gauss-Newton."""
    middle = float(log_x_D.mean())
    power_D3 = (log_x_D - middle)[:, None] ** np.arange(3)  # 1, log x and its square: what the sums below need
    floor_RK1, mean_R1D, weight_R1D = floor_RK[..., None], mean_RD[:, None], weight_RD[:, None]
    y_R1D = np.exp(mean_R1D)
    start_RKD = np.log(np.maximum(y_R1D - floor_RK1, _SMALLEST_EXCESS * y_R1D))
    height_RK, exponent_RK = _solve((weight_R1D * start_RKD) @ power_D3[:, :2], weight_R1D @ power_D3)
    for step in range(_STEPS):
        excess_RKD = _excess(height_RK, exponent_RK, power_D3[:, 1])
        left_RKD = mean_R1D - np.log(floor_RK1 + excess_RKD)
        # What a rise of the line adds to the log of the curve: nothing where the floor is all of it.
        share_RKD = excess_RKD / (floor_RK1 + excess_RKD)
        up_RK, turn_RK = _solve(
            (weight_R1D * share_RKD * left_RKD) @ power_D3[:, :2],
            (weight_R1D * share_RKD**2) @ power_D3,
            _DAMPING * _DAMPING_DECAY**step,
        )
        height_RK, exponent_RK = height_RK + up_RK, exponent_RK + turn_RK
    left_RKD = mean_R1D - np.log(floor_RK1 + _excess(height_RK, exponent_RK, power_D3[:, 1]))
    # Steps that led astray, as from a floor far above the points, leave a large error: another floor is better.
    error_RK = (weight_R1D * left_RKD**2).sum(axis=-1)
    return _Lines(floor_RK, height_RK - exponent_RK * middle, exponent_RK, error_RK)


def _solve(right: Array, sums: Array, damping: float = 0.0) -> tuple[Array, Array]:
    """Solve [[s0, s1], [s1, s2]] · (height, exponent) = right along the last axis.

    The damping raises the diagonal, which shortens the solution.
    """
    s0, s1, s2 = sums[..., 0] * (1 + damping) + _RIDGE, sums[..., 1], sums[..., 2] * (1 + damping) + _RIDGE
    first, second = right[..., 0], right[..., 1]
    determinant = s0 * s2 - s1**2
    return (s2 * first - s1 * second) / determinant, (s0 * second - s1 * first) / determinant


def _excess(height: Array, exponent: Array, log_x_D: Array) -> Array:
    return np.exp(np.clip(height[..., None] + exponent[..., None] * log_x_D, -_LARGEST_LOG, _LARGEST_LOG))


def _sums_by(group_N: Array, rows_NM: Array) -> Array:
    """The sum of the rows of each group."""
    return np.eye(int(group_N.max()) + 1)[:, group_N] @ rows_NM


def _root(square: Any) -> float:
    return math.sqrt(max(0.0, float(square)))  # rounding may leave a variance of 0 just below it


def _exp(value: float) -> float:
    return math.exp(value) if value < _LARGEST_LOG else math.inf


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


def cost_ratio(a: tuple[Sequence[float], Sequence[float]], b: tuple[Sequence[float], Sequence[float]]) -> float | None:
    """How many times more `b` costs than `a` for the same value.

    Both are (costs, values). The geometric mean over evenly spaced values that both fronts reach; None where there is no
    such value.
    """
    reached = [[values[i] for i in pareto_front(costs, values)] for costs, values in (a, b)]
    if not all(reached):
        return None
    low, high = max(min(values) for values in reached), min(max(values) for values in reached)
    if low > high:
        return None
    logs: list[float] = []
    for level in np.linspace(low, high, LEVELS):
        cost_a, cost_b = cost_to_reach(*a, level), cost_to_reach(*b, level)
        assert cost_a is not None and cost_b is not None  # no level lies above either front
        logs.append(math.log(cost_b) - math.log(cost_a))
    return math.exp(statistics.fmean(logs))


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
