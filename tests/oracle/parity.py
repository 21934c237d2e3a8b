"""The same weights on both sides, the same names for what happens inside, and one measure of difference.

Letters in names: B batch, C channels, Y X rows and columns, T tokens, D width.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlab.models.build import Model
from vitlab.models.resnet import StdConv
from vitlab.models.tape import Tape
from vitlab.models.vit import ViT

TOLERANCE = 1e-5  # of max |peer tensor|, float32 on the CPU

# Where a vitlab parameter goes: pattern of its name -> the peer's name, or several when its rows are split among them.
Names = Mapping[str, str | tuple[str, ...]]

# Where the peer computes what a tape name stands for: a module and which end of it, or a field of the model's result.
Tap = tuple[str, Literal["in", "out", "result"]]
Taps = Mapping[str, Tap]


# --- weights ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(model: Model, seed: int = 0) -> None:
    """Random values everywhere, nothing zero, at scales where every convention of the spec shows.

    An eps only shows beside a variance that is not much larger. Tokens therefore enter at a standard deviation near
    0.03 and the ResNet's activations stay near 0.02; kernels are near 1e-3, each output channel at its own scale,
    because the GroupNorm behind them would hide a common factor.
    """
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        parameter.normal_(generator=generator)
        _rescale(model.get_submodule(owner), owner, name, parameter, generator)


def _rescale(module: nn.Module, owner: str, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if isinstance(module, nn.LayerNorm):
        parameter.mul_(0.1).add_(name == "weight")
    elif isinstance(module, nn.GroupNorm):
        # A unit adds little to its shortcut, as in a trained network. With a full share, sixteen random units amplify
        # float32 rounding to 3e-5; `test_trunks_in_double` shows that nothing else is in that number.
        gain = 0.005 if owner.endswith("norm3") else 0.02
        parameter.mul_(0.1).add_(name == "weight").mul_(gain)
    elif isinstance(module, StdConv):
        parameter.mul_(1e-3 * torch.empty(len(parameter), 1, 1, 1).uniform_(0.5, 2, generator=generator))
    elif name == "weight":
        # Keeps the scale of the input; only pixels, which come at scale 1, are brought down to the tokens' scale.
        gain = 0.03 if isinstance(module, nn.Conv2d) and module.in_channels == 3 else 1.0
        parameter.mul_(gain / math.sqrt(parameter[0].numel()))
    elif name in ("scale1", "scale2"):
        parameter.mul_(0.1).add_(0.5)
    elif name != "probe":
        parameter.mul_(0.1 if isinstance(module, nn.Linear) else 0.03)


def transfer(model: Model, peer: nn.Module, names: Names) -> None:
    """Gives the peer vitlab's tensors. Each of ours is used, and each of the peer's is covered exactly once.

    Parts that arrive under one name are stacked along the rows, so a second arrival shows as a wrong shape.
    """
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        matches = [(rule, target) for rule, target in names.items() if re.fullmatch(rule, name)]
        assert len(matches) == 1, f"{name} has {len(matches)} rules"
        rule, targets = matches[0]
        targets = (targets,) if isinstance(targets, str) else targets
        for target, part in zip(targets, tensor.chunk(len(targets)), strict=True):
            parts.setdefault(re.sub(rule, target, name), []).append(part)
    wanted = peer.state_dict()
    assert parts.keys() == wanted.keys(), sorted(parts.keys() ^ wanted.keys())
    state = {name: _shaped(name, torch.cat(tensors), wanted[name].shape) for name, tensors in parts.items()}
    peer.load_state_dict(state, strict=True, assign=True)


def _shaped(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """Peers keep some tensors with more or fewer axes of length 1; nothing else may differ."""
    assert [n for n in tensor.shape if n > 1] == [n for n in shape if n > 1], f"{name}: {tensor.shape} is not {shape}"
    return tensor.reshape(shape)


# --- intermediates ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def record_ours(model: Model, x_BCYX: Tensor) -> dict[str, Tensor]:
    tape = Tape()
    model(x_BCYX, tape)
    return tape


@torch.no_grad()
def record_peer(peer: nn.Module, x_BCYX: Tensor, taps: Taps, **options: Any) -> dict[str, Tensor]:
    """Runs the peer and collects what `taps` points at, in vitlab's layout."""
    seen: dict[str, Any] = {}

    def note(name: str, end: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            value = inputs[0] if end == "in" else output
            seen[name] = value[0] if isinstance(value, tuple) else value

        return hook

    handles = [
        peer.get_submodule(path).register_forward_hook(note(name, end))
        for name, (path, end) in taps.items()
        if end != "result"
    ]
    result = peer(x_BCYX, **options)
    for handle in handles:
        handle.remove()
    seen |= {name: getattr(result, path) for name, (path, end) in taps.items() if end == "result"}
    return {name: _in_our_layout(name, value) for name, value in seen.items()}


def _in_our_layout(name: str, value: Tensor) -> Tensor:
    if name == "patches" and value.ndim == 4:
        return value.flatten(2).mT
    return value.flatten(1) if name in ("pooled", "logits") else value


# --- comparison -------------------------------------------------------------------------------------------------------


def difference(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs| relative to max |theirs|."""
    assert ours.shape == theirs.shape, f"{list(ours.shape)} is not {list(theirs.shape)}"
    relative = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    assert math.isfinite(relative), "a tensor is not finite, or the peer's is zero everywhere"
    return relative


def worst_difference(ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor]) -> tuple[float, str]:
    """The largest difference over all names and where it is; both sides must have the same names."""
    assert ours.keys() == theirs.keys(), sorted(map(str, ours.keys() ^ theirs.keys()))
    return max((difference(ours[name], theirs[name]), str(name)) for name in theirs)


def assert_same(ours: Mapping[Any, Tensor], theirs: Mapping[Any, Tensor], tolerance: float = TOLERANCE) -> None:
    worst, name = worst_difference(ours, theirs)
    assert worst <= tolerance, f"worst difference {worst:.2e} at {name}, of {len(theirs)} compared"


def images(model: Model, size: tuple[int, int] | None = None) -> Tensor:
    """Seeded noise [B, C, Y, X], at the model's own size by default. One image if it is large, else two."""
    rows, cols = size or model.spec.image_size
    batch = 1 if rows * cols > 100 * 100 else 2
    return torch.randn(batch, model.spec.in_channels, rows, cols, generator=torch.Generator().manual_seed(1))


def label(value: object) -> str:
    """Test ids that can be read: sizes and grids as 192x256."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_vit(model: Model) -> ViT:
    """Narrows the type where a test needs what only a ViT has."""
    assert isinstance(model, ViT)
    return model
