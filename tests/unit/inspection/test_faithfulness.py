"""Deletion and insertion against plain loops, and against a model whose answer is known to depend on one patch."""

import numpy as np
import pytest
import scipy.stats
import torch
from slow_cases import slow_after
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.inspection.faithfulness import (
    FRACTIONS,
    Curves,
    curves,
    end_scores,
    random_order,
    randomised,
    randomised_weights,
    rank_correlation,
    verdict,
)
from vitlab.inspection.saliency import METHODS, Method, Target, blurred, saliency
from vitlab.models.build import build, create_model
from vitlab.models.spec import ViTSpec, changed
from vitlab.models.vit import ViT

SMALL = ViTSpec(width=24, depth=2, mlp_dim=48, heads=3, patch=4, image_size=(12, 16), num_classes=5)


def small_model(**changes: object) -> ViT:
    model = build(changed(SMALL, changes), seed=0)
    assert isinstance(model, ViT)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def images(batch: int = 3, size: tuple[int, int] = (12, 16)) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("classes", [5, 0])
def test_curves_by_plain_loops(classes: int) -> None:
    model, x = small_model(num_classes=classes), images()
    target = Target.of(model, x)
    heat = torch.rand(3, 3, 4, generator=torch.Generator().manual_seed(3))
    found = curves(model, x, heat, target)
    assert found.fractions == (0.0, 0.1, 0.3, 0.7, 0.9, 1.0)
    blank = blurred(x, 4)
    with torch.no_grad():
        whole = model(x)
    for b in range(3):
        order = sorted(((heat[b, r, c].item(), r, c) for r in range(3) for c in range(4)), reverse=True)
        for f, taken in enumerate((0, 1, 4, 8, 11, 12)):  # of 12 patches; 0.3 of them are 3.6
            deleted, inserted = x[b].clone(), blank[b].clone()
            for _, r, c in order[:taken]:
                part = (slice(None), slice(4 * r, 4 * r + 4), slice(4 * c, 4 * c + 4))
                deleted[part], inserted[part] = blank[b][part], x[b][part]
            for image, curve in ((deleted, found.deletion_BF), (inserted, found.insertion_BF)):
                with torch.no_grad():
                    y = model(image[None])[0]
                if classes:
                    expected = y.softmax(0)[whole[b].argmax()].item()
                else:
                    expected = torch.cosine_similarity(y, whole[b], dim=0).item()
                assert curve[b, f].item() == pytest.approx(expected, abs=1e-5)
    for area, curve in ((found.deletion_area_B, found.deletion_BF), (found.insertion_area_B, found.insertion_BF)):
        expected_B = np.trapezoid(curve.numpy(), found.fractions, axis=1)
        np.testing.assert_allclose(area.numpy(), expected_B, rtol=1e-5)


def test_given_ends_are_not_computed_again() -> None:
    model, x = small_model(), images()
    target, heat = Target.of(model, x), torch.rand(3, 3, 4)
    ends = end_scores(model, x, target)
    torch.testing.assert_close(
        curves(model, x, heat, target, ends_B2=ends).deletion_BF, curves(model, x, heat, target).deletion_BF
    )
    calls: list[int] = []
    handle = model.norm.register_forward_hook(lambda *_: calls.append(1))
    curves(model, x, heat, target, ends_B2=ends)
    random_order(model, x, target, ends_B2=ends)
    handle.remove()
    assert len(calls) == 3 * len(FRACTIONS)


def test_random_order_is_deletion_along_an_order_and_insertion_along_its_reverse() -> None:
    model, x = small_model(), images()
    target = Target.of(model, x)
    found = random_order(model, x, target, seed=7)
    heat = torch.rand(3, 3, 4, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(found.deletion_BF, curves(model, x, heat, target).deletion_BF)
    torch.testing.assert_close(found.insertion_BF, curves(model, x, -heat, target).insertion_BF)
    assert not torch.allclose(found.deletion_BF, random_order(model, x, target, seed=8).deletion_BF)


def test_equal_heat_gives_no_raster_order() -> None:
    model, x = small_model(), images(1)
    target = Target.of(model, x)
    flat = curves(model, x, torch.zeros(1, 3, 4), target).deletion_BF
    raster = curves(model, x, torch.arange(12.0, 0, -1).reshape(1, 3, 4), target).deletion_BF
    assert not torch.allclose(flat, raster)
    torch.testing.assert_close(flat, curves(model, x, torch.ones(1, 3, 4), target).deletion_BF)


def test_a_hybrids_patches_may_reach_over_the_edge() -> None:
    model = small_model(stem={"stages": [1, 1]}, patch=1, image_size=[20, 24])
    x = images(2, (20, 24))
    assert model.spec.grid == (3, 3) and model.spec.stride == 8
    found = curves(model, x, torch.rand(2, 3, 3), Target.of(model, x))
    assert found.deletion_BF.shape == (2, len(FRACTIONS) + 2)


def watching_model() -> ViT:
    """Class 0 if some patch is bright: the class token attends to brightness, and nothing else matters."""
    model = build(changed(SMALL, {"image_size": [32, 32], "depth": 1, "pos": "none", "num_classes": 2}), seed=0)
    assert isinstance(model, ViT) and model.cls is not None and model.head is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight[0] = 1 / 48  # channel 0 is a patch's brightness
        model.embed.bias[1] = model.cls[0, 0, 1] = 1
        block = model.blocks[0]
        for norm in (model.norm, block.norm1, block.norm2):
            norm.weight.fill_(1)
        query, key, value = 0, 24, 48
        block.attn.qkv.weight[query, 1] = block.attn.qkv.weight[key, 0] = block.attn.qkv.weight[value + 1, 0] = 1
        block.attn.proj.weight[2, 1] = 1  # what is found goes to channel 2
        model.head.weight[0, 2] = 2
    return model.eval()


def bright_images(batch: int = 8) -> tuple[Tensor, Tensor]:
    """Faint noise with one bright patch, and the map that marks it."""
    generator = torch.Generator().manual_seed(4)
    x, heat = 0.01 * torch.randn(batch, 3, 32, 32, generator=generator), torch.zeros(batch, 8, 8)
    for b, place in enumerate(torch.randperm(64, generator=generator)[:batch].tolist()):
        row, col = divmod(place, 8)
        x[b, :, 4 * row : 4 * row + 4, 4 * col : 4 * col + 4] += 3
        heat[b, row, col] = 1
    return x, heat


def test_the_right_map_beats_a_random_order_and_its_reverse_does_not() -> None:
    model = watching_model()
    x, heat = bright_images()
    target = Target.classes([0] * 8)
    chance = random_order(model, x, target)
    right, wrong = (verdict(curves(model, x, each, target), chance) for each in (heat, -heat))
    assert right.beats_random is True and right.means_something
    assert right.deletion_gain > 0.01 and right.insertion_gain > 0.01
    assert "matter more to the model than patches taken at random" in right.sentence and "8 images" in right.sentence
    assert wrong.beats_random is False and not wrong.means_something
    assert "do not read an explanation into it" in wrong.sentence


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_patch_that_the_answer_depends_on(method: Method) -> None:
    model = watching_model()
    x, heat = bright_images()
    found = saliency(model, x, method, Target.classes([0] * 8))
    assert found.flatten(1).argmax(1).tolist() == heat.flatten(1).argmax(1).tolist()


def made(deletion: list[float], insertion: list[float], images: int = 8, spread: float = 0.01) -> Curves:
    noise = spread * torch.randn(images, 3, generator=torch.Generator().manual_seed(0))
    return Curves((0.0, 0.5, 1.0), torch.tensor(deletion) + noise, torch.tensor(insertion) + noise)


def test_verdict_needs_both_curves_a_margin_and_enough_images() -> None:
    chance = made([1, 0.6, 0], [0, 0.6, 1], spread=0)
    good = made([1, 0.3, 0], [0, 0.8, 1])
    assert verdict(good, chance).beats_random is True
    assert verdict(made([1, 0.3, 0], [0, 0.6, 1]), chance).beats_random is False  # insertion is as that of chance
    assert verdict(made([1, 0.6, 0], [0, 0.8, 1]), chance).beats_random is False  # and deletion here
    assert verdict(made([1, 0.55, 0], [0, 0.65, 1], spread=1.0), chance).beats_random is False  # by a few images only
    few = verdict(made([1, 0.3, 0], [0, 0.8, 1], images=3), made([1, 0.6, 0], [0, 0.6, 1], images=3, spread=0))
    assert few.beats_random is None and few.sentence.startswith("Too few images") and not few.means_something
    found = verdict(good, chance)
    assert found.deletion_gain == pytest.approx(0.15, abs=0.02) and found.insertion_gain == pytest.approx(0.1, abs=0.02)


def test_verdict_on_random_weights() -> None:
    chance, good = made([1, 0.6, 0], [0, 0.6, 1], spread=0), made([1, 0.3, 0], [0, 0.8, 1])
    other = verdict(good, chance, torch.tensor([0.1, -0.2]))
    assert other.follows_weights is True and other.means_something
    assert "the map is another one (rank correlation 0.15)" in other.sentence
    for same in (torch.tensor([0.9, 0.8]), torch.tensor([0.9, -0.8])):
        found = verdict(good, chance, same)
        assert found.follows_weights is False and found.beats_random is True and not found.means_something
        assert "shows the image and not what the model has learnt (rank correlation 0.85)" in found.sentence
    assert verdict(good, chance).follows_weights is None


def test_rank_correlation_is_spearmans_also_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 5, 6, generator=generator).relu() for _ in range(2))
    b[1] = a[1] ** 3
    b[2] = -a[2]
    expected = [scipy.stats.spearmanr(a[i].flatten(), b[i].flatten()).statistic for i in range(4)]
    np.testing.assert_allclose(rank_correlation(a, b).numpy(), expected, rtol=1e-6)
    assert rank_correlation(a[:1], torch.ones(1, 5, 6)).tolist() == [0]


def test_randomised_model_has_other_weights_and_lets_the_image_through() -> None:
    model, x = small_model(layer_scale=1e-5), images()
    other, same = randomised(model, seed=3), randomised(model, seed=3)
    assert other.spec.num_classes == 5 and not other.training
    for name, parameter in other.named_parameters():
        before = model.get_parameter(name)
        assert parameter.shape == before.shape and not torch.equal(parameter, before)
        assert torch.equal(parameter, same.get_parameter(name))
    y = other(x)
    assert (y[0] - y[1]).abs().max() > 0.01  # the head started at zero, and layer scale at 0.00001
    assert not torch.allclose(y, randomised(model, seed=4)(x))


@pytest.mark.parametrize("method", METHODS)
def test_a_map_of_random_weights_is_its_own_and_that_of_others_another(method: Method) -> None:
    model = small_model(num_classes=0)
    x = images(6)
    other = randomised(model, seed=0)
    target = Target.of(other, x)
    heat = saliency(other, x, method, target, steps=4)
    same = randomised_weights(other, x, heat, method, target, seed=0)
    torch.testing.assert_close(same, torch.ones(4).double(), rtol=0, atol=1e-6)
    assert randomised_weights(other, x, heat, method, target, images=2, seed=1).abs().mean() < 0.9


def test_half_precision_changes_scores_by_a_hundredth_at_most() -> None:
    model, x = small_model(), images()
    target, heat = Target.of(model, x), torch.rand(3, 3, 4)
    exact, half = (curves(model, x, heat, target, half=half) for half in (False, True))
    assert not torch.equal(exact.deletion_BF, half.deletion_BF)
    torch.testing.assert_close(exact.deletion_BF, half.deletion_BF, rtol=0, atol=0.01)


@pytest.mark.parametrize("name", slow_after(1, ["EfficientNet-B0", "BiT-R26x1"]))
def test_curves_of_a_convolutional_model_and_of_a_map_on_another_grid(name: str) -> None:
    bit = create_model(name, image_size=(64, 64), num_classes=3, seed=0).eval()
    x = torch.randn(2, 3, 64, 64)
    found = curves(bit, x, torch.rand(2, 2, 2), Target.classes([0, 1]))
    assert torch.isfinite(found.deletion_BF).all()
    with pytest.raises(UsageError, match="grid of 3x4"):
        curves(bit, x, torch.rand(2, 3, 4), Target.classes([0, 1]))
