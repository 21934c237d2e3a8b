"""Intervals and tests against SciPy."""

import numpy as np
import pytest
import torch
from scipy import stats

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.evaluation.intervals import bootstrap, mcnemar, mean_of


@pytest.mark.parametrize("images", [1, 2, 37, 250])
@pytest.mark.parametrize("seed", [0, 7])
def test_bootstrap_has_the_ends_that_scipy_has_for_the_same_draws(images: int, seed: int) -> None:
    right = torch.rand(images, generator=generator(seed)) < 0.8
    ours = bootstrap({"top1": mean_of(right)}, images, resamples=400, seed=seed)["top1"]
    if images == 1:
        assert ours == (float(right[0]), float(right[0]))
        return
    theirs = stats.bootstrap(
        (right.double().numpy(),), np.mean, n_resamples=400, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_paired_difference_has_the_ends_that_scipy_has() -> None:
    a, b = (torch.rand(120, generator=generator(i)) < p for i, p in ((1, 0.7), (2, 0.8)))

    def difference(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return (y - x).mean(axis=axis)

    theirs = stats.bootstrap(
        (a.double().numpy(), b.double().numpy()),
        difference,
        paired=True,
        n_resamples=500,
        method="percentile",
        rng=np.random.default_rng(3),
    ).confidence_interval
    ours = bootstrap({"d": mean_of(b.double() - a.double())}, 120, resamples=500, seed=3)["d"]
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_many_images_are_drawn_in_pieces_and_as_if_at_once() -> None:
    """More numbers than are held at a time."""
    values = torch.rand(300_000, generator=generator(0)).double()
    ours = bootstrap({"mean": mean_of(values)}, 300_000, resamples=30, seed=1)["mean"]
    draw = np.random.default_rng(1)
    means = [values.numpy()[draw.integers(0, 300_000, 300_000)].mean() for _ in range(30)]
    assert ours == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=1e-12)


def test_draw_without_a_value_does_not_count_and_none_at_all_is_nan() -> None:
    half = bootstrap({"x": lambda index: float("nan") if index[0] < 5 else 1.0}, 10, resamples=50)["x"]
    assert half == (1.0, 1.0)
    assert all(np.isnan(bootstrap({"x": lambda _: float("nan")}, 10, resamples=5)["x"]))


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(UsageError, match="needs images"):
        bootstrap({}, 0)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 1), (1, 0), (3, 9), (12, 12), (0, 40), (700, 812), (2500, 2400)])
def test_mcnemar_is_the_binomial_test_of_the_images_that_differ(only_a: int, only_b: int) -> None:
    a = torch.tensor([True] * only_a + [False] * only_b + [True, False, True])
    b = torch.tensor([False] * only_a + [True] * only_b + [True, False, True])
    found = mcnemar(a, b)
    assert (found.only_first, found.only_second) == (only_a, only_b)
    assert found.exact == pytest.approx(stats.binomtest(only_a, only_a + only_b).pvalue, rel=1e-9)
    point = stats.binom.pmf(min(only_a, only_b), only_a + only_b, 0.5)
    expected = 1 - point / 2 if only_a == only_b else found.exact - point
    assert found.mid == pytest.approx(expected, rel=1e-9)


def test_models_that_agree_everywhere_cannot_be_distinguished() -> None:
    right = torch.tensor([True, False, True])
    assert (mcnemar(right, right).exact, mcnemar(right, right).mid) == (1, 1)


def test_runs_on_other_images_are_not_compared() -> None:
    with pytest.raises(UsageError, match="same images"):
        mcnemar(torch.ones(3).bool(), torch.ones(4).bool())
