"""From an image to the numbers a model was trained on. This contract is saved beside the weights and travels with them.

Owns `Preprocess` (data) and its application; one function serves training, evaluation and prediction.
Letters: B batch, C channels, Y X rows and columns.
"""

import dataclasses
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core.errors import UsageError

Mode = Literal["L", "RGB"]
MAX_PIXELS = 40_000_000  # of a file's header, before decoding, and of anything made from it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Every step between the file and the tensor, in order. Stored as `preprocess.json`."""

    decoder: Literal["pillow"] = "pillow"  # by content allow-list, EXIF turned upright, 16-bit scaled
    mode: Mode = "RGB"  # channel order
    image_size: tuple[int, int] = (224, 224)
    resize: Literal["squash", "shorter-side"] = "squash"
    crop_frac: float = 1.0  # of the resized image, from its centre
    filter: Literal["bilinear", "bicubic"] = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # on the 0-1 scale; 0.5 and 0.5 give the paper's -1...1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        channels = len(self.mode)
        if len(self.mean) != channels or len(self.std) != channels:
            raise UsageError(f"mode {self.mode} needs {channels} values in mean and std")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (finite and min(self.image_size) >= 1 and 0 < self.crop_frac <= 1 and min(self.std) > 0):
            raise UsageError("image_size and std must be positive, mean finite, and crop_frac above 0 and at most 1")

    @property
    def channels(self) -> int:
        return len(self.mode)


def apply(rule: Preprocess, image_CYX: Tensor) -> Tensor:
    """uint8 [C, Y, X] of any size -> float32 [C, rows, columns] as the model wants it."""
    return normalise(rule, resize(rule, image_CYX[None]))[0]


def resize(rule: Preprocess, images_BCYX: Tensor) -> Tensor:
    """uint8 in, uint8 out, so that a cached set stays small and every path rounds the same way."""
    rows, cols = rule.image_size
    scaled = (round(rows / rule.crop_frac), round(cols / rule.crop_frac))
    if rule.resize == "shorter-side":
        factor = max(scaled[0] / images_BCYX.shape[2], scaled[1] / images_BCYX.shape[3])
        scaled = tuple(
            max(want, round(side * factor)) for want, side in zip(scaled, images_BCYX.shape[2:], strict=True)
        )
        if scaled[0] * scaled[1] > MAX_PIXELS:
            raise UsageError(
                f"an image of {images_BCYX.shape[2]}x{images_BCYX.shape[3]} is too long and thin to be scaled"
            )
    if tuple(images_BCYX.shape[2:]) != scaled:
        as_float = F.interpolate(images_BCYX.float(), size=scaled, mode=rule.filter, antialias=rule.antialias)
        images_BCYX = as_float.round().clamp(0, 255).to(torch.uint8)
    top, left = (scaled[0] - rows) // 2, (scaled[1] - cols) // 2
    return images_BCYX[:, :, top : top + rows, left : left + cols]


def normalise(rule: Preprocess, images_BCYX: Tensor) -> Tensor:
    """uint8 -> float32, (x/255 - mean) / std per channel."""
    mean, std = (torch.tensor(v, device=images_BCYX.device).view(1, -1, 1, 1) for v in (rule.mean, rule.std))
    return (images_BCYX.float() / 255 - mean) / std
