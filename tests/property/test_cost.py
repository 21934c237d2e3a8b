"""The closed forms for parameters and multiply-adds equal what torch counts, for any model that can be specified."""

import os
from typing import Any

import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vitlab.core.errors import UsageError
from vitlab.models.build import Model, allocate
from vitlab.models.cost import count_macs, count_params, count_stored
from vitlab.models.efficientnet_spec import EfficientNetSpec
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, TrunkSpec, ViTSpec

SOAK = os.environ.get("VITLAB_SOAK") == "1"
small = st.integers(1, 4)
conventions: dict[str, Any] = {
    "width_factor": st.just(1),
    "gn_eps": st.sampled_from([1e-6, 1e-5]),
    "ws": st.sampled_from(["std-eps", "var-eps"]),
    "ws_eps": st.sampled_from([1e-5, 1e-10]),
    "padding": st.sampled_from(["same", "fixed"]),
}
stages = st.lists(st.integers(1, 2), max_size=3).map(tuple)


@st.composite
def vit_specs(draw: st.DrawFn) -> ViTSpec:
    heads = draw(small)
    stem = draw(st.none() | st.builds(TrunkSpec, stages=stages, preact=st.booleans(), **conventions))
    patch, stride = draw(small), stem.stride if stem else 1
    # A stem rounds up at each halving, so an image may be a little short of a whole number of patches.
    short = draw(st.integers(0, stride - 1))
    image_size = tuple(draw(small) * patch * stride - short for _ in range(2))
    fields = {
        "width": heads * draw(st.integers(1, 6)),
        "heads": heads,
        "depth": draw(st.integers(1, 3)),
        "mlp_dim": draw(st.integers(1, 20)),
        "patch": patch,
        "image_size": image_size,
        "stem": stem,
        "in_channels": draw(st.integers(1, 3)),
        "num_classes": draw(st.integers(0, 5)),
        "pool": draw(st.sampled_from(["cls", "gap", "map"])),
        "pos": draw(st.sampled_from(["learned", "none", "learned2d", "relative", "sincos2d"])),
        "pos_at": draw(st.sampled_from(["stem", "every", "shared"])),
        "cls_in_pos": draw(st.booleans()),
        "attention": draw(st.sampled_from(["full", "full", "axial"])),
        "head": draw(st.sampled_from(["linear", "mlp-tanh"])),
        "gelu": draw(st.sampled_from(["tanh", "exact"])),
        "layer_scale": draw(st.none() | st.just(0.1)),
        "registers": draw(st.integers(0, 3)),
    }
    try:
        return ViTSpec(**fields)
    except UsageError:  # some combinations are not models
        reject()


@st.composite
def bit_trunks(draw: st.DrawFn) -> TrunkSpec:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    possible = [stage for stage, count in enumerate(counts) if count > 1]
    non_local = draw(st.sets(st.sampled_from(possible))) if possible else set[int]()
    fields = {name: draw(values) for name, values in conventions.items()}
    return TrunkSpec(stages=counts, preact=True, non_local=tuple(sorted(non_local)), **fields)


bit_specs = st.builds(
    BiTSpec,
    trunk=bit_trunks(),
    image_size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    in_channels=st.integers(1, 3),
    num_classes=st.integers(0, 5),
)
axial_specs = st.builds(
    lambda heads, times, **fields: AxialResNetSpec(heads=heads, width=heads * times, **fields),
    heads=small,
    times=small,
    stages=stages.filter(bool),
    image_size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    in_channels=st.integers(1, 3),
    num_classes=st.integers(0, 5),
)


widths = st.integers(1, 12)
efficientnet_specs = st.builds(
    EfficientNetSpec,
    stem_width=widths,
    widths=st.tuples(*[widths] * 7),
    depths=st.tuples(*[st.integers(1, 2)] * 7),
    last_width=widths,
    image_size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    in_channels=st.integers(1, 3),
    num_classes=st.integers(0, 5),
    padding=st.sampled_from(["same", "fixed"]),
)


def counted_macs(model: Model) -> int:
    """Multiply-adds of one image, counted by torch on a model without memory."""
    model.eval().requires_grad_(False)
    spec = model.spec
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, spec.in_channels, *spec.image_size, device="meta"))
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


def hold_equal(spec: ModelSpec) -> None:
    model = allocate(spec)
    assert count_params(spec) == sum(parameter.numel() for parameter in model.parameters())
    assert count_stored(spec) == sum(tensor.numel() for tensor in model.state_dict().values())
    assert count_macs(spec) == counted_macs(model)
    assert count_macs(spec, padding_taps=False) <= count_macs(spec)


# Counting on the meta device takes a tenth of a second, ten times what other properties take.
FEWER = settings(max_examples=settings.default.max_examples // (2 if SOAK else 5))


@FEWER
@given(vit_specs())
def test_vit_costs_what_torch_counts(spec: ViTSpec) -> None:
    hold_equal(spec)


@FEWER
@given(bit_specs)
def test_resnet_costs_what_torch_counts(spec: BiTSpec) -> None:
    hold_equal(spec)


@FEWER
@given(efficientnet_specs)
def test_efficientnet_costs_what_torch_counts(spec: EfficientNetSpec) -> None:
    hold_equal(spec)


@FEWER
@given(axial_specs)
def test_axial_resnet_costs_what_torch_counts(spec: AxialResNetSpec) -> None:
    hold_equal(spec)
