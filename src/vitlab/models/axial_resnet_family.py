"""AxialResNets: names and cost.

    AxialResNet-50-S   AxialResNet-50-M   AxialResNet-50-L   AxialResNet-26-S   AxialResNet-50-w16   axialresnet-50-l

`AxialResNet-50` alone is the widest, L: the paper's D.6 does not say which it ran, and that one has a ResNet-50's own root and
twice its inner widths. Matrix products only are counted, as in the paper's own numbers. Tests hold all of it equal to what
torch counts on the built model.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from vitlab.core.errors import UnknownName
from vitlab.models.bit_family import FLOAT_BYTES, INDEX_BYTES, area, count_taps, halved
from vitlab.models.family import ActivationBytes, Family
from vitlab.models.spec import AxialResNetSpec, Pair

# Units per stage and channels of the root, from the authors' `axialnet.py`; its 26 is not the ResNet-26 of the hybrids.
_STAGES = {26: (1, 2, 4, 1), 50: (3, 4, 6, 3)}
_WIDTHS = {"S": 32, "M": 48, "L": 64}
_LISTED = ("AxialResNet-26-S", "AxialResNet-50-S", "AxialResNet-50-M", "AxialResNet-50-L")
_NAME = re.compile(r"AxialResNet-(?P<depth>\d{1,9})(?:-(?P<size>[A-Z])|-w(?P<width>\d{1,9}))?")


# --- names ------------------------------------------------------------------------------------------------------------


def _parse(name: str) -> AxialResNetSpec | None:
    canonical = re.sub("^axialresnet-", "AxialResNet-", name)  # the alias
    canonical = re.sub("-[sml]$", lambda size: size[0].upper(), canonical)
    if not (match := _NAME.fullmatch(canonical)):
        return None
    depth, size = int(match["depth"]), match["size"] or "L"
    if depth not in _STAGES or size not in _WIDTHS:
        hint = f"Depths: {', '.join(map(str, _STAGES))}; sizes: {', '.join(_WIDTHS)}, or a width such as -w16."
        raise UnknownName("model", name, _LISTED, hint=hint)
    return AxialResNetSpec(stages=_STAGES[depth], width=int(match["width"] or _WIDTHS[size]))


def _spell(spec: AxialResNetSpec) -> str:
    depth = next((str(depth) for depth, stages in _STAGES.items() if stages == spec.stages), "")
    size = next((size for size, width in _WIDTHS.items() if width == spec.width), f"w{spec.width}")
    return f"AxialResNet-{depth or '(' + ','.join(map(str, spec.stages)) + ')'}-{size}"


# --- cost -------------------------------------------------------------------------------------------------------------


class _Units(NamedTuple):
    """Identical units: how many, channels, whether they halve the map, sizes in and out."""

    times: int
    cin: int
    inner: int
    projects: bool
    size: Pair
    out: Pair


def _units(spec: AxialResNetSpec) -> Iterator[_Units]:
    """The units in order; only the first of a stage differs from the others."""
    cin, size = spec.width, halved(halved(spec.image_size))  # after the root and its max-pool
    for stage, count in enumerate(spec.stages):
        inner, out = spec.inner(stage), halved(size) if stage else size
        # The first stage of all gives four times the root's channels, so that its first unit projects too.
        yield _Units(1, cin, inner, True, size, out)
        if count > 1:
            yield _Units(count - 1, 2 * inner, inner, False, out, out)
        cin, size = 2 * inner, out


def _count_params(spec: AxialResNetSpec) -> int:
    total = 49 * spec.in_channels * spec.width + 2 * spec.width
    for unit in _units(spec):
        c = unit.inner
        tables = 2 * c // spec.heads * (2 * sum(unit.size) - 2)
        attention = 2 * (2 * c * c + 4 * c + 6 * spec.heads + 4 * c) + tables  # and norms of qkv, logits and outputs
        projection = 2 * unit.cin * c + 4 * c if unit.projects else 0
        total += unit.times * (unit.cin * c + 2 * c + attention + 2 * c * c + 4 * c + projection)
    return total + (spec.representation_width + 1) * spec.num_classes


def _count_buffers(spec: AxialResNetSpec) -> int:
    """Mean and variance of each channel of a batch norm, and how many batches it has seen."""
    total = 2 * spec.width + 1
    for unit in _units(spec):
        attention = 2 * (2 * (2 * unit.inner + 3 * spec.heads + 2 * unit.inner) + 3)
        around = 2 * (unit.inner + 2 * unit.inner) + 2
        total += unit.times * (around + attention + (4 * unit.inner + 1 if unit.projects else 0))
    return total


def _count_macs(spec: AxialResNetSpec, padding_taps: bool) -> int:
    total = count_taps("fixed", spec.image_size, 7, 2, padding_taps) * spec.in_channels * spec.width
    for unit in _units(spec):
        c, before, after = unit.inner, area(unit.size), area(unit.out)
        # Of each place on a line of L: its qkv, three kinds of logits at half the channels, and two of values.
        attention = 2 * before * 2 * c * c + before * sum(unit.size) * (3 * c // 2 + 2 * c)
        projection = after * unit.cin * 2 * c if unit.projects else 0
        total += unit.times * (before * unit.cin * c + attention + after * 2 * c * c + projection)
    return total + spec.representation_width * spec.num_classes


# --- memory -----------------------------------------------------------------------------------------------------------


def _activation_bytes(spec: AxialResNetSpec, half: bool, recompute: bool) -> ActivationBytes:
    narrow = 2 if half else FLOAT_BYTES
    root = spec.width * area(halved(spec.image_size))
    pooled = spec.width * area(halved(halved(spec.image_size)))
    # Seen by the root, its norm and the max-pool, which remembers where each maximum was.
    kept = narrow * (spec.in_channels * area(spec.image_size) + 2 * root) + INDEX_BYTES * pooled
    kept += narrow * pooled  # goes into the first unit
    block = working = copies = 0
    for unit in _units(spec):
        whole, entry = _unit_bytes(spec, unit, half), narrow * 2 * unit.inner * area(unit.out)
        # The output of a unit is what the next one starts from, and a ReLU keeps it: it counts once, here.
        kept += unit.times * (entry if recompute else whole)
        block = max(block, whole)
        working = max(working, 2 * narrow * 3 * spec.heads * area(unit.size) * max(unit.size))
        tables = sum(side * side for side in unit.size)
        copies += unit.times * tables * (narrow * 2 * unit.inner // spec.heads + INDEX_BYTES)
    return ActivationBytes(kept, block, working, copies)


def _unit_bytes(spec: AxialResNetSpec, unit: _Units, half: bool) -> int:
    narrow, c, before, after = 2 if half else FLOAT_BYTES, unit.inner, area(unit.size), area(unit.out)
    logits = spec.heads * before * sum(unit.size)
    # Each attention: its lines, qkv before and after the norm, outputs before theirs.
    numbers = 2 * (before * c + 2 * 2 * before * c + 2 * before * c)
    numbers += 3 * logits  # before their norm
    numbers += logits
    numbers += 2 * before * c + after * c + 2 * 2 * after * c  # norm1 and its ReLU; the second ReLU; norm2 and the last
    if unit.size != unit.out:
        numbers += before * c  # before the average
    if unit.projects:
        numbers += 2 * c * after
    return narrow * numbers + (FLOAT_BYTES * logits if half else 0)  # the softmax stays in float32


# --- the family -------------------------------------------------------------------------------------------------------


AXIAL_RESNET = Family(
    spec=AxialResNetSpec,
    module="vitlab.models.axial_resnet:AxialResNet",
    listed=_LISTED,
    parse=_parse,
    spell=_spell,
    architecture=lambda spec: f"{spec.stages} units, width {spec.width}, {spec.heads} heads",
    count_params=_count_params,
    count_macs=_count_macs,
    activation_bytes=_activation_bytes,
    count_buffers=_count_buffers,
    block=r"stages\.(\d+)\.",
    after_blocks=("head.",),
    input_kernel=lambda _: "root.weight",
    never_decayed=r".*\.relative",
)
