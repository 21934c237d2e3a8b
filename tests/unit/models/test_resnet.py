"""The ResNet details that decide parity: padding, pooling, pre- and post-activation."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vitlab.core.errors import UsageError
from vitlab.models.build import build, create_model
from vitlab.models.names import parse_name
from vitlab.models.resnet import BiT, Trunk
from vitlab.models.spec import BiTSpec, TrunkSpec, bit_trunk, changed
from vitlab.models.tape import Tape

SMALL = BiTSpec(trunk=bit_trunk((1, 2), 1), image_size=(32, 48), num_classes=5)


def shaken(spec: BiTSpec) -> BiT:
    model = build(spec, seed=0).eval()
    assert isinstance(model, BiT)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def test_shapes_features_and_tape() -> None:
    model, x = shaken(SMALL), torch.randn(2, 3, 32, 48)
    tape = Tape()
    assert model(x, tape).shape == (2, 5)
    assert list(tape) == ["root", "stage0/unit00", "stage1/unit00", "stage1/unit01", "encoded", "pooled", "logits"]
    found = model.features(x, tokens="patches", layers=[0, 1])
    assert found.layers[0].shape == (2, 8 * 12, 256) and found.grids[0] == (8, 12)
    assert found.last.shape == (2, 4 * 6, 512) and found.grid == (4, 6)
    torch.testing.assert_close(model.features(x).last, tape["pooled"])
    with pytest.raises(UsageError, match="no class token"):
        model.features(x, tokens="cls")


@pytest.mark.parametrize(("pool_padding", "border"), [(None, 0), ("zero", 0), ("neg-inf", -1)])
def test_bit_pools_over_zeros_or_minus_infinity(pool_padding: Any, border: float) -> None:
    """All-negative features show it: at the border a zero (big_transfer) wins the maximum, -inf (big_vision) does not."""
    trunk = Trunk(TrunkSpec(stages=(), preact=True, padding="fixed", pool_padding=pool_padding), 1)
    trunk.root.forward = lambda _: -torch.ones(1, 64, 8, 8)  # type: ignore[method-assign]
    pooled = trunk(torch.zeros(1, 1, 16, 16))
    assert pooled[0, 0, 0, 0] == border and pooled[0, 0, 1, 1] == -1


def test_hybrid_root_pools_with_minus_infinity_on_the_far_side() -> None:
    trunk = Trunk(TrunkSpec(stages=()), 1)
    root = torch.arange(64.0).reshape(1, 1, 8, 8).expand(1, 64, 8, 8)
    trunk.root.forward = lambda _: root  # type: ignore[method-assign]
    trunk.root_norm = torch.nn.Identity()  # type: ignore[assignment]
    expected = F.max_pool2d(F.pad(root, (0, 1, 0, 1), value=float("-inf")), 3, 2)
    assert torch.equal(trunk(torch.zeros(1, 1, 16, 16)), expected)


def test_projection_takes_the_preactivated_input_and_identity_the_raw_one() -> None:
    model = shaken(SMALL)
    first, second = model.trunk.stages[1][0], model.trunk.stages[1][1]
    x = torch.randn(1, 256, 8, 8)
    silent = copy.deepcopy(first)
    torch.nn.init.zeros_(silent.conv3.weight)  # leaves the shortcut alone
    torch.testing.assert_close(silent(x), silent.proj(F.relu(silent.norm1(x))))
    quiet = copy.deepcopy(second)
    torch.nn.init.zeros_(quiet.conv3.weight)
    y = torch.randn(1, 512, 4, 4)
    torch.testing.assert_close(quiet(y), y)


@pytest.mark.parametrize(
    "change",
    [
        {"gn_eps": 1e-2},
        {"ws_eps": 1e-1},
        {"ws": "std-eps", "ws_eps": 1e-2},
        {"padding": "same"},
        {"pool_padding": "neg-inf"},
    ],
)
def test_conventions_change_the_answer(change: dict[str, object]) -> None:
    x = torch.randn(1, 3, 32, 48)
    other = changed(SMALL, {"trunk": change})
    assert isinstance(other, BiTSpec)
    assert not torch.allclose(shaken(SMALL)(x), shaken(other)(x), atol=1e-5)


def test_bit_works_on_any_size_and_channel_count() -> None:
    model = create_model("BiT-R26x1", num_classes=3, in_channels=1, overrides={"trunk": {"stages": [1, 1, 1]}})
    assert model(torch.randn(2, 1, 37, 51)).shape == (2, 3)


def test_root_only_hybrid_has_a_true_stride_of_32() -> None:
    spec = parse_name("R+ViT-Ti/16")
    assert spec.stride == 32 and spec.grid == (7, 7)  # type: ignore[union-attr]


@pytest.mark.parametrize("trunk", [TrunkSpec(stages=(1, 1)), bit_trunk((1, 1), 1)], ids=["same", "fixed"])
def test_feature_map_of_any_size_is_as_large_as_the_spec_says(trunk: TrunkSpec) -> None:
    for rows, cols in ((32, 32), (37, 51), (33, 40)):
        assert Trunk(trunk, 1)(torch.randn(1, 1, rows, cols)).shape[2:] == trunk.out_size((rows, cols))
