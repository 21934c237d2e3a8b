"""Attention distance, entropy and prefix share against cases whose answer is known, and against whole maps."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.inspection.attention import attention_statistics, mean_attention_distance
from vitlab.models.build import build, create_model
from vitlab.models.model import Model
from vitlab.models.results import AttentionMaps, token_names
from vitlab.models.spec import ViTSpec, changed
from vitlab.models.vit import ViT

SMALL = ViTSpec(width=32, depth=2, mlp_dim=64, heads=2, patch=4, image_size=(16, 24), num_classes=5)


def maps_of(weights: list[Tensor], grid: tuple[int, int], uses_cls: bool = True) -> AttentionMaps:
    names = token_names(uses_cls, 0, grid)
    heads = tuple(range(weights[0].shape[1]))
    return AttentionMaps(dict(enumerate(weights)), heads, tuple(range(len(names))), names, grid)


def small_model(**changes: object) -> ViT:
    """A model whose attention is far from uniform."""
    spec = changed(SMALL, changes)
    model = build(spec, seed=0)
    assert isinstance(model, ViT)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight *= 3
    return model.eval()


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


def test_partial_queries_are_refused() -> None:
    weights = torch.randn(1, 2, 5, 5).softmax(-1)
    partial = AttentionMaps({0: weights[:, :, :1]}, (0, 1), (0,), token_names(True, 0, (2, 2)), (2, 2))
    with pytest.raises(UsageError, match="every query token"):
        mean_attention_distance(partial, 16)


def test_statistics_of_a_model_that_looks_everywhere_alike() -> None:
    model = create_model("ViT-Ti/16", seed=0)
    assert isinstance(model, ViT)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
    found = attention_statistics(model, [torch.randn(2, 3, 224, 224)])
    assert found.uniform_distance == pytest.approx(116.49, abs=0.005)
    assert (found.images, found.stride, found.grid) == (2, 16, (14, 14))
    expected = {
        "distance_LH": 116.49,
        "distance_with_prefix_LH": 116.49 * 196 / 197,
        "entropy_LH": math.log2(197),
        "prefix_share_LH": 1 / 197,
    }
    for name, value in expected.items():
        table_LH = getattr(found, name)
        assert table_LH.shape == (12, 3)
        torch.testing.assert_close(table_LH, torch.full((12, 3), value, dtype=torch.float64), rtol=1e-4, atol=0)


VARIANTS: dict[str, dict[str, object]] = {
    "class token": {},
    "registers": {"registers": 2},
    "mean of patches": {"pool": "gap"},
    "attention pooling": {"pool": "map"},
    "relative positions": {"pos": "relative"},
    "axial": {"attention": "axial", "pool": "gap"},
    "hybrid": {"stem": {"stages": [1, 1]}, "patch": 1, "image_size": [32, 48]},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_statistics_by_plain_loops(changes: dict[str, object]) -> None:
    model = small_model(**changes)
    x_BCYX = torch.randn(3, 3, *model.spec.image_size)
    found = attention_statistics(model, x_BCYX.split(2), chunk=1)
    assert found.images == 3
    (rows, cols), prefix, stride = found.grid, model.spec.num_prefix, model.spec.stride
    assert (rows, cols) == (4, 6) and stride == (8 if model.spec.stem else 4)
    for layer, weights_BHTT in model.attention(x_BCYX).layers.items():
        for head in range(model.spec.heads):
            distance = short = entropy = share = 0.0
            for matrix in weights_BHTT[:, head].double().tolist():
                for query in range(rows * cols):
                    row = matrix[prefix + query]
                    kept = row[prefix:]
                    places = [divmod(key, cols) for key in range(rows * cols)]
                    far = [stride * math.dist(divmod(query, cols), place) for place in places]
                    moved = sum(weight * pixels for weight, pixels in zip(kept, far, strict=True))
                    short += moved
                    distance += moved / sum(kept)
                    share += sum(row[:prefix])
                    entropy -= sum(weight * math.log2(weight) for weight in row if weight > 0)
            count = 3 * rows * cols
            assert found.distance_LH[layer, head].item() == pytest.approx(distance / count, rel=1e-4)
            assert found.distance_with_prefix_LH[layer, head].item() == pytest.approx(short / count, rel=1e-4)
            assert found.entropy_LH[layer, head].item() == pytest.approx(entropy / count, rel=1e-4)
            assert found.prefix_share_LH[layer, head].item() == pytest.approx(share / count, rel=1e-4, abs=1e-6)


def test_statistics_stream_over_batches_and_hold_none_of_them() -> None:
    model = small_model()
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        import weakref

        seen: list[weakref.ref[Tensor]] = []
        for _ in range(6):
            batch = torch.randn(2, 3, 16, 24)
            seen.append(weakref.ref(batch))
            yield batch
            del batch
            alive.append(sum(each() is not None for each in seen))

    assert attention_statistics(model, batches()).images == 12
    assert max(alive) <= 1


def test_statistics_refuse_what_they_cannot_count() -> None:
    model = small_model()
    with pytest.raises(UsageError, match="at least one image"):
        attention_statistics(model, [])
    with pytest.raises(UsageError, match="one size"):
        attention_statistics(model, [torch.randn(1, 3, 16, 24), torch.randn(1, 3, 24, 24)])
    bit: Model = create_model("BiT-R26x1", image_size=32, num_classes=3)
    with pytest.raises(UsageError, match="no attention"):
        attention_statistics(bit, [torch.randn(1, 3, 32, 32)])
