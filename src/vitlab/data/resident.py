"""A small set that lies on the device whole: batches are picked out of its memory, and no worker has to keep up with a GPU.

What a step sees is what the loader would give it: pixels, order, augmentation and mixing depend on the same keys, and on
nothing else. Many steps are prepared at once, because a GPU is as quick with ten thousand small images as with a hundred.
Letters: N images of the set, B batch, C channels, Y X rows and columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator

import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.augmentation.crops import CropRule, crop_and_resize
from vitlab.data.batches import Order, Places, rank_part
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageInput
from vitlab.data.loader import BadImages, Batch
from vitlab.data.preprocess import Preprocess

_TOGETHER = 2**26  # numbers of images prepared in one go: 21,845 images of 32 pixels, and 256 MB
_DRAWN = 256  # images drawn at once, where the set is drawn; more are no faster
_GIGABYTE = 2**30


@dataclasses.dataclass(frozen=True)
class Resident:
    images_NCYX: Tensor  # uint8, at the model's size
    targets_N: Tensor  # or [N, K] where images have several labels
    valid_N: Tensor  # bool, on the CPU


def on_device(
    dataset: Dataset,
    rule: Preprocess,
    crop: CropRule,
    device: torch.device,
    *,
    most_gb: float,
    bad: BadImages,
    console: Console,
) -> Resident:
    """The set's pixels on `device`; an error, before memory is short, where they would be more than `most_gb`."""
    if crop.how != "whole":
        raise UsageError(
            f"data.cache = device holds images as the model sees them, so data.crop.how {crop.how} has nothing to cut from",
            hint="Set data.crop.how=whole; data.augment.shift_px moves the image instead.",
        )
    shape = (len(dataset), rule.channels, *rule.image_size)
    size = torch.Size(shape).numel()
    if size > most_gb * _GIGABYTE:
        raise UsageError(
            f"{dataset.name} is {size / _GIGABYTE:.1f} GB at this size, and data.cache_gb allows {most_gb:g}",
            hint="Use data.cache = file, or allow more.",
        )
    images_NCYX, valid_N = torch.zeros(shape, dtype=torch.uint8), torch.zeros(len(dataset), dtype=torch.bool)
    with console.progress("cache", len(dataset)) as advance:
        for i, source in enumerate(_sources(dataset)):
            try:
                images_NCYX[i] = crop_and_resize(source(), rule, crop, seed=0, epoch=0, sample=i)
                valid_N[i] = True
            except (VitlabError, OSError) as error:
                bad.add(str(dataset.keys[i]), error.what if isinstance(error, VitlabError) else str(error))
            advance(i + 1, f"{size / _GIGABYTE:.2f} GB")
    targets_N = dataset.labels.targets(torch.arange(len(dataset)), len(dataset.classes))
    return Resident(images_NCYX.to(device), targets_N.to(device), valid_N)


def _sources(dataset: Dataset) -> Iterator[Callable[[], ImageInput]]:
    """What reads each image; those that can be drawn many at once are."""
    for some in torch.arange(len(dataset)).split(_DRAWN):
        many = dataset.read_many(some.tolist())
        yield from (functools.partial(dataset.read, i) for i in some.tolist()) if many is None else map(_as_is, many)


def _as_is(image: ImageInput) -> Callable[[], ImageInput]:
    return lambda: image


def resident_batches(
    resident: Resident,
    order: Order,
    prepare: Callable[[Batch, Tensor], tuple[Tensor, Tensor]],
    *,
    first_step: int,
    last_step: int,
    rank: int = 0,
    world: int = 1,
) -> Generator[Batch]:
    """The batches of steps `first_step` to `last_step` - 1. Their images and targets are what `prepare` makes of them.

    It is given the images of several steps as one batch, and the step of each.
    """
    device = resident.images_NCYX.device
    share = order.batch_size // world
    ahead = max(1, _TOGETHER // (share * resident.images_NCYX[0].numel()))
    position_B = torch.arange(rank * share, (rank + 1) * share)
    for start in range(first_step, last_step, ahead):
        steps = range(start, min(start + ahead, last_step))
        parts = [rank_part(order.batch(step), rank, world) for step in steps]
        places = Places(*(torch.cat(field) for field in zip(*parts, strict=True)))
        ids_B = places.ids.to(device)
        images_BCYX, targets_B = resident.images_NCYX[ids_B], resident.targets_N[ids_B]
        valid_B, positions_B = resident.valid_N[places.ids], position_B.repeat(len(steps))
        many = Batch(images_BCYX, targets_B, valid_B, *places, positions_B)
        x_BCYX, targets = prepare(many, torch.tensor(steps).repeat_interleave(share))
        many = many._replace(images=x_BCYX, targets=targets)
        for i in range(len(steps)):
            yield Batch(*(field[i * share : (i + 1) * share] for field in many))
