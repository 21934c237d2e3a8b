"""An interval of a run is a number and a unit, and becomes whole steps."""

import pytest

from vitlab.core.duration import RunLength, interval_in_steps
from vitlab.core.errors import UsageError

RUN = RunLength(steps=500, epoch_examples=1000, batch_size=64)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7 steps", 7),
        ("1 step", 1),
        ("1_000 steps", 1000),
        ("1_0 steps", 10),
        (".5 epochs", 8),
        ("10 %", 50),
        ("10%", 50),
        ("0.5%", 2),
        ("100 %", 500),
        ("0.01 %", 1),
        ("1 epoch", 16),
        ("2.5 epochs", 39),
        ("0.001 epochs", 1),
        ("640 examples", 10),
        ("1 example", 1),
        ("0 steps", 0),
        ("0%", 0),
    ],
)
def test_interval_in_steps_of_a_run(text: str, steps: int) -> None:
    assert interval_in_steps("train.save_every", text, RUN) == steps


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "ten steps",
        "10 minutes",
        "-5 %",
        "1e3 steps",
        "5 % 5 %",
        "steps",
        "nan %",
        "_ steps",
        "1.2.3 %",
        "1__0 steps",
        "1_.5 epochs",
        "_5 %",
    ],
)
def test_what_is_not_an_interval_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"train\.save_every.*interval") as caught:
        interval_in_steps("train.save_every", text, RUN)
    assert "'500 steps'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("101 %", "more than the whole run"),
        ("2.5 steps", "steps are whole"),
        ("9" * 400 + " steps", r"must be below 1e\+12"),  # more than a float holds
        ("1_000_000_000_000 epochs", r"must be below 1e\+12"),
        (10**12, r"below 1e\+12"),
        (-1, "must not be negative"),
    ],
)
def test_impossible_interval_is_refused(text: str | int, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        interval_in_steps("train.save_every", text, RUN)
