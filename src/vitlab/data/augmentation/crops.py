"""Random crops of training images: a pure function of (seed, epoch, sample, copy).

An image is decoded once, no larger than the crop needs. Letters: C channels, Y X rows and columns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from torch import Tensor

from vitlab.core.runtime import mix
from vitlab.data.decode import ImageInput, channels_as_given, opened, pixel_array, shrinkage, upright_size
from vitlab.data.preprocess import Array, Box, Preprocess, as_tensor, require_channels, scale_part, scaled_size
from vitlab.data.rules import CropRule
from vitlab.data.tags import CROP

Draw = Callable[[], float]  # the next number in [0, 1)
INCEPTION_TRIES, TORCHVISION_TRIES = 100, 10  # for a box that fits: TensorFlow's default, and torchvision's number


def resized_as(rule: CropRule, preprocess: Preprocess) -> Preprocess:
    """`preprocess` with the crop's way to resize, which may differ from the test's."""
    wanted = {"filter": rule.filter, "antialias": rule.antialias}
    changes: dict[str, Any] = {key: value for key, value in wanted.items() if value is not None}
    return dataclasses.replace(preprocess, **changes) if changes else preprocess


def crop_and_resize(
    source: ImageInput, preprocess: Preprocess, rule: CropRule, *, seed: int, epoch: int, sample: int, copy: int = 0
) -> Tensor:
    """uint8 [C, rows, columns] of the model's size, of repetition `copy`."""
    return as_tensor(crop_array(source, preprocess, rule, seed=seed, epoch=epoch, sample=sample, copy=copy))[0]


def crop_array(
    source: ImageInput, preprocess: Preprocess, rule: CropRule, *, seed: int, epoch: int, sample: int, copy: int = 0
) -> Array:
    """The same as uint8 [rows, columns, C], which may be read-only."""
    preprocess = resized_as(rule, preprocess)
    draw, shrink = _draws(seed, epoch, sample, copy), 1
    if preprocess.mode == "array":
        image_YXC = channels_as_given(source, preprocess.bits)
        require_channels(preprocess, image_YXC.shape[2])
        plan = _plan(preprocess, rule, image_YXC.shape[0], image_YXC.shape[1], draw)
    else:
        with opened(source) as image:
            plan = _plan(preprocess, rule, *upright_size(image), draw)
            shrink = shrinkage(image, plan.first[2:], plan.size, preprocess)
            image_YXC = pixel_array(image, preprocess.mode, shrink, preprocess.bits)
    scaled_YXC = scale_part(image_YXC, plan.first, shrink, plan.size, preprocess.filter, preprocess.antialias)
    return scaled_YXC if plan.second is None else _cut_out(scaled_YXC, plan.second)


class _Plan(NamedTuple):
    """Cut out the first box, resize it, and cut the second, if any, out of that."""

    first: Box
    size: tuple[int, int]
    second: Box | None = None


def _plan(preprocess: Preprocess, rule: CropRule, height: int, width: int, draw: Draw) -> _Plan:
    if rule.how in ("squash", "shorter-side"):
        size = scaled_size(_resized_whole(preprocess, rule), height, width)
        return _Plan(Box(0, 0, height, width), size, _random_place(*preprocess.image_size, *size, draw))
    return _Plan(draw_box(rule, height, width, draw), preprocess.image_size)


@functools.lru_cache(maxsize=8)  # to make and check one takes longer than to resize a small image
def _resized_whole(preprocess: Preprocess, rule: CropRule) -> Preprocess:
    assert rule.how in ("squash", "shorter-side")
    return dataclasses.replace(preprocess, resize=rule.how, crop_frac=rule.crop_frac)


def draw_box(rule: CropRule, height: int, width: int, draw: Draw) -> Box:
    """A box of random area, shape and place; where no try fits, the whole image or its middle."""
    if rule.how == "whole":
        return Box(0, 0, height, width)
    return (_inception_box if rule.how == "inception" else _torchvision_box)(rule, height, width, draw)


def _inception_box(rule: CropRule, height: int, width: int, draw: Draw) -> Box:
    """TensorFlow's `sample_distorted_bounding_box`: uniform shape, then side."""
    least, most = (share * height * width for share in rule.area)
    for _ in range(INCEPTION_TRIES):
        aspect = _between(rule.aspect, draw())
        low = round(math.sqrt(least / aspect))
        high = min(round(math.sqrt(most / aspect)), int((width + 0.5) / aspect), height)
        rows = low + int(draw() * (high - low + 1)) if low < high else high
        # One row more or less, where rounding has left the range of areas.
        rows += (rows * round(rows * aspect) < least) - (rows * round(rows * aspect) > most)
        cols = round(rows * aspect)
        if least <= rows * cols <= most and 0 < rows <= height and 0 < cols <= width:
            return _random_place(rows, cols, height, width, draw)
    return Box(0, 0, height, width)


def _torchvision_box(rule: CropRule, height: int, width: int, draw: Draw) -> Box:
    """torchvision's RandomResizedCrop: uniform area, and log of the shape."""
    for _ in range(TORCHVISION_TRIES):
        area = _between(rule.area, draw()) * height * width
        aspect = math.exp(_between((math.log(rule.aspect[0]), math.log(rule.aspect[1])), draw()))
        rows, cols = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < cols <= width:
            return _random_place(rows, cols, height, width, draw)
    rows = min(height, max(1, round(width / rule.aspect[0])))
    cols = min(width, max(1, round(height * rule.aspect[1])))
    return Box((height - rows) // 2, (width - cols) // 2, rows, cols)


def _random_place(rows: int, cols: int, height: int, width: int, draw: Draw) -> Box:
    return Box(int(draw() * (height - rows + 1)), int(draw() * (width - cols + 1)), rows, cols)


def _between(ends: tuple[float, float], u: float) -> float:
    return ends[0] + u * (ends[1] - ends[0])


def _cut_out(image_YXC: Array, box: Box) -> Array:
    return image_YXC[box.top : box.top + box.rows, box.left : box.left + box.cols]


def _draws(seed: int, epoch: int, sample: int, copy: int) -> Draw:
    """Random numbers in plain Python: for four of them, a tensor costs more."""

    def numbers() -> Generator[float]:  # begins when the first is asked for: some crops need none
        key = mix(seed, CROP, epoch, sample, copy)
        for turn in itertools.count():
            yield (mix(key, turn) >> 10) * 2**-53  # the 53 bits that a float holds

    return numbers().__next__
