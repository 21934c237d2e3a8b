"""Google's own files: the 2020 ViT and hybrid `.npz`, the linen names, and big_vision's layout.

Facts: the authors' `models_vit.py`, `models_resnet.py` and `checkpoint.py`; big_vision's `models/vit.py`.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from torch import Tensor

from vitlab.core.errors import FileProblem
from vitlab.models.spec import TrunkSpec, ViTSpec
from vitlab.weights.moves import CONV, DENSE, FOUR_AXES, SAME, heads_bias, heads_in, heads_out
from vitlab.weights.rules import Rule, count_from, read_stages

_BLOCK = r"blocks\.(\d+)\."
_ENCODER = r"Transformer/encoderblock_\1/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoogleDialect:
    """What differs between Google's files without changing the model; a bundle remembers it, to write the same again."""

    big_vision: bool = False  # positions outside the encoder, without a class slot
    pre_linen: bool = False  # the global counters of the first files: LayerNorm_2, MlpBlock_3
    four_axes: bool = False  # GroupNorm as [1, 1, 1, C]


def recognises(arrays: Mapping[str, Tensor]) -> bool:
    return "embedding/kernel" in arrays and any(name.startswith("Transformer/") for name in arrays)


def read_dialect(arrays: Mapping[str, Tensor]) -> GoogleDialect:
    return GoogleDialect(
        big_vision="Transformer/posembed_input/pos_embedding" not in arrays,
        pre_linen=any("/MlpBlock_3/" in name for name in arrays),
        four_axes="gn_root/scale" in arrays and arrays["gn_root/scale"].ndim == 4,
    )


def read_spec(arrays: Mapping[str, Tensor], origin: str) -> ViTSpec:
    """The spec that these arrays fill, from their shapes alone. A grid is taken as square, as Google's code has it."""
    dialect = read_dialect(arrays)
    pos_name = "pos_embedding" if dialect.big_vision else "Transformer/posembed_input/pos_embedding"
    blocks = {int(m[1]) for name in arrays if (m := re.match(r"Transformer/encoderblock_(\d{1,4})/", name))}
    names = _names(dialect)
    first = f"Transformer/encoderblock_0/{names.attention}/query/kernel"
    mlp = f"Transformer/encoderblock_0/{names.mlp}/Dense_0/kernel"
    axes = {"embedding/kernel": 4, first: 3, mlp: 2}
    if not blocks or any(name not in arrays or arrays[name].ndim != count for name, count in axes.items()):
        raise FileProblem(f"{origin} looks like a Google ViT file, but its first block is not whole")
    axes = {"head/kernel": 2, "conv_root/kernel": 4, pos_name: 3}
    if any(name in arrays and arrays[name].ndim != count for name, count in axes.items()):
        raise FileProblem(f"{origin} looks like a Google ViT file, but its stem, positions or head have another shape")
    kernel, pos = arrays["embedding/kernel"], arrays.get(pos_name)
    uses_cls, has_map = "cls" in arrays, any(name.startswith("MAPHead_0/") for name in arrays)
    slots = 0 if pos is None else pos.shape[1]
    cells = slots - (uses_cls and not dialect.big_vision)
    side = math.isqrt(cells)
    if pos is not None and side * side != cells:
        raise FileProblem(f"{origin} has {cells} positions, which is no square grid")
    stem = _read_stem(arrays, origin)
    head = arrays.get("head/kernel")
    patch = kernel.shape[0]
    stride = patch * (stem.stride if stem else 1)
    # Fixed positions leave no trace of the image size; the default is the nearest to 224 that the patches fill.
    image = side * stride if pos is not None else max(1, round(224 / stride)) * stride
    return ViTSpec(
        width=kernel.shape[3],
        depth=count_from(0, blocks, "blocks", origin),
        mlp_dim=arrays[mlp].shape[1],
        heads=arrays[first].shape[1],
        patch=patch,
        image_size=(image, image),
        in_channels=arrays["conv_root/kernel"].shape[2] if stem else kernel.shape[2],
        num_classes=0 if head is None else head.shape[1],
        stem=stem,
        pool="cls" if uses_cls else "map" if has_map else "gap",
        pos="learned" if pos is not None else "sincos2d",
        cls_in_pos=not dialect.big_vision,
        head="mlp-tanh" if "pre_logits/kernel" in arrays else "linear",
    )


def rules(spec: ViTSpec, dialect: GoogleDialect) -> list[Rule]:
    names, h = _names(dialect), spec.heads
    attention, mlp = _ENCODER + names.attention, _ENCODER + names.mlp
    pos = "pos_embedding" if dialect.big_vision else "Transformer/posembed_input/pos_embedding"
    found = [
        Rule(r"cls", ("cls",)),
        Rule(r"pos\.table", (pos,)),
        Rule(r"embed\.weight", ("embedding/kernel",), CONV),
        Rule(r"embed\.bias", ("embedding/bias",)),
        *_norm(_BLOCK + r"norm1", f"{_ENCODER}{names.norm1}"),
        *_norm(_BLOCK + r"norm2", f"{_ENCODER}{names.norm2}"),
        Rule(_BLOCK + r"attn\.qkv\.weight", _qkv(attention, "kernel"), heads_in(h, 3)),
        Rule(_BLOCK + r"attn\.qkv\.bias", _qkv(attention, "bias"), heads_bias(h, 3)),
        Rule(_BLOCK + r"attn\.proj\.weight", (f"{attention}/out/kernel",), heads_out(h)),
        Rule(_BLOCK + r"attn\.proj\.bias", (f"{attention}/out/bias",)),
        *_dense(_BLOCK + r"mlp\.fc1", f"{mlp}/Dense_0"),
        *_dense(_BLOCK + r"mlp\.fc2", f"{mlp}/Dense_1"),
        *_norm("norm", "Transformer/encoder_norm"),
        *_dense("pre_logits", "pre_logits"),
        *_dense("head", "head"),
    ]
    if spec.stem:
        found += _stem_rules(spec.stem, dialect)
    if spec.pool == "map":
        found += _map_rules(h)
    return found


def _map_rules(heads: int) -> list[Rule]:
    attention = "MAPHead_0/MultiHeadDotProductAttention_0"
    keys = tuple(f"{attention}/{part}" for part in ("key", "value"))
    return [
        Rule(r"map\.probe", ("MAPHead_0/probe",)),
        Rule(r"map\.q\.weight", (f"{attention}/query/kernel",), heads_in(heads, 1)),
        Rule(r"map\.q\.bias", (f"{attention}/query/bias",), heads_bias(heads, 1)),
        Rule(r"map\.kv\.weight", tuple(f"{key}/kernel" for key in keys), heads_in(heads, 2)),
        Rule(r"map\.kv\.bias", tuple(f"{key}/bias" for key in keys), heads_bias(heads, 2)),
        Rule(r"map\.proj\.weight", (f"{attention}/out/kernel",), heads_out(heads)),
        Rule(r"map\.proj\.bias", (f"{attention}/out/bias",)),
        *_norm(r"map\.norm", "MAPHead_0/LayerNorm_0"),
        *_dense(r"map\.mlp\.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        *_dense(r"map\.mlp\.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    ]


# --- the hybrids' stem ------------------------------------------------------------------------------------------------


def _stem_rules(stem: TrunkSpec, dialect: GoogleDialect) -> list[Rule]:
    # Their blocks and units count from 1, ours from 0: the names are listed, because a template cannot add.
    move = FOUR_AXES if dialect.four_axes else SAME
    found = [
        Rule(r"stem\.root\.weight", ("conv_root/kernel",), CONV),
        Rule(r"stem\.root_norm\.weight", ("gn_root/scale",), move),
        Rule(r"stem\.root_norm\.bias", ("gn_root/bias",), move),
    ]
    for stage, count in enumerate(stem.stages):
        for unit in range(count):
            ours, theirs = rf"stem\.stages\.{stage}\.{unit}\.", f"block{stage + 1}/unit{unit + 1}/"
            found += [
                Rule(ours + r"conv(\d)\.weight", (theirs + r"conv\1/kernel",), CONV),
                Rule(ours + r"norm(\d)\.weight", (theirs + r"gn\1/scale",), move),
                Rule(ours + r"norm(\d)\.bias", (theirs + r"gn\1/bias",), move),
                Rule(ours + r"proj\.weight", (f"{theirs}conv_proj/kernel",), CONV),
                Rule(ours + r"proj_norm\.weight", (f"{theirs}gn_proj/scale",), move),
                Rule(ours + r"proj_norm\.bias", (f"{theirs}gn_proj/bias",), move),
            ]
    return found


def _read_stem(arrays: Mapping[str, Tensor], origin: str) -> TrunkSpec | None:
    if "conv_root/kernel" not in arrays:
        return None
    stages = read_stages(arrays, r"block(\d{1,4})/unit(\d{1,4})/", origin)
    return TrunkSpec(stages=stages, width_factor=max(1, arrays["conv_root/kernel"].shape[-1] // 64))


# --- names ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Names:
    norm1: str
    attention: str
    norm2: str
    mlp: str


def _names(dialect: GoogleDialect) -> _Names:
    if dialect.pre_linen:
        return _Names("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
    return _Names("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(ours + r"\.weight", (f"{theirs}/scale",)), Rule(ours + r"\.bias", (f"{theirs}/bias",))]


def _dense(ours: str, theirs: str) -> list[Rule]:
    return [Rule(ours + r"\.weight", (f"{theirs}/kernel",), DENSE), Rule(ours + r"\.bias", (f"{theirs}/bias",))]


def _qkv(attention: str, part: str) -> tuple[str, ...]:
    return tuple(f"{attention}/{name}/{part}" for name in ("query", "key", "value"))
