"""Parameter-free formulas: attention, some of the patches, positions, padding, standardisation.

Owns formulas only: no parameters, no devices, no I/O.
Letters: B batch, C channels, Y X rows and columns, T tokens, D width, H heads, Dh head width, N patches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.models.cpu_attention import HalfOnCpu, half_trained_on_cpu
from vitlab.models.spec import GridResize, Pair, Standardisation

# --- attention --------------------------------------------------------------------------------------------------------


def attend(
    q_BHTDh: Tensor, k_BHTDh: Tensor, v_BHTDh: Tensor, bias_BHTT: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Eq. 6-7 through the fused kernel, which never holds all weights."""
    if bias_BHTT is None and not dropout and half_trained_on_cpu(q_BHTDh, k_BHTDh):
        return HalfOnCpu.apply(q_BHTDh, k_BHTDh, v_BHTDh)
    return F.scaled_dot_product_attention(q_BHTDh, k_BHTDh, v_BHTDh, attn_mask=bias_BHTT, dropout_p=dropout)


def attention_weights(q_BHTDh: Tensor, k_BHTDh: Tensor, bias_BHTT: Tensor | None = None) -> Tensor:
    """The softmax matrix that `attend` applies.

    Computed in float32 whatever the inputs are: rows must sum to 1 for rollout, and bfloat16 rows do not.
    """
    scale = 1 / math.sqrt(q_BHTDh.shape[-1])
    logits_BHTT = q_BHTDh.float() @ k_BHTDh.float().mT * scale
    if bias_BHTT is not None:
        logits_BHTT = logits_BHTT + bias_BHTT.float()
    return logits_BHTT.softmax(dim=-1)


def relative_logits(q_BHTDh: Tensor, table_RDh: Tensor) -> Tensor:
    """Table 8's relative positions: scaled q times a learned vector per offset."""
    num_tokens = q_BHTDh.shape[2]
    scores_BHTR = q_BHTDh @ table_RDh.mT * (1 / math.sqrt(q_BHTDh.shape[-1]))
    position_T = torch.arange(num_tokens, device=q_BHTDh.device)
    offset_TT = position_T[:, None] - position_T[None, :] + num_tokens - 1
    return scores_BHTR.gather(-1, offset_TT.expand(*scores_BHTR.shape[:2], -1, -1))


def by_offset(table_CR: Tensor, length: int) -> Tensor:
    """A learned vector for every pair of places on a line, [C, L, L]: of the offset from the second to the first."""
    place_L = torch.arange(length, device=table_CR.device)
    offset_LL = place_L[:, None] - place_L[None, :] + length - 1
    return table_CR.index_select(1, offset_LL.flatten()).unflatten(1, (length, length))


def position_sensitive_logits(q_SHQL: Tensor, k_SHQL: Tensor, rq_QLL: Tensor, rk_QLL: Tensor) -> Tensor:
    """Axial-DeepLab's three kinds of logits, one after the other, [S, 3H, L, L]: q·k, q·r_q and k·r_k.

    The vectors of the query go by the offset from key to query, those of the key by the one from query to key.
    """
    lines = q_SHQL.shape[:2]
    content_SHLL = q_SHQL.mT @ k_SHQL
    # One product per place, of all lines at once: the vectors belong to places and not to images.
    of_query_LnL = q_SHQL.permute(3, 0, 1, 2).flatten(1, 2) @ rq_QLL.transpose(0, 1)
    of_key_LnL = k_SHQL.permute(3, 0, 1, 2).flatten(1, 2) @ rk_QLL.transpose(0, 1)
    query_SHLL = of_query_LnL.unflatten(1, lines).permute(1, 2, 0, 3)
    key_SHLL = of_key_LnL.unflatten(1, lines).permute(1, 2, 3, 0)
    return torch.cat([content_SHLL, query_SHLL, key_SHLL], dim=1)


def position_sensitive_values(weights_SHLL: Tensor, v_SHVL: Tensor, rv_VLL: Tensor) -> Tensor:
    """What the weights gather of the values and of the vectors by offset, beside each other, [S, H, V, 2, L]."""
    lines = weights_SHLL.shape[:2]
    content_SHVL = v_SHVL @ weights_SHLL.mT
    of_value_LnV = weights_SHLL.permute(2, 0, 1, 3).flatten(1, 2) @ rv_VLL.permute(1, 2, 0)
    return torch.stack([content_SHVL, of_value_LnV.unflatten(1, lines).permute(1, 2, 3, 0)], dim=3)


def fold_axis(x_BTD: Tensor, grid: Pair, axis: int) -> Tensor:
    """Tokens on a grid as one sequence per row (`axis` 0) or column (`axis` 1)."""
    batch, _, width = x_BTD.shape
    x_BYXD = x_BTD.reshape(batch, *grid, width)
    return (x_BYXD if axis == 0 else x_BYXD.transpose(1, 2)).reshape(-1, grid[1 - axis], width)


def unfold_axis(x_STD: Tensor, grid: Pair, axis: int) -> Tensor:
    """The inverse of `fold_axis`."""
    width = x_STD.shape[-1]
    x_BSTD = x_STD.reshape(-1, grid[axis], grid[1 - axis], width)
    return (x_BSTD if axis == 0 else x_BSTD.transpose(1, 2)).reshape(-1, grid[0] * grid[1], width)


def unfold_weights(weights_SHLL: Tensor, grid: Pair, axis: int, queries: Sequence[int]) -> Tensor:
    """Weights within each line of `fold_axis` as a matrix of all tokens, [B, H, Q, N], zero between lines."""
    rows, cols = grid
    token_Q = torch.tensor(queries, device=weights_SHLL.device)
    place_L = torch.arange(grid[1 - axis], device=weights_SHLL.device)
    if axis == 0:
        line_Q, within_Q, keys_QL = token_Q // cols, token_Q % cols, (token_Q // cols * cols)[:, None] + place_L
    else:
        line_Q, within_Q, keys_QL = token_Q % cols, token_Q // cols, (token_Q % cols)[:, None] + place_L * cols
    lines_BSHLL = weights_SHLL.unflatten(0, (-1, grid[axis]))
    weights_BHQL = lines_BSHLL[:, line_Q, :, within_Q].permute(1, 2, 0, 3)  # torch puts the indexed axis first
    zeros_BHQN = weights_BHQL.new_zeros(*weights_BHQL.shape[:3], rows * cols)
    return zeros_BHQN.scatter(-1, keys_QL.expand_as(weights_BHQL), weights_BHQL)


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Stochastic depth: drop the branch of some images (the first axis), and rescale the others."""
    if rate == 0:
        return x
    kept_B = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= rate
    return x * kept_B.to(x.dtype) / (1 - rate)


# --- some of the patches ---------------------------------------------------------------------------------------------


def gather_tokens(x_BTD: Tensor, index_BN: Tensor) -> Tensor:
    """The tokens of these numbers, another choice for each image: [B, N, D]."""
    return x_BTD.gather(1, index_BN[:, :, None].expand(-1, -1, x_BTD.shape[2]))


class KeptTokens(torch.autograd.Function):
    """`gather_tokens` of numbers that occur once for an image.

    The gradient is a gather as well. torch's own adds up what may fall on one place, and a GPU that is to give the same bits
    every time sorts all numbers for that.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BTD: Tensor, index_BN: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_tokens(x_BTD, index_BN)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BTD, index_BN = inputs
        ctx.save_for_backward(index_BN)
        ctx.tokens = x_BTD.shape[1]

    @staticmethod
    def backward(ctx: Any, dy_BND: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index_BN,) = ctx.saved_tensors
        batch, kept, width = dy_BND.shape
        nowhere_BT = index_BN.new_full((batch, ctx.tokens), kept)  # the row of zeros, for tokens that were dropped
        place_BT = nowhere_BT.scatter(1, index_BN, torch.arange(kept, device=index_BN.device).expand_as(index_BN))
        return gather_tokens(torch.cat([dy_BND, dy_BND.new_zeros(batch, 1, width)], dim=1), place_BT), None


def random_order(x_BND: Tensor) -> Tensor:
    """The numbers of all patches in random order, another for each image, [B, N]."""
    return torch.rand(x_BND.shape[:2], device=x_BND.device).argsort(dim=1)


# --- positions --------------------------------------------------------------------------------------------------------


class GridInterpolation(NamedTuple):
    """The arguments of `F.interpolate` when positions are resized to another grid."""

    mode: str
    align_corners: bool = False
    antialias: bool = False
    cells_more: float = 0.0  # asked for beyond the new grid's rows and columns


GRID_RESIZES: dict[GridResize, GridInterpolation] = {
    "corner-bilinear": GridInterpolation("bilinear", align_corners=True),
    "bilinear": GridInterpolation("bilinear"),
    "bicubic": GridInterpolation("bicubic"),
    "bicubic-antialias": GridInterpolation("bicubic", antialias=True),
    "bicubic-offset": GridInterpolation("bicubic", cells_more=0.1),
}


def resize_grid(pos_LND: Tensor, old: Pair, new: Pair, how: GridResize) -> Tensor:
    """Resample learned positions to another patch grid, without the class slot.

    Fine-tuning at a higher resolution keeps the patch size, so the sequence grows and the old table no longer fits (paper
    section 3.2). `corner-bilinear` is what the authors ran, `scipy.ndimage.zoom(order=1)`, which pins the corners. timm and
    transformers resample differently, and the difference is as large as the embedding itself, so the rule is in the spec.
    `bicubic-offset` is DINOv2's, where a tenth of a cell too much is asked for and torch rounds the number of cells down.
    """
    if old == new:
        return pos_LND
    if pos_LND.shape[1] != old[0] * old[1]:
        raise ValueError(f"{pos_LND.shape[1]} positions do not fill a {old[0]}x{old[1]} grid")
    precise_LND = pos_LND if pos_LND.dtype == torch.float64 else pos_LND.float()  # half types lose what this computes
    grid_LDyx = precise_LND.reshape(pos_LND.shape[0], *old, -1).permute(0, 3, 1, 2)
    rule = GRID_RESIZES[how]
    more = rule.cells_more
    scale = [(cells + more) / before for cells, before in zip(new, old, strict=True)] if more else None
    out_LDyx = F.interpolate(
        grid_LDyx,
        size=None if scale else new,
        scale_factor=scale,
        mode=rule.mode,
        align_corners=rule.align_corners,
        antialias=rule.antialias,
    )
    return out_LDyx.permute(0, 2, 3, 1).reshape(pos_LND.shape[0], new[0] * new[1], -1).to(pos_LND.dtype)


def resize_line(pos_LND: Tensor, new: int, how: GridResize) -> Tensor:
    """The same along one axis, for the row and column tables of learned2d positions."""
    return resize_grid(pos_LND, (pos_LND.shape[1], 1), (new, 1), how)


def sincos2d(grid: Pair, width: int, device: torch.device) -> Tensor:
    """Fixed positions of big_vision, [1, N, D]: sines and cosines, columns first."""
    quarter = width // 4
    omega_Q = 1 / 10_000 ** (torch.arange(quarter, device=device, dtype=torch.float32) / max(1, quarter - 1))
    row_N = torch.arange(grid[0], device=device, dtype=torch.float32).repeat_interleave(grid[1])
    col_N = torch.arange(grid[1], device=device, dtype=torch.float32).repeat(grid[0])
    x_NQ, y_NQ = col_N[:, None] * omega_Q, row_N[:, None] * omega_Q
    return torch.cat([x_NQ.sin(), x_NQ.cos(), y_NQ.sin(), y_NQ.cos()], dim=1)[None]


# --- convolutions -----------------------------------------------------------------------------------------------------


def _standardize_std_eps(weight_OIYX: Tensor, eps: float) -> Tensor:
    variance, mean = torch.var_mean(weight_OIYX, dim=(1, 2, 3), keepdim=True, correction=0)
    return (weight_OIYX - mean) / (variance.sqrt() + eps)


def _standardize_var_eps(weight_OIYX: Tensor, eps: float) -> Tensor:
    """The formula of a layer norm without gain, which torch has as one kernel."""
    return F.layer_norm(weight_OIYX, weight_OIYX.shape[1:], eps=eps)


# Weight standardisation per output channel, with the population variance. The official hybrids divide by (std + eps), BiT and
# timm by sqrt(var + eps). The results differ, so the rule is data.
STANDARDISATIONS: dict[Standardisation, Callable[[Tensor, float], Tensor]] = {
    "std-eps": _standardize_std_eps,
    "var-eps": _standardize_var_eps,
}


def pad_same(x_BCYX: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad as TensorFlow's and flax's SAME: the odd pixel goes right and bottom."""

    def before_after(size: int) -> Pair:
        total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        return total // 2, total - total // 2

    return F.pad(x_BCYX, (*before_after(x_BCYX.shape[3]), *before_after(x_BCYX.shape[2])), value=value)
