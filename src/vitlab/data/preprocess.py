"""From an image to what a model was trained on; saved beside the weights.

Owns `Preprocess` (data) and its application. Single images are arrays until a resize needs a tensor: around images of a few
thousand bytes, torch costs more than it does. Letters: B batch, C channels, Y X rows and columns.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlab.core.errors import UsageError, amount
from vitlab.data.rules import MAX_PIXELS, Filter, Preprocess

Array = np.ndarray[Any, Any]
_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    rows: int
    cols: int


class Region(NamedTuple):
    """A part of an image, in pixels, whose edges may lie between them."""

    top: float
    left: float
    rows: float
    cols: float


def seen_region(rule: Preprocess, height: int, width: int) -> Region:
    """Which part of an image of this size a model with this rule sees; the rest is cut off."""
    scaled, size = scaled_size(rule, height, width), rule.image_size
    down, across = height / scaled[0], width / scaled[1]
    top, left = ((whole - part) // 2 for whole, part in zip(scaled, size, strict=True))
    return Region(top * down, left * across, size[0] * down, size[1] * across)


def resize(rule: Preprocess, images_BCYX: Tensor) -> Tensor:
    """uint8 in and out: caches stay small, and every path rounds the same way."""
    require_channels(rule, images_BCYX.shape[1])
    rows, cols = rule.image_size
    scaled = scaled_size(rule, images_BCYX.shape[2], images_BCYX.shape[3])
    return middle(scale(images_BCYX, scaled, rule.filter, rule.antialias), rows, cols)


def require_channels(rule: Preprocess, given: int) -> None:
    if given != rule.channels:
        raise UsageError(f"an image of {amount(given, 'channel')} was given where {rule.channels} are needed")


def middle(images_BCYX: Tensor, rows: int, cols: int) -> Tensor:
    """Cut `rows` and `cols` out of the centre of each image."""
    top, left = (images_BCYX.shape[2] - rows) // 2, (images_BCYX.shape[3] - cols) // 2
    return images_BCYX[:, :, top : top + rows, left : left + cols]


def _rounded(numerator: int, denominator: int) -> int:
    """The quotient to the nearest whole number, a half to the even one."""
    quotient, rest = divmod(2 * numerator + denominator, 2 * denominator)
    return quotient - (rest == 0 and quotient % 2)


def scaled_size(rule: Preprocess, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the whole image before the middle is cut out of it."""
    rows, cols = round(rule.image_size[0] / rule.crop_frac), round(rule.image_size[1] / rule.crop_frac)
    if rule.resize == "shorter-side":
        # In whole numbers, as in an exported graph: a side that is rounded the other way would move the picture.
        rows, cols = max(rows, _rounded(height * cols, width)), max(cols, _rounded(width * rows, height))
        if rows * cols > MAX_PIXELS:
            raise UsageError(f"an image of {height}x{width} is too long and thin to be scaled")
    return rows, cols


def scale(images_BCYX: Tensor, size: tuple[int, int], how: Filter, antialias: bool) -> Tensor:
    """Resize uint8 images, columns first, rounded in each direction as Pillow does.

    The CPU has one kernel for all of that, so it does the work wherever the images are: a GPU's would round otherwise.
    """
    if tuple(images_BCYX.shape[2:]) == size:
        return images_BCYX
    here_BCYX = images_BCYX.cpu()
    if how == "area":
        return _scale_by_area(here_BCYX, size).to(images_BCYX.device)
    if not here_BCYX.is_contiguous():  # a piece of a larger image: the kernel is twice as fast on a copy
        here_BCYX = here_BCYX.contiguous(memory_format=torch.channels_last)
    return F.interpolate(here_BCYX, size=size, mode=how, antialias=antialias).to(images_BCYX.device)


def scale_part(image_YXC: Array, part: Box, shrink: int, size: tuple[int, int], how: Filter, antialias: bool) -> Array:
    """`part` of a picture, resized: [Y, X, C]. `part` counts in its own pixels, `image_YXC` has one for each `shrink` of them.

    Its edges may lie between the pixels that are left, and stay there: moved to the next one, they would shift the content by
    some grey levels. torch knows no such edges; Pillow does, and rounds alike. What was shrunk is always antialiased.
    """
    if part == (0, 0, *size) and image_YXC.shape[:2] == size:
        return image_YXC
    top, left, bottom, right = part.top, part.left, part.top + part.rows, part.left + part.cols
    if not (top % shrink or left % shrink or bottom % shrink or right % shrink):
        cut_YXC = image_YXC[top // shrink : bottom // shrink, left // shrink : right // shrink]
        return as_array(scale(as_tensor(cut_YXC), size, how, antialias))
    top, left, bottom, right = top / shrink, left / shrink, bottom / shrink, right / shrink
    y, x = math.floor(top), math.floor(left)  # nothing further out than these pixels may reach the result
    cut_YXC = np.ascontiguousarray(image_YXC[y : math.ceil(bottom), x : math.ceil(right)])
    if how == "area":
        return as_array(_scale_by_area(as_tensor(cut_YXC), size, (top - y, bottom - y), (left - x, right - x)))
    picture = Image.fromarray(cut_YXC[:, :, 0] if cut_YXC.shape[2] == 1 else cut_YXC)
    picture = picture.resize((size[1], size[0]), _PILLOW_FILTERS[how], box=(left - x, top - y, right - x, bottom - y))
    return np.asarray(picture).reshape(*size, -1)


def as_tensor(image_YXC: Array) -> Tensor:
    """A batch of one, [1, C, Y, X], of the same memory where torch can use it.

    By `reshape`: only with its strides does the resize see channels-last memory, and is three times as fast.
    """
    image_YXC = np.require(image_YXC, requirements=("C", "W"))
    return torch.from_numpy(image_YXC.reshape(1, *image_YXC.shape)).permute(0, 3, 1, 2)


def as_array(image_1CYX: Tensor) -> Array:
    """[Y, X, C]"""
    return image_1CYX[0].permute(1, 2, 0).numpy()


def _scale_by_area(
    images_BCYX: Tensor,
    size: tuple[int, int],
    rows: tuple[float, float] | None = None,
    cols: tuple[float, float] | None = None,
) -> Tensor:
    """Each new pixel is the mean of what it covers: TensorFlow's "area", not torch's.

    Of the whole image, or from the first to the last of `rows` and `cols`.
    """
    down, across = (
        _coverage(old, new, ends or (0, old))
        for old, new, ends in zip(images_BCYX.shape[2:], size, (rows, cols), strict=True)
    )
    return (down @ images_BCYX.float() @ across.T).round().clamp(0, 255).to(torch.uint8)


def _coverage(old: int, new: int, ends: tuple[float, float]) -> Tensor:
    """[new, old]: the share of each old pixel in each new one; rows sum to 1."""
    edges = ends[0] + torch.arange(new + 1, dtype=torch.float64) * ((ends[1] - ends[0]) / new)
    first, last = edges[:-1, None], edges[1:, None]
    pixels = torch.arange(old, dtype=torch.float64)
    overlap = (torch.minimum(last, pixels + 1) - torch.maximum(first, pixels)).clamp_min(0)
    return (overlap / overlap.sum(dim=1, keepdim=True)).float()


def normalise(rule: Preprocess, images_BCYX: Tensor) -> Tensor:
    """uint8 -> float32, (x/255 - mean) / std per channel."""
    x_BCYX = images_BCYX.float()
    channels_last = x_BCYX.is_contiguous(memory_format=torch.channels_last) and not x_BCYX.is_contiguous()
    # Where the channels of a pixel lie together, a CPU is four times as fast on rows of all numbers with means as long.
    times, shape = (x_BCYX.shape[3], (-1,)) if channels_last else (1, (-1, 1, 1))
    mean, std = (  # nobody waits for a GPU that is busy with the batch before
        torch.tensor(v * times).to(x_BCYX.device, non_blocking=True).view(shape) for v in (rule.mean, rule.std)
    )
    same_memory = x_BCYX.permute(0, 2, 3, 1).view(len(x_BCYX), x_BCYX.shape[2], -1) if channels_last else x_BCYX
    same_memory.div_(255).sub_(mean).div_(std)  # in place: a batch is read from memory once, not thrice
    # One channel may have any stride, by which torch chooses the layout of a convolution, and with it the last bits.
    return x_BCYX.view(x_BCYX.shape) if x_BCYX.is_contiguous() else x_BCYX
