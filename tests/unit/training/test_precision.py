"""The precision is chosen in one place; weights and gradients stay in float32."""

import pytest
import torch

from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import OptimRule, make_optimizer
from vitlab.training.precision import Precision, autocast, grad_scaler

CPU = torch.device("cpu")
VIT = ViTSpec(width=16, depth=1, mlp_dim=32, heads=2, patch=4, image_size=(8, 8), num_classes=3)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_one_step_in_each_precision(precision: Precision, dtype: torch.dtype) -> None:
    model = build(VIT, seed=0)
    optimizer = make_optimizer(model, OptimRule(name="sgd-paper", lr=0.1))
    scaler = grad_scaler(precision, CPU)
    with autocast(precision, CPU):
        logits = model(X)
        loss = softmax_losses(logits, Y).mean()
    assert logits.dtype == dtype
    assert loss.dtype == torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    expected = torch.autograd.grad(softmax_losses(model(X), Y).mean(), model.head.weight)[0]
    torch.testing.assert_close(model.head.weight.grad, expected, rtol=0.02, atol=0.01)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.head.weight, torch.zeros_like(model.head.weight))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert scaler.is_enabled() == (precision == "fp16")


def test_scaler_leaves_a_step_with_infinite_gradients_out() -> None:
    model = build(VIT, seed=0)
    optimizer = make_optimizer(model, OptimRule(name="adam-paper", lr=0.1))
    scaler = grad_scaler("fp16", CPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler.scale(model(X).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() < scale
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
