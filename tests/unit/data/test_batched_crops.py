"""Boxes and crops of a batch are those of its images one by one: to the pixel, and bit for bit."""

import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_after
from torch import Tensor

from vitlab.data.augmentation import batched_crops, crops
from vitlab.data.augmentation.batched_boxes import draw_boxes
from vitlab.data.augmentation.batched_crops import MOST_NEIGHBOURS, HeldImages, Smooth, hold, neighbours
from vitlab.data.augmentation.crops import CropRule, draw_box
from vitlab.data.batches import Places

TIMES = 50 if os.environ.get("VITLAB_SOAK") else 1
CPU = torch.device("cpu")
FILTERS: list[Smooth] = ["bilinear", "bicubic"]
RULES = [
    {},
    {"area": (0.08, 1.0), "aspect": (3 / 4, 4 / 3)},
    {"area": (0.9, 1.0), "aspect": (0.5, 0.6)},  # often in vain
    {"area": (0.1, 0.25), "aspect": (1.0, 1.0)},  # half of an odd side is rounded
    {"area": (0.001, 0.01), "aspect": (0.01, 100.0)},
]


def some_places(draw: np.random.Generator, count: int) -> Places:
    return Places(*(torch.from_numpy(draw.integers(0, 10 ** draw.integers(1, 12), count)) for _ in range(3)))


@pytest.mark.parametrize("fields", RULES, ids=str)
@pytest.mark.parametrize("how", ["inception", "torchvision"])
def test_boxes_are_those_that_are_drawn_one_by_one(how: Any, fields: dict[str, Any]) -> None:
    draw, rule = np.random.default_rng(len(str(fields))), CropRule(how=how, **fields)
    for turn in range(4 * TIMES):
        count, largest = (1, 60)[turn % 2], int(draw.choice([4, 50, 3000]))
        seed, places = int(draw.integers(0, 2**63)), some_places(draw, count)
        heights, widths = draw.integers(1, largest + 1, (2, count))
        widths[::3] = heights[::3]
        assert_boxes(rule, heights, widths, places, seed)


@pytest.mark.parametrize(("how", "aspect"), [("inception", (0.1, 10.0)), ("torchvision", (0.8, 1.25))])
def test_last_try_counts(how: Any, aspect: tuple[float, float]) -> None:
    """Few tries succeed, about one in as many as there are, so that some of these images need every one of them."""
    sizes, rule = np.full(1000, 100), CropRule(how=how, area=(0.95, 1.0), aspect=aspect)
    assert_boxes(rule, sizes, sizes, some_places(np.random.default_rng(0), 1000), seed=3)


def assert_boxes(
    rule: CropRule, heights: np.ndarray[Any, Any], widths: np.ndarray[Any, Any], places: Places, seed: int
) -> None:
    found = draw_boxes(rule, (8, 9), heights, widths, places, seed)
    for i, box in enumerate(found.tolist()):
        numbers = crops._draws(seed, int(places.epochs[i]), int(places.ids[i]), int(places.copies[i]))
        assert tuple(box) == draw_box(rule, int(heights[i]), int(widths[i]), numbers)


def some_images(draw: np.random.Generator, channels: int, count: int, largest: int) -> list[Tensor]:
    """Noise, and black and white, which needs the clamp."""
    sizes = draw.integers(1, largest + 1, (count, 2))
    made = [draw.integers(0, 256, (channels, *size), dtype=np.uint8) for size in sizes]
    return [torch.from_numpy(image if i % 2 else (image > 127).astype(np.uint8) * 255) for i, image in enumerate(made)]


def some_boxes(draw: np.random.Generator, images: list[Tensor]) -> np.ndarray[Any, Any]:
    sizes = np.array([image.shape[1:] for image in images])
    parts = draw.integers(1, sizes + 1)
    return np.concatenate([draw.integers(0, sizes - parts + 1), parts], axis=1)


def one_by_one(images: list[Tensor], boxes: np.ndarray[Any, Any], size: tuple[int, int], how: Smooth) -> Tensor:
    """As torch resizes bytes, the channels of a pixel lying together."""
    made: list[Tensor] = []
    for image, (top, left, rows, cols) in zip(images, boxes.tolist(), strict=True):
        cut = image[None, :, top : top + rows, left : left + cols].contiguous(memory_format=torch.channels_last)
        made.append(F.interpolate(cut, size=size, mode=how, antialias=True)[0])
    return torch.stack(made)


def batched(images: list[Tensor], boxes: np.ndarray[Any, Any], size: tuple[int, int], how: Smooth) -> Tensor:
    return hold(list(images), len(images[0]), CPU).at_once(np.arange(len(images)), boxes, size, how)


@pytest.mark.parametrize("channels", slow_after(1, [3, 1, 4, 6]))
@pytest.mark.parametrize("how", FILTERS)
def test_crops_are_the_resized_boxes_bit_for_bit(how: Smooth, channels: int) -> None:
    draw = np.random.default_rng(channels)
    for _ in range(20 * TIMES):
        images = some_images(draw, channels, 12, largest=int(draw.choice([3, 40, 200])))
        boxes, (rows, cols) = some_boxes(draw, images), draw.integers(1, draw.choice([4, 40, 200]), 2).tolist()
        expected = one_by_one(images, boxes, (rows, cols), how)
        assert torch.equal(batched(images, boxes, (rows, cols), how), expected), (rows, cols)


@pytest.mark.parametrize("how", slow_after(1, reversed(FILTERS)))
def test_every_width_to_some_widths_bit_for_bit(how: Smooth) -> None:
    """One more pixel can move a weight over the edge of its rounding."""
    draw = np.random.default_rng(0)
    images = [torch.from_numpy(draw.integers(0, 256, (1, 2, width), dtype=np.uint8)) for width in range(1, 301)]
    boxes = np.array([[0, 0, 2, width] for width in range(1, 301)])
    for width in (1, 32, 224) if TIMES == 1 else range(1, 301):
        assert torch.equal(batched(images, boxes, (2, width), how), one_by_one(images, boxes, (2, width), how)), width


@pytest.mark.parametrize("how", FILTERS)
def test_images_of_the_most_neighbours_are_still_exact(how: Smooth) -> None:
    """Where sums come closest to what a float holds, and weights have the most bits."""
    side = next(side for side in range(2000, 0, -1) if neighbours(side, 2, how) <= MOST_NEIGHBOURS)
    white, noise = torch.full((1, 200, side), 255, dtype=torch.uint8), np.random.default_rng(8)
    noisy = [torch.from_numpy(noise.integers(0, 256, white.shape, dtype=np.uint8)) for _ in range(60)]
    images = [white, white.clone(), *noisy]
    images[1][:, :, side // 3] = 254
    boxes = np.array([[0, 0, 200, side]] * len(images))
    assert torch.equal(batched(images, boxes, (200, 2), how), one_by_one(images, boxes, (200, 2), how))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_no_setting_of_matrix_products_changes_a_bit(precision: str) -> None:
    draw = np.random.default_rng(5)
    images = some_images(draw, 3, 16, largest=150)
    boxes = some_boxes(draw, images)
    with warnings.catch_warnings():  # some versions of torch would have it set otherwise
        warnings.simplefilter("ignore")
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            found = batched(images, boxes, (64, 64), "bicubic")
        finally:
            torch.set_float32_matmul_precision(before)
    assert torch.equal(found, one_by_one(images, boxes, (64, 64), "bicubic"))


def test_batch_that_is_made_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(6)
    images = some_images(draw, 3, 20, largest=60)
    boxes = some_boxes(draw, images)
    whole = batched(images, boxes, (16, 16), "bilinear")
    monkeypatch.setattr("vitlab.data.augmentation.batched_crops._TOGETHER", 3 * 60 * 60 * 7)
    assert torch.equal(batched(images, boxes, (16, 16), "bilinear"), whole)


@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1)])
def test_long_thin_boxes_take_no_more_memory_than_others(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have few pixels, and as many weights as large ones."""
    count, room = 20, 2**21
    monkeypatch.setattr("vitlab.data.augmentation.batched_crops._TOGETHER", room)
    most, spread = list[int](), batched_crops._spread

    def watched(*given: Any) -> Tensor:
        made = spread(*given)
        most.append(made.numel())
        return made

    monkeypatch.setattr(batched_crops, "_spread", watched)
    images = [torch.zeros(1, *shape, dtype=torch.uint8) for _ in range(count)]
    batched(images, np.array([[0, 0, *shape]] * count), (64, 64), "bilinear")
    assert max(most) <= room


def test_boxes_of_one_size_are_cut_out_as_they_are() -> None:
    draw = np.random.default_rng(7)
    images = [torch.from_numpy(draw.integers(0, 256, (3, 9 + i, 30 - i), dtype=np.uint8)) for i in range(20)]
    boxes = np.array([[i % 3, 2, 7, 8] for i in range(20)])
    held: HeldImages = hold(list(images), 3, CPU)
    found = held.cut(np.arange(19, -1, -1), boxes[::-1], (7, 8))
    expected = torch.stack([image[:, i % 3 : i % 3 + 7, 2:10] for i, image in enumerate(images)])
    assert torch.equal(found.flip(0), expected)


def test_images_are_held_once() -> None:
    images = [torch.zeros(3, 4, 5, dtype=torch.uint8) for _ in range(10)]
    assert len(hold(images, 3, CPU).flat) == 10 * 60 + 5, "and a row to spare"
    assert not images, "so that the originals can go"
