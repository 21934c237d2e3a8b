"""RandAugment's AugReg dialect beside the formulas of the released code, written out in NumPy operation by operation.

The source is big_vision's `pp/autoaugment.py` (now `pp/archive/autoaugment.py`) as it was while those models were trained.
Images are [Y, X, 3] here, as there; every float is a float32, and a cast to bytes cuts off.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from vitlab.data.augmentation.randaugment import DRAWS, OPERATIONS, operate, randaugment

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
f32 = np.float32

# `available_ops` of `distort_image_with_randaugment`, in its order.
RELEASED = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness"),
    *("Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"),
)
NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast", "brightness"),
    *("sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add"),
)
GREY = 128


def photos(height: int, width: int) -> Pixels:
    """Three of them: smooth patches with noise, [3, Y, X, 3]."""
    draw = torch.Generator().manual_seed(0)
    coarse = torch.rand(3, 3, 6, 7, generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)
    noisy = smooth * 180 + torch.rand(smooth.shape, generator=draw) * 60 + 10
    return noisy.to(torch.uint8).permute(0, 2, 3, 1).numpy()


# --- the released formulas --------------------------------------------------------------------------------------------


def blend(plain: npt.NDArray[Any], image: Pixels, factor: float) -> Pixels:
    if factor in (0.0, 1.0):
        return (plain if factor == 0.0 else image).astype(np.uint8)
    away = image.astype(f32) - plain.astype(f32)
    return np.clip(plain.astype(f32) + f32(factor) * away, 0, 255).astype(np.uint8)


def luminance(image: Pixels) -> Floats:
    """`tf.image.rgb_to_grayscale`: to [0, 1], weighed, and back with 255.5."""
    weights = np.array([0.2989, 0.587, 0.114], f32)
    level = (image.astype(f32) * f32(1 / 255)) @ weights
    return np.floor(level * f32(255.5))[..., None]


def color(image: Pixels, factor: float) -> Pixels:
    return blend(luminance(image), image, factor)


def contrast(image: Pixels, factor: float) -> Pixels:
    """Their "mean" sums the histogram's counts and not its levels, so it is pixels / 256 whatever the picture."""
    height, width, _ = image.shape
    level = np.floor(np.clip(f32(height * width) / f32(256), 0, 255))
    return blend(np.full_like(image, level), image, factor)


def brightness(image: Pixels, factor: float) -> Pixels:
    return blend(np.zeros_like(image), image, factor)


def sharpness(image: Pixels, factor: float) -> Pixels:
    height, width, _ = image.shape
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], f32) / f32(13)
    smooth = np.zeros((height - 2, width - 2, 3), f32)
    for row, col in np.ndindex(3, 3):
        smooth += kernel[row, col] * image[row : height - 2 + row, col : width - 2 + col].astype(f32)
    plain = image.copy()  # the border is the image's
    plain[1:-1, 1:-1] = np.clip(smooth, 0, 255).astype(np.uint8)
    return blend(plain, image, factor)


def autocontrast(image: Pixels) -> Pixels:
    low, high = image.min(axis=(0, 1)).astype(f32), image.max(axis=(0, 1)).astype(f32)
    scale = f32(255) / (high - low)
    return np.clip(image.astype(f32) * scale + -low * scale, 0, 255).astype(np.uint8)


def equalize(image: Pixels) -> Pixels:
    made = image.copy()
    for channel in range(3):
        counts = np.bincount(image[..., channel].ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        if step:
            table = (np.cumsum(counts) + step // 2) // step
            made[..., channel] = np.clip(np.concatenate([[0], table[:-1]]), 0, 255)[image[..., channel]]
    return made


def posterize(image: Pixels, bits: int) -> Pixels:
    shift = min(8 - bits, 7)  # to which TensorFlow clamps the shift of a byte
    return image >> shift << shift


def solarize(image: Pixels, threshold: int) -> Pixels:
    """TensorFlow makes the threshold a byte like the image: 256 is 0 and 384 is 128 (big_vision's issue 110)."""
    return np.where(image < np.array(threshold).astype(np.uint8), image, 255 - image)


def solarize_add(image: Pixels, addition: int) -> Pixels:
    return np.where(image < 128, np.clip(image.astype(int) + addition, 0, 255), image).astype(np.uint8)


def project(image: Pixels, a: float, b: float, c: float, d: float, e: float, f: float) -> Pixels:
    """The nearest pixel to (a x + b y + c, d x + e y + f) in float32; half a pixel is rounded away from zero, as in C."""
    height, width, _ = image.shape
    y, x = np.mgrid[:height, :width].astype(f32)
    from_x, from_y = (f32(p) * x + f32(q) * y + f32(r) for p, q, r in ((a, b, c), (d, e, f)))
    at_x, at_y = (np.copysign(np.floor(np.abs(v.astype(float)) + 0.5), v).astype(int) for v in (from_x, from_y))
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    return np.where(inside[..., None], image[at_y.clip(0, height - 1), at_x.clip(0, width - 1)], GREY).astype(np.uint8)


def rotate(image: Pixels, degrees: float) -> Pixels:
    """`tfa.image.rotate`: about the middle of the outermost pixels."""
    bottom, right = image.shape[0] - 1, image.shape[1] - 1
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    left_by, up_by = (right - (cos * right - sin * bottom)) / 2, (bottom - (sin * right + cos * bottom)) / 2
    return project(image, cos, -sin, left_by, sin, cos, up_by)


def cutout(image: Pixels, half: int, row: int, col: int) -> Pixels:
    made = image.copy()
    made[max(0, row - half) : row + half, max(0, col - half) : col + half] = GREY
    return made


def released(image: Pixels, name: str, magnitude: float, sign: int, place: tuple[float, float]) -> Pixels:
    """`level_to_arg` of `HParams(cutout_const=40, translate_const=100)`, and the operation."""
    level = magnitude / 10
    enhance = level * 1.8 + 0.1
    row, col = (int(share * side) for share, side in zip(place, image.shape, strict=False))
    operations: dict[str, Callable[[], Pixels]] = {
        "AutoContrast": lambda: autocontrast(image),
        "Equalize": lambda: equalize(image),
        "Invert": lambda: 255 - image,
        "Rotate": lambda: rotate(image, sign * level * 30),
        "Posterize": lambda: posterize(image, int(level * 4)),
        "Solarize": lambda: solarize(image, int(level * 256)),
        "Color": lambda: color(image, enhance),
        "Contrast": lambda: contrast(image, enhance),
        "Brightness": lambda: brightness(image, enhance),
        "Sharpness": lambda: sharpness(image, enhance),
        "ShearX": lambda: project(image, 1, sign * level * 0.3, 0, 0, 1, 0),
        "ShearY": lambda: project(image, 1, 0, 0, sign * level * 0.3, 1, 0),
        "TranslateX": lambda: project(image, 1, 0, sign * level * 100, 0, 1, 0),
        "TranslateY": lambda: project(image, 1, 0, 0, 0, 1, sign * level * 100),
        "Cutout": lambda: cutout(image, int(level * 40), row, col),
        "SolarizeAdd": lambda: solarize_add(image, int(level * 110)),
    }
    return operations[name]()


# --- ours beside them -------------------------------------------------------------------------------------------------


def most_levels(name: str, magnitude: float) -> float:
    """Grey levels by which float32 sums in another order may differ: one of the result, and one of what is blended with,
    which the factor stretches."""
    if name in ("Color", "Sharpness"):
        return 1 + abs(magnitude / 10 * 1.8 + 0.1 - 1)
    return 1 if name in ("Contrast", "Brightness", "AutoContrast") else 0


@pytest.mark.parametrize("size", [(45, 52), pytest.param((224, 224), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("name", "ours"), list(zip(RELEASED, NAMES, strict=True)), ids=RELEASED)
def test_operation_is_that_of_the_released_code(name: str, ours: str, size: tuple[int, int]) -> None:
    images = photos(*size)
    x_BCYX = torch.from_numpy(images).permute(0, 3, 1, 2)
    for magnitude in (0, 7, 10, 15, 20):
        for sign in (-1, 1):
            draws_B3 = torch.tensor([[0.25 if sign < 0 else 0.75, 0.3, 0.6]]).expand(len(images), 3)
            found = operate(x_BCYX, ours, "augreg", magnitude, draws_B3).permute(0, 2, 3, 1).numpy()
            expected = np.stack([released(image, name, magnitude, sign, (0.3, 0.6)) for image in images])
            off = np.abs(found.astype(int) - expected.astype(int))
            if name in (
                "Rotate",
                "ShearX",
                "ShearY",
            ):  # float32 noise decides some of the points half-way between pixels
                assert (off > 0).mean() < 0.012, (magnitude, sign)
            else:
                assert off.max() <= most_levels(name, magnitude), (magnitude, sign)


@pytest.mark.parametrize(("side", "level"), [(32, 4), (64, 16), (224, 196), (384, 255)])
def test_contrast_blends_with_the_number_of_pixels(side: int, level: int) -> None:
    """At magnitude 0 nine tenths of the result are that level; at 10 a level of 100 moves away from it."""
    flat = torch.full((1, 3, side, side), 100, dtype=torch.uint8)
    draws_B3 = torch.zeros(1, 3)
    assert operate(flat, "contrast", "augreg", 0, draws_B3).unique().tolist() == [int(level + 0.1 * (100 - level))]
    away = min(max(level + 1.9 * (100 - level), 0), 255)
    assert abs(int(operate(flat, "contrast", "augreg", 10, draws_B3).unique()) - away) <= 1


def test_list_is_that_of_the_released_code_and_every_draw_has_its_operation() -> None:
    assert OPERATIONS["augreg"] == NAMES
    image = torch.from_numpy(photos(45, 52)[:1]).permute(0, 3, 1, 2)
    fresh = {name: operate(image, name, "augreg", 2, torch.full((1, 3), 0.6)) for name in NAMES}
    assert len({tuple(made.flatten().tolist()) for made in fresh.values()}) == len(NAMES), "all differ"
    for share in torch.linspace(0, 1, 161)[:-1].tolist():  # as `maxval=len(available_ops)` divides it
        draws_BL4 = torch.full((1, 1, DRAWS), 0.6)
        draws_BL4[..., 0] = share
        expected = fresh[NAMES[int(share * 16 + 1e-4)]]
        assert torch.equal(randaugment(image, "augreg", 2, draws_BL4), expected), share
