"""The paper's few-shot measure: a linear map from a handful of images per class, in closed form (section 4.1).

Ridge regression on targets of -1 and 1, with the constants of the published code (big_vision, fewshot_lsr). Owns the draw, the
fit and the count. Letters: N images, S shots in all, D features, E = D + 1 with the constant one, K classes.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.core.errors import UsageError

L2 = 2.0**10  # big_vision's configs/common_fewshot.py; for standardised features
CONSTANT = 100.0  # the feature that carries the bias: so large that L2 hardly holds it back
STD_FLOOR = 1e-5  # added to each standard deviation, also for features that never change
SEEDS = 3  # the published code's

Form = Literal["auto", "primal", "dual"]


class Ridge(NamedTuple):
    """A fitted map, float64."""

    mean_D: Tensor
    std_D: Tensor
    weight_EK: Tensor

    def scores(self, features_ND: Tensor) -> Tensor:
        x_ND = (features_ND.to(self.mean_D) - self.mean_D) / self.std_D
        return x_ND @ self.weight_EK[:-1] + CONSTANT * self.weight_EK[-1]


def draw_shots(labels_N: Tensor, shots: int, seed: int, classes: Sequence[str]) -> Tensor:
    """`shots` images of every class, [S], the same for the same seed; fewer shots are the first of more.

    One shuffle per class from NumPy's generator, as in the published code: the same labels and seed give the same images.
    """
    if shots < 1:
        raise UsageError(f"few-shot needs at least 1 image per class, not {shots}")
    draw = np.random.default_rng(seed)
    chosen: list[Tensor] = []
    for label, name in enumerate(classes):
        members = draw.permutation(np.flatnonzero(labels_N.numpy() == label))
        if len(members) < shots:
            raise UsageError(
                f"{shots} shots need {shots} training images of every class, and {name} has {len(members)}",
                hint="Ask for fewer shots.",
            )
        chosen.append(torch.from_numpy(members[:shots]))
    return torch.cat(chosen)


def fit_ridge(features_SD: Tensor, labels_S: Tensor, num_classes: int, *, l2: float = L2, form: Form = "auto") -> Ridge:
    """W = (XᵀX + l2 I)⁻¹ XᵀY, or the same as Xᵀ(XXᵀ + l2 I)⁻¹Y, which is less work where images are fewer than features."""
    if num_classes < 2:
        raise UsageError("there is one class only, and at least two are needed")
    x_SD = features_SD.double()
    mean_D, std_D = x_SD.mean(dim=0), x_SD.std(dim=0, correction=0) + STD_FLOOR
    x_SE = torch.nn.functional.pad((x_SD - mean_D) / std_D, (0, 1), value=CONSTANT)
    y_SK = 2.0 * torch.nn.functional.one_hot(labels_S, num_classes).double() - 1.0
    shots, width = x_SE.shape
    if form == "primal" or (form == "auto" and shots >= width):
        weight_EK = _solve(x_SE.T @ x_SE, x_SE.T @ y_SK, l2)
    else:
        weight_EK = x_SE.T @ _solve(x_SE @ x_SE.T, y_SK, l2)
    return Ridge(mean_D, std_D, weight_EK)


def _solve(square: Tensor, right: Tensor, l2: float) -> Tensor:
    """(square + l2 I)⁻¹ right; the matrix is positive definite."""
    regularised = square + l2 * torch.eye(len(square), dtype=square.dtype, device=square.device)
    return torch.cholesky_solve(right, torch.linalg.cholesky(regularised))
