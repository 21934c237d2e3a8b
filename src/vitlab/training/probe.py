"""A linear head on frozen features: the cheapest way to a classifier, and for few images often the best.

Owns the fit. Features are computed once, by the caller; the fit is convex, so it needs no learning rate, and finds an
ordinary head. Letters: N images, D features, K classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitlab.training.objective import Objective, losses

L2_GRID = tuple(10.0**e for e in (-6, -5, -4, -3, -2, -1))  # of the mean loss; wide, because features differ in scale
_STEPS = 200  # of L-BFGS; it stops earlier where nothing changes any more
_MEMORY = 20  # of past gradients


class Head(NamedTuple):
    weight_KD: Tensor
    bias_K: Tensor

    def logits(self, features_ND: Tensor) -> Tensor:
        return features_ND @ self.weight_KD.T + self.bias_K


def fit_head(
    features_ND: Tensor,
    targets: Tensor,
    num_classes: int,
    rule: Objective,
    *,
    l2: float,
    class_weights_K: Tensor | None = None,
) -> Head:
    """Minimises the mean loss + l2·|W|² by L-BFGS from zero, on standardised features; the head takes plain ones.

    The same numbers give the same bits: nothing is drawn.
    """
    mean_D, std_D = features_ND.mean(dim=0), features_ND.std(dim=0).clamp_min(1e-6)
    x_ND = (features_ND - mean_D) / std_D
    weight = torch.zeros(num_classes, x_ND.shape[1], device=x_ND.device, requires_grad=True)
    bias = torch.zeros(num_classes, device=x_ND.device, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=_STEPS, history_size=_MEMORY, line_search_fn="strong_wolfe", tolerance_change=1e-9
    )

    def closure() -> Tensor:
        solver.zero_grad()
        logits_NK = x_ND @ weight.T + bias
        loss = losses(rule, logits_NK, targets, class_weights_K=class_weights_K).mean() + l2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)  # pyright: ignore[reportArgumentType]
    plain_KD = weight.detach() / std_D
    return Head(plain_KD, bias.detach() - plain_KD @ mean_D)
