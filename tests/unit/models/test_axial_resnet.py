"""AxialResNet against plain loops: position-sensitive attention, units, strides, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models import ops
from vitlab.models.axial_resnet import AxialResNet, AxialUnit, LineAttention
from vitlab.models.build import build
from vitlab.models.names import alias, format_name, parse_name
from vitlab.models.spec import AxialResNetSpec, changed
from vitlab.models.tape import Tape

SMALL = AxialResNetSpec(stages=(1, 2), width=8, heads=4, image_size=(12, 20), num_classes=5)


@torch.no_grad()
def shaken(module: nn.Module, seed: int = 0) -> Any:
    """The module in eval mode, with every parameter and every running statistic away from where it starts."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.parameters():
        tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
    for name, tensor in module.named_buffers():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(noise + 0.5 if name.endswith("running_var") else noise - 0.5)
    return module.requires_grad_(True).eval()


def normed(norm: nn.Module, channel: int, value: float) -> float:
    """Batch norm of one number, from its running statistics."""
    mean, var, gain, bias = (
        getattr(norm, name)[channel].item() for name in ("running_mean", "running_var", "weight", "bias")
    )
    return (value - mean) / math.sqrt(var + norm.eps) * gain + bias  # pyright: ignore[reportOperatorIssue]


def by_loops(attention: LineAttention, x_CYX: np.ndarray) -> np.ndarray:
    """The attention of every row or column in turn: loops over lines, heads and places, numbers one by one."""
    channels, rows, cols = x_CYX.shape
    heads, value = attention.heads, channels // attention.heads
    query = value // 2
    matrix, table = (tensor.detach().double().numpy() for tensor in (attention.qkv.weight[:, :, 0], attention.relative))
    lines = [[(y, x) for y in range(rows)] for x in range(cols)]
    if attention.axis == 1:
        lines = [[(y, x) for x in range(cols)] for y in range(rows)]
    out_CYX = np.zeros_like(x_CYX)
    for line in lines:
        length = len(line)
        qkv = np.zeros((2 * channels, length))
        for i, (y, x) in enumerate(line):
            for c in range(2 * channels):
                qkv[c, i] = normed(attention.qkv_norm, c, float(matrix[c] @ x_CYX[:, y, x]))
        for h in range(heads):
            start = h * 2 * value
            q, k, v = qkv[start:][:query], qkv[start + query :][:query], qkv[start + 2 * query :][:value]
            for i in range(length):
                logits = []
                for j in range(length):
                    # The query's vectors go by i - j, the key's by j - i; the table begins at -(length - 1).
                    content = sum(q[c, i] * k[c, j] for c in range(query))
                    of_query = sum(q[c, i] * table[c, i - j + length - 1] for c in range(query))
                    of_key = sum(k[c, j] * table[query + c, j - i + length - 1] for c in range(query))
                    terms = (content, of_query, of_key)
                    logits.append(sum(normed(attention.logits_norm, n * heads + h, t) for n, t in enumerate(terms)))
                weights = np.exp(logits) / np.exp(logits).sum()
                for c in range(value):
                    content = sum(weights[j] * v[c, j] for j in range(length))
                    of_value = sum(weights[j] * table[2 * query + c, i - j + length - 1] for j in range(length))
                    channel = h * value + c
                    both = normed(attention.out_norm, 2 * channel, content)
                    out_CYX[channel, *line[i]] = both + normed(attention.out_norm, 2 * channel + 1, of_value)
    return out_CYX


# --- attention along a line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (1, 4), (4, 4)], ids=str)
def test_attention_along_lines_equals_plain_loops(grid: tuple[int, int], axis: int) -> None:
    attention = shaken(LineAttention(8, 2, grid[axis], axis)).double()
    x = torch.randn(2, 8, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = attention(x)
    for image, y in zip(x, found, strict=True):
        np.testing.assert_allclose(y.detach().numpy(), by_loops(attention, image.numpy()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("axis", [0, 1])
def test_without_positions_it_is_plain_attention_within_the_line(axis: int) -> None:
    """On a grid of one line, with norms of the identity, it is softmax(q k) v of the whole sequence."""
    grid = (6, 1) if axis == 0 else (1, 6)
    attention = LineAttention(8, 2, 6, axis).eval()
    for norm in (attention.qkv_norm, attention.logits_norm, attention.out_norm):
        norm.eps = 0.0
        nn.init.constant_(norm.bias, 0)
    nn.init.normal_(attention.qkv.weight)
    nn.init.zeros_(attention.relative)
    x = torch.randn(3, 8, *grid)
    q, k, v = attention.qkv(x.flatten(2)).unflatten(1, (2, 8)).split((2, 2, 4), dim=2)
    full = ops.attend(q.mT * math.sqrt(2), k.mT, v.mT)  # which divides by the root of a query's two channels
    torch.testing.assert_close(attention(x), full.mT.flatten(1, 2).unflatten(2, grid), rtol=1e-4, atol=1e-5)


def test_each_kind_of_position_counts_by_itself() -> None:
    """The vectors of query, key and value in turn; each moves the answer, and none is another's mirror image."""
    attention = shaken(LineAttention(8, 2, 5, axis=1))
    x, table = torch.randn(1, 8, 2, 5), attention.relative.detach().clone()
    found = [attention(x)]
    for part in (slice(0, 2), slice(2, 4), slice(4, 8)):
        with torch.no_grad():
            attention.relative.copy_(table)
            attention.relative[part] = table[part].flip(1)  # the offset with the wrong sign
        found.append(attention(x))
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            assert (a - b).abs().max() > 1e-3


def test_vectors_by_offset_are_those_of_the_first_less_the_second() -> None:
    table = torch.arange(7.0)[None]
    assert ops.by_offset(table, 4)[0].tolist() == [[3 + i - j for j in range(4)] for i in range(4)]


# --- units and the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(4, 6), (5, 3)], ids=str)
def test_a_unit_pools_behind_its_attention_and_rounds_up_like_its_shortcut(size: tuple[int, int]) -> None:
    unit = shaken(AxialUnit(8, 8, 4, 2, size))
    x = torch.randn(2, 8, *size)
    y = unit.across(unit.down(F.relu(unit.norm1(unit.conv1(x)))))
    pooled = torch.stack(
        [
            torch.stack([y[:, :, r : r + 2, c : c + 2].mean(dim=(2, 3)) for c in range(0, size[1], 2)], dim=2)
            for r in range(0, size[0], 2)
        ],
        dim=2,
    )
    shortcut = unit.proj_norm(unit.proj(x))
    expected = F.relu(unit.norm2(unit.conv2(F.relu(pooled))) + shortcut)
    torch.testing.assert_close(unit(x), expected, rtol=1e-4, atol=1e-5)


def test_shapes_features_and_tape() -> None:
    model, x = shaken(build(SMALL, seed=0)), torch.randn(2, 3, 12, 20)
    tape = Tape()
    assert model(x, tape).shape == (2, 5)
    units = [f"stage0/unit00/{name}" for name in ("down", "across")] + ["stage0/unit00"]
    units += [f"stage1/unit0{u}{name}" for u in (0, 1) for name in ("/down", "/across", "")]
    assert list(tape) == ["root", *units, "pooled", "logits"]
    assert tape["stage0/unit00/down"].shape == (2, 5, 4, 3, 3)  # images, columns, heads, places, places
    assert tape["stage0/unit00/across"].shape == (2, 3, 4, 5, 5)
    assert tape["stage1/unit01/across"].shape == (2, 2, 4, 3, 3)
    for name in units:
        if "/unit" in name and name.endswith(("down", "across")):
            torch.testing.assert_close(tape[name].sum(-1), torch.ones(tape[name].shape[:-1]))
    found = model.features(x, tokens="patches", layers=[0, 1])
    assert found.layers[0].shape == (2, 15, 32) and found.grids[0] == (3, 5)
    assert found.last.shape == (2, 6, 64) and found.grid == SMALL.grid == (2, 3)
    torch.testing.assert_close(model.features(x).last, tape["pooled"])
    with pytest.raises(UsageError, match="no class token"):
        model.features(x, tokens="cls")


def test_weights_times_values_are_what_the_units_compute() -> None:
    """Every pair of places of the grid by loops, with the weights that `attention_on_grids` gives, zero off the line."""
    model = shaken(build(SMALL, seed=0)).double()
    x = torch.randn(2, 3, 12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    lines = [module for module in model.modules() if isinstance(module, LineAttention)]
    for line in lines:
        line.register_forward_hook(lambda _, given, out: seen.append((given[0].detach(), out.detach())))
    found = list(model.attention_on_grids(x))
    names = [f"stage{s}/unit0{u}/{way}" for s, u in ((0, 0), (1, 0), (1, 1)) for way in ("down", "across")]
    assert [each.layer.name for each in found] == names and len(lines) == len(seen) == 6
    # The unit that halves the map attends before it does.
    assert [(each.layer.grid, each.layer.stride) for each in found[::2]] == [((3, 5), 4), ((3, 5), 4), ((2, 3), 8)]
    for line, (y_BCYX, out_BCYX), each in zip(lines, seen, found, strict=True):
        (rows, cols), half = each.layer.grid, line.value // 2
        length = each.layer.num_keys
        assert length == (rows, cols)[line.axis] and each.weights_BHQK.shape == (2, 4, rows * cols, length)
        weights_BHQYX = each.maps(range(rows * cols))
        torch.testing.assert_close(weights_BHQYX.sum(dim=(3, 4)), torch.ones(2, 4, rows * cols).double())
        qkv_BHcN = line.qkv_norm(line.qkv(y_BCYX.flatten(2))).unflatten(1, (line.heads, -1))
        values_BHVN = qkv_BHcN[:, :, 2 * half :]
        content_BHVN = torch.einsum("bhqn,bhvn->bhvq", weights_BHQYX.flatten(3), values_BHVN)
        of_offset_BHVN = torch.zeros_like(content_BHVN)
        for q in range(rows * cols):
            for n in range(rows * cols):
                offset = (q // cols - n // cols, q % cols - n % cols)[line.axis]  # weights off the line are zero
                vector_V = line.relative[2 * half :, offset + length - 1]
                of_offset_BHVN[..., q] += weights_BHQYX[:, :, q, n // cols, n % cols, None] * vector_V
        both_BcN = torch.stack([content_BHVN, of_offset_BHVN], dim=3).flatten(1, 3)
        expected_BCN = line.out_norm(both_BcN).unflatten(1, (-1, 2)).sum(dim=2)
        torch.testing.assert_close(expected_BCN.unflatten(2, (rows, cols)), out_BCYX)


def test_attention_of_chosen_layers_and_heads() -> None:
    model, x = shaken(build(SMALL, seed=0)), torch.randn(2, 3, 12, 20)
    every, some = list(model.attention_on_grids(x)), list(model.attention_on_grids(x, layers=[1, 2], heads=[3, 0]))
    assert [(each.index, each.heads) for each in some] == [(1, (0, 3)), (2, (0, 3))]
    for each in some:
        assert torch.equal(each.weights_BHQK, every[each.index].weights_BHQK[:, [0, 3]])
    with pytest.raises(UsageError, match="does not take 12x16"):
        model.attention_on_grids(torch.randn(1, 3, 12, 16))


def test_every_parameter_takes_part() -> None:
    model = shaken(build(SMALL, seed=0)).train()
    model(torch.randn(4, 3, 12, 20)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_starts_as_the_authors_code_does() -> None:
    model = build(changed(parse_name("AxialResNet-50-L"), {"stages": [1, 1], "image_size": [64, 64]}), seed=0)
    assert isinstance(model, AxialResNet) and model.head is not None and not model.head.weight.any()
    unit = model.stages[1][0]  # pyright: ignore[reportIndexIssue]
    assert not unit.norm2.weight.any() and unit.norm1.weight.eq(1).all() and not unit.norm2.bias.any()
    assert unit.down.qkv.weight.std().item() == pytest.approx(math.sqrt(1 / 256), rel=0.02)
    assert unit.down.relative.std().item() == pytest.approx(math.sqrt(1 / 32), rel=0.05)
    assert unit.conv2.weight.std().item() == pytest.approx(math.sqrt(2 / 512), rel=0.02)
    assert model.root.weight.std().item() == pytest.approx(math.sqrt(2 / (49 * 64)), rel=0.02)


def test_image_size_decides_the_spans_and_others_are_refused() -> None:
    spec = parse_name("AxialResNet-50")
    model = build(changed(spec, {"width": 8, "num_classes": 2}), seed=0)
    lengths = [[unit.down.relative.shape[1] for unit in stage] for stage in model.stages]  # type: ignore[union-attr]
    assert lengths == [[111] * 3, [111] + [55] * 3, [55] + [27] * 5, [27] + [13] * 2]
    small = build(SMALL, seed=0)
    with pytest.raises(UsageError, match=r"12x20 images .* does not take 12x16"):
        small(torch.randn(1, 3, 12, 16))
    with pytest.raises(UsageError, match="grids that shrink"):
        small.attention(torch.randn(1, 3, 12, 20))
    with pytest.raises(UsageError, match="not divisible by 8 heads"):
        AxialResNetSpec(stages=(1,), width=12)


def test_names() -> None:
    assert format_name(parse_name("AxialResNet-50")) == "AxialResNet-50-L"
    widths = {size: parse_name(f"AxialResNet-50-{size}").representation_width for size in "SML"}
    assert widths == {"S": 1024, "M": 1536, "L": 2048}
    assert parse_name("axialresnet-26-s") == parse_name("AxialResNet-26-S")
    assert alias("AxialResNet-50-w16") == "axialresnet-50-w16"
    assert format_name(changed(parse_name("AxialResNet-50-S"), {"heads": 4})).startswith("AxialResNet-50-S (changed:")
    for wrong in ("AxialResNet-51", "AxialResNet-50-X"):
        with pytest.raises(UnknownName, match="Depths: 26, 50; sizes: S, M, L"):
            parse_name(wrong)
