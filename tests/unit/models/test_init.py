"""Official initial values, and none forgotten."""

import math

import pytest
import torch

from vitlab.models.build import allocate, build
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.init import initialise
from vitlab.models.names import list_models, parse_name
from vitlab.models.resnet import BiT, PostActUnit
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, ViTSpec, changed
from vitlab.models.vit import ViT


def shallow(spec: ModelSpec) -> ModelSpec:
    """The same parts, fewer and narrower: which rule fills a parameter depends on neither."""
    if isinstance(spec, BiTSpec):
        units = [2 if stage in spec.trunk.non_local else 1 for stage in range(len(spec.trunk.stages))]
        return changed(spec, {"trunk": {"stages": units, "width_factor": 1}, "num_classes": 10})
    if isinstance(spec, EfficientNetSpec):
        return changed(
            spec, {"widths": [8] * 7, "depths": [1] * 7, "stem_width": 8, "last_width": 8, "num_classes": 10}
        )
    if isinstance(spec, AxialResNetSpec):
        return changed(spec, {"stages": [1] * len(spec.stages), "width": 8, "image_size": [64, 64], "num_classes": 10})
    if isinstance(spec, ViTSpec):
        stem = {"stem": {"stages": [1] * len(spec.stem.stages)}} if spec.stem else {}
        return changed(spec, {"depth": 1, "width": 4 * spec.heads, "mlp_dim": 8, "num_classes": 10, **stem})
    return changed(spec, {"num_classes": 10})  # of a new family; a case of its own makes it quicker


EXTRAS: list[dict[str, object]] = [
    {"pool": "map", "head": "mlp-tanh"},
    {"registers": 2, "layer_scale": 1e-5},
    {"pos": "learned2d", "pos_at": "every"},
    {"pos": "relative"},
    {"cls_in_pos": False},
]
NAMES = {shallow(parse_name(name)): name for name in reversed(list_models())}  # one of those that differ in size alone
# The same rules fill every unit of a trunk, and those of the first stage are by far the smallest.
WIDE = [name for name in NAMES.values() if "+ViT-" in name and name != "R+ViT-Ti/16"] + ["BiT-R26x1"]
SPECS = [pytest.param(spec, id=name, marks=[pytest.mark.slow] * (name in WIDE)) for spec, name in NAMES.items()]
HYBRID = pytest.param(changed(shallow(parse_name("R26+ViT-S/32")), {"stem": {"stages": [1]}}), id="one stage")
SPECS += [HYBRID, *(pytest.param(changed(shallow(parse_name("ViT-Ti/16")), extra), id=str(extra)) for extra in EXTRAS)]


@pytest.mark.parametrize("spec", SPECS)
def test_no_parameter_is_forgotten(spec: ModelSpec) -> None:
    model = allocate(spec).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    initialise(model, torch.Generator().manual_seed(0))
    assert [name for name, p in model.named_parameters() if p.isnan().any()] == []
    assert [name for name, buffer in model.named_buffers() if not bool((buffer >= 0).all())] == []


def test_the_seed_decides_every_bit() -> None:
    spec = shallow(parse_name("ViT-Ti/16"))
    first, same, other = build(spec, seed=1), build(spec, seed=1), build(spec, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.state_dict()["pos.table"], other.state_dict()["pos.table"])


def test_official_values() -> None:
    model = build(changed(parse_name("ViT-B/16"), {"depth": 1, "head": "mlp-tanh"}), seed=0)
    assert isinstance(model, ViT) and model.cls is not None and model.head is not None and model.pre_logits is not None
    d, m = 768, 3072
    block = model.blocks[0]
    for part in block.attn.qkv.weight.chunk(3):  # each D x D block by itself, not 3D x D
        _is_uniform(part, math.sqrt(6 / (d + d)))
    _is_uniform(block.attn.proj.weight, math.sqrt(6 / (d + d)))
    _is_uniform(block.mlp.fc1.weight, math.sqrt(6 / (d + m)))
    for zero in (
        block.attn.qkv.bias,
        block.attn.proj.bias,
        model.cls,
        model.embed.bias,
        model.head.weight,
        model.head.bias,
    ):
        assert not zero.any()
    assert block.mlp.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.1)
    assert model.pos.table.std().item() == pytest.approx(0.02, rel=0.02)
    for kernel, fan_in in ((model.embed.weight, 16 * 16 * 3), (model.pre_logits.weight, d)):
        assert kernel.std().item() == pytest.approx(math.sqrt(1 / fan_in), rel=0.02)
        assert kernel.abs().max().item() <= 2 * math.sqrt(1 / fan_in) / 0.8796 * 1.001  # truncated at two sigmas


def test_hybrid_units_start_as_their_shortcut_and_bit_units_do_not() -> None:
    hybrid = build(changed(shallow(parse_name("R26+ViT-S/32")), {"stem": {"stages": [2, 2]}}), seed=0)
    units = [module for module in hybrid.modules() if isinstance(module, PostActUnit)]
    assert len(units) == 4 and all(not unit.norm3.weight.any() for unit in units)
    bit = build(changed(shallow(parse_name("BiT-R26x1")), {"trunk": {"stages": [1]}}), seed=0)
    assert isinstance(bit, BiT)
    assert bit.state_dict()["trunk.stages.0.0.norm3.weight"].eq(1).all()


def test_layer_scale_and_registers_start_where_the_spec_says() -> None:
    spec = ViTSpec(width=32, depth=1, mlp_dim=64, heads=2, patch=4, image_size=(8, 8), layer_scale=0.125, registers=4)
    state = build(spec, seed=0).state_dict()
    assert state["blocks.0.scale1"].eq(0.125).all() and state["blocks.0.scale2"].eq(0.125).all()
    assert 0 < state["registers"].abs().max() < 1e-5


def _is_uniform(weight: torch.Tensor, bound: float) -> None:
    assert weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
