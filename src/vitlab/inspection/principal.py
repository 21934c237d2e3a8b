"""Principal components of many vectors, in bounded memory and with fixed signs.

Letters: N vectors, D their length, K components.
"""

import torch
from torch import Tensor

_ROWS = 8192  # vectors that are float64 at a time: 64 MiB at width 1024
_NOISE = 1e-12  # of the largest variance: below it, a direction is rounding (a singular value of a millionth)
_CONSTANT = 1e-24  # of the squared mean: below it, all variance is what subtracting the mean left in float64


def precise_device(x: Tensor) -> torch.device:
    """Where `x` may become float64: on its own device, but for MPS, which has none."""
    return torch.device("cpu") if x.device.type == "mps" else x.device


def principal_axes(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors [K, D] and the variance along each [K], strongest first, float64; K is the rank after centring.

    By the covariance or the Gram matrix, whichever is smaller. Signs are arbitrary in theory; here the entry with the largest
    magnitude is positive, so that two calls give the same picture.
    """
    where, count = precise_device(x_ND), len(x_ND)
    mean_D = _mean(x_ND, where)
    if count < x_ND.shape[1]:
        centred_ND = x_ND.to(where, torch.float64) - mean_D
        variance_N, vectors_NN = torch.linalg.eigh(centred_ND @ centred_ND.T / count)
        variance_K, vectors_NK = _strongest(variance_N, vectors_NN, mean_D)
        axes_KD = torch.nn.functional.normalize(vectors_NK.T @ centred_ND, dim=1)
    else:
        covariance_DD = torch.zeros(x_ND.shape[1], x_ND.shape[1], dtype=torch.float64, device=where)
        for part_ND in x_ND.split(_ROWS):
            centred_ND = part_ND.to(where, torch.float64) - mean_D
            covariance_DD += centred_ND.T @ centred_ND / count
        variance_D, vectors_DD = torch.linalg.eigh(covariance_DD)
        variance_K, vectors_DK = _strongest(variance_D, vectors_DD, mean_D)
        axes_KD = vectors_DK.T
    largest_K1 = axes_KD.gather(1, axes_KD.abs().argmax(dim=1, keepdim=True))
    return axes_KD * largest_K1.sign(), variance_K


def _mean(x_ND: Tensor, where: torch.device) -> Tensor:
    total_D = torch.zeros(x_ND.shape[1], dtype=torch.float64, device=where)
    for part_ND in x_ND.split(_ROWS):
        total_D += part_ND.to(where, torch.float64).sum(dim=0)
    return total_D / len(x_ND)


def _strongest(variance: Tensor, vectors: Tensor, mean_D: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues above rounding with their columns, largest first (`eigh` has them smallest first)."""
    floor = torch.maximum(_NOISE * variance[-1], _CONSTANT * mean_D.square().sum())
    kept = variance > floor
    return variance[kept].flip(0), vectors[:, kept].flip(1)
