"""The training loop: one function, one update per step, nothing hidden.

Owns the order of one step. Where batches come from, what the loss is and what becomes of the records is the caller's.
"""

import dataclasses
import time
from collections.abc import Callable, Generator

import torch
from torch import Tensor, nn

from vitlab.core.errors import VitlabError
from vitlab.core.runtime import mix

Batch = tuple[Tensor, Tensor]
_NOISE = 2  # keeps dropout's random numbers apart from other uses of the same seed


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One line of the log. `step` counts finished updates."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    images_per_second: float
    data_wait_frac: float


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_at: Callable[[int], Batch],
    objective: Callable[[Tensor, Tensor], Tensor],
    lr_at: Callable[[int], float],
    *,
    steps: int,
    seed: int,
    max_grad_norm: float,
) -> Generator[StepRecord]:
    """Trains for `steps` updates and yields a record after each, so that the caller shows, stores and may stop.

    A loss or gradient that is not finite stops the run before it touches a weight.
    """
    model.train()
    for step in range(steps):
        started = time.perf_counter()
        images_BCYX, labels_B = batch_at(step)
        loaded = time.perf_counter()
        torch.manual_seed(mix(seed, _NOISE, step))
        lr = lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = objective(model(images_BCYX), labels_B)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        if not (torch.isfinite(loss) and torch.isfinite(grad_norm)):
            raise VitlabError(
                f"training left the numbers at step {step + 1}: loss {loss.item()}, gradient norm {grad_norm.item()}",
                hint="No weight was changed by this step. A lower optim.lr or a larger optim.warmup_frac usually helps.",
            )
        optimizer.step()
        value = loss.item()  # waits for the device, so that the time below is honest
        seconds = time.perf_counter() - started
        yield StepRecord(
            step=step + 1,
            loss=value,
            lr=lr,
            grad_norm=grad_norm.item(),
            images_per_second=len(labels_B) / seconds,
            data_wait_frac=(loaded - started) / seconds,
        )
