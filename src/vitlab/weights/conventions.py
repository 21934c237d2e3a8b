"""How images are prepared where a file does not say it itself: the conventions that publishers share.

Facts: the authors' `input_pipeline.py`; big_vision's configs and the defaults in its `pp/ops_image.py`; timm 1.0.30, the
`_cfg` of each model file; transformers 5.22, its image processors, and for DINOv2 the published `preprocessor_config.json`;
torchvision's and Meta's evaluation transforms.
"""

from pathlib import Path
from typing import Any

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.data.rules import Mode
from vitlab.models.spec import ModelSpec, Pair
from vitlab.weights.bundle import read_table
from vitlab.weights.formats.readings import usual_side
from vitlab.weights.formats.timm_settings import IMAGENET

PREPROCESSINGS = ("minus-one-to-one", "imagenet")
IMAGENET_PIXELS: dict[str, Any] = {"mean": IMAGENET[0], "std": IMAGENET[1]}
CROPPED: dict[str, Any] = {"resize": "shorter-side", "crop_frac": 0.875}  # 256 -> 224
_DINOV2: dict[str, Any] = {**CROPPED, "filter": "bicubic", **IMAGENET_PIXELS}


def usual_preprocess(spec: ModelSpec, rule: dict[str, Any], image_size: Pair | None = None) -> Preprocess:
    """`rule` for the images of this model. What it leaves out is the paper's: squashed, bilinear, -1...1."""
    if mode_of(spec) != "RGB":
        rule = {**rule, "mean": (0.5,) * spec.in_channels, "std": (0.5,) * spec.in_channels}
    return Preprocess(mode=mode_of(spec), image_size=image_size or spec.image_size, **rule)


def dinov2_preprocess(spec: ModelSpec) -> Preprocess:
    """DINOv2's models were trained on 518x518 at last and are evaluated on less."""
    side = usual_side(spec.stride)
    return usual_preprocess(spec, _DINOV2, (side, side))


def describe(rule: Preprocess) -> str:
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
        return usual_preprocess(spec, {})
    if text == "imagenet" and mode_of(spec) == "RGB":
        return usual_preprocess(spec, _DINOV2)
    if (table := read_table(Path(text))) is None:
        raise UsageError(
            f"'{text}' is not a preprocessing for {spec.in_channels} channels",
            hint=f"Give a preprocess.json, or one of: {', '.join(PREPROCESSINGS)}.",
        )
    return config.from_dict(Preprocess, table, "preprocess.")


def mode_of(spec: ModelSpec) -> Mode:
    return "L" if spec.in_channels == 1 else "RGB" if spec.in_channels == len("RGB") else "array"
