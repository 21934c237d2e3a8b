"""Optimisers, and which parameters decay."""

import torch
from torch import nn

# Decay only what is a matrix or a kernel; biases, norms, tokens and positions are left alone (big_vision's `.*/kernel$`).
_NEVER_DECAYED = ("cls", "registers", "pos.", "map.probe")


def decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.startswith(_NEVER_DECAYED) and not name.endswith("attn.relative")


def adamw(model: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW with decoupled decay in the paper's units."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter)].append(parameter)
    settings = [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(settings, lr=lr, betas=betas)
