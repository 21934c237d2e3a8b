"""Vision Transformers, plain, hybrid and axial: the paper's names and their cost.

    ViT-B/16   R50+ViT-B/16   R+ViT-Ti/16   Axial-ViT-B/16   ViT-w64d6m128h4/2   vit-b-16

The patch size is part of the grammar, so any of it works; a size outside the tables is spelled out (`w64d6m128h4`). Matrix
products only are counted, as in the paper's own numbers. Tests hold all of it equal to what torch counts on the built model.
"""

import dataclasses
import re

from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.bit_family import FLOAT_BYTES, area, spell_resnet, stages_of, trunk_bytes, trunk_macs, trunk_params
from vitlab.models.family import ActivationBytes, Family, LoraTarget
from vitlab.models.sizes import VIT_SIZES, Size
from vitlab.models.spec import DROPOUT_FIELDS, TrunkSpec, ViTSpec

_LISTED = (
    *("ViT-mu/16", "ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-M/16", "ViT-B/32", "ViT-B/16", "ViT-B/8", "ViT-L/32"),
    *("ViT-L/16", "ViT-So400m/14", "ViT-H/14", "ViT-g/14", "ViT-G/14", "ViT-e/14"),
    *("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32", "R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
    *("Axial-ViT-B/32", "Axial-ViT-B/16"),
)

# Numbers have at most nine digits: enough for any model, and few enough for every reader of numbers.
_N = r"\d{1,9}"
_NAME = re.compile(rf"(?:(?P<axial>Axial-)|R(?P<resnet>\d{{0,9}})\+)?ViT-(?P<size>[A-Za-z0-9]+)/(?P<stride>{_N})")
_ALIAS = re.compile(r"(?:(?P<axial>axial)-|(?P<resnet>r\d*)-)?vit-(?P<size>[a-z0-9]+)-(?P<stride>\d+)")
_SPELLED_OUT = re.compile(rf"w({_N})d({_N})m({_N})h({_N})")

# The root-only stem of R+ViT-Ti/16 halves twice, so its 8x8 patches give a true stride of 32. The authors' own parameter
# count (6,337,704) confirms it; their config comment and the name say 16.
_ROOT_ONLY_PATCH = 8

# Two sizes differ by case only, which a file system may not keep apart: giant is g, gigantic is G.
_GIGANTIC = "gigantic"


# --- names ------------------------------------------------------------------------------------------------------------


def _parse(name: str) -> ViTSpec | None:
    if not (match := _NAME.fullmatch(_from_alias(name))):
        return None
    size, stride = _size(name, match["size"]), int(match["stride"])
    if match["resnet"] is None:
        if not stride:
            raise UsageError(f"'{name}' has a patch of 0 pixels")
        # The default image is 224 px where the patch divides it, else the nearest whole number of patches.
        side = max(1, round(224 / stride)) * stride
        plain = ViTSpec(**size._asdict(), patch=stride, image_size=(side, side))
        # Class token and pooling of axial models are not stated in the paper (D.6); a grid has no room for a class token.
        return dataclasses.replace(plain, attention="axial", pool="gap") if match["axial"] else plain
    if match["resnet"] == "":
        if stride != 16:
            raise UsageError(f"'{name}': the root-only hybrid exists with /16 only")
        return ViTSpec(**size._asdict(), patch=_ROOT_ONLY_PATCH, stem=TrunkSpec(stages=()))
    if stride not in (16, 32):
        raise UsageError(f"'{name}': a hybrid's number is its total stride, 16 or 32, not {stride}")
    stages = stages_of(name, match["resnet"], _LISTED)
    # Stride 16 moves the last stage's units into the third, so the depth stays (paper section 4.1).
    kept = stages if stride == 32 else (*stages[:2], stages[2] + stages[3])
    return ViTSpec(**size._asdict(), patch=1, stem=TrunkSpec(stages=kept))


def _from_alias(name: str) -> str:
    """The canonical spelling of an alias; anything else unchanged."""
    if not (match := _ALIAS.fullmatch(name)):
        return name
    sizes = {size.casefold(): size for size in VIT_SIZES if size != "G"} | {_GIGANTIC: "G"}
    prefix = "Axial-" if match["axial"] else f"{match['resnet'].upper()}+" if match["resnet"] else ""
    return f"{prefix}ViT-{sizes.get(match['size'], match['size'])}/{match['stride']}"


def _size(name: str, label: str) -> Size:
    if label in VIT_SIZES:
        return VIT_SIZES[label]
    if match := _SPELLED_OUT.fullmatch(label):
        return Size(*map(int, match.groups()))
    raise UnknownName("model", name, _LISTED, hint=f"Sizes: {', '.join(VIT_SIZES)}.")


def _spell(spec: ViTSpec) -> str:
    size = Size(spec.width, spec.depth, spec.mlp_dim, spec.heads)
    label = next((known for known, row in VIT_SIZES.items() if row == size), "w{}d{}m{}h{}".format(*size))
    if spec.attention == "axial":
        return f"Axial-ViT-{label}/{spec.patch}"
    if spec.stem is None:
        return f"ViT-{label}/{spec.patch}"
    if not spec.stem.stages:
        return f"R+ViT-{label}/16"
    return f"{spell_resnet(spec.stem.stages)}+ViT-{label}/{spec.stride}"


def _architecture(spec: ViTSpec) -> str:
    stem = f", stem {spec.stem.stages} x{spec.stem.width_factor} preact={spec.stem.preact}" if spec.stem else ""
    size = f"w{spec.width}d{spec.depth}m{spec.mlp_dim}h{spec.heads}"
    return f"{size}, patch {spec.patch}, {spec.attention} attention{stem}"


# --- cost -------------------------------------------------------------------------------------------------------------


def _count_params(spec: ViTSpec) -> int:
    d, m = spec.width, spec.mlp_dim
    attention = 4 * d * d + 4 * d
    mlp = 2 * d * m + m + d
    block = attention + mlp + 4 * d  # two LayerNorms
    if spec.layer_scale is not None:
        block += 2 * d
    if spec.pos == "relative":
        block += (2 * spec.num_tokens - 1) * d // spec.heads
    total = spec.num_blocks * block + 2 * d
    total += spec.patch**2 * spec.embed_channels * d + d
    total += spec.num_prefix * d + _position_params(spec)
    if spec.stem:
        total += trunk_params(spec.stem, spec.in_channels)
    if spec.pool == "map":
        total += d + attention + mlp + 2 * d
    if spec.head == "mlp-tanh":
        total += d * d + d
    return total + (d + 1) * spec.num_classes


def _position_params(spec: ViTSpec) -> int:
    rows, cols = spec.grid
    tables = spec.num_blocks if spec.pos_at == "every" else 1
    cls = spec.width if spec.uses_cls and spec.cls_in_pos else 0
    if spec.pos == "learned":
        return tables * (rows * cols * spec.width + cls)
    if spec.pos == "learned2d":
        return tables * ((rows + cols) * spec.width // 2 + cls)
    return 0


def _count_macs(spec: ViTSpec, padding_taps: bool) -> int:
    d, m, t = spec.width, spec.mlp_dim, spec.num_tokens
    rows, cols = spec.grid
    dense = t * (4 * d * d + 2 * d * m)
    if spec.attention == "axial":
        blocks = spec.depth * (2 * dense + 2 * t * (rows + cols) * d)
    else:
        relative = t * (2 * t - 1) * d if spec.pos == "relative" else 0
        blocks = spec.depth * (dense + 2 * t * t * d + relative)
    total = blocks + rows * cols * spec.patch**2 * spec.embed_channels * d
    if spec.stem:
        total += trunk_macs(spec.stem, spec.in_channels, spec.image_size, padding_taps)
    if spec.pool == "map":  # one query against every token
        total += 2 * t * d * d + 2 * d * d + 2 * t * d + 2 * d * m
    if spec.head == "mlp-tanh":
        total += d * d
    return total + d * spec.num_classes


def _activation_bytes(spec: ViTSpec, half: bool, recompute: bool) -> ActivationBytes:
    """Attention weights are not among what is kept: the fused kernel has none."""
    narrow = 2 if half else FLOAT_BYTES
    entry = FLOAT_BYTES * spec.num_tokens * spec.width  # what goes into a block
    block = _block_bytes(spec, narrow)
    kept = spec.num_blocks * (entry if recompute else block)
    kept += (4 if spec.pool == "map" else 2) * entry  # the last norm's input and output, and a MAP head's k and v
    if not spec.stem:
        working = 2 * narrow * spec.num_tokens * spec.mlp_dim
        return ActivationBytes(kept + narrow * spec.in_channels * area(spec.image_size), block, working)
    stem = trunk_bytes(spec.stem, spec.in_channels, spec.image_size, half, recompute)
    cast = narrow * spec.embed_channels * area(spec.stem.out_size(spec.image_size)) if half else 0
    return ActivationBytes(kept + stem.kept + cast, max(block, stem.block), stem.working, stem.weight_copies)


def _block_bytes(spec: ViTSpec, narrow: int) -> int:
    tokens, d = spec.num_tokens, spec.width
    # Both norms keep their input. Kept for products: what the norms give, q, k, v, the heads' output, and the MLP's
    # hidden layer before and after the GELU.
    block = tokens * (2 * FLOAT_BYTES * d + narrow * (6 * d + 2 * spec.mlp_dim))
    if spec.dropout:
        block += tokens * (2 * d + spec.mlp_dim)  # a byte for each number that may be dropped; four on a CPU
    if spec.layer_scale is not None:
        block += tokens * 2 * d * narrow
    if spec.pos == "relative":
        block += 3 * spec.heads * tokens**2 * narrow  # offsets' scores, the bias made of them, and the weights
    return block


# --- the family -------------------------------------------------------------------------------------------------------


VIT = Family(
    spec=ViTSpec,
    module="vitlab.models.vit:ViT",
    listed=_LISTED,
    parse=_parse,
    spell=_spell,
    architecture=_architecture,
    alias_words={"ViT-G/": f"ViT-{_GIGANTIC}/"},
    count_params=_count_params,
    count_macs=_count_macs,
    activation_bytes=_activation_bytes,
    block=r"blocks\.(\d+)\.",
    after_blocks=("norm.", "map.", "pre_logits.", "head."),
    input_kernel=lambda spec: "stem.root.weight" if spec.stem else "embed.weight",
    never_decayed=r"cls|registers|pos\..*|map\.probe|.*attn\.relative",
    lora_targets={
        "q": LoraTarget("attn.qkv", 0, 3),
        "k": LoraTarget("attn.qkv", 1, 3),
        "v": LoraTarget("attn.qkv", 2, 3),
        "proj": LoraTarget("attn.proj"),
        "fc1": LoraTarget("mlp.fc1"),
        "fc2": LoraTarget("mlp.fc2"),
    },
    dropout_fields=DROPOUT_FIELDS,
    free_fields=("head", "pos_resize"),
    formats=("google", "timm_keys", "hf", "torchvision_keys", "dinov2"),
)
