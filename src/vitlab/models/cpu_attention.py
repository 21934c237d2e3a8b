"""Attention in bfloat16 on a CPU, with a backward pass of whole matrix products.

The forward pass is torch's fused kernel, to the bit. Its backward kernel multiplies in small tiles, which a CPU with units for
bfloat16 does slower than whole matrices: docs/results/cpu-attention.md has the times of both, and their errors.
Letters: B batch, H heads, T tokens, D width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_TOKENS = 767  # from 768 on torch takes larger tiles, and is the faster one
_TOGETHER = 2**19  # attention weights of one thread at once, 2 MB: as fast as any from 2**18 to 2**20, or faster


def half_trained_on_cpu(q_BHTD: Tensor, k_BHTD: Tensor) -> bool:
    """Whether `HalfOnCpu` can take torch's place, and is faster."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False  # what is recorded for later is recorded as torch's kernel, for sequences of any length
    trained = torch.is_grad_enabled() and q_BHTD.requires_grad
    half = q_BHTD.device.type == "cpu" and q_BHTD.dtype == k_BHTD.dtype == torch.bfloat16
    return trained and half and max(q_BHTD.shape[2], k_BHTD.shape[2]) <= _MOST_TOKENS and _has_units()


def _has_units() -> bool:
    """Whether the CPU multiplies bfloat16 itself; elsewhere torch is 1.3x faster."""
    return torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]


class HalfOnCpu(torch.autograd.Function):
    """`F.scaled_dot_product_attention(q, k, v)` that can be differentiated twice."""

    generate_vmap_rule = True  # for torch.func: gradients of single images, Jacobians

    @staticmethod
    def forward(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy_BHTD: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BHTD, k_BHTD, v_BHTD = ctx.saved_tensors
        heads, weights = q_BHTD.shape[1], q_BHTD.shape[2] * k_BHTD.shape[2]
        together = max(1, torch.get_num_threads() * _TOGETHER // max(1, weights))

        def of_images(*parts: Tensor) -> tuple[Tensor, ...]:
            return _split_up(_gradients, min(heads, together), 1, parts)

        with torch.autocast("cpu", enabled=False):
            return _split_up(of_images, max(1, together // heads), 0, (q_BHTD, k_BHTD, v_BHTD, dy_BHTD))


def _split_up(
    function: Callable[..., tuple[Tensor, ...]], size: int, dim: int, parts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """What `function` makes of `size` images or heads at a time, put together again."""
    results = [function(*few) for few in zip(*(part.split(size, dim) for part in parts), strict=True)]
    return results[0] if len(results) == 1 else tuple(torch.cat(few, dim) for few in zip(*results, strict=True))


def _gradients(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, half = q.shape[-1] ** -0.5, dy.dtype
    # The scores in float32, as the forward pass had them: rounded to bfloat16, they double the gradients' error.
    weights = ((q.float() * scale) @ k.float().mT).softmax(dim=-1)
    dv = weights.to(half).mT @ dy
    dweights = (dy @ v.mT).float()
    dscores = torch._softmax_backward_data(dweights, weights, -1, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    dscores = dscores.mul_(scale).to(half)
    return dscores @ k, dscores.mT @ q, dv
