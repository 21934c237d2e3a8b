"""Parameters and multiply-adds in closed form, straight from the spec; no model is built.

Owns the arithmetic. Matrix products only: bias, norms, softmax and activations are left out, as the
paper's own numbers leave them out. A test holds both counts equal to what torch counts on the built model.
"""

from vitlab.models.spec import BiTSpec, ModelSpec, Pair, TrunkSpec, ViTSpec

JFT_IMAGES = 303_000_000


def count_params(spec: ModelSpec) -> int:
    """Every trainable number of the model."""
    return _vit_params(spec) if isinstance(spec, ViTSpec) else _bit_params(spec)


def count_macs(spec: ModelSpec, *, padding_taps: bool = True) -> int:
    """Multiply-adds for one image, forward. `padding_taps=False` leaves out convolution taps that fall on zero padding,
    which is how the compute columns of the paper's Table 6 were counted.
    """
    if isinstance(spec, BiTSpec):
        trunk = _trunk_macs(spec.trunk, spec.in_channels, spec.image_size, padding_taps)
        return trunk + spec.trunk.out_channels * spec.num_classes
    return _vit_macs(spec, padding_taps)


def training_exaflops(spec: ModelSpec, epochs: float, images: int = JFT_IMAGES) -> float:
    """Compute of a training run: 2 FLOPs per multiply-add, and a backward pass costs two forward passes."""
    return 6 * count_macs(spec, padding_taps=False) * epochs * images / 1e18


# --- ViT --------------------------------------------------------------------------------------------------------------


def _vit_params(spec: ViTSpec) -> int:
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
        total += _trunk_params(spec.stem, spec.in_channels)
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


def _vit_macs(spec: ViTSpec, padding_taps: bool) -> int:
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
        total += _trunk_macs(spec.stem, spec.in_channels, spec.image_size, padding_taps)
    if spec.pool == "map":  # one query against every token
        total += 2 * t * d * d + 2 * d * d + 2 * t * d + 2 * d * m
    if spec.head == "mlp-tanh":
        total += d * d
    return total + d * spec.num_classes


# --- ResNet -----------------------------------------------------------------------------------------------------------


def _bit_params(spec: BiTSpec) -> int:
    out = spec.trunk.out_channels
    return _trunk_params(spec.trunk, spec.in_channels) + 2 * out + (out + 1) * spec.num_classes


def _trunk_params(trunk: TrunkSpec, in_channels: int) -> int:
    total = 49 * in_channels * trunk.root_width
    if not trunk.preact:
        total += 2 * trunk.root_width
    for count, cin, mid, projects, _ in _units(trunk):
        unit = cin * mid + 9 * mid * mid + 4 * mid * mid
        # Pre-activation norms see each convolution's input, post-activation norms its output.
        unit += 2 * (cin + mid + mid) if trunk.preact else 2 * (mid + mid + 4 * mid)
        if projects:
            unit += 4 * cin * mid + (0 if trunk.preact else 2 * 4 * mid)
        total += count * unit
    return total


def _trunk_macs(trunk: TrunkSpec, in_channels: int, image_size: Pair, padding_taps: bool) -> int:
    root_taps, size = _convolve(trunk, image_size, 7, 2, padding_taps)
    total = root_taps * in_channels * trunk.root_width
    size = (-(-size[0] // 2), -(-size[1] // 2))  # max-pool
    for count, cin, mid, projects, stride in _units(trunk):
        taps, out_size = _convolve(trunk, size, 3, stride, padding_taps)
        unit = size[0] * size[1] * cin * mid + taps * mid * mid + out_size[0] * out_size[1] * 4 * mid * mid
        if projects:
            unit += out_size[0] * out_size[1] * 4 * cin * mid
        total += count * unit
        size = out_size
    return total


def _units(trunk: TrunkSpec) -> list[tuple[int, int, int, bool, int]]:
    """(how many alike, channels in, inner channels, has a projection, stride) for the bottleneck units in order."""
    units: list[tuple[int, int, int, bool, int]] = []
    cin = trunk.root_width
    for stage, count in enumerate(trunk.stages):
        mid = trunk.root_width * 2**stage
        stride = 2 if stage else 1
        units.append((1, cin, mid, cin != 4 * mid or stride != 1, stride))
        units.append((count - 1, 4 * mid, mid, False, 1))
        cin = 4 * mid
    return units


def _convolve(trunk: TrunkSpec, size: Pair, kernel: int, stride: int, padding_taps: bool) -> tuple[int, Pair]:
    """Kernel taps over all output positions, and the output size."""
    out = (-(-size[0] // stride), -(-size[1] // stride))
    if padding_taps:
        return out[0] * out[1] * kernel**2, out
    return _taps_inside(trunk, size[0], kernel, stride) * _taps_inside(trunk, size[1], kernel, stride), out


def _taps_inside(trunk: TrunkSpec, size: int, kernel: int, stride: int) -> int:
    """Along one axis, over all output positions, how many kernel taps fall on real pixels."""
    out = -(-size // stride)
    before = max(0, (out - 1) * stride + kernel - size) // 2 if trunk.padding == "same" else kernel // 2
    starts = (position * stride - before for position in range(out))
    return sum(min(start + kernel, size) - max(start, 0) for start in starts)
