"""EfficientNets: names and cost.

    EfficientNet-B0   EfficientNet-B7   EfficientNet-L2   efficientnet-b0

Convolutions and the head are counted, squeeze-and-excitation with them; tests hold all of it equal to what torch counts on the
built model.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from vitlab.core.errors import UnknownName
from vitlab.models.bit_family import FLOAT_BYTES, area, count_taps, halved
from vitlab.models.efficientnet_spec import DROPOUT_FIELDS, SCALINGS, BlockSizes, EfficientNetSpec, scaled_spec
from vitlab.models.family import ActivationBytes, Family
from vitlab.models.spec import Pair

_LISTED = tuple(f"EfficientNet-{size}" for size in SCALINGS)
_NAME = re.compile(r"EfficientNet-(?P<size>[A-Z]\d{1,9})")


# --- names ------------------------------------------------------------------------------------------------------------


def _parse(name: str) -> EfficientNetSpec | None:
    canonical = re.sub("^efficientnet-([a-z])", lambda match: f"EfficientNet-{match[1].upper()}", name)  # the alias
    if not (match := _NAME.fullmatch(canonical)):
        return None
    if match["size"] not in SCALINGS:
        raise UnknownName("model", name, _LISTED, hint=f"Sizes: {', '.join(SCALINGS)}.")
    return scaled_spec(SCALINGS[match["size"]])


def size_of(spec: EfficientNetSpec) -> str | None:
    """`B0` to `L2`, or None where widths or depths are other than the published ones."""
    return next((size for size in SCALINGS if _architecture(scaled_spec(SCALINGS[size])) == _architecture(spec)), None)


def _spell(spec: EfficientNetSpec) -> str:
    size = size_of(spec)
    return "EfficientNet" if size is None else f"EfficientNet-{size}"


def _architecture(spec: EfficientNetSpec) -> str:
    return f"widths {spec.stem_width} {spec.widths} {spec.last_width}, depths {spec.depths}"


# --- cost -------------------------------------------------------------------------------------------------------------


class PlacedBlock(NamedTuple):
    """A block with the rows and columns that it takes and gives."""

    sizes: BlockSizes
    before: Pair
    after: Pair


def _placed(spec: EfficientNetSpec, image_size: Pair) -> Iterator[PlacedBlock]:
    size = halved(image_size)  # after the stem
    for sizes in spec.blocks():
        out = halved(size) if sizes.stride == 2 else size
        yield PlacedBlock(sizes, size, out)
        size = out


def _count_params(spec: EfficientNetSpec) -> int:
    total = 9 * spec.in_channels * spec.stem_width + 2 * spec.stem_width
    for sizes in spec.blocks():
        if sizes.expands:
            total += sizes.cin * sizes.mid + 2 * sizes.mid
        total += sizes.kernel**2 * sizes.mid + 2 * sizes.mid
        total += 2 * sizes.mid * sizes.squeezed + sizes.squeezed + sizes.mid  # the only convolutions with a bias
        total += sizes.mid * sizes.cout + 2 * sizes.cout
    total += spec.widths[-1] * spec.last_width + 2 * spec.last_width
    return total + (spec.last_width + 1) * spec.num_classes


def _count_buffers(spec: EfficientNetSpec) -> int:
    """Mean and variance of every normalised channel, and for each norm how many batches it has seen."""
    channels, norms = spec.stem_width + spec.last_width, 2
    for sizes in spec.blocks():
        channels += (2 if sizes.expands else 1) * sizes.mid + sizes.cout
        norms += 3 if sizes.expands else 2
    return 2 * channels + norms


def _count_macs(spec: EfficientNetSpec, padding_taps: bool) -> int:
    total = count_taps(spec.padding, spec.image_size, 3, 2, padding_taps) * spec.in_channels * spec.stem_width
    for sizes, before, after in _placed(spec, spec.image_size):
        if sizes.expands:
            total += area(before) * sizes.cin * sizes.mid
        total += count_taps(spec.padding, before, sizes.kernel, sizes.stride, padding_taps) * sizes.mid
        total += 2 * sizes.mid * sizes.squeezed
        total += area(after) * sizes.mid * sizes.cout
    return total + area(spec.grid) * spec.widths[-1] * spec.last_width + spec.last_width * spec.num_classes


# --- memory -----------------------------------------------------------------------------------------------------------


def _activation_bytes(spec: EfficientNetSpec, half: bool, recompute: bool) -> ActivationBytes:
    """Under autocast all of it is halved: batch norm takes and gives what the convolutions do."""
    number = 2 if half else FLOAT_BYTES
    stem = spec.stem_width * area(halved(spec.image_size))
    kept = spec.in_channels * area(_padded(spec, spec.image_size, 3, 2)) + 2 * stem  # its norm's input and output
    most, working = 0, 0
    for block in _placed(spec, spec.image_size):
        count = _block_numbers(spec, block)
        kept += block.sizes.cin * area(block.before) if recompute else count
        most, working = max(most, count), max(working, 2 * block.sizes.mid * area(block.before))
    kept += (spec.widths[-1] + 2 * spec.last_width) * area(spec.grid)
    return ActivationBytes(kept=number * kept, block=number * most, working=number * working)


def _block_numbers(spec: EfficientNetSpec, block: PlacedBlock) -> int:
    """Every convolution and norm keeps its input, and so does every swish."""
    sizes, before, after = block
    filtered = sizes.mid * area(_padded(spec, before, sizes.kernel, sizes.stride))
    wide = 2 * sizes.mid * area(before) if sizes.expands else 0
    entry = sizes.cin * area(before) if sizes.expands else 0  # else that is what the depthwise convolution keeps
    # Behind the depthwise convolution: the norm's input and output, the swish's output and its product with the gate.
    return entry + wide + filtered + 4 * sizes.mid * area(after) + sizes.cout * area(after)


def _padded(spec: EfficientNetSpec, size: Pair, kernel: int, stride: int) -> Pair:
    """What a convolution keeps of its input: a padded copy, unless torch pads on the way."""
    if spec.padding == "fixed" or stride == 1:
        return size
    rows, cols = (side + max(0, (-(-side // stride) - 1) * stride + kernel - side) for side in size)
    return rows, cols


# --- the family -------------------------------------------------------------------------------------------------------


EFFICIENTNET = Family(
    spec=EfficientNetSpec,
    module="vitlab.models.efficientnet:EfficientNet",
    listed=_LISTED,
    parse=_parse,
    spell=_spell,
    architecture=_architecture,
    count_params=_count_params,
    count_macs=_count_macs,
    activation_bytes=_activation_bytes,
    count_buffers=_count_buffers,
    block=r"stages\.(\d+)\.",
    after_blocks=("last.", "norm.", "head."),
    input_kernel=lambda _: "stem.weight",
    dropout_fields=DROPOUT_FIELDS,
    free_fields=("bn_momentum",),
    formats=("efficientnet_torch",),
)
