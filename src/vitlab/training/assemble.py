"""From a recipe to all that `fit` takes: what training changes (`TrainState`), its batches, what decides a step (`StepRule`).

Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.duration import RunLength, interval_in_steps
from vitlab.core.errors import UsageError
from vitlab.data.augmentation.augment import augment
from vitlab.data.augmentation.mixing import mix
from vitlab.data.batches import Order
from vitlab.data.cache import in_file, in_memory
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, Batch, TrainInputs, train_batches
from vitlab.data.parts import Parts
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.resident import on_device, resident_batches
from vitlab.engines.classifier import Classifier, load
from vitlab.models.batch_norm import kept_statistics
from vitlab.models.build import Model, build
from vitlab.models.cost import has_running_stats
from vitlab.models.lora import add_lora
from vitlab.models.names import format_name
from vitlab.training.ema import start_ema
from vitlab.training.loop import StepRule, TrainState
from vitlab.training.objective import loss_for, weights_of
from vitlab.training.optim import make_optimizer
from vitlab.training.pretext.build import load_features_teacher, make_pretext
from vitlab.training.pretext.task import Pretext
from vitlab.training.recipe import SCRATCH, Recipe
from vitlab.training.schedule import rate_at
from vitlab.training.sharding import shard
from vitlab.weights.surgery import for_transfer


def assemble(recipe: Recipe, model: Model, world: World) -> TrainState:
    """The model as it is trained: with LoRA, in its pretext task, sharded, wrapped, compiled; optimiser and EMA with it."""
    train, sharded = recipe.train, is_sharded(recipe, world)
    if recipe.optim.train == "lora":
        add_lora(model, recipe.lora, seed=recipe.seed)
    trained = make_pretext(recipe, model, world.device) if recipe.objective.is_pretext else model
    if train.recompute:
        recompute_blocks(trained)
    if sharded:  # layer by layer, so that the full model need not fit on the device
        shard(trained, world, train.precision)
    trained.to(world.device)
    optimizer = make_optimizer(trained, recipe.optim)
    forward: nn.Module = trained
    if world.size > 1 and not sharded:
        # Running statistics are averaged after each step (`training/running_stats.py`), so none need be sent before it.
        devices = [world.device] if world.device.type == "cuda" else None
        forward = DistributedDataParallel(trained, device_ids=devices, broadcast_buffers=False)
    if train.compiled:
        torch.use_deterministic_algorithms(True)  # tells the compiler too
        # A step that is always the same can be recorded and replayed (CUDA graphs), which spares small models the launches.
        alike = world.device.type == "cuda" and world.size == 1 and not train.micro_batch
        # What was compiled before would make sizes unknowns of the code: slower, with other bits, and some torch cannot do it.
        torch.compiler.reset()
        mode = "reduce-overhead" if alike else None
        forward = torch.compile(forward, mode=mode, dynamic=False)  # pyright: ignore[reportAssignmentType]
    return TrainState(trained, forward, optimizer, start_ema(trained) if train.ema else None)


def is_sharded(recipe: Recipe, world: World) -> bool:
    """Whether each process has only some rows of the weights."""
    return recipe.train.sharded and world.size > 1


def recompute_blocks(model: Model | Pretext) -> None:
    """Makes blocks forget what they computed until the backward pass. A wrapper around them would change their names."""
    for module in model.modules():
        if isinstance(module, model.recompute_units):
            # A batch that passes a second time is not a second batch to the running statistics.
            contexts = (
                {"context_fn": functools.partial(_contexts, module)} if any(True for _ in module.buffers()) else {}
            )
            module.forward = functools.partial(recomputed, module.forward, use_reentrant=False, **contexts)


def _contexts(
    block: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """In which a block is computed, and computed again."""
    return contextlib.nullcontext(), kept_statistics(block)


def start_model(recipe: Recipe, console: Console, classes: Sequence[str] = ()) -> Model:
    """Fresh weights, or those of another run, file or name with a new head, or with its own where it knows `classes`."""
    if recipe.init == SCRATCH:
        model = build(recipe.model, seed=recipe.seed)
    else:
        start = load(recipe.init, device="cpu", quiet=True)
        model, report = for_transfer(start.model, recipe.model, recipe.init_positions, recipe.seed)
        console.detail(f"Start from {recipe.init}: {report}")
        if recipe.keep_head:
            _keep_head(model, start, classes)
    if recipe.head_bias and model.head is not None:
        nn.init.constant_(model.head.bias, recipe.head_bias)
    return model


def _keep_head(model: Model, start: Classifier, classes: Sequence[str]) -> None:
    spec, head = start.model.spec, start.model.head
    if start.labels != tuple(classes) or model.head is None or head is None or spec != spec.with_linear_head():
        raise UsageError(
            "keep_head needs start weights with a linear head for the classes of the data, in their order",
            hint="Leave keep_head out for a new head.",
        )
    model.head.load_state_dict(head.state_dict())


def require_possible(recipe: Recipe, parts: Parts, processes: int) -> None:
    """An error where the recipe cannot be trained on this data by that many processes."""
    train = recipe.train
    if train.batch_size % processes:
        raise UsageError(f"train.batch_size {train.batch_size} cannot be shared evenly by {processes} processes")
    if recipe.data.mix.mixup or recipe.data.mix.cutmix:
        _require_pairs(train.batch_size // processes, train.micro_batch, processes)
    if recipe.objective.is_pretext:
        return
    if recipe.objective.kind == "softmax" and parts.train.labels.multi:
        raise UsageError("images with several labels need objective.kind = sigmoid")
    if has_running_stats(recipe.model):
        _require_batch_norm(recipe, processes)
    weights_of(recipe.objective, parts.train.classes, parts.train.labels.counts(len(parts.train.classes)))


def _require_batch_norm(recipe: Recipe, processes: int) -> None:
    """What cannot be done with running statistics, which belong to no shard and to no compiled recomputation."""
    name, train = format_name(recipe.model), recipe.train
    if train.sharded and processes > 1:
        raise UsageError(
            f"train.sharded cannot be used with {name}: the running statistics of its batch norm are not shared out",
            hint="Set train.sharded=false; every process then holds the whole model.",
        )
    if train.recompute and train.compiled:
        raise UsageError(
            f"train.recompute and train.compiled cannot be used together with {name}", hint="Give one of them."
        )
    local_batch = train.batch_size // processes
    micro_batch = min(train.micro_batch or local_batch, local_batch)
    lone = (local_batch % micro_batch or micro_batch) == 1  # the last of the micro-batches is the smallest
    trains_norms = train.method == "steps" and recipe.optim.train != "head"
    if lone and trains_norms and recipe.model.grid == (1, 1):
        cut = (
            f"{local_batch} images in micro-batches of {micro_batch} leave one image alone"
            if local_batch > 1
            else "the batch is one image"
        )
        raise UsageError(
            f"batch norm of {name} cannot be trained on one image whose features are a single position, and {cut}",
            hint="Change train.batch_size or train.micro_batch so that at least two images go together, or take larger images "
            "(data.image_size).",
        )


def _require_pairs(local_batch: int, micro_batch: int, processes: int) -> None:
    """MixUp and CutMix mix neighbours, and a pair must not be torn apart."""
    cut = 0 < micro_batch < local_batch and micro_batch % 2
    if cut or (processes > 1 and local_batch % 2):
        what = f"train.micro_batch {micro_batch}" if cut else f"{local_batch} images in each of {processes} processes"
        raise UsageError(f"MixUp and CutMix mix neighbours, so {what} must be an even number")


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Feed:
    """Where a run's batches come from. `cache` is a folder for `data.cache = file`."""

    recipe: Recipe
    dataset: Dataset
    world: World
    bad: BadImages
    console: Console
    cache: Path

    def batches(self, steps: range) -> Generator[Batch]:
        """The batches of these steps, the same ones wherever a run was resumed."""
        data, world, recipe = self.recipe.data, self.world, self.recipe
        labels = self.dataset.labels.single() if data.balanced else None
        order = Order(len(self.dataset), recipe.train.batch_size, recipe.seed, data.repeats, data.balanced, labels)
        rule = data.preprocess()
        if data.cache == "device":
            resident = on_device(
                self.dataset, rule, data.crop, world.device, most_gb=data.cache_gb, bad=self.bad, console=self.console
            )
            prepare = Preparation(recipe, world.device)
            yield from resident_batches(resident, order, prepare, steps, rank=world.rank, world=world.size)
            return
        augmentation = {"workers": data.augment, "device": None}[data.augment_in]
        inputs = TrainInputs(self._cached(), rule, data.crop, order, augmentation, world.rank, world.size)
        pin = world.device.type == "cuda"
        yield from train_batches(inputs, steps, bad=self.bad, workers=data.workers, pin=pin)

    def _cached(self) -> Dataset:
        data = self.recipe.data
        match data.cache:
            case "none" | "device":  # the device's holds crops, see `batches`
                return self.dataset
            case "memory":
                return in_memory(self.dataset, data.preprocess(), most_gb=data.cache_gb, console=self.console)
            case "file":
                return self._cached_in_file()
            case _:
                assert_never(data.cache)

    def _cached_in_file(self) -> Dataset:
        data, world = self.recipe.data, self.world
        if not world.is_main:
            world.barrier()  # the first process writes the file, the others find it there
        made = in_file(self.dataset, data.preprocess(), self.cache, most_gb=data.cache_gb, console=self.console)
        if world.is_main:
            world.barrier()
        return made


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Bytes and labels in, augmented, normalised and mixed images and targets on the device out."""

    recipe: Recipe
    device: torch.device

    def __call__(self, batch: Batch, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """The step may differ by image."""
        data, seed = self.recipe.data, self.recipe.seed
        images_BCYX = batch.images.to(self.device, non_blocking=True)
        if data.augment_in == "device" or data.cache == "device":  # which has no workers
            images_BCYX = augment(
                images_BCYX, batch.ids, data.augment, seed=seed, epoch=batch.epochs, copy=batch.copies
            )
        x_BCYX = normalise(data.preprocess(), images_BCYX)
        targets = batch.targets.to(self.device, non_blocking=True)
        if not (data.mix.mixup or data.mix.cutmix):
            return x_BCYX, targets
        soft_BK = targets if targets.ndim == 2 else F.one_hot(targets, self.recipe.model.num_classes).float()
        total = self.recipe.train.batch_size
        return mix(x_BCYX, soft_BK, batch.positions, data.mix, seed=seed, step=step, total=total, valid_B=batch.valid)


def already_prepared(batch: Batch, _step: int) -> tuple[Tensor, Tensor]:
    """For batches of `data.cache = device`, which prepares many steps at once."""
    return batch.images, batch.targets


# --- what decides a step ----------------------------------------------------------------------------------------------


def step_rule(
    recipe: Recipe, dataset: Dataset, length: RunLength, world: World, *, validates: bool, quiet: bool
) -> StepRule:
    """What decides each update of a run on `dataset`. `validates` says that the model is evaluated on the way."""
    teacher = load_teacher(recipe, dataset.classes, world.device, quiet=quiet)
    schedule = recipe.schedule.settled(length)
    eval_every = interval_in_steps("train.eval_every", recipe.train.eval_every, length)
    return StepRule(
        prepare=already_prepared if recipe.data.cache == "device" else Preparation(recipe, world.device),
        losses=loss_for(recipe.objective, dataset, world.device, teacher),
        lr_at=functools.partial(rate_at, schedule, base=recipe.optim.lr, total_steps=length.steps),
        seed=recipe.seed,
        max_grad_norm=recipe.optim.max_grad_norm,
        precision=recipe.train.precision,
        micro_batch=recipe.train.micro_batch,
        ema_decay=recipe.train.ema,
        ema_warmup=recipe.train.ema_warmup,
        eval_every=eval_every if validates else length.steps + 1,
    )


def load_teacher(recipe: Recipe, classes: Sequence[str], device: torch.device, *, quiet: bool) -> nn.Module | None:
    """None where the recipe has none for its answers; an error where it cannot teach these classes."""
    if not recipe.teacher or recipe.objective.is_pretext:
        return None
    teacher = load(recipe.teacher, device=str(device), quiet=quiet)
    if teacher.labels != tuple(classes):
        raise UsageError(f"the teacher {recipe.teacher} knows other classes than the data")
    if _model_input(teacher.preprocess) != _model_input(recipe.data.preprocess()):
        raise UsageError(
            f"the teacher {recipe.teacher} needs its images prepared in another way",
            hint="Give data.mode, image_size, mean and std as in its preprocess.json.",
        )
    return teacher.model.requires_grad_(False)


def require_teacher(recipe: Recipe, classes: Sequence[str], *, quiet: bool) -> None:
    """An error where the recipe's teacher, if it has one, cannot teach its model."""
    if recipe.objective.kind == "feature-distillation":
        load_features_teacher(recipe, torch.device("cpu"))
    load_teacher(recipe, classes, torch.device("cpu"), quiet=quiet)


def _model_input(rule: Preprocess) -> tuple[Any, ...]:
    """What decides the numbers that a model is given; how the picture is cut out of its file is another matter."""
    return rule.mode, rule.image_size, rule.mean, rule.std
