"""MixUp and CutMix: images and labels in the same proportion, and the same batch however it is shared out."""

from typing import Any

import numpy as np
import pytest
import torch

from vitlab.core.config import from_dict, to_dict
from vitlab.core.errors import UsageError
from vitlab.data.augmentation.mixing import MixRule, mix, partners

TOTAL = 16
GENERATOR = torch.Generator().manual_seed(0)
BYTES = torch.randint(0, 256, (TOTAL, 3, 12, 10), dtype=torch.uint8, generator=GENERATOR)
FLOATS = torch.rand(TOTAL, 3, 12, 10, generator=GENERATOR)
LABELS = torch.eye(TOTAL)
PLACES = torch.arange(TOTAL)
RULES = {
    "mixup": MixRule(mixup=0.5),
    "cutmix": MixRule(cutmix=1.0),
    "both": MixRule(mixup=0.2, cutmix=1.0),
    "mixup each": MixRule(mixup=0.5, per="sample"),
    "cutmix each": MixRule(cutmix=1.0, per="sample"),
    "both each": MixRule(mixup=0.8, cutmix=1.0, per="sample"),
}
each_rule = pytest.mark.parametrize("name", RULES)


def mixed(rule: MixRule, images: torch.Tensor = FLOATS, seed: int = 0, step: int = 0) -> tuple[Any, Any]:
    return mix(images, LABELS, PLACES, rule, seed=seed, step=step, total=TOTAL)


@each_rule
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("images", [BYTES, FLOATS], ids=["bytes", "floats"])
def test_world_size_changes_nothing(name: str, world: int, images: torch.Tensor) -> None:
    whole = mixed(RULES[name], images)
    parts = [
        mix(x, y, place, RULES[name], seed=0, step=0, total=TOTAL)
        for x, y, place in zip(images.chunk(world), LABELS.chunk(world), PLACES.chunk(world), strict=True)
    ]
    for index in (0, 1):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])


@each_rule
def test_keys_are_seed_and_step_and_nothing_else(name: str) -> None:
    first = mixed(RULES[name])
    torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(mixed(RULES[name]), first, strict=True))
    assert not torch.equal(mixed(RULES[name], step=1)[1], first[1])
    assert not torch.equal(mixed(RULES[name], seed=1)[1], first[1])


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_mixup_weighs_images_as_it_weighs_labels(per: Any) -> None:
    images, labels = mixed(MixRule(mixup=0.8, per=per))
    partner = PLACES ^ 1
    weight = labels[PLACES, PLACES]
    assert torch.equal(labels[PLACES, partner], 1 - weight)
    assert float(weight.min()) >= 0.5, "an image is the main one at its own place"
    assert len(weight.unique()) == (1 if per == "batch" else TOTAL)
    share = weight.view(-1, 1, 1, 1)
    torch.testing.assert_close(images, share * FLOATS + (1 - share) * FLOATS[partner])


@pytest.mark.parametrize("per", ["batch", "sample"])
def test_cutmix_weighs_labels_by_the_pixels_that_were_exchanged(per: Any) -> None:
    for step in range(6):
        images, labels = mixed(MixRule(cutmix=1.0, per=per), step=step)
        own, other = (images == FLOATS).all(dim=1), (images == FLOATS[PLACES ^ 1]).all(dim=1)
        assert bool((own | other).all()), "every pixel is from one of the two"
        torch.testing.assert_close(labels[PLACES, PLACES], own.float().mean(dim=(1, 2)))
        rows, cols = other.any(dim=2).sum(dim=1), other.any(dim=1).sum(dim=1)
        assert torch.equal(rows * cols, other.sum(dim=(1, 2))), "what was exchanged is a box"


def test_labels_stay_probabilities_and_bytes_stay_bytes() -> None:
    for rule in RULES.values():
        images, labels = mixed(rule, BYTES)
        torch.testing.assert_close(labels.sum(dim=1), torch.ones(TOTAL))
        assert images.dtype == torch.uint8
        exact = mixed(rule, BYTES.float())[0]
        assert float((images.float() - exact).abs().max()) <= 0.5 + 1e-4


def test_with_both_a_coin_decides() -> None:
    cut = 0
    for step in range(200):
        images, _ = mix(FLOATS[:2], LABELS[:2], PLACES[:2], RULES["both"], seed=0, step=step, total=TOTAL)
        cut += bool(((images == FLOATS[:2]) | (images == FLOATS[:2].flip(0))).all())
    assert 70 <= cut <= 130


def test_the_last_of_an_odd_batch_stays() -> None:
    images, labels = mix(FLOATS[:5], LABELS[:5], PLACES[:5], MixRule(mixup=1.0), seed=0, step=0, total=5)
    torch.testing.assert_close(images[4], FLOATS[4])
    torch.testing.assert_close(labels[4], LABELS[4])
    assert not torch.equal(images[3], FLOATS[3])


def test_no_strength_no_change() -> None:
    images, labels = mixed(MixRule())
    assert images is FLOATS and labels is LABELS


@pytest.mark.parametrize("places", [[3, 4, 5, 6], [0, 1, 2], [0, 2, 1, 3], [1]])
def test_torn_pairs_are_refused(places: list[int]) -> None:
    with pytest.raises(UsageError, match="even number of images"):
        partners(torch.tensor(places), 8)


@pytest.mark.parametrize("wrong", [{"mixup": -0.1}, {"cutmix": float("nan")}, {"mixup": float("inf")}])
def test_rule_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        MixRule(**wrong)  # type: ignore[arg-type]


def test_rule_is_plain_data() -> None:
    assert from_dict(MixRule, to_dict(RULES["both each"])) == RULES["both each"]


@each_rule
def test_an_image_that_could_not_be_read_reaches_no_other(name: str) -> None:
    valid = torch.ones(TOTAL, dtype=torch.bool)
    valid[3] = False
    for step in range(4):
        images, labels = mix(FLOATS, LABELS, PLACES, RULES[name], seed=0, step=step, total=TOTAL, valid_B=valid)
        torch.testing.assert_close(images[2], FLOATS[2])
        torch.testing.assert_close(labels[2], LABELS[2])
        whole, _ = mixed(RULES[name], step=step)
        assert torch.equal(images[4:], whole[4:]), "the others are mixed as ever"


def weights_of(rule: MixRule) -> torch.Tensor:
    """Of the images themselves, over many draws."""
    places, labels = torch.arange(4000), torch.eye(2).repeat(2000, 1)
    images = torch.zeros(4000, 1, 32, 32)
    return mix(images, labels, places, rule, seed=0, step=0, total=4000)[1][places, places % 2]


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_mixup_weights_are_drawn_from_beta(alpha: float) -> None:
    expected = np.random.default_rng(0).beta(alpha, alpha, 100_000)
    expected = np.maximum(expected, 1 - expected)
    found = weights_of(MixRule(mixup=alpha, per="sample")).double().numpy()
    quantiles = [0.1, 0.25, 0.5, 0.75]
    np.testing.assert_allclose(np.quantile(found, quantiles), np.quantile(expected, quantiles), atol=0.025)


def test_cutmix_boxes_cover_as_much_as_beta_says() -> None:
    """Yun et al. 2019: sides of √(1 - λ) around a random pixel, cut off at the edges."""
    draw = np.random.default_rng(0)
    half = np.sqrt(1 - draw.beta(1, 1, 100_000)) / 2
    sides = [np.minimum(at + half, 1) - np.maximum(at - half, 0) for at in draw.random((2, 100_000))]
    found = weights_of(MixRule(cutmix=1.0, per="sample")).double().numpy()
    assert found.mean() == pytest.approx(1 - (sides[0] * sides[1]).mean(), abs=0.03)
