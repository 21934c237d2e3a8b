"""Model specs: every size and every convention in which implementations differ.

Owns the fields, their validity and the facts that follow from them (grid, tokens, true stride). Knows nothing of torch, so
that `vitlab models info` answers at once. What else a kind of model brings, its names and its cost, is in its `Family`.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from vitlab.core import config
from vitlab.core.errors import UsageError, require, require_choice

Pair = tuple[int, int]
Pool = Literal["cls", "gap", "map"]
Pos = Literal["learned", "none", "learned2d", "relative", "sincos2d"]
PosAt = Literal["stem", "every", "shared"]
GridResize = Literal["corner-bilinear", "bilinear", "bicubic", "bicubic-antialias", "bicubic-offset"]
Standardisation = Literal["std-eps", "var-eps"]
Padding = Literal["same", "fixed"]
PoolPadding = Literal["zero", "neg-inf"]
TokenKind = Literal["cls", "patches", "mean"]
PositionStart = Literal["interpolate", "sequence", "fresh"]  # what positions start weights give; see `surgery.py`

# Of a ViT: rates that act in training alone.
DROPOUT_FIELDS = ("dropout", "attention_dropout", "stochastic_depth", "patch_dropout")
_MOST_HEADS = 1024  # tried when an error proposes another number of heads
_MOST_STAGES = 8  # widths double with every stage, so more is a slip or an attack
_MOST_BLOCKS = 1024  # of a ViT, or of a stage: each is a module, and half a million take minutes to make
_MOST_PIXELS = 2**16  # along a side; the largest file that vitlab decodes has fewer
_LARGEST = 2**31 - 1  # of any other size


def strided(size: Pair, stride: int) -> Pair:
    """Rows and columns of what has one place for each `stride` of these, the last ones perhaps of fewer."""
    return -(-size[0] // stride), -(-size[1] // stride)


def require_choices(spec: object) -> None:
    """Raise for a value outside a field's `Literal`, which no config may have seen."""
    for name, choices in _choices(type(spec)).items():
        require_choice(name, getattr(spec, name), choices)


@functools.cache
def _choices(schema: type) -> dict[str, tuple[str, ...]]:
    hints = typing.get_type_hints(schema)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(schema)}
    return {name: typing.get_args(hint) for name, hint in fields.items() if typing.get_origin(hint) is Literal}


def require_positive(spec: object, *names: str, most: float = _LARGEST) -> None:
    for name in names:
        value = getattr(spec, name)
        for number in value if isinstance(value, tuple) else (value,):  # pyright: ignore[reportUnknownVariableType]
            if not 0 < number <= most:
                limit = f" and at most {most:,}" if number > 0 else ""
                raise UsageError(f"{name} must be positive{limit}, not {value!r}")


def require_count(spec: object, name: str) -> None:
    value = getattr(spec, name)
    require(0 <= value <= _LARGEST, f"{name} must not be negative, or above {_LARGEST:,}, not {value}")


def require_rates(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        require(0 <= value < 1, f"{name} must be at least 0 and below 1, not {value}")


class ModelSpec:
    """What the spec of every family has; each is a frozen dataclass."""

    kind: ClassVar[str]  # as stored in bundles and recipes
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    image_size: Pair
    in_channels: int
    num_classes: int  # 0: no head, the model returns its representation

    def __post_init__(self) -> None:
        require_choices(self)
        require_positive(self, "image_size", most=_MOST_PIXELS)
        require_positive(self, "in_channels")
        require_count(self, "num_classes")

    def grid_for(self, image_size: Pair) -> Pair:
        """Rows and columns of patches or features; raises where no such image fits."""
        raise NotImplementedError

    @property
    def grid(self) -> Pair:
        return self.grid_for(self.image_size)

    @property
    def stride(self) -> int:
        """Pixels of the image under one token or feature."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int | None:
        """Length of the sequence; None where there is none, as in a CNN."""
        return None

    @property
    def num_blocks(self) -> int:
        """Blocks or stages, as `train=last:N`, `features` and layer decay count them."""
        raise NotImplementedError

    @property
    def representation_width(self) -> int:
        """Length of the vector that the head sees."""
        raise NotImplementedError

    @property
    def has_attention_maps(self) -> bool:
        """Whether a sequence of tokens attends to itself, on one grid from the first layer to the last."""
        return False

    @property
    def attention_shape(self) -> Pair:
        """Layers and heads whose weights can be shown, also those on grids that shrink; (0, 0) in a CNN."""
        return 0, 0

    def require_resizable(self, image_size: Pair) -> None:
        """Raise where trained weights mean nothing for images of another size."""

    def with_linear_head(self) -> Self:
        """The spec whose head is one linear layer, as a transfer starts with."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrunkSpec:
    """A ResNet with GroupNorm and weight standardisation: BiT, or a hybrid stem.

    `preact` tells them apart: BiT is pre-activation (v2), the hybrids' stem is post-activation (v1). The two also differ in
    eps and padding, which is why those are fields.
    """

    stages: tuple[int, ...]
    width_factor: int = 1
    preact: bool = False
    gn_eps: float = 1e-6
    ws: Standardisation = "std-eps"
    ws_eps: float = 1e-5
    padding: Padding = "same"
    pool_padding: PoolPadding | None = None  # of the root's max-pool; None: zero where `padding` is fixed, else neg-inf
    non_local: tuple[int, ...] = ()  # stages, from 0, with a non-local block after every second unit; of BiT alone

    def __post_init__(self) -> None:
        require_choices(self)
        if self.pool_padding is None:  # said by every spec, also by those stored before it was a field
            object.__setattr__(self, "pool_padding", {"fixed": "zero", "same": "neg-inf"}[self.padding])
        require_choice("pool_padding", str(self.pool_padding), typing.get_args(PoolPadding))
        require(len(self.stages) <= _MOST_STAGES, f"a trunk has at most {_MOST_STAGES} stages, not {len(self.stages)}")
        require_positive(self, "stages", most=_MOST_BLOCKS)
        require_positive(self, "width_factor", "gn_eps", "ws_eps")
        require(
            list(self.non_local) == sorted({*self.non_local} & {*range(len(self.stages))}),
            f"non_local must name stages from 0 to {len(self.stages) - 1} in order, not {list(self.non_local)}",
        )
        for stage in self.non_local:
            require(
                self.stages[stage] > 1,
                f"a non-local block follows every second unit, and stage {stage} has one: leave it out of non_local",
            )
        require(self.preact or not self.non_local, "non-local blocks are for a pre-activation trunk, as BiT has")

    def follows_non_local(self, stage: int, unit: int) -> bool:
        """Whether a non-local block comes after this unit: after every second one of a chosen stage."""
        return stage in self.non_local and unit % 2 == 1

    @property
    def root_width(self) -> int:
        return 64 * self.width_factor

    @property
    def out_channels(self) -> int:
        """4·64·w·2^(stages-1): a bottleneck quadruples its width, a stage doubles it."""
        return self.root_width * 4 * 2 ** (len(self.stages) - 1) if self.stages else self.root_width

    @property
    def stride(self) -> int:
        return 4 * 2 ** max(0, len(self.stages) - 1)

    def out_size(self, image_size: Pair) -> Pair:
        """Feature-map rows and columns. Each halving rounds up, in both padding rules."""
        return strided(image_size, self.stride)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTSpec(ModelSpec):
    """A Vision Transformer, plain, hybrid (`stem`) or axial, by default the paper's."""

    kind: ClassVar[str] = "vit"
    width: int
    depth: int
    mlp_dim: int
    heads: int
    patch: int  # on the image, or on the stem's feature map
    image_size: Pair = (224, 224)
    in_channels: int = 3
    num_classes: int = 1000
    stem: TrunkSpec | None = None
    pool: Pool = "cls"
    pos: Pos = "learned"
    pos_at: PosAt = "stem"
    cls_in_pos: bool = True
    pos_resize: GridResize = "corner-bilinear"
    attention: Literal["full", "axial"] = "full"
    head: Literal["linear", "mlp-tanh"] = "linear"
    gelu: Literal["tanh", "exact"] = "tanh"
    norm_eps: float = 1e-6
    layer_scale: float | None = None
    registers: int = 0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0
    patch_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "width", "mlp_dim", "heads", "patch", "norm_eps")
        require_positive(self, "depth", most=_MOST_BLOCKS)
        scale = self.layer_scale
        require(scale is None or abs(scale) <= _LARGEST, f"layer_scale must be a finite number, not {scale}")
        require_count(self, "registers")
        if self.width % self.heads:
            raise UsageError(
                f"width {self.width} is not divisible by {self.heads} heads",
                hint=f"Each head needs the same number of channels: try heads={_nearest_divisor(self.width, self.heads)}.",
            )
        require_rates(self, *DROPOUT_FIELDS)
        divisor = {"sincos2d": 4, "learned2d": 2}.get(self.pos, 1)
        require(
            self.width % divisor == 0, f"{self.pos} positions need a width divisible by {divisor}, not {self.width}"
        )
        require(
            not (self.stem and self.stem.non_local), "non-local blocks are for BiT models, not for the stem of a hybrid"
        )
        if self.attention == "axial":
            on_grid = self.pool != "cls" and not self.registers
            require(on_grid, "axial attention keeps the tokens on a grid", "Set pool=gap or map, registers=0.")
            require(self.pos != "relative", "relative positions are defined for full attention only")
        has_table = self.pos_at == "stem" or self.pos in ("learned", "learned2d")
        require(has_table, f"pos_at={self.pos_at} needs a learned position table, not pos={self.pos}")
        if self.patch_dropout:
            self.require_subsets()
        self.grid_for(self.image_size)

    def num_kept(self, patches: int) -> int:
        """Of so many patches, those that an image keeps in training: patch dropout."""
        return max(1, round((1 - self.patch_dropout) * patches)) if self.patch_dropout else patches

    def require_subsets(self) -> None:
        """An error for a model that cannot run on some of its patches alone."""
        plain = self.stem is None and self.attention == "full" and self.pos != "relative" and self.pos_at == "stem"
        require(
            plain,
            "only a plain ViT can run on some patches alone: no ResNet stem, full attention, positions added once",
            "Choose a model such as ViT-B/16, with pos other than relative and pos_at=stem.",
        )

    @property
    def uses_cls(self) -> bool:
        return self.pool == "cls"

    @property
    def num_prefix(self) -> int:
        """Tokens before the first patch: the class token, then the registers."""
        return int(self.uses_cls) + self.registers

    @property
    def stride(self) -> int:
        """Pixels under one token; for R+ViT-Ti/16 this is 32, whatever the name says."""
        return self.patch * (self.stem.stride if self.stem else 1)

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] + self.num_prefix

    @property
    def num_blocks(self) -> int:
        """Blocks; axial models have two, along rows and columns, for one of the paper's."""
        return self.depth * (2 if self.attention == "axial" else 1)

    @property
    def representation_width(self) -> int:
        return self.width

    @property
    def has_attention_maps(self) -> bool:
        return True

    @property
    def attention_shape(self) -> Pair:
        return self.num_blocks, self.heads

    def require_resizable(self, image_size: Pair) -> None:
        if self.pos == "relative" and self.grid_for(image_size) != self.grid:
            raise UsageError("relative positions cannot be carried to another grid")

    def with_linear_head(self) -> Self:
        return dataclasses.replace(self, head="linear")

    @property
    def embed_channels(self) -> int:
        return self.stem.out_channels if self.stem else self.in_channels

    def grid_for(self, image_size: Pair) -> Pair:
        """Rows and columns of patches; raises if the patch does not divide the image."""
        rows, cols = self.stem.out_size(image_size) if self.stem else image_size
        if rows % self.patch or cols % self.patch or not rows or not cols:
            what = f"patch {self.patch} does not divide the {rows}x{cols} "
            what += f"feature map of a {image_size[0]}x{image_size[1]} image" if self.stem else "image"
            near = tuple(max(1, (2 * side + self.stride) // (2 * self.stride)) * self.stride for side in image_size)
            raise UsageError(what, hint=f"Nearest image size that works: {near[0]},{near[1]}.")
        return rows // self.patch, cols // self.patch


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiTSpec(ModelSpec):
    """A BiT ResNet: pre-activation trunk, GroupNorm, ReLU, global mean, linear head."""

    kind: ClassVar[str] = "bit"
    trunk: TrunkSpec
    image_size: Pair = (224, 224)
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.trunk.stages) > 0 and self.trunk.preact
        require(fits, "a BiT model needs a pre-activation trunk with at least one stage")

    def grid_for(self, image_size: Pair) -> Pair:
        return self.trunk.out_size(image_size)

    @property
    def stride(self) -> int:
        return self.trunk.stride

    @property
    def num_blocks(self) -> int:
        return len(self.trunk.stages)

    @property
    def attention_shape(self) -> Pair:
        """One layer of one head for every non-local block."""
        follows = self.trunk.follows_non_local
        blocks = sum(follows(stage, unit) for stage, count in enumerate(self.trunk.stages) for unit in range(count))
        return blocks, int(blocks > 0)

    @property
    def representation_width(self) -> int:
        return self.trunk.out_channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialResNetSpec(ModelSpec):
    """A ResNet whose 3x3 convolutions are attention along columns and rows, with BatchNorm (Axial-DeepLab).

    The image size decides how long rows and columns are, and so the tables of relative positions: other images do not fit.
    """

    kind: ClassVar[str] = "axial-resnet"
    stages: tuple[int, ...]
    width: int = 64  # channels of the root; a stage has twice, four, eight and sixteen times as many within its units
    heads: int = 8
    image_size: Pair = (224, 224)
    in_channels: int = 3
    num_classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            1 <= len(self.stages) <= _MOST_STAGES, f"a trunk has 1 to {_MOST_STAGES} stages, not {len(self.stages)}"
        )
        require_positive(self, "stages", most=_MOST_BLOCKS)
        require_positive(self, "width", "heads")
        # A query has half as many channels as a value: 2 * width / heads / 2 in the first stage.
        require(self.width % self.heads == 0, f"width {self.width} is not divisible by {self.heads} heads")

    def inner(self, stage: int) -> int:
        """Channels within the units of a stage; they give twice as many."""
        return 2 * self.width * 2**stage

    @property
    def stride(self) -> int:
        return 4 * 2 ** (len(self.stages) - 1)

    def grid_for(self, image_size: Pair) -> Pair:
        """Rows and columns of the last stage. Each halving rounds up."""
        return strided(image_size, self.stride)

    @property
    def num_blocks(self) -> int:
        return len(self.stages)

    @property
    def attention_shape(self) -> Pair:
        """Two layers for every unit: along columns, then along rows."""
        return 2 * sum(self.stages), self.heads

    @property
    def representation_width(self) -> int:
        return 2 * self.inner(len(self.stages) - 1)

    def require_resizable(self, image_size: Pair) -> None:
        if image_size != self.image_size:
            raise UsageError(
                f"an AxialResNet of {self.image_size[0]}x{self.image_size[1]} images has learned offsets along rows and "
                f"columns of that length, and does not take {image_size[0]}x{image_size[1]}",
                hint=f"Resize images to {self.image_size[0]},{self.image_size[1]}, or train a model of the other size.",
            )


Spec = TypeVar("Spec", bound=ModelSpec)


def bit_trunk(stages: tuple[int, ...], width_factor: int) -> TrunkSpec:
    """BiT's conventions, from big_transfer's `bit_pytorch/models.py`."""
    return TrunkSpec(
        stages=stages, width_factor=width_factor, preact=True, gn_eps=1e-5, ws="var-eps", ws_eps=1e-10, padding="fixed"
    )


def changed(spec: Spec, changes: Mapping[str, Any]) -> Spec:
    """The spec with fields replaced, also nested: `{"stem": {"gn_eps": 1e-5}}`."""
    table = config.to_dict(spec)
    for key, value in changes.items():
        nested = table.get(key)
        if isinstance(nested, dict) and isinstance(value, Mapping):
            if "padding" in value:  # of a trunk: that of its max-pool follows, unless it is given too
                nested = {**nested, "pool_padding": None}
            value = {**nested, **value}
        table[key] = value
    return config.from_dict(type(spec), table, "model.")


def spec_to_dict(spec: ModelSpec) -> dict[str, Any]:
    """The stored form, which `families.spec_from_dict` reads."""
    return {"kind": spec.kind, **config.to_dict(spec)}


def _nearest_divisor(number: int, wanted: int) -> int:
    """The largest divisor up to `wanted`, in a bounded search against hostile files."""
    return next((n for n in range(min(wanted, _MOST_HEADS), 0, -1) if number % n == 0), 1)
