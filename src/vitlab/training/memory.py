"""Memory of a training run: what it will need, by formula, and whether that is here."""

import dataclasses
import math
from typing import NamedTuple

import torch

from vitlab.core.memory import require_memory
from vitlab.models.build import allocate
from vitlab.models.cost import activation_bytes, count_params
from vitlab.models.names import format_name
from vitlab.models.spec import ViTSpec
from vitlab.training.optim import optimizer_bytes, undo_bytes
from vitlab.training.pretext_rules import decoder_spec
from vitlab.training.recipe import Recipe

_WIDE = 4  # bytes of a float32, in which weights and gradients are kept throughout


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one training process, by kind; `peak` is the largest of the backward pass's start and end and the update."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    per_image: int
    fixed: int  # copies that a forward pass makes of weights
    update: int  # what the update needs besides, for a moment
    last_per_image: int = 0  # when the backward pass reaches the first block, and nearly all gradients are there
    traffic: int = 0  # weights and gradients on their way between processes
    undo: int = 0  # the copy that takes an update back, while the next forward pass is sent

    @property
    def persistent(self) -> int:
        """What is there from one update to the next."""
        return self.weights + self.optimizer + self.ema + self.traffic + self.undo

    def peak(self, micro_batch: int, *, accumulates: bool) -> int:
        """Gradients appear while activations go, unless earlier micro-batches have left theirs."""
        first = self.fixed + micro_batch * self.per_image + (self.gradients if accumulates else 0)
        last = self.fixed + micro_batch * self.last_per_image + self.gradients
        return self.persistent + max(first, last, self.gradients + self.update)

    def at_once(self, images: int, memory: int) -> int:
        """All of these images where they fit, else the largest power of two that does."""
        return images if self.peak(images, accumulates=False) <= memory else self.largest_micro_batch(memory)

    def largest_micro_batch(self, memory: int) -> int:
        """The largest power of two that fits, with gradients kept; 0 if none does."""
        room = memory - (self.persistent + self.gradients + self.fixed)
        if room < self.per_image or self.peak(0, accumulates=True) > memory:
            return 0
        return 2 ** int(math.log2(room // self.per_image))


def estimate_memory(recipe: Recipe, processes: int = 1, device: torch.device | None = None) -> MemoryEstimate:
    """What each of the processes needs to train the whole model. Frozen parts need less; a GPU may need more than a CPU."""
    half, recompute = recipe.train.precision != "fp32", recipe.train.recompute
    spec, mae = recipe.model, recipe.objective.mae
    state, update = optimizer_bytes(recipe.optim)
    decoder = decoder_spec(spec, mae) if mae is not None and isinstance(spec, ViTSpec) else None
    params = local_params = copied = count_params(spec) + (0 if decoder is None else count_params(decoder))
    traffic = _WIDE * params if processes > 1 else 0  # DDP puts the gradients together in buffers of its own
    if recipe.train.sharded and processes > 1:
        sharded = sharded_params(recipe, processes)
        # The others arrive as what autocast would make of them
        local_params, copied = sharded.local_params, sharded.loose
        traffic = sharded.gathered_bytes
    rows, cols = spec.image_size
    pixels = spec.in_channels * rows * cols * (1 + (_WIDE if half else 0))  # as read, and before they are halved
    activations = activation_bytes(spec, half=half, recompute=recompute)
    block = activations.block + activations.working
    # Of all patches, also where an autoencoder or patch dropout leaves some out: an upper bound.
    kept = activations.kept
    if decoder is not None:
        kept += activation_bytes(decoder, half=half, recompute=recompute).kept
    return MemoryEstimate(
        weights=_WIDE * local_params,
        gradients=_WIDE * local_params,
        optimizer=state * local_params,
        ema=_WIDE * local_params if recipe.train.ema else 0,
        per_image=kept + (block if recompute else activations.working) + pixels,
        fixed=activations.weight_copies + (2 * copied if half else 0),  # autocast's copies
        update=update * local_params,
        last_per_image=block + pixels,
        traffic=traffic,
        undo=undo_bytes(recipe.optim, device, processes) * local_params,
    )


# --- weights sharded over processes -----------------------------------------------------------------------------------


class ShardedParams(NamedTuple):
    """What FSDP2 makes of the parameters, as `training/sharding.py` has it divide and gather them."""

    local_params: int  # of the first process: rows are not cut, so it has the most, and all of a table with one row
    loose: int  # parameters in no module that is gathered by itself, and so gathered for a whole pass
    gathered_bytes: int  # besides the local ones: the loose ones throughout a pass, of the others those at hand


def sharded_params(recipe: Recipe, processes: int) -> ShardedParams:
    model = allocate(recipe.model)
    narrow = _WIDE if recipe.train.precision == "fp32" else 2
    local_params = sum(-(-len(tensor) // processes) * tensor[0].numel() for tensor in model.parameters())
    loose, at_hand = count_params(recipe.model), 0
    for module in model.modules():
        if isinstance(module, model.sharding_units):
            count = sum(tensor.numel() for tensor in module.parameters())
            width = narrow if isinstance(module, model.half_precision_units) else _WIDE
            loose -= count
            # Weights three times: in use, as they arrived, and arriving for the next module. Their gradients, and these
            # twice in float32: being summed, and made ready for that.
            at_hand = max(at_hand, count * (4 * width + 2 * _WIDE))
    return ShardedParams(local_params, loose, at_hand + loose * 4 * _WIDE)


def require_room(recipe: Recipe, device: torch.device, processes: int) -> None:
    """An error where not even one image fits: torch would fail, or the system end the process, after all the preparation."""
    memory = estimate_memory(recipe, processes, device)
    if recipe.train.method == "steps" and recipe.optim.train == "full":
        least = memory.peak(1, accumulates=False)
    else:  # nothing is kept of frozen layers; a forward pass alone has a quarter of a block at hand, or more
        least = memory.weights + memory.last_per_image // 4
    require_memory(least, device, f"training {format_name(recipe.model)} on one image at a time")
