"""The formula for a training step's memory against what autograd really keeps."""

import functools
from typing import Any

import pytest
import torch
from slow_cases import slow_after
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitlab.models.build import Model, create_model
from vitlab.models.cost import activation_bytes
from vitlab.models.facts import model_info


def kept(model: Model, count: int) -> int:
    """Bytes of the tensors that autograd keeps for `count` images, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(count, model.spec.in_channels, *model.spec.image_size))
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


SHORT = {"stages": [2, 2]}  # of a trunk: a unit that shrinks and one that does not; more of them are more of the same
every_kind = pytest.mark.parametrize(
    ("name", "fields"),
    slow_after(
        3,
        [
            ("ViT-Ti/16", {}),
            ("BiT-R26x1", {"trunk": SHORT}),
            ("ViT-Ti/16", {"layer_scale": 0.1, "pool": "map"}),
            ("EfficientNet-B0", {}),
            ("ViT-Ti/16", {"pos": "relative"}),
            ("Axial-ViT-Ti/16", {}),
            ("R26+ViT-Ti/32", {"stem": {"stages": [2, 1, 1, 1]}}),
            ("EfficientNet-B0", {"padding": "fixed", "stochastic_depth": 0.0}),
            ("BiT-R26x1+NL", {"trunk": {**SHORT, "non_local": [1]}}),
            ("AxialResNet-50-w16", {"stages": [2, 2, 2]}),
        ],
    ),
    ids=str,
)


@every_kind
def test_kept_bytes_are_what_autograd_keeps(name: str, fields: dict[str, Any]) -> None:
    model = create_model(name, image_size=96, num_classes=10, overrides=fields).train()
    one, three = kept(model, 1), kept(model, 3)
    formula = activation_bytes(model.spec, half=False)
    assert formula.kept == pytest.approx((three - one) / 2, rel=0.05)
    fixed = one - (three - one) / 2
    assert formula.weight_copies == pytest.approx(fixed, rel=0.05, abs=2e6)  # small tables besides


@every_kind
def test_recomputing_blocks_keep_their_input_alone(name: str, fields: dict[str, Any]) -> None:
    model = create_model(name, image_size=96, num_classes=10, overrides=fields).train()
    blocks = [module for module in model.modules() if isinstance(module, model.recompute_units)]
    formula = activation_bytes(model.spec, half=False)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    found = (kept(model, 3) - kept(model, 1)) / 2
    assert activation_bytes(model.spec, half=False, recompute=True).kept == pytest.approx(found, rel=0.05)
    # What comes back of one block is no more than the most, and of all of them what is kept otherwise.
    assert 0 < formula.kept - found <= len(blocks) * formula.block


def test_largest_block_is_one_of_all_that_are_alike() -> None:
    spec = model_info("ViT-B/16").spec
    for half in (False, True):
        formula = activation_bytes(spec, half=half)
        blocks = formula.kept - activation_bytes(spec, half=half, recompute=True).kept
        entry = 4 * 197 * 768
        assert formula.block == blocks / 12 + entry


@pytest.mark.parametrize("name", ["ViT-B/16", "R50+ViT-B/16", "EfficientNet-B0"])
def test_half_precision_needs_less(name: str) -> None:
    spec = model_info(name).spec
    assert activation_bytes(spec, half=True).kept < activation_bytes(spec, half=False).kept
