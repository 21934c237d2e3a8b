"""A spec that cannot work is refused when it is made, with one sentence that says why; and every field does something."""

import dataclasses

import pytest
import torch

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.build import build, create_model
from vitlab.models.families import spec_from_dict
from vitlab.models.names import parse_name
from vitlab.models.spec import BiTSpec, TrunkSpec, ViTSpec, bit_trunk, changed, spec_to_dict

SMALL = ViTSpec(width=32, depth=2, mlp_dim=64, heads=4, patch=4, image_size=(16, 16), num_classes=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"heads": 5}, "width 32 is not divisible by 5 heads"),
        ({"patch": 5}, "patch 5 does not divide the 16x16 image"),
        ({"image_size": [16, -16]}, "image_size must be positive"),
        ({"image_size": [0, 0]}, "image_size must be positive"),
        ({"width": -32}, "width must be positive"),
        ({"depth": 0}, "depth must be positive"),
        ({"num_classes": -1}, "num_classes must not be negative"),
        ({"registers": -1}, "registers must not be negative"),
        ({"in_channels": 0}, "in_channels must be positive"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"width": 30, "heads": 3, "pos": "sincos2d"}, "width divisible by 4"),
        ({"attention": "axial"}, "axial attention keeps the tokens on a grid"),
        ({"attention": "axial", "pool": "gap", "pos": "relative"}, "full attention only"),
        ({"pos_at": "every", "pos": "sincos2d"}, "needs a learned position table"),
        ({"stem": {"stages": [0]}}, "stages must be positive"),
    ],
)
def test_impossible_specs_are_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        changed(SMALL, change)


def test_the_error_proposes_what_would_work() -> None:
    with pytest.raises(UsageError, match="Nearest image size that works: 224,320"):
        create_model("ViT-B/16", image_size=(225, 322))
    with pytest.raises(UsageError, match="heads=4"):
        changed(SMALL, {"heads": 5})


def test_unknown_and_mistyped_fields_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"model\.pol.*\n.*model\.pool"):
        changed(SMALL, {"pol": "gap"})
    with pytest.raises(UnknownName, match="Allowed: cls, gap, map"):
        changed(SMALL, {"pool": "max"})
    with pytest.raises(UsageError, match=r"'model\.depth' must be a whole number, not '2'"):
        changed(SMALL, {"depth": "2"})


@pytest.mark.parametrize("name", ["ViT-B/16", "R50+ViT-B/16", "R+ViT-Ti/16", "BiT-R50x1", "Axial-ViT-B/16"])
def test_specs_survive_being_stored(name: str) -> None:
    spec = parse_name(name)
    assert spec_from_dict(spec_to_dict(spec)) == spec


# One other value for every field, and what must then differ: the parameters' shapes, or the answer for the same parameters.
OTHER: dict[str, object] = {
    "width": 64, "depth": 3, "mlp_dim": 32, "heads": 2, "patch": 8, "image_size": [8, 16], "in_channels": 1,
    "num_classes": 4, "stem": {"stages": []}, "pool": "gap", "pos": "none", "pos_at": "shared", "cls_in_pos": False,
    "pos_resize": "bicubic", "attention": "axial", "head": "mlp-tanh", "gelu": "exact", "norm_eps": 1e-2,
    "layer_scale": 0.5, "registers": 1, "dropout": 0.5, "attention_dropout": 0.5, "stochastic_depth": 0.5,
    "patch_dropout": 0.5,
}  # fmt: skip


def test_every_field_is_listed_here() -> None:
    assert OTHER.keys() == {field.name for field in dataclasses.fields(ViTSpec)}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_does_something(field: str) -> None:
    extra = {"pool": "gap"} if field == "attention" else {}
    base, other = changed(SMALL, extra), changed(SMALL, {field: OTHER[field], **extra})
    ours, theirs = build(base, seed=0), build(other, seed=0)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (ours, theirs)]
    if shapes[0] != shapes[1]:
        return
    torch.manual_seed(0)
    state = {k: torch.randn_like(v) for k, v in ours.state_dict().items()}
    x = torch.randn(4, 3, 24, 24)
    answers: list[torch.Tensor] = []
    for model in (ours, theirs):
        model.load_state_dict(state)
        torch.manual_seed(0)
        answers.append(model.train()(x))
    assert not torch.allclose(answers[0], answers[1], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "key", "padding"), [("BiT-R50x1", "trunk", "zero"), ("R50+ViT-B/16", "stem", "neg-inf")]
)
def test_pool_padding_that_nobody_stored_is_that_of_the_publisher(name: str, key: str, padding: str) -> None:
    stored = spec_to_dict(parse_name(name))
    assert stored[key].pop("pool_padding") == padding
    assert spec_from_dict(stored) == parse_name(name)


def test_every_trunk_field_does_something() -> None:
    # An eps large enough that the two standardisation rules part.
    base = changed(BiTSpec(trunk=bit_trunk((1,), 1), num_classes=3), {"trunk": {"ws_eps": 1e-2}})
    others: dict[str, object] = {
        "stages": [2], "width_factor": 2, "preact": None, "gn_eps": 1e-2, "ws": "std-eps", "ws_eps": 1e-1, "padding": "same",
        "pool_padding": "neg-inf", "non_local": None,
    }  # fmt: skip
    assert others.keys() == {field.name for field in dataclasses.fields(TrunkSpec)}
    del others["preact"]  # a BiT trunk must be pre-activation; the hybrids cover the other value
    del others["non_local"]  # follows a second unit; test_non_local.py
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    ours = build(base, seed=0)
    for field, value in others.items():
        theirs = build(changed(base, {"trunk": {field: value}}), seed=0)
        state = {k: 0.1 * torch.randn(v.shape) for k, v in ours.state_dict().items()}
        if {k: v.shape for k, v in theirs.state_dict().items()} == {k: v.shape for k, v in state.items()}:
            ours.load_state_dict(state)
            theirs.load_state_dict(state)
            assert not torch.allclose(ours(x), theirs(x), atol=1e-6), field


def test_defaults_are_the_released_codes() -> None:
    """Flax: LayerNorm and GroupNorm with 1e-6, GELU by tanh; the stem's filters by std + 1e-5. BiT: 1e-5 and 1e-10."""
    assert (SMALL.norm_eps, SMALL.gelu, SMALL.pos_resize) == (1e-6, "tanh", "corner-bilinear")
    assert (SMALL.pool, SMALL.pos, SMALL.cls_in_pos, SMALL.head) == ("cls", "learned", True, "linear")
    stem, bit = TrunkSpec(stages=(1,)), bit_trunk((1,), 1)
    assert (stem.gn_eps, stem.ws, stem.ws_eps, stem.padding, stem.preact) == (1e-6, "std-eps", 1e-5, "same", False)
    assert (bit.gn_eps, bit.ws, bit.ws_eps, bit.padding, bit.preact) == (1e-5, "var-eps", 1e-10, "fixed", True)


def test_padding_of_the_max_pool_follows_that_of_the_trunk() -> None:
    hybrid = parse_name("R50+ViT-B/16")
    assert isinstance(hybrid, ViTSpec) and hybrid.stem is not None and hybrid.stem.pool_padding == "neg-inf"
    fixed = changed(hybrid, {"stem": {"padding": "fixed"}})
    assert isinstance(fixed, ViTSpec) and fixed.stem is not None and fixed.stem.pool_padding == "zero"
    both = changed(hybrid, {"stem": {"padding": "fixed", "pool_padding": "neg-inf"}})
    assert isinstance(both, ViTSpec) and both.stem is not None and both.stem.pool_padding == "neg-inf"
