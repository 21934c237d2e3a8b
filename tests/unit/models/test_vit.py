"""What the ViT promises: shapes, sizes, the two attention paths, features, the tape, and the life of an ordinary module."""

import copy
import dataclasses
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_after
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.models.build import Model, build, create_model
from vitlab.models.ops import KeptTokens, attend, attention_weights, gather_tokens, random_order
from vitlab.models.spec import ModelSpec, ViTSpec, changed
from vitlab.models.tape import Tape
from vitlab.models.vit import Block, Mlp, ViT

SMALL = ViTSpec(width=32, depth=3, mlp_dim=64, heads=4, patch=4, image_size=(16, 24), num_classes=7)

SOAK = os.environ.get("VITLAB_SOAK") == "1"
VARIANTS: dict[str, dict[str, object]] = {
    "paper": {},
    "gap": {"pool": "gap"},
    "map": {"pool": "map"},
    "mlp-tanh head": {"head": "mlp-tanh"},
    "headless": {"num_classes": 0},
    "no positions": {"pos": "none"},
    "learned2d": {"pos": "learned2d"},
    "relative": {"pos": "relative"},
    "sincos2d": {"pos": "sincos2d", "pool": "gap"},
    "positions at every block": {"pos_at": "every"},
    "positions shared by blocks": {"pos_at": "shared"},
    "class token without a slot": {"cls_in_pos": False},
    "registers and layer scale": {"registers": 3, "layer_scale": 0.1},
    "axial": {"attention": "axial", "pool": "gap"},
    "five channels": {"in_channels": 5},
    "hybrid": {"stem": {"stages": [1, 1]}, "patch": 1, "image_size": [32, 48]},
    "root-only hybrid": {"stem": {"stages": []}, "patch": 2, "image_size": [32, 48]},
}


def variant(name: str) -> ViTSpec:
    spec = changed(SMALL, VARIANTS[name])
    assert isinstance(spec, ViTSpec)
    return spec


def shaken(spec: ModelSpec, seed: int = 0) -> Model:
    """A model whose every parameter matters: zero-initialised parts are filled too."""
    model = build(spec, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def images(spec: ModelSpec, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, spec.in_channels, *spec.image_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_have_a_row_per_image(name: str) -> None:
    spec = variant(name)
    out = shaken(spec)(images(spec))
    assert out.shape == (2, spec.num_classes or spec.width)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_gives_what_its_images_give_alone(name: str) -> None:
    spec = variant(name)
    model, x = shaken(spec), images(spec, 3)
    torch.testing.assert_close(model(x), torch.cat([model(x[i : i + 1]) for i in range(3)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_takes_part(name: str) -> None:
    """A parameter without a gradient is decoration: an option that was accepted and never wired in."""
    spec = variant(name)
    model = shaken(spec)
    model(images(spec)).square().sum().backward()
    idle = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert idle == []


@pytest.mark.parametrize("spec_change", [{"gelu": "exact"}, {"norm_eps": 1e-2}, {"pos_resize": "bicubic"}])
def test_conventions_change_the_answer(spec_change: dict[str, object]) -> None:
    model = shaken(SMALL)
    other = shaken(changed(SMALL, spec_change))
    x = torch.randn(1, 3, 24, 32)  # another size than the spec's, so that the resize rule matters too
    assert not torch.allclose(model(x), other(x), atol=1e-6)


def test_conv_embedding_is_unfold_and_linear() -> None:
    """Eq. 1's E: the convolution equals flattening each patch and multiplying by a matrix."""
    model = shaken(SMALL)
    assert isinstance(model, ViT)
    x = images(SMALL)
    unfolded = F.unfold(x, SMALL.patch, stride=SMALL.patch).mT
    by_matrix = unfolded @ model.embed.weight.flatten(1).T + model.embed.bias
    tape = Tape("patches")
    model(x, tape)
    torch.testing.assert_close(tape["patches"], by_matrix, rtol=1e-5, atol=1e-5)


def test_fused_qkv_equals_three_projections() -> None:
    model = shaken(SMALL)
    assert isinstance(model, ViT)
    attention = model.blocks[0].attn
    x = torch.randn(2, 5, SMALL.width)
    q, k, v = (
        F.linear(x, w, b).reshape(2, 5, SMALL.heads, -1).transpose(1, 2)
        for w, b in zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
    )
    by_hand = attention.proj((attention_weights(q, k) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), by_hand, rtol=1e-5, atol=1e-5)


def test_fused_and_explicit_attention_agree() -> None:
    q, k, v = torch.randn(3, 2, 4, 50, 16).unbind(0)
    bias = torch.randn(2, 4, 50, 50)
    for b in (None, bias):
        torch.testing.assert_close(attention_weights(q, k, b) @ v, attend(q, k, v, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "gap", "map", "relative", "registers and layer scale", "hybrid", "axial"])
def test_attention_times_v_is_the_fused_output(name: str) -> None:
    spec = variant(name)
    model, x = shaken(spec), images(spec)
    assert isinstance(model, ViT)
    tape = Tape()
    model(x, tape)
    maps = model.attention(x)
    z = tape["tokens"]
    for i, block in enumerate(model.blocks):
        _, _, v = block.attn._split(block.norm1(z))
        by_weights = block.attn.proj((maps.layers[i] @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(by_weights, tape[f"block{i:02d}/attn"], rtol=1e-5, atol=1e-5)
        z = tape[f"block{i:02d}/+mlp"]


def axial_by_loops(block: Block, x_TD: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Eq. 5-8 for each token and the tokens of its row or column alone, number by number."""
    rows, cols = grid
    attn, heads, dh = block.attn, block.spec.heads, block.spec.width // block.spec.heads
    qkv = [attn.qkv.weight @ x + attn.qkv.bias for x in x_TD]
    out: list[torch.Tensor] = []
    for y in range(rows):
        for x in range(cols):
            line = [(y, other) for other in range(cols)] if block.axis == 0 else [(other, x) for other in range(rows)]
            parts: list[torch.Tensor] = []
            for h in range(heads):
                q, k, v = (
                    slice(part * block.spec.width + h * dh, part * block.spec.width + (h + 1) * dh) for part in range(3)
                )
                query = qkv[y * cols + x][q]
                logits = [float(query @ qkv[i * cols + j][k]) / dh**0.5 for i, j in line]
                total = sum(np.exp(logit) for logit in logits)
                parts.append(
                    sum(
                        (
                            np.exp(logit) / total * qkv[i * cols + j][v]
                            for logit, (i, j) in zip(logits, line, strict=True)
                        ),
                        torch.zeros(dh, dtype=x_TD.dtype),
                    )
                )
            out.append(attn.proj.weight @ torch.cat(parts) + attn.proj.bias)
    return torch.stack(out)


@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (1, 4), (4, 1)], ids=str)
def test_axial_blocks_equal_plain_loops_over_rows_and_columns(grid: tuple[int, int]) -> None:
    size = [4 * side for side in grid]
    model = shaken(changed(SMALL, {"attention": "axial", "pool": "gap", "depth": 1, "image_size": size})).double()
    assert isinstance(model, ViT)
    model.requires_grad_(False)
    x_BTD = torch.randn(2, grid[0] * grid[1], SMALL.width, dtype=torch.float64)
    for block in model.blocks:
        assert isinstance(block, Block)
        for image, found in zip(x_BTD, block._attend(x_BTD, grid), strict=True):
            torch.testing.assert_close(found, axial_by_loops(block, image, grid))


def test_axial_attention_on_a_single_line_is_full_attention() -> None:
    for grid, axis in (((1, 6), 0), ((6, 1), 1)):
        size = [4 * side for side in grid]
        model = shaken(changed(SMALL, {"attention": "axial", "pool": "gap", "depth": 1, "image_size": size}))
        assert isinstance(model, ViT)
        along, x_BTD = model.blocks[axis], torch.randn(2, 6, SMALL.width)
        assert isinstance(along, Block) and along.axis == axis
        assert torch.equal(along._attend(x_BTD, grid), along.attn(x_BTD))
        across = model.blocks[1 - axis]
        assert isinstance(across, Block)
        assert not torch.allclose(across._attend(x_BTD, grid), across.attn(x_BTD), atol=1e-3)


def test_axial_attention_is_zero_off_the_line_of_each_token() -> None:
    spec = variant("axial")
    model, x = shaken(spec), images(spec)
    assert isinstance(model, ViT) and spec.has_attention_maps
    rows, cols = spec.grid
    token = torch.arange(rows * cols)
    for layer, weights in model.attention_layers(x):
        line = token // cols if layer % 2 == 0 else token % cols
        same_line = line[:, None] == line
        assert (weights[:, :, ~same_line] == 0).all() and (weights[:, :, same_line] > 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        part = model.attention(x, layers=[layer], heads=[2], queries=[7, 11]).layers[layer]
        torch.testing.assert_close(part, weights[:, 2:3, [7, 11]])


@pytest.mark.parametrize("name", ["paper", "positions at every block", "axial"])
def test_attention_comes_layer_by_layer_and_runs_no_block_too_many(name: str) -> None:
    spec = variant(name)
    model, x = shaken(spec), images(spec)
    assert isinstance(model, ViT)
    whole, ran = model.attention(x).layers, list[int]()
    for block in model.blocks:
        block.register_forward_hook(lambda block, *_: ran.append(block.index))
    for i, (layer, weights) in enumerate(model.attention_layers(x)):
        assert layer == i and ran == list(range(i)) and not weights.requires_grad
        torch.testing.assert_close(weights, whole[layer])
    ran.clear()
    assert [layer for layer, _ in model.attention_layers(x, layers=[1, 0])] == [0, 1]
    assert ran == [0]
    with pytest.raises(UsageError, match="no layer"):
        model.attention_layers(x, layers=[99])  # at once, and not when the first is taken


@pytest.mark.parametrize("name", ["paper", "registers and layer scale", "hybrid", "axial"])
def test_gradients_of_the_weights_are_those_of_explicit_attention(name: str) -> None:
    """By finite differences: the output of a block's attention is linear in its weights."""
    spec = variant(name)
    model, x = shaken(spec).double(), images(spec, 1).double()
    assert isinstance(model, ViT)
    tape = Tape()
    model(x, tape)
    for i in (0, 1):
        block, y = model.blocks[i], tape[f"block{i:02d}/norm1"]
        weights = model.attention(x).layers[i].double()
        dy = torch.randn(y.shape, dtype=torch.float64)
        _, _, v = block.attn._split(y)
        found = block.weight_gradients(y, dy, spec.grid)
        for head, query, key in ((0, 1, 2), (3, 5, 4), (2, 0, 6)):
            if weights[0, head, query, key] == 0:  # an axial block does not look there
                assert found[0, head, query, key] == 0
                continue
            moved = weights.clone()
            moved[0, head, query, key] += 1
            change = ((moved - weights) @ v).transpose(1, 2).flatten(2) @ block.attn.proj.weight.T
            assert found[0, head, query, key].item() == pytest.approx((change * dy).sum().item(), rel=1e-5)


def test_attention_pooling_shows_its_weights() -> None:
    spec = variant("map")
    model, x = shaken(spec), images(spec)
    assert isinstance(model, ViT) and model.map is not None
    weights_BHT, tape = model.pooling_weights(x), Tape("encoded", "pooled")
    model(x, tape)
    v = model.map.kv(tape["encoded"])[..., spec.width :].unflatten(2, (spec.heads, -1))
    y = model.map.proj(torch.einsum("bht,bthd->bhd", weights_BHT, v).flatten(1))
    torch.testing.assert_close(y + model.map.mlp(model.map.norm(y)), tape["pooled"], rtol=1e-4, atol=1e-5)
    other = shaken(SMALL)
    assert isinstance(other, ViT)
    with pytest.raises(UsageError, match="pool=cls has no attention pooling"):
        other.pooling_weights(x)


def test_attention_of_chosen_layers_heads_and_queries_in_chunks() -> None:
    spec = variant("registers and layer scale")
    model, x = shaken(spec), images(spec, 5)
    assert isinstance(model, ViT)
    whole = model.attention(x)
    part = model.attention(x, layers=[-1, 0], heads=[3, 1], queries=[0, -1, 5], chunk=2)
    assert part.heads == (1, 3)
    assert part.queries == (0, 5, spec.num_tokens - 1)
    assert list(part.layers) == [0, spec.depth - 1]
    for layer, weights in part.layers.items():
        expected = whole.layers[layer][:, list(part.heads)][:, :, list(part.queries)]
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert whole.tokens[:5] == ("cls", "register0", "register1", "register2", "patch(0,0)")
    assert whole.num_prefix == 4
    assert model.attention(x, queries="cls").queries == (0,)
    assert model.attention(x, queries="patches").queries == tuple(range(4, spec.num_tokens))


def test_attention_rows_sum_to_one_and_stay_float32_in_bfloat16() -> None:
    model = shaken(SMALL).bfloat16()
    assert isinstance(model, ViT)
    weights = model.attention(images(SMALL).bfloat16()).layers[0]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), rtol=1e-5, atol=1e-5)


def test_many_query_rows_are_computed_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = shaken(SMALL), images(SMALL)
    assert isinstance(model, ViT)
    whole = model.attention(x).layers[1]
    monkeypatch.setattr("vitlab.models.vit._QUERY_ROWS", 4)
    torch.testing.assert_close(model.attention(x).layers[1], whole, rtol=1e-6, atol=1e-7)


def test_asking_for_attention_leaves_the_model_as_it_was() -> None:
    model, x = shaken(SMALL), images(SMALL)
    assert isinstance(model, ViT)
    before = model(x)
    model.attention(x)
    assert torch.equal(model(x), before)
    assert not model._forward_hooks and not any(m._forward_hooks for m in model.modules())


def test_features_of_the_last_layer_are_what_the_head_sees() -> None:
    model, x = shaken(SMALL), images(SMALL)
    assert isinstance(model, ViT) and model.head is not None
    found = model.features(x, tokens="cls", layers=[0, -1])
    torch.testing.assert_close(model.head(found.last), model(x))
    assert list(found.layers) == [0, SMALL.depth - 1]
    assert found.grid == (4, 6)
    patches = model.features(x, tokens="patches").last
    assert patches.shape == (2, 24, SMALL.width)
    torch.testing.assert_close(model.features(x, tokens="mean").last, patches.mean(1))


def test_tape_names_and_patterns() -> None:
    model, x = shaken(variant("mlp-tanh head")), images(SMALL)
    tape = Tape()
    logits = model(x, tape)
    assert list(tape)[:2] == ["patches", "tokens"]
    assert list(tape)[-4:] == ["encoded", "pooled", "pre_logits", "logits"]
    assert torch.equal(tape["logits"], logits)
    torch.testing.assert_close(tape["tokens"] + tape["block00/attn"], tape["block00/+attn"])
    only = Tape("block*/+mlp")
    model(x, only)
    assert list(only) == [f"block{i:02d}/+mlp" for i in range(SMALL.depth)]


def test_another_image_size_uses_the_resized_grid() -> None:
    """The same function at load and in forward: a model built for the new size with carried positions answers alike."""
    model = shaken(SMALL)
    wide = build(changed(SMALL, {"image_size": (24, 32)})).eval()
    state = model.state_dict()
    from vitlab.models.ops import resize_grid

    table = state["pos.table"]
    carried = resize_grid(table[:, 1:], (4, 6), (6, 8), "corner-bilinear")
    wide.load_state_dict({**state, "pos.table": torch.cat([table[:, :1], carried], 1)})
    x = torch.randn(2, 3, 24, 32)
    torch.testing.assert_close(model(x), wide(x))


def test_patch_that_does_not_divide_the_image_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match=r"patch 4 .*not divide .*17x24"):
        shaken(SMALL)(torch.randn(1, 3, 17, 24))


def test_wrong_channel_count_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match=r"needs images \[batch, 3, rows, columns\], not \[1, 1, 16, 24\]"):
        shaken(SMALL)(torch.randn(1, 1, 16, 24))


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_zero_head_gives_a_uniform_answer(classes: int) -> None:
    model = create_model("ViT-mu/16", num_classes=classes, image_size=32)
    logits = model(torch.randn(4, 3, 32, 32))
    assert torch.equal(logits, torch.zeros(4, classes))
    assert F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).item() == pytest.approx(
        math.log(classes), rel=1e-6
    )


def test_dropout_and_stochastic_depth_act_in_training_only() -> None:
    spec = changed(SMALL, {"dropout": 0.2, "stochastic_depth": 0.5, "attention_dropout": 0.2, "patch_dropout": 0.3})
    model, plain = shaken(spec), shaken(SMALL)
    x = images(SMALL, 8)
    assert torch.equal(model(x), plain(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "stochastic_depth", "patch_dropout"])
def test_each_kind_of_noise_is_wired_in(field: str) -> None:
    model = shaken(changed(SMALL, {field: 0.5})).train()
    x = images(SMALL, 8)
    torch.manual_seed(0)
    first = model(x)
    assert not torch.equal(first, model(x))
    torch.manual_seed(0)
    assert torch.equal(first, model(x))


def test_stochastic_depth_rises_to_its_rate_and_keeps_the_mean() -> None:
    from vitlab.models.ops import drop_path

    model = build(changed(SMALL, {"stochastic_depth": 0.3}))
    assert isinstance(model, ViT)
    assert [round(block.drop_rate, 6) for block in model.blocks] == [0.0, 0.15, 0.3]
    torch.manual_seed(0)
    kept = drop_path(torch.ones(20_000, 1, 1), 0.3)
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / 0.7]))
    assert kept.mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 12), (0.25, 18), (0.99, 1)])
def test_patch_dropout_shows_the_blocks_some_patches_of_each_image(rate: float, kept: int) -> None:
    model = shaken(changed(SMALL, {"patch_dropout": rate})).train()
    assert isinstance(model, ViT) and model.spec.num_tokens == 25
    tape = Tape("tokens")
    model.represent(images(SMALL, 8), tape)
    assert tape["tokens"].shape[:2] == (8, 1 + kept)
    model.eval()
    whole = Tape("tokens")
    model.represent(images(SMALL, 8), whole)
    for few_TD, all_TD in zip(tape["tokens"], whole["tokens"], strict=True):
        assert torch.equal(few_TD[0], all_TD[0])
        places = [(all_TD == row).all(dim=1).nonzero().tolist() for row in few_TD[1:]]  # each with its own position
        assert all(len(place) == 1 for place in places) and len({place[0][0] for place in places}) == kept


def test_gradient_of_kept_tokens_is_that_of_gather() -> None:
    torch.manual_seed(0)
    x_BTD = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    index_BN = random_order(x_BTD)[:, :5]
    weights = torch.randn(3, 5, 4, dtype=torch.float64)
    (mine,) = torch.autograd.grad((KeptTokens.apply(x_BTD, index_BN) * weights).sum(), x_BTD)
    (wanted,) = torch.autograd.grad((gather_tokens(x_BTD, index_BN) * weights).sum(), x_BTD)
    assert torch.equal(mine, wanted)
    assert torch.autograd.gradgradcheck(lambda x: KeptTokens.apply(x**2, index_BN), x_BTD)


@pytest.mark.parametrize("field", [{"attention": "axial", "pool": "gap"}, {"pos": "relative"}, {"pos_at": "every"}])
def test_patch_dropout_needs_a_plain_model(field: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="plain ViT"):
        changed(SMALL, {"patch_dropout": 0.5, **field})


@pytest.mark.parametrize("name", VARIANTS)
def test_deepcopy_is_independent(name: str) -> None:
    spec = variant(name)
    model, x = shaken(spec), images(spec)
    twin = copy.deepcopy(model)
    assert torch.equal(model(x), twin(x))
    with torch.no_grad():
        next(iter(twin.parameters())).add_(1)
    assert not torch.equal(model(x), twin(x))


@pytest.mark.parametrize("name", VARIANTS)
def test_meta_device_builds_shapes_without_memory(name: str) -> None:
    spec = variant(name)
    with torch.device("meta"):
        model = build(spec)
        out = model(torch.empty(2, spec.in_channels, *spec.image_size))
    assert all(p.is_meta for p in model.parameters())
    assert out.shape == (2, spec.num_classes or spec.width)


# The parts that handle the batch in ways of their own; `make soak` exports every variant.
EXPORTED = slow_after(1, ["learned2d", "map", "relative", "axial"])


@pytest.mark.parametrize("name", VARIANTS if SOAK else EXPORTED)
def test_export_with_a_free_batch_size(name: str) -> None:
    spec = variant(name)
    model, x = shaken(spec), images(spec, 4)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x_BCYX": {0: batch}})
    other = images(spec, 3, seed=1)
    torch.testing.assert_close(program.module()(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_model_agrees_with_eager() -> None:
    model, x = shaken(SMALL), images(SMALL)
    # aot_eager traces the whole graph as torch.compile would, without waiting for a C++ compiler.
    compiled: nn.Module = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler itself
def test_gradient_of_patch_dropout_is_the_same_when_compiled() -> None:
    model, x = shaken(changed(SMALL, {"patch_dropout": 0.5})).train(), images(SMALL, 4)

    def gradients(forward: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        return list(torch.autograd.grad(forward(x).square().sum(), list(model.parameters())))

    wanted = gradients(model)
    for mine, theirs in zip(gradients(torch.compile(model, backend="aot_eager", fullgraph=True)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# --- positions at every block, and where dropout acts -----------------------------------------------------------------


@pytest.mark.parametrize("pos_at", ["every", "shared"])
def test_each_block_adds_its_own_position_table(pos_at: str) -> None:
    """Table 8: a table for every block, or one for all of them; in all three ways through the model."""
    spec = changed(SMALL, {"pos_at": pos_at})
    model, x, tape = shaken(spec), images(spec), Tape()
    assert isinstance(model, ViT) and isinstance(spec, ViTSpec) and model.pos.table is not None
    assert len(model.pos.table) == (spec.depth if pos_at == "every" else 1)
    model(x, tape)
    z, features, maps = tape["tokens"], model.features(x, layers=range(spec.depth)), model.attention(x)
    for i, block in enumerate(model.blocks):
        z = z + model.pos.table[i if pos_at == "every" else 0]
        q, k, _ = block.attn._split(block.norm1(z))
        torch.testing.assert_close(maps.layers[i], attention_weights(q, k))
        z = block(z, spec.grid)
        torch.testing.assert_close(tape[f"block{i:02d}/+mlp"], z)
        torch.testing.assert_close(features.layers[i], model.norm(z)[:, 0])


def assert_dropped(found: Tensor, plain: Tensor, rate: float) -> None:
    """About `rate` of the values are zero, and the others are as much larger as keeps the mean."""
    kept = found != 0
    assert 1 - kept.double().mean().item() == pytest.approx(rate, abs=0.1)
    torch.testing.assert_close(found[kept], plain[kept] / (1 - rate), rtol=1e-4, atol=1e-5)


def test_dropout_acts_after_positions_and_on_every_residual_branch() -> None:
    """The paper's appendix B.1: after every dense layer but q, k and v, and directly after adding positions."""
    spec = changed(SMALL, {"dropout": 0.25, "head": "mlp-tanh"})
    model, x, plain, tape = shaken(spec), images(spec, 4), Tape("tokens"), Tape()
    assert isinstance(model, ViT) and model.pre_logits is not None and model.head is not None
    model(x, plain)
    torch.manual_seed(0)
    logits = model.train()(x, tape)
    assert_dropped(tape["tokens"], plain["tokens"], 0.25)
    before = tape["tokens"]
    for i in range(SMALL.depth):
        for part in ("attn", "mlp"):
            after = tape[f"block{i:02d}/+{part}"]
            assert_dropped((after - before).where((after - before).abs() > 1e-6, 0), tape[f"block{i:02d}/{part}"], 0.25)
            before = after
    torch.testing.assert_close(logits, model.head(torch.tanh(model.pre_logits(tape["pooled"]))), msg="none in the head")


def test_dropout_acts_between_the_two_layers_of_an_mlp_and_not_in_a_map_head() -> None:
    mlp = Mlp(dataclasses.replace(SMALL, mlp_dim=SMALL.width), dropout=0.25)
    with torch.no_grad():
        mlp.fc2.weight.copy_(torch.eye(SMALL.width))
        mlp.fc2.bias.zero_()
    x = torch.randn(4, 50, SMALL.width, generator=torch.Generator().manual_seed(0))
    plain = mlp.eval()(x)
    torch.manual_seed(0)
    assert_dropped(mlp.train()(x), plain, 0.25)
    head = shaken(changed(SMALL, {"pool": "map", "dropout": 0.5})).get_submodule("map")
    assert torch.equal(head.train()(x), head.eval()(x))


def test_learned2d_positions_are_a_column_and_a_row_side_by_side() -> None:
    spec = changed(SMALL, {"pos": "learned2d", "pool": "gap"})
    model, x, tape = shaken(spec), images(spec), Tape("patches", "tokens")
    model(x, tape)
    table, (rows, cols) = model.state_dict(), SMALL.grid
    for number, added in enumerate((tape["tokens"] - tape["patches"])[0]):
        row, col = divmod(number, cols)
        expected = torch.cat([table["pos.cols"][0, col], table["pos.rows"][0, row]])
        torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)
    assert number + 1 == rows * cols


def test_axial_blocks_take_rows_and_columns_in_turn() -> None:
    """A changed patch reaches its own row in the first block, and every patch in the second."""
    spec = changed(SMALL, {"attention": "axial", "pool": "gap", "depth": 1})
    model, x, tapes = shaken(spec), images(spec, 1), (Tape(), Tape())
    model(x, tapes[0])
    x[:, :, 4:8, 8:12] += 1  # the patch at row 1, column 2
    model(x, tapes[1])
    first, second = (
        (tapes[1][name] - tapes[0][name]).abs().amax(dim=2).reshape(SMALL.grid) > 0
        for name in ("block00/+mlp", "block01/+mlp")
    )
    assert first.nonzero()[:, 0].tolist() == [1] * SMALL.grid[1]
    assert second.all()
