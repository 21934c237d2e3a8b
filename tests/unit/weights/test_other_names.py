"""What timm, transformers and torch.hub call the checkpoints that the catalogue has."""

import pytest

from vitlab.core.errors import UnknownName
from vitlab.weights.catalogue import find, is_name, list_pretrained
from vitlab.weights.other_names import translate

SAME = {
    "dinov2": "ViT-S/14@dinov2",
    "dinov2-base": "ViT-B/14@dinov2",
    "facebook/dinov2-small": "ViT-S/14@dinov2",
    "facebook/dinov2-with-registers-large": "ViT-L/14@dinov2-registers",
    "dinov2_vitb14_reg": "ViT-B/14@dinov2-registers",
    "vit_small_patch14_dinov2": "ViT-S/14@dinov2",
    "timm/vit_large_patch14_reg4_dinov2.lvd142m": "ViT-L/14@dinov2-registers",
    "google/vit-base-patch16-224-in21k": "ViT-B/16@i21k",
    "google/vit-large-patch32-384": "ViT-L/32@i21k-i1k-384",
    "vit_base_patch16_224.augreg_in21k": "ViT-B/16@augreg-i21k",
    "vit_small_patch32_384.augreg_in21k_ft_in1k": "ViT-S/32@augreg-i21k-i1k-384",
    "vit_base_patch16_224.augreg_in1k": "ViT-B/16@augreg-i1k-224",
    "hf-hub:timm/vit_base_patch32_224.sam_in1k": "ViT-B/32@sam-i1k",
    "resnetv2_50x1_bit.goog_in21k": "BiT-R50x1@bit-m",
    "resnetv2_152x4_bit.goog_in21k_ft_in1k": "BiT-R152x4@bit-m-i1k",
}


@pytest.mark.parametrize(("theirs", "ours"), SAME.items())
def test_name_of_the_same_weights_is_understood(theirs: str, ours: str) -> None:
    assert is_name(theirs)
    assert find(theirs).name == ours


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "facebook/dinov2-giant", "vit_base_patch16_clip_224.openai"])
def test_name_of_other_weights_is_not_taken_for_ours(name: str) -> None:
    assert translate(name) is None or translate(name) not in list_pretrained()
    with pytest.raises(UnknownName) as caught:
        find(name)
    assert len(caught.value.nearest) == 3


def test_nearest_names_are_of_the_same_size_and_patch() -> None:
    with pytest.raises(UnknownName) as caught:
        find("vit_base_patch16_224.mae")
    assert all(name.startswith("ViT-B/16@") for name in caught.value.nearest)


@pytest.mark.parametrize("text", ["photos", "runs/train-1", "ViT-B/16", "weights.npz", "vit"])
def test_other_words_are_not_taken_for_names(text: str) -> None:
    assert not is_name(text)
