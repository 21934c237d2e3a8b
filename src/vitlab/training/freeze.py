"""Which layer a parameter belongs to, and which parameters train.

Layers are counted from the input: 0 is all before the first block (patches, positions, tokens, stem), block i is i+1, and the
last holds what comes after the blocks (final norm, pooling, head). A family says which of its parameters are a block's.
"""

import re

from vitlab.core.errors import UsageError
from vitlab.models.families import family_of
from vitlab.models.lora import is_adapter
from vitlab.models.model import Model
from vitlab.training.pretext.task import ENCODER, Pretext
from vitlab.training.rules import require_mode

_HEAD = "head."


def layer_of_each(model: Model | Pretext) -> dict[str, int]:
    """The layer of each parameter, by name. What a pretext task puts on top of its encoder counts with the last layer."""
    if isinstance(model, Pretext):
        layers = {ENCODER + name: layer for name, layer in layer_of_each(model.encoder).items()}
        return layers | dict.fromkeys((name for name, _ in model.own_parameters()), model.encoder.spec.num_blocks + 1)
    family, last = family_of(model.spec), model.spec.num_blocks + 1
    layers: dict[str, int] = {}
    for name, _ in model.named_parameters():
        block = re.match(family.block, name)
        layers[name] = int(block[1]) + 1 if block else last if name.startswith(family.after_blocks) else 0
    return layers


def train_only(model: Model | Pretext, mode: str) -> None:
    """Freezes all but what `mode` names: `full`, `head`, `last:N` (N blocks and all behind them), `lora` (adapters and head).

    A frozen parameter has no gradient, so an optimiser made afterwards keeps no state for it.
    """
    require_mode(mode)
    layers = layer_of_each(model)
    last = max(layers.values())
    if mode == "full":
        trained = set(layers)
    elif mode.startswith("last:"):
        count = int(mode.removeprefix("last:"))
        if count >= last:
            raise UsageError(f"train={mode}: the model has only {last - 1} blocks", hint="Use train=full.")
        trained = {name for name, layer in layers.items() if layer >= last - count}
    else:
        trained = {name for name in layers if name.startswith(_HEAD) or (mode == "lora" and is_adapter(name))}
        if not any(name.startswith(_HEAD) for name in trained):
            raise UsageError(f"train={mode} needs a model with a head", hint="Set num_classes.")
        if mode == "lora" and not any(map(is_adapter, trained)):
            raise UsageError("train=lora needs a model with adapters", hint="Call add_lora first.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
