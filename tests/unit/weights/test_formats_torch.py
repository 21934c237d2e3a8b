"""timm, transformers, torchvision and DINOv2 files: there and back bit for bit, and never a guess about a damaged one."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from slow_cases import slow_after
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import allocate
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.names import parse_name, with_size
from vitlab.models.spec import BiTSpec, ModelSpec, TrunkSpec, ViTSpec
from vitlab.weights.foreign import read_foreign
from vitlab.weights.formats import (
    bit_torch,
    dinov2,
    efficientnet_torch,
    hf,
    hf_settings,
    timm_keys,
    timm_settings,
    torchvision_keys,
)
from vitlab.weights.formats.efficientnet_torch import BatchNormDialect
from vitlab.weights.formats.format import Format, NoDialect
from vitlab.weights.formats.hf import HFDialect
from vitlab.weights.formats.readings import preprocess_difference
from vitlab.weights.formats.table import FORMATS, find_format
from vitlab.weights.formats.timm_keys import TimmDialect
from vitlab.weights.formats.torchvision_keys import TorchvisionDialect
from vitlab.weights.rules import Rule, bring_in, link, send_out

TORCH = ("timm", "hf", "torchvision", "dinov2")
State = dict[str, Tensor]
changed: Callable[..., Any] = dataclasses.replace

BASE = ViTSpec(width=128, depth=2, mlp_dim=192, heads=2, patch=4, image_size=(8, 8), num_classes=3, gelu="exact")
PEER_TRUNK = TrunkSpec(stages=(1, 2), gn_eps=1e-5, ws="var-eps", ws_eps=1e-8)
BIT = BiTSpec(trunk=changed(PEER_TRUNK, preact=True, padding="fixed", pool_padding="zero"), num_classes=3)

TIMM = changed(BASE, pos_resize="bicubic-antialias")
ENTRY = timm_keys.entry_of(TIMM)
HF = changed(BASE, pos_resize="bicubic", norm_eps=1e-12)
DINO = changed(BASE, mlp_dim=256, num_classes=0, layer_scale=1.0, pos_resize="bicubic")
META = changed(DINO, pos_resize="bicubic-offset")
DINO_REG = changed(DINO, registers=4, pos_resize="bicubic-antialias")
VISION = changed(BASE, pos_resize="corner-bilinear")
EFF = EfficientNetSpec(
    stem_width=8, widths=(8, 8, 16, 16, 16, 24, 24), depths=(2, 1, 1, 2, 1, 1, 1), last_width=32, num_classes=3
)
EFF_TORCH = changed(EFF, padding="fixed", bn_eps=1e-5, bn_momentum=0.1)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    spec: ModelSpec
    dialect: Any = dataclasses.field(default_factory=NoDialect)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def format(self) -> Format[Any, Any]:
        return find_format(self.name, self.spec)

    def read_spec(self, arrays: State, config: Mapping[str, Any] | None = None) -> ModelSpec:
        return self.format.read_spec(arrays, "a.file", self.config if config is None else config, None)


def timm_case(spec: ModelSpec, dialect: TimmDialect | None = None, **config: Any) -> Case:
    return Case("timm", spec, dialect or TimmDialect(), config)


def hf_case(spec: ModelSpec, *, bare: bool = False, in_memory: bool = False, **config: Any) -> Case:
    return Case("hf", spec, HFDialect(bare=bare, in_memory=in_memory), config)


CASES: dict[str, Case] = {
    "timm": timm_case(TIMM),
    "timm without head": timm_case(changed(TIMM, num_classes=0)),
    "timm bare class token": timm_case(changed(TIMM, cls_in_pos=False)),
    "timm gap": timm_case(changed(TIMM, pool="gap"), global_pool="avg"),
    "timm map": timm_case(changed(TIMM, pool="map")),
    "timm layer scale": timm_case(changed(TIMM, layer_scale=1e-5)),
    "timm registers": timm_case(
        changed(TIMM, layer_scale=0.1, registers=4, cls_in_pos=False), init_values=0.1, global_pool="token"
    ),
    "timm registers, gap": timm_case(changed(TIMM, registers=2, pool="gap")),
    "timm rectangle": timm_case(changed(TIMM, image_size=(8, 12)), model_args={"img_size": [8, 12]}),
    "timm heads and tanh": timm_case(changed(TIMM, heads=4, gelu="tanh"), num_heads=4, act_layer="gelu_tanh"),
    "timm grey": timm_case(changed(TIMM, in_channels=1)),
    "timm no positions": timm_case(changed(TIMM, pos="none", image_size=(224, 224)), pos_embed="none"),
    "old timm": timm_case(changed(TIMM, head="mlp-tanh"), TimmDialect(pre_logits=True)),
    "timm hybrid": timm_case(changed(TIMM, stem=PEER_TRUNK, patch=1, image_size=(32, 32))),
    "timm root-only hybrid": timm_case(
        changed(TIMM, stem=changed(PEER_TRUNK, stages=()), patch=8, image_size=(64, 64))
    ),
    "timm BiT": timm_case(BIT),
    "timm BiT, wide, without head": timm_case(
        changed(BIT, trunk=changed(BIT.trunk, stages=(1,), width_factor=2), num_classes=0)
    ),
    "timm EfficientNet": Case("timm", changed(EFF, bn_momentum=0.1), BatchNormDialect()),
    "timm EfficientNet, torch's": Case("timm", EFF_TORCH, BatchNormDialect(), {"architecture": "efficientnet_b0"}),
    "timm EfficientNet, stated": Case(
        "timm",
        changed(EFF_TORCH, padding="same", bn_eps=1e-4, bn_momentum=0.3, num_classes=0, image_size=(64, 96)),
        BatchNormDialect(counted=False),
        {
            "architecture": "efficientnet_b0",
            "model_args": {"pad_type": "same", "bn_eps": 1e-4, "bn_momentum": 0.3},
            "pretrained_cfg": {"input_size": [3, 64, 96]},
        },
    ),
    "HF": hf_case(HF),
    "HF in memory": hf_case(HF, in_memory=True),
    "HF without head": hf_case(changed(HF, num_classes=0), bare=True),
    "HF in memory, without head": hf_case(changed(HF, num_classes=0), bare=True, in_memory=True),
    "HF pooler": hf_case(changed(HF, num_classes=0, head="mlp-tanh"), bare=True),
    "HF config": hf_case(
        changed(HF, image_size=(8, 12), heads=4, gelu="tanh", norm_eps=1e-6, dropout=0.1),
        **{"model_type": "vit", "image_size": [8, 12], "num_attention_heads": 4, "hidden_act": "gelu_pytorch_tanh"},
        **{"layer_norm_eps": 1e-6, "hidden_dropout_prob": 0.1},
    ),
    "HF BiT": hf_case(BIT),
    "HF BiT without head": hf_case(changed(BIT, num_classes=0), bare=True),
    "HF DINOv2": hf_case(DINO, bare=True),
    "HF DINOv2 in memory": hf_case(DINO, bare=True, in_memory=True),
    "HF DINOv2 registers": hf_case(changed(DINO_REG, layer_scale=0.5), layerscale_value=0.5),
    "torchvision": Case("torchvision", VISION, TorchvisionDialect()),
    "torchvision, published names": Case("torchvision", VISION, TorchvisionDialect(linear_names=True)),
    "torchvision pre_logits": Case("torchvision", changed(VISION, head="mlp-tanh"), TorchvisionDialect()),
    "torchvision without head": Case("torchvision", changed(VISION, num_classes=0), TorchvisionDialect()),
    "torchvision heads": Case("torchvision", changed(VISION, heads=8), TorchvisionDialect(), {"num_heads": 8}),
    "torchvision EfficientNet": Case("torchvision", EFF_TORCH, BatchNormDialect()),
    "torchvision EfficientNet, uncounted": Case(
        "torchvision", changed(EFF_TORCH, num_classes=0, in_channels=1), BatchNormDialect(counted=False)
    ),
    "DINOv2": Case("dinov2", META),
    "DINOv2 registers": Case("dinov2", DINO_REG),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
SOAK = os.environ.get("VITLAB_SOAK") == "1"
DAMAGED = (
    "timm registers",
    "timm map",
    "timm hybrid",
    "timm BiT",
    "HF",
    "HF in memory",
    "HF BiT",
    "HF DINOv2 registers",
)
DAMAGED = (*DAMAGED, "torchvision pre_logits", "DINOv2 registers", "timm EfficientNet", "torchvision EfficientNet")


def random_state(spec: ModelSpec) -> State:
    return dict(_random_state(spec))


@functools.cache
def _random_state(spec: ModelSpec) -> State:
    generator = torch.Generator().manual_seed(0)
    state = allocate(spec).state_dict()
    return {
        name: torch.randn(t.shape, generator=generator)
        if t.is_floating_point()
        else torch.zeros(t.shape, dtype=t.dtype)
        for name, t in state.items()
    }


def shallow(spec: ModelSpec) -> ModelSpec:
    """One block or one unit: enough for every kind of array."""
    if isinstance(spec, BiTSpec):
        return changed(spec, trunk=changed(spec.trunk, stages=(1,)))
    if isinstance(spec, EfficientNetSpec):
        return changed(spec, depths=(1,) * 7)
    return changed(spec, depth=1, stem=spec.stem and changed(spec.stem, stages=(1,)))


def rules_of(case: Case, spec: ModelSpec) -> list[Rule]:
    return case.format.rules(spec, case.dialect)


def written(case: Case, state: State | None = None) -> State:
    if state is None:
        return dict(_written(case.name, case.spec, case.dialect))
    return send_out(link(rules_of(case, case.spec), case.spec, "test"), state)


@functools.cache
def _written(name: str, spec: ModelSpec, dialect: Any) -> State:
    return written(Case(name, spec, dialect), random_state(spec))


def read(case: Case, arrays: State) -> State:
    spec = case.read_spec(arrays)
    return bring_in(link(rules_of(case, spec), spec, "test"), dict(arrays), spec, "a.file")


def assert_equal(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- there and back ---------------------------------------------------------------------------------------------------


@every_case
def test_round_trip_is_bit_exact(case: Case) -> None:
    state = random_state(case.spec)
    arrays = written(case, state)
    assert_equal(read(case, arrays), state)
    assert_equal(written(case, read(case, arrays)), arrays)


@every_case
def test_spec_and_dialect_are_read_from_the_arrays(case: Case) -> None:
    arrays = written(case)
    assert case.read_spec(arrays) == case.spec
    assert case.format.read_dialect(arrays) == case.dialect


@every_case
def test_recognised_by_exactly_one_format(case: Case) -> None:
    arrays = written(case)
    assert [format_ for format_ in FORMATS if format_.recognises(arrays, {})] == [case.format]


@pytest.mark.parametrize("name", TORCH)
def test_nothing_of_the_kind_is_not_recognised(name: str) -> None:
    google = {"embedding/kernel": torch.zeros(1), "resnet/root_block/x": torch.zeros(1)}
    for format_ in (format_ for format_ in FORMATS if format_.name == name):
        assert not format_.recognises({}, {}) and not format_.recognises(google, {})


def test_names_are_those_that_the_peers_write() -> None:
    """One name of each kind, as seen in files; the oracle tests compare whole state dicts."""
    seen = {
        "timm": ("blocks.1.attn.qkv.weight", "head.weight"),
        "timm hybrid": ("patch_embed.backbone.stages.1.blocks.0.downsample.norm.bias",),
        "timm root-only hybrid": ("patch_embed.backbone.conv.weight",),
        "HF": ("vit.encoder.layer.1.attention.attention.key.bias", "vit.encoder.layer.0.intermediate.dense.weight"),
        "HF in memory": ("vit.layers.1.attention.o_proj.bias", "vit.layers.0.mlp.fc2.weight"),
        "HF pooler": ("pooler.dense.weight", "embeddings.cls_token"),
        "HF BiT": ("bit.encoder.stages.0.layers.0.downsample.conv.weight", "classifier.1.bias"),
        "HF DINOv2": ("encoder.layer.0.attention.attention.query.weight", "encoder.layer.1.layer_scale2.lambda1"),
        "torchvision": ("encoder.layers.encoder_layer_1.mlp.3.bias", "heads.head.weight"),
        "torchvision, published names": ("encoder.layers.encoder_layer_1.mlp.linear_2.bias",),
        "DINOv2 registers": ("register_tokens", "blocks.0.ls1.gamma"),
        "timm EfficientNet": ("blocks.0.1.conv_pw.weight", "blocks.3.0.se.conv_reduce.bias", "bn2.running_var"),
        "torchvision EfficientNet": ("features.1.0.block.1.fc1.weight", "features.2.0.block.3.1.num_batches_tracked"),
    }
    for name, wanted in seen.items():
        assert set(wanted) <= written(CASES[name]).keys()


@pytest.mark.parametrize("name", ["timm EfficientNet", "torchvision EfficientNet"])
def test_counts_of_batches_travel_and_start_at_zero_where_a_file_has_none(name: str) -> None:
    case = CASES[name]
    state = {key: value if value.is_floating_point() else value + 7 for key, value in random_state(case.spec).items()}
    arrays = written(case, state)
    assert_equal(read(case, arrays), state)
    old = {key: value for key, value in arrays.items() if not key.endswith("num_batches_tracked")}
    found = read(dataclasses.replace(case, dialect=case.format.read_dialect(old)), old)
    counts = {int(value) for key, value in found.items() if key.endswith("num_batches_tracked")}
    assert len(found) == len(state) and counts == {0}


def test_padding_and_eps_that_no_array_shows_are_reported_as_assumed() -> None:
    case = CASES["timm EfficientNet"]
    (note,) = case.format.assumptions(case.spec, {})
    assert "padding=same, bn_eps=0.001" in note and "config.json" in note
    assert case.format.assumptions(case.spec, {"architecture": "tf_efficientnet_b0"}) == ()
    (rest,) = case.format.assumptions(case.spec, {"pad_type": "same"})
    assert "padding" not in rest and "bn_eps" in rest
    for name, padding, eps in (("tf_efficientnet_l2", "same", 1e-3), ("efficientnet_b7", "fixed", 1e-5)):
        spec = case.read_spec(written(case), {"architecture": name})
        assert isinstance(spec, EfficientNetSpec) and (spec.padding, spec.bn_eps) == (padding, eps)
    with pytest.raises(FileProblem, match="pads by the rule 'valid'"):
        case.read_spec(written(case), {"pad_type": "valid"})


def test_timm_gets_as_arguments_what_its_entry_point_does_not_compute() -> None:
    spec = parse_name("EfficientNet-B3")
    assert isinstance(spec, EfficientNetSpec)
    common = {"num_classes": 1000}
    assert efficientnet_torch.timm_entry(spec).args == {
        "model_name": "tf_efficientnet_b3",
        **common,
        "bn_momentum": 0.01,
    }
    plain = changed(spec, padding="fixed", bn_eps=1e-5, bn_momentum=0.1)
    assert efficientnet_torch.timm_entry(plain).args == {"model_name": "efficientnet_b3", **common}
    odd = changed(plain, bn_eps=1e-4)
    assert efficientnet_torch.timm_entry(odd).args == {"model_name": "efficientnet_b3", **common, "bn_eps": 1e-4}
    assert efficientnet_torch.timm_entry(EFF).args is None
    large = parse_name("EfficientNet-B6")
    assert isinstance(large, EfficientNetSpec)
    assert efficientnet_torch.differences(changed(large, padding="fixed")) == ()
    assert efficientnet_torch.differences(large) == ("padding is fixed there, same here",)


def test_relatives_of_efficientnet_are_refused_in_words() -> None:
    case = CASES["timm EfficientNet"]
    fewer = {key: value for key, value in written(case).items() if not key.startswith("blocks.6.")}
    with pytest.raises(FileProblem, match="6 stages; an EfficientNet has 7"):
        case.read_spec(fewer)
    wide = {**written(case), "blocks.3.0.conv_dw.weight": torch.zeros(96, 1, 5, 5)}
    with pytest.raises(FileProblem, match=r"stage 3 is not .*EfficientNet"):
        case.read_spec(wide)


def test_heads_that_no_array_shows() -> None:
    """Published sizes have their own number (H: 16, not 1280/64), others width/64; a config wins."""
    huge = changed(TIMM, width=1280, mlp_dim=5120, heads=16, depth=1)
    arrays = {name: tensor.to("meta") for name, tensor in written(timm_case(huge)).items()}
    assert timm_keys.read_spec(arrays, "a.file") == huge
    assert timm_keys.read_spec(arrays, "a.file", {"num_heads": 20}) == changed(huge, heads=20)
    odd = written(timm_case(changed(TIMM, width=200, heads=4)))
    with pytest.raises(FileProblem, match=r"3 heads do not divide .*width of 200\nState"):
        timm_keys.read_spec(odd, "a.file")


def test_size_of_the_input_is_taken_where_it_fits() -> None:
    """A timm config tells what images are scaled to; the position table may be another's."""
    config = {"pretrained_cfg": {"input_size": [3, 8, 12]}}
    assert timm_keys.read_spec(written(CASES["timm rectangle"]), "a.file", config).image_size == (8, 12)
    assert timm_keys.read_spec(written(CASES["timm"]), "a.file", config).image_size == (8, 8)
    assert CASES["timm BiT"].read_spec(written(CASES["timm BiT"]), config).image_size == (8, 12)
    for nonsense in ({"input_size": "x"}, {"input_size": [3, 8]}, {"input_size": [3, 0, 8]}, 3):
        assert timm_keys.read_spec(written(CASES["timm"]), "a.file", {"pretrained_cfg": nonsense}) == TIMM


@pytest.mark.parametrize(
    ("architecture", "heads", "gelu"),
    [
        *(("vit_giantopt_patch16_siglip_gap_384", 16, "tanh"), ("vit_so400m_patch16_siglip_512", 16, "tanh")),
        *(("vit_so400m_patch14_siglip_384", 16, "exact"), ("vit_base_patch32_siglip_256", 12, "tanh")),
        *(("vit_large_patch16_siglip_gap_512", 16, "tanh"), ("vit_large_patch16_siglip_384", 16, "exact")),
        *(
            ("vit_base_patch16_gap_224", 16, "exact"),
            ("vit_base_patch16_plus_240", 14, "exact"),
            ("test_vit", 2, "exact"),
        ),
        *(
            ("vit_tiny_r_s16_p8_224", 3, "exact"),
            ("deit3_medium_patch16_224", 8, "exact"),
            ("flexivit_small", 6, "exact"),
        ),
    ],
)
def test_heads_and_gelu_are_read_from_the_architecture_of_timm(architecture: str, heads: int, gelu: str) -> None:
    """Facts: timm 1.0.30; the oracle tests go over all of its entry points."""
    width = 48 * heads
    arrays = written(timm_case(changed(TIMM, width=width, heads=heads, depth=1)))
    config = {"architecture": architecture, "model_args": {"embed_dim": width, "img_size": 8}}
    spec = timm_keys.read_spec(arrays, "a.file", config)
    assert isinstance(spec, ViTSpec)
    assert (spec.heads, spec.gelu) == (heads, gelu)
    assert timm_keys.assumptions(spec, config) == ()
    more = {"num_heads": 1, "act_layer": "gelu" if gelu == "tanh" else "gelu_tanh"}
    stated = timm_keys.read_spec(arrays, "a.file", {**config, "model_args": {"embed_dim": width, **more}})
    assert isinstance(stated, ViTSpec) and (stated.heads, stated.gelu == gelu) == (1, False), "arguments come first"
    with pytest.raises(FileProblem, match="its settings say embed_dim"):
        timm_keys.read_spec(arrays, "a.file", {"architecture": architecture, "model_args": {"embed_dim": 2 * width}})


@pytest.mark.parametrize("architecture", ["vit_base_patch16_xp_224", "resnet50", "", 3, None, ["vit_base_patch16_224"]])
def test_unknown_architecture_leaves_heads_and_gelu_assumed(architecture: Any) -> None:
    config = {"architecture": architecture, "model_args": {"img_size": 8}}
    assert timm_keys.read_spec(written(CASES["timm"]), "a.file", config) == TIMM
    assert (
        "heads=2, gelu=exact. If it is wrong: vitlab convert --heads, --gelu" in timm_keys.assumptions(TIMM, config)[0]
    )


# --- leftovers --------------------------------------------------------------------------------------------------------


def test_leftovers_are_named_and_nothing_else_is() -> None:
    token = torch.zeros(1, 128)
    arrays = written(CASES["DINOv2 registers"]) | {"mask_token": token}
    assert dinov2.recognises(arrays)
    assert dinov2.leftovers(arrays) == ("mask_token",)
    assert dinov2.read_spec(arrays, "a.file") == DINO_REG
    with pytest.raises(FileProblem, match="has no use for mask_token"):
        read(CASES["DINOv2 registers"], arrays)
    assert dinov2.leftovers(written(CASES["DINOv2"])) == ()

    arrays = written(CASES["HF DINOv2"]) | {"embeddings.mask_token": token}
    assert hf.leftovers(arrays) == ("embeddings.mask_token",)
    assert hf.read_spec(arrays, "a.file") == DINO

    arrays = written(CASES["HF"]) | {"vit.pooler.dense.weight": torch.zeros(128, 128)}
    assert hf.leftovers(arrays) == ("vit.pooler.dense.weight",), "the classifier passes the pooler by"
    assert hf.read_spec(arrays, "a.file") == HF
    assert hf.leftovers(written(CASES["HF pooler"])) == ()


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_after(4, dict.fromkeys(("timm registers", "HF", "timm BiT", "HF BiT", *DAMAGED))))
def test_damage_to_any_array_is_a_file_problem(name: str) -> None:
    case = dataclasses.replace(CASES[name], spec=shallow(CASES[name].spec))
    arrays = written(case)
    damages: dict[str, Callable[[Tensor], Tensor | None]] = {
        "missing": lambda _: None,
        "scalar": lambda array: array.flatten()[0],
        "one more axis": lambda array: array[None],
        "empty": lambda array: torch.atleast_1d(array)[:0],
        "one row less": lambda array: torch.atleast_1d(array)[1:],
        "twice": lambda array: torch.cat([torch.atleast_1d(array)] * 2),
        "flat": lambda array: array.reshape(1, -1),
    }
    alike = r"blocks\.([02-6]\.|1\.0\.bn)|features\.([13-7]\.\d|2\.0\.block\.\d\.1)"
    others = re.compile(alike if isinstance(case.spec, EfficientNetSpec) else r"(?!)")
    for number, victim in enumerate(name for name in arrays if not others.match(name)):  # seven stages are alike
        ways = list(damages.items())
        for what, damage in ways if SOAK else [ways[0], ways[1 + number % (len(ways) - 1)]]:
            hurt = dict(arrays)
            array = damage(hurt.pop(victim))
            if array is not None:
                hurt[victim] = array
            if array is not None and array.shape == arrays[victim].shape:
                continue
            if what == "missing" and victim.rpartition(".")[2] in ("reg_token", "register_tokens"):
                continue  # what remains is a whole model, without registers
            try:
                read(case, hurt)
            except FileProblem as problem:
                assert str(problem).startswith("a.file"), problem
            else:
                pytest.fail(f"{victim} {what} was read as if it were whole")


@every_case
def test_an_array_too_many_is_a_file_problem(case: Case) -> None:
    arrays = written(case) | {"blocks.0.attn.q_norm.weight": torch.zeros(1)}
    with pytest.raises(FileProblem, match=r"has no use for blocks.0.attn.q_norm.weight"):
        read(case, arrays)


@pytest.mark.parametrize("number", ["7", "999999999", "9" * 5000, "01"])
@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("timm", "blocks.{}.norm1.weight"),
        ("HF", "vit.encoder.layer.{}.output.dense.bias"),
        ("torchvision", "encoder.layers.encoder_layer_{}.ln_1.weight"),
        ("timm BiT", "stages.{}.blocks.0.conv1.weight"),
        ("HF BiT", "bit.encoder.stages.0.layers.{}.conv1.weight"),
    ],
)
def test_a_block_out_of_line_is_refused_at_once(name: str, stray: str, number: str) -> None:
    arrays = written(CASES[name]) | {stray.format(number): torch.zeros(1)}
    with pytest.raises(FileProblem, match="not numbered from 0 on"):
        read(CASES[name], arrays)


def test_trunk_of_impossible_width_is_refused_before_it_is_built() -> None:
    names = [f"stages.{stage}.blocks.0.conv3.weight" for stage in range(60)]
    arrays = {"stem.conv.weight": torch.zeros(64, 3, 7, 7)} | {name: torch.zeros(1, 1, 1, 1) for name in names}
    with pytest.raises(FileProblem, match="at most 8 stages"):
        CASES["timm BiT"].read_spec(arrays)


def test_models_that_vitlab_cannot_hold_are_refused_by_name() -> None:
    arrays = written(CASES["timm gap"])
    arrays |= {"fc_norm.weight": arrays.pop("norm.weight"), "fc_norm.bias": arrays.pop("norm.bias")}
    with pytest.raises(FileProblem, match=r"normalises afterwards \(fc_norm\)"):
        timm_keys.read_spec(arrays, "a.file")
    with pytest.raises(FileProblem, match=r"lacks pos_embed.*\n.*pos_embed=none"):
        timm_keys.read_spec(written(CASES["timm no positions"]), "a.file")
    with pytest.raises(FileProblem, match=r"has pos_embed, but .*without"):
        timm_keys.read_spec(written(CASES["timm"]), "a.file", {"pos_embed": "none"})
    with pytest.raises(FileProblem, match=r"pool by 'avg', .* 'token'"):
        timm_keys.read_spec(written(CASES["timm"]), "a.file", {"global_pool": "avg"})
    swiglu = written(CASES["DINOv2"]) | {"blocks.0.mlp.w12.weight": torch.zeros(1)}
    with pytest.raises(FileProblem, match="SwiGLU"):
        dinov2.read_spec(swiglu, "a.file")
    with_head = written(CASES["HF DINOv2"]) | {"classifier.weight": torch.zeros(3, 256)}
    with pytest.raises(FileProblem, match=r"class token and the mean.*\n.*--drop classifier"):
        hf.read_spec(with_head, "a.file")
    with pytest.raises(FileProblem, match=r"not one of transformers' vit.*but 'dpt'"):
        hf.read_spec(written(CASES["HF"]), "a.file", {"model_type": "dpt"})
    with pytest.raises(FileProblem, match=r"not fit a square grid\n.* --grid"):
        timm_keys.read_spec(written(CASES["timm rectangle"]), "a.file")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(("timm", {"img_size": size}) for size in ("8", [8], [8, "8"], [8, -8], 0, 16, True, [8, 8.0])),
        *(("timm", {"num_heads": heads}) for heads in (0, -1, 3, "2", 2.0, True)),
        *(("timm", {"act_layer": act}) for act in ("quick_gelu", 3, ["gelu"])),
        ("timm layer scale", {"init_values": "much"}),
        *(("HF", {"image_size": size}) for size in ("8", [8, 8, 8], 16, {"height": 8})),
        *(("HF", {"hidden_act": act}) for act in ("quick_gelu", None, ["gelu"])),
        *(("HF", {"layer_norm_eps": eps}) for eps in ("small", None, float("nan"), -1, [])),
        *(("HF", {"num_attention_heads": heads}) for heads in (0, 5, "2")),
        ("HF", {"hidden_dropout_prob": 1}),
        ("HF pooler", {"pooler_act": "relu"}),
        *(("HF BiT", config) for config in ({"layer_type": "bottleneck"}, {"global_padding": "SAME"})),
        *(("HF BiT", config) for config in ({"hidden_act": "gelu"}, {"num_groups": 16}, {"image_size": "x"})),
    ],
)
def test_nonsense_in_a_config_is_a_file_problem(name: str, config: dict[str, Any]) -> None:
    with pytest.raises(FileProblem, match=r"^a\.file"):
        CASES[name].read_spec(written(CASES[name]), config)


def test_parts_that_only_add_up_are_not_taken_for_whole() -> None:
    arrays = written(CASES["HF"])
    q, k = (f"vit.encoder.layer.0.attention.attention.{part}.bias" for part in ("query", "key"))
    arrays |= {q: torch.zeros(127), k: torch.zeros(129)}
    with pytest.raises(FileProblem, match="does not fit"):
        read(CASES["HF"], arrays)


# --- what a format cannot carry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "changes"),
    [
        *((format_, {"pool": "gap", "attention": "axial"}) for format_ in TORCH),
        *((format_, {"pos": "sincos2d"}) for format_ in TORCH),
        *((format_, {"pos_at": "shared"}) for format_ in TORCH),
        *((format_, {"head": "mlp-tanh"}) for format_ in ("timm", "hf")),
        ("timm", {"registers": 4}),
        *((format_, {"pool": "gap"}) for format_ in ("hf", "torchvision", "dinov2")),
        *((format_, {"pos": "none"}) for format_ in ("hf", "torchvision")),
        *((format_, {"cls_in_pos": False}) for format_ in ("hf", "torchvision")),
        *((format_, {"stem": PEER_TRUNK, "patch": 1}) for format_ in ("hf", "torchvision", "dinov2")),
        ("hf", {"registers": 4}),
        ("hf", {"layer_scale": 1.0}),
        *(("torchvision", changes) for changes in ({"layer_scale": 1.0}, {"registers": 1}, {"image_size": (8, 12)})),
        ("dinov2", {}),
    ],
)
def test_what_a_format_cannot_carry_is_refused(format_: str, changes: dict[str, Any]) -> None:
    spec = changed(BASE, **changes)
    with pytest.raises(UsageError):
        written(Case(format_, spec, find_format(format_, spec).dialect()))


def test_pre_logits_names_the_option_that_leaves_it_out() -> None:
    with pytest.raises(UsageError, match=r"no place for 'pre_logits.weight'\n.*--drop pre_logits"):
        written(timm_case(changed(TIMM, head="mlp-tanh")))


def test_differences_name_both_values() -> None:
    assert timm_keys.differences(TIMM) == hf.differences(HF) == hf.differences(DINO_REG) == ()
    assert bit_torch.differences(BIT) == torchvision_keys.differences(VISION) == ()
    assert timm_keys.differences(HF) == (
        "norm_eps is 1e-06 there, 1e-12 here",
        "pos_resize is bicubic-antialias there, bicubic here",
    )
    hybrid = changed(TIMM, stem=TrunkSpec(stages=(1,)), patch=1)
    assert "stem.ws is var-eps there, std-eps here" in timm_keys.differences(hybrid)
    assert bit_torch.differences(parse_name("BiT-R50x1")) == ("trunk.ws_eps is 1e-08 there, 1e-10 here",)
    assert "gelu is exact there, tanh here" in torchvision_keys.differences(changed(VISION, gelu="tanh"))


# --- what timm.create_model needs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ViT-B/16", {"model_name": "vit_base_patch16_224", "act_layer": "gelu_tanh"}),
        ("ViT-B/32", {"model_name": "vit_base_patch32_224", "act_layer": "gelu_tanh"}),
        ("ViT-H/14", {"model_name": "vit_huge_patch14_224", "act_layer": "gelu_tanh"}),
        (
            "ViT-S/14",
            {
                **{"model_name": "vit_base_patch16_224", "patch_size": 14, "embed_dim": 384, "num_heads": 6},
                "act_layer": "gelu_tanh",
            },
        ),
        (
            "R50+ViT-B/32",
            {
                **{"model_name": "vit_large_r50_s32_224", "embed_dim": 768, "depth": 12, "num_heads": 12},
                "act_layer": "gelu_tanh",
            },
        ),
    ],
)
def test_arguments_for_timm(name: str, wanted: dict[str, Any]) -> None:
    assert timm_keys.create_args(parse_name(name)) == {"img_size": 224, "num_classes": 1000, **wanted}


def test_arguments_for_timm_of_variants() -> None:
    spec = with_size(parse_name("ViT-B/16"), image_size=(224, 320), num_classes=5, in_channels=1)
    assert timm_keys.create_args(changed(spec, gelu="exact", pool="gap")) == {
        **{"model_name": "vit_base_patch16_224", "img_size": (224, 320), "num_classes": 5, "in_chans": 1},
        **{"global_pool": "avg", "class_token": False, "fc_norm": False},
    }
    assert bit_torch.timm_entry(with_size(parse_name("BiT-R101x3"), num_classes=0)).args == {
        "model_name": "resnetv2_101x3_bit",
        "num_classes": 0,
    }


@pytest.mark.parametrize(
    "spec",
    [
        parse_name("Axial-ViT-B/16"),
        parse_name("BiT-R152x1"),
        changed(parse_name("ViT-B/16"), head="mlp-tanh"),
        changed(parse_name("ViT-B/16"), registers=4),
        changed(TIMM, stem=changed(PEER_TRUNK, stages=(1, 1)), patch=1, image_size=(32, 32)),
    ],
    ids=["axial", "BiT-R152x1", "pre_logits", "registers", "stem"],
)
def test_models_that_timm_does_not_have(spec: ModelSpec) -> None:
    assert (bit_torch.timm_entry(spec).args if isinstance(spec, BiTSpec) else timm_keys.create_args(spec)) is None


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("timm") and "hybrid" not in name])
def test_arguments_for_timm_serve_as_a_config(name: str) -> None:
    case = CASES[name]
    if isinstance(case.spec, EfficientNetSpec):
        args = efficientnet_torch.timm_entry(case.spec).args
    else:
        args = bit_torch.timm_entry(case.spec).args if "BiT" in name else timm_keys.create_args(case.spec)
    if args is not None:
        assert case.read_spec(written(case), json.loads(json.dumps(args))) == case.spec


def test_sizes_that_timm_truncates() -> None:
    for width in range(1, 200):
        for mlp_dim in (width, 3 * width + 1, 4 * width - 1, 7):
            assert int(width * timm_keys._mlp_ratio(width, mlp_dim)) == mlp_dim


# --- configs and preprocessing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("HF")])
def test_spec_is_read_from_the_config_of_transformers(name: str) -> None:
    spec = CASES[name].spec
    config = json.loads(json.dumps(bit_torch.hf_config(spec) if "BiT" in name else hf.config_json(spec)))
    assert CASES[name].read_spec(written(CASES[name]), config) == spec
    assert config["architectures"][0].endswith("ForImageClassification" if spec.num_classes else "Model")
    labels = tuple(f"LABEL_{index}" for index in range(spec.num_classes))
    assert spec.num_classes == 0 or hf_settings.read_labels(config, spec.num_classes) == (labels, None)


def test_labels_travel() -> None:
    config = hf.config_json(HF, ("crane", "tench", "crane"))
    assert config["id2label"] == {"0": "crane", "1": "tench", "2": "crane"}
    assert config["label2id"] == {"crane": 0, "tench": 1}
    assert hf_settings.read_labels(config, 3) == (
        ("crane", "tench", "crane"),
        "Several classes have the same name: crane",
    )
    with pytest.raises(UsageError, match="2 labels were given for 3 classes"):
        hf.config_json(HF, ("a", "b"))
    cfg = timm_settings.pretrained_cfg(TIMM, ENTRY, Preprocess(), ("a", "b", "c"))
    for settings in (cfg, {"pretrained_cfg": cfg}):
        assert timm_settings.read_labels(settings, 3) == (("a", "b", "c"), None)
    assert timm_settings.read_labels({"pretrained_cfg": 3}, 2) == hf_settings.read_labels({}, 2) == (("0", "1"), None)


@pytest.mark.parametrize(
    "found", [3, None, [], {}, ["a"], ["a", "b", "c"], ["a", 7], ["a", "\x1b[2J"], {"0": "a"}, {"0": "a", "2": "b"}]
)
def test_names_that_fit_no_classes_are_replaced_by_numbers_and_a_note(found: Any) -> None:
    table = {str(index): name for index, name in enumerate(found)} if isinstance(found, list) else found
    answers = [hf_settings.read_labels({"id2label": table}, 2)]
    if isinstance(found, list) and found:
        answers.append(timm_settings.read_labels({"label_names": found}, 2))
    for labels, note in answers:
        assert labels == ("0", "1")
        assert note is not None and note.endswith("for 2 classes; the classes are called by their numbers.")


def test_an_index_names_files_beside_it_and_nothing_else() -> None:
    names = {"a": "model-2-of-2.safetensors", "b": "model-1-of-2.safetensors", "c": "model-2-of-2.safetensors"}
    assert hf_settings.read_index({"weight_map": names}, "i") == (
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    )
    for bad in (None, {}, 3, {"a": 3}, {"a": "../x.safetensors"}, {"a": "/x.safetensors"}, {"a": "x.bin"}):
        with pytest.raises(FileProblem, match=r"^i "):
            hf_settings.read_index({"weight_map": bad}, "i")


def test_a_model_in_several_files_is_read_whole(tmp_path: Path) -> None:
    case = CASES["HF"]
    state = random_state(case.spec)
    arrays = list(written(case, state).items())
    halves = {"model-1.safetensors": arrays[:7], "model-2.safetensors": arrays[7:]}
    for name, half in halves.items():
        safetensors.torch.save_file({key: array.contiguous() for key, array in half}, tmp_path / name)
    table = {key: name for name, half in halves.items() for key, _ in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    bundle, _ = read_foreign(tmp_path)
    assert_equal(bundle.model.state_dict(), state)
    safetensors.torch.save_file({key: array.contiguous() for key, array in arrays}, tmp_path / "model-2.safetensors")
    with pytest.raises(FileProblem, match="as does another file"):
        read_foreign(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(FileProblem, match="holds no weights"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    ("rule", "antialias", "offset"),
    [("bicubic", False, 0.0), ("bicubic-antialias", True, 0.0), ("bicubic-offset", False, 0.1)],
)
def test_metas_code_gets_the_rule_for_resizing_positions(rule: Any, antialias: bool, offset: float) -> None:
    spec = changed(DINO, pos_resize=rule)
    reported = dinov2.create_args(spec)
    assert (reported["interpolate_antialias"], reported["interpolate_offset"]) == (antialias, offset)
    assert dinov2.differences(spec) == ()


def test_resize_that_metas_code_has_not_is_named() -> None:
    assert dinov2.differences(changed(DINO, pos_resize="bilinear")) == (
        "pos_resize is bicubic-offset there, bilinear here",
    )


SHORTER = Preprocess(resize="shorter-side", crop_frac=0.875, filter="bicubic", mean=(0.1, 0.2, 0.3))
RULES = {
    "paper": Preprocess(),
    "oblong": Preprocess(image_size=(224, 320)),
    "squash and crop": Preprocess(crop_frac=0.875, image_size=(224, 112)),
    "shorter side": SHORTER,
    "shorter side, no crop": dataclasses.replace(SHORTER, crop_frac=1.0),
    "518": dataclasses.replace(SHORTER, image_size=(518, 518), crop_frac=518 / 592),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_preprocessing_goes_there_and_back(rule: Preprocess) -> None:
    assert hf_settings.read_preprocess(json.loads(json.dumps(hf_settings.preprocessor_json(rule)))) == rule
    cfg = json.loads(json.dumps(timm_settings.pretrained_cfg(TIMM, ENTRY, rule, ())))
    assert timm_settings.read_preprocess(cfg) == timm_settings.read_preprocess({"pretrained_cfg": cfg}) == rule


BIG_VISION = Preprocess(resize="shorter-side", crop_frac=0.875, filter="area")
NOT_SAID = {"area": BIG_VISION, "no antialias": Preprocess(antialias=False)}  # by the settings of timm and transformers


@pytest.mark.parametrize("rule", NOT_SAID.values(), ids=list(NOT_SAID))
@pytest.mark.parametrize("peer", ["timm", "transformers"])
def test_rule_that_a_peer_cannot_express_comes_back_while_the_nearest_stands_beside_it(
    peer: str, rule: Preprocess
) -> None:
    is_timm = peer == "timm"
    reported = timm_settings.config_json(TIMM, ENTRY, rule, ()) if is_timm else hf_settings.preprocessor_json(rule)
    read_preprocess = timm_settings.read_preprocess if is_timm else hf_settings.read_preprocess
    stored = json.loads(json.dumps(reported))
    assert read_preprocess(stored) == rule
    beside = stored["pretrained_cfg"] if is_timm else stored
    beside["interpolation" if is_timm else "resample"] = "bicubic" if is_timm else 3
    assert read_preprocess(stored) == dataclasses.replace(rule, filter="bicubic", antialias=True), "changed since"


def test_grey_goes_to_timm_and_not_to_transformers() -> None:
    grey = Preprocess(mode="L", mean=(0.5,), std=(0.5,), image_size=(28, 28))
    assert timm_settings.read_preprocess(timm_settings.pretrained_cfg(TIMM, ENTRY, grey, ())) == grey
    with pytest.raises(UsageError, match="RGB"):
        hf_settings.preprocessor_json(grey)


@pytest.mark.parametrize("crop", [0.875, 0.9, 0.95, 0.965, 0.99, 1.0])
@pytest.mark.parametrize("side", [28, 160, 224, 240, 288, 384, 448, 518])
def test_crops_have_the_same_pixels_in_timm(side: int, crop: float) -> None:
    """timm rounds the scaled size down and we to the nearest: both directions must come to the same number of pixels."""
    rule = timm_settings.read_preprocess({"input_size": [3, side, side], "crop_pct": crop})
    assert round(side / rule.crop_frac) == int(side / crop)
    ours = Preprocess(image_size=(side, side), crop_frac=crop)
    assert int(side / timm_settings.pretrained_cfg(TIMM, ENTRY, ours, ())["crop_pct"]) == round(side / crop)


def test_what_is_left_out_has_the_peers_default() -> None:
    assert timm_settings.read_preprocess({}) == Preprocess(
        resize="shorter-side",
        crop_frac=0.875,
        filter="bicubic",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    assert hf_settings.read_preprocess({}) == Preprocess()
    old = {"feature_extractor_type": "ViTFeatureExtractor", "size": 384, "image_mean": [0.5] * 3, "do_normalize": True}
    assert hf_settings.read_preprocess(old) == Preprocess(image_size=(384, 384))
    dino = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}}
    rule = hf_settings.read_preprocess(dino | {"crop_size": {"height": 224, "width": 224}})
    assert (rule.resize, rule.crop_frac, rule.filter) == ("shorter-side", 0.875, "bicubic")
    assert (
        hf_settings.read_preprocess({"image_processor_type": "BitImageProcessor", "size": 256, "crop_size": 224})
        == rule
    )
    assert hf_settings.read_preprocess({"do_normalize": False}) == Preprocess(mean=(0.0,) * 3, std=(1.0,) * 3)


@pytest.mark.parametrize(
    "config",
    [
        {"image_processor_type": "VivitImageProcessor"},
        *({"resample": resample} for resample in (0, 1, None, "bilinear", [2])),
        *({key: False} for key in ("do_resize", "do_rescale")),
        *({"rescale_factor": factor} for factor in (1 / 127.5, None, "x", [1])),
        *({"size": size} for size in (0, "224", None, {"longest_edge": 3}, {"height": 3}, [224, 224], True)),
        {"size": {"shortest_edge": 256}},
        {"image_processor_type": "Bit", "size": {"shortest_edge": 256}, "crop_size": {"height": 200, "width": 100}},
        {"image_processor_type": "Bit", "size": 200, "crop_size": 224},
        *({"image_mean": mean} for mean in (0.5, [0.5], ["x"] * 3, None, [float("nan")] * 3)),
    ],
)
def test_processors_that_vitlab_has_no_like_of_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        hf_settings.read_preprocess(config)


@pytest.mark.parametrize(
    "config",
    [
        *({"crop_mode": mode} for mode in ("border", None, [])),
        *({"crop_pct": crop} for crop in (0, 1e-320, 1.5, "x", None, float("nan"))),
        *(
            {"input_size": size}
            for size in ([3, 224], 224, [3, 0, 1], [4, 224, 224], [3, "a", 2], None, [3, 10**400, 2])
        ),
        *({"interpolation": how} for how in ("lanczos", "random", 3, None)),
        *({"mean": mean} for mean in (0.5, [0.5], ["x"] * 3, None)),
        {"std": [0.0, 0.0, 0.0]},
        *(5, None, "x", [{}]),
    ],
)
def test_settings_of_timm_that_vitlab_has_no_like_of_are_refused(config: Any) -> None:
    with pytest.raises(UsageError):
        timm_settings.read_preprocess(config)


def test_preprocessing_that_a_peer_cannot_repeat_is_reported() -> None:
    assert preprocess_difference("timm's", Preprocess()) is None
    assert "antialias=False" in str(preprocess_difference("timm's", Preprocess(antialias=False)))
    assert "area" in str(preprocess_difference("timm's", Preprocess(filter="area")))
    with pytest.raises(UsageError, match="square crops only"):
        hf_settings.preprocessor_json(dataclasses.replace(SHORTER, image_size=(224, 320)))
    with pytest.raises(UsageError, match="into RGB"):
        hf_settings.preprocessor_json(Preprocess(mode="L", mean=(0.5,), std=(0.5,)))


@pytest.mark.parametrize("name", ["HF", "HF in memory", "HF DINOv2"])
def test_projections_of_transformers_keep_their_meaning(name: str) -> None:
    """Three arrays of one shape: a round trip would not notice if query and key changed places."""
    case = CASES[name]
    state = random_state(case.spec)
    found = written(case, state)
    for place, part in enumerate(("query", "key", "value")):
        array = next(key for key in found if f".{part[0]}_proj.weight" in key or f".{part}.weight" in key)
        assert torch.equal(found[array], state["blocks.0.attn.qkv.weight"].chunk(3)[place])
