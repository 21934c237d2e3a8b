"""BiT ResNets: names and cost, also of the ResNet stem that hybrids have.

    BiT-R50x1   BiT-R152x4   BiT-R50x1+NL   bit-r50x1-nl

`+NL` has non-local blocks in its second and third stage. Owns the arithmetic of bottleneck units. Matrix products only are
counted, as in the paper's own numbers: no bias, norm or activation. Tests hold all of it equal to what torch counts on the
built model.
"""

import dataclasses
import re
from typing import NamedTuple

from vitlab.core.errors import UnknownName
from vitlab.models.family import ActivationBytes, Family
from vitlab.models.sizes import RESNET_STAGES
from vitlab.models.spec import BiTSpec, Padding, Pair, TrunkSpec, bit_trunk, strided

FLOAT_BYTES = 4
INDEX_BYTES = 8  # of a place that max-pooling remembers
_LISTED = (
    *("BiT-R26x1", "BiT-R50x1", "BiT-R50x2", "BiT-R50x3", "BiT-R101x1", "BiT-R101x3"),
    *("BiT-R152x1", "BiT-R152x2", "BiT-R152x4", "BiT-R200x3", "BiT-R50x1+NL"),
)
_NAME = re.compile(r"BiT-R(?P<resnet>\d{1,9})x(?P<width>\d{1,9})(?P<non_local>\+NL)?")
_NON_LOCAL = (1, 2)  # res3 and res4 of the non-local networks, of four stages counted from 0


# --- names ------------------------------------------------------------------------------------------------------------


def _parse(name: str) -> BiTSpec | None:
    canonical = re.sub("^bit-r(.*?)(-nl)?$", lambda m: f"BiT-R{m[1]}{'+NL' if m[2] else ''}", name)  # the alias
    if not (match := _NAME.fullmatch(canonical)):
        return None
    trunk = bit_trunk(stages_of(name, match["resnet"], _LISTED), int(match["width"]))
    return BiTSpec(trunk=dataclasses.replace(trunk, non_local=_NON_LOCAL) if match["non_local"] else trunk)


def _spell(spec: BiTSpec) -> str:
    plain = f"BiT-{spell_resnet(spec.trunk.stages)}x{spec.trunk.width_factor}"
    return f"{plain}+NL" if spec.trunk.non_local else plain


def _architecture(spec: BiTSpec) -> str:
    places = ", ".join(map(str, spec.trunk.non_local))
    blocks = f", non-local blocks in stages {places}" if places else ""
    return f"{spec.trunk.stages} units, width x{spec.trunk.width_factor}{blocks}"


def stages_of(name: str, depth: str, listed: tuple[str, ...]) -> tuple[int, ...]:
    """Units per stage of a ResNet of this depth; `name` is the model it is for."""
    if int(depth) not in RESNET_STAGES:
        raise UnknownName("model", name, listed, hint=f"ResNet depths: {', '.join(map(str, RESNET_STAGES))}.")
    return RESNET_STAGES[int(depth)]


def spell_resnet(stages: tuple[int, ...]) -> str:
    for depth, known in RESNET_STAGES.items():
        if stages in (known, (*known[:2], known[2] + known[3])):
            return f"R{depth}"
    return f"R({','.join(map(str, stages))})"


# --- cost -------------------------------------------------------------------------------------------------------------


class Units(NamedTuple):
    """Identical bottleneck units: how many, channels, stride, sizes in and out."""

    times: int
    cin: int
    mid: int
    stride: int
    size: Pair
    out: Pair

    @property
    def projects(self) -> bool:
        return self.cin != 4 * self.mid


def halved(size: Pair) -> Pair:
    return strided(size, 2)


def area(size: Pair) -> int:
    return size[0] * size[1]


def _units(trunk: TrunkSpec, image_size: Pair) -> list[Units]:
    """The units in order; only the first of a stage differs from the others."""
    units: list[Units] = []
    cin, size = trunk.root_width, halved(halved(image_size))  # after the root and its max-pool
    for stage, count in enumerate(trunk.stages):
        mid, stride = trunk.root_width * 2**stage, 2 if stage else 1
        out = halved(size) if stage else size
        units.append(Units(1, cin, mid, stride, size, out))
        if count > 1:
            units.append(Units(count - 1, 4 * mid, mid, 1, out, out))
        cin, size = 4 * mid, out
    return units


def _kernel_params(trunk: TrunkSpec, in_channels: int) -> int:
    total = 49 * in_channels * trunk.root_width
    for unit in _units(trunk, (1, 1)):
        projection = 4 * unit.cin * unit.mid if unit.projects else 0
        total += unit.times * (unit.cin * unit.mid + 13 * unit.mid**2 + projection)
    return total


def trunk_params(trunk: TrunkSpec, in_channels: int) -> int:
    norms = 0 if trunk.preact else trunk.root_width
    for unit in _units(trunk, (1, 1)):
        # Pre-activation norms see each convolution's input, post-activation norms its output, also the projection's.
        after = (10 if unit.projects else 6) * unit.mid
        norms += unit.times * (unit.cin + 2 * unit.mid if trunk.preact else after)
    return _kernel_params(trunk, in_channels) + 2 * norms


def trunk_macs(trunk: TrunkSpec, in_channels: int, image_size: Pair, padding_taps: bool) -> int:
    total = count_taps(trunk.padding, image_size, 7, 2, padding_taps) * in_channels * trunk.root_width
    for unit in _units(trunk, image_size):
        macs = area(unit.size) * unit.cin * unit.mid + area(unit.out) * 4 * unit.mid**2
        macs += count_taps(trunk.padding, unit.size, 3, unit.stride, padding_taps) * unit.mid**2
        if unit.projects:
            macs += area(unit.out) * 4 * unit.cin * unit.mid
        total += unit.times * macs
    return total


def count_taps(rule: Padding, size: Pair, kernel: int, stride: int, padding_taps: bool) -> int:
    """Kernel taps over all positions, with or without those that fall on padding."""
    if padding_taps:
        return area(strided(size, stride)) * kernel**2
    return _taps_inside(rule, size[0], kernel, stride) * _taps_inside(rule, size[1], kernel, stride)


def _taps_inside(rule: Padding, size: int, kernel: int, stride: int) -> int:
    """The same along one axis."""
    out = -(-size // stride)
    before = max(0, (out - 1) * stride + kernel - size) // 2 if rule == "same" else kernel // 2
    starts = (position * stride - before for position in range(out))
    return sum(min(start + kernel, size) - max(start, 0) for start in starts)


# --- memory -----------------------------------------------------------------------------------------------------------


def trunk_bytes(trunk: TrunkSpec, in_channels: int, image_size: Pair, half: bool, recompute: bool) -> ActivationBytes:
    """What a trunk keeps; with `half`, products have two bytes and norms four."""
    narrow = 2 if half else FLOAT_BYTES
    root = trunk.root_width * area(halved(image_size))
    kept = narrow * in_channels * area(image_size) + INDEX_BYTES * root // 4
    # What is pooled is kept, padded; the hybrids' root has a norm and a ReLU before that.
    kept += narrow * root if trunk.preact else 3 * FLOAT_BYTES * root
    block = 0
    for unit in _units(trunk, image_size):
        unit_bytes = _unit_bytes(trunk, unit, half)
        kept += unit.times * (FLOAT_BYTES * unit.cin * area(unit.size) if recompute else unit_bytes)
        block = max(block, unit_bytes)
    copies = 2 if trunk.ws == "std-eps" else 1  # the difference to the mean, and its quotient; or both in one kernel
    return ActivationBytes(
        kept=kept,
        block=block,
        working=2 * FLOAT_BYTES * 4 * trunk.root_width * area(image_size) // 16,  # in the first stage
        weight_copies=_kernel_params(trunk, in_channels) * (copies * FLOAT_BYTES + (2 if half else 0)),
    )


def _unit_bytes(trunk: TrunkSpec, unit: Units, half: bool) -> int:
    narrow, before, after = 2 if half else FLOAT_BYTES, area(unit.size), area(unit.out)
    inner = unit.mid * (before + after)
    if trunk.preact:
        again = narrow * unit.cin * before if half and unit.projects else 0  # the projection's own narrow copy
        return _normed(unit.cin * before + inner, half) + again
    padded = (2 if unit.projects else 1) * unit.cin * before + inner  # SAME copies what a convolution sees
    sums = (3 if unit.projects else 2) * 4 * unit.mid * after  # norm, projection's norm, ReLU of the sum
    return narrow * padded + FLOAT_BYTES * (2 * inner + sums)


def _normed(numbers: int, half: bool) -> int:
    """Input of a norm, output of its ReLU, and the copy that autocast halves."""
    return numbers * (2 * FLOAT_BYTES + (2 if half else 0))


# --- non-local blocks -------------------------------------------------------------------------------------------------


class NonLocals(NamedTuple):
    """Identical non-local blocks: how many, channels, positions, those of them that can be looked at, and their unit."""

    times: int
    channels: int
    positions: int
    pooled: int
    unit: Units

    @property
    def params(self) -> int:
        c = self.channels  # four matrices, their biases, gain and bias of the norm
        return self.times * (2 * c * c + 3 * c // 2 + c + 2 * c)

    @property
    def macs(self) -> int:
        products = self.positions + self.pooled  # rows of query and out, of key and value
        return self.times * self.channels * (products * self.channels + self.positions * self.pooled)

    def bytes_of_one(self, half: bool) -> int:
        c, narrow = self.channels, 2 if half else FLOAT_BYTES
        # Into query and norm, q and out; into key and value, k and v.
        products = self.positions * 3 * c + self.pooled * 2 * c
        again = narrow * self.positions * c if half else 0  # the input is in float32, and halved for its products
        return narrow * products + again + INDEX_BYTES * self.pooled * c


def _non_locals(trunk: TrunkSpec, image_size: Pair) -> list[NonLocals]:
    found: list[NonLocals] = []
    units = {unit.mid: unit for unit in _units(trunk, image_size)}  # of each stage the last, as all but the first are
    for (mid, unit), (stage, count) in zip(units.items(), enumerate(trunk.stages), strict=True):
        if times := sum(trunk.follows_non_local(stage, index) for index in range(count)):
            found.append(NonLocals(times, 4 * mid, area(unit.out), area(halved(unit.out)), unit))
    return found


# --- the family -------------------------------------------------------------------------------------------------------


def _count_params(spec: BiTSpec) -> int:
    out = spec.trunk.out_channels
    others = sum(blocks.params for blocks in _non_locals(spec.trunk, (1, 1)))
    return trunk_params(spec.trunk, spec.in_channels) + others + 2 * out + (out + 1) * spec.num_classes


def _count_buffers(spec: BiTSpec) -> int:
    """Mean and variance of each channel of a non-local block's batch norm, and how many batches it has seen."""
    return sum(blocks.times * (2 * blocks.channels + 1) for blocks in _non_locals(spec.trunk, (1, 1)))


def _count_macs(spec: BiTSpec, padding_taps: bool) -> int:
    head = spec.trunk.out_channels * spec.num_classes
    others = sum(blocks.macs for blocks in _non_locals(spec.trunk, spec.image_size))
    return trunk_macs(spec.trunk, spec.in_channels, spec.image_size, padding_taps) + others + head


def _activation_bytes(spec: BiTSpec, half: bool, recompute: bool) -> ActivationBytes:
    trunk = trunk_bytes(spec.trunk, spec.in_channels, spec.image_size, half, recompute)
    last_norm = _normed(spec.trunk.out_channels * area(spec.grid), half=False)
    kept, block = trunk.kept + last_norm, trunk.block
    for blocks in _non_locals(spec.trunk, spec.image_size):  # a part of the unit before, also where it is recomputed
        kept += 0 if recompute else blocks.times * blocks.bytes_of_one(half)
        block = max(block, _unit_bytes(spec.trunk, blocks.unit, half) + blocks.bytes_of_one(half))
    return dataclasses.replace(trunk, kept=kept, block=block)


def _grown(old: BiTSpec, new: BiTSpec) -> BiTSpec:
    if old.trunk.non_local or len(new.trunk.stages) != len(old.trunk.stages):
        return old
    return dataclasses.replace(old, trunk=dataclasses.replace(old.trunk, non_local=new.trunk.non_local))


BIT = Family(
    spec=BiTSpec,
    module="vitlab.models.resnet:BiT",
    listed=_LISTED,
    parse=_parse,
    spell=_spell,
    architecture=_architecture,
    count_params=_count_params,
    count_macs=_count_macs,
    activation_bytes=_activation_bytes,
    count_buffers=_count_buffers,
    block=r"trunk\.stages\.(\d+)\.",
    after_blocks=("norm.", "head."),
    input_kernel=lambda _: "trunk.root.weight",
    grown=_grown,
    formats=("bit", "bit_torch"),
)
