"""torchvision's `vit_*` state dicts.

Facts: torchvision 0.28, `models/vision_transformer.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.spec import Pair, ViTSpec
from vitlab.weights.conventions import CROPPED, IMAGENET_PIXELS, usual_preprocess
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import (
    as_file_problem,
    compare,
    depth_of,
    heads_of,
    read_size,
    require_plain,
    shape_of,
    tell_assumed,
)
from vitlab.weights.rules import Rule

_LAYERS = "encoder.layers.encoder_layer_"
_BLOCK = r"blocks\.(\d+)\."
# torchvision resizes positions only on request (`interpolate_embeddings`), corner-aligned like the paper's code.
_CONVENTIONS: dict[str, Any] = {"gelu": "exact", "norm_eps": 1e-6, "pos_resize": "corner-bilinear"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchvisionDialect:
    """`linear_names`: published files say `mlp.linear_1`, state dicts `mlp.0`."""

    linear_names: bool = False


def recognises(arrays: Mapping[str, Tensor]) -> bool:
    return "conv_proj.weight" in arrays and f"{_LAYERS}0.self_attention.in_proj_weight" in arrays


def read_dialect(arrays: Mapping[str, Tensor]) -> TorchvisionDialect:
    return TorchvisionDialect(linear_names=f"{_LAYERS}0.mlp.linear_1.weight" in arrays)


def read_spec(
    arrays: Mapping[str, Tensor], origin: str, config: Mapping[str, Any] | None = None, grid: Pair | None = None
) -> ViTSpec:
    """Derive the spec from the arrays and `num_heads` in `config`."""
    first, _ = _mlp(read_dialect(arrays))
    width, channels, patch, other = shape_of(arrays, "conv_proj.weight", 4, origin)
    mlp_dim = shape_of(arrays, f"{_LAYERS}0.{first}.weight", 2, origin)[0]
    if patch != other:
        raise FileProblem(f"{origin} has oblong patches")
    shape_of(arrays, "encoder.pos_embedding", 3, origin)
    size, _ = read_size(arrays, "encoder.pos_embedding", (1,), patch, None, origin, grid=grid)
    with as_file_problem(origin):
        return ViTSpec(
            width=width,
            depth=depth_of(arrays, _LAYERS, origin),
            mlp_dim=mlp_dim,
            heads=heads_of(width, mlp_dim, (config or {}).get("num_heads"), origin),
            patch=patch,
            image_size=size,
            in_channels=channels,
            num_classes=shape_of(arrays, "heads.head.weight", 2, origin)[0] if "heads.head.weight" in arrays else 0,
            head="mlp-tanh" if "heads.pre_logits.weight" in arrays else "linear",
            **_CONVENTIONS,
        )


def rules(spec: ViTSpec, dialect: TorchvisionDialect) -> list[Rule]:
    require_plain("torchvision", spec)
    rows, cols = spec.image_size
    plain = spec.uses_cls and spec.cls_in_pos and spec.pos == "learned" and spec.stem is None
    if not plain or rows != cols:
        raise UsageError("the torchvision format is for plain ViTs with a class token, for square images")
    first, second = _mlp(dialect)
    layer = _LAYERS + r"\1."
    return [
        Rule(r"cls", ("class_token",)),
        Rule(r"pos\.table", ("encoder.pos_embedding",)),
        Rule(r"embed\.(\w+)", (r"conv_proj.\1",)),
        Rule(_BLOCK + r"norm(\d)\.(\w+)", (layer + r"ln_\2.\3",)),
        Rule(_BLOCK + r"attn\.qkv\.(\w+)", (layer + r"self_attention.in_proj_\2",)),  # q, k and v in our order
        Rule(_BLOCK + r"attn\.proj\.(\w+)", (layer + r"self_attention.out_proj.\2",)),
        Rule(_BLOCK + r"mlp\.fc1\.(\w+)", (rf"{layer}{first}.\2",)),
        Rule(_BLOCK + r"mlp\.fc2\.(\w+)", (rf"{layer}{second}.\2",)),
        Rule(r"norm\.(\w+)", (r"encoder.ln.\1",)),
        Rule(r"pre_logits\.(\w+)", (r"heads.pre_logits.\1",)),
        Rule(r"head\.(\w+)", (r"heads.head.\1",)),
    ]


def assumptions(spec: ViTSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    return tell_assumed(spec, config, {"heads": "num_heads"})


def create_args(spec: ViTSpec) -> dict[str, Any]:
    """Arguments of `torchvision.models.VisionTransformer` for this model."""
    return {
        "image_size": spec.image_size[0],
        "patch_size": spec.patch,
        "num_layers": spec.depth,
        "num_heads": spec.heads,
        "hidden_dim": spec.width,
        "mlp_dim": spec.mlp_dim,
        "num_classes": spec.num_classes,
        **({"representation_size": spec.width} if spec.head == "mlp-tanh" else {}),
    }


def differences(spec: ViTSpec) -> tuple[str, ...]:
    """What torchvision computes differently from `spec`."""
    return compare(spec, {**_CONVENTIONS, "in_channels": 3})


def _mlp(dialect: TorchvisionDialect) -> tuple[str, str]:
    return ("mlp.linear_1", "mlp.linear_2") if dialect.linear_names else ("mlp.0", "mlp.3")


FORMATS = (
    Format(
        name="torchvision",
        spec=ViTSpec,
        dialect=TorchvisionDialect,
        recognises=lambda arrays, _: recognises(arrays),
        read_dialect=read_dialect,
        read_spec=read_spec,
        assumptions=assumptions,
        rules=rules,
        preprocess=lambda spec, _: usual_preprocess(spec, {**CROPPED, **IMAGENET_PIXELS}),
        notes=lambda spec, _, __: [
            f"torchvision needs: VisionTransformer(**{create_args(spec)})",
            *differences(spec),
        ],
    ),
)
