"""Saliency maps against references written out here: attention without a fused kernel, autograd, loops, and Riemann sums."""

import math
import os
from pathlib import Path

import pytest
import torch
from slow_cases import slow_after
from torch import Tensor

import vitlab
from vitlab.core.errors import UsageError
from vitlab.inspection.saliency import (
    METHODS,
    Method,
    Target,
    blurred,
    integrated_gradients,
    methods_of,
    patch_sums,
    saliency,
)
from vitlab.models.build import build, create_model
from vitlab.models.model import StageModel
from vitlab.models.spec import ViTSpec, changed
from vitlab.models.tape import Tape
from vitlab.models.vit import Block, ViT

SMALL = ViTSpec(width=24, depth=3, mlp_dim=48, heads=3, patch=4, image_size=(12, 16), num_classes=5)
VARIANTS: dict[str, dict[str, object]] = {
    "class token": {},
    "registers and layer scale": {"registers": 2, "layer_scale": 0.5},
    "mean of patches": {"pool": "gap"},
    "attention pooling": {"pool": "map"},
    "relative positions": {"pos": "relative"},
    "positions at every block": {"pos_at": "every"},
    "tanh head": {"head": "mlp-tanh"},
    "headless": {"num_classes": 0},
    "axial": {"attention": "axial", "pool": "gap", "depth": 2},
    "hybrid": {"stem": {"stages": [1]}, "patch": 1},
}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def small_model(sharpness: float = 2.0, **changes: object) -> ViT:
    """Every parameter matters; `sharpness` 2 makes attention far from uniform, 0.5 the score a smooth function."""
    model = build(changed(SMALL, changes), seed=0).double()
    assert isinstance(model, ViT)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for block in model.blocks:
            block.attn.qkv.weight *= sharpness
    return model.eval()


def images(model: ViT, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 3, *model.spec.image_size, generator=generator, dtype=torch.float64)


def target_of(model: ViT, x_BCYX: Tensor) -> Target:
    return Target.classes([1, 4, 2][: len(x_BCYX)]) if model.head is not None else Target.own(model, x_BCYX)


def explicit_forward(model: ViT, x_BCYX: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits or representation, every block's softmax weights and its normalised input, all in one graph."""
    spec = model.spec
    z_BTD, (_, cols), pos_LTD = model._tokens(x_BCYX)
    weights: list[Tensor] = []
    inputs: list[Tensor] = []
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        z_BTD = z_BTD if pos_LTD is None else z_BTD + pos_LTD[i % len(pos_LTD)]
        y_BTD = block.norm1(z_BTD)
        inputs.append(y_BTD)
        q, k, v = (
            part.unflatten(2, (spec.heads, -1)).transpose(1, 2) for part in block.attn.qkv(y_BTD).chunk(3, dim=2)
        )
        width = q.shape[-1]
        logits_BHTT = q @ k.mT / math.sqrt(width)
        tokens = q.shape[2]
        if block.attn.relative is not None:
            offsets = [[block.attn.relative[a - b + tokens - 1] for b in range(tokens)] for a in range(tokens)]
            table_TTDh = torch.stack([torch.stack(row) for row in offsets])
            logits_BHTT = logits_BHTT + torch.einsum("bhqd,qkd->bhqk", q, table_TTDh) / math.sqrt(width)
        if block.axis is not None:
            line_T = torch.arange(tokens) // cols if block.axis == 0 else torch.arange(tokens) % cols
            logits_BHTT = logits_BHTT.masked_fill(line_T[:, None] != line_T, -math.inf)
        weights.append(logits_BHTT.softmax(dim=-1))
        out_BTD = block.attn.proj((weights[-1] @ v).transpose(1, 2).flatten(2))
        z_BTD = z_BTD + (out_BTD if block.scale1 is None else out_BTD * block.scale1)
        out_BTD = block.mlp(block.norm2(z_BTD))
        z_BTD = z_BTD + (out_BTD if block.scale2 is None else out_BTD * block.scale2)
    y_BD = model._pool(model.norm(z_BTD))
    y_BD = y_BD if model.pre_logits is None else torch.tanh(model.pre_logits(y_BD))
    return (y_BD if model.head is None else model.head(y_BD)), weights, inputs


def explicit_score(model: ViT, output_BK: Tensor, target: Target) -> Tensor:
    if target.index_B is not None:
        return torch.stack([row[index] for row, index in zip(output_BK, target.index_B.tolist(), strict=True)])
    assert target.unit_BD is not None
    return torch.stack([row @ unit.double() for row, unit in zip(output_BK, target.unit_BD, strict=True)])


def pooling_row(model: ViT, x_BCYX: Tensor, matrix_BTT: Tensor) -> Tensor:
    """Which of the rows stands for the output."""
    if model.spec.uses_cls:
        return matrix_BTT[:, 0]
    if model.map is None:
        return matrix_BTT[:, model.spec.num_prefix :].mean(1)
    return torch.einsum("bt,btk->bk", model.pooling_weights(x_BCYX).mean(1).double(), matrix_BTT)


def close(found: Tensor, expected: Tensor) -> None:
    """Equal up to float32, which maps are given in."""
    assert found.dtype == torch.float32
    assert float(expected.max()) > 0, "a reference of zeros would prove nothing"
    torch.testing.assert_close(found, expected.float(), rtol=2e-4, atol=2e-5 * float(expected.max()))


@each_variant
def test_attention_is_the_last_layers_row_of_the_output(changes: dict[str, object]) -> None:
    model = small_model(**changes)
    x = images(model)
    with torch.no_grad():
        output, weights, _ = explicit_forward(model, x)
    torch.testing.assert_close(output, model(x).detach(), rtol=1e-8, atol=1e-8)  # or the reference is none
    prefix, grid = model.spec.num_prefix, model.spec.grid
    row = model.pooling_weights(x).mean(1) if model.map is not None else pooling_row(model, x, weights[-1].mean(1))
    close(saliency(model, x, "attention", chunk=2), row[:, prefix:].reshape(-1, *grid))
    earlier = pooling_row(model, x, weights[0].mean(1)) if model.map is None else weights[0].mean(1)[:, prefix:].mean(1)
    close(saliency(model, x, "attention", layer=0), earlier[:, prefix:].reshape(-1, *grid))


@each_variant
def test_gradient_rollout_is_that_of_explicit_attention_and_autograd(changes: dict[str, object]) -> None:
    model = small_model(**changes)
    x = images(model)
    target = target_of(model, x)
    output, weights, _ = explicit_forward(model, x)
    gradients = torch.autograd.grad(explicit_score(model, output, target).sum(), weights)
    tokens = weights[0].shape[-1]
    rolled = torch.eye(tokens, dtype=torch.float64).expand(len(x), -1, -1)
    for each, gradient in zip(weights, gradients, strict=True):
        raised = torch.zeros(len(x), tokens, tokens, dtype=torch.float64)
        for head in range(model.spec.heads):
            raised += (each[:, head] * gradient[:, head]).clamp(min=0) / model.spec.heads
        raised = raised.detach() + torch.eye(tokens)
        rolled = raised / raised.sum(-1, keepdim=True) @ rolled
    row = pooling_row(model, x, rolled)[:, model.spec.num_prefix :]
    close(saliency(model, x, "gradient-rollout", target, chunk=2), row.reshape(-1, *model.spec.grid))


@each_variant
@pytest.mark.parametrize("layer", [-1, 0])
def test_grad_cam_by_hand(changes: dict[str, object], layer: int) -> None:
    model = small_model(**changes)
    x = images(model)
    target = target_of(model, x)
    output, _, inputs = explicit_forward(model, x)
    (gradient,) = torch.autograd.grad(explicit_score(model, output, target).sum(), [inputs[layer]])
    patches = range(model.spec.num_prefix, inputs[layer].shape[1])
    expected = torch.zeros(len(x), len(patches), dtype=torch.float64)
    for b in range(len(x)):
        channel_weights = sum(gradient[b, token] for token in patches) / len(patches)
        for n, token in enumerate(patches):
            expected[b, n] = max(0.0, float(channel_weights @ inputs[layer][b, token].detach()))
    found = saliency(model, x, "grad-cam", target, layer=layer, chunk=2)
    close(found, expected.reshape(-1, *model.spec.grid))


@pytest.mark.parametrize("changes", slow_after(1, VARIANTS.values()), ids=VARIANTS)
def test_integrated_gradients_are_a_riemann_sum_and_complete(changes: dict[str, object]) -> None:
    model = small_model(0.5, **changes)
    x = images(model, 2)
    target = target_of(model, x)
    baseline, nodes = blurred(x, model.spec.stride), 16
    if model.spec.stem is not None:  # its ReLUs bend the path, and quadrature takes more nodes, or a shorter path
        baseline, nodes = 0.8 * x + 0.2 * baseline, 64
    found = integrated_gradients(model, x, target, baseline=baseline, steps=nodes, chunk=1)
    steps = 100
    total = torch.zeros_like(x)
    for step in range(steps):
        point = (baseline + (step + 0.5) / steps * (x - baseline)).requires_grad_()
        total += torch.autograd.grad(explicit_score(model, explicit_forward(model, point)[0], target).sum(), [point])[0]
    expected = (x - baseline) * total / steps
    assert (found - expected).norm() <= 0.01 * expected.norm()
    with torch.no_grad():
        gain = explicit_score(model, model(x), target) - explicit_score(model, model(baseline), target)
    torch.testing.assert_close(found.sum(dim=(1, 2, 3)), gain, rtol=0.01, atol=0)


def test_integrated_gradients_start_from_a_blurred_copy_or_a_given_image() -> None:
    model = small_model(0.5)
    x = images(model)
    target, grey = target_of(model, x), torch.full((1, 3, 1, 1), -0.5, dtype=torch.float64)
    for baseline, start in ((None, blurred(x, 4)), (grey, grey.expand_as(x))):
        found = integrated_gradients(model, x, target, baseline=baseline, steps=24)
        with torch.no_grad():
            gain = target.score(model, x) - target.score(model, start)
        torch.testing.assert_close(found.sum(dim=(1, 2, 3)), gain, rtol=0.01, atol=0)


def test_heat_of_integrated_gradients_is_the_size_of_what_each_patch_has() -> None:
    model = small_model()
    x = images(model)
    target = target_of(model, x)
    pixels = integrated_gradients(model, x, target, steps=4)
    heat = saliency(model, x, "integrated-gradients", target, steps=4)
    for b, row, col in ((0, 0, 0), (1, 2, 3), (2, 1, 0)):
        part = pixels[b, :, 4 * row : 4 * row + 4, 4 * col : 4 * col + 4]
        assert heat[b, row, col].item() == pytest.approx(part.sum().abs().item(), rel=1e-5)


@pytest.mark.parametrize("name", slow_after(1, ["EfficientNet-B0", "BiT-R26x1+NL", "AxialResNet-26-w8"]))
def test_grad_cam_of_a_cnn_is_the_class_activation_map(name: str) -> None:
    """What is pooled by its mean has the head's own weights as gradients, up to the number of places."""
    model = create_model(name, image_size=(64, 96), num_classes=3, seed=0).eval()
    assert isinstance(model, StageModel) and model.head is not None
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    x, classes, tape = torch.randn(3, 3, 64, 96, generator=torch.Generator().manual_seed(2)), [0, 2, 1], Tape()
    model(x, tape)
    map_BCYX = tape[model.stage_maps[-1]]
    rows, cols = map_BCYX.shape[2:]
    assert (rows, cols) == model.spec.grid_for((64, 96))
    found = saliency(model, x, "grad-cam", Target.classes(classes), chunk=2)
    for b, k in enumerate(classes):
        expected_YX = torch.einsum("c,cyx->yx", model.head.weight[k], map_BCYX[b]).relu() / (rows * cols)
        torch.testing.assert_close(found[b], expected_YX, rtol=1e-3, atol=1e-6)
    # Of the first stage gradients differ from place to place, and their mean is what weighs a channel.
    first_BCYX = tape[model.stage_maps[0]]
    score = sum(tape["logits"][b, k] for b, k in enumerate(classes))
    (gradient_BCYX,) = torch.autograd.grad(score, [first_BCYX])  # type: ignore[list-item]
    places = first_BCYX.shape[2] * first_BCYX.shape[3]
    expected_BYX = torch.einsum("bcyx,bcuv->buv", gradient_BCYX, first_BCYX.detach()).relu() / places
    first = saliency(model, x, "grad-cam", Target.classes(classes), layer=0)
    torch.testing.assert_close(first, expected_BYX, rtol=1e-3, atol=1e-4 * expected_BYX.max().item())
    assert methods_of(model.spec) == ("grad-cam", "integrated-gradients")
    for method in ("attention", "rollout", "gradient-rollout"):
        with pytest.raises(UsageError, match=r"no attention|no sequence of tokens"):
            saliency(model, x, method, Target.classes(classes))


@pytest.mark.parametrize("name", slow_after(1, ["EfficientNet-B0", "BiT-R26x1"]))
def test_integrated_gradients_take_any_model_and_any_edge(name: str) -> None:
    bit = create_model(name, image_size=(40, 64), num_classes=3, seed=0).eval()
    x = torch.randn(2, 3, 40, 64)
    heat = saliency(bit, x, "integrated-gradients", Target.classes([0, 1]), steps=2)
    assert heat.shape == (2, *bit.spec.grid) == (2, 2, 2)
    pixels = torch.ones(1, 40, 64)  # the lower patches reach over the edge
    assert patch_sums(pixels, bit).tolist() == [[[32 * 32, 32 * 32], [8 * 32, 8 * 32]]]
    with pytest.raises(UsageError, match="no attention"):
        saliency(bit, x, "rollout", Target.classes([0, 1]))


@pytest.mark.parametrize(
    "method", slow_after(len(METHODS) - 1, sorted(METHODS, key=lambda name: name == "integrated-gradients"))
)
def test_every_map_is_on_the_grid_and_the_same_in_chunks_and_in_inference_mode(method: Method) -> None:
    for changes in ({}, {"num_classes": 0}, {"pool": "map", "registers": 1}):
        model = small_model(**changes).float()
        x = images(model).float()
        heat = saliency(model, x, method)
        assert heat.shape == (3, 3, 4) and heat.dtype == torch.float32 and heat.min() >= 0 and heat.max() > 0
        with torch.inference_mode():
            again = saliency(model, x.clone(), method, chunk=1)
        torch.testing.assert_close(again, heat, rtol=1e-3, atol=1e-5)
        assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("method", ["gradient-rollout", "grad-cam", "integrated-gradients"])
def test_another_class_has_another_map(method: Method) -> None:
    model = small_model()
    x = images(model)
    one, other = (saliency(model, x, method, Target.classes([index] * 3)) for index in (0, 1))
    assert not torch.allclose(one, other, rtol=0.1)


def test_default_target_is_the_answer_or_the_own_representation() -> None:
    model = small_model()
    x = images(model)
    found = Target.of(model, x)
    assert found.index_B is not None and found.index_B.tolist() == model(x).argmax(1).tolist()
    assert found.for_model(small_model(pool="gap"), x) is found
    headless = small_model(num_classes=0)
    own = Target.of(headless, x)
    representation = headless.represent(x)
    torch.testing.assert_close(own.score(headless, x), representation.norm(dim=1))
    torch.testing.assert_close(own.normalised_score(headless, x), torch.ones(3).double())
    flipped = own.normalised_score(headless, x.flip(0))
    expected = torch.nn.functional.cosine_similarity(representation, representation.flip(0))
    torch.testing.assert_close(flipped, expected)
    other = small_model(num_classes=0, pool="gap")
    torch.testing.assert_close(own.for_model(other, x).normalised_score(other, x), torch.ones(3).double())


def test_normalised_score_of_a_class_is_its_probability() -> None:
    model = small_model()
    x = images(model)
    found = Target.classes([1, 4, 2]).normalised_score(model, x)
    torch.testing.assert_close(found, model(x).softmax(1)[[0, 1, 2], [1, 4, 2]])


def test_own_representation_of_a_model_with_a_head() -> None:
    model = small_model(0.5)
    x = images(model, 2)
    target = Target.own(model, x)
    total = integrated_gradients(model, x, target, steps=24).sum(dim=(1, 2, 3))
    with torch.no_grad():
        gain = target.score(model, x) - target.score(model, blurred(x, 4))
    torch.testing.assert_close(total, gain, rtol=0.01, atol=0)


def test_blurred_images_keep_their_colour_and_lose_what_is_small() -> None:
    square_Y, square_X = torch.arange(64) // 4, torch.arange(96) // 4
    board_YX = ((square_Y[:, None] + square_X) % 2).float()  # a square for each patch
    colour_3YX = torch.tensor([0.5, -1.0, 2.0])[:, None, None] + torch.linspace(-1, 1, 96)
    colour_3YX = colour_3YX.expand(3, 64, 96)
    found_3YX = blurred((colour_3YX + board_YX)[None], 4)[0]
    inside = (slice(None), slice(24, -24), slice(24, -24))  # edges are continued outwards as they are
    torch.testing.assert_close(found_3YX[inside], colour_3YX[inside] + 0.5, rtol=0, atol=0.01)
    constant = torch.full((1, 1, 8, 8), 0.7)
    torch.testing.assert_close(blurred(constant, 4), constant)


def test_wrong_requests_are_refused() -> None:
    model = small_model()
    x = images(model)
    with pytest.raises(UsageError, match="for each of the 3"):
        saliency(model, x, "grad-cam", Target.classes([1]))
    with pytest.raises(UsageError, match="numbered from 0 to 4"):
        saliency(model, x, "grad-cam", Target.classes([1, 2, 5]))
    with pytest.raises(UsageError, match="no classes"):
        saliency(small_model(num_classes=0), x, "grad-cam", Target.classes([1, 2, 3]))
    with pytest.raises(UsageError, match="unknown value for method"):
        saliency(model, x, "grad-camp")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no layer 3"):
        saliency(model, x, "grad-cam", layer=3)
    with pytest.raises(UsageError, match="at least 1 step"):
        saliency(model, x, "integrated-gradients", steps=0)


DINOV2 = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[4] / "shared" / "data") / "dinov2_vits14"


@pytest.mark.skipif(not DINOV2.is_dir(), reason="needs the DINOv2 weights in VITLAB_DATA")
def test_attention_of_converted_dinov2_is_the_explicit_computation() -> None:
    """From the arrays of the file, by their own names, and formulas of the DINOv2 authors."""
    from safetensors.torch import load_file

    path = DINOV2 / "dinov2_vits14_fp16.safetensors"
    arrays = {name: array.double() for name, array in load_file(path).items()}
    model = vitlab.load(path, device="cpu").model
    assert isinstance(model, ViT)
    x = torch.randn(1, 3, 56, 70, generator=torch.Generator().manual_seed(0))
    layers = dict(model.attention_layers(x))
    assert len(layers) == 12
    z_TD = model._tokens(x)[0][0].double()  # patches and positions have tests of their own
    for i in range(12):
        block = {
            name.removeprefix(f"blocks.{i}."): array
            for name, array in arrays.items()
            if name.startswith(f"blocks.{i}.")
        }
        y_TD = torch.nn.functional.layer_norm(z_TD, (384,), block["norm1.weight"], block["norm1.bias"], 1e-6)
        q, k, v = (y_TD @ block["attn.qkv.weight"].T + block["attn.qkv.bias"]).chunk(3, dim=1)
        heads = []
        for head in range(6):
            own = slice(64 * head, 64 * head + 64)
            weights_TT = (q[:, own] @ k[:, own].T / math.sqrt(64)).softmax(dim=1)
            torch.testing.assert_close(layers[i][0, head].double(), weights_TT, rtol=1e-3, atol=1e-5)
            heads.append(weights_TT @ v[:, own])
        out_TD = torch.cat(heads, dim=1) @ block["attn.proj.weight"].T + block["attn.proj.bias"]
        z_TD = z_TD + block["ls1.gamma"] * out_TD
        y_TD = torch.nn.functional.layer_norm(z_TD, (384,), block["norm2.weight"], block["norm2.bias"], 1e-6)
        y_TD = torch.nn.functional.gelu(y_TD @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"])
        z_TD = z_TD + block["ls2.gamma"] * (y_TD @ block["mlp.fc2.weight"].T + block["mlp.fc2.bias"])
