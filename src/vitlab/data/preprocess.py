"""From an image to the numbers a model was trained on. This contract is saved beside the weights and travels with them.

Owns `Preprocess` (data) and its application; one function serves training, evaluation and prediction.
Letters: B batch, C channels, Y X rows and columns.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlab.core.errors import UsageError

Mode = Literal["L", "RGB", "array"]  # "array": channels as they come, from Python arrays only
Filter = Literal["bilinear", "bicubic", "area"]
_PILLOWS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
MAX_PIXELS = 40_000_000  # of a file's header, before decoding, and of anything made from it


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    rows: int
    cols: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Every step between the file and the tensor, in order. Stored as `preprocess.json`."""

    decoder: Literal["pillow"] = "pillow"  # by content allow-list, EXIF turned upright, 16-bit scaled
    mode: Mode = "RGB"  # channel order
    image_size: tuple[int, int] = (224, 224)
    resize: Literal["squash", "shorter-side"] = "squash"  # BiT's protocol; big_vision's with crop_frac and "area"
    crop_frac: float = 1.0  # of the resized image, from its centre
    filter: Filter = "bilinear"
    antialias: bool = True  # says nothing for "area", which is a mean
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # on the 0-1 scale; 0.5 and 0.5 give the paper's -1...1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        channels = self.channels
        if len(self.mean) != channels or len(self.std) != channels:
            raise UsageError(f"mode {self.mode} needs {channels} values in mean and std")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (finite and min(self.image_size) >= 1 and 0 < self.crop_frac <= 1 and min(self.std) > 0):
            raise UsageError("image_size and std must be positive, mean finite, and crop_frac above 0 and at most 1")

    @property
    def channels(self) -> int:
        return len(self.mean) if self.mode == "array" else len(self.mode)


def resize(rule: Preprocess, images_BCYX: Tensor) -> Tensor:
    """uint8 in, uint8 out, so that a cached set stays small and every path rounds the same way."""
    if images_BCYX.shape[1] != rule.channels:
        raise UsageError(f"an image of {images_BCYX.shape[1]} channel(s) was given where {rule.channels} are needed")
    rows, cols = rule.image_size
    scaled = scaled_size(rule, images_BCYX.shape[2], images_BCYX.shape[3])
    return middle(scale(images_BCYX, scaled, rule.filter, rule.antialias), rows, cols)


def middle(images_BCYX: Tensor, rows: int, cols: int) -> Tensor:
    top, left = (images_BCYX.shape[2] - rows) // 2, (images_BCYX.shape[3] - cols) // 2
    return images_BCYX[:, :, top : top + rows, left : left + cols]


def scaled_size(rule: Preprocess, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the whole image before the middle is cut out of it."""
    rows, cols = round(rule.image_size[0] / rule.crop_frac), round(rule.image_size[1] / rule.crop_frac)
    if rule.resize == "shorter-side":
        factor = max(rows / height, cols / width)
        rows, cols = max(rows, round(height * factor)), max(cols, round(width * factor))
        if rows * cols > MAX_PIXELS:
            raise UsageError(f"an image of {height}x{width} is too long and thin to be scaled")
    return rows, cols


def scale(images_BCYX: Tensor, size: tuple[int, int], how: Filter, antialias: bool) -> Tensor:
    """uint8 images to another size, columns first, rounded to whole grey levels after each direction, as Pillow does.

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


def scale_part(
    image_CYX: Tensor, part: Box, shrink: int, size: tuple[int, int], how: Filter, antialias: bool
) -> Tensor:
    """`part`, counted in the pixels of a picture of which `image_CYX` is the `shrink`th, at another size, [C, rows, columns].

    Its edges may lie between the pixels that are left, and stay there: moved to the next one, they would shift the content
    by some grey levels. torch knows no such edges; Pillow does, and rounds alike. What was shrunk is always antialiased.
    """
    top, left, bottom, right = (
        edge / shrink for edge in (part.top, part.left, part.top + part.rows, part.left + part.cols)
    )
    y, x = math.floor(top), math.floor(left)  # nothing further out than these pixels may reach the result
    image_CYX = image_CYX[:, y : math.ceil(bottom), x : math.ceil(right)]
    if all(edge.is_integer() for edge in (top, left, bottom, right)):
        return scale(image_CYX[None], size, how, antialias)[0]
    if how == "area":
        return _scale_by_area(image_CYX[None], size, (top - y, bottom - y), (left - x, right - x))[0]
    pixels = np.ascontiguousarray(image_CYX.permute(1, 2, 0).numpy())
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture = picture.resize((size[1], size[0]), _PILLOWS[how], box=(left - x, top - y, right - x, bottom - y))
    return torch.from_numpy(np.array(picture).reshape(*size, -1)).permute(2, 0, 1)


def _scale_by_area(
    images_BCYX: Tensor,
    size: tuple[int, int],
    rows: tuple[float, float] | None = None,
    cols: tuple[float, float] | None = None,
) -> Tensor:
    """Each new pixel is the mean of what it covers, with shares of pixels at its edges: TensorFlow's "area", not torch's.
    The whole image, or from the first to the last of `rows` and `cols`."""
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
    mean, std = (torch.tensor(v, device=images_BCYX.device).view(1, -1, 1, 1) for v in (rule.mean, rule.std))
    return images_BCYX.float().div_(255).sub_(mean).div_(std)  # in place: a batch is read from memory once, not thrice
