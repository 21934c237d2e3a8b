"""Hugging Face transformers: the names, the config and the image processor of its ViT, BiT and DINOv2 models.

Facts: transformers 5.22, `models/{vit,bit,dinov2,dinov2_with_registers}` and `conversion_mapping.py`. `save_pretrained` writes
the classic names that it has written since 2020; version 5 renames them in memory only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.core import config as typed
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.spec import BiTSpec, GridResize, ModelSpec, ViTSpec
from vitlab.weights.formats.timm_keys import (
    TRUNK_CONVENTIONS,
    as_file_problem,
    compare,
    depth_of,
    heads_of,
    number,
    pair_of,
    read_size,
    read_trunk,
    require_plain,
    shape_of,
)
from vitlab.weights.moves import JOINED, Move
from vitlab.weights.rules import Rule

_BLOCK = r"blocks\.(\d+)\."
_PREFIXES = {"vit": "vit.", "bit": "bit.", "dinov2": "dinov2.", "dinov2_with_registers": "dinov2_with_registers."}
_KERNEL, _ROOT = "embeddings.patch_embeddings.projection.weight", "embedder.convolution.weight"
_ACTS = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}
_GELUS = {"gelu": "exact", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh"}  # the last two are one formula

# Stacked, because three parts of different lengths can add up to the right one.
_QKV = Move(lambda arrays: torch.stack(list(arrays)).flatten(0, 1), JOINED.outward)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFDialect:
    """What differs between files of the same model."""

    bare: bool = False  # saved from ViTModel, BitModel or Dinov2Model: no `vit.` in front
    in_memory: bool = False  # the names of a v5 state dict: `layers.0.attention.q_proj`


def recognises(arrays: Mapping[str, Tensor]) -> bool:
    prefix = _prefix(arrays)
    if prefix is None:
        return False
    if prefix + _ROOT in arrays:
        return f"{prefix}encoder.stages.0.layers.0.conv1.weight" in arrays
    names = _names(arrays, prefix)
    return all(f"{prefix}{names.layers}0.{part}.weight" in arrays for part in (names.q, names.norm1))


def read_dialect(arrays: Mapping[str, Tensor]) -> HFDialect:
    return HFDialect(bare=not _prefix(arrays), in_memory=any(".attention.q_proj." in name for name in arrays))


def default_dialect(spec: ModelSpec) -> HFDialect:
    """The names that `save_pretrained` gives: a model without a head is saved bare."""
    return HFDialect(bare=not spec.num_classes)


def leftovers(arrays: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Arrays that no answer depends on: the mask token of pre-training, and a pooler that the classifier passes by."""
    pooler = ("pooler.dense.weight", "pooler.dense.bias") if "classifier.weight" in arrays else ()
    return tuple(name for name in arrays if name.endswith(("embeddings.mask_token", *pooler)))


def read_spec(arrays: Mapping[str, Tensor], origin: str, config: Mapping[str, Any] | None = None) -> ModelSpec:
    """The spec that these arrays fill. `config` is the `config.json` beside them; without it transformers' defaults hold."""
    options, prefix = dict(config or {}), _prefix(arrays)
    kind = options.get("model_type")
    if prefix is None or (kind is not None and kind not in _PREFIXES):
        raise FileProblem(f"{origin} is not one of transformers' {', '.join(_PREFIXES)}, but {kind!r}")
    if prefix + _ROOT in arrays:
        return _read_bit(arrays, prefix, origin, options)
    return _read_vit(arrays, prefix, origin, options)


def rules(spec: ModelSpec, dialect: HFDialect) -> list[Rule]:
    _require_expressible(spec)
    prefix = "" if dialect.bare else _PREFIXES[_kind(spec)]
    if isinstance(spec, BiTSpec):
        return _bit_rules(prefix)
    scaled = spec.layer_scale is not None
    names = _DINO if scaled else _MEMORY if dialect.in_memory else _CLASSIC
    names = dataclasses.replace(names, **_QKV_MEMORY) if dialect.in_memory else names
    layer = rf"{prefix}{names.layers}\1."
    qkv = tuple(rf"{layer}{part}.\2" for part in (names.q, names.k, names.v))
    found = [
        Rule(r"cls", (f"{prefix}embeddings.cls_token",)),
        Rule(r"registers", (f"{prefix}embeddings.register_tokens",)),
        Rule(r"pos\.table", (f"{prefix}embeddings.position_embeddings",)),
        Rule(r"embed\.(\w+)", (rf"{prefix}embeddings.patch_embeddings.projection.\1",)),
        Rule(_BLOCK + r"norm1\.(\w+)", (rf"{layer}{names.norm1}.\2",)),
        Rule(_BLOCK + r"norm2\.(\w+)", (rf"{layer}{names.norm2}.\2",)),
        Rule(_BLOCK + r"attn\.qkv\.(\w+)", qkv, _QKV),
        Rule(_BLOCK + r"attn\.proj\.(\w+)", (rf"{layer}{names.out}.\2",)),
        Rule(_BLOCK + r"mlp\.fc1\.(\w+)", (rf"{layer}{names.fc1}.\2",)),
        Rule(_BLOCK + r"mlp\.fc2\.(\w+)", (rf"{layer}{names.fc2}.\2",)),
        Rule(_BLOCK + r"scale(\d)", (layer + r"layer_scale\2.lambda1",)),
        Rule(r"norm\.(\w+)", (rf"{prefix}layernorm.\1",)),
        Rule(r"head\.(\w+)", (r"classifier.\1",)),
    ]
    if not spec.num_classes and not scaled:  # ViTForImageClassification has no pooler
        found.append(Rule(r"pre_logits\.(\w+)", (rf"{prefix}pooler.dense.\1",)))
    return found


def differences(spec: ModelSpec) -> tuple[str, ...]:
    """What transformers will compute otherwise than `spec` says and no key of its config mends."""
    if isinstance(spec, BiTSpec):
        return compare(spec.trunk, {**TRUNK_CONVENTIONS, "padding": "fixed"}, "trunk.")
    return compare(spec, {"pos_resize": _resize(spec.registers)})


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_vit(arrays: Mapping[str, Tensor], prefix: str, origin: str, options: Mapping[str, Any]) -> ViTSpec:
    names, pos = _names(arrays, prefix), f"{prefix}embeddings.position_embeddings"
    width, channels, patch, other = shape_of(arrays, prefix + _KERNEL, 4, origin)
    scaled = f"{prefix}{names.layers}0.layer_scale1.lambda1" in arrays
    if scaled and f"{prefix}{names.layers}0.mlp.weights_in.weight" in arrays:
        raise FileProblem(f"{origin} has SwiGLU blocks, as DINOv2's ViT-g/14; vitlab has the paper's MLP only")
    if scaled and "classifier.weight" in arrays:
        raise FileProblem(
            f"{origin}: transformers' DINOv2 classifier reads the class token and the mean of the patches together",
            hint="vitlab has no such head; leave it out with --drop classifier.",
        )
    mlp_dim = shape_of(arrays, f"{prefix}{names.layers}0.{names.fc1}.weight", 2, origin)[0]
    shape_of(arrays, pos, 3, origin)
    size, _ = read_size(arrays, pos, (1,), patch, options.get("image_size"), origin)
    act, registers = options.get("hidden_act", "gelu"), f"{prefix}embeddings.register_tokens"
    pooled = f"{prefix}pooler.dense.weight" in arrays and "classifier.weight" not in arrays
    if patch != other or not isinstance(act, str) or act not in _GELUS:
        raise FileProblem(f"{origin} has {'the activation ' + repr(act) if patch == other else 'oblong patches'}")
    if pooled and options.get("pooler_act", "tanh") != "tanh":
        raise FileProblem(f"{origin} pools through {options['pooler_act']!r}; the paper's layer is a tanh")
    count = shape_of(arrays, registers, 3, origin)[1] if registers in arrays else 0
    if (count and not scaled) or (scaled and mlp_dim % width):
        raise FileProblem(f"{origin} is neither a ViT nor a DINOv2 as transformers has them")
    with as_file_problem(origin):
        return ViTSpec(
            width=width,
            depth=depth_of(arrays, prefix + names.layers, origin),
            mlp_dim=mlp_dim,
            heads=heads_of(width, mlp_dim, options.get("num_attention_heads"), origin),
            patch=patch,
            image_size=size,
            in_channels=channels,
            num_classes=shape_of(arrays, "classifier.weight", 2, origin)[0] if "classifier.weight" in arrays else 0,
            pos_resize=_resize(count) if scaled else "bicubic",
            head="mlp-tanh" if pooled else "linear",
            gelu="exact" if _GELUS[act] == "exact" else "tanh",
            norm_eps=number(options, "layer_norm_eps", 1e-6 if scaled else 1e-12, origin),
            layer_scale=number(options, "layerscale_value", 1.0, origin) if scaled else None,
            registers=count,
            dropout=number(options, "hidden_dropout_prob", 0.0, origin),
            attention_dropout=number(options, "attention_probs_dropout_prob", 0.0, origin),
        )


def _read_bit(arrays: Mapping[str, Tensor], prefix: str, origin: str, options: Mapping[str, Any]) -> BiTSpec:
    usual = {"layer_type": "preactivation", "hidden_act": "relu", "global_padding": None, "num_groups": 32}
    for key, value in usual.items():
        if options.get(key, value) != value:
            raise FileProblem(f"{origin} has {key}={options[key]!r}; a BiT ResNet has {value!r}")
    root = shape_of(arrays, prefix + _ROOT, 4, origin)
    head = shape_of(arrays, "classifier.1.weight", 2, origin)[0] if "classifier.1.weight" in arrays else 0
    pattern = prefix.replace(".", r"\.") + r"encoder\.stages\.(\d+)\.layers\.(\d+)\."
    trunk = read_trunk(arrays, root, pattern, origin, preact=True)
    with as_file_problem(origin):
        size = pair_of(options.get("image_size"), origin) or (224, 224)  # a ResNet takes images of any size
        return BiTSpec(trunk=trunk, image_size=size, in_channels=root[1], num_classes=head)


def _resize(registers: int) -> GridResize:
    """Only the model with registers antialiases."""
    return "bicubic-antialias" if registers else "bicubic"


# --- names ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Names:
    """Where a block keeps its parts."""

    layers: str = "encoder.layer."
    norm1: str = "layernorm_before"
    norm2: str = "layernorm_after"
    q: str = "attention.attention.query"
    k: str = "attention.attention.key"
    v: str = "attention.attention.value"
    out: str = "attention.output.dense"
    fc1: str = "mlp.fc1"
    fc2: str = "mlp.fc2"


_QKV_MEMORY = {"q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj", "out": "attention.o_proj"}
_CLASSIC = _Names(fc1="intermediate.dense", fc2="output.dense")
_MEMORY = _Names(layers="layers.")
_DINO = _Names(norm1="norm1", norm2="norm2")


def _names(arrays: Mapping[str, Tensor], prefix: str) -> _Names:
    in_memory = read_dialect(arrays).in_memory
    dino = f"{prefix}encoder.layer.0.layer_scale1.lambda1" in arrays
    names = _DINO if dino else _MEMORY if in_memory else _CLASSIC
    return dataclasses.replace(names, **_QKV_MEMORY) if in_memory else names


def _prefix(arrays: Mapping[str, Tensor]) -> str | None:
    found = (prefix for prefix in (*_PREFIXES.values(), "") if prefix + _KERNEL in arrays or prefix + _ROOT in arrays)
    return next(found, None)


def _bit_rules(prefix: str) -> list[Rule]:
    unit, layer = r"trunk\.stages\.(\d+)\.(\d+)\.", prefix + r"encoder.stages.\1.layers.\2."
    return [
        Rule(r"trunk\.root\.weight", (prefix + _ROOT,)),
        Rule(unit + r"((?:conv|norm)\d\.\w+)", (layer + r"\3",)),
        Rule(unit + r"proj\.weight", (layer + "downsample.conv.weight",)),
        Rule(r"(norm\.\w+)", (prefix + r"\1",)),
        Rule(r"head\.(\w+)", (r"classifier.1.\1",)),
    ]


def _kind(spec: ModelSpec) -> str:
    if isinstance(spec, BiTSpec):
        return "bit"
    return "vit" if spec.layer_scale is None else "dinov2_with_registers" if spec.registers else "dinov2"


def _require_expressible(spec: ModelSpec) -> None:
    if isinstance(spec, BiTSpec):
        return
    require_plain("transformers", spec)
    if spec.stem or not spec.uses_cls or spec.pos == "none":
        raise UsageError("transformers has plain ViTs with a class token and learned positions only, and no hybrids")
    if not spec.cls_in_pos:
        raise UsageError(
            "transformers' ViT has a position for the class token, this model has none",
            hint="Add a class position of zeros first.",
        )
    if spec.registers and spec.layer_scale is None:
        raise UsageError("transformers has registers in its DINOv2 only, where every block has layer scale")
    if spec.layer_scale is not None and (spec.num_classes or spec.head != "linear" or spec.mlp_dim % spec.width):
        raise UsageError(
            "transformers' DINOv2 has no linear head on the class token, and its MLP is a whole multiple of the width",
            hint="Leave the head out with --drop head.",
        )


# --- config.json ------------------------------------------------------------------------------------------------------


def config_json(spec: ModelSpec, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The config beside the weights. Without `labels`, classes are called as transformers calls them, LABEL_0 and so on."""
    _require_expressible(spec)
    if labels and len(labels) != spec.num_classes:
        raise UsageError(f"{len(labels)} labels were given for {spec.num_classes} classes")
    names = labels or [f"LABEL_{index}" for index in range(spec.num_classes)]
    body = _bit_config(spec) if isinstance(spec, BiTSpec) else _vit_config(spec)
    kind = _kind(spec)
    class_name = {"vit": "ViT", "bit": "Bit", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[kind]
    classes = {
        "id2label": {str(index): name for index, name in enumerate(names)},
        # Of two classes with one name (ImageNet has such), the first is found by it.
        "label2id": {name: index for index, name in reversed(list(enumerate(names)))},
    }
    return {
        "architectures": [class_name + ("ForImageClassification" if spec.num_classes else "Model")],
        "model_type": kind,
        "num_channels": spec.in_channels,
        **body,
        **(classes if spec.num_classes else {}),
    }


def _vit_config(spec: ViTSpec) -> dict[str, Any]:
    rows, cols = spec.image_size
    shared = {
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.heads,
        "hidden_act": _ACTS[spec.gelu],
        "hidden_dropout_prob": spec.dropout,
        "attention_probs_dropout_prob": spec.attention_dropout,
        "layer_norm_eps": spec.norm_eps,
        "image_size": rows if rows == cols else [rows, cols],
        "patch_size": spec.patch,
        "qkv_bias": True,
    }
    if spec.layer_scale is None:
        pooler = {"pooler_act": "tanh", "pooler_output_size": spec.width}
        return {**shared, "intermediate_size": spec.mlp_dim, "encoder_stride": spec.patch, **pooler}
    # The mask token is not in our files; `use_mask_token` is a key of the model without registers only.
    extra = {"num_register_tokens": spec.registers} if spec.registers else {"use_mask_token": False}
    scale = {"layerscale_value": spec.layer_scale, "mlp_ratio": spec.mlp_dim // spec.width, "use_swiglu_ffn": False}
    return {**shared, **scale, **extra}


def _bit_config(spec: BiTSpec) -> dict[str, Any]:
    trunk = spec.trunk
    return {
        "embedding_size": trunk.root_width,
        # transformers forgets `width_factor` at its last norm, so the sizes themselves carry the width.
        "hidden_sizes": [4 * trunk.root_width * 2**stage for stage in range(len(trunk.stages))],
        "width_factor": 1,
        "depths": list(trunk.stages),
        "layer_type": "preactivation",
        "hidden_act": "relu",
        "global_padding": None,
        "num_groups": 32,
        "output_stride": max(32, trunk.stride),
        "embedding_dynamic_padding": False,
    }


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The class names of a `config.json`, in order; empty where they are not whole."""
    table = config.get("id2label")
    if not isinstance(table, Mapping):
        return ()
    named = {str(index): str(name) for index, name in table.items()}
    wanted = [str(index) for index in range(len(named))]
    return tuple(named[index] for index in wanted) if named.keys() == set(wanted) else ()


# --- preprocessor_config.json -----------------------------------------------------------------------------------------

_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
_HALF, _CLIP = (0.5, 0.5, 0.5), ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
# What each processor does where its file is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"do_center_crop": False, "resample": 2, "image_mean": _HALF, "image_std": _HALF, "size": 224},
    "Bit": {"do_center_crop": True, "resample": 3, "image_mean": _CLIP[0], "image_std": _CLIP[1], "size": 224},
}


def preprocessor_json(preprocess: Preprocess) -> dict[str, Any]:
    """`preprocessor_config.json`: a ViTImageProcessor, or a BitImageProcessor where something is cropped."""
    rows, cols = preprocess.image_size
    if preprocess.mode != "RGB" or not preprocess.antialias:
        raise UsageError(
            "transformers' processors turn every image into RGB and antialias; this preprocessing does not"
        )
    shared = {
        "do_resize": True,
        "resample": _RESAMPLE[preprocess.filter],
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
        raise UsageError("transformers scales by the shorter side for square crops only", hint="Set resize=squash.")
    size = scaled if preprocess.resize == "squash" else {"shortest_edge": scaled["height"]}
    crop = {"do_center_crop": True, "crop_size": {"height": rows, "width": cols}, "do_convert_rgb": True}
    return {"image_processor_type": "BitImageProcessor", **shared, "size": size, **crop}


def read_preprocess(config: Mapping[str, Any]) -> Preprocess:
    """From a `preprocessor_config.json` of a ViT or Bit processor, old or new."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "ViT")
    kind = next((kind for kind in _DEFAULTS if name.startswith(kind)), None)
    if kind is None:
        raise UsageError(f"vitlab reads the settings of ViT and Bit image processors, not of {name}")
    told = {**_DEFAULTS[kind], **config}
    resample = next((name for name, number_ in _RESAMPLE.items() if told["resample"] == number_), None)
    rescale = told.get("rescale_factor", 1 / 255)
    # Files of the first years have no rescaling in them, because it could not be turned off.
    if not told.get("do_resize", True) or not told.get("do_rescale", True) or resample is None:
        raise UsageError("this image processor does not resize bilinearly or bicubically, or does not rescale")
    if not isinstance(rescale, float) or abs(rescale * 255 - 1) > 1e-6:
        raise UsageError(f"this image processor multiplies by {rescale!r} and not by 1/255")
    scaled, shorter = _read_scaled(told["size"], square=kind == "ViT")
    size = _read_sides(told.get("crop_size", told["size"])) if told["do_center_crop"] else scaled
    if shorter and not told["do_center_crop"]:
        raise UsageError("this image processor scales the shorter side and crops nothing, so images keep their shape")
    frac = size[0] / scaled[0]
    if round(size[1] / frac) != scaled[1] or (shorter and size[0] != size[1]):
        raise UsageError(f"this image processor crops {size} out of {scaled}, which is no single fraction")
    normalised = told.get("do_normalize", True)
    table = {
        "image_size": size,
        "resize": "shorter-side" if shorter else "squash",
        "crop_frac": frac,
        "filter": resample,
        "mean": told["image_mean"] if normalised else (0.0, 0.0, 0.0),
        "std": told["image_std"] if normalised else (1.0, 1.0, 1.0),
    }
    return typed.from_dict(Preprocess, table, "preprocess.")


def _read_scaled(size: Any, *, square: bool) -> tuple[tuple[int, int], bool]:
    """The size before the crop, and whether it is only the shorter side's. Old files have one number for either."""
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return _read_sides(size["shortest_edge"]), True
    return _read_sides(size), isinstance(size, int) and not square


def _read_sides(size: Any) -> tuple[int, int]:
    sides: tuple[Any, Any] = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise UsageError(f"an image processor's size must be a whole number of pixels, not {size!r}")
    return sides
