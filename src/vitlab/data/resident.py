"""A small set held in the device's memory: no worker has to keep up with a GPU.

A step sees what the loader would give it: pixels, order, augmentation and mixing depend on the same keys. Many steps are
prepared at once, because a GPU is as quick with ten thousand small images as with a hundred.
Letters: N images of the set, B batch, C channels, Y X rows and columns.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.augmentation.batched_boxes import draw_boxes
from vitlab.data.augmentation.batched_crops import MOST_NEIGHBOURS, HeldImages, hold, hold_equal, neighbours
from vitlab.data.augmentation.crops import CropRule, crop_and_resize, resized_as
from vitlab.data.batches import Order, Places, rank_part
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageInput, decode, opened, pixels, read, shrinkage, upright_size, why_unreadable
from vitlab.data.loader import BadImages, Batch
from vitlab.data.preprocess import Preprocess, require_channels, scale, scaled_size

_PREPARED_AT_ONCE = 2**26  # values of images prepared in one go: 21,845 images of 32 pixels, and 256 MB
_GENERATED_AT_ONCE = {"cpu": 256, "cuda": 8192}  # images of a synthetic set, by device
_GIGABYTE = 2**30


@dataclasses.dataclass(frozen=True)
class Resident:
    """The set on the device, and how batches are cut out of it."""

    held: HeldImages  # as much of each image as a crop may need: see `_pixels_to_hold`
    rule: Preprocess
    crop: CropRule
    targets_N: Tensor  # or [N, K] where images have several labels
    valid_N: Tensor  # bool, on the CPU

    def images(self, places: Places, seed: int) -> Tensor:
        """uint8 [B, C, Y, X] on the device: what `crop_and_resize` gives."""
        held, size, how = self.held, self.rule.image_size, self.rule.filter
        if self.crop.how == "whole":
            shape = (len(self.valid_N), self.rule.channels, *size)
            images_NCYX = held.flat[: torch.Size(shape).numel()].view(shape)
            return images_NCYX[places.ids.to(images_NCYX.device, non_blocking=True)]
        ids_B = places.ids.numpy()
        boxes_B4 = draw_boxes(self.crop, size, held.heights_N[ids_B], held.widths_N[ids_B], places, seed)
        if self.crop.how in ("squash", "shorter-side"):
            return held.cut(ids_B, boxes_B4, size)
        assert how != "area", "refused by `on_device`"
        return held.crops(ids_B, boxes_B4, size, how)


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
    """The set's pixels on `device`; an error beyond `most_gb`."""
    rule = resized_as(crop, rule)
    if crop.how in ("inception", "torchvision") and (rule.filter == "area" or not rule.antialias):
        raise UsageError(
            f"data.cache = device can cut {crop.how} crops with antialiased bilinear or bicubic resizing only",
            hint="Use data.cache = file, or data.crop.filter=bilinear with data.crop.antialias=true.",
        )
    room, size = most_gb * _GIGABYTE, torch.Size((rule.channels, *rule.image_size)).numel()
    if crop.how == "whole" and len(dataset) * size > room:  # known before anything is read
        raise _too_large(dataset, most_gb, f"is {len(dataset) * size / _GIGABYTE:.1f} GB at this size")
    targets_N = dataset.labels.targets(torch.arange(len(dataset)), len(dataset.classes)).to(device)
    if crop.how == "whole" and (held := _hold_generated(dataset, rule, device, console)) is not None:
        return Resident(held, rule, crop, targets_N, torch.ones(len(dataset), dtype=torch.bool))
    images, valid_N, total, large = list[Tensor](), torch.zeros(len(dataset), dtype=torch.bool), 0, 0
    black_CYX = torch.zeros(rule.channels, *rule.image_size, dtype=torch.uint8)  # as a bad image is in a batch
    with console.progress("cache", len(dataset)) as advance:
        by = _generating_device(device)
        for i, read_one in enumerate(dataset.readers(_GENERATED_AT_ONCE[by.type], by)):
            try:
                image_CYX, shrinks = _pixels_to_hold(read_one(), rule, crop)
                valid_N[i], large = True, large + shrinks
            except (VitlabError, OSError) as error:
                bad.add(str(dataset.keys[i]), why_unreadable(error))
                image_CYX = black_CYX
            images.append(image_CYX)
            total += image_CYX.numel()
            if total > room:
                raise _too_large(dataset, most_gb, f"fills that with {i + 1} of its {len(dataset)} images")
            advance(i + 1, f"{total / _GIGABYTE:.2f} GB")
    if large:
        console.say(
            f"{large} large JPEGs are held in full, as by data.cache = file; without a cache they are shrunk first"
        )
    _require_scale_in_reach(images, rule, crop)
    return Resident(hold(images, rule.channels, device), rule, crop, targets_N, valid_N)


def _hold_generated(dataset: Dataset, rule: Preprocess, device: torch.device, console: Console) -> HeldImages | None:
    """A synthetic set at the model's size, thousands of images at once; None for any other set, or other channels.

    One by one, a million small images would take minutes of Python.
    """
    first = dataset.read_many([0])
    if first is None or rule.mode == "array" or first[0].shape[2] != rule.channels:
        return None
    size, by = torch.Size((rule.channels, *rule.image_size)), _generating_device(device)
    held, images_NCYX = hold_equal(len(dataset), size, device)
    with console.progress("cache", len(dataset)) as advance:
        for some in torch.arange(len(dataset)).split(_GENERATED_AT_ONCE[by.type]):
            many_BYXC = torch.from_numpy(np.stack(dataset.read_many(some.tolist(), by) or []))
            start, end = int(some[0]), int(some[-1]) + 1
            images_NCYX[start:end] = scale(many_BYXC.permute(0, 3, 1, 2), rule.image_size, rule.filter, rule.antialias)
            advance(end, f"{end * size.numel() / _GIGABYTE:.2f} GB")
    return held


def _generating_device(device: torch.device) -> torch.device:
    return device if device.type in _GENERATED_AT_ONCE else torch.device("cpu")


def _too_large(dataset: Dataset, most_gb: float, what: str) -> UsageError:
    return UsageError(
        f"data.cache_gb allows {most_gb:g}, and {dataset.name} {what}", hint="Use data.cache = file, or allow more."
    )


def _pixels_to_hold(source: ImageInput, rule: Preprocess, crop: CropRule) -> tuple[Tensor, bool]:
    """uint8 [C, Y, X], and whether the loader would shrink the image in its decoder.

    `whole`: the image at the model's size. `squash` and `shorter-side`: resized as a whole, to be cut. The others: all pixels.
    """
    if crop.how == "whole":
        return crop_and_resize(source, rule, crop, seed=0, epoch=0, sample=0), False
    if crop.how in ("squash", "shorter-side"):
        target = dataclasses.replace(rule, resize=crop.how, crop_frac=crop.crop_frac)
        size = scaled_size(target, *_size(source, rule))
        return read(source, dataclasses.replace(rule, resize="squash", crop_frac=1.0, image_size=size)), False
    if rule.mode == "array":
        image_CYX = decode(source, rule.mode, rule.bits)
        require_channels(rule, len(image_CYX))
        return image_CYX, False
    with opened(source) as image:
        shrinks = shrinkage(image, upright_size(image), rule.image_size, rule) > 1
        return pixels(image, rule.mode, bits=rule.bits), shrinks


def _size(source: ImageInput, rule: Preprocess) -> tuple[int, int]:
    if rule.mode == "array":
        _, height, width = decode(source, rule.mode).shape
        return height, width
    with opened(source) as image:
        return upright_size(image)


def _require_scale_in_reach(images: list[Tensor], rule: Preprocess, crop: CropRule) -> None:
    if crop.how not in ("inception", "torchvision") or rule.filter == "area":
        return
    largest = (max(image.shape[side] for image in images) for side in (1, 2))
    reach = max(neighbours(old, new, rule.filter) for old, new in zip(largest, rule.image_size, strict=True))
    if reach > MOST_NEIGHBOURS:
        raise UsageError(
            "data.cache = device cannot resize images that are more than a hundred times larger than the model's",
            hint="Use data.cache = file.",
        )


def resident_batches(
    resident: Resident,
    order: Order,
    prepare: Callable[[Batch, Tensor], tuple[Tensor, Tensor]],
    steps: range,
    *,
    rank: int = 0,
    world: int = 1,
) -> Generator[Batch]:
    """The batches of these steps; their images and targets are made by `prepare`.

    `prepare` is given the images of several steps as one batch, and the step of each.
    """
    device, image_shape = resident.held.flat.device, (resident.rule.channels, *resident.rule.image_size)
    share = order.batch_size // world
    ahead = max(1, _PREPARED_AT_ONCE // (share * math.prod(image_shape)))
    position_B = torch.arange(rank * share, (rank + 1) * share)

    def prepared(steps: range) -> Batch:
        parts = [rank_part(order.batch(step), rank, world) for step in steps]
        places = Places(*(torch.cat(field) for field in zip(*parts, strict=True)))
        images_BCYX = resident.images(places, order.seed)
        targets_B = resident.targets_N[places.ids.to(device, non_blocking=True)]
        valid_B, positions_B = resident.valid_N[places.ids], position_B.repeat(len(steps))
        many = Batch(images_BCYX, targets_B, valid_B, *places, positions_B)
        x_BCYX, targets = prepare(many, torch.tensor(steps).repeat_interleave(share))
        return many._replace(images=x_BCYX, targets=targets)

    runs = [steps[start : start + ahead] for start in range(0, len(steps), ahead)]
    for many in _one_ahead(prepared, runs, device) if device.type == "cuda" and runs else map(prepared, runs):
        for start in range(0, len(many.ids), share):
            yield Batch(*(field[start : start + share] for field in many))


def _one_ahead(prepared: Callable[[range], Batch], runs: Sequence[range], device: torch.device) -> Generator[Batch]:
    """`map`, with the next item prefetched by a thread on a separate CUDA stream.

    Preparing means many small copies and kernels, and random numbers of the CPU: the GPU would stand still for it.
    """
    stream = torch.cuda.Stream(device)

    def make(run: range) -> tuple[Batch, torch.cuda.Event]:
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            many = prepared(run)
            done.record(stream)
        return many, done

    stream.wait_stream(torch.cuda.current_stream(device))  # the images are there
    with ThreadPoolExecutor(1) as thread:
        prefetched = thread.submit(make, runs[0])
        for next_run in [*runs[1:], None]:
            many, done = prefetched.result()
            if next_run is not None:
                prefetched = thread.submit(make, next_run)
            training = torch.cuda.current_stream(device)
            training.wait_event(done)
            for field in many:
                if field.is_cuda:
                    field.record_stream(training)  # not to be overwritten while it is read there
            yield many
