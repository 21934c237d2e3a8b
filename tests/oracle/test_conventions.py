"""Each convention is a field of the spec, and each field decides: one wrong value and the comparison fails.

The agreement in `test_forward.py` is worth something only if it cannot happen by luck. Here one field at a time leaves
the peer's convention, mostly for the paper's, with the weights as they were.
"""

import functools
from typing import Any

import pytest
from parity import TOLERANCE, assert_same, images, record_ours, record_peer, worst_difference
from peers import PEERS, ours, pair
from torch import Tensor

SIZE = (64, 64)

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("timm ViT-S/16", {"gelu": "tanh"}),
    ("timm ViT-S/16", {"norm_eps": 1e-5}),
    ("timm ViT-S/16 tanh", {"gelu": "exact"}),
    ("timm ViT-S/16 gap", {"gelu": "tanh"}),
    ("timm ViT-S/16 map", {"gelu": "tanh"}),
    ("timm R50+ViT-B/16", {"stem": {"gn_eps": 1e-6}}),
    ("timm R50+ViT-B/16", {"stem": {"ws": "std-eps"}}),
    ("timm R50+ViT-B/16", {"stem": {"ws_eps": 1e-10}}),
    ("timm R50+ViT-B/16", {"stem": {"ws": "std-eps", "ws_eps": 1e-5}}),
    ("timm R50+ViT-B/16", {"stem": {"padding": "fixed"}}),
    ("timm BiT-R50x1", {"trunk": {"gn_eps": 1e-6}}),
    ("timm BiT-R50x1", {"trunk": {"ws": "std-eps"}}),
    ("timm BiT-R50x1", {"trunk": {"ws_eps": 1e-10}}),
    ("timm BiT-R50x1", {"trunk": {"padding": "same"}}),
    ("timm BiT-R50x1", {"trunk": {"pool_padding": "neg-inf"}}),
    ("transformers ViT-S/16", {"gelu": "tanh"}),
    ("transformers ViT-S/16", {"norm_eps": 1e-6}),
    ("transformers R50+ViT-B/16", {"stem": {"gn_eps": 1e-6}}),
    ("transformers R50+ViT-B/16", {"stem": {"ws": "std-eps", "ws_eps": 1e-5}}),
    ("transformers R50+ViT-B/16", {"stem": {"padding": "fixed"}}),
    ("transformers BiT-R50x1", {"trunk": {"ws_eps": 1e-10}}),
    ("transformers BiT-R50x1", {"trunk": {"padding": "same"}}),
    ("transformers BiT-R50x1", {"trunk": {"pool_padding": "neg-inf"}}),
    ("transformers SigLIP S/16", {"gelu": "exact"}),
    ("transformers SigLIP S/16", {"norm_eps": 1e-5}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=str)
def test_a_wrong_convention_shows(name: str, wrong: dict[str, Any]) -> None:
    x_BCYX, theirs = _right(name)
    model = ours(PEERS[name], SIZE, wrong | _shallow(name))
    worst, _ = worst_difference(record_ours(model, x_BCYX), theirs)
    assert worst > 10 * TOLERANCE, f"{wrong} changes nothing beyond {worst:.2e}"


@functools.cache
def _right(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The images and what the peer makes of them, after vitlab agreed with it under the peer's own conventions."""
    model, other = pair(PEERS[name], SIZE, _shallow(name))
    x_BCYX = images(model)
    theirs = record_peer(other, x_BCYX, PEERS[name].taps(model.spec))
    assert_same(record_ours(model, x_BCYX), theirs)
    return x_BCYX, theirs


@pytest.mark.parametrize(
    "name", ["timm R50+ViT-B/16", "timm BiT-R50x1", "transformers R50+ViT-B/16", "transformers BiT-R50x1"]
)
def test_trunks_in_double(name: str) -> None:
    """What is left between the ResNets in float32 is rounding: in float64 it is gone."""
    model, other = pair(PEERS[name], SIZE, _shallow(name))
    model, other, x_BCYX = model.double(), other.double(), images(model).double()
    theirs = record_peer(other, x_BCYX, PEERS[name].taps(model.spec))
    assert_same(record_ours(model, x_BCYX), theirs, tolerance=1e-12)


def _shallow(name: str) -> dict[str, Any]:
    """Two blocks are enough to see a convention; a ResNet's depth is not ours to choose in every peer."""
    return {} if "BiT" in name else {"depth": 2}
