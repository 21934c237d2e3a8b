"""From the images of a split to batches that are ready for a device. Letters: B batch, C channels, Y X rows and columns."""

import dataclasses
from collections.abc import Generator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.data.augmentation.augment import augment
from vitlab.data.augmentation.mixing import mix
from vitlab.data.batches import Order
from vitlab.data.cache import in_file, in_memory
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, Batch, TrainInputs, train_batches
from vitlab.data.preprocess import normalise
from vitlab.data.resident import on_device, resident_batches
from vitlab.training.recipe import Recipe


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
        augmentation = data.augment if data.augment_in == "workers" else None
        inputs = TrainInputs(self._cached(), rule, data.crop, order, augmentation, world.rank, world.size)
        pin = world.device.type == "cuda"
        yield from train_batches(inputs, steps, bad=self.bad, workers=data.workers, pin=pin)

    def _cached(self) -> Dataset:
        data, world = self.recipe.data, self.world
        if data.cache == "none":
            return self.dataset
        if data.cache == "memory":
            return in_memory(self.dataset, data.preprocess(), most_gb=data.cache_gb, console=self.console)
        if not world.is_main:
            world.barrier()  # the first process writes the file, the others find it there
        made = in_file(self.dataset, data.preprocess(), self.cache, most_gb=data.cache_gb, console=self.console)
        if world.is_main:
            world.barrier()
        return made
