"""The name of a set of weights: a hash that depends on nothing but the numbers."""

import hashlib

import torch
from torch import nn


def hash_weights(model: nn.Module) -> str:
    """SHA-256 of all weights by name, independent of the file they are in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()
