"""Attention in bfloat16 on a CPU: the fused kernel's answers to the bit, and gradients no less exact than its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.models.cpu_attention import HalfOnCpu, half_trained_on_cpu
from vitlab.models.ops import attend

SIZES = [(1, 1, 1, 8), (2, 3, 17, 16), (5, 2, 65, 64), (3, 4, 197, 32), (1, 2, 512, 8), (40, 6, 50, 64)]


def heads(size: tuple[int, ...], spread: float = 1.5) -> list[Tensor]:
    """Queries, keys and values as a model has them: three views of one tensor."""
    batch, num_heads, tokens, width = size
    torch.manual_seed(0)
    qkv = (torch.randn(batch, tokens, 3, num_heads, width) * spread).bfloat16().permute(2, 0, 3, 1, 4)
    return [part.detach().requires_grad_() for part in qkv]


def gradients(function: object, parts: list[Tensor], dy: Tensor) -> list[Tensor]:
    assert callable(function)
    y = function(*parts)
    return [part.double() for part in torch.autograd.grad(y, parts, dy.to(y.dtype))]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.5, 8.0])
def test_answers_are_torchs_and_gradients_no_less_exact(size: tuple[int, ...], spread: float) -> None:
    parts = heads(size, spread)
    assert torch.equal(HalfOnCpu.apply(*parts), F.scaled_dot_product_attention(*parts))
    dy = torch.randn(size, dtype=torch.bfloat16)
    truth = gradients(F.scaled_dot_product_attention, [part.detach().double().requires_grad_() for part in parts], dy)
    ours, torchs = (gradients(function, parts, dy) for function in (HalfOnCpu.apply, F.scaled_dot_product_attention))
    for name, true, own, theirs in zip("qkv", truth, ours, torchs, strict=True):
        # One rounding to bfloat16 is 2^-9 of a number; the products sum many of them.
        floor = 2**-8 * float(true.norm()) + 1e-6
        assert float((own - true).norm()) <= max(floor, 1.5 * float((theirs - true).norm())), name


def test_scores_are_not_rounded_inside_an_autocast_either() -> None:
    parts, dy = heads((2, 3, 65, 64), 8.0), torch.randn(2, 3, 65, 64).bfloat16()
    plain = gradients(HalfOnCpu.apply, parts, dy)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(HalfOnCpu.apply, parts, dy)
    assert all(map(torch.equal, plain, inside))


def test_it_is_for_training_in_bfloat16_with_few_tokens() -> None:
    q, k, v = heads((1, 2, 9, 8))
    assert half_trained_on_cpu(q) and attend(q, k, v).grad_fn is not None
    assert "HalfOnCpu" in type(attend(q, k, v).grad_fn).__name__
    assert "HalfOnCpu" not in type(attend(q, k, v, dropout=0.5).grad_fn).__name__
    bias = torch.zeros(1, 2, 9, 9, dtype=torch.bfloat16)
    assert "HalfOnCpu" not in type(attend(q, k, v, bias).grad_fn).__name__
    with torch.no_grad():
        assert not half_trained_on_cpu(q)
    assert not half_trained_on_cpu(q.detach()) and not half_trained_on_cpu(q.float())
    assert not half_trained_on_cpu(heads((1, 1, 513, 8))[0])
