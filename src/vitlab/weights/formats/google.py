"""Google's files: the 2020 ViT and hybrid `.npz`, linen, and big_vision.

Facts: the authors' `models_vit.py`, `models_resnet.py` and `checkpoint.py`; big_vision's `models/vit.py` (its
`fix_old_checkpoints` lists what old files had elsewhere) and `models/proj/image_text/two_towers.py`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.spec import Pair, TrunkSpec, ViTSpec
from vitlab.weights.conventions import CROPPED, usual_preprocess
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import (
    MOST_BLOCKS,
    as_file_problem,
    compare,
    depth_of,
    read_stages,
    require_plain,
    shape_of,
    usual_side,
)
from vitlab.weights.moves import CONV, DENSE, FOUR_AXES, SAME, heads_bias, heads_in, heads_out
from vitlab.weights.rules import Rule, spell_drop

_BLOCK = r"blocks\.(\d+)\."
_IN_BLOCK = "Transformer/encoderblock"
# Where positions are kept: today's big_vision, big_vision before 2022, and the authors' code.
_OUTSIDE, _ENCODER, _INSIDE = (
    "pos_embedding",
    "Transformer/pos_embedding",
    "Transformer/posembed_input/pos_embedding",
)
# Before the names of the image model: `img/` beside a text model; the rest beside an optimiser's state.
Prefix = Literal["", "img/", "params/", "params/img/", "opt/target/"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoogleDialect:
    """Variants of the file that do not change the model, kept to write it again."""

    big_vision: bool = False  # positions not in a module of their own, or computed ones
    pos_in_encoder: bool = False  # big_vision before 2022: `Transformer/pos_embedding`, with a class slot
    inlined_map: bool = False  # big_vision before it had `MAPHead_0`: `probe` and the rest stand outside
    pre_linen: bool = False  # the global counters of the first files: LayerNorm_2, MlpBlock_3
    four_axes: bool = False  # GroupNorm as [1, 1, 1, C]
    scan: bool = False  # all blocks in one array, along its first axis
    prefix: Prefix = ""

    @property
    def cls_in_pos(self) -> bool:
        """Whether the class token has a position; in today's big_vision it has none."""
        return not self.big_vision or self.pos_in_encoder


def recognises(arrays: Mapping[str, Tensor]) -> bool:
    prefix = _prefix(arrays)
    return prefix is not None and any(name.startswith(f"{prefix}Transformer/") for name in arrays)


def read_dialect(arrays: Mapping[str, Tensor]) -> GoogleDialect:
    prefix = _prefix(arrays) or ""
    norm = arrays.get(f"{prefix}gn_root/scale")
    inside, pre_linen = f"{prefix}{_INSIDE}" in arrays, any("/MlpBlock_3/" in name for name in arrays)
    outside, in_encoder = (f"{prefix}{name}" in arrays for name in (_OUTSIDE, _ENCODER))
    # Only big_vision computes positions. A file of the first code, or with a stem, has lost its own.
    older = pre_linen or norm is not None
    return GoogleDialect(
        big_vision=outside or in_encoder or not (inside or older),
        pos_in_encoder=in_encoder,
        inlined_map=f"{prefix}probe" in arrays,
        pre_linen=pre_linen,
        four_axes=norm is not None and norm.ndim == 4,
        scan=any(name.startswith(f"{prefix}{_IN_BLOCK}/") for name in arrays),
        prefix=prefix,
    )


def read_spec(arrays: Mapping[str, Tensor], origin: str, grid: Pair | None = None) -> ViTSpec:
    """Derive the spec from the arrays; without `grid`, positions are square."""
    dialect = read_dialect(arrays)
    arrays = _image_model(arrays, dialect.prefix, origin)
    (attention, _, mlp), first = _names(dialect), _IN_BLOCK + ("/" if dialect.scan else "_0/")
    axes = int(dialect.scan)
    *depth, _, heads, _ = shape_of(arrays, f"{first}{attention}/query/kernel", 3 + axes, origin)
    mlp_dim = shape_of(arrays, f"{first}{mlp}/Dense_0/kernel", 2 + axes, origin)[-1]
    patch, _, channels, width = shape_of(arrays, "embedding/kernel", 4, origin)
    if dialect.scan and depth[0] > MOST_BLOCKS:
        raise FileProblem(f"{origin} stacks {depth[0]:,} blocks, more than any model has")
    stem = _read_stem(arrays, origin)
    stride = patch * (stem.stride if stem else 1)
    uses_cls, has_map = "cls" in arrays, f"{_map_place(dialect)}probe" in arrays
    computed = dialect.big_vision and _pos_name(dialect) not in arrays
    side = usual_side(stride) // stride
    rows, cols = grid or ((side, side) if computed else _read_grid(arrays, dialect, uses_cls, origin))
    with as_file_problem(origin):
        return ViTSpec(
            width=width,
            depth=depth[0] if dialect.scan else depth_of(arrays, f"{_IN_BLOCK}_", origin, end="/"),
            mlp_dim=mlp_dim,
            heads=heads,
            patch=patch,
            image_size=(rows * stride, cols * stride),
            in_channels=shape_of(arrays, "conv_root/kernel", 4, origin)[2] if stem else channels,
            num_classes=shape_of(arrays, "head/kernel", 2, origin)[1] if "head/kernel" in arrays else 0,
            stem=stem,
            pool="cls" if uses_cls else "map" if has_map else "gap",
            pos="sincos2d" if computed else "learned",
            cls_in_pos=dialect.cls_in_pos,
            head="mlp-tanh" if "pre_logits/kernel" in arrays else "linear",
        )


def assumptions(spec: ViTSpec) -> tuple[str, ...]:
    """Computed positions leave no array behind."""
    if spec.pos == "learned":
        return ()
    rows, cols = spec.image_size
    way = "If the size is wrong: vitlab convert --grid (in Python: grid=)"
    return (f"No array shows this, so it is assumed: pos={spec.pos}, for images of {rows}x{cols}. {way}",)


def differences(spec: ViTSpec) -> tuple[str, ...]:
    """What Google's code computes differently from `spec`."""
    theirs: dict[str, Any] = {"gelu": "tanh", "norm_eps": 1e-6, "pos_resize": "corner-bilinear"}
    if spec.pos != "learned":
        theirs["image_size"] = (usual_side(spec.stride),) * 2
    usual = TrunkSpec(stages=())
    fields = ("gn_eps", "ws", "ws_eps", "padding", "pool_padding")
    stem = compare(spec.stem, {name: getattr(usual, name) for name in fields}, "stem.") if spec.stem else ()
    return (*compare(spec, theirs), *stem)


def require_google(spec: ViTSpec, name: str) -> None:
    """What Google's own code could not load, though the names would fit."""
    if spec.pool == "map" and name == "google-npz":
        raise UsageError(
            "the google-npz format has no attention pooling: the code that reads it pools by token or mean",
            hint="Write --to big-vision.",
        )
    if spec.grid[0] != spec.grid[1]:
        raise UsageError(
            f"the {name} format takes every grid as square; this one is {spec.grid[0]}x{spec.grid[1]}",
            hint="Carry it to square images first, with --image-size.",
        )


def _require_expressible(spec: ViTSpec, dialect: GoogleDialect) -> None:
    """What the arrays would not show is refused: they would be read as another model."""
    name = "big-vision" if dialect.big_vision else "google-npz"
    computed = dialect.big_vision and spec.pos == "sincos2d" and not spec.stem
    if not computed or spec.attention != "full":
        require_plain(name, spec)
        if spec.pos == "none":
            raise UsageError(f"the {name} format has no models without positions")
    if spec.uses_cls and spec.pos == "learned" and spec.cls_in_pos != dialect.cls_in_pos:
        raise UsageError(
            f"{name} {'needs a' if dialect.cls_in_pos else 'has no place for the'} class token's position",
            hint=f"Add --{'no-' * spec.cls_in_pos}cls-in-pos: the model computes the same.",
        )


def rules(spec: ViTSpec, dialect: GoogleDialect) -> list[Rule]:
    _require_expressible(spec, dialect)
    h = spec.heads
    encoder = f"{_IN_BLOCK}/" if dialect.scan else _IN_BLOCK + r"_\1/"
    attention, norm2, mlp = (encoder + name for name in _names(dialect))
    found = [
        Rule(r"cls", ("cls",)),
        Rule(r"pos\.table", (_pos_name(dialect),)),
        Rule(r"embed\.weight", ("embedding/kernel",), CONV),
        Rule(r"embed\.bias", ("embedding/bias",)),
        *_norm(_BLOCK + r"norm1", f"{encoder}LayerNorm_0"),
        *_norm(_BLOCK + r"norm2", norm2),
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
        found += _map_rules(h, _map_place(dialect))
    return [
        dataclasses.replace(
            rule,
            theirs=tuple(dialect.prefix + name for name in rule.theirs),
            stacked=dialect.scan and rule.ours.startswith(_BLOCK),
        )
        for rule in found
    ]


def _map_rules(heads: int, place: str) -> list[Rule]:
    attention = f"{place}MultiHeadDotProductAttention_0"
    keys = tuple(f"{attention}/{part}" for part in ("key", "value"))
    return [
        Rule(r"map\.probe", (f"{place}probe",)),
        Rule(r"map\.q\.weight", (f"{attention}/query/kernel",), heads_in(heads, 1)),
        Rule(r"map\.q\.bias", (f"{attention}/query/bias",), heads_bias(heads, 1)),
        Rule(r"map\.kv\.weight", tuple(f"{key}/kernel" for key in keys), heads_in(heads, 2)),
        Rule(r"map\.kv\.bias", tuple(f"{key}/bias" for key in keys), heads_bias(heads, 2)),
        Rule(r"map\.proj\.weight", (f"{attention}/out/kernel",), heads_out(heads)),
        Rule(r"map\.proj\.bias", (f"{attention}/out/bias",)),
        *_norm(r"map\.norm", f"{place}LayerNorm_0"),
        *_dense(r"map\.mlp\.fc1", f"{place}MlpBlock_0/Dense_0"),
        *_dense(r"map\.mlp\.fc2", f"{place}MlpBlock_0/Dense_1"),
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
    stages = read_stages(arrays, r"block(\d+)/unit(\d+)/", origin, first=1)
    with as_file_problem(origin):
        return TrunkSpec(stages=stages, width_factor=shape_of(arrays, "conv_root/kernel", 4, origin)[3] // 64)


# --- reading ----------------------------------------------------------------------------------------------------------


def _prefix(arrays: Mapping[str, Tensor]) -> Prefix | None:
    return next((prefix for prefix in get_args(Prefix) if f"{prefix}embedding/kernel" in arrays), None)


def _image_model(arrays: Mapping[str, Tensor], prefix: Prefix, origin: str) -> dict[str, Tensor]:
    """Strip the prefix; raise if there is a text model or optimiser state beside."""
    beside = [name for name in arrays if not name.startswith(prefix)]
    if parts := sorted({_part(name, prefix) for name in beside}):
        raise FileProblem(
            f"{origin} holds more than an image model, which is under {prefix.removesuffix('/')}",
            hint=f"Read that alone with {spell_drop(*parts)}",
        )
    return {name.removeprefix(prefix): array for name, array in arrays.items()}


def _part(name: str, prefix: Prefix) -> str:
    """The largest part of the file that holds `name` and nothing under `prefix`."""
    words = name.split("/")
    paths = ("/".join(words[: count + 1]) for count in range(len(words)))
    return next(path for path in paths if not prefix.startswith(f"{path}/"))


def _read_grid(arrays: Mapping[str, Tensor], dialect: GoogleDialect, uses_cls: bool, origin: str) -> Pair:
    cells = shape_of(arrays, _pos_name(dialect), 3, origin)[1] - (uses_cls and dialect.cls_in_pos)
    side = math.isqrt(cells)
    if side * side != cells or not side:
        raise FileProblem(
            f"{origin} has {cells} positions, which do not fill a square grid",
            hint="State its rows and columns with vitlab convert --grid H,W (in Python: grid=(H, W)).",
        )
    return side, side


# --- names ------------------------------------------------------------------------------------------------------------


def _names(dialect: GoogleDialect) -> tuple[str, str, str]:
    """What the attention, the second norm and the MLP of a block are called."""
    if dialect.pre_linen:
        return "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"
    return "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"


def _pos_name(dialect: GoogleDialect) -> str:
    return _ENCODER if dialect.pos_in_encoder else _OUTSIDE if dialect.big_vision else _INSIDE


def _map_place(dialect: GoogleDialect) -> str:
    return "" if dialect.inlined_map else "MAPHead_0/"


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(ours + r"\.weight", (f"{theirs}/scale",)), Rule(ours + r"\.bias", (f"{theirs}/bias",))]


def _dense(ours: str, theirs: str) -> list[Rule]:
    return [Rule(ours + r"\.weight", (f"{theirs}/kernel",), DENSE), Rule(ours + r"\.bias", (f"{theirs}/bias",))]


def _qkv(attention: str, part: str) -> tuple[str, ...]:
    return tuple(f"{attention}/{name}/{part}" for name in ("query", "key", "value"))


FORMATS = (
    Format(
        name="google-npz",
        targets=("big-vision",),
        spec=ViTSpec,
        dialect=GoogleDialect,
        recognises=lambda arrays, _: recognises(arrays),
        read_dialect=read_dialect,
        read_spec=lambda arrays, origin, _, grid: read_spec(arrays, origin, grid),
        assumptions=lambda spec, _: assumptions(spec),
        rules=rules,
        preprocess=lambda spec, target: usual_preprocess(
            spec, {**CROPPED, "filter": "area"} if target == "big-vision" else {"antialias": False}
        ),
        # All files that Google published have the names of the first code, before linen.
        usual_dialect=lambda _, target: {"big_vision": target == "big-vision", "pre_linen": target == "google-npz"},
        require_target=require_google,
        notes=lambda spec, _, __: differences(spec),
    ),
)
