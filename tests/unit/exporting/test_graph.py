"""What is exported, before it is: preparing images as matrix products, positions on any grid."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.decode import decode
from vitlab.data.preprocess import Preprocess, normalise, resize
from vitlab.data.rules import Filter
from vitlab.data.sources.packed import open_packed
from vitlab.engines.exported import compiled_openvino, hushed
from vitlab.exporting.graph import (
    Graph,
    GraphRule,
    Prepare,
    _rounded,  # pyright: ignore[reportPrivateUsage]
    frozen,
    output_names,
    require_exportable,
    traced,
)
from vitlab.exporting.onnx_file import onnx_run, to_onnx
from vitlab.exporting.openvino_file import to_openvino
from vitlab.exporting.resampling import grid_matrices
from vitlab.models import ops
from vitlab.models.build import build, create_model
from vitlab.models.spec import BiTSpec, GridResize, TrunkSpec, ViTSpec
from vitlab.weights.bundle import Bundle

DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[4] / "shared" / "data")
PHOTOS = DATA / "hymenoptera" / "hymenoptera_val.npz"
SOAK = os.environ.get("VITLAB_SOAK") == "1"
WAYS = [("bicubic", "onnxruntime"), ("bilinear", "openvino"), ("bicubic", "openvino"), ("bilinear", "onnxruntime")]
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
        assert (levels > 0.01).float().mean() < (2e-3 if how == "area" else 1e-3), "nearly all are the same to the bit"


@pytest.mark.slow
@pytest.mark.skipif(not PHOTOS.is_file(), reason="needs hymenoptera in VITLAB_DATA")
@pytest.mark.parametrize(("how", "to"), WAYS if SOAK else WAYS[:2])
def test_runtimes_prepare_real_photos_to_one_grey_level(how: Filter, to: str) -> None:
    rule = Preprocess(image_size=(96, 112), resize="shorter-side", filter=how, crop_frac=0.875)
    bundle = Bundle(build(dataclasses.replace(SMALL, image_size=(96, 112), patch=16), seed=0), rule, ("a",) * 3, "", {})
    graph = GraphRule(preprocess_inside=True)
    outputs = output_names(bundle.model, graph)
    with hushed():
        program = traced(Graph(bundle, graph), bundle, graph)
    if to == "openvino":
        run = compiled_openvino(to_openvino(program, outputs), "fp32", outputs)
    else:
        run = onnx_run(to_onnx(program, outputs, graph, 20), outputs)
    dataset = open_packed({"all": PHOTOS}).parts["all"]
    changed = count = 0
    for i in range(16):
        image_CYX = decode(dataset.read(i), "RGB")
        if i % 8 == 0:  # as large as a camera's, of places that need all bits of a float
            image_CYX = resize(Preprocess(image_size=(1499, 1201), filter="bicubic"), image_CYX[None])[0]
        expected = normalise(rule, resize(rule, image_CYX[None]))
        found = torch.from_numpy(run(image_CYX.permute(1, 2, 0)[None].contiguous().numpy())["pixels"])
        levels = (found - expected).abs() * 0.5 * 255
        assert levels.max() < 1.01, i
        changed, count = changed + int((levels > 0.01).sum()), count + levels.numel()
    assert changed / count < 1e-3


@pytest.mark.parametrize(("given", "by"), [((5, 6), 3), ((7, 6), 3), ((10, 4), 6), ((1, 3), 1), ((9, 6), 1)])
def test_sides_are_rounded_as_by_python(given: tuple[int, int], by: int) -> None:
    numerator, denominator = (torch.tensor(number) for number in given)
    assert int(_rounded(numerator * by, denominator)) == round(given[0] * by / given[1])


@pytest.mark.parametrize(("height", "width"), [(100, 115), (115, 100), (100, 116)])
def test_side_that_ends_in_a_half_is_rounded_as_by_vitlab(height: int, width: int) -> None:
    rule = Preprocess(image_size=(96, 96), resize="shorter-side", crop_frac=0.875, mean=(0.5,) * 3, std=(0.5,) * 3)
    images_BCYX = noise(height, width)
    found = Prepare(rule)(images_BCYX.permute(0, 2, 3, 1))
    assert ((found - normalise(rule, resize(rule, images_BCYX))).abs() * 0.5 * 255).max() < 1.01


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
    ("name", "size", "rule", "match"),
    [
        ("AxialResNet-26-S", 32, GraphRule(dynamic_size=True), "relative positions"),
        ("BiT-R26x1", 48, GraphRule(dynamic_size=True), "multiples of 32"),
        ("EfficientNet-B1", 240, GraphRule(dynamic_size=True), "multiples of 32"),
        ("ViT-w8d1m8h1/8", 32, GraphRule(dynamic_size=True, preprocess_inside=True), "any size anyway"),
        ("ViT-w8d1m8h1/8", 32, GraphRule(batch=0), "batch-size"),
    ],
)
def test_what_cannot_be_open_is_refused(name: str, size: int, rule: GraphRule, match: str) -> None:
    with torch.device("meta"):
        model = create_model(name, image_size=size, num_classes=2)
    with pytest.raises(UsageError, match=match):
        require_exportable(model, rule)


@pytest.mark.parametrize("padding", ["same", "fixed"])
@pytest.mark.parametrize("outside", ["zero", "neg-inf"])
def test_open_stages_give_the_features_of_the_model_at_any_multiple_of_the_stride(padding: str, outside: str) -> None:
    trunk = TrunkSpec(stages=(1, 2), preact=True, padding=padding, pool_padding=outside, non_local=(1,))  # pyright: ignore[reportArgumentType]
    model = build(BiTSpec(trunk=trunk, image_size=(32, 32), num_classes=3), seed=0).eval()
    opened = frozen(model, dynamic_size=True)
    for rows, cols in ((32, 32), (8, 40), (24, 16)):
        x_BCYX = torch.randn(2, 3, rows, cols, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(opened.represent(x_BCYX), model.represent(x_BCYX), atol=1e-6)
