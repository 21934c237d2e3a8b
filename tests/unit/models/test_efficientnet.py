"""EfficientNet: published sizes, initial values, batch norm in each mode, stochastic depth on skips alone."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.batch_norm import BatchNorm, kept_statistics
from vitlab.models.build import allocate, build, create_model
from vitlab.models.efficientnet import Conv, EfficientNet, MBConv
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.names import alias, format_name, parse_name
from vitlab.models.ops import pad_same
from vitlab.models.tape import Tape

TINY = EfficientNetSpec(
    stem_width=8,
    widths=(8, 8, 16, 16, 24, 24, 32),
    depths=(1, 2, 1, 2, 1, 1, 1),
    last_width=40,
    image_size=(64, 64),
    num_classes=5,
)


def statistics(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def images(count: int, *sides: int) -> torch.Tensor:
    return torch.randn(count, 3, *sides, generator=torch.Generator().manual_seed(0))


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stem", "widths", "depths", "last", "side", "dropout"),
    [
        ("B0", 32, (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1), 1280, 224, 0.2),
        ("B3", 40, (24, 32, 48, 96, 136, 232, 384), (2, 3, 3, 5, 5, 6, 2), 1536, 300, 0.3),
        ("B7", 64, (32, 48, 80, 160, 224, 384, 640), (4, 7, 7, 10, 10, 13, 4), 2560, 600, 0.5),
        ("L2", 136, (72, 104, 176, 344, 480, 824, 1376), (6, 11, 11, 16, 16, 22, 6), 5504, 800, 0.5),
    ],
)
def test_sizes_are_b0_scaled(
    name: str, stem: int, widths: tuple[int, ...], depths: tuple[int, ...], last: int, side: int, dropout: float
) -> None:
    spec = parse_name(f"EfficientNet-{name}")
    assert spec == EfficientNetSpec(
        stem_width=stem, widths=widths, depths=depths, last_width=last, image_size=(side, side), dropout=dropout
    )
    assert isinstance(spec, EfficientNetSpec)
    assert (spec.padding, spec.bn_eps, spec.bn_momentum, spec.stochastic_depth) == ("same", 1e-3, 0.01, 0.2)
    assert (spec.stride, spec.num_blocks, spec.num_tokens) == (32, 7, None)
    assert alias(f"EfficientNet-{name}") == f"efficientnet-{name.lower()}"
    assert parse_name(f"efficientnet-{name.lower()}") == spec


def test_what_no_name_says_is_described() -> None:
    assert format_name(TINY).startswith("EfficientNet (changed: widths 8 (8, 8, 16")
    with pytest.raises(UnknownName, match="EfficientNet-B9"):
        parse_name("EfficientNet-B9")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"widths": (8,) * 6}, "widths.*7 stages"),
        ({"depths": (1,) * 8}, "depths.*7 stages"),
        ({"depths": (0,) * 7}, "depths"),
        ({"bn_momentum": 1.5}, "bn_momentum"),
        ({"bn_eps": 0.0}, "bn_eps"),
        ({"dropout": 1.0}, "dropout"),
        ({"stochastic_depth": -0.1}, "stochastic_depth"),
        ({"padding": "valid"}, "padding"),
    ],
)
def test_specs_that_cannot_be_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        dataclasses.replace(TINY, **changes)


def test_squeeze_is_a_quarter_of_what_enters_the_block() -> None:
    model = allocate(parse_name("EfficientNet-B0"))
    assert model.get_parameter("stages.1.0.squeeze.weight").shape == (4, 96, 1, 1)  # 16 enter, 96 are weighed
    assert model.get_parameter("stages.6.0.excite.weight").shape == (1152, 48, 1, 1)


# --- initial values ---------------------------------------------------------------------------------------------------


def test_kernels_start_by_their_fan_out_and_statistics_as_the_identity() -> None:
    model = create_model("EfficientNet-B0", seed=0)
    for name, fan_out in {
        "stem.weight": 9 * 32,
        "stages.5.0.expand.weight": 672,
        "stages.5.0.depthwise.weight": 25,  # one output of each kernel
        "stages.5.0.squeeze.weight": 28,
        "last.weight": 1280,
    }.items():
        kernel = model.get_parameter(name).detach()
        assert float(kernel.std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.1), name
        assert abs(float(kernel.mean())) < 0.2 * float(kernel.std())
    assert not model.get_parameter("head.weight").any() and not model.get_parameter("stages.5.0.squeeze.bias").any()
    for name, value in model.named_buffers():
        assert torch.equal(value, torch.ones_like(value) if name.endswith("running_var") else torch.zeros_like(value))


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [16, 17])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_convolution_pads_by_its_rule(side: int, kernel: int, stride: int) -> None:
    x = images(1, side, side)
    same, fixed = (Conv(rule, 3, 4, kernel, stride) for rule in ("same", "fixed"))
    fixed.weight = same.weight
    padded = torch.nn.functional.conv2d(pad_same(x, kernel, stride), same.weight, stride=stride)
    assert torch.allclose(same(x), padded, atol=1e-6)
    assert fixed(x).shape == padded.shape
    alike = stride == 1 or side % 2 == 1
    assert torch.allclose(fixed(x), padded, atol=1e-6) == alike, "at an even side the odd row goes to the bottom"


def test_padding_and_eps_change_what_is_computed() -> None:
    x, model = images(2, 64, 64), build(TINY, seed=0).eval()
    for changes in ({"padding": "fixed"}, {"bn_eps": 1e-5}):
        other = build(dataclasses.replace(TINY, **changes), seed=0).eval()  # pyright: ignore[reportArgumentType]
        assert not torch.allclose(other.represent(x), model.represent(x), rtol=1e-4)


# --- batch norm -------------------------------------------------------------------------------------------------------


def test_statistics_move_in_training_by_the_momentum_and_not_in_evaluation() -> None:
    norm, x = BatchNorm(3, eps=1e-3, momentum=0.01), images(4, 8, 8) + 2
    y = norm.train()(x)
    assert torch.allclose(y.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(norm.running_mean, 0.01 * x.mean(dim=(0, 2, 3)), atol=1e-6)
    assert torch.allclose(norm.running_var, 0.99 + 0.01 * x.transpose(0, 1).flatten(1).var(dim=1), atol=1e-6)
    assert int(norm.num_batches_tracked) == 1
    before = statistics(norm)
    expected = (x - norm.running_mean[:, None, None]) / (norm.running_var[:, None, None] + 1e-3).sqrt()
    assert torch.allclose(norm.eval()(x), expected, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in statistics(norm).items())


def test_frozen_norm_uses_its_statistics_and_keeps_them() -> None:
    norm, x = BatchNorm(3).train(), images(4, 8, 8) + 2
    norm.requires_grad_(False)
    before = statistics(norm)
    assert torch.equal(norm(x), norm.eval()(x))
    assert all(torch.equal(value, before[name]) for name, value in statistics(norm).items())


def test_kept_statistics_normalise_by_the_batch_and_change_nothing() -> None:
    norm, x = BatchNorm(3).train(), images(4, 8, 8) + 2
    before = statistics(norm)
    with kept_statistics(norm):
        y = norm(x)
    assert all(torch.equal(value, before[name]) for name, value in statistics(norm).items())
    assert torch.equal(y, norm(x)), "as a pass that counts"
    assert int(norm.num_batches_tracked) == 1


def test_one_image_with_one_position_says_what_to_do() -> None:
    model = build(TINY, seed=0).train()
    with pytest.raises(UsageError, match=r"(?s)batch norm.*no variance.*train\.batch_size"):
        model(images(1, 32, 32))
    assert model(images(2, 32, 32)).shape == (2, 5)
    assert model(images(1, 64, 64)).shape == (1, 5)
    assert model.eval()(images(1, 32, 32)).shape == (1, 5)


def test_bfloat16_on_a_cpu_stays_close_and_keeps_statistics_in_float32() -> None:
    still = dataclasses.replace(TINY, stochastic_depth=0.0)
    x, full, half = images(4, 64, 64), build(still, seed=0).train(), build(still, seed=0).train()
    expected = full.represent(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = half.represent(x)
    assert found.dtype == torch.bfloat16 and bool(found.isfinite().all())
    assert float((found.detach().float() - expected).abs().mean()) < 0.1 * float(expected.abs().mean())
    found.float().sum().backward()
    for name, value in half.named_buffers():
        if value.is_floating_point():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, full.get_buffer(name), rtol=0.05, atol=0.02, msg=name)


# --- stochastic depth and the rest ------------------------------------------------------------------------------------


def test_stochastic_depth_rises_over_all_blocks_and_acts_on_skips_alone() -> None:
    model = build(TINY, seed=0).train()
    blocks = [module for module in model.modules() if isinstance(module, MBConv)]
    assert [block.drop_rate for block in blocks] == pytest.approx([0.2 * i / 9 for i in range(9)])
    assert [block.has_skip for block in blocks] == [True, False, True, False, False, True, False, False, False]
    x = torch.randn(64, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    block = blocks[2]
    block.drop_rate = 0.5
    torch.manual_seed(0)
    kept = (block(x) != x).flatten(1).any(dim=1)
    assert 16 < int(kept.sum()) < 48, "some images lose the branch, and all of it"
    assert (block.eval()(x) != x).flatten(1).any(dim=1).all()
    plain = blocks[1].train()
    plain.drop_rate = 0.5
    assert bool((plain(x) != 0).flatten(1).any(dim=1).all()), "no skip, so there would be nothing left"


def test_dropout_acts_before_the_head_in_training_alone() -> None:
    model = build(dataclasses.replace(TINY, dropout=0.9, stochastic_depth=0.0), seed=0)
    torch.nn.init.ones_(model.head.weight)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    x = images(4, 64, 64)
    torch.manual_seed(0)
    one, other = model.train()(x), model(x)
    assert not torch.allclose(one, other)
    assert torch.equal(model.eval()(x), model(x))


def test_tape_and_features_name_the_stages() -> None:
    model, x = build(TINY, seed=0).eval(), images(2, 64, 96)
    assert isinstance(model, EfficientNet)
    tape = Tape()
    logits = model(x, tape)
    blocks = [f"stage{s}/block{u:02d}" for s, depth in enumerate(TINY.depths) for u in range(depth)]
    assert list(tape) == ["stem", *blocks, "encoded", "pooled", "logits"]
    assert torch.equal(tape["logits"], logits) and tape["encoded"].shape == (2, 40, 2, 3)
    found = model.features(x, layers=[1, -1])
    assert {layer: tuple(value.shape) for layer, value in found.layers.items()} == {1: (2, 8), 6: (2, 40)}
    assert found.grids == {1: (16, 24), 6: (2, 3)}
    assert torch.allclose(found.last, model.represent(x), atol=1e-6)
    assert model.features(x, tokens="patches").last.shape == (2, 6, 40)
    with pytest.raises(UsageError, match="class token"):
        model.features(x, tokens="cls")
    with pytest.raises(UsageError, match="no attention"):
        model.attention(x)
