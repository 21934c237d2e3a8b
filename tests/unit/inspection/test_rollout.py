"""Attention rollout against its formula, for every kind of pooling."""

import pytest
import torch
from slow_cases import slow_after

from vitlab.core.errors import UsageError
from vitlab.inspection.rollout import multiply_layers, rollout, rollout_heat, rollout_rows, upsample_heat
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec, changed
from vitlab.models.tape import Tape
from vitlab.models.vit import ViT

SMALL = ViTSpec(width=32, depth=3, mlp_dim=64, heads=2, patch=4, image_size=(16, 24), num_classes=5)
VARIANTS: dict[str, dict[str, object]] = {
    "class token": {},
    "registers": {"registers": 2},
    "mean of patches": {"pool": "gap"},
    "mean of patches and registers": {"pool": "gap", "registers": 2},
    "attention pooling": {"pool": "map"},
    "relative positions": {"pos": "relative"},
    "axial": {"attention": "axial", "pool": "gap"},
    "hybrid": {"stem": {"stages": [1, 1]}, "patch": 1, "image_size": [32, 48]},
}


def small_model(**changes: object) -> ViT:
    model = build(changed(SMALL, changes), seed=0)
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return model.eval()


@pytest.mark.parametrize("add_identity", [True, False])
def test_rollout_rows_sum_to_one(add_identity: bool) -> None:
    layers = [torch.randn(2, 3, 10, 10).softmax(-1) for _ in range(4)]
    rolled = multiply_layers(layers, add_identity=add_identity)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 10), rtol=1e-5, atol=1e-5)


def test_rollout_multiplies_later_layers_from_the_left() -> None:
    first, second = (torch.randn(1, 2, 5, 5).softmax(-1) for _ in range(2))
    eye = torch.eye(5)
    expected = (second.mean(1) + eye) / 2 @ ((first.mean(1) + eye) / 2)
    torch.testing.assert_close(multiply_layers([first, second]), expected)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("add_identity", [True, False])
@pytest.mark.parametrize("depth", slow_after(2, [None, 1, 2]))
def test_rollout_of_a_model_is_the_product_of_its_layers(
    changes: dict[str, object], add_identity: bool, depth: int | None
) -> None:
    model = small_model(**changes)
    x = torch.randn(3, 3, *model.spec.image_size)
    maps = model.attention(x)
    expected = torch.eye(len(maps.tokens)).expand(3, -1, -1)
    for layer in range(depth or model.spec.num_blocks):
        mean = maps.layers[layer].mean(1)
        expected = (0.5 * mean + 0.5 * torch.eye(mean.shape[-1]) if add_identity else mean) @ expected
    found = rollout(model, x, add_identity=add_identity, depth=depth, chunk=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]), rtol=1e-4, atol=1e-4)

    prefix = model.spec.num_prefix
    if model.spec.pool == "cls":
        row = expected[:, 0]
    elif model.spec.pool == "map" and depth is None:  # the pooling head looks at the tokens after the last layer
        assert model.map is not None
        tape = Tape("encoded")
        model(x, tape)
        q = model.map.q(model.map.probe[0, 0]).reshape(model.spec.heads, -1)
        k = model.map.kv(tape["encoded"])[..., : model.spec.width].unflatten(2, (model.spec.heads, -1))
        logits = torch.einsum("hd,bthd->bht", q, k) / q.shape[1] ** 0.5
        row = torch.einsum("bt,btk->bk", logits.softmax(-1).mean(1), expected)
    else:
        row = expected[:, prefix:].mean(1)
    heat = rollout_rows(model, x, add_identity=add_identity, depth=depth, chunk=2)
    torch.testing.assert_close(heat, row[:, prefix:].reshape(3, 4, 6), rtol=1e-4, atol=1e-6)


def test_heat_of_a_model_has_its_grid_and_a_strongest_patch_of_one() -> None:
    for pool in ("cls", "gap", "map"):
        model = small_model(pool=pool)
        heat = rollout_heat(model, torch.randn(3, 3, 16, 24), chunk=2)
        assert heat.shape == (3, 4, 6) and heat.amax(dim=(1, 2)).tolist() == [1, 1, 1]
        assert upsample_heat(heat, (16, 24)).shape == (3, 16, 24)


def test_a_depth_that_the_model_has_not_is_refused() -> None:
    for depth in (0, 4):
        with pytest.raises(UsageError, match="depth must be from 1 to 3"):
            rollout(small_model(), torch.randn(1, 3, 16, 24), depth=depth)
