"""Layers are counted from the input, and only what a mode names trains."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from vitlab.core.errors import UsageError
from vitlab.models.build import allocate, build
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.lora import LoraRule, add_lora
from vitlab.models.spec import BiTSpec, ModelSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.training.freeze import layer_of_each, train_only
from vitlab.training.optim import OptimRule, make_optimizer, optimizer_state

VIT = ViTSpec(
    width=8, depth=3, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), num_classes=3, head="mlp-tanh", registers=2
)
BIT = BiTSpec(trunk=bit_trunk((1, 2), 1), num_classes=3)


def by_layer(spec: ModelSpec) -> dict[int, set[str]]:
    """The first parts of the parameter names of each layer."""
    found: dict[int, set[str]] = {}
    for name, layer in layer_of_each(allocate(spec)).items():
        depth = 3 if name.startswith("trunk.stages") else 2 if name.startswith(("blocks", "trunk")) else 1
        found.setdefault(layer, set()).add(".".join(name.split(".")[:depth]))
    return found


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({}, {"embed", "cls", "registers", "pos"}, {"norm", "pre_logits", "head"}),
        ({"pool": "map", "head": "linear"}, {"embed", "registers", "pos"}, {"norm", "map", "head"}),
        ({"patch": 1, "stem": TrunkSpec(stages=(1,)), "pos": "relative"}, {"embed", "cls", "registers", "stem"}, None),
    ],
)
def test_layers_of_a_vit(changes: dict[str, Any], first: set[str], last: set[str] | None) -> None:
    expected = {0: first, 1: {"blocks.0"}, 2: {"blocks.1"}, 3: {"blocks.2"}, 4: last or {"norm", "pre_logits", "head"}}
    assert by_layer(dataclasses.replace(VIT, **changes)) == expected


def test_layers_of_a_bit_are_its_stages() -> None:
    assert by_layer(BIT) == {0: {"trunk.root"}, 1: {"trunk.stages.0"}, 2: {"trunk.stages.1"}, 3: {"norm", "head"}}


def test_layers_of_an_efficientnet_are_its_stages() -> None:
    spec = EfficientNetSpec(stem_width=4, widths=(4,) * 7, depths=(1,) * 7, last_width=8, num_classes=3)
    found = {layer: {".".join(name.split(".")[:2]) for name in names} for layer, names in _names(spec).items()}
    first, last = {"stem.weight", "stem_norm.weight", "stem_norm.bias"}, {"last.weight", "norm.weight", "norm.bias"}
    assert found == {
        0: first,
        **{i + 1: {f"stages.{i}"} for i in range(7)},
        8: last | {"head.weight", "head.bias"},
    }


def _names(spec: ModelSpec) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for name, layer in layer_of_each(allocate(spec)).items():
        found.setdefault(layer, set()).add(name)
    return found


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("mode", "starts"),
    [
        ("full", ("",)),
        ("head", ("head.",)),
        ("last:1", ("blocks.2.", "norm.", "pre_logits.", "head.")),
        ("last:3", ("blocks.", "norm.", "pre_logits.", "head.")),
    ],
)
def test_only_what_the_mode_names_trains_and_has_state(mode: str, starts: tuple[str, ...]) -> None:
    model = build(VIT, seed=0)
    expected = {name for name, _ in model.named_parameters() if name.startswith(starts)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, OptimRule(name="adam-paper", lr=0.1, weight_decay=0.1, train=mode))
    nn.init.normal_(model.head.weight)  # a zero head sends no gradient further back
    before["head.weight"] = model.head.weight.detach().clone()
    model(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    assert trained(model) == expected
    assert {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])} == expected
    assert {key.partition("/")[0] for key in optimizer_state(optimizer, model)} == expected


def test_lora_trains_adapters_and_head() -> None:
    model = build(VIT, seed=0)
    add_lora(model, LoraRule(rank=2), seed=0)
    train_only(model, "lora")
    adapters = {f"blocks.{i}.attn.qkv.lora_{side}.{part}" for i in range(3) for side in "ab" for part in "qv"}
    assert trained(model) == {"head.weight", "head.bias"} | adapters
    train_only(model, "full")
    assert len(trained(model)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("mode", "changes", "text"),
    [
        ("heads", {}, "what to train"),
        ("last:0", {}, "what to train"),
        ("last:4", {}, "only 3 blocks"),
        ("lora", {}, "add_lora"),
        ("head", {"num_classes": 0}, "a head"),
    ],
)
def test_impossible_modes_are_refused(mode: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        train_only(allocate(dataclasses.replace(VIT, **changes)), mode)
