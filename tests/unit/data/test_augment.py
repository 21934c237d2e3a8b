"""Random changes are keyed by their generator, stay inside their bounds, and vanish at zero."""

import pytest
import torch

from vitlab.core.runtime import generator
from vitlab.data.augment import random_affine

STILL = {"turn_deg": 0.0, "zoom": 0.0, "shift_frac": 0.0}
LIVELY = {"turn_deg": 15.0, "zoom": 0.2, "shift_frac": 0.1}
IMAGES = torch.rand(8, 2, 12, 9, generator=generator(0)) * 2 - 1


def spot(side: int = 33, batch: int = 200) -> torch.Tensor:
    image = torch.zeros(batch, 1, side, side)
    image[:, :, side // 2, side // 2] = 1
    return image


def centre_of_mass(x_BCYX: torch.Tensor) -> torch.Tensor:
    """[B, 2] in pixels from the middle."""
    side = x_BCYX.shape[-1]
    place = torch.arange(side) - side // 2.0
    rows, cols = (x_BCYX.sum(dim=(1, dim)) @ place / x_BCYX.sum(dim=(1, 2, 3)) for dim in (3, 2))
    return torch.stack([rows, cols], dim=1)


@pytest.mark.parametrize("fill", [0.0, -1.0])
def test_zero_strength_changes_nothing(fill: float) -> None:
    torch.testing.assert_close(random_affine(IMAGES, generator(1), fill=fill, **STILL), IMAGES, rtol=0, atol=1e-5)


def test_same_generator_gives_the_same_bits_and_another_does_not() -> None:
    first = random_affine(IMAGES, generator(1), **LIVELY)
    torch.rand(5)
    assert torch.equal(random_affine(IMAGES, generator(1), **LIVELY), first)
    assert not torch.equal(random_affine(IMAGES, generator(2), **LIVELY), first)


def test_each_image_is_changed_in_its_own_way() -> None:
    same = IMAGES[:1].expand(8, -1, -1, -1)
    changed = random_affine(same, generator(1), **LIVELY)
    assert len({image.numpy().tobytes() for image in changed}) == 8


def test_shift_stays_within_its_share_of_the_side_and_uses_it() -> None:
    moved = centre_of_mass(random_affine(spot(), generator(3), turn_deg=0, zoom=0, shift_frac=0.1)).abs()
    assert float(moved.max()) <= 3.3 + 0.01
    assert float(moved.max()) > 3.0
    assert float(moved.mean()) == pytest.approx(1.65, abs=0.2)


def test_turn_and_zoom_leave_the_middle_in_place() -> None:
    moved = centre_of_mass(random_affine(spot(), generator(3), turn_deg=20, zoom=0.2, shift_frac=0))
    assert float(moved.abs().max()) < 0.01


def test_what_comes_from_outside_is_the_fill() -> None:
    out = random_affine(torch.ones(64, 1, 8, 8), generator(0), turn_deg=45, zoom=0.5, shift_frac=0.5, fill=-1.0)
    assert float(out.min()) == -1.0
    assert float(out.max()) <= 1.0 + 1e-6
