"""What decays, the update rules against NumPy, and their state as named tensors."""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.models.build import allocate, build
from vitlab.models.spec import BiTSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.training.optim import (
    OptimRule,
    decayed_names,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    orthogonal,
    remember_update,
)

VIT = ViTSpec(
    width=8, depth=1, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), num_classes=3, head="mlp-tanh",
    registers=2, layer_scale=0.1,
)  # fmt: skip
BLOCK = {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
EVERY_VIT = {"embed.weight", "head.weight", "pre_logits.weight", *BLOCK}


def decayed(spec: ViTSpec | BiTSpec) -> set[str]:
    return decayed_names(allocate(spec))


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, set()),
        ({"pos": "learned2d"}, set()),
        ({"pos": "relative"}, set()),
        ({"pool": "gap"}, set()),
        ({"pool": "map"}, {f"map.{name}.weight" for name in ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")}),
    ],
    ids=["learned", "learned2d", "relative", "gap", "map"],
)
def test_vit_decays_exactly_its_matrices(changes: dict[str, Any], more: set[str]) -> None:
    assert decayed(dataclasses.replace(VIT, **changes)) == EVERY_VIT | more


def test_hybrid_decays_the_kernels_of_its_stem_too() -> None:
    hybrid = dataclasses.replace(VIT, patch=1, stem=TrunkSpec(stages=(1,)))
    unit = {f"stem.stages.0.0.{name}.weight" for name in ("conv1", "conv2", "conv3", "proj")}
    assert decayed(hybrid) == EVERY_VIT | {"stem.root.weight"} | unit


def test_bit_decays_its_kernels_and_its_head() -> None:
    unit = {f"trunk.stages.0.0.{name}.weight" for name in ("conv1", "conv2", "conv3", "proj")}
    assert decayed(BiTSpec(trunk=bit_trunk((1,), 1))) == {"trunk.root.weight", "head.weight"} | unit


def test_optimiser_holds_every_parameter_once_with_its_decay() -> None:
    model = build(VIT, seed=0)
    optimizer = make_optimizer(model, OptimRule(lr=0.1, weight_decay=0.3, betas=(0.8, 0.9)))
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {by_id[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert found == {name: 0.3 if name in EVERY_VIT else 0.0 for name in by_id.values()}
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(0.1, (0.8, 0.9))}


def test_decay_is_decoupled_from_the_gradient() -> None:
    model = build(VIT, seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, OptimRule(lr=0.1, weight_decay=0.5)).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if name in EVERY_VIT else 1.0))


# --- update rules against NumPy ---------------------------------------------------------------------------------------

STEPS = 20
RATES = [0.03 * (1 + np.cos(step)) for step in range(STEPS)]  # up and down, and near zero
Array = Any


def gradient(name: str, step: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=generator(step, zlib.crc32(name.encode())), dtype=torch.float64)


def set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def trained(rule: OptimRule, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = build(VIT, seed=0).to(dtype)
    optimizer = make_optimizer(model, rule)
    for step in range(steps):
        set_rates(optimizer, RATES[step])
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, step, parameter.shape).to(dtype)
        optimizer.step()
    return model


def adamw_by_hand(p: Array, grads: list[Array], rates: list[float], scale: float, rule: OptimRule, wd: float) -> Array:
    """Loshchilov and Hutter, algorithm 2, with torch's unit of decay. The layer's rate scales both parts."""
    (b1, b2), m, v = rule.betas, 0 * p, 0 * p
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        p = p - lr * scale * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + rule.eps) + wd * p)
    return p


def adam_paper_by_hand(
    p: Array, grads: list[Array], rates: list[float], scale: float, rule: OptimRule, wd: float
) -> Array:
    """big_vision: clip, scale_by_adam, lr, layer multiplier, + wd·p, schedule; its wd is ours times the peak rate."""
    (b1, b2), m, v = rule.betas, 0 * p, 0 * p
    big_vision_wd = wd * rule.lr
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        adam = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + rule.eps)
        p = p - lr / rule.lr * (rule.lr * scale * adam + big_vision_wd * p)
    return p


def sgd_by_hand(p: Array, grads: list[Array], rates: list[float], scale: float, rule: OptimRule, wd: float) -> Array:
    """torch: decay is a part of the gradient, so it goes through the momentum."""
    v = 0 * p
    for g, lr in zip(grads, rates, strict=True):
        g = g + wd * p
        v = rule.momentum * v + g
        p = p - lr * scale * (g + rule.momentum * v if rule.nesterov else v)
    return p


def sgd_paper_by_hand(
    p: Array, grads: list[Array], rates: list[float], scale: float, rule: OptimRule, wd: float
) -> Array:
    """optax: trace, lr, layer multiplier, + wd·p, schedule."""
    v = 0 * p
    for g, lr in zip(grads, rates, strict=True):
        v = rule.momentum * v + g
        u = g + rule.momentum * v if rule.nesterov else v
        p = p - lr / rule.lr * (rule.lr * scale * u + wd * rule.lr * p)
    return p


BY_HAND = {
    "adamw": adamw_by_hand, "adam-paper": adam_paper_by_hand, "sgd": sgd_by_hand, "sgd-paper": sgd_paper_by_hand,
}  # fmt: skip
NAMES: list[Any] = list(BY_HAND)


@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
@pytest.mark.parametrize(("name", "nesterov"), [*((name, False) for name in NAMES), ("sgd", True), ("sgd-paper", True)])
def test_twenty_updates_follow_the_formula(name: Any, nesterov: bool, layer_decay: float) -> None:
    rule = OptimRule(name=name, lr=0.05, weight_decay=0.3, nesterov=nesterov, layer_decay=layer_decay, eps=1e-3)
    before = build(VIT, seed=0).double()
    depth = {"embed": 0, "cls": 0, "registers": 0, "pos": 0, "blocks": 1, "norm": 2, "pre_logits": 2, "head": 2}
    after = dict(trained(rule).named_parameters())
    for path, start in before.named_parameters():
        grads = [gradient(path, step, start.shape).numpy() for step in range(STEPS)]
        scale = layer_decay ** (2 - depth[path.split(".")[0]])
        wd = 0.3 if path in EVERY_VIT else 0.0
        expected = BY_HAND[name](start.detach().numpy(), grads, RATES, scale, rule, wd)
        np.testing.assert_allclose(after[path].detach().numpy(), expected, rtol=1e-6, atol=1e-9, err_msg=path)


@pytest.mark.parametrize(("ours", "torchs", "weight_decay"), [("adam-paper", "adamw", 0.3), ("sgd-paper", "sgd", 0.0)])
def test_paper_and_torch_agree_where_they_should(ours: Any, torchs: Any, weight_decay: float) -> None:
    one, other = (trained(OptimRule(name=name, lr=0.05, weight_decay=weight_decay)) for name in (ours, torchs))
    for path, value in one.named_parameters():
        torch.testing.assert_close(value, other.get_parameter(path), rtol=1e-9, atol=1e-9)


def test_decay_of_sgd_is_where_the_two_differ() -> None:
    one, other = (trained(OptimRule(name=name, lr=0.05, weight_decay=0.3)) for name in ("sgd-paper", "sgd"))
    assert (one.get_parameter("embed.weight") - other.get_parameter("embed.weight")).abs().max() > 0.01
    assert torch.allclose(one.get_parameter("embed.bias"), other.get_parameter("embed.bias"))


@pytest.mark.parametrize(("name", "kept"), [("adam-paper", "exp_avg"), ("sgd-paper", "momentum_buffer")])
def test_first_moment_alone_is_held_in_half_the_memory(name: Any, kept: str) -> None:
    model = build(VIT, seed=0)
    state = optimizer_state(make_optimizer(model, OptimRule(name=name, lr=0.05, momentum_dtype="bfloat16")), model)
    assert {key.rpartition("/")[2] for key, value in state.items() if value.dtype == torch.bfloat16} == {kept}


def as_bfloat16(x: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even: the upper half of its bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize(("name", "nesterov"), [("adam-paper", False), ("sgd-paper", False), ("sgd-paper", True)])
def test_momentum_in_bfloat16_follows_jax(name: Any, nesterov: bool) -> None:
    """A Python number times a bfloat16 array is bfloat16 in JAX, number and product alike: 0.9 acts as 0.8984375."""
    rule = OptimRule(name=name, lr=0.05, momentum_dtype="bfloat16", nesterov=nesterov, eps=1e-3)
    decay = as_bfloat16(0.9)
    assert decay == 0.8984375
    after = dict(trained(rule, dtype=torch.float32).named_parameters())
    for path, start in build(VIT, seed=0).named_parameters():
        p = start.detach().numpy().astype(np.float32)
        m, v = 0 * p, 0 * p
        for t, rate in enumerate(RATES, 1):
            g = gradient(path, t - 1, start.shape).float().numpy()
            if name == "adam-paper":
                full = np.float32(0.1) * g + as_bfloat16(decay * m)
                v = np.float32(0.001) * g**2 + np.float32(0.999) * v
                u = full / np.float32(1 - 0.9**t) / (np.sqrt(v / np.float32(1 - 0.999**t)) + np.float32(rule.eps))
            else:
                full = g + as_bfloat16(decay * m)
                u = g + np.float32(0.9) * full if nesterov else full
            m, p = as_bfloat16(full), p - np.float32(rate) * u
        np.testing.assert_allclose(after[path].detach().numpy(), p, rtol=1e-5, atol=1e-5, err_msg=path)


# --- Muon -------------------------------------------------------------------------------------------------------------

MATRICES = {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


def test_matrices_of_blocks_move_as_torchs_muon_moves_them() -> None:
    """q, k and v one by one, at torch's size of an update that matches Adam's; all else is Adam."""
    rule = OptimRule(name="muon", lr=0.05, weight_decay=0.3, momentum=0.95, nesterov=True, eps=1e-3)
    after = dict(trained(rule, dtype=torch.float32).named_parameters())
    for path, start in build(VIT, seed=0).named_parameters():
        grads = [gradient(path, step, start.shape).float() for step in range(STEPS)]
        if path not in MATRICES:
            wd = 0.3 if path in EVERY_VIT else 0.0
            expected = adam_paper_by_hand(start.detach().numpy(), [g.numpy() for g in grads], RATES, 1.0, rule, wd)
            np.testing.assert_allclose(after[path].detach().numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=path)
            continue
        parts = [nn.Parameter(part.clone()) for part in start.detach().chunk(3 if "qkv" in path else 1)]
        theirs = torch.optim.Muon(parts, weight_decay=0.3, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
        for grad, rate in zip(grads, RATES, strict=True):
            theirs.param_groups[0]["lr"] = rate
            for part, own in zip(parts, grad.chunk(len(parts)), strict=True):
                part.grad = own
            theirs.step()
        whole = torch.cat([part.detach() for part in parts])
        assert (after[path] - start).norm() > 0.1
        assert (after[path] - whole).norm() < 0.02 * (whole - start).norm(), path  # twenty updates of bfloat16 products


def test_an_orthogonal_update_keeps_directions_and_evens_out_their_sizes() -> None:
    matrices = torch.randn(3, 12, 40, generator=generator(0)) * torch.logspace(-1, 0.5, 12)[:, None]
    for given in (matrices, matrices.mT):
        found = orthogonal(given)
        sizes = torch.linalg.svdvals(found)
        assert found.shape == given.shape and 0.6 < sizes.min() <= sizes.max() < 1.3
        u, _, v = torch.linalg.svd(given, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(found.flatten(1), (u @ v).flatten(1)).min() > 0.95


def test_kernels_of_a_resnet_count_as_matrices() -> None:
    model = build(BiTSpec(trunk=bit_trunk((1, 1), 1), num_classes=3), seed=0)
    optimizer = make_optimizer(model, OptimRule(name="muon", lr=0.05))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = {key for key in optimizer_state(optimizer, model) if key.endswith("momentum_buffer")}
    assert held and all(key.startswith("trunk.stages.") for key in held)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# --- state ------------------------------------------------------------------------------------------------------------

RULES = [
    *(OptimRule(name=name, lr=0.05, weight_decay=0.1, layer_decay=0.5) for name in NAMES),
    OptimRule(name="adam-paper", lr=0.05, momentum_dtype="bfloat16"),
    OptimRule(name="sgd-paper", lr=0.05, momentum_dtype="bfloat16", nesterov=True),
    OptimRule(name="sgd", lr=0.05, momentum=0.0),
    OptimRule(name="sgd-paper", lr=0.05, momentum=0.0),
    OptimRule(name="adamw", lr=0.05, train="last:1"),
    OptimRule(name="muon", lr=0.05, weight_decay=0.1, layer_decay=0.5, momentum=0.95, nesterov=True),
]
each_rule = pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: f"{rule.name}-{rule.momentum_dtype}-{rule.momentum}-{rule.train}"
)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_rates(optimizer, RATES[step])
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = gradient(name, step, parameter.shape).float()
        optimizer.step()


@each_rule
@pytest.mark.parametrize("stop", [0, 3])
def test_run_resumes_bit_for_bit_from_stored_state(rule: OptimRule, stop: int) -> None:
    whole = build(VIT, seed=0)
    advance(whole, make_optimizer(whole, rule), range(6))

    first = build(VIT, seed=0)
    optimizer = make_optimizer(first, rule)
    advance(first, optimizer, range(stop))
    stored = safetensors.torch.load(safetensors.torch.save(optimizer_state(optimizer, first)))

    second = build(VIT, seed=1)
    second.load_state_dict(first.state_dict())
    resumed = make_optimizer(second, rule)
    load_optimizer_state(resumed, second, stored)
    found = optimizer_state(resumed, second)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], stored[key]) and found[key] is not stored[key] for key in stored)
    advance(second, resumed, range(stop, 6))
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in second.state_dict().items())


@each_rule
def test_an_update_is_taken_back_bit_for_bit(rule: OptimRule) -> None:
    model = build(VIT, seed=0)
    optimizer = make_optimizer(model, rule)
    advance(model, optimizer, range(2))
    with torch.no_grad():
        model.get_parameter("head.bias")[0] = -0.0

    def all_values() -> dict[str, bytes]:
        values = {**model.state_dict(), **optimizer_state(optimizer, model)}
        return {name: value.clone().view(torch.uint8).numpy().tobytes() for name, value in values.items() if value.ndim}

    before, undo = all_values(), remember_update(optimizer)
    steps = [state["step"].item() for state in optimizer.state.values() if "step" in state]
    advance(model, optimizer, range(2, 3))
    assert all_values() != before
    undo()
    assert all_values() == before
    assert [state["step"].item() for state in optimizer.state.values() if "step" in state] == steps


@each_rule
def test_state_is_named_by_parameter_and_blank_at_first(rule: OptimRule) -> None:
    model = build(VIT, seed=0)
    optimizer = make_optimizer(model, rule)
    kinds = {"step", "exp_avg", "exp_avg_sq"} if rule.name.startswith("adam") else {"momentum_buffer"}
    kinds = set() if rule.momentum == 0 else kinds
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = optimizer_state(optimizer, model)
    if rule.name == "muon":
        adam = {f"{name}/{kind}" for name in trained - MATRICES for kind in ("step", "exp_avg", "exp_avg_sq")}
        assert state.keys() == adam | {f"{name}/momentum_buffer" for name in MATRICES}
    else:
        assert state.keys() == {f"{name}/{kind}" for name in trained for kind in kinds}
    assert not any(value.any() for value in state.values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("cls/exp_avg"), "lacks 'cls/exp_avg'"),
        (lambda state: state.update({"tail/exp_avg": torch.zeros(1)}), "no place.*'tail/exp_avg'"),
        (lambda state: state.update({"cls/exp_avg": torch.zeros(3)}), r"\[3\].*\[1, 1, 8\]"),
        (lambda state: state.update({"cls/exp_avg": state["cls/exp_avg"].half()}), "is float16"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(change: Callable[[Any], Any], text: str) -> None:
    model = build(VIT, seed=0)
    optimizer = make_optimizer(model, OptimRule(lr=0.05))
    advance(model, optimizer, range(2))
    before = {key: value.clone() for key, value in optimizer_state(optimizer, model).items()}
    state = dict(before)
    change(state)
    with pytest.raises(UsageError, match=text):
        load_optimizer_state(optimizer, model, state)
    assert all(torch.equal(value, before[key]) for key, value in optimizer_state(optimizer, model).items())


def test_state_of_another_optimiser_is_refused() -> None:
    model = build(VIT, seed=0)
    state = optimizer_state(make_optimizer(model, OptimRule(name="sgd-paper", lr=0.05)), model)
    with pytest.raises(UsageError, match="the optimiser's state"):
        load_optimizer_state(make_optimizer(model, OptimRule(name="adam-paper", lr=0.05)), model, state)


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_rule_survives_toml_even_without_a_limit_on_gradients() -> None:
    rule = OptimRule(name="sgd-paper", lr=0.03, max_grad_norm=float("inf"), train="last:2", betas=(0.8, 0.9))
    assert config.from_dict(OptimRule, config.parse_toml(config.dump_toml(config.to_dict(rule)), "here")) == rule


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "adam"}, "adamw"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"momentum": 1.0}, "momentum"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov"),
        ({"momentum_dtype": "bfloat16"}, "adam-paper and sgd-paper"),
        ({"layer_decay": 0.0}, "layer_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"train": "tail"}, "what to train"),
    ],
)
def test_impossible_rules_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        OptimRule(**{"lr": 0.1, **fields})


def test_closures_are_refused() -> None:
    optimizer = make_optimizer(build(VIT, seed=0), OptimRule(name="adam-paper", lr=0.05))
    with pytest.raises(UsageError, match="no closure"):
        optimizer.step(lambda: 0.0)
