"""Random changes are keyed by what they are said to be keyed by, stay inside their bounds, and vanish at zero."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.core.config import from_dict, to_dict
from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.pixel_ops import shift_hue


def spot(side: int = 33, batch: int = 200) -> torch.Tensor:
    image = torch.zeros(batch, 1, side, side, dtype=torch.uint8)
    image[:, :, side // 2, side // 2] = 255
    return image


def centre_of_mass(x_BCYX: torch.Tensor) -> torch.Tensor:
    """[B, 2] in pixels from the middle."""
    x_BCYX, side = x_BCYX.float(), x_BCYX.shape[-1]
    place = torch.arange(side) - side // 2.0
    rows, cols = (x_BCYX.sum(dim=(1, dim)) @ place / x_BCYX.sum(dim=(1, 2, 3)) for dim in (3, 2))
    return torch.stack([rows, cols], dim=1)


PHOTOS = torch.randint(0, 256, (12, 3, 30, 26), dtype=torch.uint8, generator=generator(7))
IDS = torch.arange(100, 112)
NOTHING = AugmentRule(mirror=0.0)
RULES = {
    "mirror": AugmentRule(),
    "upside down": AugmentRule(mirror=0.0, upside_down=0.5),
    "augreg": AugmentRule(randaugment="augreg", magnitude=15.0),
    "torchvision": AugmentRule(randaugment="torchvision", magnitude=9.0),
    "affine": AugmentRule(mirror=0.0, turn_deg=15.0, zoom=0.2, shift_frac=0.1),
    "jitter": AugmentRule(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "erase": AugmentRule(erase=0.5),
    "everything": AugmentRule(
        upside_down=0.2,
        turn_deg=5.0,
        fill=9,
        randaugment="augreg",
        brightness=0.2,
        contrast=0.1,
        saturation=0.3,
        hue=0.05,
        erase=0.25,
    ),
}
each_rule = pytest.mark.parametrize("name", RULES)


def run(rule: AugmentRule, images: torch.Tensor = PHOTOS, ids: torch.Tensor = IDS, **keys: Any) -> torch.Tensor:
    return augment(images, ids, rule, **{"seed": 0, "epoch": 0, **keys})


@each_rule
def test_image_depends_on_its_keys_and_not_on_its_batch(name: str) -> None:
    whole = run(RULES[name])
    assert whole.dtype == torch.uint8 and whole.shape == PHOTOS.shape
    order = torch.randperm(12, generator=generator(1))
    assert torch.equal(run(RULES[name], PHOTOS[order], IDS[order]), whole[order])
    for i in (0, 5, 11):
        assert torch.equal(run(RULES[name], PHOTOS[i : i + 1], IDS[i : i + 1])[0], whole[i])


@each_rule
def test_every_key_counts(name: str) -> None:
    first = run(RULES[name])
    for change in ({"seed": 1}, {"epoch": 1}, {"copy": 1}, {"ids": IDS + 50}):
        assert not torch.equal(run(RULES[name], **change), first), change


def test_epochs_and_copies_may_differ_within_a_batch() -> None:
    rule, epochs, copies = RULES["everything"], torch.arange(12) // 5, torch.arange(12) % 3
    together = run(rule, epoch=epochs, copy=copies)
    for i in range(12):
        alone = run(rule, PHOTOS[i : i + 1], IDS[i : i + 1], epoch=int(epochs[i]), copy=int(copies[i]))
        assert torch.equal(alone[0], together[i])


@each_rule
def test_memory_layout_changes_nothing_and_images_are_not_written_to(name: str) -> None:
    before, together = PHOTOS.clone(), PHOTOS.contiguous(memory_format=torch.channels_last)
    assert torch.equal(run(RULES[name], together), run(RULES[name]))
    assert torch.equal(PHOTOS, before)


def test_rule_of_nothing_does_nothing() -> None:
    assert torch.equal(run(NOTHING), PHOTOS)
    assert torch.equal(run(dataclasses.replace(NOTHING, randaugment="augreg", layers=0)), PHOTOS)


@pytest.mark.parametrize(("field", "axis"), [("mirror", 3), ("upside_down", 2)])
def test_flips_are_flips_of_the_wanted_share(field: str, axis: int) -> None:
    images = PHOTOS[:1].expand(1000, -1, -1, -1)
    out = run(dataclasses.replace(NOTHING, **{field: 0.3}), images, torch.arange(1000))
    flipped = (out == PHOTOS[:1].flip(axis)).all(dim=(1, 2, 3))
    same = (out == PHOTOS[:1]).all(dim=(1, 2, 3))
    assert bool((flipped ^ same).all())
    assert 250 <= int(flipped.sum()) <= 350


@pytest.mark.parametrize("size", [(60, 60), (90, 40)], ids=str)
def test_erased_box_is_grey_and_of_the_wanted_area_and_shape(size: tuple[int, int]) -> None:
    dark = torch.zeros(400, 3, *size, dtype=torch.uint8)
    out = run(dataclasses.replace(NOTHING, erase=0.5), dark, torch.arange(400))
    assert set(out.unique().tolist()) == {0, 128}
    hole = (out == 128).all(dim=1)
    touched = hole.any(dim=2).any(dim=1)
    assert 160 <= int(touched.sum()) <= 240
    rows, cols = hole.any(dim=2).sum(dim=1)[touched], hole.any(dim=1).sum(dim=1)[touched]
    area = rows * cols / 3600
    assert torch.equal(rows * cols, hole.sum(dim=(1, 2))[touched])
    assert 0.015 <= float(area.min()) < 0.04 and 0.3 < float(area.max()) <= 0.34
    assert float((rows / cols).min()) < 0.5 and float((rows / cols).max()) > 2


def test_jitter_stays_within_its_factors_and_takes_every_order() -> None:
    grey = torch.full((300, 3, 4, 4), 100, dtype=torch.uint8)
    bright = run(dataclasses.replace(NOTHING, brightness=0.4), grey, torch.arange(300)).float()
    assert 60 <= float(bright.min()) < 65 and 135 < float(bright.max()) <= 140
    still = run(dataclasses.replace(NOTHING, saturation=0.5, hue=0.5, contrast=0.9), grey, torch.arange(300))
    assert int((still.int() - 100).abs().max()) <= 2, "no colour, no contrast; each step cuts to whole levels"


def test_turning_the_hue_by_a_third_exchanges_the_channels() -> None:
    assert torch.equal(shift_hue(PHOTOS, torch.full((12,), 1 / 3)), PHOTOS[:, [2, 0, 1]])
    assert torch.equal(shift_hue(PHOTOS, torch.zeros(12)), PHOTOS)
    assert torch.equal(shift_hue(PHOTOS[:, :1], torch.ones(12)), PHOTOS[:, :1])


@pytest.mark.parametrize("rule", [RULES["augreg"], RULES["jitter"]])
def test_colour_operations_refuse_other_channels(rule: AugmentRule) -> None:
    with pytest.raises(UsageError, match="channels"):
        run(rule, PHOTOS[:, :2])
    assert run(RULES["mirror"], PHOTOS[:, :2]).shape == (12, 2, 30, 26)


def test_rule_is_plain_data() -> None:
    assert from_dict(AugmentRule, to_dict(RULES["everything"])) == RULES["everything"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mirror": 1.5},
        {"erase": -0.1},
        {"upside_down": float("nan")},
        {"brightness": -1.0},
        {"turn_deg": -1.0},
        {"zoom": float("inf")},
        {"shift_frac": float("nan")},
        {"fill": 256},
        {"fill": -1},
        {"hue": 0.6},
        {"contrast": float("inf")},
        {"layers": -1},
        {"magnitude": 31.0},
        {"erase_area": (0.5, 0.1)},
        {"erase_aspect": (0.0, 1.0)},
    ],
    ids=str,
)
def test_rule_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AugmentRule(**wrong)


# --- turned, zoomed, shifted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0, 77, 255])
def test_tiny_strength_changes_nothing(fill: int) -> None:
    still = dataclasses.replace(NOTHING, shift_frac=1e-9, fill=fill)
    assert torch.equal(run(still), PHOTOS)


def test_each_image_is_changed_in_its_own_way() -> None:
    same = PHOTOS[:1].expand(12, -1, -1, -1)
    assert len({image.numpy().tobytes() for image in run(RULES["affine"], same)}) == 12


def test_shift_stays_within_its_share_of_the_side_and_uses_it() -> None:
    rule = dataclasses.replace(NOTHING, shift_frac=0.1)
    moved = centre_of_mass(run(rule, spot(), torch.arange(200))).abs()
    assert float(moved.max()) <= 3.3 + 0.01
    assert float(moved.max()) > 3.0
    assert float(moved.mean()) == pytest.approx(1.65, abs=0.2)


def test_turn_and_zoom_leave_the_middle_in_place() -> None:
    rule = dataclasses.replace(NOTHING, turn_deg=20, zoom=0.2)
    moved = centre_of_mass(run(rule, spot(), torch.arange(200)))
    assert float(moved.abs().max()) < 0.02  # pixels are whole levels


def test_what_comes_from_outside_is_the_fill() -> None:
    rule = dataclasses.replace(NOTHING, turn_deg=45, zoom=0.5, shift_frac=0.5, fill=40)
    out = run(rule, torch.full((64, 1, 8, 8), 200, dtype=torch.uint8), torch.arange(64))
    assert (int(out.min()), int(out.max())) == (40, 200)
