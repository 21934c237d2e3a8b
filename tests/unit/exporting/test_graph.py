"""What is exported, before it is: preparing images as matrix products, positions on any grid."""

import dataclasses

import pytest
import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess, normalise, resize
from vitlab.data.rules import Filter
from vitlab.exporting.graph import Graph, GraphRule, Prepare, frozen, require_exportable
from vitlab.exporting.resampling import grid_matrices
from vitlab.models import ops
from vitlab.models.build import build, create_model
from vitlab.models.spec import BiTSpec, GridResize, TrunkSpec, ViTSpec
from vitlab.weights.bundle import Bundle

RESIZES: tuple[GridResize, ...] = ("corner-bilinear", "bilinear", "bicubic", "bicubic-antialias", "bicubic-offset")
SIZES = [(37, 91), (200, 133), (32, 48), (31, 20), (333, 512), (1, 7), (512, 333)]
SMALL = ViTSpec(width=16, depth=1, mlp_dim=16, heads=2, patch=4, image_size=(16, 12), num_classes=3)


def noise(rows: int, cols: int) -> Tensor:
    return torch.randint(0, 256, (2, 3, rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("crop_frac", [1.0, 0.875])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("how", ["bilinear", "bicubic", "area"])
@pytest.mark.parametrize("rule", ["squash", "shorter-side"])
def test_graph_prepares_images_to_one_grey_level(rule: str, how: Filter, antialias: bool, crop_frac: float) -> None:
    preprocess = Preprocess(
        image_size=(32, 48),
        resize=rule,  # pyright: ignore[reportArgumentType]
        filter=how,
        antialias=antialias,
        crop_frac=crop_frac,
    )
    for rows, cols in SIZES:
        images_BCYX = noise(rows, cols)
        expected = normalise(preprocess, resize(preprocess, images_BCYX))
        found = Prepare(preprocess)(images_BCYX.permute(0, 2, 3, 1))
        levels = (found - expected).abs() * 0.5 * 255
        assert levels.max() < 1.01, (rows, cols)
        assert (levels > 0.01).float().mean() < 0.06, "nearly all are the same to the bit"


def test_image_of_the_right_size_is_left_alone() -> None:
    preprocess = Preprocess(image_size=(31, 20), mean=(0.0,) * 3, std=(1.0,) * 3)
    images_BCYX = noise(31, 20)
    assert torch.equal((Prepare(preprocess)(images_BCYX.permute(0, 2, 3, 1)) * 255).round(), images_BCYX.float())


@pytest.mark.parametrize("how", RESIZES)
@pytest.mark.parametrize(
    ("old", "new"), [((4, 3), (7, 5)), ((7, 5), (4, 3)), ((4, 3), (4, 1)), ((5, 4), (5, 4)), ((5, 4), (5, 6))]
)
def test_positions_are_resized_as_by_the_model(how: GridResize, old: tuple[int, int], new: tuple[int, int]) -> None:
    table_LND = torch.randn(2, old[0] * old[1], 6, generator=torch.Generator().manual_seed(0))
    grid = table_LND.unflatten(1, old).permute(0, 3, 1, 2)
    down, across = grid_matrices(old, new, how)
    found, expected = down @ grid @ across.mT, ops.resize_grid(table_LND, old, new, how)
    assert torch.allclose(found.flatten(2).mT, expected, atol=1e-5)


@pytest.mark.parametrize(
    "change", [{}, {"pos": "learned2d"}, {"pos": "sincos2d"}, {"pos": "none"}, {"pool": "gap"}, {"pos_at": "every"}]
)
def test_open_positions_give_the_logits_of_the_model_at_other_sizes(change: dict[str, str]) -> None:
    model = build(dataclasses.replace(SMALL, **change), seed=0).eval()  # pyright: ignore[reportArgumentType]
    opened = frozen(model, dynamic_size=True)
    for rows, cols in ((16, 12), (8, 20)):
        x_BCYX = torch.randn(2, 3, rows, cols, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(opened.represent(x_BCYX), model.represent(x_BCYX), atol=1e-5)


def test_standardised_kernels_are_computed_once() -> None:
    model = build(
        BiTSpec(trunk=TrunkSpec(stages=(1, 1), preact=True), image_size=(32, 32), num_classes=3), seed=0
    ).eval()
    x_BCYX = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(frozen(model, dynamic_size=False).represent(x_BCYX), model.represent(x_BCYX), atol=1e-6)


def test_several_labels_are_answered_one_by_one_and_the_temperature_is_inside() -> None:
    model = build(SMALL, seed=0).eval()
    torch.nn.init.normal_(model.head.weight)  # pyright: ignore[reportOptionalMemberAccess]
    rule = Preprocess(image_size=(16, 12))
    images = noise(30, 40).permute(0, 2, 3, 1)
    one = Bundle(model, rule, ("a", "b", "c"), "", {}, temperature=2.0)
    p_BK, logits_BK, features_BD, x_BCYX = Graph(one, GraphRule(preprocess_inside=True))(images)
    assert torch.allclose(p_BK, (model(x_BCYX) / 2).softmax(1)) and torch.allclose(logits_BK, model(x_BCYX))
    assert torch.allclose(features_BD, model.represent(x_BCYX))
    several = dataclasses.replace(one, thresholds=(0.0, 0.0, 0.0))
    assert torch.allclose(Graph(several, GraphRule(preprocess_inside=True))(images)[0], (logits_BK / 2).sigmoid())


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("AxialResNet-26-S", GraphRule(dynamic_size=True)),
        ("BiT-R26x1", GraphRule(dynamic_size=True)),
        ("ViT-w8d1m8h1/8", GraphRule(dynamic_size=True, preprocess_inside=True)),
        ("ViT-w8d1m8h1/8", GraphRule(batch=0)),
    ],
)
def test_what_cannot_be_open_is_refused(name: str, rule: GraphRule) -> None:
    with torch.device("meta"):
        model = create_model(name, image_size=32, num_classes=2)
    with pytest.raises(UsageError):
        require_exportable(model, rule)
