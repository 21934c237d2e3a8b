"""timm's `pretrained_cfg`: preprocessing and class names of a checkpoint.

Facts: timm 1.0.30, `models/_pretrained.py` and `data/transforms_factory.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitlab.core import config as typed
from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec, Pair
from vitlab.weights.formats.readings import (
    OTHER_RULE,
    class_names,
    exact_rule,
    preprocess_difference,
    read_exact_rule,
)

_MOST_PIXELS, _LEAST_CROP = 2**20, 0.01  # of a side, and of the scaled image: far beyond what anybody uses
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std that timm assumes where a config has none


@dataclasses.dataclass(frozen=True)
class TimmEntry:
    """How timm builds a model, `create_model(**args)`, and what it calls the first and the last layer; no args: not at all."""

    args: dict[str, Any] | None
    first_conv: str
    classifier: str
    fixed_input_size: bool


def notes(entry: TimmEntry, preprocess: Preprocess) -> list[str]:
    """What timm must be given beside the weights, and has no setting for."""
    needs = (
        f"timm needs: create_model(**{entry.args})" if entry.args else "timm has no entry point that builds this model"
    )
    return [needs, *filter(None, [preprocess_difference("timm's", preprocess)])]


def config_json(spec: ModelSpec, entry: TimmEntry, preprocess: Preprocess, labels: Sequence[str]) -> dict[str, Any]:
    """Settings beside the weights in a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens."""
    if (args := entry.args) is None:
        raise UsageError(
            f"timm has no entry point that builds {format_name(spec)}, so it would not open such a folder",
            hint="Give OUT the suffix .safetensors to write the weights alone.",
        )
    return {
        "architecture": args["model_name"],
        "num_classes": spec.num_classes,
        "model_args": {key: value for key, value in args.items() if key not in ("model_name", "num_classes")},
        "pretrained_cfg": pretrained_cfg(spec, entry, preprocess, labels),
        **exact_rule(preprocess),
    }


def pretrained_cfg(spec: ModelSpec, entry: TimmEntry, preprocess: Preprocess, labels: Sequence[str]) -> dict[str, Any]:
    """Write the `pretrained_cfg` that `timm.create_model` takes."""
    return {
        **({"architecture": entry.args["model_name"]} if entry.args else {}),
        "num_classes": spec.num_classes,
        "fixed_input_size": entry.fixed_input_size,
        **_nearest(preprocess),
        "first_conv": entry.first_conv,
        "classifier": entry.classifier,
        **({"label_names": list(labels)} if labels else {}),
    }


def _nearest(preprocess: Preprocess) -> dict[str, Any]:
    """The preprocessing, as far as timm has settings for it."""
    rows, cols = preprocess.image_size
    scaled = (round(rows / preprocess.crop_frac), round(cols / preprocess.crop_frac))
    # timm rounds the scaled size down, we round to the nearest; a quarter pixel keeps clear of the edge.
    guesses = (preprocess.crop_frac, rows / scaled[0], rows / (scaled[0] + 0.25))
    return {
        "input_size": [preprocess.channels, rows, cols],
        "interpolation": "box" if preprocess.filter == "area" else preprocess.filter,
        "crop_pct": _fraction(preprocess.image_size, scaled, math.floor, guesses),
        "crop_mode": "squash" if preprocess.resize == "squash" else "center",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }


def read_preprocess(cfg: Mapping[str, Any]) -> Preprocess:
    """Read a `pretrained_cfg`, or the `config.json` around it."""
    outer = cfg
    cfg = cfg.get("pretrained_cfg", cfg) if isinstance(cfg, Mapping) else cfg
    if not isinstance(cfg, Mapping):
        raise UsageError(f"pretrained_cfg must be a table of keys, not {cfg!r:.60}")
    if (exact := read_exact_rule(outer, cfg, _nearest)) is not None:
        return exact
    size, crop, mode = cfg.get("input_size", (3, 224, 224)), cfg.get("crop_pct", 0.875), cfg.get("crop_mode", "center")
    if not (
        isinstance(size, list | tuple)
        and len(size) == 3
        and all(isinstance(side, int) and 0 < side <= _MOST_PIXELS for side in size)
    ):
        raise UsageError(f"input_size must be [channels, rows, columns], not {size!r:.60}")
    if not (isinstance(crop, int | float) and _LEAST_CROP <= crop <= 1):
        raise UsageError(f"crop_pct must be at least {_LEAST_CROP} and at most 1, not {crop!r:.60}")
    if mode not in ("center", "squash"):
        raise UsageError(f"a timm model with crop_mode={mode!r} has no equivalent in vitlab")
    sides = (size[1], size[2])
    scaled = (math.floor(sides[0] / crop), math.floor(sides[1] / crop))
    table = {
        "mode": {1: "L", 3: "RGB"}.get(size[0], "array"),
        "image_size": sides,
        "resize": "squash" if mode == "squash" else "shorter-side",
        "crop_frac": _fraction(sides, scaled, round, (float(crop), sides[0] / scaled[0])),
        "filter": "area" if cfg.get("interpolation") == "box" else cfg.get("interpolation", "bicubic"),
        "mean": cfg.get("mean", IMAGENET[0]),
        "std": cfg.get("std", IMAGENET[1]),
    }
    rule = typed.from_dict(Preprocess, table, "preprocess.")
    if rule.channels != size[0]:
        raise UsageError(f"a timm model of {size[0]} channels has {rule.channels} values in mean")
    return rule


def read_config(config: Mapping[str, Any]) -> Preprocess | None:
    """The preprocessing in a `config.json`; None where it has no `pretrained_cfg`."""
    return read_preprocess(config) if "pretrained_cfg" in config else None


def usual_preprocess(spec: ModelSpec, crop_pct: float) -> Preprocess:
    """What timm assumes for models of a family, through its own rounding."""
    half = [0.5] * spec.in_channels
    cfg = {"input_size": [spec.in_channels, *spec.image_size], "crop_pct": crop_pct, "interpolation": "bicubic"}
    return read_preprocess({**cfg, "mean": half, "std": half})


def read_labels(config: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], str | None]:
    """Read the class names, else use numbers, maybe with a note."""
    nested = config.get("pretrained_cfg")
    found = config.get("label_names") or (nested.get("label_names") if isinstance(nested, Mapping) else None)
    numbers = [str(index) for index in range(count)]
    return class_names(numbers if found is None else found if isinstance(found, list | tuple) else (), count)


def _fraction(sides: Pair, scaled: Pair, rounding: Callable[[float], int], guesses: Sequence[float]) -> float:
    """The first guess by which `sides` come out as `scaled` in the other's rounding."""
    for guess in guesses:
        if tuple(rounding(side / guess) for side in sides) == scaled:
            return guess
    raise UsageError(
        f"no single crop fraction turns {scaled[0]}x{scaled[1]} into {sides[0]}x{sides[1]} on both sides",
        hint=OTHER_RULE,
    )
