"""Augmentation, mixing and resizing on a GPU: what the CPU gives, to one grey level. Skipped without one."""

import pytest
import torch

from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.mixing import MixRule, mix
from vitlab.data.augmentation.randaugment import OPERATIONS, Dialect, operate
from vitlab.data.preprocess import scale

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GENERATOR = torch.Generator().manual_seed(0)
SMOOTH = torch.nn.functional.interpolate(torch.rand(64, 3, 9, 8, generator=GENERATOR), size=(224, 200), mode="bicubic")
IMAGES = (SMOOTH.clamp(0, 1) * 200 + torch.rand(SMOOTH.shape, generator=GENERATOR) * 55).to(torch.uint8)
IDS = torch.arange(64)


def furthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.is_cuda and found.dtype == expected.dtype
    return float((found.cpu().float() - expected.float()).abs().max())


@pytest.mark.parametrize(
    ("dialect", "name"), [(dialect, name) for dialect, names in OPERATIONS.items() for name in names]
)
def test_operations_agree_to_one_grey_level(dialect: Dialect, name: str) -> None:
    draws = torch.rand(64, 3, generator=GENERATOR)
    for magnitude in (3, 15, 20):
        expected = operate(IMAGES, name, dialect, magnitude, draws)
        assert furthest(operate(IMAGES.cuda(), name, dialect, magnitude, draws), expected) <= 1


@pytest.mark.parametrize(
    "rule",
    [
        AugmentRule(upside_down=0.3, erase=0.5),
        AugmentRule(brightness=0.4),
        AugmentRule(contrast=0.4),
        AugmentRule(saturation=0.4),
        AugmentRule(hue=0.2),
        AugmentRule(randaugment="torchvision", layers=1),
        AugmentRule(randaugment="augreg", layers=1),
    ],
    ids=str,
)
def test_augmentation_agrees_to_one_grey_level(rule: AugmentRule) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = augment(IMAGES.cuda(), IDS, rule, seed=0, epoch=3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert furthest(found, augment(IMAGES, IDS, rule, seed=0, epoch=3)) <= 1


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_mixing_agrees(per: str) -> None:
    rule, labels = MixRule(mixup=0.5, cutmix=1.0, per=per), torch.eye(64)  # type: ignore[arg-type]
    for step in range(4):
        expected = mix(IMAGES, labels, IDS, rule, seed=0, step=step, total=64)
        found = mix(IMAGES.cuda(), labels.cuda(), IDS, rule, seed=0, step=step, total=64)
        assert furthest(found[0], expected[0]) <= 1
        torch.testing.assert_close(found[1].cpu(), expected[1])


def test_resizing_gives_the_same_bits() -> None:
    assert furthest(scale(IMAGES.cuda(), (96, 260), "bilinear", True), scale(IMAGES, (96, 260), "bilinear", True)) == 0
