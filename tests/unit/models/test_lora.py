"""Adapters on slices of the fused matrix: nothing changes at first, and nothing but those slices ever."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.models.build import Model, allocate, build
from vitlab.models.lora import LoraRule, add_lora, load_lora_state, lora_state, merge_lora
from vitlab.models.spec import BiTSpec, ViTSpec, bit_trunk
from vitlab.training.optim import OptimRule, make_optimizer

VIT = ViTSpec(width=16, depth=2, mlp_dim=32, heads=2, patch=4, image_size=(8, 8), num_classes=3)
X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1])
ALL = LoraRule(rank=3, alpha=6.0, parts=("q", "k", "v", "proj", "fc1", "fc2"))


def make(rule: LoraRule | None = None, spec: ViTSpec = VIT) -> Model:
    model = build(spec, seed=0)
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    if rule is not None:
        add_lora(model, rule, seed=0)
    return model


def train(model: Model, steps: int = 5) -> None:
    optimizer = make_optimizer(model, OptimRule(lr=0.03, train="lora"))
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()


@pytest.mark.parametrize("rule", [LoraRule(), ALL], ids=["q-v", "all"])
def test_step_zero_is_unchanged_bit_for_bit_and_so_are_the_names(rule: LoraRule) -> None:
    plain, adapted = make(), make(rule)
    assert torch.equal(adapted(X), plain(X))
    state = {name: value for name, value in adapted.state_dict().items() if "lora" not in name}
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())


@pytest.mark.parametrize("rule", [LoraRule(rank=2), ALL], ids=["q-v", "all"])
def test_training_moves_adapters_and_head_and_merging_keeps_the_answers(rule: LoraRule) -> None:
    model = make(rule)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(lora_state(model))
    assert (model(X) - make()(X)).abs().max() > 0.1

    after = {name: value.clone() for name, value in model.state_dict().items()}
    merged = merge_lora(model)
    assert merged.state_dict().keys() == allocate(VIT).state_dict().keys()
    assert (merged(X) - model(X)).abs().max() <= 1e-5
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    assert {value.data_ptr() for value in merged.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


def test_merged_matrix_differs_by_a_low_rank_product_in_the_chosen_rows_only() -> None:
    model = make(LoraRule(rank=2, alpha=10.0))
    train(model)
    was, now = (m.blocks[0].attn.qkv for m in (make(), merge_lora(model)))
    added = (now.weight - was.weight).detach().double()
    own = model.blocks[0].attn.qkv
    q = 5.0 * own.lora_b["q"].double() @ own.lora_a["q"].double()
    torch.testing.assert_close(added[:16], q.detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(now.weight[16:32], was.weight[16:32]), "k has no adapter"
    assert torch.linalg.matrix_rank(added[32:], atol=1e-6) == 2
    assert torch.equal(now.bias, was.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_leaves_the_model_as_it_is(dtype: torch.dtype) -> None:
    model = make(LoraRule(rank=2))
    train(model)
    model.to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (merge_lora(model).state_dict() for _ in range(2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_adapter_goes_to_a_fresh_model_and_answers_there() -> None:
    model = make(LoraRule())
    train(model)
    state = {name: value.clone() for name, value in lora_state(model).items()}
    sizes = sum(value.numel() for value in state.values())
    assert sizes == 2 * 2 * 8 * (16 + 16) + 16 * 3 + 3, "blocks · parts · rank · (inputs + rows), and the head"
    fresh = build(VIT, seed=0)
    add_lora(fresh, LoraRule(), seed=99)
    load_lora_state(fresh, state)
    assert torch.equal(fresh(X), model(X))
    with pytest.raises(UsageError, match="does not fit"):
        load_lora_state(make(LoraRule(rank=4)), state)
    with pytest.raises(UsageError, match="does not fit"):
        load_lora_state(make(LoraRule(parts=("q",))), state)


def test_adapters_start_from_the_seed_alone() -> None:
    states = []
    for seed in (0, 0, 1):
        torch.rand(3)
        model = build(VIT, seed=0)
        add_lora(model, LoraRule(), seed=seed)
        states.append(model.blocks[1].attn.qkv.lora_a["v"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_adapters_work_under_autocast_and_in_other_vits() -> None:
    other = dataclasses.replace(VIT, pos="relative", pool="gap", layer_scale=0.1)
    model = make(ALL, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(X)
    logits.float().sum().backward()
    assert model.blocks[0].mlp.fc1.lora_b["fc1"].grad is not None


@pytest.mark.parametrize(
    "fields", [{"rank": 0}, {"alpha": 0.0}, {"parts": ()}, {"parts": ("q", "q")}, {"parts": ("qkv",)}]
)
def test_impossible_rules_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"lora\."):
        LoraRule(**fields)


def test_resnets_and_second_helpings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"LoRA needs .*BiT"):
        add_lora(allocate(BiTSpec(trunk=bit_trunk((1,), 1))), LoraRule(), seed=0)
    with pytest.raises(UsageError, match="already"):
        add_lora(make(LoraRule()), LoraRule(), seed=0)
