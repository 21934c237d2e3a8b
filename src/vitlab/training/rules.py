"""What a recipe says about the loss, the optimiser and the precision; each is made elsewhere in this room. Loads no torch."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal, get_args

from vitlab.core.errors import UsageError, require, require_choice

Precision = Literal["fp32", "bf16", "fp16"]
OptimName = Literal["adamw", "adam-paper", "sgd", "sgd-paper"]
_PAPER = ("adam-paper", "sgd-paper")
_MOST = 1e37  # float32 ends at 3.4e38: a rate beyond this overflows by itself; what a smaller one does is noticed in training
TRAINED = re.compile(r"full|head|lora|last:([1-9]\d*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """How much of the loss is agreement with a teacher, and how soft both answers are made before they are compared."""

    weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise UsageError(f"objective.distillation.weight must lie in 0 to 1, not {self.weight}")
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"objective.distillation.temperature must be positive, not {self.temperature}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What training minimises.

    Class weights: `auto` weighs by inverse frequency; numbers by hand are one per class, or a table from class names to
    weights in which a class that is not named has 1. Logit adjustment is for long tails: `logit_adjustment` is tau of Menon et
    al. 2021, where 1 is the balanced error's own.
    """

    kind: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0
    class_weights: Literal["none", "auto"] | tuple[float, ...] | Mapping[str, float] = "none"
    logit_adjustment: float = 0.0
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        require_choice("objective.kind", self.kind, ("softmax", "sigmoid"))
        self._require_weights()
        tau = self.logit_adjustment
        require(0 <= tau < math.inf, f"objective.logit_adjustment must be at least 0 and finite, not {tau}")
        require(not tau or self.kind == "softmax", "objective.logit_adjustment needs objective.kind=softmax")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"objective.label_smoothing must be at least 0 and below 1, not {self.label_smoothing}")
        if self.distillation is not None and self.kind != "softmax":
            raise UsageError("distillation compares two softmax distributions, so it needs objective.kind=softmax")

    def _require_weights(self) -> None:
        given = self.class_weights
        if isinstance(given, str):
            require_choice("objective.class_weights", given, ("none", "auto"))
            return
        values = list(given.values() if isinstance(given, Mapping) else given)
        usable = all(0 <= value < math.inf for value in values) and (isinstance(given, Mapping) or any(values))
        require(usable, f"objective.class_weights must be finite, not negative and not all 0, not {values}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimRule:
    """Names with `-paper` follow the authors' code (optax, flax); the plain ones are torch's own.

    In torch's `sgd` the decay is a part of the gradient, and momentum makes 1/(1-momentum) times as much of it.
    """

    name: OptimName = "adamw"
    lr: float  # the peak; a schedule scales it
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam
    eps: float = 1e-8  # of Adam; the default of torch and optax alike
    momentum: float = 0.9  # of SGD; the paper's
    nesterov: bool = False
    momentum_dtype: Literal["same", "bfloat16"] = "same"  # as the weights, or half of that, as in the authors' code
    layer_decay: float = 1.0  # of the rate, from each layer to the one before it
    max_grad_norm: float = 1.0  # over all gradients together; inf for no limit
    train: str = "full"  # or head, last:N, lora

    def __post_init__(self) -> None:
        require_choice("optim.name", self.name, get_args(OptimName))
        for name in ("lr", "eps"):
            value = getattr(self, name)
            require(0 < value <= _MOST, f"optim.{name} must be positive and at most {_MOST:g}, not {value}")
        decay = self.weight_decay
        require(0 <= decay <= _MOST, f"optim.weight_decay must not be negative, or above {_MOST:g}, not {decay}")
        require(all(0 <= beta < 1 for beta in self.betas), f"optim.betas must lie in 0 to 1, not {list(self.betas)}")
        require(0 <= self.momentum < 1, f"optim.momentum must be at least 0 and below 1, not {self.momentum}")
        require(not self.nesterov or self.momentum > 0, "optim.nesterov needs a momentum")
        require(
            self.momentum_dtype == "same" or self.name in _PAPER,
            f"{self.name} keeps its momentum in the weights' own numbers; {' and '.join(_PAPER)} can halve it",
        )
        require(0 < self.layer_decay <= 1, f"optim.layer_decay must be positive and at most 1, not {self.layer_decay}")
        require(self.max_grad_norm > 0, f"optim.max_grad_norm must be positive, not {self.max_grad_norm}")
        require_mode(self.train)


def require_mode(mode: str) -> None:
    if not TRAINED.fullmatch(mode):
        raise UsageError(f"'{mode}' does not say what to train", hint="Allowed: full, head, last:N (blocks), lora.")
