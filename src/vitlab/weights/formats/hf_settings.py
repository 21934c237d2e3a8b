"""Settings files of a transformers folder, both ways, and the shard index.

Facts: transformers 5.22, `models/{vit,bit,dinov2,dinov2_with_registers}`, their configurations and image processors.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.core import config as typed
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.spec import ModelSpec
from vitlab.weights.formats.readings import (
    OTHER_RULE,
    class_names,
    exact_rule,
    is_whole,
    preprocess_difference,
    read_exact_rule,
)

# --- config.json ------------------------------------------------------------------------------------------------------


def require_model_type(settings: Mapping[str, Any], types: Sequence[str], origin: str) -> None:
    kind = settings.get("model_type")
    if kind is not None and kind not in types:
        raise FileProblem(f"{origin} is not one of transformers' {', '.join(types)}, but {kind!r}")


def config_json(
    spec: ModelSpec, model_type: str, class_name: str, body: Mapping[str, Any], labels: Sequence[str]
) -> dict[str, Any]:
    """Write `config.json`; without `labels`, classes are LABEL_0 and so on."""
    if labels and len(labels) != spec.num_classes:
        raise UsageError(f"{len(labels)} labels were given for {spec.num_classes} classes")
    names = labels or [f"LABEL_{index}" for index in range(spec.num_classes)]
    classes = {
        "id2label": {str(index): name for index, name in enumerate(names)},
        # Of two classes with one name (ImageNet has such), the first is found by it.
        "label2id": {name: index for index, name in reversed(list(enumerate(names)))},
    }
    return {
        "architectures": [class_name + ("ForImageClassification" if spec.num_classes else "Model")],
        "model_type": model_type,
        "num_channels": spec.in_channels,
        **body,
        **(classes if spec.num_classes else {}),
    }


def folder(config: dict[str, Any], preprocess: Preprocess) -> dict[str, dict[str, Any]]:
    """What lies beside the weights in a transformers folder."""
    return {"config.json": config, PREPROCESSOR: preprocessor_json(preprocess)}


def notes(preprocess: Preprocess) -> list[str]:
    """What transformers has no setting for."""
    return [*filter(None, [preprocess_difference("transformers'", preprocess)])]


def read_labels(config: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], str | None]:
    """Read the class names, else use numbers, with a note where that is a surprise."""
    table = config.get("id2label", {str(index): str(index) for index in range(count)})
    named: dict[str, Any] = {str(index): name for index, name in table.items()} if isinstance(table, Mapping) else {}
    return class_names([named[str(index)] for index in range(len(named)) if str(index) in named], count)


# --- preprocessor_config.json -----------------------------------------------------------------------------------------

PREPROCESSOR = "preprocessor_config.json"
_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
_HALF, CLIP = (0.5, 0.5, 0.5), ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
# What each processor does where its file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"do_center_crop": False, "resample": 2, "image_mean": _HALF, "image_std": _HALF, "size": 224},
    "Bit": {"do_center_crop": True, "resample": 3, "image_mean": CLIP[0], "image_std": CLIP[1], "size": 224},
}


def preprocessor_json(preprocess: Preprocess) -> dict[str, Any]:
    """Write `preprocessor_config.json` for a ViT or, with a crop, a Bit processor."""
    return {**_nearest(preprocess), **exact_rule(preprocess)}


def _nearest(preprocess: Preprocess) -> dict[str, Any]:
    """The preprocessing, as far as transformers has settings for it."""
    rows, cols = preprocess.image_size
    if preprocess.mode != "RGB":
        raise UsageError("transformers' processors turn every image into RGB; this preprocessing does not")
    shared = {
        "do_resize": True,
        # Its processors fail on Pillow's box filter; antialiased bilinear is the nearest to an area filter that they can do.
        "resample": _RESAMPLE.get(preprocess.filter, _RESAMPLE["bilinear"]),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    scaled = {"height": round(rows / preprocess.crop_frac), "width": round(cols / preprocess.crop_frac)}
    if preprocess.resize == "squash" and preprocess.crop_frac == 1:
        return {"image_processor_type": "ViTImageProcessor", **shared, "size": scaled}
    if preprocess.resize == "shorter-side" and rows != cols:
        raise UsageError("transformers scales by the shorter side for square crops only", hint=OTHER_RULE)
    size = scaled if preprocess.resize == "squash" else {"shortest_edge": scaled["height"]}
    crop = {"do_center_crop": True, "crop_size": {"height": rows, "width": cols}, "do_convert_rgb": True}
    return {"image_processor_type": "BitImageProcessor", **shared, "size": size, **crop}


def read_preprocess(config: Mapping[str, Any]) -> Preprocess:
    """From a `preprocessor_config.json` of a ViT or Bit processor, old or new."""
    if (exact := read_exact_rule(config, config, _nearest)) is not None:
        return exact
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "ViT")
    kind = next((kind for kind in _DEFAULTS if name.startswith(kind)), None)
    if kind is None:
        raise UsageError(f"vitlab reads the settings of ViT and Bit image processors, not of {name}")
    settings = {**_DEFAULTS[kind], **config}
    resample = next((name for name, number_ in _RESAMPLE.items() if settings["resample"] == number_), None)
    rescale = settings.get("rescale_factor", 1 / 255)
    # Files of the first years have no rescaling in them, because it could not be turned off.
    if not settings.get("do_resize", True) or not settings.get("do_rescale", True) or resample is None:
        raise UsageError("this image processor does not resize bilinearly or bicubically, or does not rescale")
    if not isinstance(rescale, float) or abs(rescale * 255 - 1) > 1e-6:
        raise UsageError(f"this image processor multiplies by {rescale!r} and not by 1/255")
    scaled, shorter = _read_scaled(settings["size"], square=kind == "ViT")
    size = _read_sides(settings.get("crop_size", settings["size"])) if settings["do_center_crop"] else scaled
    if shorter and not settings["do_center_crop"]:
        raise UsageError("this image processor scales the shorter side and crops nothing, so images keep their shape")
    frac = size[0] / scaled[0]
    if round(size[1] / frac) != scaled[1] or (shorter and size[0] != size[1]):
        raise UsageError(f"this image processor crops {size} out of {scaled}, which is not a single fraction")
    normalised = settings.get("do_normalize", True)
    table = {
        "image_size": size,
        "resize": "shorter-side" if shorter else "squash",
        "crop_frac": frac,
        "filter": resample,
        "mean": settings["image_mean"] if normalised else (0.0, 0.0, 0.0),
        "std": settings["image_std"] if normalised else (1.0, 1.0, 1.0),
    }
    return typed.from_dict(Preprocess, table, "preprocess.")


def _read_scaled(size: Any, *, square: bool) -> tuple[tuple[int, int], bool]:
    """The size before the crop, and whether it is that of the shorter side only."""
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return _read_sides(size["shortest_edge"]), True
    return _read_sides(size), isinstance(size, int) and not square


def _read_sides(size: Any) -> tuple[int, int]:
    sides: tuple[Any, Any] = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    if not all(map(is_whole, sides)):
        raise UsageError(f"an image processor's size must be a whole number of pixels, not {size!r}")
    return sides


# --- model.safetensors.index.json ------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


def read_index(index: Mapping[str, Any], origin: str) -> tuple[str, ...]:
    """The shards of a large model, which must lie beside the index."""
    table = index.get("weight_map")
    names: list[Any] = list(table.values()) if isinstance(table, Mapping) else []
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise FileProblem(f"{origin} does not name .safetensors files beside it that hold the weights")
    return tuple(sorted(set(names)))
