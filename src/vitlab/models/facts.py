"""The facts of a named model, for people who choose one: size, cost, tokens. Torch-free, so it answers at once."""

import dataclasses
from collections.abc import Sequence

from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import alias, format_name, parse_name, with_size
from vitlab.models.spec import ModelSpec, Pair, ViTSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """`tokens` and `grid` are None for a CNN; `stride` is the true one, in pixels per token or feature."""

    name: str
    alias: str
    params: int
    macs: int
    flops: int
    tokens: int | None
    grid: Pair | None
    stride: int
    image_size: Pair
    num_classes: int
    spec: ModelSpec


def model_info(name: str, *, image_size: int | Sequence[int] | None = None, classes: int | None = None) -> ModelInfo:
    """Parameters, multiply-adds, FLOPs, tokens and grid of a model at a chosen image size and class count."""
    spec = with_size(parse_name(name), image_size=image_size, num_classes=classes)
    is_vit = isinstance(spec, ViTSpec)
    macs = count_macs(spec)
    return ModelInfo(
        name=format_name(spec),
        alias=alias(format_name(spec)),
        params=count_params(spec),
        macs=macs,
        flops=2 * macs,
        tokens=spec.num_tokens if is_vit else None,
        grid=spec.grid if is_vit else None,
        stride=spec.stride if is_vit else spec.trunk.stride,
        image_size=spec.image_size,
        num_classes=spec.num_classes,
        spec=spec,
    )
