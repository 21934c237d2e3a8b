"""The names that timm, transformers and torch.hub have for the checkpoints of the catalogue.

Only names of the same weights are translated: timm's plain `vit_base_patch16_224` means another training than ours, so it is
answered with the nearest of our names instead.
"""

import re

_LETTERS = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "s": "S", "b": "B", "l": "L"}
_HOSTS = re.compile(r"^(hf-hub:|hf_hub:)?(timm/)?")
_TIMM = re.compile(r"vit_(?P<size>[a-z]+)_patch(?P<patch>\d+)_(?P<side>\d+)\.(?P<tag>\w+)")
_TIMM_DINO = re.compile(r"vit_(?P<size>[a-z]+)_patch14_(?P<registers>reg4_)?dinov2(\.lvd142m)?")
_TIMM_BIT = re.compile(r"resnetv2_(?P<depth>\d+)x(?P<width>\d)_bit\.goog_in21k(?P<tuned>_ft_in1k)?")
_GOOGLE = re.compile(r"google/vit-(?P<size>[a-z]+)-patch(?P<patch>\d+)-(?P<side>\d+)(?P<first>-in21k)?")
_DINO = re.compile(r"(facebook/)?dinov2(-with)?(?P<registers>-registers)?(-(?P<size>[a-z]+))?")
_DINO_HUB = re.compile(r"dinov2_vit(?P<size>[sbl])14(?P<registers>_reg)?")
_TAGS = {"orig_in21k": "i21k", "augreg_in21k": "augreg-i21k", "sam_in1k": "sam-i1k"}
_TUNED = {"orig_in21k_ft_in1k": "i21k-i1k", "augreg_in21k_ft_in1k": "augreg-i21k-i1k", "augreg_in1k": "augreg-i1k"}
_MEANT = re.compile(r"(timm/|google/|facebook/|hf[-_]hub:)\S+|(vit|deit|resnetv2)_\S+|dinov2([_-]\S*)?")


def translate(text: str) -> str | None:
    """Our name for a checkpoint that `text` names elsewhere; None where it names none of ours."""
    name = _HOSTS.sub("", text.strip())
    for pattern, read in _READERS.items():
        if found := pattern.fullmatch(name):
            return read({key: value or "" for key, value in found.groupdict().items()})
    return None


def is_meant(text: str) -> bool:
    """Whether this looks like the name of a checkpoint elsewhere, known or not."""
    return _MEANT.fullmatch(text) is not None


def model_of(text: str) -> str:
    """`ViT-B/16` for a name that has a size and a patch somewhere in it, else nothing: to find the nearest of ours."""
    size = re.search(r"(tiny|small|base|large|huge)", text)
    patch = re.search(r"patch(\d+)", text)
    return "" if size is None else f"ViT-{_LETTERS[size[0]]}/{patch[1] if patch else 16}"


def _timm(parts: dict[str, str]) -> str | None:
    tag = _TAGS.get(parts["tag"])
    if tag is None and (tuned := _TUNED.get(parts["tag"])):
        tag = f"{tuned}-{parts['side']}"
    return _vit(parts, tag)


def _google(parts: dict[str, str]) -> str | None:
    return _vit(parts, "i21k" if parts["first"] else f"i21k-i1k-{parts['side']}")


def _dino(parts: dict[str, str]) -> str | None:
    tag = "dinov2-registers" if parts["registers"] else "dinov2"
    return _vit({"patch": "14", **parts, "size": parts["size"] or "small"}, tag)


def _vit(parts: dict[str, str], tag: str | None) -> str | None:
    size = _LETTERS.get(parts["size"])
    return None if tag is None or size is None else f"ViT-{size}/{parts['patch']}@{tag}"


def _bit(parts: dict[str, str]) -> str | None:
    return f"BiT-R{parts['depth']}x{parts['width']}@bit-m{'-i1k' if parts['tuned'] else ''}"


_READERS = {_TIMM: _timm, _TIMM_DINO: _dino, _TIMM_BIT: _bit, _GOOGLE: _google, _DINO: _dino, _DINO_HUB: _dino}
