"""The running average of the weights, which often scores better than they do: the paper's best ImageNet numbers are its.

θ̄ ← decay·θ̄ + (1-decay)·θ after each update, in float32, in a dictionary with the names of the state. It reads the weights
that are trained, and never writes to them, save for `ema_applied`, which puts them back. Where the weights are spread over
processes, each keeps the average of its own rows.

Running statistics are averaged like weights, as TensorFlow's EfficientNet and timm do: averaged weights make other activations
than the newest ones, so their statistics are averages too. What is not a fraction (how many batches a norm has seen) is copied.

    ema = start_ema(model)
    weights = trained_weights(model)  # once: they stay where they are
    ...                                    # an update of the model
    update_ema(ema, weights, decay_at(step, 0.9999, warmup=True))  # the paper's decay, section 4.1
    with ema_applied(model, ema):
        score(model)
"""

# pyright: reportPrivateImportUsage=false
# torch's operations on many tensors at once, `_foreach_...`, have private names only.

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor, nn

from vitlab.training.sharding import to_local


def start_ema(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything in the state, in float32 unless it is a count."""
    return {
        name: (value.float() if value.is_floating_point() else value).clone()
        for name, value in local_state(model).items()
    }


def decay_at(step: int, decay: float, *, warmup: bool = False) -> float:
    """With `warmup`, min(decay, (1+step)/(10+step)): a young average forgets the start, else 37 % of it would be left after
    10,000 steps. The formula is TensorFlow's. `step` counts finished updates."""
    return min(decay, (1 + step) / (10 + step)) if warmup else decay


@torch.no_grad()
def update_ema(ema: dict[str, Tensor], weights: dict[str, Tensor], decay: float) -> None:
    """One step of the average of these weights, in place."""
    for name in [name for name, value in weights.items() if not value.is_floating_point()]:
        ema[name].copy_(weights[name])
    weights = {name: value for name, value in weights.items() if value.is_floating_point()}
    torch._foreach_lerp_([ema[name] for name in weights], [value.float() for value in weights.values()], 1 - decay)


@contextlib.contextmanager
def ema_applied(model: nn.Module, ema: dict[str, Tensor]) -> Generator[None]:
    """The model with the averaged weights, for the length of a `with`; afterwards its own are back, bit for bit.

    Values are copied, not exchanged: compiled graphs hold on to the addresses of the weights.
    """
    state = local_state(model)
    own = {name: value.clone() for name, value in state.items()}
    try:
        _copy(state, ema)
        yield
    finally:
        _copy(state, own)


@torch.no_grad()
def _copy(state: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        state[name].copy_(value)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those of `local_state` that training changes. Frozen ones are left out: the mean of -0.0 and itself would be 0.0."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for prefix, module in model.named_modules():  # the statistics of a frozen norm are frozen with it
        own = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if own and frozen.issuperset(own):
            frozen |= {f"{prefix}.{name}" for name, _ in module.named_buffers(recurse=False)}
    return {name: value for name, value in local_state(model).items() if name not in frozen}


def local_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model by name, this process's rows of them: its own memory, which training changes in place."""
    return {name: to_local(value.detach()) for name, value in model.state_dict().items()}
