"""Memory of a training run: what it will need, by formula, and what is free here."""

import dataclasses
import math
from pathlib import Path

import torch

from vitlab.models.cost import count_params
from vitlab.models.memory import kept_bytes, standardised_bytes, working_bytes
from vitlab.runs.recipe import Recipe
from vitlab.training.optim import OptimRule

_FREE_SHARE = 0.9  # of the memory that is free: allocators round up and leave gaps
_USUAL = 16 * 2**30  # bytes of memory, where the system does not say


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training process, by kind; `peak` is the larger of the backward pass and the update."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    per_image: int
    fixed: int  # copies that a forward pass makes of weights
    update: int  # what the update needs besides, for a moment

    def peak(self, micro_batch: int, *, accumulates: bool) -> int:
        """Gradients appear while activations go, unless earlier micro-batches have left theirs."""
        held = self.weights + self.optimizer + self.average
        passing = self.fixed + micro_batch * self.per_image + (self.gradients if accumulates else 0)
        return held + max(passing, self.gradients + self.update)

    def largest_micro_batch(self, memory: int) -> int:
        """The largest power of two that fits, with gradients kept; 0 if none does."""
        room = memory - (self.weights + self.optimizer + self.average + self.gradients + self.fixed)
        if room < self.per_image or self.peak(0, accumulates=True) > memory:
            return 0
        return 2 ** int(math.log2(room // self.per_image))


def estimate_memory(recipe: Recipe) -> MemoryEstimate:
    """What a process needs to train the whole model. Frozen parts and recomputed activations need less."""
    half = recipe.train.precision != "fp32"
    params, wide = count_params(recipe.model), 4  # weights and gradients are float32 throughout
    state, update = optimizer_bytes(recipe.optim)
    rows, cols = recipe.model.image_size
    pixels = recipe.model.in_channels * rows * cols * (1 + (wide if half else 0))  # as read, and before they are halved
    return MemoryEstimate(
        weights=wide * params,
        gradients=wide * params,
        optimizer=state * params,
        average=wide * params if recipe.train.average else 0,
        per_image=kept_bytes(recipe.model, half=half) + working_bytes(recipe.model, half=half) + pixels,
        fixed=standardised_bytes(recipe.model, half=half) + (2 * params if half else 0),  # autocast's copies
        update=update * params,
    )


def optimizer_bytes(rule: OptimRule) -> tuple[int, int]:
    """Per parameter: what the optimiser remembers, and what an update holds for a moment (see `training/optim.py`)."""
    narrow = rule.momentum_dtype == "bfloat16"
    match rule.name:
        case "adamw":
            return 8, 4
        case "adam-paper":
            return (6, 12) if narrow else (8, 8)
        case "sgd":
            return 4, 0
        case "sgd-paper":
            return (2, 4) if narrow else (4, 0)


# --- what is free ----------------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Bytes that a run may use here."""
    if device.type == "cuda":
        return int(_FREE_SHARE * torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_free_in_system(), _free_in_container(), _free_in_process()) if limit is not None]
    return int(_FREE_SHARE * min(limits)) if limits else _USUAL


def _free_in_system() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return 1024 * int(available.split()[1])


def _free_in_container() -> int | None:
    """What a control group leaves: a process that takes more is killed, whatever the machine has."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Files that were read stay in memory until somebody needs the room.
    return None if most == "max" else int(most) - int(used) + int(rows.get("inactive_file", 0))


def _free_in_process() -> int | None:
    """What `ulimit -v` leaves."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if most == resource.RLIM_INFINITY else most - int(statm.read_text().split()[0]) * resource.getpagesize()
