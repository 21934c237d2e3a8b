"""BiT ResNets by the names of timm and of transformers.

Facts: timm 1.0.30, `models/resnetv2.py`; transformers 5.22, `models/bit`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitlab.core.errors import FileProblem
from vitlab.data.preprocess import Preprocess
from vitlab.models.spec import BiTSpec
from vitlab.weights.conventions import usual_preprocess
from vitlab.weights.formats import hf_settings, timm_settings
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.hf import HFDialect
from vitlab.weights.formats.readings import (
    as_file_problem,
    confirm,
    pair_of,
    read_trunk,
    require_known,
    shape_of,
    trunk_differences,
)
from vitlab.weights.formats.timm_keys import STRANGE, TimmDialect, input_size, options_of, shared_args, trunk_rules
from vitlab.weights.moves import one
from vitlab.weights.rules import Rule

_CONV_HEAD = one(lambda array: array[:, :, 0, 0], lambda tensor: tensor[:, :, None, None])  # OIHW


def differences(spec: BiTSpec) -> tuple[str, ...]:
    """What timm and transformers will compute otherwise than `spec` says."""
    return trunk_differences(spec.trunk, "trunk.")


# --- timm -------------------------------------------------------------------------------------------------------------

_TIMM_ROOT = "stem.conv.weight"
_TIMM_NAMES: dict[tuple[tuple[int, ...], int], str] = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def timm_entry(spec: BiTSpec) -> timm_settings.TimmEntry:
    name = _TIMM_NAMES.get((spec.trunk.stages, spec.trunk.width_factor))
    args = {"model_name": name, **shared_args(spec)} if name else None
    return timm_settings.TimmEntry(args, first_conv="stem.conv", classifier="head.fc", fixed_input_size=False)


def _recognises_timm(arrays: Mapping[str, Tensor], _: Mapping[str, Any]) -> bool:
    names = {_TIMM_ROOT, "norm.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.0.norm1.weight"}
    return names <= arrays.keys()


def _read_timm(arrays: Mapping[str, Tensor], origin: str, settings: Mapping[str, Any], _: Any = None) -> BiTSpec:
    require_known(arrays, STRANGE, origin)
    root = shape_of(arrays, _TIMM_ROOT, 4, origin)
    head = shape_of(arrays, "head.fc.weight", 4, origin)[0] if "head.fc.weight" in arrays else 0
    trunk = read_trunk(arrays, root, r"stages\.(\d+)\.blocks\.(\d+)\.", origin, preact=True)
    with as_file_problem(origin):
        size = input_size(options_of(settings)) or (224, 224)  # a ResNet takes images of any size
        return BiTSpec(trunk=trunk, image_size=size, in_channels=root[1], num_classes=head)


def _timm_rules(_: BiTSpec, __: TimmDialect) -> list[Rule]:
    return [
        *trunk_rules("trunk", ""),
        Rule(r"(norm\.\w+)", (r"\1",)),
        Rule(r"head\.weight", ("head.fc.weight",), _CONV_HEAD),
        Rule(r"head\.bias", ("head.fc.bias",)),
    ]


TIMM = Format(
    name="timm",
    spec=BiTSpec,
    dialect=TimmDialect,
    recognises=_recognises_timm,
    read_dialect=lambda _: TimmDialect(),
    read_spec=_read_timm,
    options=options_of,
    read_labels=timm_settings.read_labels,
    read_preprocess=timm_settings.read_config,
    rules=_timm_rules,
    preprocess=lambda spec, _: timm_settings.usual_preprocess(spec, crop_pct=0.875),
    notes=lambda spec, rule, _: [*timm_settings.notes(timm_entry(spec), rule), *differences(spec)],
    folder=lambda spec, rule, labels: {"config.json": timm_settings.config_json(spec, timm_entry(spec), rule, labels)},
)


# --- transformers -----------------------------------------------------------------------------------------------------

_HF_ROOT = "embedder.convolution.weight"
_HF_USUAL = {"layer_type": "preactivation", "hidden_act": "relu", "global_padding": None, "num_groups": 32}


def _hf_prefix(arrays: Mapping[str, Tensor]) -> str | None:
    return next((prefix for prefix in ("bit.", "") if prefix + _HF_ROOT in arrays), None)


def _recognises_hf(arrays: Mapping[str, Tensor], _: Mapping[str, Any]) -> bool:
    prefix = _hf_prefix(arrays)
    return prefix is not None and f"{prefix}encoder.stages.0.layers.0.conv1.weight" in arrays


def _read_hf(arrays: Mapping[str, Tensor], origin: str, settings: Mapping[str, Any], _: Any = None) -> BiTSpec:
    hf_settings.require_model_type(settings, ("bit",), origin)
    for key, value in _HF_USUAL.items():
        if settings.get(key, value) != value:
            raise FileProblem(f"{origin} has {key}={settings[key]!r}; a BiT ResNet has {value!r}")
    prefix = _hf_prefix(arrays) or ""
    root = shape_of(arrays, prefix + _HF_ROOT, 4, origin)
    head = shape_of(arrays, "classifier.1.weight", 2, origin)[0] if "classifier.1.weight" in arrays else 0
    pattern = prefix.replace(".", r"\.") + r"encoder\.stages\.(\d+)\.layers\.(\d+)\."
    trunk = read_trunk(arrays, root, pattern, origin, preact=True)
    confirm(settings, {"depths": list(trunk.stages)}, origin)
    with as_file_problem(origin):
        size = pair_of(settings.get("image_size"), origin) or (224, 224)  # a ResNet takes images of any size
        return BiTSpec(trunk=trunk, image_size=size, in_channels=root[1], num_classes=head)


def _hf_rules(_: BiTSpec, dialect: HFDialect) -> list[Rule]:
    prefix = "" if dialect.bare else "bit."
    unit, layer = r"trunk\.stages\.(\d+)\.(\d+)\.", prefix + r"encoder.stages.\1.layers.\2."
    return [
        Rule(r"trunk\.root\.weight", (prefix + _HF_ROOT,)),
        Rule(unit + r"((?:conv|norm)\d\.\w+)", (layer + r"\3",)),
        Rule(unit + r"proj\.weight", (layer + "downsample.conv.weight",)),
        Rule(r"(norm\.\w+)", (prefix + r"\1",)),
        Rule(r"head\.(\w+)", (r"classifier.1.\1",)),
    ]


def hf_config(spec: BiTSpec, labels: Sequence[str] = ()) -> dict[str, Any]:
    """The `config.json` beside the weights in a transformers folder."""
    trunk = spec.trunk
    body = {
        "embedding_size": trunk.root_width,
        # transformers forgets `width_factor` at its last norm, so the sizes themselves carry the width.
        "hidden_sizes": [4 * trunk.root_width * 2**stage for stage in range(len(trunk.stages))],
        "width_factor": 1,
        "depths": list(trunk.stages),
        **_HF_USUAL,
        "output_stride": max(32, trunk.stride),
        "embedding_dynamic_padding": False,
    }
    return hf_settings.config_json(spec, "bit", "Bit", body, labels)


def _hf_preprocess(spec: BiTSpec, _: str) -> Preprocess:
    mean, std = hf_settings.CLIP
    return usual_preprocess(spec, {"resize": "shorter-side", "filter": "bicubic", "mean": mean, "std": std})


HF = Format(
    name="hf",
    spec=BiTSpec,
    dialect=HFDialect,
    recognises=_recognises_hf,
    read_dialect=lambda arrays: HFDialect(bare=not _hf_prefix(arrays)),
    read_spec=_read_hf,
    preprocess_file=hf_settings.PREPROCESSOR,
    read_preprocess=hf_settings.read_preprocess,
    rules=_hf_rules,
    preprocess=_hf_preprocess,
    usual_dialect=lambda spec, _: {"bare": not spec.num_classes},
    notes=lambda spec, rule, _: [*hf_settings.notes(rule), *differences(spec)],
    folder=lambda spec, rule, labels: hf_settings.folder(hf_config(spec, labels), rule),
)

FORMATS = (TIMM, HF)
