"""The statistics of scaling studies, against SciPy, curves that are known, and cases by hand."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from vitlab.core.errors import UsageError
from vitlab.evaluation.fits import (
    Estimate,
    cost_ratio,
    cost_to_reach,
    estimate,
    fit_power_law,
    pareto_front,
    slope,
    t_quantile,
    verdict,
)

SIZES = 4.0 ** np.arange(6)
SEEDS = 3


def noisy(trial: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y of the power law 2 · x ^ -0.5, with noise."""
    x = np.repeat(SIZES, SEEDS)
    return x, 2.0 * x**-0.5 * np.exp(0.05 * np.random.default_rng(trial).normal(size=len(x)))


# --- estimates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 8, 29, 100, 999, 1000])
def test_t_quantile_is_scipys(df: int) -> None:
    for p in (0.5, 0.500001, 0.6, 0.9, 0.975, 0.995, 0.9999):
        assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), abs=1e-6)
        assert t_quantile(1 - p, df) == pytest.approx(stats.t.ppf(1 - p, df), abs=1e-6)


def test_estimate_is_scipys_t_interval() -> None:
    values = [0.71, 0.74, 0.69, 0.75]
    found = estimate(values)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.mean, found.n) == (pytest.approx(np.mean(values)), 4)
    assert found.interval == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_single_value_has_no_interval() -> None:
    assert estimate([0.5]) == Estimate(0.5, None, 1)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_estimate_refuses_what_has_no_mean(values: list[float]) -> None:
    with pytest.raises(UsageError, match="an estimate needs"):
        estimate(values)


HOLDS, FAILS, OPEN = "holds here", "does not hold here", "inconclusive at this scale"


@pytest.mark.parametrize(
    ("interval", "n", "expected"),
    [
        ((1.2, 1.8), 3, HOLDS),
        ((1.0, 2.0), 3, OPEN),  # no difference at all is neither above nor below none
        ((0.1, 0.9), 3, FAILS),
        ((2.1, 2.9), 3, FAILS),
        ((0.5, 1.0), 3, OPEN),  # touches the claim
        ((2.0, 2.5), 3, OPEN),
        ((0.5, 1.5), 3, OPEN),
        ((1.5, 2.5), 3, OPEN),
        ((0.5, 2.5), 3, OPEN),  # holds the whole claim
        ((1.5, 1.5), 3, HOLDS),  # no width
        ((2.0, 2.0), 3, OPEN),
        ((0.5, 0.5), 3, FAILS),
        ((1.2, 1.8), 2, OPEN),
        ((0.1, 0.9), 2, OPEN),
        (None, 1, OPEN),
    ],
)
def test_verdict(interval: tuple[float, float] | None, n: int, expected: str) -> None:
    assert verdict(Estimate(1.5, interval, n), 1.0, 2.0) == expected


def test_verdict_of_one_sided_claims_and_other_numbers_of_seeds() -> None:
    found = Estimate(1.5, (1.2, 1.8), 4)
    assert verdict(found, 0.0, math.inf) == HOLDS
    assert verdict(found, -math.inf, 0.0) == FAILS
    assert verdict(found, 0.0, math.inf, least=5) == OPEN
    assert verdict(Estimate(1.5, None, 1), 0.0, math.inf, least=1) == OPEN
    with pytest.raises(UsageError, match="low to high"):
        verdict(found, 2.0, 1.0)


def test_equal_values_have_no_width_and_lie_on_the_end_of_a_claim() -> None:
    found = estimate([0.1, 0.1, 0.1])  # whose plain sum over 3 is above 0.1
    assert found == Estimate(0.1, (0.1, 0.1), 3)
    assert verdict(found, 0.0, 0.1) == OPEN and verdict(found, 0.0, 0.2) == HOLDS


# --- power laws ---------------------------------------------------------------------------------------------------------


def test_line_in_log_space_is_scipys() -> None:
    x, y = noisy(1)
    law = fit_power_law(x, y)
    line = stats.linregress(np.log(x), np.log(y))
    t = stats.t.ppf(0.975, len(x) - 2)
    assert law.exponent == pytest.approx(line.slope)
    assert law.scale == pytest.approx(math.exp(line.intercept))
    ends = line.slope - t * line.stderr, line.slope + t * line.stderr
    assert law.exponent_interval == pytest.approx(ends, abs=1e-9)
    assert law.at(10.0) == pytest.approx(law.scale * 10.0**law.exponent)


def test_exact_curves_are_found_in_either_direction() -> None:
    for exponent in (-0.4, 0.3):
        law = fit_power_law(SIZES, 3 * SIZES**exponent)
        assert (law.scale, law.exponent) == (pytest.approx(3), pytest.approx(exponent))
        assert law.exponent_interval == pytest.approx((exponent, exponent), abs=1e-6)


@pytest.mark.parametrize("level", [0.63, 0.9, 1e-9])
def test_level_points_have_no_exponent_that_rounding_made(level: float) -> None:
    law = fit_power_law(np.arange(1, 7) ** 2.0, [level] * 6)
    assert law.exponent == 0 and law.exponent_interval == (0, 0) and law.at(3.0) == pytest.approx(level)


def test_steep_curve_has_values_though_its_scale_is_no_number() -> None:
    x = [1.00e15, 1.01e15, 1.02e15]
    law = fit_power_law(x, [0.1, 0.2, 0.4])
    assert law.scale == 0 and law.at(x[1]) == pytest.approx(0.2, rel=0.01) and law.at(1e30) == math.inf


def test_line_covers_the_truth_in_95_percent_of_trials() -> None:
    laws = [fit_power_law(*noisy(trial)) for trial in range(1000)]
    # Of 1,000 trials at 95 %, 927 to 972 cover in all but a thousandth of cases.
    assert 927 <= sum(law.exponent_interval[0] <= -0.5 <= law.exponent_interval[1] for law in laws) <= 972


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1, 2], "at least 3 different x, not 2"),
        ([1, 1, 2, 2], [1, 2, 3, 4], "at least 3 different x, not 2"),
        ([], [], "at least 3 different x, not 0"),
        ([1, 2, 0], [1, 2, 3], "above 0"),
        ([1, 2, 3], [1, -2, 3], "above 0"),
        ([1, 2, 3], [1, math.nan, 3], "finite"),
        ([1, 2, math.inf], [1, 2, 3], "finite"),
        ([1, 2, 3], [1, 2], "3 x and 2 y"),
    ],
)
def test_unusable_points_are_refused_in_a_sentence(x: list, y: list, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        fit_power_law(x, y)
    assert "\n" not in str(caught.value)


# --- cost and value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "value", "front"),
    [
        ([], [], []),
        ([1], [5], [0]),
        ([4, 1, 2, 3], [9, 5, 7, 6], [1, 2, 0]),  # 3 costs more than 2 and is worth less
        ([1, 1, 2], [5, 6, 6], [1]),  # equal cost, then equal value: the other is beaten
        ([2, 1, 1], [7, 5, 5], [1, 2, 0]),  # twins do not beat each other
        ([1, 2, 1, 2], [5, 5, 5, 5], [0, 2]),
        ([3, 2, 1], [1, 2, 3], [2]),
    ],
)
def test_pareto_front_by_hand(cost: list[float], value: list[float], front: list[int]) -> None:
    assert pareto_front(cost, value) == front


def test_pareto_front_is_what_its_definition_says() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        cost, value = draw.integers(1, 6, (2, 12)).tolist()
        points = list(zip(cost, value, strict=True))
        unbeaten = [
            i for i, (c, v) in enumerate(points) if not any(a <= c and b >= v and (a, b) != (c, v) for a, b in points)
        ]
        assert pareto_front(cost, value) == sorted(unbeaten, key=lambda i: (cost[i], i))


def test_cost_to_reach_by_hand() -> None:
    cost, value = [100.0, 1.0, 50.0, 10.0, 10.0], [0.9, 0.5, 0.6, 0.7, 0.7]
    assert cost_to_reach(cost, value, 0.3) == 1
    assert cost_to_reach(cost, value, 0.5) == 1
    assert cost_to_reach(cost, value, 0.6) == pytest.approx(10**0.5)  # half of the way from 1 to 10 in log cost
    assert cost_to_reach(cost, value, 0.7) == pytest.approx(10)
    assert cost_to_reach(cost, value, 0.85) == pytest.approx(10**1.75)
    assert cost_to_reach(cost, value, 0.9) == pytest.approx(100)
    assert cost_to_reach(cost, value, 0.91) is None
    assert cost_to_reach([], [], 0.5) is None


Costs = tuple[list[float], list[float]]


def ratio_of(a: Costs, b: Costs, *, bound: bool = False) -> float:
    found = cost_ratio(a, b)
    assert found is not None and found.is_bound == bound
    return found.ratio


def test_cost_ratio_of_two_exact_curves_is_their_factor() -> None:
    value = [0.5, 0.6, 0.65, 0.8]
    cost = [1.0, 3.0, 10.0, 90.0]
    assert ratio_of((cost, value), ([4 * c for c in cost], value)) == pytest.approx(4)
    assert ratio_of(([4 * c for c in cost], value), (cost, value)) == pytest.approx(1 / 4)
    # Points at other costs along one line, and beaten ones: only what both reach is compared.
    line_a = [2.0, 8.0, 64.0, 64.0], [1.0, 3.0, 6.0, 2.0]
    line_b = [16.0, 512.0, 3 * 2.0**11], [2.0, 7.0, 0.0]  # log2 of the cost is the value + 2, not the value
    assert ratio_of(line_a, line_b) == pytest.approx(4)


def test_cost_ratio_is_a_geometric_mean_over_all_values() -> None:
    a, b = ([1.0, 1.0001], [0.0, 1.0]), ([1.0, 16.0], [0.0, 1.0])  # from 1 to 16 times the cost
    assert ratio_of(a, b) == pytest.approx(4, rel=1e-3)
    a, b = ([1.0, 2.0, 8.0, 9.0], [0.0, 0.1, 0.7, 1.2]), ([1.0, 3.0, 100.0], [-0.2, 0.31, 0.9])
    levels = np.linspace(0.0, 0.9, 100_001)
    ratios = [math.log(cost_to_reach(*b, at) or 0) - math.log(cost_to_reach(*a, at) or 0) for at in levels[::50]]
    assert ratio_of(a, b) == pytest.approx(math.exp(np.trapezoid(ratios, levels[::50]) / 0.9), rel=1e-6)


def test_cost_ratio_of_fronts_that_share_one_value_or_none() -> None:
    low, high = ([1.0, 2.0], [0.1, 0.2]), ([8.0, 9.0], [0.2, 0.4])
    assert ratio_of(low, high) == pytest.approx(4)
    assert cost_ratio(low, ([8.0, 9.0], [0.3, 0.4])) is None, "more for more"
    assert ratio_of(low, ([0.5, 9.0], [0.3, 0.4]), bound=True) == pytest.approx(1 / 4)
    assert ratio_of(([0.5, 9.0], [0.3, 0.4]), low, bound=True) == pytest.approx(4)
    assert cost_ratio(low, ([], [])) is None


def test_costs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(UsageError, match="above 0"):
        cost_to_reach([0.0, 1.0], [1.0, 2.0], 1.5)
    with pytest.raises(UsageError, match="NaN"):
        cost_to_reach([1.0, 2.0], [1.0, 2.0], math.nan)
    with pytest.raises(UsageError, match="finite"):
        pareto_front([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(UsageError, match="2 costs and 1 values"):
        pareto_front([1.0, 2.0], [1.0])


def test_slope_is_per_doubling() -> None:
    assert slope([1, 2, 4, 16], [5, 8, 11, 17]) == pytest.approx(3)
    x, y = [1.0, 3.0, 10.0, 40.0], [0.2, 0.9, 0.4, 0.8]
    assert slope(x, y) == pytest.approx(stats.linregress(np.log2(x), y).slope)
    with pytest.raises(UsageError, match="2 different x"):
        slope([2, 2], [1, 2])
    with pytest.raises(UsageError, match="above 0"):
        slope([0, 2], [1, 2])


def test_reading_results_needs_no_torch() -> None:
    code = "import sys, vitlab.evaluation.fits; sys.exit(bool({'torch', 'scipy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
