"""How many images go through the model at once: as many as memory takes, where the recipe leaves it open.

The update is that of the whole batch either way; only the last bits depend on how it is cut up, and what dropout draws. So
the answer is kept: on a CPU, where it is estimated before the run, in its config; on a GPU, where it is tried, in its
checkpoints. Batch norm is an exception, and is said to be one: it normalises by the images that it sees at once.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from vitlab.core.dist import World
from vitlab.core.errors import VitlabError
from vitlab.core.memory import free_memory
from vitlab.data.loader import Batch
from vitlab.models.cost import has_running_stats
from vitlab.training.assemble import is_sharded
from vitlab.training.loop import StepRule, TrainState
from vitlab.training.memory import estimate_memory
from vitlab.training.optim import optimizer_bytes, undo_bytes
from vitlab.training.precision import autocast
from vitlab.training.recipe import Recipe
from vitlab.training.running_stats import RunningStats

_GB = 2**30
_SMALLEST = 2  # MixUp joins pairs


def estimate_microbatch(recipe: Recipe, device: torch.device, processes: int) -> tuple[Recipe, str | None]:
    """The recipe with a micro-batch that fits, and the sentence about it, where the whole batch would not fit.

    For a CPU: a system that is out of memory kills the process, and nothing can be tried.
    """
    train = recipe.train
    if device.type == "cuda" or train.micro_batch or train.method != "steps":
        return recipe, None
    local_batch = train.batch_size // processes
    memory, free = estimate_memory(recipe, processes, device), free_memory(device) // processes
    fits = without_lone_image(recipe, local_batch, max(_SMALLEST, memory.at_once(local_batch, free)))
    if fits >= local_batch:
        return recipe, None
    needed = memory.peak(local_batch, accumulates=False)
    note = (
        f"micro-batches of {fits}: {local_batch} images at once would need about {needed / _GB:.1f} GB, "
        f"and {max(0, free) / _GB:.1f} GB are free; {describe_update(recipe, fits)}"
    )
    return dataclasses.replace(recipe, train=dataclasses.replace(train, micro_batch=fits)), note


def without_lone_image(recipe: Recipe, images: int, micro_batch: int) -> int:
    """The largest micro-batch up to this one that leaves no image alone, of which batch norm may find no variance.

    The same where the model has no batch norm, or where there is none: the run then says what is wrong, if anything is.
    """
    if not has_running_stats(recipe.model):
        return micro_batch
    mixed = bool(recipe.data.mix.mixup or recipe.data.mix.cutmix)
    smaller = range(micro_batch, _SMALLEST - 1, -2 if mixed else -1)  # pairs stay together
    return next((size for size in smaller if images % size != 1), micro_batch)


def describe_update(recipe: Recipe, micro_batch: int) -> str:
    """What micro-batches leave as it is, and what they change."""
    same = f"an update is that of {recipe.train.batch_size} still"
    return f"{same}, but batch norm sees {micro_batch} images at a time" if has_running_stats(recipe.model) else same


def autotune_microbatch(
    state: TrainState, batches: Iterator[Batch], rule: StepRule, recipe: Recipe, world: World, known: int = 0
) -> tuple[Iterator[Batch], int]:
    """The same batches, and the micro-batch: on a GPU by trying with the first of them, elsewhere the recipe's.

    `known` is what an earlier process of the run has found; 0 means that all images fit at once.
    """
    requested = recipe.train.micro_batch
    if requested or is_sharded(recipe, world) or world.device.type != "cuda":
        return batches, requested or known
    first = next(batches, None)
    if first is None:
        return batches, known
    images = len(first.ids)
    size = largest_that_runs(state, rule, first, world, known or images, _update_bytes(state, recipe, world))
    if size not in (known, images):  # what an earlier process has used stays
        size = without_lone_image(recipe, images, size)
    return itertools.chain([first], batches), size if size < images else known


def _update_bytes(state: TrainState, recipe: Recipe, world: World) -> int:
    """What the first update will want besides: what the optimiser remembers and, among several, gradients to send."""
    trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
    undo = undo_bytes(recipe.optim, world.device, world.size)
    if state.optimizer.state:
        return trained * undo
    sent = 4 if world.size > 1 else 0  # bytes of a float32
    return trained * (sum(optimizer_bytes(recipe.optim)) + undo + sent)


def largest_that_runs(
    state: TrainState, rule: StepRule, batch: Batch, world: World, size: int, room: int, smallest: int = _SMALLEST
) -> int:
    """`size`, or the largest power of two below it with which a forward and a backward pass run, in all processes alike."""
    while world.all_reduce_max(int(not _runs(state, rule, batch, world, size, room))):
        if size <= smallest:
            raise VitlabError(
                f"the model does not fit into the memory of {world.device}, not even with {size} images",
                hint="Take smaller images (data.image_size), a smaller model, or train.recompute=true.",
            )
        size = max(smallest, 2 ** ((size - 1).bit_length() - 1))
    return size


def _runs(state: TrainState, rule: StepRule, batch: Batch, world: World, size: int, room: int) -> bool:
    """Whether `size` images pass. Nothing is left of it: gradients and statistics go, and every step draws its noise anew."""
    part = Batch(*(field[:size] for field in batch))
    state.model.train()
    try:
        reserved = torch.empty(room, dtype=torch.uint8, device=world.device)
        with RunningStats(state.model).preserved():
            for _ in range(1 if size >= len(batch.ids) else 2):  # the second beside the gradients of the first
                images_BCYX, targets = rule.prepare(part, state.step)
                with autocast(rule.precision, world.device):
                    logits_BK = state.model(images_BCYX)
                rule.losses(images_BCYX, logits_BK, targets).sum().backward()
        del reserved
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        state.optimizer.zero_grad(set_to_none=True)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)  # the run reports its own peak
