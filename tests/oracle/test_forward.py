"""The same weights and images give the same logits and the same named intermediates as in timm and in transformers.

transformers 5 no longer has a hybrid ViT classifier. Its DPT keeps the same R50+ViT-B/16 encoder, so the hybrid is
compared with that one: every intermediate up to the tanh layer of the pre-training head, but no logits. DPT takes a
square root to find its position grid, so a rectangular hybrid has timm as its only peer.
"""

import pytest
from parity import assert_same, images, label, record_ours, record_peer
from peers import PEERS, pair

NATIVE, WIDE, SMALL = (224, 224), (192, 256), (64, 96)


@pytest.mark.parametrize("size", [NATIVE, WIDE], ids=label)
@pytest.mark.parametrize("name", ["timm ViT-S/16", "timm ViT-B/16", "transformers ViT-S/16", "transformers ViT-B/16"])
def test_plain_vit(name: str, size: tuple[int, int]) -> None:
    _compare(name, size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("timm R50+ViT-B/16", NATIVE),
        ("timm R50+ViT-B/16", WIDE),
        ("transformers R50+ViT-B/16", NATIVE),
        ("timm R26+ViT-S/32", WIDE),
        ("timm R+ViT-Ti/16", WIDE),
    ],
    ids=label,
)
def test_hybrid(name: str, size: tuple[int, int]) -> None:
    _compare(name, size)


# 97x131 pixels: odd feature maps, where every rounding and every padded pixel counts.
@pytest.mark.parametrize("size", [NATIVE, (97, 131)], ids=label)
@pytest.mark.parametrize("name", ["timm BiT-R50x1", "transformers BiT-R50x1"])
def test_bit(name: str, size: tuple[int, int]) -> None:
    _compare(name, size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("timm ViT-S/16 tanh", SMALL),
        ("timm ViT-S/16 gap", SMALL),
        ("timm ViT-S/16 map", SMALL),
        ("timm ViT-S/16 bare cls", SMALL),
        ("timm DINOv2 S/14", (56, 84)),
        ("transformers ViT-S/16 tanh", SMALL),
        ("transformers DPT S/16", (64, 64)),
        ("transformers DINOv2 S/14", (70, 70)),
        ("transformers SigLIP S/16", (64, 64)),
    ],
    ids=label,
)
def test_variants(name: str, size: tuple[int, int]) -> None:
    """Pooling, registers, layer scale, the tanh head and the tanh GELU."""
    _compare(name, size)


def _compare(name: str, size: tuple[int, int]) -> None:
    model, other = pair(PEERS[name], size)
    x_BCYX = images(model)
    assert_same(record_ours(model, x_BCYX), record_peer(other, x_BCYX, PEERS[name].taps(model.spec)))
