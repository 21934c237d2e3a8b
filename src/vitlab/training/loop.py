"""The training loop: a step for every batch, and a record of each for whoever shows, stores and may stop."""

import dataclasses
import sys
import time
from collections.abc import Generator, Iterable

import torch

from vitlab.core.dist import World
from vitlab.data.loader import Batch
from vitlab.training.ema import trained_weights
from vitlab.training.running_stats import RunningStats
from vitlab.training.step import Prefetcher, StepRule, TrainState, take_step


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
    state.ema_sources = {} if state.ema is None else trained_weights(state.ema, state.model)
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
