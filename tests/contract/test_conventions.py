"""A value that a convention of a spec lists and no module handles is refused where the model is built, not computed as another.

`tests/unit/models/test_families.py` has the values that are not listed: a spec itself refuses those.
"""

import copy
import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

from vitlab.models.build import allocate
from vitlab.models.families import FAMILIES
from vitlab.models.names import parse_name
from vitlab.training.optim import make_optimizer
from vitlab.training.precision import autocast, grad_scaler
from vitlab.training.rules import OptimRule

# A model of each family, and one of a ViT with a ResNet stem.
NAMES = [family.listed[0] for family in FAMILIES.values()] + ["R+ViT-Ti/16"]
NO_VALUE = "zzz"


def conventions(spec: Any) -> Iterator[tuple[str, ...]]:
    """Where each closed set of values is, fields of fields too: ("pool",), ("stem", "ws"), ..."""
    hints = typing.get_type_hints(type(spec))
    for field in dataclasses.fields(spec):
        hint, value = hints[field.name], getattr(spec, field.name)
        if any(typing.get_origin(kind) is Literal for kind in (hint, *typing.get_args(hint))):
            yield (field.name,)
        elif dataclasses.is_dataclass(value):
            yield from ((field.name, *rest) for rest in conventions(value))


def with_unlisted(spec: Any, path: tuple[str, ...]) -> Any:
    """A copy with a value that nothing has checked, as if it had just been added to the `Literal`."""
    name, *rest = path
    other = copy.copy(spec)
    value = with_unlisted(getattr(spec, name), tuple(rest)) if rest else NO_VALUE
    object.__setattr__(other, name, value)
    return other


CASES = [(name, path) for name in NAMES for path in conventions(parse_name(name))]


@pytest.mark.parametrize(("name", "path"), CASES, ids=[f"{name}-{'.'.join(path)}" for name, path in CASES])
def test_value_that_no_module_handles_is_refused_at_construction(name: str, path: tuple[str, ...]) -> None:
    spec = parse_name(name)
    allocate(spec)
    with pytest.raises((AssertionError, KeyError), match=NO_VALUE):
        allocate(with_unlisted(spec, path))


def test_every_convention_is_tried() -> None:
    tried = {path[-1] for _, path in CASES}
    assert tried == {
        "pool",
        "pos",
        "pos_at",
        "pos_resize",
        "attention",
        "head",
        "gelu",
        "ws",
        "padding",
        "pool_padding",
    }
    assert {type(parse_name(name)) for name in NAMES} == {family.spec for family in FAMILIES.values()}


@pytest.mark.parametrize("use", [autocast, grad_scaler])
def test_precision_that_no_code_handles_is_refused(use: Any) -> None:
    with pytest.raises(KeyError, match=NO_VALUE):
        use(NO_VALUE, torch.device("cpu"))


@pytest.mark.parametrize("field", ["name", "momentum_dtype"])
def test_setting_of_an_optimiser_that_no_code_handles_is_refused(field: str) -> None:
    model = allocate(parse_name("ViT-mu/16"))
    with pytest.raises((AssertionError, KeyError), match=NO_VALUE):
        make_optimizer(model, with_unlisted(OptimRule(lr=0.1), (field,)))
