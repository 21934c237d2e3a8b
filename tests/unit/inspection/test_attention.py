"""Rollout and attention distance against cases whose answer is known."""

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.inspection.attention import mean_attention_distance, rollout, rollout_heat, upsample_heat
from vitlab.models.build import build
from vitlab.models.results import AttentionMaps, token_names
from vitlab.models.spec import ViTSpec
from vitlab.models.vit import ViT


def maps_of(weights: list[torch.Tensor], grid: tuple[int, int], uses_cls: bool = True) -> AttentionMaps:
    names = token_names(uses_cls, 0, grid)
    heads = tuple(range(weights[0].shape[1]))
    return AttentionMaps(dict(enumerate(weights)), heads, tuple(range(len(names))), names, grid)


@pytest.mark.parametrize("add_identity", [True, False])
def test_rollout_rows_sum_to_one(add_identity: bool) -> None:
    layers = [torch.randn(2, 3, 10, 10).softmax(-1) for _ in range(4)]
    rolled = rollout(maps_of(layers, (3, 3)), add_identity=add_identity)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 10), rtol=1e-5, atol=1e-5)


def test_rollout_multiplies_later_layers_from_the_left() -> None:
    first, second = (torch.randn(1, 2, 5, 5).softmax(-1) for _ in range(2))
    eye = torch.eye(5)
    expected = (second.mean(1) + eye) / 2 @ ((first.mean(1) + eye) / 2)
    torch.testing.assert_close(rollout(maps_of([first, second], (2, 2))), expected)


def test_distance_of_identity_attention_is_zero() -> None:
    eye = torch.eye(17).expand(2, 3, 17, 17)
    assert mean_attention_distance(maps_of([eye], (4, 4)), 16)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("prefix", ["renormalise", "drop"])
def test_distance_of_uniform_attention_at_14x14_is_116_49_pixels(prefix: str) -> None:
    uniform = torch.full((1, 1, 196, 196), 1 / 196, dtype=torch.float64)
    found = mean_attention_distance(maps_of([uniform], (14, 14), uses_cls=False), 16, prefix=prefix)  # type: ignore[arg-type]
    assert found[0].item() == pytest.approx(116.49, abs=0.005)


def test_class_token_is_left_out_and_rows_renormalised_or_not() -> None:
    uniform = torch.full((1, 1, 197, 197), 1 / 197, dtype=torch.float64)
    maps = maps_of([uniform], (14, 14))
    assert mean_attention_distance(maps, 16)[0].item() == pytest.approx(116.49, abs=0.005)
    short = mean_attention_distance(maps, 16, prefix="drop")[0].item()
    assert short == pytest.approx(116.49 * 196 / 197, abs=0.005)


def test_heat_of_a_model_has_its_grid_and_a_strongest_patch_of_one() -> None:
    for pool in ("cls", "gap"):
        spec = ViTSpec(width=32, depth=2, mlp_dim=64, heads=2, patch=4, image_size=(16, 24), pool=pool)  # type: ignore[arg-type]
        model = build(spec, seed=0)
        assert isinstance(model, ViT)
        heat = rollout_heat(model, torch.randn(3, 3, 16, 24), chunk=2)
        assert heat.shape == (3, 4, 6) and heat.amax(dim=(1, 2)).tolist() == [1, 1, 1]
        assert upsample_heat(heat, (16, 24)).shape == (3, 16, 24)


def test_partial_queries_are_refused() -> None:
    weights = torch.randn(1, 2, 5, 5).softmax(-1)
    partial = AttentionMaps({0: weights[:, :, :1]}, (0, 1), (0,), token_names(True, 0, (2, 2)), (2, 2))
    with pytest.raises(UsageError, match="every query token"):
        rollout(partial)
    with pytest.raises(UsageError, match="every query token"):
        mean_attention_distance(partial, 16)
