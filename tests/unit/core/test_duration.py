"""A training length in any unit becomes whole steps that leave no example out."""

import pytest

from vitlab.core.duration import Duration
from vitlab.core.errors import UsageError


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (Duration(steps=7), 7),
        (Duration(examples=64), 1),
        (Duration(examples=65), 2),
        (Duration(epochs=1), 16),
        (Duration(epochs=0.5), 8),
        (Duration(epochs=3), 47),
        (Duration(examples=1), 1),
        (Duration(epochs=1e-9), 1),
    ],
)
def test_length_in_steps_of_64_over_1000_images(duration: Duration, steps: int) -> None:
    assert duration.in_steps(dataset_size=1000, batch_size=64) == steps


@pytest.mark.parametrize("given", [{}, {"steps": 1, "epochs": 1.0}, {"steps": 1, "epochs": 1.0, "examples": 1}])
def test_exactly_one_unit_must_be_given(given: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=rf"one unit.*{len(given)}"):
        Duration(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"steps": 0}, {"steps": -1}, {"epochs": 0.0}, {"epochs": -0.5}, {"examples": 0}])
def test_length_must_be_positive(given: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=rf"train\.{next(iter(given))}.*positive"):
        Duration(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [float("nan"), float("inf")])
def test_length_must_be_finite(epochs: float) -> None:
    with pytest.raises(UsageError, match=r"train\.epochs"):
        Duration(epochs=epochs)
