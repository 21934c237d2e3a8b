"""The name of a set of weights: a hash that depends on nothing but the numbers."""

import hashlib

import torch
from torch import nn


def hash_weights(model: nn.Module, *, without: str | None = None) -> str:
    """SHA-256 of all weights by name, independent of the file they are in; `without` leaves names that begin so out."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if without is not None and name.startswith(without):
            continue
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()
