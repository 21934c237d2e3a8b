"""Crops that a GPU cuts out of the images it holds: the bits of the CPU, whatever its matrix products round to."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.data.augmentation.batched_crops import HeldImages, Smooth, hold
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset, single_labels
from vitlab.data.loader import BadImages, Batch, TrainInputs, train_batches
from vitlab.data.preprocess import Preprocess
from vitlab.data.resident import on_device, resident_batches

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def some_images(count: int, largest: int) -> tuple[list[Tensor], np.ndarray[Any, Any]]:
    """Noise, black and white in every second image, and a box in each."""
    draw = np.random.default_rng(largest)
    sizes = draw.integers(1, largest + 1, (count, 2))
    made = [draw.integers(0, 256, (3, *size), dtype=np.uint8) for size in sizes]
    images = [
        torch.from_numpy(image if i % 2 else (image > 127).astype(np.uint8) * 255) for i, image in enumerate(made)
    ]
    parts = draw.integers(1, sizes + 1)
    return images, np.concatenate([draw.integers(0, sizes - parts + 1), parts], axis=1)


def one_by_one(images: list[Tensor], boxes: np.ndarray[Any, Any], size: tuple[int, int], how: Smooth) -> Tensor:
    made: list[Tensor] = []
    for image, (top, left, rows, cols) in zip(images, boxes.tolist(), strict=True):
        cut = image[None, :, top : top + rows, left : left + cols].contiguous(memory_format=torch.channels_last)
        made.append(torch.nn.functional.interpolate(cut, size=size, mode=how, antialias=True)[0])
    return torch.stack(made)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_crops_have_the_bits_of_the_cpu(how: Smooth, precision: str) -> None:
    with warnings.catch_warnings():  # some versions of torch would have it set otherwise
        warnings.simplefilter("ignore")
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            for largest in (5, 40, 300, 900):
                images, boxes = some_images(64, largest)
                held = hold(list(images), 3, CUDA)
                for size in ((8, 10), (32, 32), (224, 224)):
                    found = held.crops(np.arange(64), boxes, size, how)
                    assert found.is_cuda
                    assert torch.equal(found.cpu(), one_by_one(images, boxes, size, how)), (largest, size)
        finally:
            torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_every_width_has_the_bits_of_the_cpu(how: Smooth) -> None:
    """A division or a power that is off by one bit would move some weight over the edge of its rounding."""
    draw, widths = np.random.default_rng(0), range(1, 701)
    images = [torch.from_numpy(draw.integers(0, 256, (3, 2, width), dtype=np.uint8)) for width in widths]
    boxes = np.array([[0, 0, 2, width] for width in widths])
    held = hold(list(images), 3, CUDA)
    for size in ((2, 32), (2, 96), (2, 224), (2, 384)):
        found = held.at_once(np.arange(len(images)), boxes, size, how).cpu()
        wrong = (found != one_by_one(images, boxes, size, how)).flatten(1).any(dim=1).nonzero()[:, 0] + 1
        assert not len(wrong), (size, wrong.tolist())


def test_images_behind_the_first_two_gigabytes_are_found() -> None:
    """Where a number of 32 bits ends."""
    images, boxes = some_images(8, 50)
    here = hold(list(images), 3, torch.device("cpu"))
    before = 2**31 + 5
    flat = torch.zeros(before + len(here.flat), dtype=torch.uint8, device=CUDA)
    flat[before:] = here.flat.to(CUDA)
    there = HeldImages(flat, here.starts_N + before, here.heights_N, here.widths_N, 3)
    found = there.crops(np.arange(8), boxes, (24, 24), "bilinear")
    assert torch.equal(found.cpu(), one_by_one(images, boxes, (24, 24), "bilinear"))


@pytest.mark.parametrize("how", ["inception", "torchvision", "squash", "shorter-side", "whole"])
def test_batches_from_the_gpu_are_those_of_the_loader(how: Any) -> None:
    arrays = [image.permute(1, 2, 0).numpy() for image in some_images(30, 120)[0]]
    keys = [str(i) for i in range(30)]
    dataset = Dataset("noise", ("a",), keys, single_labels([0] * 30), lambda i: arrays[i])
    rule, crop, order = Preprocess(image_size=(48, 40)), CropRule(how=how), Order(30, 16, seed=7)
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # matrix products may want a variable set before the start
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = on_device(dataset, rule, crop, CUDA, most_gb=1, bad=BadImages(0), console=Console(quiet=True))
            found = list(resident_batches(held, order, _as_it_is, range(5)))
            wanted = list(train_batches(TrainInputs(dataset, rule, crop, order), range(5), bad=BadImages(0)))
    finally:
        torch.use_deterministic_algorithms(strict)
    for one, other in zip(found, wanted, strict=True):
        assert one.images.is_cuda
        assert torch.equal(one.images.cpu(), other.images)
        assert torch.equal(one.targets.cpu(), other.targets)


def _as_it_is(batch: Batch, _step: Tensor) -> tuple[Tensor, Tensor]:
    return batch.images, batch.targets
