"""All formats that vitlab reads and writes: those that the model families name."""

import importlib
from typing import Any

from vitlab.core.errors import UsageError, with_article
from vitlab.data.preprocess import Preprocess
from vitlab.models.families import FAMILIES
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec
from vitlab.weights.formats.format import Format

FORMATS: tuple[Format[Any, Any], ...] = tuple(
    found
    for family in FAMILIES.values()
    for module in family.formats
    for found in importlib.import_module(f"vitlab.weights.formats.{module}").FORMATS
)


def find_format(name: str, spec: ModelSpec) -> Format[Any, Any]:
    """The format of this name, or behind this target, for models of the spec's family."""
    for found in FORMATS:
        if name in (found.name, *found.targets) and isinstance(spec, found.spec):
            return found
    raise UsageError(f"the {name} format has no place for {with_article(format_name(spec))}")


def assumed_preprocess(name: str, spec: ModelSpec) -> Preprocess:
    """The preprocessing that is the convention of the format for such models."""
    return find_format(name, spec).preprocess(spec, name)
