"""Learning rates at their corners."""

import itertools

import pytest

from vitlab.training.schedule import Decay, learning_rate


def rates(decay: Decay, total: int = 100, warmup: int = 10) -> list[float]:
    return [
        learning_rate(step, base=2.0, total_steps=total, warmup_steps=warmup, decay=decay) for step in range(total + 1)
    ]


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_warm_up_rises_in_equal_parts_and_not_from_zero(decay: Decay) -> None:
    assert rates(decay)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])


@pytest.mark.parametrize(
    ("decay", "quarter", "half", "end"),
    [("cosine", 1.7071068, 1.0, 0.0), ("linear", 1.5, 1.0, 0.0), ("constant", 2.0, 2.0, 2.0)],
)
def test_decay_at_a_quarter_half_and_end(decay: Decay, quarter: float, half: float, end: float) -> None:
    without_warmup = rates(decay, warmup=0)
    assert [without_warmup[step] for step in (0, 25, 50, 100)] == pytest.approx([2.0, quarter, half, end], abs=1e-7)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_starts_where_the_warm_up_ends_and_only_falls(decay: Decay) -> None:
    after = rates(decay)[9:]
    assert after[0] == after[1] == 2.0
    assert all(earlier > later for earlier, later in itertools.pairwise(after[1:]))
    assert min(rates(decay)[:-1]) > 0, "no update is wasted"


def test_rate_stays_at_the_end_value_beyond_the_end() -> None:
    assert learning_rate(500, base=2.0, total_steps=100, warmup_steps=10, decay="cosine") == 0


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_shortest_run_has_a_positive_rate(warmup: int) -> None:
    assert learning_rate(0, base=2.0, total_steps=1, warmup_steps=warmup, decay="cosine") > 0
