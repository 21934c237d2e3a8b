"""Learning rates at their corners."""

import itertools
import math
import typing
from typing import Any

import pytest

from vitlab.core import config
from vitlab.core.duration import RunLength
from vitlab.core.errors import UsageError
from vitlab.training.schedule import Schedule, Shape, rate_at


def learning_rate(step: int, *, base: float, total_steps: int, warmup: int, decay: Shape) -> float:
    return rate_at(Schedule(decay=decay, warmup=warmup), step, base=base, total_steps=total_steps)


def rates(decay: Shape, total: int = 100, warmup: int = 10) -> list[float]:
    return [learning_rate(step, base=2.0, total_steps=total, warmup=warmup, decay=decay) for step in range(total + 1)]


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_warm_up_rises_in_equal_parts_and_not_from_zero(decay: Shape) -> None:
    assert rates(decay)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])


@pytest.mark.parametrize(
    ("decay", "quarter", "half", "end"),
    [("cosine", 1.7071068, 1.0, 0.0), ("linear", 1.5, 1.0, 0.0), ("constant", 2.0, 2.0, 2.0)],
)
def test_decay_at_a_quarter_half_and_end(decay: Shape, quarter: float, half: float, end: float) -> None:
    without_warmup = rates(decay, warmup=0)
    assert [without_warmup[step] for step in (0, 25, 50, 100)] == pytest.approx([2.0, quarter, half, end], abs=1e-7)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_starts_where_the_warm_up_ends_and_only_falls(decay: Shape) -> None:
    after = rates(decay)[9:]
    assert after[0] == after[1] == 2.0
    assert all(earlier > later for earlier, later in itertools.pairwise(after[1:]))
    assert min(rates(decay)[:-1]) > 0, "no update is wasted"


def test_rate_stays_at_the_end_value_beyond_the_end() -> None:
    assert learning_rate(500, base=2.0, total_steps=100, warmup=10, decay="cosine") == 0


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_shortest_run_has_a_positive_rate(warmup: int) -> None:
    assert learning_rate(0, base=2.0, total_steps=1, warmup=warmup, decay="cosine") > 0


# --- Schedule ---------------------------------------------------------------------------------------------------------

STAIRS = {"decay": "staircase", "milestones": (0.3, 0.6, 0.9)}


def course(total: int = 100, **fields: Any) -> list[float]:
    schedule = Schedule(**fields).settled(RunLength(steps=total, epoch_examples=total, batch_size=1))
    return [rate_at(schedule, step, base=2.0, total_steps=total) for step in range(total)]


@pytest.mark.parametrize("decay", typing.get_args(Shape))
@pytest.mark.parametrize("warmup", [0, 1, 10, 100], ids=lambda steps: f"warmup{steps}")
def test_corners_of_every_shape(decay: Shape, warmup: int) -> None:
    fields = STAIRS if decay == "staircase" else {"decay": decay}
    rates = course(warmup=warmup, **fields)
    rising = [2.0 * (step + 1) / warmup for step in range(warmup)]
    if decay == "staircase":
        rising = [rate * 0.1 ** sum(step >= s for s in (30, 60, 90)) for step, rate in enumerate(rising)]
    assert rates[:warmup] == pytest.approx(rising), "from one part of the peak, not from zero, to all of it"
    assert min(rates) > 0, "no update is wasted, neither the first nor the last"
    assert max(rates) <= 2.0
    after = rates[max(0, warmup - 1) :]
    assert after == sorted(after, reverse=True)
    if warmup == 0:
        assert rates[0] == 2.0


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_decay_approaches_its_end_value(decay: Shape) -> None:
    schedule = Schedule(decay=decay, end=0.25, warmup=10)
    assert rate_at(schedule, 55, base=2.0, total_steps=100) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert rate_at(schedule, 100, base=2.0, total_steps=100) == rate_at(schedule, 999, base=2.0, total_steps=100) == 0.5


def test_staircase_drops_at_shares_of_the_whole_run() -> None:
    rates = course(total=10, decay="staircase", milestones=(0.4, 0.6), factor=0.5)
    assert rates == [2.0] * 4 + [1.0] * 2 + [0.5] * 4


def test_rsqrt_knows_no_end_until_it_cools_down() -> None:
    free = Schedule(decay="rsqrt", warmup=10, timescale=30)
    assert [rate_at(free, step, base=2.0, total_steps=total) for step in (9, 10, 100) for total in (101, 9999)] == (
        [2.0] * 4 + [1.0] * 2
    ), "1/√(1 + 90/30) is a half"
    cooled = course(decay="rsqrt", warmup=10, timescale=30, cooldown=4)
    plain = course(decay="rsqrt", warmup=10, timescale=30)
    assert cooled[:97] == plain[:97]
    assert cooled[97:] == pytest.approx([rate * part for rate, part in zip(plain[97:], (0.75, 0.5, 0.25), strict=True)])


def test_warm_up_as_a_share_is_the_same_as_in_steps() -> None:
    assert course(warmup="10%") == course(warmup=10)


def test_cosine_is_the_formula_bit_for_bit() -> None:
    for step in range(100):
        rate = learning_rate(step, base=3e-4, total_steps=100, warmup=7, decay="cosine")
        progress = min(1.0, max(0.0, (step - 7) / 93))
        assert rate == 3e-4 * 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, (step + 1) / 7)


def test_schedule_survives_toml() -> None:
    schedule = Schedule(decay="staircase", milestones=(0.3, 0.6), warmup="10%", end=0.01)
    table = config.parse_toml(config.dump_toml(config.to_dict(schedule)), "here")
    assert config.from_dict(Schedule, table) == schedule


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"warmup": -1}, "warmup"),
        ({"warmup": "110 %"}, "more than the whole run"),
        ({"end": 2.0}, "end must lie"),
        ({"decay": "staircase"}, "needs milestones"),
        ({"milestones": (0.5,)}, "milestones are for"),
        ({"decay": "staircase", "milestones": (0.6, 0.3)}, "must rise"),
        ({"decay": "staircase", "milestones": (3000.0,)}, "shares of the run"),
        ({"factor": 0.0}, "factor"),
        ({"timescale": 0}, "timescale"),
        ({"cooldown": -1}, "cooldown"),
    ],
)
def test_impossible_schedules_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Schedule(**fields)
