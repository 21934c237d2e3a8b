"""A few real training steps on noise: how fast this machine is, and how much memory they take."""

import contextlib
import dataclasses
import math
import sys
import time

import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import normalise
from vitlab.models.build import build
from vitlab.models.names import format_name
from vitlab.runs.training.run import recompute_blocks
from vitlab.training.ema import start_ema
from vitlab.training.loop import StepRule, TrainState, fit
from vitlab.training.memory import estimate_memory
from vitlab.training.objective import losses
from vitlab.training.optim import make_optimizer
from vitlab.training.recipe import Recipe

_WARM_UP, _TIMED = 3, 5  # steps; the first ones choose kernels and fill caches
_PATIENCE = 10.0  # seconds that the timed steps may take together; the batch is chosen for that
_LARGEST_TIMED = 1024  # images; more make no GPU faster


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was seen."""

    speed: float  # images per second
    batch: int
    memory: int  # bytes at the peak
    estimated: int  # bytes at the peak, by formula
    largest: int  # micro-batch that did run where the formula's did not, or 0


def try_steps(recipe: Recipe, each: int, room: int, world: World, console: Console) -> Trial | None:
    """Trains on noise, in one process: one image first, to choose a batch that takes a few seconds, then the steps that
    count. Nothing where not even one image fits."""
    formula = estimate_memory(recipe)
    fits = min(each, formula.largest_micro_batch(room))
    if fits < 1:
        return None
    # A large model on a CPU takes minutes.
    console.say(f"measuring a few steps of {format_name(recipe.model)} on {world.device}; --no-measure leaves that out")
    on_gpu = world.device.type == "cuda"
    before = torch.cuda.memory_allocated(world.device) if on_gpu else _peak_memory(world.device)
    model = build(recipe.model, seed=recipe.seed).to(world.device)
    if recipe.train.recompute:
        recompute_blocks(model)
    ema = start_ema(model) if recipe.train.ema else None
    state = TrainState(model, model, make_optimizer(model, recipe.optim), ema)
    one = min(_time_steps(state, recipe, 1, 2, world))
    if one > _PATIENCE:  # a large model on a CPU: more steps would say the same, minutes later
        return Trial(1 / one, 1, _peak_memory(world.device) - before, formula.peak(1, accumulates=False), 0)
    batch = min(fits, _LARGEST_TIMED, 2 ** max(0, int(math.log2(_PATIENCE / (_WARM_UP + _TIMED) / one))))
    runs = fits
    if on_gpu:
        runs = _largest_that_runs(state, recipe, fits, world)
        batch = min(_LARGEST_TIMED, runs)  # one image leaves a GPU idle, so its time tells nothing of a batch's
        torch.cuda.reset_peak_memory_stats(world.device)
    times = _time_steps(state, recipe, batch, _WARM_UP + _TIMED, world)[-_TIMED:]
    speed = batch * len(times) / sum(times)
    estimated = formula.peak(batch, accumulates=False)
    return Trial(speed, batch, _peak_memory(world.device) - before, estimated, 0 if runs == fits else runs)


def _largest_that_runs(state: TrainState, recipe: Recipe, batch: int, world: World) -> int:
    """The formula's micro-batch, or half of it, and so on: whatever the GPU does take."""
    while True:
        with contextlib.suppress(torch.OutOfMemoryError):
            _time_steps(state, recipe, batch, 1, world)
            return batch
        state.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if batch == 1:
            raise UsageError(f"{format_name(recipe.model)} does not fit on {world.device}, not even with one image")
        batch //= 2


def _time_steps(state: TrainState, recipe: Recipe, batch_size: int, count: int, world: World) -> list[float]:
    """Seconds of each of `count` real updates on noise, images made and prepared beforehand."""
    rule, classes = recipe.data.preprocess(), recipe.model.num_classes
    shape = (batch_size, recipe.model.in_channels, *recipe.model.image_size)
    rest = torch.arange(batch_size)
    batch = Batch(
        torch.randint(256, shape, dtype=torch.uint8),
        rest % classes,
        torch.ones(batch_size).bool(),
        rest,
        rest,
        rest,
        rest,
    )

    def on_device(batch: Batch, _step: int) -> tuple[Tensor, Tensor]:
        return normalise(rule, batch.images.to(world.device)), batch.targets.to(world.device)

    objective = dataclasses.replace(recipe.objective, class_weights="none", distillation=None)
    steps = StepRule(
        prepare=on_device,
        losses=lambda _images, logits, targets: losses(objective, logits, targets),
        lr_at=lambda _step: 0.0,  # takes as long as any other, and noise cannot lead training astray
        seed=recipe.seed,
        max_grad_norm=recipe.optim.max_grad_norm,
        precision=recipe.train.precision,
        ema_decay=recipe.train.ema,
    )
    times: list[float] = []
    started = time.perf_counter()
    for _ in fit(state, [batch] * count, steps, world):
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return times


def _peak_memory(device: torch.device) -> int:
    """Bytes at most so far: of tensors on a GPU, of the whole process on a CPU (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
