"""Initial values of every parameter.

A module with parameters says in `init_weights(generator)` how they start; norms start as the identity. A module that has
`zero_init` starts a part of itself at zero, after everything else. A test fills every parameter with NaN first, so that none
can be forgotten. Sources: the authors' released flax code.
"""

import math

import torch
from torch import Generator, Tensor, nn

# A normal cut off at two sigmas has this standard deviation; flax divides by it to keep the variance asked for.
_TRUNCATED_STD = 0.87962566103423978
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


@torch.no_grad()
def initialise(model: nn.Module, generator: Generator | None = None) -> None:
    """Fill every parameter in place; the same generator state gives the same bits."""
    for module in model.modules():
        if (init_weights := getattr(module, "init_weights", None)) is not None:
            init_weights(generator)
        elif isinstance(module, _NORMS):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                tensor.fill_(name in ("weight", "running_var"))
    for module in model.modules():
        if (zero_init := getattr(module, "zero_init", None)) is not None:
            zero_init()


def xavier(weight: Tensor, fan_in: int, fan_out: int, generator: Generator | None) -> None:
    bound = math.sqrt(6 / (fan_in + fan_out))
    nn.init.uniform_(weight, -bound, bound, generator=generator)


def lecun(layer: nn.Linear | nn.Conv2d, generator: Generator | None) -> None:
    """Truncated normal by fan-in, and a bias of zeros."""
    std = math.sqrt(1 / layer.weight[0].numel()) / _TRUNCATED_STD
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def he(layer: nn.Conv2d, generator: Generator | None) -> None:
    """Normal by fan-out, for a convolution before a ReLU (He et al. 2015)."""
    std = math.sqrt(2 / layer.weight[:, 0].numel())
    nn.init.normal_(layer.weight, std=std, generator=generator)


def dense(linear: nn.Linear, generator: Generator | None, parts: int = 1, bias_std: float = 0.0) -> None:
    """Xavier-uniform on each stacked matrix: a fused qkv has no fan-out of 3D."""
    rows = linear.out_features // parts
    for start in range(0, linear.out_features, rows):
        xavier(linear.weight[start : start + rows], linear.in_features, rows, generator)
    nn.init.normal_(linear.bias, std=bias_std, generator=generator) if bias_std else nn.init.zeros_(linear.bias)
