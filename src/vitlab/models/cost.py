"""Parameters, multiply-adds and activation memory in closed form.

Each family has its own arithmetic. A test holds every count equal to what torch counts on the built model;
docs/reference/recipes.md says how far the memory of a training step is from the formula.
"""

from vitlab.models.families import family_of
from vitlab.models.family import ActivationBytes
from vitlab.models.spec import ModelSpec

JFT_IMAGES = 303_000_000


def count_params(spec: ModelSpec) -> int:
    """Every trainable number of the model."""
    return family_of(spec).count_params(spec)


def count_stored(spec: ModelSpec) -> int:
    """Every number of the state dict: parameters and buffers."""
    return count_params(spec) + family_of(spec).count_buffers(spec)


def has_running_stats(spec: ModelSpec) -> bool:
    """Whether a forward pass in training changes the model: batch norm keeps statistics of what it has seen."""
    return family_of(spec).count_buffers(spec) > 0


def count_macs(spec: ModelSpec, *, padding_taps: bool = True) -> int:
    """Multiply-adds for one image, forward.

    `padding_taps=False` leaves out convolution taps on zero padding, as the paper's Table 6 was counted.
    """
    return family_of(spec).count_macs(spec, padding_taps)


def activation_bytes(spec: ModelSpec, *, half: bool, recompute: bool = False) -> ActivationBytes:
    """Memory that training keeps for one image; with `half`, under autocast."""
    return family_of(spec).activation_bytes(spec, half, recompute)


def training_exaflops(spec: ModelSpec, epochs: float, images: int = JFT_IMAGES) -> float:
    """Compute of a training run; a backward pass costs two forward passes."""
    return 6 * count_macs(spec, padding_taps=False) * epochs * images / 1e18
