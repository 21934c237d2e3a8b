"""How far a number can be trusted: bootstrap intervals of one model, and the comparison of two on the same images.

Letters: B images, R resamples.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vitlab.core.errors import UsageError

RESAMPLES = 1000  # the ends of a 95 % interval are then the 25th values from each side
_AT_ONCE = 2**22  # drawn numbers held in memory
_TAILS = (0.025, 0.975)

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]


def bootstrap(
    statistics: Mapping[str, Callable[[Array], float]], images: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """The 95 % percentile interval of each statistic of chosen images, drawn with replacement as often as there are images.

    A statistic gets the numbers of the drawn images. Where it is not defined for a draw (NaN), the draw does not count.
    """
    if images < 1 or resamples < 1:
        raise UsageError("a bootstrap interval needs images, and at least one resample")
    draw = np.random.default_rng(seed)
    values: dict[str, list[float]] = {name: [] for name in statistics}
    step = max(1, _AT_ONCE // images)
    for start in range(0, resamples, step):
        for index_B in draw.integers(0, images, (min(step, resamples - start), images)):
            for name, statistic in statistics.items():
                values[name].append(statistic(index_B))
    return {name: _between(np.array(found)) for name, found in values.items()}


def require_resamples(resamples: int) -> None:
    """Raise an error for a number of draws that gives no interval, before any work."""
    if resamples < 1:
        raise UsageError(f"--resamples must be at least 1, not {resamples}")


def mean_of(values_B: Tensor) -> Callable[[Array], float]:
    """The statistic that is a mean over images: of right answers, losses, or differences of two models."""
    flat = values_B.double().numpy()
    return lambda index_B: float(flat[index_B].mean())


def _between(values_R: Array) -> Interval:
    if not np.isfinite(values_R).any():
        return math.nan, math.nan
    low, high = np.nanquantile(values_R, _TAILS)
    return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class McNemar:
    """Two classifiers on the same images: how many only the first, and only the second, gets right, and what chance makes
    of that. `exact` is the two-sided binomial test; `mid` its mid-p form, which is less cautious (Fagerland et al. 2013)."""

    only_first: int
    only_second: int
    exact: float
    mid: float


def mcnemar(first_right_B: Tensor, second_right_B: Tensor) -> McNemar:
    if first_right_B.shape != second_right_B.shape:
        raise UsageError("two models can be compared only on the same images")
    first = int((first_right_B & ~second_right_B).sum())
    second = int((second_right_B & ~first_right_B).sum())
    total, fewer = first + second, min(first, second)
    if not total:
        return McNemar(0, 0, 1.0, 1.0)
    # Whole numbers as long as possible: 2^-total alone is not a double where models differ in two thousand images.
    ways = tail = 1  # to choose 0 of `total`
    for i in range(fewer):
        ways = ways * (total - i) // (i + 1)
        tail += ways
    exact, point = min(1.0, 2 * tail / 2**total), ways / 2**total
    return McNemar(first, second, exact, 1 - point / 2 if first == second else exact - point)
