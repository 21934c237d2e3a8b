"""The formula for a training step's memory against what autograd really keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.models.build import Model, create_model
from vitlab.models.facts import model_info
from vitlab.models.memory import kept_bytes, standardised_bytes


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


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViT-Ti/16", {}),
        ("ViT-Ti/16", {"layer_scale": 0.1, "pool": "map"}),
        ("ViT-Ti/16", {"pos": "relative"}),
        ("Axial-ViT-Ti/16", {}),
        ("R26+ViT-Ti/32", {}),
        ("BiT-R26x1", {}),
    ],
    ids=str,
)
def test_kept_bytes_are_what_autograd_keeps(name: str, fields: dict[str, Any]) -> None:
    model = create_model(name, image_size=96, num_classes=10, overrides=fields).train()
    one, three = kept(model, 1), kept(model, 3)
    assert kept_bytes(model.spec, half=False) == pytest.approx((three - one) / 2, rel=0.05)
    fixed = one - (three - one) / 2
    assert standardised_bytes(model.spec, half=False) == pytest.approx(fixed, rel=0.05, abs=2e6)  # small tables besides


@pytest.mark.parametrize("name", ["ViT-B/16", "R50+ViT-B/16"])
def test_half_precision_needs_less(name: str) -> None:
    spec = model_info(name).spec
    assert kept_bytes(spec, half=True) < kept_bytes(spec, half=False)
