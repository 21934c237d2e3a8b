"""Learning rates as pure functions of the step."""

import math
from typing import Literal

Decay = Literal["cosine", "linear", "constant"]


def learning_rate(step: int, *, base: float, total_steps: int, warmup_steps: int, decay: Decay) -> float:
    """Linear warm-up times decay to zero, as in the authors' code. `step` counts from 0; the first update is not at 0."""
    progress = min(1.0, max(0.0, (step - warmup_steps) / max(1, total_steps - warmup_steps)))
    rate = {
        "cosine": base * 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": base * (1 - progress),
        "constant": base,
    }
    return rate[decay] * min(1.0, (step + 1) / max(1, warmup_steps))
