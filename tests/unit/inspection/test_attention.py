"""Attention distance, entropy and prefix share against cases whose answer is known, and against whole maps."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.inspection.attention import (
    attention_statistics,
    images_at_once,
    layer_distances,
    mean_attention_distance,
    place_number,
    unit_maps,
)
from vitlab.models.axial_resnet import LineAttention
from vitlab.models.build import build, create_model
from vitlab.models.model import Model
from vitlab.models.resnet import NonLocal
from vitlab.models.results import AttentionLayer, AttentionMaps, token_names
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
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
    bit: Model = create_model("BiT-R26x1", image_size=32, num_classes=3, overrides={"trunk": {"stages": [1]}})
    with pytest.raises(UsageError, match="no attention"):
        attention_statistics(bit, [torch.randn(1, 3, 32, 32)])


# --- grids that shrink ------------------------------------------------------------------------------------------------

AXIAL = AxialResNetSpec(stages=(1, 2), width=8, heads=4, image_size=(24, 40), num_classes=5)
NON_LOCAL = changed(BiTSpec(trunk=bit_trunk((1, 2, 2), 1), image_size=(24, 40)), {"trunk": {"non_local": [1, 2]}})
each_grid_model = pytest.mark.parametrize("spec", [AXIAL, NON_LOCAL], ids=["axial", "non-local"])


def shaken(spec: ModelSpec) -> Model:
    """A model whose attention is far from uniform."""
    model, generator = build(spec, seed=0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def key_centres(layer: AttentionLayer) -> list[tuple[float, float]]:
    """Row and column of the middle of what each key stands for, in places."""
    (rows, cols), side = layer.grid, layer.pool
    cells = [
        [(y, x) for y in range(row, min(row + side, rows)) for x in range(col, min(col + side, cols))]
        for row in range(0, rows, side)
        for col in range(0, cols, side)
    ]
    return [(sum(y for y, _ in cell) / len(cell), sum(x for _, x in cell) / len(cell)) for cell in cells]


@each_grid_model
def test_distance_is_in_pixels_of_each_layers_own_grid(spec: ModelSpec) -> None:
    model = shaken(spec).double()
    x = torch.randn(3, 3, 24, 40, dtype=torch.float64)
    found = attention_statistics(model, [x[:2], x[2:]])
    assert found.images == 3 and found.distance_LH.shape == spec.attention_shape
    assert len({layer.grid for layer in found.layers}) > 1
    for each in model.attention_on_grids(x):
        layer, centres = each.layer, key_centres(each.layer)
        rows, cols = layer.grid
        weights_BHQN = each.maps(range(rows * cols)).flatten(3)
        distance, entropy = torch.zeros(2, len(each.heads), dtype=torch.float64)
        for q in range(rows * cols):
            for n, (y, col) in enumerate(centres):
                pixels = layer.stride * math.hypot(q // cols - y, q % cols - col)
                distance += pixels * weights_BHQN[:, :, q, n].sum(dim=0)
                entropy += torch.special.entr(weights_BHQN[:, :, q, n]).sum(dim=0) / math.log(2)
        count = 3 * rows * cols
        torch.testing.assert_close(found.distance_LH[each.index], distance / count, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy_LH[each.index], entropy / count, rtol=1e-5, atol=1e-5)
    assert found.prefix_share_LH.abs().max() < 1e-5


@each_grid_model
def test_uniform_attention_stands_at_the_level_of_each_grid(spec: ModelSpec) -> None:
    model = build(spec, seed=0).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LineAttention):
                module.qkv.weight.zero_()
                module.relative.zero_()
            if isinstance(module, NonLocal):
                module.query.weight.zero_()
    found = attention_statistics(model, [torch.randn(2, 3, 24, 40)])
    for layer in range(len(found.layers)):
        heads = found.distance_LH.shape[1]
        assert found.distance_LH[layer].tolist() == pytest.approx([found.uniform_distance_L[layer]] * heads, rel=1e-5)
        assert found.entropy_LH[layer].tolist() == pytest.approx([found.uniform_entropy_L[layer]] * heads, rel=1e-5)
    assert len({round(level, 3) for level in found.uniform_entropy_L}) > 1


def test_uniform_distance_along_a_line_is_a_third_of_it() -> None:
    line = AttentionLayer("u", (6, 10), 4, axis=1)
    assert layer_distances(line).shape == (60, 10) and line.num_keys == 10
    assert layer_distances(line).mean().item() == pytest.approx(4 * (10**2 - 1) / (3 * 10))
    assert layer_distances(AttentionLayer("u", (6, 10), 4, axis=0)).mean().item() == pytest.approx(4 * 35 / 18)
    # Of five places the last cell of two has but one: its middle is that place.
    assert layer_distances(AttentionLayer("u", (1, 5), 8, pool=2))[0].tolist() == [4, 20, 32]


def test_a_unit_along_columns_and_rows_looks_at_the_whole_grid() -> None:
    model, x = shaken(AXIAL), torch.randn(2, 3, 24, 40)
    layers = [each.weights_BHQK.mean(dim=1) for each in model.attention_on_grids(x)]
    found = list(unit_maps(model, x, (0.4, 0.9)))
    assert [layer.unit for layer, _ in found] == ["stage0/unit00", "stage1/unit00", "stage1/unit01"]
    for number, (layer, map_BYX) in enumerate(found):
        rows, cols = layer.grid
        row, col = int(0.4 * rows), int(0.9 * cols)
        down, across = layers[2 * number], layers[2 * number + 1]
        for y in range(rows):
            for c in range(cols):  # along its own row to column c, which had looked along itself before
                expected = across[:, row * cols + col, c] * down[:, row * cols + c, y]
                torch.testing.assert_close(map_BYX[:, y, c], expected)
        torch.testing.assert_close(map_BYX.sum(dim=(1, 2)), torch.ones(2))
    ((layer, alone_BYX),) = unit_maps(model, x, (0.4, 0.9), ["stage1/unit00"])
    assert layer.unit == "stage1/unit00" and torch.equal(alone_BYX, found[1][1])


def test_a_non_local_block_looks_from_the_same_place_on_every_grid() -> None:
    model, x = shaken(NON_LOCAL), torch.randn(1, 3, 24, 40)
    for (layer, map_BYX), each in zip(unit_maps(model, x, (0.99, 0.0)), model.attention_on_grids(x), strict=True):
        query = (layer.grid[0] - 1) * layer.grid[1]  # lower left
        torch.testing.assert_close(map_BYX[0].flatten(), each.weights_BHQK[0, 0, query])
    assert place_number((4, 6), (1.0, 1.0)) == 23 and place_number((4, 6), (0.5, 0.0)) == 12


def test_as_many_images_at_once_as_the_largest_grid_allows() -> None:
    small, large = (shaken(changed(AXIAL, {"image_size": size})) for size in ([16, 16], [256, 256]))
    counts = [images_at_once(model, torch.empty(1, 3, *model.spec.image_size)) for model in (small, large)]
    assert counts[0] == 2**25 // (4 * 16 * 4) and counts[1] == 2**25 // (4 * 64**2 * 64)
