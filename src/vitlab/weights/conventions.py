"""How each publisher prepares images, for files that do not say it themselves.

Facts: the authors' `input_pipeline.py`; big_vision's configs and the defaults in its `pp/ops_image.py`; timm 1.0.30, the
`_cfg` of each model file; transformers 5.22, its image processors, and for DINOv2 the published `preprocessor_config.json`;
torchvision's and Meta's evaluation transforms.
"""

from pathlib import Path
from typing import Any

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Mode, Preprocess
from vitlab.models.spec import BiTSpec, ModelSpec, ViTSpec
from vitlab.weights.bundle import read_table
from vitlab.weights.formats import timm_settings
from vitlab.weights.formats.hf_settings import CLIP
from vitlab.weights.formats.readings import usual_side
from vitlab.weights.formats.timm_settings import IMAGENET

PREPROCESSINGS = ("minus-one-to-one", "imagenet")
_IMAGENET: dict[str, Any] = {"mean": IMAGENET[0], "std": IMAGENET[1]}
_CLIP: dict[str, Any] = {"mean": CLIP[0], "std": CLIP[1]}
_CROPPED: dict[str, Any] = {"resize": "shorter-side", "crop_frac": 0.875}  # 256 -> 224
_DINOV2: dict[str, Any] = {**_CROPPED, "filter": "bicubic", **_IMAGENET}
# By format and kind of model. What is left out is the default of `Preprocess`: squashed, bilinear, -1...1.
_ASSUMED: dict[tuple[str, str], dict[str, Any]] = {
    ("google-npz", "vit"): {"antialias": False},
    ("bit-npz", "bit"): {"antialias": False},
    ("big-vision", "vit"): {**_CROPPED, "filter": "area"},
    ("hf", "vit"): {},
    ("hf", "bit"): {"resize": "shorter-side", "filter": "bicubic", **_CLIP},
    ("hf", "dinov2"): _DINOV2,
    ("dinov2", "dinov2"): _DINOV2,
    ("torchvision", "vit"): {**_CROPPED, **_IMAGENET},
}
_TIMM_CROPS = {"vit": 0.9, "bit": 0.875}


def assumed(format_name: str, spec: ModelSpec) -> Preprocess:
    """The preprocessing that is the convention of the format for such models."""
    kind, size = _kind(format_name, spec), spec.image_size
    half: dict[str, Any] = {"mean": (0.5,) * spec.in_channels, "std": (0.5,) * spec.in_channels}
    if format_name == "timm":  # through timm's own rounding
        cfg = {"input_size": [spec.in_channels, *size], "crop_pct": _TIMM_CROPS[kind], "interpolation": "bicubic"}
        return timm_settings.read_preprocess({**cfg, **half})
    if kind == "dinov2" and isinstance(spec, ViTSpec):  # trained on 518x518 at last, evaluated on less
        side = usual_side(spec.stride)
        size = side, side
    rule = _ASSUMED[format_name, kind] | ({} if mode_of(spec) == "RGB" else half)
    return Preprocess(mode=mode_of(spec), image_size=size, **rule)


def tell(rule: Preprocess) -> str:
    """Describe the preprocessing in words."""
    rows, cols = rule.image_size
    scaled = f"{round(rows / rule.crop_frac)}x{round(cols / rule.crop_frac)}"
    how = "squashed to" if rule.resize == "squash" else "scaled to cover"
    crop = "" if scaled == f"{rows}x{cols}" and rule.resize == "squash" else f", centre of {rows}x{cols}"
    smooth = "" if rule.antialias or rule.filter == "area" else " without antialiasing"
    mean, std = (" ".join(f"{x:.4g}" for x in (x[:1] if len(set(x)) == 1 else x)) for x in (rule.mean, rule.std))
    return f"{how} {scaled}{crop}, {rule.filter}{smooth}, mean {mean}, std {std}"


def named(text: str, spec: ModelSpec) -> Preprocess:
    """A preprocessing by name (PREPROCESSINGS) or from a `preprocess.json`."""
    if text == "minus-one-to-one":
        half = (0.5,) * spec.in_channels
        return Preprocess(mode=mode_of(spec), image_size=spec.image_size, mean=half, std=half)
    if text == "imagenet" and mode_of(spec) == "RGB":
        return Preprocess(image_size=spec.image_size, **_DINOV2)
    if (table := read_table(Path(text))) is None:
        raise UsageError(
            f"'{text}' is not a preprocessing for {spec.in_channels} channels",
            hint=f"Give a preprocess.json, or one of: {', '.join(PREPROCESSINGS)}.",
        )
    return config.from_dict(Preprocess, table, "preprocess.")


def mode_of(spec: ModelSpec) -> Mode:
    return "L" if spec.in_channels == 1 else "RGB" if spec.in_channels == len("RGB") else "array"


def _kind(format_name: str, spec: ModelSpec) -> str:
    if isinstance(spec, BiTSpec):
        return "bit"
    is_dinov2 = format_name == "dinov2" or (format_name == "hf" and spec.layer_scale is not None)
    return "dinov2" if is_dinov2 else "vit"
