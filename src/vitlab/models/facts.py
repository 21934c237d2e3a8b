"""Size, cost and tokens of a named model, without importing torch."""

import dataclasses
from collections.abc import Sequence

from vitlab.models.cost import count_macs, count_params
from vitlab.models.names import alias, format_name, parse_name, with_size
from vitlab.models.spec import ModelSpec, Pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Facts of a model; `tokens` and `grid` are None for a CNN."""

    name: str
    alias: str  # the name as a file system takes it: vit-b-16
    params: int
    macs: int  # multiplications with addition of one image, forward
    flops: int  # two for each of these
    tokens: int | None  # with the class token
    grid: Pair | None  # rows and columns of patches
    stride: int  # pixels from one patch to the next
    image_size: Pair  # rows and columns of pixels
    num_classes: int
    spec: ModelSpec


def model_info(name: str, *, image_size: int | Sequence[int] | None = None, classes: int | None = None) -> ModelInfo:
    """The facts of the model of that name, at another image size or number of classes. Exact, and nothing is built."""
    return info_of(with_size(parse_name(name), image_size=image_size, num_classes=classes))


def info_of(spec: ModelSpec) -> ModelInfo:
    macs = count_macs(spec)
    return ModelInfo(
        name=format_name(spec),
        alias=alias(format_name(spec)),
        params=count_params(spec),
        macs=macs,
        flops=2 * macs,
        tokens=spec.num_tokens,
        grid=spec.grid if spec.num_tokens else None,
        stride=spec.stride,
        image_size=spec.image_size,
        num_classes=spec.num_classes,
        spec=spec,
    )
