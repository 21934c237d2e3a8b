"""RandAugment and colour jitter beside torchvision's, operation by operation on the same images, to one grey level."""

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from vitlab.data.augmentation import pixel_ops as ops
from vitlab.data.augmentation.randaugment import OPERATIONS, operate

NAMES = {
    "identity": "Identity",
    "shear-x": "ShearX",
    "shear-y": "ShearY",
    "translate-x": "TranslateX",
    "translate-y": "TranslateY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "color": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "posterize": "Posterize",
    "solarize": "Solarize",
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
}
# torchvision moves translations the other way for the same sign, which is drawn by a fair coin.
OTHER_WAY = {"translate-x", "translate-y"}
PLACES = {"shear-x", "shear-y", "translate-x", "translate-y", "rotate"}


def photos(channels: int = 3) -> torch.Tensor:
    """Smooth patches and noise, in two shapes of the same batch size."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(3, channels, 7, 9, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(61, 83), mode="bicubic").clamp(0, 1)
    return (smooth * 200 + torch.rand(smooth.shape, generator=generator) * 55).to(torch.uint8)


def theirs(images: torch.Tensor, name: str, magnitude: int, sign: float) -> torch.Tensor:
    policy = v2.RandAugment()
    values, signed = policy._AUGMENTATION_SPACE[NAMES[name]]
    bins = values(31, *images.shape[2:])
    strength = 0.0 if bins is None else float(bins[magnitude]) * (sign if signed else 1)
    return policy._apply_image_or_video_transform(
        images, NAMES[name], strength, interpolation=policy.interpolation, fill=policy._fill
    )


def test_the_same_operations_are_listed() -> None:
    assert [NAMES[name] for name in OPERATIONS["torchvision"]] == list(v2.RandAugment._AUGMENTATION_SPACE)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_operation_agrees_to_one_grey_level(name: str, sign: float, magnitude: int, channels: int) -> None:
    images = photos(channels)
    draws = torch.full((len(images), 3), 0.25 if sign < 0 else 0.75)
    ours = operate(images, name, "torchvision", magnitude, draws)
    expected = theirs(images, name, magnitude, -sign if name in OTHER_WAY else sign)
    differs = (ours.int() - expected.int()).abs() > 1
    # A source point half-way between two pixels is a tie that their float arithmetic decides either way.
    assert float(differs.float().mean()) <= (0.01 if name in PLACES else 0)


@pytest.mark.parametrize("turn", [-0.5, -0.1, 0.05, 0.4])
def test_hue_agrees_to_one_grey_level(turn: float) -> None:
    images = photos()
    ours = ops.shift_hue(images, torch.full((len(images),), turn))
    assert int((ours.int() - TF.adjust_hue(images, turn).int()).abs().max()) <= 1


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
def test_jitter_blends_agree_to_one_grey_level(factor: float) -> None:
    images, weight = photos(), torch.full((3,), factor)
    pairs = [
        (ops.blend(images, torch.zeros(()), weight), TF.adjust_brightness(images, factor)),
        (ops.blend(images, ops.mean_grey(images), weight), TF.adjust_contrast(images, factor)),
        (ops.blend(images, ops.grey(images), weight), TF.adjust_saturation(images, factor)),
    ]
    for ours, expected in pairs:
        assert int((ours.int() - expected.int()).abs().max()) <= 1
