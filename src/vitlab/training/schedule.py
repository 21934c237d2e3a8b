"""Learning rates as pure functions of the step: warm-up, decay, cool-down.

`step` counts finished updates, from 0. Warm-up multiplies by (step+1)/w and cool-down by (total-step)/c, so no update is wasted
on a rate of zero, neither the first nor the last.
"""

import dataclasses
import math
from typing import Literal

from vitlab.core.duration import Interval, RunLength, interval_in_steps, read_interval
from vitlab.core.errors import require

Shape = Literal["cosine", "linear", "staircase", "rsqrt", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The course of the learning rate, relative to its peak, for a run of any length.

    Warm-up and cool-down are steps, or an interval of the run such as "5 %", which `settled` turns into steps. `milestones` are
    shares of the whole run. `timescale` is in steps: rsqrt decays as 1/√(1 + steps since warm-up / timescale),
    which does not need to know how long the run will be; `cooldown` then ends it whenever one likes.
    """

    decay: Shape = "cosine"
    warmup: Interval = 0
    end: float = 0.0  # share of the peak that the decay approaches
    milestones: tuple[float, ...] = ()
    factor: float = 0.1  # at each milestone; BiT's
    timescale: int = 10_000  # big_vision's default, as long as the paper's warm-up
    cooldown: Interval = 0

    def __post_init__(self) -> None:
        read_interval("schedule.warmup", self.warmup)
        read_interval("schedule.cooldown", self.cooldown)
        require(0 <= self.end <= 1, f"schedule.end must lie in 0 to 1, a share of the peak, not {self.end}")
        require(0 < self.factor <= 1, f"schedule.factor must be positive and at most 1, not {self.factor}")
        require(self.timescale > 0, f"schedule.timescale must be positive, not {self.timescale}")
        rising = list(self.milestones) == sorted(set(self.milestones))
        require(
            rising and all(0 < share < 1 for share in self.milestones),
            f"schedule.milestones must rise between 0 and 1, shares of the run, not {list(self.milestones)}",
        )
        require(
            bool(self.milestones) == (self.decay == "staircase"),
            "a staircase needs milestones" if self.decay == "staircase" else "milestones are for decay=staircase",
        )

    def settled(self, run: RunLength) -> "Schedule":
        """The same with warm-up and cool-down in steps of this run."""
        warmup = interval_in_steps("schedule.warmup", self.warmup, run)
        cooldown = interval_in_steps("schedule.cooldown", self.cooldown, run)
        return dataclasses.replace(self, warmup=warmup, cooldown=cooldown)


def rate_at(schedule: Schedule, step: int, *, base: float, total_steps: int) -> float:
    """The learning rate of one step of a schedule that is settled; `base` is the peak."""
    warmup, cooldown = schedule.warmup, schedule.cooldown
    assert isinstance(warmup, int) and isinstance(cooldown, int)
    height = schedule.end + (1 - schedule.end) * _decayed(schedule, step, total_steps, warmup)
    rate = base * height * min(1.0, (step + 1) / max(1, warmup))
    return rate * min(1.0, max(0, total_steps - step) / cooldown) if cooldown else rate


def _decayed(schedule: Schedule, step: int, total_steps: int, warmup: int) -> float:
    """From 1 at the end of the warm-up towards 0."""
    since = max(0, step - warmup)
    progress = min(1.0, since / max(1, total_steps - warmup))
    match schedule.decay:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return 1 - progress
        case "staircase":
            return schedule.factor ** sum(step >= round(share * total_steps) for share in schedule.milestones)
        case "rsqrt":
            return 1 / math.sqrt(1 + since / schedule.timescale)
        case "constant":
            return 1.0
