"""A few real training steps on noise: how fast this machine is, and how much memory they take."""

import dataclasses
import math
import time

import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.data.loader import Batch
from vitlab.data.preprocess import normalise
from vitlab.models.build import build
from vitlab.models.cost import has_running_stats
from vitlab.models.names import format_name
from vitlab.training.assemble import assemble
from vitlab.training.loop import StepRule, TrainState, fit, peak_memory
from vitlab.training.memory import estimate_memory
from vitlab.training.microbatch import largest_that_runs
from vitlab.training.objective import Loss
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


def why_untried(recipe: Recipe, each: int, room: int) -> str:
    """Why no steps can be tried in one process with this much memory; nothing where they can."""
    fits = estimate_memory(recipe).largest_micro_batch(room)
    if fits == 0:
        return "all weights in one process do not fit here"
    if min(each, fits) >= _least(recipe):
        return ""
    return f"batch norm needs two images at once, and {'only one fits here' if fits == 1 else 'the batch has one'}"


def _least(recipe: Recipe) -> int:
    return 2 if has_running_stats(recipe.model) else 1  # a single image may have no variance for batch norm


def try_steps(recipe: Recipe, each: int, room: int, world: World, console: Console) -> Trial | None:
    """Trains on noise, in one process: one image or two first, to choose a batch that takes a few seconds, then the steps that
    count. Nothing where that cannot be: `why_untried` says why."""
    if why_untried(recipe, each, room):
        return None
    formula = estimate_memory(recipe, device=world.device)
    fits = min(each, formula.largest_micro_batch(room))
    least = _least(recipe)
    # A large model on a CPU takes minutes.
    console.say(f"measuring a few steps of {format_name(recipe.model)} on {world.device}; --no-measure leaves that out")
    on_gpu = world.device.type == "cuda"
    before = torch.cuda.memory_allocated(world.device) if on_gpu else peak_memory(world.device)
    recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, compiled=False))
    state = assemble(recipe, build(recipe.model, seed=recipe.seed), world)
    one = min(_time_steps(state, recipe, least, 2, world)) / least
    if one > _PATIENCE:  # a large model on a CPU: more steps would say the same, minutes later
        return Trial(1 / one, least, peak_memory(world.device) - before, formula.peak(least, accumulates=False), 0)
    batch = min(fits, _LARGEST_TIMED, max(least, 2 ** int(math.log2(max(1, _PATIENCE / (_WARM_UP + _TIMED) / one)))))
    runs = fits
    if on_gpu:
        runs = largest_that_runs(state, _rule(recipe, world), _noise(recipe, fits), world, fits, room=0, smallest=least)
        batch = min(_LARGEST_TIMED, runs)  # one image leaves a GPU idle, so its time tells nothing of a batch's
        torch.cuda.reset_peak_memory_stats(world.device)
    times = _time_steps(state, recipe, batch, _WARM_UP + _TIMED, world)[-_TIMED:]
    speed = batch * len(times) / sum(times)
    estimated = formula.peak(batch, accumulates=False)
    return Trial(speed, batch, peak_memory(world.device) - before, estimated, 0 if runs == fits else runs)


def _time_steps(state: TrainState, recipe: Recipe, batch_size: int, count: int, world: World) -> list[float]:
    """Seconds of each of `count` real updates on noise, images made and prepared beforehand."""
    times: list[float] = []
    started = time.perf_counter()
    for _ in fit(state, [_noise(recipe, batch_size)] * count, _rule(recipe, world), world):
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return times


def _noise(recipe: Recipe, batch_size: int) -> Batch:
    shape = (batch_size, recipe.model.in_channels, *recipe.model.image_size)
    images, rest = torch.randint(256, shape, dtype=torch.uint8), torch.arange(batch_size)
    return Batch(images, rest % max(1, recipe.model.num_classes), torch.ones(batch_size).bool(), rest, rest, rest, rest)


def _rule(recipe: Recipe, world: World) -> StepRule:
    rule = recipe.data.preprocess()

    def on_device(batch: Batch, _step: int) -> tuple[Tensor, Tensor]:
        return normalise(rule, batch.images.to(world.device)), batch.targets.to(world.device)

    return StepRule(
        prepare=on_device,
        losses=Loss(
            dataclasses.replace(recipe.objective, class_weights="none", logit_adjustment=0.0, distillation=None)
        ),
        lr_at=lambda _: 0.0,  # takes as long as any other, and noise cannot lead training astray
        seed=recipe.seed,
        max_grad_norm=recipe.optim.max_grad_norm,
        precision=recipe.train.precision,
        ema_decay=recipe.train.ema,
    )
