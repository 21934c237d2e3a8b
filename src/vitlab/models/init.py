"""The official initial values (the authors' released flax code), for every parameter of every model.

Owns numbers and their source. A test fills every parameter with NaN first, so that none can be forgotten.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from vitlab.models.resnet import BiT, PostActUnit, StdConv
from vitlab.models.vit import Attention, Block, MapHead, Mlp, Positions, ViT

# A normal cut off at two sigmas has this standard deviation; flax divides by it to keep the variance asked for.
_TRUNCATED_STD = 0.87962566103423978
_POSITION_STD = 0.02
_MLP_BIAS_STD = 1e-6
_REGISTER_STD = 1e-6  # DINOv2


@torch.no_grad()
def initialise(model: nn.Module, generator: Generator | None = None) -> None:
    """Fills every parameter of `model` in place. The same generator state gives the same bits."""
    for module in model.modules():
        for rule, kind in _RULES:
            if isinstance(module, kind):
                rule(module, generator)
                break
    # What stands above is general; these two rules deliberately start a part at zero, and so come last.
    for module in model.modules():
        if isinstance(module, PostActUnit):
            nn.init.zeros_(module.norm3.weight)  # each hybrid unit starts as its shortcut
    if isinstance(model, ViT | BiT) and model.head is not None:
        nn.init.zeros_(model.head.weight)  # paper section 3.2
        nn.init.zeros_(model.head.bias)


def _xavier(weight: Tensor, fan_in: int, fan_out: int, generator: Generator | None) -> None:
    bound = math.sqrt(6 / (fan_in + fan_out))
    nn.init.uniform_(weight, -bound, bound, generator=generator)


def _lecun(weight: Tensor, generator: Generator | None) -> None:
    std = math.sqrt(1 / weight[0].numel()) / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)


def _dense(linear: nn.Linear, generator: Generator | None, parts: int = 1, bias_std: float = 0.0) -> None:
    """Xavier-uniform on each of the stacked square matrices by itself: a fused qkv must not see a fan-out of 3D."""
    rows = linear.out_features // parts
    for start in range(0, linear.out_features, rows):
        _xavier(linear.weight[start : start + rows], linear.in_features, rows, generator)
    nn.init.normal_(linear.bias, std=bias_std, generator=generator) if bias_std else nn.init.zeros_(linear.bias)


def _attention(attention: Attention, generator: Generator | None) -> None:
    _dense(attention.qkv, generator, parts=3)
    _dense(attention.proj, generator)
    if attention.relative is not None:
        nn.init.normal_(attention.relative, std=_POSITION_STD, generator=generator)


def _mlp(mlp: Mlp, generator: Generator | None) -> None:
    _dense(mlp.fc1, generator, bias_std=_MLP_BIAS_STD)
    _dense(mlp.fc2, generator, bias_std=_MLP_BIAS_STD)


def _block(block: Block, _: Generator | None) -> None:
    for scale in (block.scale1, block.scale2):
        if scale is not None and block.spec.layer_scale is not None:
            nn.init.constant_(scale, block.spec.layer_scale)


def _positions(positions: Positions, generator: Generator | None) -> None:
    for table in positions.parameters():
        nn.init.normal_(table, std=_POSITION_STD, generator=generator)


def _map_head(head: MapHead, generator: Generator | None) -> None:
    _xavier(head.probe, 1, head.probe.shape[-1], generator)
    _dense(head.q, generator)
    _dense(head.kv, generator, parts=2)
    _dense(head.proj, generator)


def _vit(vit: ViT, generator: Generator | None) -> None:
    _lecun(vit.embed.weight, generator)
    assert vit.embed.bias is not None
    nn.init.zeros_(vit.embed.bias)
    if vit.cls is not None:
        nn.init.zeros_(vit.cls)
    if vit.registers is not None:
        nn.init.normal_(vit.registers, std=_REGISTER_STD, generator=generator)
    if vit.pre_logits is not None:
        _lecun(vit.pre_logits.weight, generator)
        nn.init.zeros_(vit.pre_logits.bias)


def _conv(conv: StdConv, generator: Generator | None) -> None:
    _lecun(conv.weight, generator)


def _norm(norm: nn.LayerNorm | nn.GroupNorm, _: Generator | None) -> None:
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)


_RULES: tuple[tuple[Callable[..., None], type[nn.Module] | tuple[type[nn.Module], ...]], ...] = (
    (_attention, Attention),
    (_mlp, Mlp),
    (_block, Block),
    (_positions, Positions),
    (_map_head, MapHead),
    (_vit, ViT),
    (_conv, StdConv),
    (_norm, (nn.LayerNorm, nn.GroupNorm)),
)
