"""What one image leaves in memory between the forward and the backward pass, in bytes, straight from the spec.

Owns the count of tensors that autograd keeps. With `half`, products run in two bytes and norms and sums in four, as
autocast has it on a GPU. A test counts the same on built models; docs/reference/recipes.md says how far a whole step is
from it.
"""

from vitlab.models.spec import BiTSpec, ModelSpec, Pair, TrunkSpec, ViTSpec

_WIDE = 4  # bytes of a float32
_INDEX = 8  # bytes of a place that max-pooling remembers


def kept_bytes(spec: ModelSpec, *, half: bool, recompute: bool = False) -> int:
    """Activations that training keeps for one image. Attention weights are not among them: the kernel has none.

    With `recompute`, a block or unit keeps its input alone, and the rest comes back in the backward pass: `block_bytes`.
    """
    if isinstance(spec, BiTSpec):
        return _trunk_bytes(spec.trunk, spec.in_channels, spec.image_size, half, recompute) + _normed(
            spec.trunk.out_channels * _area(spec.trunk.out_size(spec.image_size)), half=False
        )
    narrow = 2 if half else _WIDE
    entry = _WIDE * spec.num_tokens * spec.width  # what goes into a block
    total = spec.num_blocks * (entry if recompute else _attention_block_bytes(spec, half))
    total += (4 if spec.pool == "map" else 2) * entry  # the last norm's input and output, and a MAP head's k and v
    if spec.stem:
        total += _trunk_bytes(spec.stem, spec.in_channels, spec.image_size, half, recompute)
        return total + (_area(spec.stem.out_size(spec.image_size)) * spec.embed_channels * narrow if half else 0)
    return total + narrow * spec.in_channels * _area(spec.image_size)


def block_bytes(spec: ModelSpec, *, half: bool) -> int:
    """The most that one block or unit alone keeps for one image."""
    trunk = spec.trunk if isinstance(spec, BiTSpec) else spec.stem
    found = [_attention_block_bytes(spec, half)] if isinstance(spec, ViTSpec) else []
    if trunk is not None:
        found += [
            _unit_bytes(trunk, cin, mid, _area(size), _area(out), half)
            for cin, mid, size, out in _sized_units(trunk, spec.image_size)
        ]
    return max(found)


def standardised_bytes(spec: ModelSpec, *, half: bool) -> int:
    """Kernels that weight standardisation makes anew in every forward pass, however many images there are."""
    trunk = spec.trunk if isinstance(spec, BiTSpec) else spec.stem
    if trunk is None:
        return 0
    kernels = 7 * 7 * spec.in_channels * trunk.root_width
    for cin, mid, _ in _units(trunk):
        kernels += cin * mid + (9 + 4) * mid * mid + (4 * cin * mid if cin != 4 * mid else 0)
    copies = 2 if trunk.ws == "std-eps" else 1  # the difference to the mean, and its quotient; or both in one kernel
    return kernels * (copies * _WIDE + (2 if half else 0))


def working_bytes(spec: ModelSpec, *, half: bool) -> int:
    """The largest pair of gradients that the backward pass holds at once for one image, on top of what is kept."""
    narrow = 2 if half else _WIDE
    if isinstance(spec, ViTSpec) and not spec.stem:
        return 2 * narrow * spec.num_tokens * spec.mlp_dim
    trunk = spec.trunk if isinstance(spec, BiTSpec) else spec.stem
    assert trunk is not None
    return 2 * _WIDE * 4 * trunk.root_width * _area(spec.image_size) // 16  # the first stage, at a quarter of each side


def _area(size: Pair) -> int:
    return size[0] * size[1]


def _normed(numbers: int, half: bool) -> int:
    """A norm keeps its input, the ReLU after it its output; with `half` the convolution keeps a narrow copy of that."""
    return numbers * (2 * _WIDE + (2 if half else 0))


def _attention_block_bytes(spec: ViTSpec, half: bool) -> int:
    narrow = 2 if half else _WIDE
    tokens, d = spec.num_tokens, spec.width
    # Both norms keep their input. Kept for products: what the norms give, q, k, v, the heads' output, and the MLP's
    # hidden layer before and after the GELU.
    block = tokens * (2 * _WIDE * d + narrow * (6 * d + 2 * spec.mlp_dim))
    if spec.dropout:
        block += tokens * (2 * d + spec.mlp_dim)  # a byte for each number that may be dropped; four on a CPU
    if spec.layer_scale is not None:
        block += tokens * 2 * d * narrow
    if spec.pos == "relative":
        block += 3 * spec.heads * tokens**2 * narrow  # offsets' scores, the bias made of them, and the weights
    return block


def _trunk_bytes(trunk: TrunkSpec, in_channels: int, image_size: Pair, half: bool, recompute: bool) -> int:
    narrow = 2 if half else _WIDE
    root = trunk.root_width * _area(_halved(image_size))
    total = narrow * in_channels * _area(image_size) + _INDEX * root // 4
    # What is pooled is kept, padded; the hybrids' root has a norm and a ReLU before that.
    total += narrow * root if trunk.preact else 3 * _WIDE * root
    for cin, mid, size, out in _sized_units(trunk, image_size):
        entry = _WIDE * cin * _area(size)
        total += entry if recompute else _unit_bytes(trunk, cin, mid, _area(size), _area(out), half)
    return total


def _halved(size: Pair) -> Pair:
    return -(-size[0] // 2), -(-size[1] // 2)


def _sized_units(trunk: TrunkSpec, image_size: Pair) -> list[tuple[int, int, Pair, Pair]]:
    """(channels in, inner channels, size of the map in, and out) of the bottleneck units in order."""
    found: list[tuple[int, int, Pair, Pair]] = []
    size = _halved(_halved(image_size))  # the root and the pooling after it
    for cin, mid, stride in _units(trunk):
        out = size if stride == 1 else _halved(size)
        found.append((cin, mid, size, out))
        size = out
    return found


def _units(trunk: TrunkSpec) -> list[tuple[int, int, int]]:
    """(channels in, inner channels, stride) of the bottleneck units in order."""
    units: list[tuple[int, int, int]] = []
    cin = trunk.root_width
    for stage, count in enumerate(trunk.stages):
        mid = trunk.root_width * 2**stage
        for unit in range(count):
            units.append((cin, mid, 2 if stage and not unit else 1))
            cin = 4 * mid
    return units


def _unit_bytes(trunk: TrunkSpec, cin: int, mid: int, area: int, out_area: int, half: bool) -> int:
    narrow = 2 if half else _WIDE
    projects = cin != 4 * mid or area != out_area
    if trunk.preact:
        again = narrow * cin * area if half and projects else 0  # the projection's own narrow copy
        return _normed(cin * area + mid * area + mid * out_area, half) + again
    padded = (2 if projects else 1) * cin * area + mid * area + mid * out_area  # SAME copies what a convolution sees
    sums = (3 if projects else 2) * 4 * mid * out_area  # norm, projection's norm, ReLU of the sum
    return narrow * padded + 2 * _WIDE * (mid * area + mid * out_area) + _WIDE * sums
