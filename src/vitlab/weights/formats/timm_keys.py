"""timm's names for plain ViTs and hybrids, and its constructor arguments.

Facts: timm 1.0.30, `models/vision_transformer.py` and `vision_transformer_hybrid.py`.
"""

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.sizes import VIT_SIZES
from vitlab.models.spec import ModelSpec, Pair, TrunkSpec, ViTSpec
from vitlab.weights.formats import timm_settings
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import (
    as_file_problem,
    compare,
    confirm,
    depth_of,
    heads_of,
    is_whole,
    number,
    read_size,
    read_trunk,
    require_known,
    require_plain,
    shape_of,
    tell_assumed,
    trunk_differences,
)
from vitlab.weights.rules import Rule

STEM = "patch_embed.backbone."
_POOLS = {"cls": "token", "gap": "avg", "map": "map"}  # ours -> timm's `global_pool`

# What timm computes whatever the weights are, in the words of our spec.
_CONVENTIONS: dict[str, Any] = {"norm_eps": 1e-6, "pos_resize": "bicubic-antialias"}
# Relatives of the ViT that have its names and something more or less.
STRANGE = {
    r"fc_norm\.": "pools first and normalises afterwards (fc_norm)",
    r"norm_pre\.": "normalises before its first block (norm_pre), as CLIP does",
    r"dist_token|head_dist\.": "has a distillation token beside the class token, as DeiT does",
    r"blocks\.0\.attn\.proj_l\.": "mixes its heads, as CaiT does",
    r"blocks\.0\.gamma_1": "scales its blocks as BEiT and EVA do, which have other positions too",
    r"blocks\.0\.mlp\.(w12|fc1_g)\.": "has gated MLPs (SwiGLU)",
    r".+\.running_mean": "has BatchNorm",
}
_LAYER_SCALE = 1e-5  # timm's `init_values`; where training starts, not what the arrays hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimmDialect:
    """`pre_logits`: whether the file has that layer, as old timm files do."""

    pre_logits: bool = False


def recognises(arrays: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None) -> bool:
    """Plain and hybrid ViTs. A file by the names of DINOv2 is timm's only where its settings name an architecture."""
    return has_vit_names(arrays) and ("architecture" in (settings or {}) or not has_dinov2_names(arrays))


def has_vit_names(arrays: Mapping[str, Tensor]) -> bool:
    return "patch_embed.proj.weight" in arrays and "blocks.0.attn.qkv.weight" in arrays


def has_dinov2_names(arrays: Mapping[str, Tensor]) -> bool:
    """Whether Meta may have written it; only a `config.json` tells timm's apart."""
    is_meta = "mask_token" in arrays or "register_tokens" in arrays
    foreign = any(name in arrays for name in ("head.weight", "reg_token", "attn_pool.latent"))
    return "blocks.0.ls1.gamma" in arrays and "cls_token" in arrays and (is_meta or not foreign)


def read_dialect(arrays: Mapping[str, Tensor]) -> TimmDialect:
    return TimmDialect(pre_logits="pre_logits.fc.weight" in arrays)


def read_spec(
    arrays: Mapping[str, Tensor], origin: str, config: Mapping[str, Any] | None = None, grid: Pair | None = None
) -> ViTSpec:
    """Derive the spec from the arrays and timm's `config.json` or arguments."""
    # Registers own positions in timm unless the class token has none either (`no_embed_class`).
    return read_vit(arrays, origin, config, grid, slots=(0,) if "reg_token" in arrays else (1, 0))


def read_vit(
    arrays: Mapping[str, Tensor],
    origin: str,
    config: Mapping[str, Any] | None,
    grid: Pair | None,
    slots: Sequence[int],
) -> ViTSpec:
    """`slots`: how many positions the class token may own."""
    require_known(arrays, STRANGE, origin)
    _require_plain_blocks(arrays, origin)
    options = options_of(config)
    width, channels, patch, other = shape_of(arrays, "patch_embed.proj.weight", 4, origin)
    mlp_dim = shape_of(arrays, "blocks.0.mlp.fc1.weight", 2, origin)[0]
    stem = _read_stem(arrays, origin)
    pool = "map" if "attn_pool.latent" in arrays else "cls" if "cls_token" in arrays else "gap"
    if patch != other or (pool == "map" and "cls_token" in arrays):
        raise FileProblem(
            f"{origin} has {'a class token beside attention pooling' if patch == other else 'oblong patches'}"
        )
    has_pos = "pos_embed" in arrays
    if has_pos == (options.get("pos_embed", "learn") in ("", "none")):
        raise FileProblem(
            f"{origin} {'has' if has_pos else 'lacks'} pos_embed, but is to be a model "
            f"{'without' if has_pos else 'with'} positions",
            hint="Models with rotary positions are not known; those without any are built with pos_embed=none.",
        )
    if options.get("global_pool") not in (None, "", _POOLS[pool]):
        raise FileProblem(
            f"{origin} is configured to pool by '{options['global_pool']}', but holds a model for '{_POOLS[pool]}'"
        )
    stride = patch * (stem.stride if stem else 1)
    slots = slots if pool == "cls" else (0,)
    size, has_slot = read_size(
        arrays, "pos_embed", slots, stride, options.get("img_size"), origin, input_size(options), grid
    )
    scaled = "blocks.0.ls1.gamma" in arrays
    depth = depth_of(arrays, "blocks.", origin)
    confirm(options, {"depth": depth, "embed_dim": width, "patch_size": patch}, origin)
    with as_file_problem(origin):
        return ViTSpec(
            width=width,
            depth=depth,
            mlp_dim=mlp_dim,
            heads=heads_of(width, mlp_dim, options.get("num_heads"), origin),
            patch=patch,
            image_size=size,
            in_channels=_root_shape(arrays, origin)[1] if stem else channels,
            num_classes=shape_of(arrays, "head.weight", 2, origin)[0] if "head.weight" in arrays else 0,
            stem=stem,
            pool=pool,
            pos="learned" if has_pos else "none",
            cls_in_pos=has_slot or pool != "cls" or not has_pos,
            pos_resize="bicubic-antialias",
            head="mlp-tanh" if "pre_logits.fc.weight" in arrays else "linear",
            gelu=_gelu(options.get("act_layer"), origin),
            norm_eps=1e-6,
            layer_scale=number(options, "init_values", _LAYER_SCALE, origin) if scaled else None,
            registers=shape_of(arrays, "reg_token", 3, origin)[1] if "reg_token" in arrays else 0,
        )


def _require_plain_blocks(arrays: Mapping[str, Tensor], origin: str) -> None:
    """Refuse relatives without biases, or with gated MLPs."""
    for name, what in {
        "patch_embed.proj.bias": "patches",
        "blocks.0.attn.qkv.bias": "queries, keys and values",
    }.items():
        if name not in arrays:
            raise FileProblem(f"{origin} has no bias on its {what} (it lacks {name}); vitlab has no such model")
    inner, outer = (shape_of(arrays, f"blocks.0.mlp.{layer}.weight", 2, origin) for layer in ("fc1", "fc2"))
    if inner[0] == 2 * outer[1]:
        raise FileProblem(f"{origin} has gated MLPs (SwiGLU); vitlab has no such model")


def assumptions(spec: ViTSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a file of timm leaves to whoever reads it."""
    options = options_of(config)
    stated = {**options, "img_size": options.get("img_size") or input_size(options)}
    return tell_assumed(spec, stated, {"heads": "num_heads", "gelu": "act_layer", "image_size": "img_size"})


def rules(spec: ViTSpec, dialect: TimmDialect) -> list[Rule]:
    _require_expressible(spec)
    return vit_rules(spec, dialect)


def _require_expressible(spec: ViTSpec) -> None:
    require_plain("timm", spec)
    if spec.registers and spec.uses_cls and spec.cls_in_pos and spec.pos == "learned":
        raise UsageError(
            "timm's models with registers keep no position for the class token",
            hint="Fold it into the token with --no-cls-in-pos: the model computes the same.",
        )


def vit_rules(spec: ViTSpec, dialect: TimmDialect, registers: str = "reg_token") -> list[Rule]:
    found = [
        Rule(r"cls", ("cls_token",)),
        Rule(r"registers", (registers,)),
        Rule(r"pos\.table", ("pos_embed",)),
        Rule(r"embed\.(\w+)", (r"patch_embed.proj.\1",)),
        Rule(r"(blocks\.\d+\.(?:norm|attn|mlp).+)", (r"\1",)),
        Rule(r"blocks\.(\d+)\.scale(\d)", (r"blocks.\1.ls\2.gamma",)),
        Rule(r"(norm\.\w+)", (r"\1",)),
        Rule(r"map\.probe", ("attn_pool.latent",)),
        Rule(r"map\.(.+\.\w+)", (r"attn_pool.\1",)),
        Rule(r"(head\.\w+)", (r"\1",)),
    ]
    if spec.stem:
        found += trunk_rules("stem", STEM, "stem." if spec.stem.stages else "")
    if dialect.pre_logits:
        found.append(Rule(r"pre_logits\.(\w+)", (r"pre_logits.fc.\1",)))
    return found


def differences(spec: ViTSpec) -> tuple[str, ...]:
    """What timm computes differently from `spec`, whatever its arguments."""
    stem = trunk_differences(spec.stem, "stem.") if spec.stem else ()
    return (*compare(spec, _CONVENTIONS), *stem)


def trunk_rules(ours: str, theirs: str, root: str = "stem.") -> list[Rule]:
    unit, block = rf"{ours}\.stages\.(\d+)\.(\d+)\.", theirs + r"stages.\1.blocks.\2."
    return [
        Rule(rf"{ours}\.root\.weight", (f"{theirs}{root}conv.weight",)),
        Rule(rf"{ours}\.root_norm\.(\w+)", (rf"{theirs}{root}norm.\1",)),
        Rule(unit + r"((?:conv|norm)\d\.\w+)", (block + r"\3",)),
        Rule(unit + r"proj\.weight", (block + "downsample.conv.weight",)),
        Rule(unit + r"proj_norm\.(\w+)", (block + r"downsample.norm.\3",)),
    ]


def _read_stem(arrays: Mapping[str, Tensor], origin: str) -> TrunkSpec | None:
    if not any(name.startswith(STEM) for name in arrays):
        return None
    return read_trunk(
        arrays, _root_shape(arrays, origin), STEM + r"stages\.(\d+)\.blocks\.(\d+)\.", origin, preact=False
    )


def _root_shape(arrays: Mapping[str, Tensor], origin: str) -> tuple[int, ...]:
    # Without stages (R+ViT-Ti/16) the backbone is its root and has no name for it.
    root_only = f"{STEM}conv.weight"
    return shape_of(arrays, root_only if root_only in arrays else f"{STEM}stem.conv.weight", 4, origin)


# --- what timm.create_model needs -------------------------------------------------------------------------------------

_SIZE_NAMES = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge", "g": "giant", "G": "gigantic"}
_PATCHES = {
    **{"tiny": (16,), "small": (8, 16, 32), "base": (8, 16, 32), "large": (14, 16, 32)},
    **{"huge": (14,), "giant": (14,), "gigantic": (14,)},
}
# Each hybrid entry point brings its backbone, which no argument changes; the Transformer behind it is free.
_HYBRIDS: dict[tuple[tuple[int, ...], int], tuple[str, str]] = {
    ((), 8): ("vit_tiny_r_s16_p8_224", "Ti"),
    ((2, 2, 2, 2), 1): ("vit_small_r26_s32_224", "S"),
    ((3, 4, 9), 1): ("vit_base_r50_s16_224", "B"),
    ((3, 4, 6, 3), 1): ("vit_large_r50_s32_224", "L"),
}


def create_args(spec: ViTSpec, images: Pair | None = None) -> dict[str, Any] | None:
    """Arguments for `timm.create_model`; None if timm has no such model.

    `images` is their size where it may be another than that of the positions: timm resizes those only if asked to.
    """
    with contextlib.suppress(UsageError):
        _require_expressible(spec)
        args = _vit_args(spec) if spec.head == "linear" else None
        return args and {**args, **({} if images in (None, spec.image_size) else {"dynamic_img_size": True})}
    return None


def entry_of(spec: ViTSpec, images: Pair | None = None) -> timm_settings.TimmEntry:
    """timm's entry point for this model."""
    first = "patch_embed.proj"
    if spec.stem:
        first = f"{STEM}stem.conv" if spec.stem.stages else f"{STEM}conv"
    return timm_settings.TimmEntry(create_args(spec, images), first, classifier="head", fixed_input_size=True)


def _vit_args(spec: ViTSpec) -> dict[str, Any] | None:
    named = _named(spec)
    if named is None:
        return None
    name, label = named
    args = {"model_name": name, "img_size": _plain_size(spec.image_size), **shared_args(spec)}
    known = VIT_SIZES[label]
    changed: list[tuple[str, Any, Any]] = [
        ("embed_dim", spec.width, known.width),
        ("depth", spec.depth, known.depth),
        ("num_heads", spec.heads, known.heads),
        ("mlp_ratio", _mlp_ratio(spec.width, spec.mlp_dim), _mlp_ratio(known.width, known.mlp_dim)),
        ("act_layer", "gelu_tanh" if spec.gelu == "tanh" else "gelu", "gelu"),
        ("global_pool", _POOLS[spec.pool], "token"),
        ("class_token", spec.uses_cls, True),
        ("no_embed_class", bool(spec.registers) or not spec.cls_in_pos, False),
        ("reg_tokens", spec.registers, 0),
        ("init_values", spec.layer_scale, None),
        ("pos_embed", "none" if spec.pos == "none" else "learn", "learn"),
    ]
    args |= {key: value for key, value, usual in changed if value != usual}
    if name == "vit_base_patch16_224":  # also what sizes outside timm's list start from
        args |= {"patch_size": spec.patch} if spec.patch != 16 else {}
    if spec.pool == "gap":
        args["fc_norm"] = False  # timm would else pool first and normalise afterwards
    return args


def _named(spec: ViTSpec) -> tuple[str, str] | None:
    """An entry point of timm and the size it has by itself."""
    if spec.stem:
        return _HYBRIDS.get((spec.stem.stages, spec.patch)) if spec.stem.width_factor == 1 else None
    for label, word in _SIZE_NAMES.items():
        if VIT_SIZES[label] == (spec.width, spec.depth, spec.mlp_dim, spec.heads) and spec.patch in _PATCHES[word]:
            return f"vit_{word}_patch{spec.patch}_224", label
    return "vit_base_patch16_224", "B"


def shared_args(spec: ModelSpec) -> dict[str, Any]:
    return {"num_classes": spec.num_classes, **({"in_chans": spec.in_channels} if spec.in_channels != 3 else {})}


def _mlp_ratio(width: int, mlp_dim: int) -> float:
    """The ratio that timm's truncation turns into `mlp_dim`."""
    ratio = mlp_dim / width  # may come out a hair too small, and then is lifted by half a channel
    return ratio if int(width * ratio) == mlp_dim else (mlp_dim + 0.5) / width


def _plain_size(size: Pair) -> int | Pair:
    return size[0] if size[0] == size[1] else size


# --- options of timm --------------------------------------------------------------------------------------------------


_WIDTH_AND_HEADS = {
    **{word: (VIT_SIZES[label].width, VIT_SIZES[label].heads) for label, word in _SIZE_NAMES.items()},
    **{"medium": (512, 8), "so400m": (1152, 16), "giantopt": (1536, 16)},
}
_VIT_NAME = re.compile(
    rf"(?:vit|deit3?|flexivit)_({'|'.join(_WIDTH_AND_HEADS)})(?:_patch\d+|_r\d*_s\d+)?"
    r"(?:_(?:p8|gap|siglip|36x1|dinov2|reg\d|tipsv2))*(?:_\d{3})?"
)
_EXCEPTIONS = {
    "test_vit": (64, 2),
    "vit_base_patch16_gap_224": (768, 16),
    "vit_base_patch16_plus_240": (896, 14),
    "vit_base_patch32_plus_256": (896, 14),
}
_WITH_TANH = re.compile(r"vit_((giantopt|so400m)_patch16|base_patch32)_siglip_.*|vit_large_patch16_siglip_(gap_)?512")


def options_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """timm's options in a `config.json`: `model_args` over the architecture's."""
    found = dict(config or {})
    nested = found.get("model_args")
    return {**_implied(found.get("architecture")), **found, **(nested if isinstance(nested, Mapping) else {})}


def _implied(architecture: Any) -> dict[str, Any]:
    """Options that a known entry point sets and no array shows."""
    name = architecture if isinstance(architecture, str) else ""
    match = _VIT_NAME.fullmatch(name)
    found = _EXCEPTIONS.get(name, _WIDTH_AND_HEADS[match[1]] if match else None)
    if found is None:
        return {}
    act = "gelu_tanh" if _WITH_TANH.fullmatch(name) else "gelu"
    return {"embed_dim": found[0], "num_heads": found[1], "act_layer": act}


def input_size(options: Mapping[str, Any]) -> Pair | None:
    """What the model is fed with, which need not be what it was built for."""
    cfg = options.get("pretrained_cfg")
    size = cfg.get("input_size") if isinstance(cfg, Mapping) else None
    if not isinstance(size, list | tuple) or len(size) != 3 or not all(is_whole(side) for side in size):
        return None
    return size[1], size[2]


def _gelu(act: Any, origin: str) -> Any:
    kinds = {None: "exact", "gelu": "exact", "gelu_tanh": "tanh"}
    if not isinstance(act, str | None) or act not in kinds:
        raise FileProblem(f"{origin} uses the activation {act!r}; vitlab has GELU only")
    return kinds[act]


FORMATS = (
    Format(
        name="timm",
        spec=ViTSpec,
        dialect=TimmDialect,
        recognises=recognises,
        read_dialect=read_dialect,
        read_spec=read_spec,
        options=options_of,
        read_labels=timm_settings.read_labels,
        read_preprocess=timm_settings.read_config,
        assumptions=assumptions,
        rules=rules,
        preprocess=lambda spec, _: timm_settings.usual_preprocess(spec, crop_pct=0.9),
        notes=lambda spec, rule, _: [
            *timm_settings.notes(entry_of(spec, rule.image_size), rule),
            *differences(spec),
        ],
        folder=lambda spec, rule, labels: {
            "config.json": timm_settings.config_json(spec, entry_of(spec, rule.image_size), rule, labels)
        },
    ),
)
