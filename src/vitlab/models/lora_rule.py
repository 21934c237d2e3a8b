"""What a recipe says about LoRA; `models/lora.py` does it. Loads no torch."""

import dataclasses
import math
from typing import Literal, get_args

from vitlab.core.errors import UsageError

LoraPart = Literal["q", "k", "v", "proj", "fc1", "fc2"]
_PARTS: tuple[str, ...] = get_args(LoraPart)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRule:
    """Which matrices get an adapter, and of which rank. q and v: the LoRA paper's."""

    rank: int = 8  # the LoRA paper finds ranks from 1 to 64 about equally good (its table 6)
    alpha: float = 8.0
    parts: tuple[LoraPart, ...] = ("q", "v")

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise UsageError(f"lora.rank and lora.alpha must be positive, not {self.rank} and {self.alpha}")
        if not self.parts or len(set(self.parts)) < len(self.parts) or not set(self.parts) <= set(_PARTS):
            raise UsageError(f"lora.parts must name some of {', '.join(_PARTS)}, each once, not {list(self.parts)}")
