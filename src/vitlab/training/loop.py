"""The training loop: one function, one update per step, nothing hidden.

Owns the order of one step. Where batches come from, what the loss is and what becomes of the records is the caller's.
Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitlab.core.dist import World
from vitlab.core.errors import VitlabError
from vitlab.core.runtime import mix, seed_noise
from vitlab.data.loader import Batch
from vitlab.training.ema import decay_at, ema_weights, update_ema
from vitlab.training.precision import Precision, autocast, grad_scaler
from vitlab.training.sharding import whole

_NOISE = 2  # keeps dropout's random numbers apart from other uses of the same seed


@dataclasses.dataclass
class TrainState:
    """All that training changes. `model` is the plain one; `forward` may wrap it for several processes or be compiled."""

    model: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    ema: dict[str, Tensor] | None = None  # the moving average of the weights, where one is kept
    scaler: torch.amp.GradScaler | None = None
    step: int = 0  # finished updates


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One line of the log. `step` counts finished updates."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None  # None where it was too large for fp16: the step was skipped
    images_per_second: float
    data_wait_frac: float  # of the time: waiting for a batch and preparing it; of a GPU's time, where there is one
    memory_gb: float
    seconds_left: float = 0.0  # 0 until a pace is known; whoever knows how long the run is fills it in


class NonFinite(VitlabError):
    """Loss or gradient became NaN or infinite; `ids` names the images of the batch that did it."""

    def __init__(self, step: int, loss: float, grad_norm: float, ids: list[int]) -> None:
        super().__init__(
            f"non-finite loss or gradient at step {step} (loss {loss}, gradient norm {grad_norm})",
            hint="No weight was changed by this step. A lower optim.lr or a longer warm-up usually helps.",
        )
        self.step, self.ids = step, ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRule:
    """What decides one update besides the data."""

    prepare: Callable[
        [Batch, int], tuple[Tensor, Tensor]
    ]  # batch, step -> images [B, C, Y, X] and targets, on the device
    losses: Callable[[Tensor, Tensor, Tensor], Tensor]  # images, logits, targets -> one loss per image [B]
    lr_at: Callable[[int], float]
    seed: int
    max_grad_norm: float
    precision: Precision = "fp32"
    micro_batch: int = 0  # images per forward pass and process; 0 for all at once
    ema_decay: float = 0.0
    ema_warmup: bool = True  # see `decay_at`
    # step -> whether the caller then leaves the model and its gradients as they are: the next forward pass has begun
    can_overlap_next_forward: Callable[[int], bool] = lambda _: False


def fit(state: TrainState, batches: Iterable[Batch], rule: StepRule, world: World) -> Generator[StepRecord]:
    """One update per batch, and a record after each, so that the caller shows, stores and may stop.

    A loss or gradient that is not finite stops the run before it touches a weight, in all processes alike.
    """
    state.scaler = state.scaler or grad_scaler(rule.precision, world.device)
    state.forward.train()
    weights = {} if state.ema is None else ema_weights(state.ema, state.model)
    for name, parameter in state.model.named_parameters():
        if not parameter.requires_grad:
            weights.pop(name, None)  # frozen: the mean of -0.0 and itself would be 0.0
    began = time.perf_counter()
    coming = _prefetch(batches, rule, state.step)
    ready, waited, logits_BK = next(coming, None), time.perf_counter() - began, None
    while ready is not None:
        if logits_BK is None:
            _seed(state.step, rule, world)
        lr = rule.lr_at(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        shares = accumulate_gradients(state, ready, rule, world, logits_BK)
        state.scaler.unscale_(state.optimizer)
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), rule.max_grad_norm)
        numbers = torch.stack([*shares, whole(norm)])
        told = numbers.to("cpu", non_blocking=world.device.type == "cuda")  # where it has arrived when `there` has come
        asked, ids_B = _now(world.device), ready.ids
        ready = next(coming, None)  # made while a GPU still works on the last one, whose images may go now
        there = _now(world.device)
        updated, logits_BK = world.size == 1 and _step_skipping_nonfinite(state, numbers), None
        if updated and ready is not None and len(ready.parts) == 1 and rule.can_overlap_next_forward(state.step + 1):
            _seed(state.step + 1, rule, world)
            logits_BK = _logits(state, ready.first[0], rule, world)  # work for a GPU while this step is looked at here
        waited += _seconds(asked, there)  # waits for the device
        *lost, grad_norm = told.tolist()
        loss = world.all_reduce_sum(sum(lost))
        overflow = state.scaler.is_enabled() and not math.isfinite(grad_norm)  # then fp16 skips and lowers its scale
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or overflow):
            raise NonFinite(state.step + 1, loss, grad_norm, world.all_gather(ids_B.to(world.device)).tolist())
        if not updated:
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        if state.ema is not None and not overflow:
            update_ema(state.ema, weights, decay_at(state.step, rule.ema_decay, warmup=rule.ema_warmup))
        now = time.perf_counter()
        yield StepRecord(
            step=state.step,
            loss=loss,
            lr=lr,
            grad_norm=None if overflow else grad_norm,
            images_per_second=len(ids_B) * world.size / (now - began),
            data_wait_frac=waited / (now - began),
            memory_gb=_memory_gb(world.device),
        )
        waited, began = 0.0, now


class PrefetchedBatch(NamedTuple):
    """A batch cut into the parts that go through the model one by one; the first is prepared already."""

    ids: Tensor
    parts: list[Batch]
    first: tuple[Tensor, Tensor]


def _prefetch(batches: Iterable[Batch], rule: StepRule, first_step: int) -> Generator[PrefetchedBatch]:
    for step, batch in enumerate(batches, first_step):
        yield prefetch_batch(batch, rule, step)


def prefetch_batch(batch: Batch, rule: StepRule, step: int) -> PrefetchedBatch:
    parts = split_microbatches(batch, rule.micro_batch)
    return PrefetchedBatch(batch.ids, parts, rule.prepare(parts[0], step))


def accumulate_gradients(
    state: TrainState, ready: PrefetchedBatch, rule: StepRule, world: World, logits_BK: Tensor | None = None
) -> list[Tensor]:
    """Gradients of the mean loss over the valid images of all processes, however they are cut up.

    `logits_BK` are those of the first part, where they were asked for before. Returns what this process's parts add to the
    loss; a GPU may not have computed it yet.
    """
    assert state.scaler is not None
    parts, shares = ready.parts, list[Tensor]()
    total = max(1.0, world.all_reduce_sum(float(sum(part.valid.sum() for part in parts))))
    for i, part in enumerate(parts):
        # Several processes add their gradients once, after the last part.
        wrapped = isinstance(state.forward, DistributedDataParallel) and i < len(parts) - 1
        apart = state.forward.no_sync() if wrapped else contextlib.nullcontext()  # pyright: ignore[reportCallIssue]
        with apart:
            images_BCYX, targets = rule.prepare(part, state.step) if i else ready.first
            if i or logits_BK is None:
                logits_BK = _logits(state, images_BCYX, rule, world)
            losses_B = rule.losses(images_BCYX, logits_BK, targets)
            loss = torch.where(part.valid.to(losses_B.device, non_blocking=True), losses_B, 0).sum() / total
            # The wrapper takes the mean over processes, where the sum is wanted.
            state.scaler.scale(loss * world.size).backward()
        shares.append(loss.detach())
    return shares


def _seed(step: int, rule: StepRule, world: World) -> None:
    seed_noise(mix(rule.seed, _NOISE, step) + world.rank, world.device)


def _logits(state: TrainState, images_BCYX: Tensor, rule: StepRule, world: World) -> Tensor:
    with autocast(rule.precision, world.device):
        return state.forward(images_BCYX)


def _step_skipping_nonfinite(state: TrainState, numbers: Tensor) -> bool:
    """Sends the update after the gradients, where its kernel itself leaves the weights alone unless all `numbers` are some.

    Then a GPU need not wait until they were looked at here. False where the optimiser cannot do that: only fused ones can.
    """
    assert state.scaler is not None
    if state.scaler.is_enabled() or not all(group.get("fused") for group in state.optimizer.param_groups):
        return False
    # As torch's own GradScaler tells it; left there, it would stop a later update too.
    state.optimizer.found_inf = (~numbers.isfinite().all()).float()  # pyright: ignore[reportAttributeAccessIssue]
    state.optimizer.step()
    del state.optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
    state.optimizer.zero_grad(set_to_none=True)
    return True


def split_microbatches(batch: Batch, size: int) -> list[Batch]:
    if not size or size >= len(batch.ids):
        return [batch]
    return [Batch(*parts) for parts in zip(*(field.split(size) for field in batch), strict=True)]


def _now(device: torch.device) -> float | torch.cuda.Event:
    """The time; on a GPU that of its own queue: when it has done what it was sent so far."""
    if device.type != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record(torch.cuda.current_stream(device))
    return mark


def _seconds(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return first.elapsed_time(last) / 1000
    assert isinstance(first, float) and isinstance(last, float)
    return last - first


def _memory_gb(device: torch.device) -> float:
    if device.type == "cuda":
        # Not by `max_memory_allocated`: one number is wanted, and it sorts all there are.
        counts = torch.cuda.memory.memory_stats_as_nested_dict(device)
        return counts.get("allocated_bytes", {}).get("all", {}).get("peak", 0) / 2**30
    if sys.platform == "win32":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
