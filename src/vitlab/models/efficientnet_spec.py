"""The spec of an EfficientNet, and the published sizes (Tan & Le 2019; L2: Xie et al. 2020, Noisy Student).

Every size is the table of B0, scaled: widths by one factor and rounded to eights, blocks of a stage by another and rounded
up. Facts: `efficientnet_builder.py` and `efficientnet_model.py` of the authors' released code.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from vitlab.core.errors import require
from vitlab.models.spec import ModelSpec, Padding, Pair, require_positive, require_rates, strided

DROPOUT_FIELDS = ("dropout", "stochastic_depth")  # rates that act in training alone
_MOST_BLOCKS = 1024  # of a stage: each is a module


class StageRow(NamedTuple):
    """One stage of B0; kernel, stride and expansion are the same in all sizes."""

    blocks: int
    kernel: int
    stride: int  # of its first block
    expansion: int
    width: int


B0_STAGES = (
    StageRow(1, 3, 1, 1, 16),
    StageRow(2, 3, 2, 6, 24),
    StageRow(2, 5, 2, 6, 40),
    StageRow(3, 3, 2, 6, 80),
    StageRow(3, 5, 1, 6, 112),
    StageRow(4, 5, 2, 6, 192),
    StageRow(1, 3, 1, 6, 320),
)
_B0_STEM, _B0_LAST = 32, 1280


class Scaling(NamedTuple):
    width: float
    depth: float
    image_size: int
    dropout: float


SCALINGS: dict[str, Scaling] = {
    "B0": Scaling(1.0, 1.0, 224, 0.2),
    "B1": Scaling(1.0, 1.1, 240, 0.2),
    "B2": Scaling(1.1, 1.2, 260, 0.3),
    "B3": Scaling(1.2, 1.4, 300, 0.3),
    "B4": Scaling(1.4, 1.8, 380, 0.4),
    "B5": Scaling(1.6, 2.2, 456, 0.4),
    "B6": Scaling(1.8, 2.6, 528, 0.5),
    "B7": Scaling(2.0, 3.1, 600, 0.5),
    "L2": Scaling(4.3, 5.3, 800, 0.5),
}


class BlockSizes(NamedTuple):
    """One MBConv block: stage, channels, kernel and stride."""

    stage: int
    cin: int
    mid: int  # channels between expansion and projection
    cout: int
    kernel: int
    stride: int

    @property
    def expands(self) -> bool:
        return self.mid != self.cin

    @property
    def squeezed(self) -> int:
        """Channels of squeeze-and-excitation: a quarter of what enters the block, before its expansion."""
        return max(1, self.cin // 4)

    @property
    def has_skip(self) -> bool:
        return self.stride == 1 and self.cin == self.cout


@dataclasses.dataclass(frozen=True, kw_only=True)
class EfficientNetSpec(ModelSpec):
    """An EfficientNet, by default as its authors compute it; kernels, strides and expansions are those of B0's stages."""

    kind: ClassVar[str] = "efficientnet"
    stem_width: int
    widths: tuple[int, ...]  # channels that each of the seven stages gives
    depths: tuple[int, ...]  # blocks of each
    last_width: int  # channels of the 1x1 convolution after the last stage
    image_size: Pair = (224, 224)
    in_channels: int = 3
    num_classes: int = 1000
    padding: Padding = "same"  # timm's efficientnet_* and torchvision pad alike on all sides: fixed
    bn_eps: float = 1e-3
    bn_momentum: float = 0.01  # share of the newest batch in the running statistics: TensorFlow's 0.99 is 0.01 in torch
    dropout: float = 0.2  # before the head
    stochastic_depth: float = 0.2  # rate at the end; block i of n has i/n of it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("widths", "depths"):
            count = len(getattr(self, name))
            require(count == len(B0_STAGES), f"{name} must have one number for each of the 7 stages, not {count}")
        require_positive(self, "stem_width", "widths", "last_width", "bn_eps")
        require_positive(self, "depths", most=_MOST_BLOCKS)
        require_positive(self, "bn_momentum", most=1)
        require_rates(self, *DROPOUT_FIELDS)

    def grid_for(self, image_size: Pair) -> Pair:
        """Each halving rounds up, in both padding rules."""
        return strided(image_size, self.stride)

    @property
    def stride(self) -> int:
        return 2 * math.prod(row.stride for row in B0_STAGES)

    @property
    def num_blocks(self) -> int:
        return len(B0_STAGES)

    @property
    def representation_width(self) -> int:
        return self.last_width

    def blocks(self) -> Iterator[BlockSizes]:
        """Every block, from the input on."""
        cin = self.stem_width
        for stage, (row, width, depth) in enumerate(zip(B0_STAGES, self.widths, self.depths, strict=True)):
            for unit in range(depth):
                yield BlockSizes(stage, cin, cin * row.expansion, width, row.kernel, 1 if unit else row.stride)
                cin = width


def scaled_spec(scaling: Scaling) -> EfficientNetSpec:
    """B0's table at another scale."""
    return EfficientNetSpec(
        stem_width=_scaled_width(_B0_STEM, scaling.width),
        widths=tuple(_scaled_width(row.width, scaling.width) for row in B0_STAGES),
        depths=tuple(math.ceil(row.blocks * scaling.depth) for row in B0_STAGES),
        last_width=_scaled_width(_B0_LAST, scaling.width),
        image_size=(scaling.image_size, scaling.image_size),
        dropout=scaling.dropout,
    )


def _scaled_width(width: int, factor: float) -> int:
    """To the nearest multiple of 8, but never more than a tenth below (`round_filters` of the authors)."""
    exact = width * factor
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded
