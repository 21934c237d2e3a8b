"""A linear classifier on frozen features, as good as it gets: logistic regression by L-BFGS, its l2 chosen on held-out images.

Owns the fit, which training and evaluation share, and the search for l2. The problem is convex: nothing is drawn, and every
start ends in the same place. Loss and gradient are sums over chunks, so that features need not fit into memory.
Letters: N images, D features, K classes, E = D + 1.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.core.runtime import eager

# Of the mean loss + l2/2·|W|², on standardised features. Strongest first: each start is the solution of the one before it.
DECADES = tuple(10.0**e for e in (1, 0, -1, -2, -3, -4, -5, -6))
_HALVINGS = 2  # after the decades, steps of a half and of a quarter of one around the best
_STEPS = 1000  # of L-BFGS at most; CLIP's number
_MEMORY = 50  # past gradients; on digits, a third of the passes that the usual 10 need
_FLAT = 1e-8  # largest slope at which a fit counts as finished: the loss is then within 1e-6 of the least, also at l2 = 1e-5
NEARLY_FLAT = 1e-6  # enough to compare strengths by the images they classify correctly; scikit-learn stops at 1e-4
_STILL = 1e-15  # smallest change of the loss worth another step; float64 tells no smaller ones apart
_STD_FLOOR = 1e-6  # a feature that never changes stays 0
_CPU_BYTES = 2**31  # of features kept as float64; what is larger is converted in every pass


Row = dict[str, float]  # of one l2: how well it does on held-out images, `top1`, `loss` and what else the caller keeps
Losses = Callable[[Tensor, Tensor], Tensor]  # scores [N, K] and targets -> the loss of each image, in float64


def cross_entropy(scores_NK: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(scores_NK, labels_N, reduction="none")


class Head(NamedTuple):
    """Takes plain features; float64."""

    weight_KD: Tensor
    bias_K: Tensor

    def scores(self, features_ND: Tensor) -> Tensor:
        return features_ND.to(self.weight_KD) @ self.weight_KD.T + self.bias_K


@dataclasses.dataclass(frozen=True)
class Problem:
    """Features and labels, or zeros and ones [N, K] where an image may have several, ready for many fits."""

    chunks: Sequence[Tensor]
    labels: Sequence[Tensor]
    num_classes: int
    mean_D: Tensor
    std_D: Tensor
    losses: Losses = cross_entropy
    ready: bool = False  # whether the chunks are standardised, in float64 and on the device

    def standard(self, chunk_ND: Tensor) -> Tensor:
        """The chunk as the fit sees it."""
        return chunk_ND if self.ready else (chunk_ND.to(self.mean_D) - self.mean_D) / self.std_D


def pose(
    chunks: Sequence[Tensor],
    labels_N: Tensor,
    num_classes: int,
    device: torch.device | None = None,
    losses: Losses = cross_entropy,
) -> Problem:
    """The problem of telling `num_classes` classes by these features, on `device`."""
    if labels_N.ndim == 1 and (num_classes < 2 or len(labels_N.unique()) < 2):
        raise UsageError("there are images of one class only, and at least two are needed")
    where = device if device is not None and device.type != "mps" else torch.device("cpu")  # MPS has no float64
    total = sum(map(len, chunks))
    sum_D = torch.stack([chunk.to(where, torch.float64).sum(dim=0) for chunk in chunks]).sum(dim=0)
    mean_D = sum_D / total
    squares_D = torch.stack([(chunk.to(where, torch.float64) - mean_D).square().sum(dim=0) for chunk in chunks])
    std_D = (squares_D.sum(dim=0) / total).sqrt().clamp_min(_STD_FLOOR)
    labels = list(labels_N.to(where).split([len(chunk) for chunk in chunks]))
    problem = Problem(chunks, labels, num_classes, mean_D, std_D, losses)
    if total * len(mean_D) * mean_D.element_size() > _room(where):
        return problem
    return dataclasses.replace(problem, chunks=[problem.standard(chunk) for chunk in chunks], ready=True)


def _room(device: torch.device) -> int:
    """Half of what a GPU has free: the fit itself needs little."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _CPU_BYTES


def loss_and_slope(problem: Problem, weight_KE: Tensor, l2: float) -> tuple[Tensor, Tensor]:
    """Mean loss + l2/2·|W|², and its gradient; the last column of the weights is the bias, which is left free."""
    loss, slope_KE, total = weight_KE.new_zeros(()), torch.zeros_like(weight_KE), 0
    for chunk, labels_N in zip(problem.chunks, problem.labels, strict=True):
        x_ND = problem.standard(chunk)
        scores_NK = (x_ND @ weight_KE[:, :-1].T + weight_KE[:, -1]).detach().requires_grad_()
        with torch.enable_grad():
            part = problem.losses(scores_NK, labels_N).sum()
        (error_NK,) = torch.autograd.grad(part, scores_NK)
        loss = loss + part.detach()
        slope_KE[:, :-1] += error_NK.T @ x_ND
        slope_KE[:, -1] += error_NK.sum(dim=0)
        total += len(labels_N)
    slope_KE /= total
    slope_KE[:, :-1] += l2 * weight_KE[:, :-1]
    return loss / total + l2 / 2 * weight_KE[:, :-1].square().sum(), slope_KE


def fit(problem: Problem, l2: float, start_KE: Tensor | None = None, flat: float = _FLAT) -> Tensor:
    """The weights [K, E] with the least loss, for standardised features; `flat` is the largest slope left."""
    shape = (problem.num_classes, len(problem.mean_D) + 1)
    weight_KE = (problem.mean_D.new_zeros(shape) if start_KE is None else start_KE.clone()).requires_grad_()
    solver = eager(torch.optim.LBFGS)(
        [weight_KE],
        max_iter=_STEPS,
        history_size=_MEMORY,
        tolerance_grad=flat,
        tolerance_change=_STILL,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        with torch.no_grad():
            loss, weight_KE.grad = loss_and_slope(problem, weight_KE, l2)
        return loss

    solver.step(closure)  # pyright: ignore[reportArgumentType]
    return weight_KE.detach()


def plain_head(problem: Problem, weight_KE: Tensor) -> Head:
    """The same answers from features as they come."""
    plain_KD = weight_KE[:, :-1] / problem.std_D
    return Head(plain_KD, weight_KE[:, -1] - plain_KD @ problem.mean_D)


def judge(scores: Callable[[Tensor], Tensor], chunks: Sequence[Tensor], labels_N: Tensor) -> tuple[int, float]:
    """How many of all chunks' images have their label scored highest, and the mean cross-entropy."""
    right, loss, first = 0, 0.0, 0
    for chunk_ND in chunks:
        scores_NK = scores(chunk_ND)
        wanted_N = labels_N[first : first + len(chunk_ND)].to(scores_NK.device)
        first += len(chunk_ND)
        right += int((scores_NK.argmax(dim=1) == wanted_N).sum())
        loss += float(F.cross_entropy(scores_NK, wanted_N, reduction="sum"))
    return right, loss / first


def search(
    problems: Sequence[Problem],
    trial: Callable[[float, Sequence[Head]], Row],
    choose: Callable[[Sequence[Row]], Row],
    flat: float,
) -> tuple[list[Row], Row]:
    """Fit a head to each problem, one per fold, for every decade of l2, then finer around the chosen one so far.

    `trial` judges the heads of one l2 together. Each fit starts at the solution of the nearest l2 before it. Returns the row
    of every trial, strongest l2 first, and the chosen one.
    """
    rows: list[Row] = []
    solutions: dict[float, list[Tensor]] = {}

    def attempt(l2: float, nearest: float | None) -> None:
        starts = [None] * len(problems) if nearest is None else solutions[nearest]
        solutions[l2] = [fit(problem, l2, start, flat) for problem, start in zip(problems, starts, strict=True)]
        rows.append(trial(l2, [plain_head(problem, w) for problem, w in zip(problems, solutions[l2], strict=True)]))

    last: float | None = None
    for l2 in DECADES:
        attempt(l2, last)
        last = l2
    for halving in range(1, _HALVINGS + 1):
        middle = choose(rows)["l2"]
        for step in (2.0**-halving, -(2.0**-halving)):
            l2 = 10.0 ** (math.log10(middle) + step)
            if DECADES[-1] <= l2 <= DECADES[0]:
                attempt(l2, middle)
    return sorted(rows, key=lambda row: -row["l2"]), choose(rows)


TRIALS = len(DECADES) + 2 * _HALVINGS  # at most


def most_right(rows: Sequence[Row]) -> Row:
    """The trial with most right; of equal ones the one with the least loss."""
    return max(rows, key=lambda row: (row["top1"], -row["loss"]))
