"""What the colours of a heat map stand for: the unit, the values at both ends, and the ticks between them.

Saliency maps have no unit of their own, and each method another range. Two units fit all: times the mean patch, where 1 is
what every patch would have if none stood out, and per cent of the strongest patch. Letters: Y X rows and columns of patches.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitlab.core.errors import UsageError

Array = np.ndarray[Any, Any]
Unit = Literal["mean", "strongest"]

_FLATTEST = 2.0  # times the mean: a map that never gets there is drawn faintly, as it should be
_BEYOND = 0.01  # of the patches share the last colour: a few collect ten times what any other has
_NOTHING = 1e-30  # so that a map of zeros stays one
_FACTORS = ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))  # of powers of ten


@dataclasses.dataclass(frozen=True)
class Scale:
    """From `low`, which is not drawn, to `high`, which has the last colour; `most` is the greatest value of all."""

    low: float
    high: float
    unit: str
    sign: str = ""  # behind the number of a tick
    log: bool = False
    most: float = -math.inf

    def place(self, values: Array) -> Array:
        """Where values lie, 0 to 1."""
        low, high = (math.log(end) if self.log else end for end in (self.low, self.high))
        values = np.log(np.maximum(values, self.low)) if self.log else values
        return np.clip((values - low) / (high - low), 0, 1)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Place and text of round values, the ends among them; where values lie beyond the end, it says so."""
        values = _round_values(self.low, self.high, most) if self.log else _even_values(self.low, self.high, most)
        texts = [self._text(value) for value in values]
        if self.is_cut:
            texts[-1] = f"≥ {texts[-1]}"
        return [(float(self.place(np.array(value))), text) for value, text in zip(values, texts, strict=True)]

    @property
    def sentence(self) -> str:
        """The unit, and how to read the scale."""
        text = f"{self.unit}, log scale" if self.log else self.unit
        return text + (f"; strongest patch {self._text(self.most)}" if self.is_cut else "")

    @property
    def is_cut(self) -> bool:
        """Whether there are values beyond the end."""
        return self.most > self.high * (1 + 1e-6)

    def _text(self, value: float) -> str:
        return (f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}") + self.sign


def measured(heat: Tensor, unit: Unit = "mean") -> tuple[Tensor, Scale]:
    """Heat [Y, X], or [B, Y, X] of several images, in a unit, and the one scale for all of it.

    In `mean`, what is below an equal share of all patches is not drawn: half of a map is, always, and to colour it would say
    that it stands out. At most 1 % of the patches lie beyond the last colour; it stands for twice the mean at least, so that
    a flat map looks flat.
    """
    heat = _checked(heat)
    if unit == "strongest":
        values = 100 * heat / heat.amax(dim=(-2, -1), keepdim=True).clamp(min=_NOTHING)
        return values, Scale(0, 100, "of the strongest patch", " %")
    values = heat / heat.mean(dim=(-2, -1), keepdim=True).clamp(min=_NOTHING)
    return values, _from_one(values, "times the mean patch")


def times_uniform(weights: Tensor, tokens: int) -> tuple[Tensor, Scale]:
    """Attention weights [Y, X] or [H, Y, X] beside what each of all `tokens` would have if they shared equally."""
    values = _checked(weights) * tokens
    return values, _from_one(values, f"times uniform attention (1/{tokens})")


def _checked(heat: Tensor) -> Tensor:
    if heat.ndim not in (2, 3) or not heat.numel():
        raise UsageError(f"a heat map is [rows, columns] of patches, not {list(heat.shape)}")
    if not bool(heat.isfinite().all()):
        raise UsageError("the heat map holds values that are not numbers")
    return heat.detach().float().cpu()


def _from_one(values: Tensor, unit: str) -> Scale:
    beyond = int(_BEYOND * values.numel())  # none on a small grid
    high = max(_FLATTEST, float(values.flatten().sort().values[-1 - beyond]))
    return Scale(1, high, unit, "×", log=True, most=float(values.max()))


def _round_values(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5, 10 and so on between the ends, as many as fit; the ends themselves at full length."""
    inside: list[float] = []
    for factors in _FACTORS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = [factor * 10.0**power for power in powers for factor in factors]
        # Not so close to an end that the texts would touch.
        room = (high / low) ** (0.6 / most)
        inside = [value for value in every if low * room < value < high / room]
        if len(inside) <= most - 2:
            break
    return [low, *inside[: most - 2], high]


def _even_values(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    inside = [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return [low, *(value for value in inside if low + step / 2 < value < high - step / 2), high]
