"""The parts of training on a GPU: optimisers as on the CPU, their state there and back, fp16 with its scaler, adapters."""

from typing import Any

import pytest
import torch

from vitlab.models.build import Model, create_model
from vitlab.models.lora import LoraRule, add_lora, merge_lora
from vitlab.training.ema import ema_applied, local_state, start_ema, update_ema
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import OptimRule, load_optimizer_state, make_optimizer, optimizer_state
from vitlab.training.precision import autocast, grad_scaler

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
RULES: list[dict[str, Any]] = [
    {"name": "adamw"},
    {"name": "adam-paper"},
    {"name": "adam-paper", "momentum_dtype": "bfloat16"},
    {"name": "sgd"},
    {"name": "sgd-paper", "momentum_dtype": "bfloat16"},
]


def make(device: torch.device = DEVICE) -> Model:
    return create_model("ViT-Ti/16", image_size=32, num_classes=5, overrides={"depth": 2}, seed=0).to(device)


def advance(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.device)
        optimizer.step()


@pytest.mark.parametrize("fields", RULES, ids=str)
def test_updates_equal_the_cpus_and_resume_from_stored_state(fields: dict[str, Any]) -> None:
    rule = OptimRule(lr=0.01, weight_decay=0.1, layer_decay=0.7, **fields)
    here, there = make(), make(torch.device("cpu"))
    optimizer = make_optimizer(here, rule)
    advance(here, optimizer, range(3))
    stored = {name: value.cpu() for name, value in optimizer_state(optimizer, here).items()}
    again = make_optimizer(here, rule)
    load_optimizer_state(again, here, stored)
    advance(here, again, range(3, 6))
    advance(there, make_optimizer(there, rule), range(6))
    for name, value in here.named_parameters():
        torch.testing.assert_close(value.cpu(), there.get_parameter(name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loss_falls_with_adapters_in_every_precision(precision: Any) -> None:
    model, draw = make(), torch.Generator().manual_seed(0)
    add_lora(model, LoraRule(), seed=0)
    optimizer = make_optimizer(model, OptimRule(name="adam-paper", lr=0.01, train="lora"))
    scaler, ema = grad_scaler(precision, DEVICE), start_ema(model)
    x, y = torch.randn(20, 3, 32, 32, generator=draw).to(DEVICE), (torch.arange(20) % 5).to(DEVICE)
    seen: list[float] = []
    for _ in range(40):
        with autocast(precision, DEVICE):
            logits = model(x)
        loss = softmax_losses(logits, y).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        update_ema(ema, local_state(model), 0.9)
        seen.append(loss.item())
    assert seen[-1] < 0.2 * seen[0]
    with torch.inference_mode(), ema_applied(model, ema):
        assert (merge_lora(model)(x) - model(x)).abs().max() < 1e-3
