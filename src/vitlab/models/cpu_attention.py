"""Attention in bfloat16 on a CPU, with a backward pass of whole matrix products.

The forward pass is torch's fused kernel, to the bit. Its backward kernel multiplies in small tiles, which a CPU with units for
bfloat16 does far slower than whole matrices: docs/results/cpu-attention.md has the times of both, and their errors.
Letters: B batch, H heads, T tokens, D width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_TOKENS = 512  # beyond, the matrices leave the caches, and torch's tiles win
_TOGETHER = 2**19  # numbers of attention weights at once: 2 MB, which a core's own cache holds


def half_trained_on_cpu(q_BHTD: Tensor) -> bool:
    trained = torch.is_grad_enabled() and q_BHTD.requires_grad and not torch.compiler.is_compiling()
    here = q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16
    return trained and here and q_BHTD.shape[2] <= _MOST_TOKENS


class HalfOnCpu(torch.autograd.Function):
    """As `F.scaled_dot_product_attention(q, k, v)`."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q_BHTD, k_BHTD, v_BHTD)
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BHTD, k_BHTD, v_BHTD = ctx.saved_tensors
        scale, half = q_BHTD.shape[-1] ** -0.5, dy_BHTD.dtype
        dq, dk, dv = torch.empty_like(q_BHTD), torch.empty_like(k_BHTD), torch.empty_like(v_BHTD)
        images = max(1, _TOGETHER // (q_BHTD.shape[1] * q_BHTD.shape[2] ** 2))
        with torch.autocast("cpu", enabled=False):
            for first in range(0, len(q_BHTD), images):
                part = slice(first, first + images)
                q, k, v, dy = q_BHTD[part], k_BHTD[part], v_BHTD[part], dy_BHTD[part]
                # The scores in float32, as the forward pass had them: rounded to bfloat16, they double the gradients' error.
                weights = ((q.float() * scale) @ k.float().mT).softmax(dim=-1)
                dv[part] = weights.to(half).mT @ dy
                dweights = (dy @ v.mT).float()
                dweights -= (dweights * weights).sum(dim=-1, keepdim=True)
                dscores = (dweights * weights).mul_(scale).to(half)
                dq[part], dk[part] = dscores @ k, dscores.mT @ q
        return dq, dk, dv
