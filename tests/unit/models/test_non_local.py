"""Non-local blocks in BiT: the formula by plain loops, where they stand, and that a new one changes nothing."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.families import spec_from_dict
from vitlab.models.names import alias, format_name, parse_name
from vitlab.models.resnet import BiT, NonLocal
from vitlab.models.spec import BiTSpec, TrunkSpec, ViTSpec, bit_trunk, changed, spec_to_dict
from vitlab.training.freeze import layer_of_each
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle
from vitlab.weights.surgery import for_transfer, require_same_body
from vitlab.weights.targets import write_foreign

PLAIN = BiTSpec(trunk=bit_trunk((1, 3, 2), 1), image_size=(32, 48), num_classes=5)
NON_LOCAL = dataclasses.replace(PLAIN, trunk=dataclasses.replace(PLAIN.trunk, non_local=(1, 2)))


@torch.no_grad()
def shaken(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(0.3 + 0.5 * torch.rand(tensor.shape, generator=generator))
    return module.eval()


def by_loops(block: NonLocal, x_CYX: np.ndarray) -> np.ndarray:
    """y_i = sum_j softmax_j(q_i . k_j / sqrt(C/2)) v_j over the maxima of 2x2 cells, place by place."""
    channels, rows, cols = x_CYX.shape
    state = {name: tensor.double().numpy() for name, tensor in block.state_dict().items()}

    def project(name: str, vector: np.ndarray) -> np.ndarray:
        return state[f"{name}.weight"][:, :, 0, 0] @ vector + state[f"{name}.bias"]

    cells = [x_CYX[:, y : y + 2, x : x + 2].max(axis=(1, 2)) for y in range(0, rows, 2) for x in range(0, cols, 2)]
    keys, values = ([project(name, cell) for cell in cells] for name in ("key", "value"))
    out_CYX = np.zeros_like(x_CYX)
    for y in range(rows):
        for x in range(cols):
            query = project("query", x_CYX[:, y, x])
            logits = np.array([sum(query * key) / math.sqrt(channels / 2) for key in keys])
            weights = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            mixed = project("out", sum(w * value for w, value in zip(weights, values, strict=True)))
            spread = np.sqrt(state["norm.running_var"] + block.norm.eps)
            normed = (mixed - state["norm.running_mean"]) / spread * state["norm.weight"] + state["norm.bias"]
            out_CYX[:, y, x] = x_CYX[:, y, x] + normed
    return out_CYX


@pytest.mark.parametrize("size", [(4, 6), (3, 5), (1, 1)], ids=str)
def test_block_equals_plain_loops(size: tuple[int, int]) -> None:
    block = shaken(NonLocal(8)).double()
    x = torch.randn(2, 8, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for image, y in zip(x, block(x), strict=True):
        np.testing.assert_allclose(y.detach().numpy(), by_loops(block, image.numpy()), rtol=1e-9, atol=1e-9)


def test_weights_times_values_are_what_the_blocks_compute() -> None:
    """On an odd grid: 3x5 places of the second stage see 2x3 cells."""
    model = shaken(build(NON_LOCAL, seed=0)).double()
    x = torch.randn(2, 3, 24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    blocks = [module for module in model.modules() if isinstance(module, NonLocal)]
    for block in blocks:
        block.register_forward_hook(lambda _, given, out: seen.append((given[0].detach(), out.detach())))
    model(x)
    found = list(model.attention_on_grids(x))
    assert [each.layer.name for each in found] == ["stage1/unit01", "stage2/unit01"] and len(seen) == 2 + 1
    assert [(each.layer.grid, each.layer.key_grid, each.layer.stride) for each in found] == [
        ((3, 5), (2, 3), 8),
        ((2, 3), (1, 2), 16),
    ]
    for block, (y_BCYX, out_BCYX), each in zip(blocks, seen, found, strict=False):
        rows, cols = each.layer.grid
        cells = [
            y_BCYX[:, :, row : row + 2, col : col + 2].amax(dim=(2, 3))
            for row in range(0, rows, 2)
            for col in range(0, cols, 2)
        ]
        values_BKC = torch.einsum("dc,bkc->bkd", block.value.weight[:, :, 0, 0], torch.stack(cells, dim=1))
        values_BKC = values_BKC + block.value.bias
        mixed_BCYX = torch.einsum("bhqk,bkc->bcq", each.weights_BHQK.double(), values_BKC).unflatten(2, (rows, cols))
        torch.testing.assert_close(y_BCYX + block.norm(block.out(mixed_BCYX)), out_BCYX, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_attention_of_chosen_blocks_is_on_their_grids() -> None:
    model, x = shaken(build(NON_LOCAL, seed=0)), torch.randn(2, 3, 32, 48)
    both, (last,) = list(model.attention_on_grids(x)), list(model.attention_on_grids(x, layers=[-1]))
    assert last.index == 1 and torch.equal(last.weights_BHQK, both[1].weights_BHQK)
    assert model.spec.attention_shape == (2, 1) and both[0].weights_BHQK.shape == (2, 1, 4 * 6, 2 * 3)
    assert both[0].maps([0, 7]).shape == (2, 1, 2, 2, 3)
    torch.testing.assert_close(both[0].maps([7])[:, :, 0].flatten(2), both[0].weights_BHQK[:, :, 7])
    with pytest.raises(UsageError, match="no layer 2"):
        model.attention_on_grids(x, layers=[2])
    with pytest.raises(UsageError, match=r"BiT has no sequence of tokens: .*shrink"):
        model.attention(x)
    plain = build(PLAIN, seed=0)
    assert plain.spec.attention_shape == (0, 0) and plain.attention_geometry((32, 48)) == ()
    with pytest.raises(UsageError, match="a BiT model has no attention"):
        plain.attention_on_grids(x)


def test_they_follow_every_second_unit_of_their_stages() -> None:
    spec = parse_name("BiT-R50x1+NL")
    assert isinstance(spec, BiTSpec) and spec.trunk.non_local == (1, 2)
    places = [
        (s, u) for s, count in enumerate(spec.trunk.stages) for u in range(count) if spec.trunk.follows_non_local(s, u)
    ]
    assert places == [(1, 1), (1, 3), (2, 1), (2, 3), (2, 5)]
    model = build(NON_LOCAL, seed=0)
    names = {name.rsplit(".non_local")[0] for name in model.state_dict() if ".non_local." in name}
    assert names == {"trunk.stages.1.1", "trunk.stages.2.1"}
    layers = layer_of_each(model)
    assert layers["trunk.stages.1.1.non_local.query.weight"] == layers["trunk.stages.1.1.conv1.weight"]


def test_new_blocks_change_no_bit_of_the_answer_and_take_part_when_trained() -> None:
    plain, x = shaken(build(PLAIN, seed=0)), torch.randn(2, 3, 32, 48)
    model, report = for_transfer(plain, dataclasses.replace(NON_LOCAL, num_classes=3))
    assert isinstance(model, BiT)
    assert torch.equal(model.eval().represent(x), plain.represent(x))
    assert torch.equal(model.train().represent(x), plain.represent(x))
    assert str(report) == (
        "60 tensors kept; head replaced by a zero head, 5 -> 3; 26 tensors of parts that are new in the model start fresh"
    )
    nn.init.ones_(model.trunk.stages[1][1].non_local.norm.weight)  # pyright: ignore
    assert not torch.allclose(model.represent(x), plain.represent(x), atol=1e-3)
    nn.init.normal_(model.head.weight)  # pyright: ignore[reportOptionalMemberAccess]
    model(x).square().sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {f"trunk.stages.1.1.non_local.{part}.weight" for part in ("query", "key", "value", "out")} <= moved


@pytest.mark.slow
def test_the_seed_decides_how_new_blocks_start() -> None:
    plain = build(PLAIN, seed=0)
    first, same, other = (for_transfer(plain, NON_LOCAL, seed=seed)[0].state_dict() for seed in (1, 1, 2))
    name = "trunk.stages.2.1.non_local.key.weight"
    assert torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name])
    assert first[name].std().item() == pytest.approx(0.01, rel=0.02)
    assert not first["trunk.stages.2.1.non_local.norm.weight"].any()


@pytest.mark.slow
def test_other_bodies_and_lost_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.trunk"):
        for_transfer(build(NON_LOCAL, seed=0), PLAIN)
    wider = dataclasses.replace(NON_LOCAL, trunk=dataclasses.replace(NON_LOCAL.trunk, stages=(1, 3, 3)))
    with pytest.raises(UsageError, match=r"model\.trunk"):
        for_transfer(build(PLAIN, seed=0), wider)


@pytest.mark.slow
def test_bundles_keep_them_and_other_formats_have_no_place_for_them(tmp_path: Path) -> None:
    model, labels = shaken(build(NON_LOCAL, seed=0)), tuple("abcde")
    bundle = Bundle(model, Preprocess(image_size=(32, 48)), labels, "# NL", {})
    save_bundle(tmp_path / "bundle", bundle)
    again, x = read_bundle(tmp_path / "bundle").model, torch.randn(1, 3, 32, 48)
    assert again.spec == NON_LOCAL and torch.equal(again(x), model(x))
    with pytest.raises(UsageError, match=r"timm format has no place for .*non_local"):
        write_foreign(bundle, tmp_path / "timm", "timm")
    with pytest.raises(UsageError, match=r"has no place for .*non_local"):
        write_foreign(bundle, tmp_path / "file.npz", "google-npz")


def test_names_and_stored_specs() -> None:
    assert alias("BiT-R50x1+NL") == "bit-r50x1-nl" and format_name(parse_name("bit-r50x1-nl")) == "BiT-R50x1+NL"
    elsewhere = changed(parse_name("BiT-R50x1"), {"trunk": {"non_local": [2]}})
    assert format_name(elsewhere).startswith("BiT-R50x1+NL (changed:") and "stages 2" in format_name(elsewhere)
    before = spec_to_dict(PLAIN)
    del before["trunk"]["non_local"]  # as stored before there were any
    assert spec_from_dict(before) == PLAIN


@pytest.mark.parametrize("stages", [(3,), (2, 1), (1, 1), (-1,)])
def test_stages_that_do_not_exist_are_refused(stages: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"non_local .* 0 to 2 in order"):
        dataclasses.replace(PLAIN.trunk, non_local=stages)


def test_stage_of_one_unit_would_have_none_and_is_refused() -> None:
    with pytest.raises(UsageError, match=r"follows every second unit.*stage 0 has one"):
        dataclasses.replace(bit_trunk((1, 2), 1), non_local=(0, 1))


def test_start_weights_with_blocks_elsewhere_differ_in_that_field_alone() -> None:
    other = changed(NON_LOCAL, {"trunk": {"non_local": [2]}})
    with pytest.raises(UsageError) as caught:
        require_same_body(NON_LOCAL, other)
    printed = str(caught.value)
    assert "the start weights have model.trunk.non_local = [1, 2], but the recipe says [2]" in printed
    assert "TrunkSpec" not in printed and "gn_eps" not in printed


def test_only_bit_has_them() -> None:
    with pytest.raises(UsageError, match="pre-activation trunk"):
        TrunkSpec(stages=(2, 2), non_local=(1,))
    stem = dataclasses.replace(bit_trunk((2, 2), 1), non_local=(1,))
    with pytest.raises(UsageError, match="stem of a hybrid"):
        ViTSpec(width=8, depth=1, mlp_dim=8, heads=1, patch=1, image_size=(32, 32), stem=stem)
