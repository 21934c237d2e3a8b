"""RandAugment, beside Pillow where Pillow has the operation, and by hand where it has not."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from vitlab.core.errors import UsageError
from vitlab.data.augmentation import pixel_ops as ops
from vitlab.data.augmentation.randaugment import DRAWS, OPERATIONS, operate, randaugment

GENERATOR = torch.Generator().manual_seed(0)
SMOOTH = torch.nn.functional.interpolate(torch.rand(3, 3, 6, 7, generator=GENERATOR), size=(45, 52), mode="bicubic")
IMAGES = (SMOOTH.clamp(0, 1) * 180 + torch.rand(SMOOTH.shape, generator=GENERATOR) * 60 + 10).to(torch.uint8)
PLUS, MINUS = torch.full((3, 3), 0.75), torch.full((3, 3), 0.25)
GREY = 128


def pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def augreg(name: str, magnitude: float, images: torch.Tensor = IMAGES, draws: torch.Tensor = PLUS) -> torch.Tensor:
    return operate(images, name, "augreg", magnitude, draws)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ops.equalize, ImageOps.equalize),
        (ops.invert, ImageOps.invert),
        (ops.autocontrast, ImageOps.autocontrast),
        (lambda x: ops.posterize(x, 3), lambda x: ImageOps.posterize(x, 3)),
        (lambda x: ops.solarize(x, 100), lambda x: ImageOps.solarize(x, 100)),
        (lambda x: augreg("sharpness", 10, x), lambda x: ImageEnhance.Sharpness(x).enhance(1.9)),
        (lambda x: augreg("color", 5, x), lambda x: ImageEnhance.Color(x).enhance(1.0)),
        (lambda x: augreg("color", 2, x), lambda x: ImageEnhance.Color(x).enhance(0.46)),
        (lambda x: augreg("brightness", 3, x), lambda x: ImageEnhance.Brightness(x).enhance(0.64)),
    ],
    ids=[
        "equalize",
        "invert",
        "autocontrast",
        "posterize",
        "solarize",
        "sharp",
        "color 1",
        "color",
        "dark",
    ],
)
def test_operation_is_pillows_to_a_grey_level_or_two(ours: Any, theirs: Any) -> None:
    """Two, where a grey level that was rounded another way is then stretched."""
    for image, changed in zip(IMAGES, ours(IMAGES), strict=True):
        expected = torch.from_numpy(np.array(theirs(pillow(image)))).permute(2, 0, 1)
        assert int((changed.int() - expected.int()).abs().max()) <= 2


def test_exact_operations_are_exact() -> None:
    for image, changed in zip(IMAGES, ops.equalize(IMAGES), strict=True):
        assert torch.equal(changed, torch.from_numpy(np.array(ImageOps.equalize(pillow(image)))).permute(2, 0, 1))


def test_flat_images_survive_everything() -> None:
    flat = torch.full((3, 3, 9, 9), 77, dtype=torch.uint8)
    for name in ("autocontrast", "equalize", "color", "sharpness"):
        assert torch.equal(augreg(name, 10, flat), flat)


@pytest.mark.parametrize(
    ("name", "magnitude", "expected"),
    [
        ("posterize", 10, [0, 96, 144, 240]),
        ("posterize", 15, [4, 100, 148, 252]),
        ("posterize", 20, [7, 100, 150, 255]),
        ("posterize", 0, [0, 0, 128, 128]),  # not nothing: one bit stays
        ("solarize", 5, [7, 100, 105, 0]),
        ("solarize", 10, [248, 155, 105, 0]),  # 256 is 0 as a byte
        ("solarize", 15, [7, 100, 105, 0]),
        ("solarize", 0, [248, 155, 105, 0]),
        ("solarize-add", 10, [117, 210, 150, 255]),
        ("solarize-add", 20, [227, 255, 150, 255]),
        ("brightness", 0, [0, 10, 15, 25]),  # a tenth is left
        ("brightness", 5, [7, 100, 150, 255]),
        ("invert", 3, [248, 155, 105, 0]),
    ],
)
def test_augreg_argument_of_a_magnitude(name: str, magnitude: float, expected: list[int]) -> None:
    image = torch.tensor([7, 100, 150, 255], dtype=torch.uint8).view(1, 1, 1, 4)
    assert augreg(name, magnitude, image, PLUS[:1]).flatten().tolist() == expected


@pytest.mark.parametrize(("name", "axis"), [("translate-x", 3), ("translate-y", 2)])
def test_translation_is_by_whole_pixels_and_filled_with_grey(name: str, axis: int) -> None:
    moved = augreg(name, 1, draws=PLUS)
    assert torch.equal(moved.narrow(axis, 0, IMAGES.shape[axis] - 10), IMAGES.narrow(axis, 10, IMAGES.shape[axis] - 10))
    assert bool((moved.narrow(axis, IMAGES.shape[axis] - 10, 10) == GREY).all())
    back = augreg(name, 1, draws=MINUS)
    assert torch.equal(back.narrow(axis, 10, IMAGES.shape[axis] - 10), IMAGES.narrow(axis, 0, IMAGES.shape[axis] - 10))


def test_shear_moves_each_row_by_its_share() -> None:
    sheared = augreg("shear-x", 10)
    for row in (0, 10, 40):
        shift = round(0.3 * row)
        assert torch.equal(sheared[:, :, row, : 52 - shift], IMAGES[:, :, row, shift:])
    assert torch.equal(augreg("shear-y", 10, IMAGES.transpose(2, 3)).transpose(2, 3), sheared)


def test_a_quarter_turn_is_a_quarter_turn() -> None:
    square = IMAGES[:, :, :45, :45]
    assert torch.equal(augreg("rotate", 30, square, PLUS), square.rot90(-1, (2, 3)).rot90(2, (2, 3)))
    assert torch.equal(augreg("rotate", 0, square, MINUS), square)


def test_cutout_is_a_grey_square_around_its_pixel() -> None:
    draws = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 0.0], [0.0, 0.999, 0.999]])
    hole = (augreg("cutout", 2, draws=draws) == GREY).all(dim=1)
    assert hole.sum(dim=(1, 2)).tolist() == [256, 64, 81]
    assert bool(hole[0, 14:30, 18:34].all())


def test_every_operation_is_drawn_equally_often_and_applied_layer_by_layer() -> None:
    for dialect, names in OPERATIONS.items():
        middles = (torch.arange(len(names)) + 0.5) / len(names)
        draws = torch.full((len(names), 1, DRAWS), 0.75)
        draws[:, 0, 0] = middles
        same = IMAGES[:1].expand(len(names), -1, -1, -1)
        for name, found in zip(names, randaugment(same, dialect, 7, draws), strict=True):
            assert torch.equal(found, operate(IMAGES[:1], name, dialect, 7, PLUS[:1])[0]), name
        twice = torch.cat([draws, draws.flip(0)], dim=1)
        for first, second, found in zip(names, names[::-1], randaugment(same, dialect, 7, twice), strict=True):
            once = operate(IMAGES[:1], first, dialect, 7, PLUS[:1])
            assert torch.equal(found, operate(once, second, dialect, 7, PLUS[:1])[0])


def test_images_do_not_depend_on_their_neighbours_and_are_not_written_to() -> None:
    before = IMAGES.clone()
    draws = torch.rand(3, 2, DRAWS, generator=torch.Generator().manual_seed(3))
    together = randaugment(IMAGES, "augreg", 12, draws)
    assert torch.equal(IMAGES, before)
    for i in range(3):
        assert torch.equal(randaugment(IMAGES[i : i + 1], "augreg", 12, draws[i : i + 1])[0], together[i])


def test_grey_images_are_augmented_and_other_channels_refused() -> None:
    for dialect, names in OPERATIONS.items():
        for name in names:
            assert operate(IMAGES[:, :1], name, dialect, 9, PLUS).shape == (3, 1, 45, 52)
    with pytest.raises(UsageError, match="not for 5 channels"):
        randaugment(torch.zeros(1, 5, 8, 8, dtype=torch.uint8), "augreg", 9, torch.zeros(1, 1, DRAWS))
