"""Meta's DINOv2 files: timm's names, with `register_tokens` and without a head.

Facts: facebookresearch/dinov2, `dinov2/models/vision_transformer.py` and `dinov2/hub/backbones.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.spec import GridResize, Pair, ViTSpec
from vitlab.weights.conventions import dinov2_preprocess
from vitlab.weights.formats import timm_keys
from vitlab.weights.formats.format import Format, NoDialect
from vitlab.weights.formats.readings import compare, require_plain, tell_assumed
from vitlab.weights.formats.timm_keys import TimmDialect
from vitlab.weights.rules import Rule, spell_drop

_LAYER_SCALE = 1.0  # `init_values` of Meta's hub entry points; where training starts, not what the arrays hold


def recognises(arrays: Mapping[str, Tensor]) -> bool:
    return timm_keys.has_vit_names(arrays) and timm_keys.has_dinov2_names(arrays)


def leftovers(arrays: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Only masked pre-training reads the mask token."""
    return tuple(name for name in ("mask_token",) if name in arrays)


def read_spec(
    arrays: Mapping[str, Tensor], origin: str, config: Mapping[str, Any] | None = None, grid: Pair | None = None
) -> ViTSpec:
    """Derive the spec from the arrays and Meta's options in `config`."""
    renamed = {"reg_token" if name == "register_tokens" else name: array for name, array in arrays.items()}
    options = {"init_values": _LAYER_SCALE, **(config or {})}
    spec = timm_keys.read_vit(renamed, origin, options, grid, slots=(1, 0))
    if not _is_dinov2(spec):
        raise FileProblem(
            f"{origin} is not a DINOv2 file: it has a stem or a head, or lacks class token or layer scale"
        )
    return dataclasses.replace(spec, pos_resize=_usual_resize(spec.registers))


def rules(spec: ViTSpec) -> list[Rule]:
    require_plain("DINOv2", spec)
    if not _is_dinov2(spec):
        raise UsageError(
            "the DINOv2 format is for plain ViTs with a class token and layer scale, without a head",
            hint=f"Leave the head out with {spell_drop('head')}." if spec.num_classes else None,
        )
    return timm_keys.vit_rules(spec, TimmDialect(), registers="register_tokens")


def assumptions(spec: ViTSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    return tell_assumed(spec, config, {"heads": "num_heads", "image_size": "img_size"})


def create_args(spec: ViTSpec) -> dict[str, Any]:
    """Arguments of Meta's `DinoVisionTransformer` for this model."""
    rule = _meta_resize(spec)
    return {
        "img_size": spec.image_size[0],
        "patch_size": spec.patch,
        "in_chans": spec.in_channels,
        "embed_dim": spec.width,
        "depth": spec.depth,
        "num_heads": spec.heads,
        "mlp_ratio": spec.mlp_dim / spec.width,
        "init_values": spec.layer_scale,
        "block_chunks": 0,
        "num_register_tokens": spec.registers,
        "interpolate_antialias": rule == "bicubic-antialias",
        "interpolate_offset": 0.1 if rule == "bicubic-offset" else 0.0,
    }


def differences(spec: ViTSpec) -> tuple[str, ...]:
    """What Meta's code computes otherwise than `spec` says."""
    return compare(spec, {"pos_resize": _meta_resize(spec)})


def _meta_resize(spec: ViTSpec) -> GridResize:
    return spec.pos_resize if spec.pos_resize.startswith("bicubic") else _usual_resize(spec.registers)


def _usual_resize(registers: int) -> GridResize:
    """What Meta's hub uses: antialiased with registers, else a tenth of a cell off."""
    return "bicubic-antialias" if registers else "bicubic-offset"


def require_meta(spec: ViTSpec, _: str = "dinov2") -> None:
    """What Meta's own code could not load, though the names would fit."""
    if spec.grid[0] != spec.grid[1]:
        raise UsageError("Meta's code takes every grid as square", hint="Carry it to square images with --image-size.")
    if not spec.cls_in_pos:
        raise UsageError(
            "Meta's DINOv2 has a position for the class token, this model has none",
            hint="Add one of zeros with --cls-in-pos: the model computes the same.",
        )


def _is_dinov2(spec: ViTSpec) -> bool:
    return spec.uses_cls and spec.layer_scale is not None and not spec.stem and not spec.num_classes


def _notes(spec: ViTSpec) -> list[str]:
    notes = [f"DINOv2 needs: DinoVisionTransformer(**{create_args(spec)})"]
    notes.append("Its mask_token, which only pre-training reads, is not in the file: load with strict=False.")
    return [*notes, *differences(spec)]


FORMATS = (
    Format(
        name="dinov2",
        spec=ViTSpec,
        dialect=NoDialect,
        recognises=lambda arrays, _: recognises(arrays),
        read_dialect=lambda _: NoDialect(),
        read_spec=read_spec,
        leftovers=leftovers,
        assumptions=assumptions,
        rules=lambda spec, _: rules(spec),
        preprocess=lambda spec, _: dinov2_preprocess(spec),
        require_target=require_meta,
        notes=lambda spec, _, __: _notes(spec),
    ),
)
