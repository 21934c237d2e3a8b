"""What a recipe and a bundle say about images: preprocessing, crops, augmentation, mixing.

Owns the settings and their limits; `preprocess` and `augmentation` apply them. Loads no torch: recipes are listed at once.
"""

import dataclasses
import math
from typing import Literal

from vitlab.core.environment import PIXELS_VARIABLE, pixel_limit
from vitlab.core.errors import UsageError

Mode = Literal["L", "RGB", "array"]  # "array": channels as they come, from Python arrays only
Filter = Literal["bilinear", "bicubic", "area"]
LEAST_BITS, MOST_BITS = 8, 16  # per channel, of what is stored and of what files may hold
MAX_PIXELS = pixel_limit()  # of a file's header, before decoding, and of anything made from it
PIXEL_LIMIT = f"the limit is {MAX_PIXELS:,}; {PIXELS_VARIABLE} sets another"
_MOST_WORKERS = 512
_FARTHEST = 2**16  # pixels: no image is wider
_STRONGEST = 30  # torchvision's last bin; augreg's grid ends at 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Every step from the file to the tensor, in order: `preprocess.json`."""

    decoder: Literal["pillow"] = "pillow"  # by content allow-list, EXIF turned upright, 16-bit scaled
    mode: Mode = "RGB"  # channel order
    bits: int = MOST_BITS  # of grey images of more than 8: 2^bits - 1 is white; a camera's 12 often lie in files of 16
    image_size: tuple[int, int] = (224, 224)
    resize: Literal["squash", "shorter-side"] = "squash"  # BiT's protocol; big_vision's with crop_frac and "area"
    crop_frac: float = 1.0  # of the resized image, from its centre
    filter: Filter = "bilinear"
    antialias: bool = True  # says nothing for "area", which is a mean
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # on the 0-1 scale; 0.5 and 0.5 give the paper's -1...1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        channels = self.channels
        if not LEAST_BITS <= self.bits <= MOST_BITS:
            raise UsageError(f"bits must lie in {LEAST_BITS} to {MOST_BITS}, not {self.bits}")
        if len(self.mean) != channels or len(self.std) != channels:
            raise UsageError(f"mode {self.mode} needs {channels} values in mean and std")
        finite = all(map(math.isfinite, (*self.mean, *self.std)))
        if not (finite and min(self.image_size) >= 1 and 0 < self.crop_frac <= 1 and min(self.std) > 0):
            raise UsageError("image_size and std must be positive, mean finite, and crop_frac above 0 and at most 1")
        rows, cols = self.image_size
        if max(rows, cols) > MAX_PIXELS or not (rows / self.crop_frac) * (cols / self.crop_frac) <= MAX_PIXELS:
            raise UsageError(
                f"image_size {rows}x{cols} with crop_frac {self.crop_frac:g} asks for too many pixels; {PIXEL_LIMIT}"
            )

    @property
    def channels(self) -> int:
        return len(self.mean) if self.mode == "array" else len(self.mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CropRule:
    """Which crop to draw. Its size and channels are the model's, in `Preprocess`."""

    # inception: TensorFlow's, the paper's; torchvision: RandomResizedCrop; the others resize the whole image first, as BiT
    # (squash, to a square) and big_vision (shorter-side) do, and cut a piece of the final size out of it. whole: no crop.
    how: Literal["inception", "torchvision", "squash", "shorter-side", "whole"] = "inception"
    area: tuple[float, float] = (0.05, 1.0)  # share of the image
    aspect: tuple[float, float] = (0.75, 1.33)  # columns / rows
    crop_frac: float = 0.875  # for squash and shorter-side: final size / resized size, 224 of 256
    filter: Filter | None = None  # None: as in testing
    antialias: bool | None = None

    def __post_init__(self) -> None:
        if not (0 < self.area[0] <= self.area[1] <= 1 and 0 < self.aspect[0] <= self.aspect[1] < math.inf):
            raise UsageError("crop.area must be a rising pair within 0 to 1, and crop.aspect a rising pair above 0")
        if not 0 < self.crop_frac <= 1:
            raise UsageError("crop.crop_frac must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentRule:
    """What happens to a training image after its crop, in this order."""

    mirror: float = 0.5  # probability of left and right exchanged
    upside_down: float = 0.0  # probability of top and bottom exchanged
    turn_deg: float = 0.0  # turned by up to this, either way
    zoom: float = 0.0  # larger or smaller by up to this share
    shift_frac: float = 0.0  # moved by up to this share of the side
    shift_px: int = 0  # moved by up to this many whole pixels, each way: a crop of the image with so wide a frame
    fill: int = 0  # the grey level that comes from outside then
    randaugment: Literal["none", "augreg", "torchvision"] = "none"
    layers: int = 2  # operations per image
    magnitude: float = 10.0  # of all of them: 10 is strong for augreg, 30 the most for torchvision
    brightness: float = 0.0  # colour jitter: factors from 1 - this to 1 + this, in an order that is random too
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # turns of the colour circle, from minus this to this
    erase: float = 0.0  # probability of a grey box
    erase_area: tuple[float, float] = (0.02, 0.33)  # share of the image; these two as in the paper of random erasing
    erase_aspect: tuple[float, float] = (0.3, 3.3)  # rows / columns

    def __post_init__(self) -> None:
        for name in ("mirror", "upside_down", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"augment.{name} is a probability, from 0 to 1, not {getattr(self, name)}")
        jitter = (self.brightness, self.contrast, self.saturation, self.hue)
        if not (all(0 <= value < math.inf for value in jitter) and self.hue <= 0.5):
            raise UsageError("the jitter of augment must be at least 0, and that of hue at most 0.5")
        if not all(0 <= getattr(self, name) < math.inf for name in ("turn_deg", "zoom", "shift_frac")):
            raise UsageError("augment.turn_deg, zoom and shift_frac must not be negative")
        if not 0 <= self.shift_px <= _FARTHEST:
            raise UsageError(f"augment.shift_px must not be negative, or above {_FARTHEST:,}, not {self.shift_px}")
        if not 0 <= self.fill <= 255:  # a byte
            raise UsageError(f"augment.fill is a grey level, from 0 to 255, not {self.fill}")
        if self.layers < 0 or not 0 <= self.magnitude <= _STRONGEST:
            raise UsageError(f"augment.layers must be at least 0, and augment.magnitude from 0 to {_STRONGEST}")
        if not (0 < self.erase_area[0] <= self.erase_area[1] <= 1 and 0 < self.erase_aspect[0] <= self.erase_aspect[1]):
            raise UsageError("augment.erase_area must be a rising pair within 0 to 1, erase_aspect one above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixRule:
    """The alpha of each Beta distribution, 0 for never; with both, a coin decides."""

    mixup: float = 0.0
    cutmix: float = 0.0
    per: Literal["batch", "sample"] = "batch"  # one weight for all, as AugReg has it, or one for each image

    def __post_init__(self) -> None:
        if not (0 <= self.mixup < math.inf and 0 <= self.cutmix < math.inf):
            raise UsageError("mix.mixup and mix.cutmix must be at least 0")


def require_workers(wanted: int) -> None:
    """An error for more processes than any machine has cores for."""
    if wanted > _MOST_WORKERS:
        raise UsageError(f"{wanted:,} processes to load images are too many", hint=f"Ask for {_MOST_WORKERS} at most.")
