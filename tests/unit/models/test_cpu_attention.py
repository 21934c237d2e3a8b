"""Attention in bfloat16 on a CPU: the fused kernel's answers to the bit, gradients about as exact, and all of its uses."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_after
from torch import Tensor

from vitlab.models import cpu_attention
from vitlab.models.cpu_attention import HalfOnCpu, half_trained_on_cpu
from vitlab.models.ops import attend

# Among them: one token, heads of width 1, no image, no token, heads that are taken in two turns.
SIZES = [(1, 1, 1, 8), (2, 2, 9, 1), (0, 3, 17, 16), (2, 3, 0, 16), (2, 3, 17, 16), (5, 2, 65, 64), (3, 4, 197, 32)]
SIZES += [(1, 3, 600, 8), (40, 6, 50, 64)]


def heads(size: tuple[int, ...], spread: float = 1.5) -> list[Tensor]:
    """Queries, keys and values as a model has them: three views of one tensor."""
    batch, num_heads, tokens, width = size
    torch.manual_seed(0)
    qkv = (torch.randn(batch, tokens, 3, num_heads, width) * spread).bfloat16().permute(2, 0, 3, 1, 4)
    return [part.detach().requires_grad_() for part in qkv]


def in_float64(parts: list[Tensor]) -> list[Tensor]:
    return [part.detach().double().requires_grad_() for part in parts]


def gradients(function: Callable[..., Tensor], parts: list[Tensor], dy: Tensor) -> list[Tensor]:
    y = function(*parts)
    return [part.double() for part in torch.autograd.grad(y, parts, dy.to(y.dtype))]


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def require_about_as_exact(parts: list[Tensor]) -> None:
    assert torch.equal(HalfOnCpu.apply(*parts), F.scaled_dot_product_attention(*parts))
    dy = torch.randn(parts[0].shape, dtype=torch.bfloat16)
    truth = gradients(F.scaled_dot_product_attention, in_float64(parts), dy)
    ours, torchs = (gradients(function, parts, dy) for function in (HalfOnCpu.apply, F.scaled_dot_product_attention))
    for name, true, own, theirs in zip("qkv", truth, ours, torchs, strict=True):
        # One rounding to bfloat16 is 2^-9 of a number; the products sum many of them.
        floor = 2**-8 * float(true.norm()) + 1e-6
        assert float((own - true).norm()) <= max(floor, 1.5 * float((theirs - true).norm())), name


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("spread", slow_after(2, [1.5, 8.0, 0.0]))
def test_answers_are_torchs_and_gradients_about_as_exact(size: tuple[int, ...], spread: float) -> None:
    require_about_as_exact(heads(size, spread))


def test_one_query_may_look_at_many_tokens() -> None:
    require_about_as_exact([heads((3, 2, 1, 16))[0], *heads((3, 2, 300, 16))[1:]])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch says it of its own kernel
def test_gradients_of_single_images_are_those_of_torch_func() -> None:
    parts, dy = heads((4, 3, 33, 16)), torch.randn(4, 3, 33, 16).bfloat16()

    def score(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Tensor:
        return (HalfOnCpu.apply(q[None], k[None], v[None])[0] * dy).float().sum()

    found = torch.func.vmap(torch.func.grad(score, argnums=(0, 1, 2)))(*(part.detach() for part in parts), dy)
    assert all(torch.equal(a.double(), b) for a, b in zip(found, gradients(HalfOnCpu.apply, parts, dy), strict=True))


def test_gradients_of_many_answers_come_in_one_call() -> None:
    parts, many = heads((2, 3, 9, 8)), torch.randn(5, 2, 3, 9, 8).bfloat16()
    y = HalfOnCpu.apply(*parts)
    found = torch.autograd.grad(y, parts, many, is_grads_batched=True)
    for i, dy in enumerate(many):
        assert all(
            torch.equal(a[i].double(), b) for a, b in zip(found, gradients(HalfOnCpu.apply, parts, dy), strict=True)
        )


def test_the_gradient_has_a_gradient_and_no_silent_zero() -> None:
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v

    def second(function: Callable[..., Tensor], parts: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*parts), parts, dy, create_graph=True)
        return torch.autograd.grad(sum((part.double().square().sum() for part in first), torch.zeros(())), parts)

    parts, dy = heads((2, 2, 9, 8)), torch.randn(2, 2, 9, 8).bfloat16()
    truth = second(by_hand, in_float64(parts), dy.double())
    # Four roundings in a row, where one is 2^-9.
    assert all(error(own, true) < 2**-7 for own, true in zip(second(HalfOnCpu.apply, parts, dy), truth, strict=True))
    twice = torch.func.grad(
        lambda q: torch.func.grad(lambda q: attend(q, *fixed).float().sum())(q).float().square().sum()
    )
    fixed = [part.detach() for part in parts[1:]]
    if cpu_attention._has_units():
        assert float(twice(parts[0].detach()).float().norm()) > 0
    else:  # torch's own kernel, which is the faster one there, has no second gradient, and says so
        with pytest.raises(RuntimeError, match="not implemented"):
            twice(parts[0].detach())


def test_scores_are_not_rounded_inside_an_autocast_either() -> None:
    parts, dy = heads((2, 3, 65, 64), 8.0), torch.randn(2, 3, 65, 64).bfloat16()
    plain = gradients(HalfOnCpu.apply, parts, dy)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(HalfOnCpu.apply, parts, dy)
    assert all(map(torch.equal, plain, inside))


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="for CPUs with units for bfloat16 only")
def test_it_is_for_training_in_bfloat16_with_few_tokens() -> None:
    q, k, v = heads((1, 2, 9, 8))
    assert half_trained_on_cpu(q, k) and attend(q, k, v).grad_fn is not None
    assert "HalfOnCpu" in type(attend(q, k, v).grad_fn).__name__
    assert "HalfOnCpu" not in type(attend(q, k, v, dropout=0.5).grad_fn).__name__
    bias = torch.zeros(1, 2, 9, 9, dtype=torch.bfloat16)
    assert "HalfOnCpu" not in type(attend(q, k, v, bias).grad_fn).__name__
    with torch.no_grad():
        assert not half_trained_on_cpu(q, k)
    assert not half_trained_on_cpu(q.detach(), k) and not half_trained_on_cpu(q.float(), k.float())
    assert not half_trained_on_cpu(q, k.float())
    few, many = (heads((1, 1, tokens, 8))[0] for tokens in (767, 768))
    assert half_trained_on_cpu(few, few) and not half_trained_on_cpu(many, many)
    assert not half_trained_on_cpu(q, many)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_model_holds_torchs_kernel() -> None:
    traced = torch.jit.trace(attend, tuple(heads((1, 2, 9, 8))), check_trace=False)
    assert "scaled_dot_product_attention" in str(traced.graph) and "HalfOnCpu" not in str(traced.graph)
