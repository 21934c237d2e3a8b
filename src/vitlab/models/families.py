"""The table of model families, and the way from a spec to its record."""

from collections.abc import Mapping
from typing import Any

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.models.axial_resnet_family import AXIAL_RESNET
from vitlab.models.bit_family import BIT
from vitlab.models.efficientnet_family import EFFICIENTNET
from vitlab.models.family import Family
from vitlab.models.spec import ModelSpec
from vitlab.models.vit_family import VIT

FAMILIES: dict[str, Family[Any]] = {family.spec.kind: family for family in (VIT, BIT, EFFICIENTNET, AXIAL_RESNET)}


def family_of(spec: ModelSpec) -> Family[Any]:
    """The record of the spec's family; an error for a kind that is not in the table."""
    return _family(getattr(spec, "kind", None))


def spec_from_dict(table: Mapping[str, Any]) -> ModelSpec:
    """The spec that `spec_to_dict` stored."""
    if not isinstance(table, Mapping):
        raise UsageError(f"a model spec must be a table of keys, not {table!r}")
    fields = {key: value for key, value in table.items() if key != "kind"}
    return config.from_dict(_family(table.get("kind")).spec, fields, "model.")


def _family(kind: Any) -> Family[Any]:
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(f"model.kind must be one of {', '.join(FAMILIES)}, not {kind!r}")
    return FAMILIES[kind]
