"""Position grids at another image size than the model was built for: each peer's rule has its name in the spec."""

from typing import get_args

import pytest
import torch
from parity import TOLERANCE, assert_same, difference, images, label, record_ours, record_peer, worst_difference
from peers import PEERS, ours, pair, timm

from vitlab.models.ops import resize_grid
from vitlab.models.spec import GridResize, Pair

# (peer, the square it is built for, the size it is called with, options of that call)
_RESIZED = [
    ("timm ViT-S/16 any size", 224, (192, 256), {}),
    ("timm ViT-S/16 any size", 96, (128, 160), {}),
    ("timm DINOv2 S/14", 70, (56, 98), {}),
    ("transformers ViT-S/16", 224, (192, 256), {"interpolate_pos_encoding": True}),
    ("transformers ViT-S/16", 96, (128, 160), {"interpolate_pos_encoding": True}),
    ("transformers DPT S/16", 96, (64, 160), {}),
    ("transformers DINOv2 S/14", 70, (56, 98), {}),
    ("transformers SigLIP S/16", 96, (64, 160), {"interpolate_pos_encoding": True}),
]
_GRIDS = pytest.mark.parametrize(
    ("old", "new"), [((14, 14), (24, 24)), ((14, 14), (12, 16)), ((7, 5), (3, 11))], ids=label
)
_RULES: tuple[GridResize, ...] = get_args(GridResize)


@pytest.mark.parametrize(("name", "built_for", "size", "options"), _RESIZED, ids=label)
def test_called_at_another_size(name: str, built_for: int, size: Pair, options: dict[str, bool]) -> None:
    peer = PEERS[name]
    model, other = pair(peer, (built_for, built_for), {"depth": 2})
    x_BCYX = images(model, size)
    theirs = record_peer(other, x_BCYX, peer.taps(model.spec), **options)
    assert_same(record_ours(model, x_BCYX), theirs)

    # The other rules, the paper's among them, are not the same: not one of them may pass for the right one.
    for rule in _RULES:
        if rule != peer.conventions["pos_resize"]:
            model = ours(peer, (built_for, built_for), {"depth": 2, "pos_resize": rule})
            worst, _ = worst_difference(record_ours(model, x_BCYX), theirs)
            assert worst > 100 * TOLERANCE, f"{rule} passes for {peer.conventions['pos_resize']}: {worst:.2e}"


@pytest.mark.parametrize(
    ("rule", "interpolation", "antialias"),
    [("bicubic-antialias", "bicubic", True), ("bicubic", "bicubic", False), ("bilinear", "bilinear", False)],
)
@_GRIDS
def test_resize_rule_of_timm(rule: GridResize, interpolation: str, antialias: bool, old: Pair, new: Pair) -> None:
    pos_1TD = torch.randn(1, 1 + old[0] * old[1], 8, generator=torch.Generator().manual_seed(0))
    theirs_1TD = timm.layers.resample_abs_pos_embed(
        pos_1TD, list(new), list(old), num_prefix_tokens=1, interpolation=interpolation, antialias=antialias
    )
    assert torch.equal(theirs_1TD[:, :1], pos_1TD[:, :1])
    assert difference(resize_grid(pos_1TD[:, 1:], old, new, rule), theirs_1TD[:, 1:]) <= TOLERANCE


@_GRIDS
def test_resize_rule_of_the_paper(old: Pair, new: Pair) -> None:
    """The authors call scipy's `zoom` at order 1; no peer does, so scipy itself is asked."""
    ndimage = pytest.importorskip("scipy.ndimage")
    pos_yxD = torch.randn(*old, 8, generator=torch.Generator().manual_seed(0))
    theirs_yxD = torch.from_numpy(ndimage.zoom(pos_yxD.numpy(), (new[0] / old[0], new[1] / old[1], 1), order=1))
    ours_1ND = resize_grid(pos_yxD.reshape(1, -1, 8), old, new, "corner-bilinear")
    assert difference(ours_1ND.reshape(*new, 8), theirs_yxD) <= TOLERANCE
