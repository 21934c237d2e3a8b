"""Optimisers: which parameters decay, how fast each layer learns, and the update rules themselves.

Owns the rule in a recipe, the optimiser made from it, and the way of its state to named tensors and back. The rate of a step
is set from outside, `group["lr"] = rate * group["lr_scale"]`, as a schedule has it. `weight_decay` is in the unit of the
paper's tables: a step takes lr·weight_decay of a weight away. Equations: docs/explanation/optimisers.md.
"""

# pyright: reportPrivateImportUsage=false
# torch's operations on many tensors at once, `_foreach_...`, have private names only.

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitlab.core.errors import UsageError
from vitlab.core.runtime import eager
from vitlab.models.families import family_of
from vitlab.models.model import Model
from vitlab.training.freeze import layer_of_each, train_only
from vitlab.training.pretext.task import ENCODER, Pretext
from vitlab.training.rules import OptimRule
from vitlab.training.sharding import to_local


def decayed_names(model: Model | Pretext) -> set[str]:
    """Matrices and kernels; biases, norms, tokens and positions are left alone (big_vision's `.*/kernel$`)."""
    if isinstance(model, Pretext):
        own = {name for name, value in model.own_parameters() if value.ndim > 1}  # a mask vector has one axis
        return own | {ENCODER + name for name in decayed_names(model.encoder)}
    never = re.compile(family_of(model.spec).never_decayed)
    return {name for name, value in model.named_parameters() if value.ndim >= 2 and not never.fullmatch(name)}


def make_optimizer(model: Model | Pretext, rule: OptimRule) -> Optimizer:
    """Freezes what `rule.train` leaves out, and makes an optimiser for the rest. Make it anew to change what trains."""
    train_only(model, rule.train)
    groups = _groups(model, rule)
    narrow = {"same": None, "bfloat16": torch.bfloat16}[rule.momentum_dtype]
    match rule.name:
        case "adamw":
            # One kernel for all of it, where it pays; what it rounds differently stays as it was on the CPU.
            fused = any(parameter.is_cuda for parameter in model.parameters())
            return eager(torch.optim.AdamW)(groups, betas=rule.betas, eps=rule.eps, fused=fused or None)
        case "sgd":
            return eager(torch.optim.SGD)(groups, momentum=rule.momentum, nesterov=rule.nesterov)
        case "adam-paper":
            return eager(AdamPaper)(groups, {"betas": rule.betas, "eps": rule.eps, "momentum_dtype": narrow})
        case "sgd-paper":
            settings = {"momentum": rule.momentum, "nesterov": rule.nesterov, "momentum_dtype": narrow}
            return eager(SgdPaper)(groups, settings)
        case "muon":
            settings = {"betas": rule.betas, "eps": rule.eps, "momentum_dtype": None}
            return eager(Muon)(groups, {**settings, "momentum": rule.momentum, "nesterov": rule.nesterov})
        case _:
            assert_never(rule.name)


def optimizer_bytes(rule: OptimRule) -> tuple[int, int]:
    """Per parameter: what the optimiser remembers, and what an update holds for a moment."""
    narrow = rule.momentum_dtype == "bfloat16"
    match rule.name:
        case "adamw":
            return 8, 4
        case "adam-paper":
            return (6, 12) if narrow else (8, 8)
        case "sgd":
            return 4, 0
        case "sgd-paper":
            return (2, 4) if narrow else (4, 0)
        case "muon":
            return 4, 12  # of matrices, which nearly all parameters are: the update, and its powers in bfloat16
        case _:
            assert_never(rule.name)


def undo_bytes(rule: OptimRule, device: torch.device | None, processes: int) -> int:
    """Per parameter: the copy that takes an update back, held until the next forward pass is sent (`remember_update`)."""
    copies = device is not None and device.type == "cuda" and processes == 1 and rule.name != "adamw"
    return 4 + optimizer_bytes(rule)[0] if copies else 0


def _groups(model: Model | Pretext, rule: OptimRule) -> list[dict[str, Any]]:
    """One group for each rate, decay and (of Muon) kind of matrix that occurs among the parameters that train."""
    layers, decayed = layer_of_each(model), decayed_names(model)
    last = max(layers.values(), default=0)
    groups: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale, decay = rule.layer_decay ** (last - layers[name]), rule.weight_decay if name in decayed else 0.0
            inside = 0 < layers[name] < last and name in decayed  # neither patches nor head: Adam is better at those
            stacked = (3 if name.endswith("attn.qkv.weight") else 1) if rule.name == "muon" and inside else 0
            groups.setdefault((scale, decay, stacked), []).append(parameter)
    return [
        {"params": parameters, "lr": rule.lr * scale, "lr_scale": scale, "weight_decay": decay, "stacked": stacked}
        for (scale, decay, stacked), parameters in groups.items()
    ]


# --- what an optimiser remembers of a parameter, before its first update ------------------------------------------------


def _adam_state(group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    return {
        # On the CPU, so that reading it does not wait for a GPU, unless it is a GPU's kernel that reads it.
        "step": torch.tensor(0.0, device=parameter.device if group.get("fused") else None),
        "exp_avg": _moment(group, parameter),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def _sgd_state(group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    return {"momentum_buffer": _moment(group, parameter)} if group["momentum"] else {}


def _moment(group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=group.get("momentum_dtype"), requires_grad=False)


# --- the authors' update rules ----------------------------------------------------------------------------------------


class _PaperOptimizer(Optimizer):
    """p ← p - s·(lr_scale·lr·u + lr·weight_decay·p), where s is the schedule and u is what `_updates` makes of the gradients.

    Decay is outside Adam and momentum, and follows the schedule but not the layer's rate (big_vision's order).
    """

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update from the gradients that are there."""
        if closure is not None:
            raise UsageError("this optimiser takes the gradients that are there, and no closure")
        for group in self.param_groups:
            self._step(group)

    @torch.no_grad()
    def _step(self, group: dict[str, Any]) -> None:
        ready: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not ready:
            return
        grads = [to_local(parameter.grad) for parameter in ready if parameter.grad is not None]
        for parameter in ready:
            if not self.state[parameter]:
                self.state[parameter] = self.blank_state(group, parameter)
        states = [{what: to_local(value) for what, value in self.state[parameter].items()} for parameter in ready]
        updates, weights = self._updates(group, grads, states), [to_local(parameter) for parameter in ready]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] / group["lr_scale"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def blank_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """What it remembers of a parameter, as it is before the first update."""
        raise NotImplementedError

    def _updates(self, group: dict[str, Any], grads: list[Tensor], states: list[dict[str, Tensor]]) -> list[Tensor]:
        raise NotImplementedError


class AdamPaper(_PaperOptimizer):
    """optax's `scale_by_adam`. The first moment may be held in bfloat16, see `_decayed`."""

    def blank_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        return _adam_state(group, parameter)

    def _updates(self, group: dict[str, Any], grads: list[Tensor], states: list[dict[str, Tensor]]) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        momenta, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        counts = [state["step"].item() for state in states]
        means = _decayed(momenta, beta1, grads)
        torch._foreach_add_(means, grads, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, [math.sqrt(1 - beta2**count) for count in counts])
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(means, scales)
        torch._foreach_div_(updates, [1 - beta1**count for count in counts])
        if group["momentum_dtype"] is not None:
            torch._foreach_copy_(momenta, means)
        return list(updates)


class SgdPaper(_PaperOptimizer):
    """v ← momentum·v + g, u = v: optax's `trace` and flax's Momentum. The rate stays outside v, so it acts at once."""

    def blank_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        return _sgd_state(group, parameter)

    def _updates(self, group: dict[str, Any], grads: list[Tensor], states: list[dict[str, Tensor]]) -> list[Tensor]:
        if not group["momentum"]:
            return grads
        momenta = [state["momentum_buffer"] for state in states]
        speeds = _decayed(momenta, group["momentum"], grads)
        torch._foreach_add_(speeds, grads)
        if group["momentum_dtype"] is not None:
            torch._foreach_copy_(momenta, speeds)
        return list(torch._foreach_add(grads, speeds, alpha=group["momentum"])) if group["nesterov"] else speeds


def _decayed(momenta: list[Tensor], decay: float, grads: list[Tensor]) -> list[Tensor]:
    """decay·momentum, then in the numbers of the gradients; the same memory unless held narrower.

    In JAX a Python number takes on the type of the array that it multiplies: 0.9 times a bfloat16 momentum is 0.8984375 times
    it, rounded to bfloat16. torch would round the product alone.
    """
    torch._foreach_mul_(momenta, torch.tensor(decay, dtype=momenta[0].dtype).item())
    return [value.to(grad.dtype) for value, grad in zip(momenta, grads, strict=True)]


# --- Muon -------------------------------------------------------------------------------------------------------------

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c of aX + bXXᵀX + c(XXᵀ)²X; torch's, and the authors'
_ROUNDS = 5  # bring all singular values to about 1


class Muon(AdamPaper):
    """Momentum made orthogonal for the matrices of the blocks (Jordan et al. 2024), Adam for everything else.

    A matrix [R, C] moves by 0.2·√max(R, C) times that, as much as Adam would move it (Liu et al. 2025, arXiv 2502.16982): rates
    and decay carry over. A group's `stacked` is how many matrices lie in the rows of one parameter: q, k and v are three.
    """

    def blank_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": _moment(group, parameter)} if group["stacked"] else _adam_state(group, parameter)

    def _updates(self, group: dict[str, Any], grads: list[Tensor], states: list[dict[str, Tensor]]) -> list[Tensor]:
        if not group["stacked"]:
            return super()._updates(group, grads, states)
        momenta = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        moved = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        updates = [torch.empty(0)] * len(moved)
        shapes = [value.shape for value in moved]
        for shape in dict.fromkeys(shapes):  # matrices of one shape at once
            alike = [i for i, other in enumerate(shapes) if other == shape]
            matrices_MRC = torch.stack([moved[i] for i in alike]).reshape(
                -1, shape[0] // group["stacked"], shape[1:].numel()
            )
            scale = 0.2 * math.sqrt(max(matrices_MRC.shape[1:]))
            whole = orthogonal(matrices_MRC).mul_(scale).reshape(len(alike), *shape)
            for i, update in zip(alike, whole, strict=True):
                updates[i] = update
        return updates


def orthogonal(matrices_MRC: Tensor) -> Tensor:
    """UVᵀ of each matrix UΣVᵀ, roughly: singular values from a hundredth of the norm on come out at 0.7 to 1.2.

    A GPU does it in bfloat16, as torch's Muon; a CPU, which may have no fast products of that, in float32.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = matrices_MRC.shape[1] > matrices_MRC.shape[2]
    x_MRC = (matrices_MRC.mT if tall else matrices_MRC).to(torch.bfloat16 if matrices_MRC.is_cuda else torch.float32)
    x_MRC = x_MRC / x_MRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ROUNDS):
        square_MRR = x_MRC @ x_MRC.mT
        x_MRC = torch.baddbmm(x_MRC, torch.baddbmm(square_MRR, square_MRR, square_MRR, beta=b, alpha=c), x_MRC, beta=a)
    return (x_MRC.mT if tall else x_MRC).to(matrices_MRC.dtype)


def remember_update(optimizer: Optimizer) -> Callable[[], None]:
    """Copy all that an update changes, weights and state; what is returned puts it back, bit for bit.

    Not before the first update: an optimiser has no state until then.
    """
    changed = [
        [to_local(value) for value in (parameter.detach(), *optimizer.state.get(parameter, {}).values())]
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    # Counts of steps lie on the CPU. Many at once go by one kernel, where all are on one device.
    parts = [[value for values in changed for value in values if value.is_cuda == on_gpu] for on_gpu in (True, False)]
    copies = [torch._foreach_mul(part, 1) if part else [] for part in parts]

    def undo() -> None:
        for part, copied in zip(parts, copies, strict=True):
            if part:
                torch._foreach_copy_(part, copied)

    return undo


# --- state as named tensors -------------------------------------------------------------------------------------------


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """All the optimiser remembers, as `parameter name/what`: the tensors themselves, not copies.

    Always complete: what has not been updated yet is there with the zeros that it starts from.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{what}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for what, value in (optimizer.state.get(parameter) or _blank_state(optimizer, group, parameter)).items()
    }


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts back what `optimizer_state` gave, bit for bit. A key, shape or number type too many, too few or other is refused."""
    wanted = optimizer_state(optimizer, model)
    for name in itertools.chain(wanted, state):
        if name not in state or name not in wanted:
            raise UsageError(f"the optimiser's state {'lacks' if name in wanted else 'has no place for'} '{name}'")
        if (state[name].shape, state[name].dtype) != (to_local(wanted[name]).shape, wanted[name].dtype):
            raise UsageError(
                f"the optimiser's state '{name}' is {_kind(state[name])}, and {_kind(to_local(wanted[name]))} is wanted"
            )
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            blank = _blank_state(optimizer, group, parameter)
            for what, value in blank.items():
                to_local(value).copy_(state[f"{names[parameter]}/{what}"])
            optimizer.state[parameter] = blank


def _blank_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """What an optimiser knows of a parameter before its first update, ours and torch's alike."""
    match optimizer:
        case _PaperOptimizer():
            return optimizer.blank_state(group, parameter)
        case torch.optim.AdamW():
            return _adam_state(group, parameter)
        case torch.optim.SGD():
            return _sgd_state(group, parameter)
        case _:
            raise NotImplementedError(f"what {type(optimizer).__name__} remembers of a parameter")


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
