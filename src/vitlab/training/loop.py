"""The training loop: an update for every batch, and a record of each for whoever shows, stores and may stop.

`fit` is the loop, and `take_step` one complete update: forward, loss, backward, clip, finite check, optimiser, EMA. Neither
knows recipes or data sets: `assemble.py` makes state, batches and rule. Letters: B batch, C channels, Y X rows and columns,
K classes.
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
from vitlab.training.ema import decay_at, trained_weights, update_ema
from vitlab.training.optim import remember_update
from vitlab.training.precision import Precision, autocast, grad_scaler
from vitlab.training.running_stats import RunningStats
from vitlab.training.sharding import full_tensor

_NOISE = 2  # keeps dropout's random numbers apart from other uses of the same seed


@dataclasses.dataclass
class TrainState:
    """All that training changes. `model` is the plain one; `forward` may wrap it for several processes or be compiled."""

    model: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    ema: dict[str, Tensor] | None = None  # the moving average of the weights, where one is kept
    ema_sources: dict[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])  # the weights that it follows
    scaler: torch.amp.GradScaler | None = None
    step: int = 0  # finished updates
    running_stats: RunningStats = dataclasses.field(default_factory=RunningStats)  # of batch norm, where there is any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRule:
    """What decides one update besides the data."""

    prepare: Callable[[Batch, int], tuple[Tensor, Tensor]]  # batch, step -> images and targets, on the device
    losses: Callable[[Tensor, Tensor, Tensor], Tensor]  # images, logits, targets -> one loss per image [B]
    lr_at: Callable[[int], float]
    seed: int
    max_grad_norm: float
    precision: Precision = "fp32"
    micro_batch: int = 0  # images per forward pass and process (gradient accumulation); 0 for all at once
    ema_decay: float = 0.0
    ema_warmup: bool = True  # see `decay_at`
    eval_every: int = 1  # steps after which the caller uses the model: before, the next forward pass may begin

    def can_overlap_next_forward(self, step: int) -> bool:
        """Whether the model and its gradients are left as they are after this step."""
        return step % self.eval_every != 0


class NonFinite(VitlabError):
    """Loss or gradient became NaN or infinite; `ids` names the images of the batch that did it."""

    def __init__(self, step: int, loss: float, grad_norm: float, ids: list[int]) -> None:
        super().__init__(
            f"non-finite loss or gradient at step {step} (loss {loss}, gradient norm {grad_norm})",
            hint="No weight was changed by this step. A lower optim.lr or a longer warm-up usually helps.",
        )
        self.step, self.ids = step, ids


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


def fit(state: TrainState, batches: Iterable[Batch], rule: StepRule, world: World) -> Generator[StepRecord]:
    """Take a step for every batch; yield a record after each."""
    state.forward.train()
    state.running_stats = RunningStats(state.model)
    state.ema_sources = {} if state.ema is None else trained_weights(state.model)
    began = time.perf_counter()
    prefetcher = Prefetcher(batches, rule, state.step)
    waited = time.perf_counter() - began
    while prefetcher.current is not None:
        result = take_step(state, prefetcher, rule, world)
        now, waited = time.perf_counter(), waited + result.wait_s
        yield StepRecord(
            step=state.step,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            images_per_second=result.images / (now - began),
            data_wait_frac=waited / (now - began),
            memory_gb=peak_memory(world.device) / 2**30,
        )
        waited, began = 0.0, now


def peak_memory(device: torch.device) -> int:
    """Bytes at most so far: of tensors on a GPU, of the process on a CPU (0 where the system does not say)."""
    if device.type == "cuda":
        # Not by `max_memory_allocated`: one number is wanted, and it sorts all there are.
        counts = torch.cuda.memory.memory_stats_as_nested_dict(device)
        return counts.get("allocated_bytes", {}).get("all", {}).get("peak", 0)
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- one update -------------------------------------------------------------------------------------------------------


class PrefetchedBatch(NamedTuple):
    """A batch split into micro-batches; the first is prepared already, and its forward pass may have begun."""

    ids: Tensor
    parts: list[Batch]
    first: tuple[Tensor, Tensor]
    logits_BK: Tensor | None = None


class StepResult(NamedTuple):
    loss: float
    lr: float
    grad_norm: float | None  # None where it was too large for fp16: the step was skipped
    images: int
    wait_s: float  # for the next batch


class Prefetcher:
    """The batch of the step at hand, prepared; None after the last."""

    def __init__(self, batches: Iterable[Batch], rule: StepRule, first_step: int) -> None:
        self._coming = (prefetch_batch(batch, rule, step) for step, batch in enumerate(batches, first_step))
        self.current = next(self._coming, None)

    def advance(self) -> None:
        self.current = next(self._coming, None)


def prefetch_batch(batch: Batch, rule: StepRule, step: int) -> PrefetchedBatch:
    parts = split_microbatches(batch, rule.micro_batch)
    return PrefetchedBatch(batch.ids, parts, rule.prepare(parts[0], step))


def take_step(state: TrainState, prefetcher: Prefetcher, rule: StepRule, world: World) -> StepResult:
    """One update. The next batch is prefetched, and its forward pass begun, while a GPU still works on this one.

    A loss or gradient that is not finite stops the run before it touches a weight, in all processes alike. Running statistics
    change in the forward pass: they go back to what they were, and no next pass begins before this step is done.
    """
    state.scaler = scaler = state.scaler or grad_scaler(rule.precision, world.device)
    batch = prefetcher.current
    assert batch is not None
    if batch.logits_BK is None:
        _seed_dropout(state.step, rule, world)
    lr = rule.lr_at(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
    state.running_stats.remember()
    partial_losses = accumulate_gradients(state, batch, rule, world)
    state.running_stats.average(world)
    scaler.unscale_(state.optimizer)
    norm = nn.utils.clip_grad_norm_(state.model.parameters(), rule.max_grad_norm)
    metrics = torch.stack([*partial_losses, full_tensor(norm)])
    host_metrics = metrics.to("cpu", non_blocking=world.device.type == "cuda")  # has arrived when `wait_end` has come
    ids_B, wait_start = batch.ids, _now(world.device)
    del batch  # its images may go when the next ones have come
    prefetcher.advance()
    wait_end = _now(world.device)
    undo, upcoming = _update_ahead(state, metrics) if world.size == 1 else None, prefetcher.current
    overlaps = undo is not None and not state.running_stats and rule.can_overlap_next_forward(state.step + 1)
    if overlaps and upcoming is not None and len(upcoming.parts) == 1:
        _seed_dropout(state.step + 1, rule, world)
        prefetcher.current = upcoming._replace(logits_BK=_forward(state, upcoming.first[0], rule, world))
    wait_s = _seconds(wait_start, wait_end)  # waits for the device
    *losses, grad_norm = host_metrics.tolist()
    loss = world.all_reduce_sum(sum(losses))
    overflow = scaler.is_enabled() and not math.isfinite(grad_norm)  # then fp16 skips and lowers its scale
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        state.running_stats.undo()
    if not math.isfinite(loss) or not (math.isfinite(grad_norm) or overflow):
        if undo is not None:
            undo()
        raise NonFinite(state.step + 1, loss, grad_norm, world.all_gather(ids_B.to(world.device)).tolist())
    if undo is None:
        scaler.step(state.optimizer)
        scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    if state.ema is not None and not overflow:
        update_ema(state.ema, state.ema_sources, decay_at(state.step, rule.ema_decay, warmup=rule.ema_warmup))
    return StepResult(loss, lr, None if overflow else grad_norm, len(ids_B) * world.size, wait_s)


def accumulate_gradients(state: TrainState, batch: PrefetchedBatch, rule: StepRule, world: World) -> list[Tensor]:
    """Gradients of the mean loss over the valid images of all processes, whatever the micro-batches.

    Returns what each micro-batch of this process adds to the loss; a GPU may not have computed it yet.
    """
    assert state.scaler is not None
    partial_losses: list[Tensor] = []
    total = max(1.0, world.all_reduce_sum(float(sum(part.valid.sum() for part in batch.parts))))
    for i, part in enumerate(batch.parts):
        # Several processes add their gradients once, after the last micro-batch.
        waits = isinstance(state.forward, DistributedDataParallel) and i < len(batch.parts) - 1
        with state.forward.no_sync() if waits else contextlib.nullcontext():  # pyright: ignore[reportCallIssue]
            images_BCYX, targets = rule.prepare(part, state.step) if i else batch.first
            logits_BK = batch.logits_BK if i == 0 else None
            if logits_BK is None:
                logits_BK = _forward(state, images_BCYX, rule, world)
            losses_B = rule.losses(images_BCYX, logits_BK, targets)
            loss = torch.where(part.valid.to(losses_B.device, non_blocking=True), losses_B, 0).sum() / total
            # The wrapper takes the mean over processes, where the sum is wanted.
            state.scaler.scale(loss * world.size).backward()
        partial_losses.append(loss.detach())
    return partial_losses


def _seed_dropout(step: int, rule: StepRule, world: World) -> None:
    seed_noise(mix(rule.seed, _NOISE, step) + world.rank, world.device)


def _forward(state: TrainState, images_BCYX: Tensor, rule: StepRule, world: World) -> Tensor:
    with autocast(rule.precision, world.device):
        return state.forward(images_BCYX)


def _update_ahead(state: TrainState, metrics: Tensor) -> Callable[[], None] | None:
    """Queue the update behind the gradients, so that a GPU need not wait until it is known here whether `metrics` are finite.

    Returns what takes it back if they are not; None where nothing was sent, because nothing could be taken back or gained.
    """
    assert state.scaler is not None
    if state.scaler.is_enabled():
        return None
    if all(group.get("fused") for group in state.optimizer.param_groups):
        # The attribute that torch's own GradScaler sets; left there, it would stop a later update too.
        state.optimizer.found_inf = (~metrics.isfinite().all()).float()  # pyright: ignore[reportAttributeAccessIssue]
        state.optimizer.step()
        del state.optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
        undo = _nothing
    elif _computes_ahead(metrics) and state.optimizer.state:  # before the first update there is no state to put back
        undo = remember_update(state.optimizer)
        state.optimizer.step()
    else:
        return None
    state.optimizer.zero_grad(set_to_none=True)
    return undo


def _computes_ahead(metrics: Tensor) -> bool:
    """Whether the device works on while Python goes on: elsewhere there is nothing to gain."""
    return metrics.is_cuda


def _nothing() -> None:
    pass


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
