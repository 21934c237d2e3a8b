"""Matrices and kernels decay; biases, norms, tokens, positions and the probe do not."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.models.build import allocate, build
from vitlab.models.spec import BiTSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.training.optim import adamw, decays

VIT = ViTSpec(
    width=8, depth=1, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), num_classes=3, head="mlp-tanh",
    registers=2, layer_scale=0.1,
)  # fmt: skip
BLOCK = {f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
EVERY_VIT = {"embed.weight", "head.weight", "pre_logits.weight", *BLOCK}


def decayed(spec: ViTSpec | BiTSpec) -> set[str]:
    return {name for name, parameter in allocate(spec).named_parameters() if decays(name, parameter)}


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
    optimizer = adamw(model, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {by_id[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert found == {name: 0.3 if name in EVERY_VIT else 0.0 for name in by_id.values()}
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(0.1, (0.8, 0.9))}


def test_decay_is_decoupled_from_the_gradient() -> None:
    model = build(VIT, seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adamw(model, lr=0.1, weight_decay=0.5, betas=(0.9, 0.999)).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if name in EVERY_VIT else 1.0))
