"""One list of rules per foreign format, used in both directions, with every array accounted for.

A rule says, for the parameters of ours that its pattern matches, which of their arrays hold them and by which move. Reading
and writing both start from our parameter names, so a format has one map and cannot disagree with itself.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.build import allocate
from vitlab.models.spec import ModelSpec
from vitlab.weights.moves import SAME, Move


@dataclasses.dataclass(frozen=True)
class Rule:
    """`ours` is a regular expression over our whole parameter name; `theirs` are the names it expands to."""

    ours: str
    theirs: tuple[str, ...]
    move: Move = SAME


@dataclasses.dataclass(frozen=True)
class Link:
    theirs: tuple[str, ...]
    move: Move


def link(rules: Sequence[Rule], spec: ModelSpec, format_name: str) -> dict[str, Link]:
    """Our parameter name -> their arrays, for every parameter of the spec; each must be matched by exactly one rule."""
    links: dict[str, Link] = {}
    for name in allocate(spec).state_dict():
        found = [(match, rule) for rule in rules if (match := re.fullmatch(rule.ours, name))]
        if not found:
            raise UsageError(
                f"the {format_name} format has no place for '{name}'",
                hint=f"Leave it out with --drop {name.split('.')[0]}.",
            )
        if len(found) > 1:
            raise AssertionError(f"{format_name}: '{name}' is matched by {[rule.ours for _, rule in found]}")
        match, rule = found[0]
        links[name] = Link(tuple(match.expand(name_) for name_ in rule.theirs), rule.move)
    return links


def bring_in(
    links: Mapping[str, Link], arrays: Mapping[str, Tensor], spec: ModelSpec, origin: str
) -> dict[str, Tensor]:
    """Their arrays as our state. Every array is used and every parameter made, exactly once, or nothing is loaded."""
    shapes = {name: tuple(tensor.shape) for name, tensor in allocate(spec).state_dict().items()}
    wanted = [name for found in links.values() for name in found.theirs]
    _require_none(origin, "lacks", [name for name in wanted if name not in arrays])
    _require_none(origin, "has no use for", sorted(arrays.keys() - set(wanted)))
    state: dict[str, Tensor] = {}
    for name, found in links.items():
        try:
            tensor = found.move.inward([arrays[theirs] for theirs in found.theirs]).contiguous()
        except (RuntimeError, IndexError):
            tensor = None
        if tensor is None or tuple(tensor.shape) != shapes[name]:
            given = ", ".join(str(list(arrays[theirs].shape)) for theirs in found.theirs)
            raise FileProblem(f"{origin}: {found.theirs[0]} has shape {given}, which does not fit {list(shapes[name])}")
        state[name] = tensor
    return state


def send_out(links: Mapping[str, Link], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state as their arrays, in the order of our parameters."""
    arrays: dict[str, Tensor] = {}
    for name, found in links.items():
        for theirs, array in zip(found.theirs, found.move.outward(state[name]), strict=True):
            if theirs in arrays:
                raise AssertionError(f"'{theirs}' would be written twice")
            arrays[theirs] = array.contiguous()
    return arrays


def count_from(first: int, numbers: set[int], what: str, origin: str) -> int:
    """How many there are, after checking that none is missing: one stray large number must not become a giant model."""
    if numbers != set(range(first, first + len(numbers))):
        raise FileProblem(f"{origin}: the numbers of its {what} have gaps")
    return len(numbers)


def read_stages(arrays: Mapping[str, Tensor], pattern: str, origin: str) -> tuple[int, ...]:
    """Units per stage of a ResNet, from names that `pattern` cuts into stage and unit, both counted from 1."""
    units: dict[int, set[int]] = {}
    for name in arrays:
        if match := re.match(pattern, name):
            units.setdefault(int(match[1]), set()).add(int(match[2]))
    count_from(1, set(units), "stages", origin)
    return tuple(count_from(1, units[stage], f"units in stage {stage}", origin) for stage in sorted(units))


def _require_none(origin: str, what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise FileProblem(f"{origin} {what} {', '.join(names[:3])}{more}", hint="Leftovers must be named with --drop.")
