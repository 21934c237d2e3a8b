"""Spec or name -> module: the only constructor outsiders call.

model = create_model("ViT-B/16", num_classes=10, image_size=(224, 320))
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vitlab.core.errors import UsageError
from vitlab.core.memory import require_memory
from vitlab.models.cost import count_params
from vitlab.models.families import family_of
from vitlab.models.init import initialise
from vitlab.models.model import Model
from vitlab.models.names import format_name, parse_name, with_size
from vitlab.models.spec import ModelSpec, changed

_BYTES = 4  # of a float32
_MOST_PARAMS = 10**15  # torch counts the bytes of a tensor in 63 bits


def create_model(
    name: str | ModelSpec,
    *,
    num_classes: int | None = None,
    image_size: int | Sequence[int] | None = None,
    in_channels: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Model:
    """Build a freshly initialised model, an ordinary `nn.Module`: images [B, C, Y, X] to logits [B, K].

    Under `torch.device("meta")` it has shapes and no memory. A BiT (ResNet) or EfficientNet has the methods of a ViT, but
    its layers are stages, and it has no class token and no attention.

    Args:
        name: A name such as ViT-B/16, R50+ViT-B/16, BiT-R50x1 or EfficientNet-B0, or a spec.
        num_classes: Outputs of the head, which starts at zero; default 1000. 0 leaves the head off.
        image_size: Pixels, one number or rows and columns; default: the usual size of that model.
        in_channels: Channels of the images; default 3.
        overrides: Any other field of the spec by name: {"pool": "gap"}.
        seed: Of the weights; default: torch's global generator, as everywhere in torch.
    """
    if not isinstance(name, str | ModelSpec):
        raise UsageError(f"a model is named by text such as 'ViT-B/16' or by a spec, not by {name!r}")
    spec = parse_name(name) if isinstance(name, str) else name
    spec = with_size(spec, image_size=image_size, num_classes=num_classes, in_channels=in_channels)
    return build(changed(spec, overrides) if overrides else spec, seed=seed)


def build(spec: ModelSpec, *, seed: int | None = None) -> Model:
    """An initialised module for `spec`, on torch's default device."""
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise UsageError(f"seed must be a whole number from 0 to 2^63-1, not {seed!r}")
    device = torch.get_default_device()
    if device.type != "meta":
        require_memory(_BYTES * count_params(spec), device, f"{format_name(spec)}, {count_params(spec):,} parameters,")
    model = allocate(spec)
    if device.type == "meta":
        return model
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    # As `to_empty`, which asks for a tensor like one without memory, and for that torch loads a whole algebra system.
    model._apply(lambda value: torch.empty(value.shape, dtype=value.dtype, device=device))
    initialise(model, generator)
    return model


def allocate(spec: ModelSpec) -> Model:
    """The module for `spec` on the meta device: shapes and names without memory."""
    if count_params(spec) > _MOST_PARAMS:
        raise UsageError(
            f"{format_name(spec)} would have {count_params(spec):,} parameters: more than can be allocated"
        )
    place, _, name = family_of(spec).module.partition(":")
    module = getattr(importlib.import_module(place), name)
    with torch.device("meta"), _Uninitialised():
        return module(spec)


class _Uninitialised(TorchFunctionMode):
    """Leaves out the values that torch's layers draw when they are made, a third of the time: here they have no memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" and func.__name__.endswith("_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
