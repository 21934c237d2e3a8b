"""EfficientNet: mobile inverted bottlenecks (MBConv) with squeeze-and-excitation and batch norm.

Owns the block and the classifier. Letters: B batch, C channels, Y X rows and columns, N positions, K classes.
"""

import math

import torch.nn.functional as F
from torch import Generator, Tensor, nn

from vitlab.models.batch_norm import BatchNorm
from vitlab.models.efficientnet_spec import BlockSizes, EfficientNetSpec
from vitlab.models.model import StageModel
from vitlab.models.ops import drop_path, pad_same
from vitlab.models.results import require_images
from vitlab.models.spec import Padding
from vitlab.models.tape import Tape, keep


class Conv(nn.Conv2d):
    """A convolution padded by the spec's rule, full or depthwise."""

    def __init__(
        self, rule: Padding, cin: int, cout: int, kernel: int, stride: int = 1, *, groups: int = 1, bias: bool = False
    ) -> None:
        # At stride 1 SAME is alike on all sides, and then torch need not copy what it pads.
        pads_itself = {"same": stride == 1, "fixed": True}[rule]
        super().__init__(cin, cout, kernel, stride, kernel // 2 if pads_itself else 0, groups=groups, bias=bias)
        self.pads_itself = pads_itself

    def init_weights(self, generator: Generator | None) -> None:
        """Normal by fan-out, where a depthwise kernel has one output (`conv_kernel_initializer` of the authors)."""
        fan_out = self.kernel_size[0] * self.kernel_size[1] * self.out_channels // self.groups
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_out), generator=generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:  # nn.Conv2d's own argument name
        x_BCYX = input if self.pads_itself else pad_same(input, self.kernel_size[0], self.stride[0])
        return super().forward(x_BCYX)


class MBConv(nn.Module):
    """Expand, filter each channel, weigh the channels, project; a skip where the shape stays."""

    def __init__(self, spec: EfficientNetSpec, sizes: BlockSizes, drop_rate: float) -> None:
        super().__init__()
        self.has_skip, self.drop_rate = sizes.has_skip, drop_rate
        rule, mid = spec.padding, sizes.mid
        self.expand = Conv(rule, sizes.cin, mid, 1) if sizes.expands else None
        self.expand_norm = _norm(spec, mid) if sizes.expands else None
        self.depthwise, self.depthwise_norm = (
            Conv(rule, mid, mid, sizes.kernel, sizes.stride, groups=mid),
            _norm(spec, mid),
        )
        self.squeeze = Conv(rule, mid, sizes.squeezed, 1, bias=True)
        self.excite = Conv(rule, sizes.squeezed, mid, 1, bias=True)
        self.project, self.project_norm = Conv(rule, mid, sizes.cout, 1), _norm(spec, sizes.cout)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        y = x_BCYX
        if self.expand is not None and self.expand_norm is not None:
            y = F.silu(self.expand_norm(self.expand(y)))
        y = F.silu(self.depthwise_norm(self.depthwise(y)))
        gate_BC11 = self.excite(F.silu(self.squeeze(y.mean(dim=(2, 3), keepdim=True)))).sigmoid()
        y = self.project_norm(self.project(y * gate_BC11))
        if not self.has_skip:
            return y
        return x_BCYX + (drop_path(y, self.drop_rate) if self.training else y)


class EfficientNet(StageModel):
    """An EfficientNet classifier."""

    recompute_units = (MBConv,)

    def __init__(self, spec: EfficientNetSpec) -> None:
        super().__init__()
        self.spec: EfficientNetSpec = spec  # pyright: ignore[reportIncompatibleVariableOverride]
        self.stem, self.stem_norm = (
            Conv(spec.padding, spec.in_channels, spec.stem_width, 3, 2),
            _norm(spec, spec.stem_width),
        )
        self.stages = nn.ModuleList(nn.ModuleList() for _ in spec.widths)
        count = sum(spec.depths)
        for i, sizes in enumerate(spec.blocks()):
            stage = self.stages[sizes.stage]
            assert isinstance(stage, nn.ModuleList)
            stage.append(MBConv(spec, sizes, spec.stochastic_depth * i / count))
        self.last, self.norm = Conv(spec.padding, spec.widths[-1], spec.last_width, 1), _norm(spec, spec.last_width)
        self.head = nn.Linear(spec.last_width, spec.num_classes) if spec.num_classes else None

    def forward(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        y_BC = self.represent(x_BCYX, tape)
        if self.head is None:
            return y_BC
        return keep(tape, "logits", self.head(F.dropout(y_BC, self.spec.dropout, self.training)))

    def represent(self, x_BCYX: Tensor, tape: Tape | None = None) -> Tensor:
        """What the head sees, [B, C]: the mean of the last feature map."""
        require_images(x_BCYX, self.spec.in_channels)
        x = keep(tape, "stem", F.silu(self.stem_norm(self.stem(x_BCYX))))
        for s, stage in enumerate(self.stages):
            for u, block in enumerate(stage):  # pyright: ignore[reportArgumentType]
                x = keep(tape, f"stage{s}/block{u:02d}", block(x))
        x = keep(tape, "encoded", F.silu(self.norm(self.last(x))))
        return keep(tape, "pooled", x.mean(dim=(2, 3)))

    @property
    def stage_maps(self) -> tuple[str, ...]:
        """Of each stage its last block; of the last one the feature map that is pooled."""
        depths = self.spec.depths
        return (*(f"stage{i}/block{count - 1:02d}" for i, count in enumerate(depths[:-1])), "encoded")

    def first_filters(self) -> tuple[Tensor, str]:
        """Those of the stem."""
        return self.stem.weight, "first convolution"


def _norm(spec: EfficientNetSpec, channels: int) -> BatchNorm:
    return BatchNorm(channels, eps=spec.bn_eps, momentum=spec.bn_momentum)
