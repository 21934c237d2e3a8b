"""What vitlab shows of a model's inside is what the peers show: attention maps and features of chosen layers."""

import pytest
import torch
from parity import as_vit, assert_same, images, label
from peers import PEERS, pair

LAYERS = [2, 7, 11]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("transformers ViT-S/16", (96, 128)),
        ("transformers ViT-B/16", (224, 224)),
        ("transformers DINOv2 S/14", (70, 70)),
        ("transformers SigLIP S/16", (96, 96)),
    ],
    ids=label,
)
def test_attention_of_every_layer(name: str, size: tuple[int, int]) -> None:
    model, other = pair(PEERS[name], size)
    x_BCYX = images(model)
    maps = as_vit(model).attention(x_BCYX)
    with torch.no_grad():
        theirs = dict(enumerate(other(x_BCYX, output_attentions=True).attentions))
    assert len(theirs) == 12
    assert_same(maps.layers, theirs)


@pytest.mark.parametrize(
    ("name", "size"),
    [("timm ViT-S/16", (96, 128)), ("timm ViT-S/16 gap", (96, 96)), ("timm DINOv2 S/14", (56, 84))],
    ids=label,
)
def test_patches_of_chosen_layers(name: str, size: tuple[int, int]) -> None:
    model, other = pair(PEERS[name], size)
    x_BCYX = images(model)
    with torch.no_grad():
        ours = model.features(x_BCYX, tokens="patches", layers=LAYERS)
        theirs_BND = other.forward_intermediates(
            x_BCYX, indices=LAYERS, norm=True, output_fmt="NLC", intermediates_only=True
        )
    assert_same(ours.layers, dict(zip(LAYERS, theirs_BND, strict=True)))


@pytest.mark.parametrize(("name", "size"), [("timm ViT-S/16", (96, 128)), ("timm DINOv2 S/14", (56, 84))], ids=label)
def test_class_token_of_chosen_layers(name: str, size: tuple[int, int]) -> None:
    model, other = pair(PEERS[name], size)
    x_BCYX = images(model)
    with torch.no_grad():
        ours = model.features(x_BCYX, tokens="cls", layers=LAYERS)
        theirs = other.get_intermediate_layers(x_BCYX, n=LAYERS, norm=True, return_prefix_tokens=True)
    assert_same(ours.layers, {i: prefix_BTD[:, 0] for i, (_, prefix_BTD) in zip(LAYERS, theirs, strict=True)})


def test_bit_features() -> None:
    """timm counts the root as level 0, so its level s + 1 is vitlab's stage s."""
    model, other = pair(PEERS["timm BiT-R50x1"], (96, 128))
    x_BCYX = images(model)
    with torch.no_grad():
        ours = model.features(x_BCYX, tokens="patches", layers=range(4))
        maps_BCYX = other.forward_intermediates(x_BCYX, indices=[1, 2, 3, 4], norm=True, intermediates_only=True)
    assert_same(ours.layers, {s: map_BCYX.flatten(2).mT for s, map_BCYX in enumerate(maps_BCYX)})
    assert ours.grids == {s: tuple(map_BCYX.shape[2:]) for s, map_BCYX in enumerate(maps_BCYX)}
