"""What a recipe says about the loss, the optimiser and the precision; each is made elsewhere in this room. Loads no torch."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal, get_args

from vitlab.core.errors import UsageError, require, require_choice

Precision = Literal["fp32", "bf16", "fp16"]
OptimName = Literal["adamw", "adam-paper", "sgd", "sgd-paper", "muon"]
_HALVE_MOMENTUM = ("adam-paper", "sgd-paper")  # which can keep it in bfloat16
_MOST = 1e37  # float32 ends at 3.4e38: a rate beyond this overflows by itself; what a smaller one does is noticed in training
TRAINED = re.compile(r"full|head|lora|last:([1-9]\d*)")
ObjectiveKind = Literal["softmax", "sigmoid", "masked-patches", "mae", "feature-distillation"]
# Where each has its settings.
_TABLE_OF = {"masked-patches": "masked", "mae": "mae", "feature-distillation": "features"}


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
class MaskedRule:
    """Masked patch prediction (paper, B.1.2): embeddings of some patches are corrupted, and what they showed is predicted.

    Of the corrupted ones, 80 % become the mask vector, 10 % the embedding of another patch, and 10 % stay.
    """

    corrupt: float = 0.5  # share of the patches
    # colour: the patch's mean in 3 bits a channel; downsampled: the same of each cell of a 4x4 grid; pixels: all of them, L2
    target: Literal["colour", "downsampled", "pixels"] = "colour"

    def __post_init__(self) -> None:
        require(0 < self.corrupt <= 1, f"objective.masked.corrupt must be above 0 and at most 1, not {self.corrupt}")
        require_choice("objective.masked.target", self.target, ("colour", "downsampled", "pixels"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaeRule:
    """A masked autoencoder (He et al. 2022): the encoder sees few patches, a small decoder paints the others."""

    mask: float = 0.75  # share of the patches that the encoder does not see
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    norm_targets: bool = True  # each patch to mean 0 and variance 1, which the authors found better

    def __post_init__(self) -> None:
        require(0 < self.mask < 1, f"objective.mae.mask must lie between 0 and 1, not {self.mask}")
        for name in ("decoder_width", "decoder_depth", "decoder_heads"):
            require(getattr(self, name) >= 1, f"objective.mae.{name} must be at least 1, not {getattr(self, name)}")
        width, heads = self.decoder_width, self.decoder_heads
        fits = width % heads == 0 and width % 4 == 0  # sine and cosine of rows and of columns: four quarters
        require(fits, f"objective.mae.decoder_width {width} must be divisible by 4 and by its {heads} heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesRule:
    """Distillation of features: the student's tokens, projected to the teacher's width, point where the teacher's do."""

    patch_weight: float = 1.0  # of the mean over patches, beside the whole image's 1; 0 for the whole image alone
    projection: Literal["linear", "mlp"] = "linear"  # mlp: two layers with a GELU between, as wide as the teacher

    def __post_init__(self) -> None:
        weight = self.patch_weight
        require(0 <= weight < math.inf, f"objective.features.patch_weight must be at least 0 and finite, not {weight}")
        require_choice("objective.features.projection", self.projection, ("linear", "mlp"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What training minimises: a loss on labels, or a pretext task, which needs none.

    Class weights: `auto` weighs by inverse frequency; numbers by hand are one per class, or a table from class names to
    weights in which a class that is not named has 1. Logit adjustment is for long tails: `logit_adjustment` is tau of Menon et
    al. 2021, where 1 is the balanced error's own.
    """

    kind: ObjectiveKind = "softmax"
    label_smoothing: float = 0.0
    class_weights: Literal["none", "auto"] | tuple[float, ...] | Mapping[str, float] = "none"
    logit_adjustment: float = 0.0
    distillation: Distillation | None = None
    masked: MaskedRule | None = None  # of masked-patches
    mae: MaeRule | None = None
    features: FeaturesRule | None = None  # of feature-distillation

    def __post_init__(self) -> None:
        require_choice("objective.kind", self.kind, get_args(ObjectiveKind))
        self._settle_pretext()
        self._require_weights()
        tau = self.logit_adjustment
        require(0 <= tau < math.inf, f"objective.logit_adjustment must be at least 0 and finite, not {tau}")
        require(not tau or self.kind == "softmax", "objective.logit_adjustment needs objective.kind=softmax")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"objective.label_smoothing must be at least 0 and below 1, not {self.label_smoothing}")
        if self.distillation is not None and self.kind != "softmax":
            raise UsageError("distillation compares two softmax distributions, so it needs objective.kind=softmax")

    @property
    def is_pretext(self) -> bool:
        """Whether it is a task without labels, which trains an encoder and leaves it without a head."""
        return self.kind in _TABLE_OF

    def _settle_pretext(self) -> None:
        """The settings of a pretext task are all there, and those of the others are not."""
        for kind, table in _TABLE_OF.items():
            if self.kind != kind:
                require(getattr(self, table) is None, f"objective.{table} needs objective.kind={kind}, not {self.kind}")
        match self.kind:
            case "masked-patches":
                object.__setattr__(self, "masked", self.masked or MaskedRule())
            case "mae":
                object.__setattr__(self, "mae", self.mae or MaeRule())
            case "feature-distillation":
                object.__setattr__(self, "features", self.features or FeaturesRule())
            case _:
                return
        plain = self.class_weights == "none" and not self.label_smoothing and self.distillation is None
        require(
            plain, f"objective.kind={self.kind} has no labels to smooth, weigh or distil", "Leave those settings out."
        )

    def _require_weights(self) -> None:
        given = self.class_weights
        if isinstance(given, str):
            require_choice("objective.class_weights", given, ("none", "auto"))
            return
        values = list(given.values() if isinstance(given, Mapping) else given)
        usable = all(0 <= value < math.inf for value in values) and (isinstance(given, Mapping) or any(values))
        require(usable, f"objective.class_weights must be finite, not negative and not all 0, not {values}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyStudentRule:
    """How a teacher's answers train a student (Xie et al. 2020): what is kept of them, and the noise to learn under.

    Of use to `vitlab noisy-student`; a single run takes no notice. Everything else of teacher and student is the recipe's.
    """

    generations: int = 1  # students in a row, each the teacher of the next
    students: tuple[str, ...] = ()  # models: one for all or one for each generation; the teacher's where there is none
    labelled: int = 0  # images of the data that keep their labels, the others being unlabelled; 0 for all
    labelled_per_class: int = 0  # the same, as a number for each class
    targets: Literal["soft", "hard"] = "soft"  # the teacher's probabilities, or its likeliest class alone
    threshold: float = 0.3  # of the confidence, below which an image is left out
    per_class: int = 0  # pseudo-labelled images of each class; 0 for the mean of what passes the threshold
    labelled_share: float = 0.25  # of an epoch: labelled images are repeated to make it up
    label_smoothing: float = 0.1  # of labelled images; pseudo-labels are as soft as the teacher made them
    randaugment: Literal["none", "augreg", "torchvision"] = "torchvision"
    layers: int = 2
    magnitude: float = 15.0
    dropout: float = 0.1
    stochastic_depth: float = 0.2
    finish: bool = False  # whether the last student is fine-tuned on larger, unaugmented images (FixRes)
    finish_size: int = 0  # pixels to a side of these; 0 for a quarter more
    finish_epochs: float = 1.5
    finish_steps: int = 100  # at least so many, however few the labelled images
    finish_lr_frac: float = 0.1  # of optim.lr

    def __post_init__(self) -> None:
        require(self.generations >= 1, f"noisy_student.generations must be at least 1, not {self.generations}")
        require(
            len(self.students) in (0, 1, self.generations),
            f"noisy_student.students has {len(self.students)} models for {self.generations} generations",
            hint="Name one for all, or one for each.",
        )
        for name in ("labelled", "labelled_per_class", "per_class", "finish_size", "finish_steps"):
            require(getattr(self, name) >= 0, f"noisy_student.{name} must not be negative, not {getattr(self, name)}")
        require(not (self.labelled and self.labelled_per_class), "give labelled or labelled_per_class, not both")
        require(0 <= self.threshold <= 1, f"noisy_student.threshold lies in 0 to 1, not {self.threshold}")
        for name in ("labelled_share", "label_smoothing", "dropout", "stochastic_depth"):
            value = getattr(self, name)
            require(0 <= value < 1, f"noisy_student.{name} must be at least 0 and below 1, not {value}")
        require(
            0 < self.finish_epochs < math.inf, f"noisy_student.finish_epochs must be positive, not {self.finish_epochs}"
        )
        require(0 < self.finish_lr_frac < math.inf, "noisy_student.finish_lr_frac must be positive")

    def student_of(self, generation: int) -> str | None:
        """The model that was named for a generation, from 1 on; None for that of its teacher."""
        if not self.students:
            return None
        return self.students[0] if len(self.students) == 1 else self.students[generation - 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimRule:
    """Names with `-paper` follow the authors' code (optax, flax); `adamw` and `sgd` are torch's own. `muon` is Adam but for the
    matrices of the blocks.

    In torch's `sgd` the decay is a part of the gradient, and momentum makes 1/(1-momentum) times as much of it.
    """

    name: OptimName = "adamw"
    lr: float  # the peak; a schedule scales it
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam
    eps: float = 1e-8  # of Adam; the default of torch and optax alike
    momentum: float = 0.9  # of SGD, the paper's; and of Muon, whose authors take 0.95 and nesterov
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
            self.momentum_dtype == "same" or self.name in _HALVE_MOMENTUM,
            f"{self.name} keeps its momentum in the weights' own numbers; {' and '.join(_HALVE_MOMENTUM)} can halve it",
        )
        require(0 < self.layer_decay <= 1, f"optim.layer_decay must be positive and at most 1, not {self.layer_decay}")
        require(self.max_grad_norm > 0, f"optim.max_grad_norm must be positive, not {self.max_grad_norm}")
        require_mode(self.train)


def require_mode(mode: str) -> None:
    if not TRAINED.fullmatch(mode):
        raise UsageError(f"'{mode}' does not say what to train", hint="Allowed: full, head, last:N (blocks), lora.")
