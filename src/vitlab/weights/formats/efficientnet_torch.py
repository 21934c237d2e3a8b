"""EfficientNets by the names of timm and of torchvision.

Facts: timm 1.0.30, `models/efficientnet.py` and `_efficientnet_blocks.py`; torchvision 0.28, `models/efficientnet.py`.
No array shows how a convolution pads or the eps of batch norm, and the two disagree even with themselves: timm's
`tf_efficientnet_*` compute as the authors do, its `efficientnet_*` as torch does; torchvision's B5 to B7 have the authors' eps.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.core.errors import FileProblem
from vitlab.data.preprocess import Preprocess
from vitlab.models.efficientnet_family import size_of
from vitlab.models.efficientnet_spec import B0_STAGES, SCALINGS, EfficientNetSpec
from vitlab.models.spec import Pair
from vitlab.weights.conventions import IMAGENET_PIXELS, usual_preprocess
from vitlab.weights.formats import timm_settings
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import as_file_problem, compare, number, read_stages, shape_of
from vitlab.weights.formats.timm_keys import input_size, options_of, shared_args
from vitlab.weights.moves import Move
from vitlab.weights.rules import Rule

_TORCH: dict[str, Any] = {"bn_eps": 1e-5, "bn_momentum": 0.1}  # torch's own
_AUTHORS: dict[str, Any] = {"bn_eps": 1e-3, "bn_momentum": 0.01}
_STARTS_AT_ZERO = Move(lambda _: torch.zeros((), dtype=torch.int64), lambda _: ())  # as torch does where files lack it


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchNormDialect:
    """`counted`: whether norms say how many batches they have seen; files of old torch versions do not."""

    counted: bool = True


def _read_dialect(arrays: Mapping[str, Tensor]) -> BatchNormDialect:
    return BatchNormDialect(counted=any(name.endswith(".num_batches_tracked") for name in arrays))


def _read_sizes(
    arrays: Mapping[str, Tensor], origin: str, rules: Sequence[Rule], unit: str, first_stage: int
) -> dict[str, Any]:
    """Widths, depths, channels and classes of the arrays under the names that `rules` have for ours.

    `unit` is a pattern for their numbers of stage and unit, of which the stages' begin at `first_stage`.
    """

    def theirs(ours: str) -> str:
        return next(match.expand(rule.theirs[0]) for rule in rules if (match := re.fullmatch(rule.ours, ours)))

    depths = read_stages(arrays, unit, origin, first_stage, first_unit=0)
    if len(depths) != len(B0_STAGES):
        raise FileProblem(f"{origin} has {len(depths)} stages; an EfficientNet has {len(B0_STAGES)}")
    widths: list[int] = []
    for stage, row in enumerate(B0_STAGES):
        kernel = shape_of(arrays, theirs(f"stages.{stage}.0.depthwise.weight"), 4, origin)
        if kernel[1:] != (1, row.kernel, row.kernel):
            raise FileProblem(f"{origin}: stage {stage} is not that of an EfficientNet; vitlab has no such model")
        widths.append(shape_of(arrays, theirs(f"stages.{stage}.0.project.weight"), 4, origin)[0])
    stem, head = shape_of(arrays, theirs("stem.weight"), 4, origin), theirs("head.weight")
    return {
        "stem_width": stem[0],
        "in_channels": stem[1],
        "widths": tuple(widths),
        "depths": depths,
        "last_width": shape_of(arrays, theirs("last.weight"), 4, origin)[0],
        "num_classes": shape_of(arrays, head, 2, origin)[0] if head in arrays else 0,
    }


def _with_rates(spec: EfficientNetSpec, size: Pair | None) -> EfficientNetSpec:
    """With the image size and dropout of the published model of these widths, where there is one."""
    scaling = SCALINGS.get(size_of(spec) or "")
    if scaling is None:
        return dataclasses.replace(spec, image_size=size or spec.image_size)
    usual = (scaling.image_size, scaling.image_size)
    return dataclasses.replace(spec, image_size=size or usual, dropout=scaling.dropout)


def _norm_rules(ours: str, theirs: str, dialect: BatchNormDialect) -> list[Rule]:
    count = "|num_batches_tracked" if dialect.counted else ""
    groups = re.compile(ours).groups
    return [Rule(rf"{ours}\.(weight|bias|running_mean|running_var{count})", (rf"{theirs}.\{groups + 1}",))]


def _uncounted(dialect: BatchNormDialect) -> list[Rule]:
    return [] if dialect.counted else [Rule(r".*\.num_batches_tracked", (), _STARTS_AT_ZERO)]


# --- timm -------------------------------------------------------------------------------------------------------------

_TIMM_ENTRY = re.compile(r"(tf_)?efficientnet_(?:b\d|l2)(_pruned)?(?:\..*)?")
# Of the authors' weights, by size: their own resolution and crop. timm's later weights bring their settings with them.
_TIMM_CROPS = dict(zip(SCALINGS, (0.875, 0.882, 0.89, 0.904, 0.922, 0.934, 0.942, 0.949, 0.961), strict=True))


def _timm_options(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """timm's options, with those that the entry point sets."""
    options = options_of(config)
    architecture = options.get("architecture")
    match = _TIMM_ENTRY.fullmatch(architecture) if isinstance(architecture, str) else None
    same = match is not None and bool(match[1] or match[2])
    implied = {"pad_type": "same" if same else "", "bn_eps": 1e-3 if same else 1e-5} if match else {}
    return {**implied, **options}


def _recognises_timm(arrays: Mapping[str, Tensor], _: Mapping[str, Any]) -> bool:
    return {"conv_stem.weight", "bn1.running_mean", "blocks.0.0.conv_dw.weight", "conv_head.weight"} <= arrays.keys()


def _read_timm(
    arrays: Mapping[str, Tensor], origin: str, settings: Mapping[str, Any], _: Any = None
) -> EfficientNetSpec:
    options = _timm_options(settings)
    pads = options.get("pad_type", "same")
    if pads not in ("", "same"):
        raise FileProblem(f"{origin} pads by the rule {pads!r}; vitlab knows timm's '' and 'same'")
    with as_file_problem(origin):
        spec = EfficientNetSpec(
            **_read_sizes(arrays, origin, _timm_rules(BatchNormDialect()), r"blocks\.(\d+)\.(\d+)\.", 0),
            padding="same" if pads == "same" else "fixed",
            bn_eps=number(options, "bn_eps", _AUTHORS["bn_eps"], origin),
            bn_momentum=number(options, "bn_momentum", _TORCH["bn_momentum"], origin),
        )
        return _with_rates(spec, input_size(options))


def _timm_assumptions(spec: EfficientNetSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    options = _timm_options(config)
    fields = {"padding": "pad_type", "bn_eps": "bn_eps"}
    silent = [f"{field}={getattr(spec, field)}" for field, option in fields.items() if options.get(option) is None]
    if not silent:
        return ()
    return (
        f"No array shows this, so it is assumed, as timm's tf_efficientnet_* have it: {', '.join(silent)}. If it is wrong: put "
        'timm\'s config.json beside model.safetensors; {"architecture": "efficientnet_b0"} is enough',
    )


def _timm_rules(dialect: BatchNormDialect) -> list[Rule]:
    first, block = r"stages\.0\.(\d+)\.", r"stages\.([1-6])\.(\d+)\."
    any_block = r"stages\.(\d+)\.(\d+)\."
    return [
        Rule(r"stem\.weight", ("conv_stem.weight",)),
        *_norm_rules("stem_norm", "bn1", dialect),
        Rule(any_block + r"depthwise\.weight", (r"blocks.\1.\2.conv_dw.weight",)),
        Rule(any_block + r"squeeze\.(\w+)", (r"blocks.\1.\2.se.conv_reduce.\3",)),
        Rule(any_block + r"excite\.(\w+)", (r"blocks.\1.\2.se.conv_expand.\3",)),
        *_norm_rules(first + "depthwise_norm", r"blocks.0.\1.bn1", dialect),
        Rule(first + r"project\.weight", (r"blocks.0.\1.conv_pw.weight",)),
        *_norm_rules(first + "project_norm", r"blocks.0.\1.bn2", dialect),
        Rule(block + r"expand\.weight", (r"blocks.\1.\2.conv_pw.weight",)),
        *_norm_rules(block + "expand_norm", r"blocks.\1.\2.bn1", dialect),
        *_norm_rules(block + "depthwise_norm", r"blocks.\1.\2.bn2", dialect),
        Rule(block + r"project\.weight", (r"blocks.\1.\2.conv_pwl.weight",)),
        *_norm_rules(block + "project_norm", r"blocks.\1.\2.bn3", dialect),
        Rule(r"last\.weight", ("conv_head.weight",)),
        *_norm_rules("norm", "bn2", dialect),
        Rule(r"head\.(\w+)", (r"classifier.\1",)),
        *_uncounted(dialect),
    ]


def timm_entry(spec: EfficientNetSpec) -> timm_settings.TimmEntry:
    """timm's entry point with this padding; what else it computes otherwise goes with it as an argument."""
    size, same = size_of(spec), spec.padding == "same"
    args: dict[str, Any] | None = None
    if size is not None:
        args = {"model_name": f"{'tf_' if same else ''}efficientnet_{size.lower()}", **shared_args(spec)}
        args |= {} if spec.bn_eps == (1e-3 if same else 1e-5) else {"bn_eps": spec.bn_eps}
        args |= {} if spec.bn_momentum == _TORCH["bn_momentum"] else {"bn_momentum": spec.bn_momentum}
    return timm_settings.TimmEntry(args, first_conv="conv_stem", classifier="classifier", fixed_input_size=False)


def _timm_preprocess(spec: EfficientNetSpec, _: str) -> Preprocess:
    pixels = usual_preprocess(spec, IMAGENET_PIXELS)
    cfg = {"input_size": [spec.in_channels, *spec.image_size], "mean": pixels.mean, "std": pixels.std}
    crop = _TIMM_CROPS.get(size_of(spec) or "", 0.875)
    return timm_settings.read_preprocess({**cfg, "crop_pct": crop, "interpolation": "bicubic"})


TIMM = Format(
    name="timm",
    spec=EfficientNetSpec,
    dialect=BatchNormDialect,
    recognises=_recognises_timm,
    read_dialect=_read_dialect,
    read_spec=_read_timm,
    stated_by={},
    options=_timm_options,
    assumptions=_timm_assumptions,
    read_labels=timm_settings.read_labels,
    read_preprocess=timm_settings.read_config,
    rules=lambda _, dialect: _timm_rules(dialect),
    preprocess=_timm_preprocess,
    notes=lambda spec, rule, _: timm_settings.notes(timm_entry(spec), rule),
    folder=lambda spec, rule, labels: {"config.json": timm_settings.config_json(spec, timm_entry(spec), rule, labels)},
)


# --- torchvision ------------------------------------------------------------------------------------------------------

# The pixels that the shorter side is scaled to before the crop, by size (`EfficientNet_B0_Weights` and so on).
_VISION_RESIZE = {"B0": 256, "B1": 256, "B2": 288, "B3": 320, "B4": 384, "B5": 456, "B6": 528, "B7": 600}
_VISION_CROP = {"B2": 288}  # where it is not the authors' resolution


def _recognises_vision(arrays: Mapping[str, Tensor], _: Mapping[str, Any]) -> bool:
    sized = {"features.0.0.weight", "features.8.0.weight"}
    return sized | {"features.1.0.block.0.1.running_mean", "features.1.0.block.1.fc1.weight"} <= arrays.keys()


def _vision_conventions(spec: EfficientNetSpec) -> dict[str, Any]:
    """torchvision gives its three largest the authors' batch norm."""
    return {"padding": "fixed", **(_AUTHORS if size_of(spec) in ("B5", "B6", "B7") else _TORCH)}


def _read_vision(arrays: Mapping[str, Tensor], origin: str, _: Mapping[str, Any], __: Any = None) -> EfficientNetSpec:
    with as_file_problem(origin):
        unit = r"features\.([1-7])\.(\d+)\."
        spec = EfficientNetSpec(**_read_sizes(arrays, origin, _vision_rules(BatchNormDialect()), unit, 1))
        spec = _with_rates(dataclasses.replace(spec, **_vision_conventions(spec)), None)
        crop = _VISION_CROP.get(size_of(spec) or "")
        return dataclasses.replace(spec, image_size=(crop, crop)) if crop else spec


def _vision_rules(dialect: BatchNormDialect) -> list[Rule]:
    found = [Rule(r"stem\.weight", ("features.0.0.weight",)), *_norm_rules("stem_norm", "features.0.1", dialect)]
    for stage, row in enumerate(B0_STAGES):
        unit, block = rf"stages\.{stage}\.(\d+)\.", rf"features.{stage + 1}.\1.block."
        parts = [*(["expand"] if row.expansion > 1 else []), "depthwise", "squeeze", "project"]
        for place, part in enumerate(parts):
            if part == "squeeze":
                found += [
                    Rule(unit + r"squeeze\.(\w+)", (rf"{block}{place}.fc1.\2",)),
                    Rule(unit + r"excite\.(\w+)", (rf"{block}{place}.fc2.\2",)),
                ]
            else:
                found += [Rule(rf"{unit}{part}\.weight", (f"{block}{place}.0.weight",))]
                found += _norm_rules(f"{unit}{part}_norm", f"{block}{place}.1", dialect)
    found += [Rule(r"last\.weight", ("features.8.0.weight",)), *_norm_rules("norm", "features.8.1", dialect)]
    return [*found, Rule(r"head\.(\w+)", (r"classifier.1.\1",)), *_uncounted(dialect)]


def differences(spec: EfficientNetSpec) -> tuple[str, ...]:
    """What torchvision computes differently from `spec`; momentum matters in training alone."""
    return compare(spec, {**_vision_conventions(spec), "in_channels": 3})


def _vision_notes(spec: EfficientNetSpec) -> list[str]:
    size = size_of(spec)
    if size not in _VISION_RESIZE:
        return ["torchvision has no entry point that builds this model", *differences(spec)]
    call = f"efficientnet_{size.lower()}(num_classes={spec.num_classes})"
    return [f"torchvision needs: {call}", *differences(spec)]


def _vision_preprocess(spec: EfficientNetSpec, _: str) -> Preprocess:
    side = spec.image_size[0]
    resized = max(side, _VISION_RESIZE.get(size_of(spec) or "", round(side / 0.875)))
    rule: dict[str, Any] = {"resize": "shorter-side", "crop_frac": side / resized, "filter": "bicubic"}
    return usual_preprocess(spec, {**rule, **IMAGENET_PIXELS})


TORCHVISION = Format(
    name="torchvision",
    spec=EfficientNetSpec,
    dialect=BatchNormDialect,
    recognises=_recognises_vision,
    read_dialect=_read_dialect,
    read_spec=_read_vision,
    stated_by={},
    rules=lambda _, dialect: _vision_rules(dialect),
    preprocess=_vision_preprocess,
    notes=lambda spec, _, __: _vision_notes(spec),
)

FORMATS = (TIMM, TORCHVISION)
