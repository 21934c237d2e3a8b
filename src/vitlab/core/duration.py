"""How long to train, in whichever unit a recipe states it; the loop only ever sees steps."""

import dataclasses
import math

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
        """Whole steps, at least one; a part of a step counts as one, so that no example is left out."""
        if self.steps is not None:
            return self.steps
        examples = self.examples if self.examples is not None else (self.epochs or 0) * dataset_size
        return max(1, math.ceil(examples / batch_size))
