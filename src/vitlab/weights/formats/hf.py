"""Names in the ViT and DINOv2 files of Hugging Face transformers.

Facts: transformers 5.22, `models/{vit,dinov2,dinov2_with_registers}` and `conversion_mapping.py`. `save_pretrained` writes
the classic names that it has written since 2020; version 5 renames them in memory only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.spec import GridResize, Pair, ViTSpec
from vitlab.weights.conventions import dinov2_preprocess, usual_preprocess
from vitlab.weights.formats import hf_settings
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import (
    as_file_problem,
    compare,
    confirm,
    depth_of,
    heads_of,
    number,
    read_size,
    require_plain,
    shape_of,
    tell_assumed,
)
from vitlab.weights.moves import JOINED, Move
from vitlab.weights.rules import Rule, spell_drop

_BLOCK = r"blocks\.(\d+)\."
_CLASSES = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}  # by `model_type`
_KERNEL = "embeddings.patch_embeddings.projection.weight"
_SETTINGS = {"heads": "num_attention_heads", "gelu": "hidden_act", "norm_eps": "layer_norm_eps"}
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
    names = _names_in(arrays, prefix)
    return all(f"{prefix}{names.layers}0.{part}.weight" in arrays for part in (names.q, names.norm1))


def read_dialect(arrays: Mapping[str, Tensor]) -> HFDialect:
    return HFDialect(bare=not _prefix(arrays), in_memory=any(".attention.q_proj." in name for name in arrays))


def leftovers(arrays: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Arrays without effect: the mask token, and a pooler beside a classifier."""
    pooler = ("pooler.dense.weight", "pooler.dense.bias") if "classifier.weight" in arrays else ()
    return tuple(name for name in arrays if name.endswith(("embeddings.mask_token", *pooler)))


def read_spec(
    arrays: Mapping[str, Tensor], origin: str, config: Mapping[str, Any] | None = None, grid: Pair | None = None
) -> ViTSpec:
    """The spec that these arrays fill. `config` is the `config.json` beside them; without it transformers' defaults hold."""
    options, prefix = dict(config or {}), _prefix(arrays) or ""
    hf_settings.require_model_type(options, list(_CLASSES), origin)
    names, pos = _names_in(arrays, prefix), f"{prefix}embeddings.position_embeddings"
    width, channels, patch, other = shape_of(arrays, prefix + _KERNEL, 4, origin)
    scaled = f"{prefix}{names.layers}0.layer_scale1.lambda1" in arrays
    if scaled and f"{prefix}{names.layers}0.mlp.weights_in.weight" in arrays:
        raise FileProblem(f"{origin} has SwiGLU blocks, as DINOv2's ViT-g/14; vitlab has the paper's MLP only")
    if scaled and "classifier.weight" in arrays:
        raise FileProblem(
            f"{origin}: transformers' DINOv2 classifier reads the class token and the mean of the patches together",
            hint=f"vitlab has no such head; leave it out with {spell_drop('classifier')}.",
        )
    mlp_dim = shape_of(arrays, f"{prefix}{names.layers}0.{names.fc1}.weight", 2, origin)[0]
    shape_of(arrays, pos, 3, origin)
    size, _ = read_size(arrays, pos, (1,), patch, options.get("image_size"), origin, grid=grid)
    act, registers = options.get("hidden_act", "gelu"), f"{prefix}embeddings.register_tokens"
    pooled = f"{prefix}pooler.dense.weight" in arrays and "classifier.weight" not in arrays
    if patch != other or not isinstance(act, str) or act not in _GELUS:
        raise FileProblem(f"{origin} has {'the activation ' + repr(act) if patch == other else 'oblong patches'}")
    if pooled and options.get("pooler_act", "tanh") != "tanh":
        raise FileProblem(f"{origin} pools through {options['pooler_act']!r}; the paper's layer is a tanh")
    count = shape_of(arrays, registers, 3, origin)[1] if registers in arrays else 0
    if (count and not scaled) or (scaled and mlp_dim % width):
        raise FileProblem(f"{origin} is neither a ViT nor a DINOv2 as transformers has them")
    depth = depth_of(arrays, prefix + names.layers, origin)
    held = {"num_hidden_layers": depth, "hidden_size": width, "intermediate_size": mlp_dim, "patch_size": patch}
    confirm(options, held, origin)
    with as_file_problem(origin):
        return ViTSpec(
            width=width,
            depth=depth,
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


def rules(spec: ViTSpec, dialect: HFDialect) -> list[Rule]:
    _require_expressible(spec)
    prefix = "" if dialect.bare else f"{_model_type(spec)}."
    scaled = spec.layer_scale is not None
    names = _names(scaled=scaled, in_memory=dialect.in_memory)
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


def assumptions(spec: ViTSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What only the `config.json` tells."""
    return tell_assumed(spec, config, {**_SETTINGS, "image_size": "image_size"})


def differences(spec: ViTSpec) -> tuple[str, ...]:
    """What transformers will compute otherwise than `spec` says and no key of its config mends."""
    return compare(spec, {"pos_resize": _resize(spec.registers)})


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


def _names(*, scaled: bool, in_memory: bool) -> _Names:
    names = _DINO if scaled else _MEMORY if in_memory else _CLASSIC
    return dataclasses.replace(names, **_QKV_MEMORY) if in_memory else names


def _names_in(arrays: Mapping[str, Tensor], prefix: str) -> _Names:
    scaled = f"{prefix}encoder.layer.0.layer_scale1.lambda1" in arrays
    return _names(scaled=scaled, in_memory=read_dialect(arrays).in_memory)


def _prefix(arrays: Mapping[str, Tensor]) -> str | None:
    return next((prefix for prefix in (*(f"{kind}." for kind in _CLASSES), "") if prefix + _KERNEL in arrays), None)


def _model_type(spec: ViTSpec) -> str:
    return "vit" if spec.layer_scale is None else "dinov2_with_registers" if spec.registers else "dinov2"


def _require_expressible(spec: ViTSpec) -> None:
    require_plain("transformers", spec)
    if spec.stem or not spec.uses_cls or spec.pos == "none":
        raise UsageError("transformers has plain ViTs with a class token and learned positions only, and no hybrids")
    if not spec.cls_in_pos:
        raise UsageError(
            "transformers' ViT has a position for the class token, this model has none",
            hint="Add one of zeros with --cls-in-pos: the model computes the same.",
        )
    if spec.registers and spec.layer_scale is None:
        raise UsageError("transformers has registers in its DINOv2 only, where every block has layer scale")
    if spec.layer_scale is not None and (spec.num_classes or spec.head != "linear" or spec.mlp_dim % spec.width):
        raise UsageError(
            "transformers' DINOv2 has no linear head on the class token, and its MLP is a whole multiple of the width",
            hint=f"Leave the head out with {spell_drop('head')}.",
        )


# --- beside the weights -----------------------------------------------------------------------------------------------


def config_json(spec: ViTSpec, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The `config.json` beside the weights in a transformers folder."""
    _require_expressible(spec)
    kind = _model_type(spec)
    return hf_settings.config_json(spec, kind, _CLASSES[kind], _config_body(spec), labels)


def _config_body(spec: ViTSpec) -> dict[str, Any]:
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


FORMATS = (
    Format(
        name="hf",
        spec=ViTSpec,
        dialect=HFDialect,
        recognises=lambda arrays, _: recognises(arrays),
        read_dialect=read_dialect,
        read_spec=read_spec,
        leftovers=leftovers,
        stated_by=_SETTINGS,
        preprocess_file=hf_settings.PREPROCESSOR,
        read_preprocess=hf_settings.read_preprocess,
        assumptions=assumptions,
        rules=rules,
        preprocess=lambda spec, _: usual_preprocess(spec, {}) if spec.layer_scale is None else dinov2_preprocess(spec),
        usual_dialect=lambda spec, _: {"bare": not spec.num_classes},  # as `save_pretrained` does
        notes=lambda spec, rule, _: [*hf_settings.notes(rule), *differences(spec)],
        folder=lambda spec, rule, labels: hf_settings.folder(config_json(spec, labels), rule),
    ),
)
