"""Training length and intervals in any unit; the loop only ever sees steps.

An interval of a run is a whole number of steps, or a number and its unit: "500 steps", "2 epochs", "50_000 examples", or "10 %"
of the run.
"""

import dataclasses
import math
import re

from vitlab.core.errors import UsageError

UNITS = ("steps", "epochs", "examples")
_ENDLESS = 1e12  # beyond any run that ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Duration:
    """Exactly one of the three is given."""

    steps: int | None = None
    epochs: float | None = None
    examples: int | None = None

    def __post_init__(self) -> None:
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            raise UsageError(
                f"training length must be given in exactly one unit, not {len(given)} ({', '.join(given) or 'none'})",
                hint="Set one of train.steps, train.epochs, train.examples.",
            )
        length = getattr(self, given[0])
        if not 0 < length < _ENDLESS:
            raise UsageError(f"train.{given[0]} must be positive and below {_ENDLESS:.0e}, not {length}")

    def in_steps(self, dataset_size: int, batch_size: int) -> int:
        """Convert to whole steps, rounded up, at least one."""
        if self.steps is not None:
            return self.steps
        examples = self.examples if self.examples is not None else (self.epochs or 0) * dataset_size
        return max(1, math.ceil(examples / batch_size))


@dataclasses.dataclass(frozen=True)
class RunLength:
    """A run whose data is known: what an interval of it is measured against."""

    steps: int
    epoch_examples: int
    batch_size: int


Interval = int | str
_INTERVAL = re.compile(r"(?P<number>\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*(?P<unit>%|steps?|epochs?|examples?)")


def read_interval(key: str, interval: Interval) -> tuple[float, str]:
    """Its number and unit: `%`, `step`, `epoch` or `example`. `key` is for the error."""
    if isinstance(interval, int):
        if not 0 <= interval < _ENDLESS:
            raise UsageError(f"{key} must not be negative, and below {_ENDLESS:.0e}, not {interval}")
        return interval, "step"
    text = interval.strip()
    found = _INTERVAL.fullmatch(text)
    if found is None:
        raise UsageError(
            f"{key}: '{text}' is not an interval of a run",
            hint="Write 500 or '500 steps', '2 epochs', '50_000 examples', or '10 %'.",
        )
    number, unit = float(found["number"]), found["unit"].rstrip("s")
    if number >= _ENDLESS:
        raise UsageError(f"{key} must be below {_ENDLESS:.0e}")
    if unit == "%" and number > 100:
        raise UsageError(f"{key}: {text} is more than the whole run")
    if unit == "step" and number != int(number):
        raise UsageError(f"{key}: steps are whole, not {text}")
    return number, unit


def interval_in_steps(key: str, interval: Interval, run: RunLength) -> int:
    """The nearest number of whole steps; 0 only for nothing."""
    number, unit = read_interval(key, interval)
    step = {
        "%": run.steps / 100,
        "step": 1,
        "epoch": run.epoch_examples / run.batch_size,
        "example": 1 / run.batch_size,
    }
    return max(1, round(number * step[unit])) if number else 0
