"""One list of rules per foreign format, for reading and writing.

A rule says, for the parameters of ours that its pattern matches, which of their arrays hold them and by which move. Reading
and writing both start from our parameter names, so a format has one map and cannot disagree with itself.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitlab.core.command import command_line
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import some_of
from vitlab.models.build import allocate
from vitlab.models.spec import ModelSpec
from vitlab.weights.moves import SAME, Move

_SHOWN = 3  # names of arrays in a message; the number of the others follows
PARTS = ("pre_logits", "head")  # what can be left out of a model and leave a model


def split_drop(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split into arrays of the file and parts of the model (PARTS)."""
    return tuple(name for name in names if name not in PARTS), tuple(name for name in names if name in PARTS)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`ours` matches our parameter names; `theirs` are the names it expands to.

    `stacked`: theirs hold all blocks at once, along a first axis; the first group of `ours` is the place on it. A rule without
    `theirs` is for what their files leave out: its move says where that starts.
    """

    ours: str
    theirs: tuple[str, ...]
    move: Move = SAME
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Link:
    theirs: tuple[str, ...]
    move: Move
    place: int | None = None  # on the first axis of theirs, where they are stacked


def link(rules: Sequence[Rule], spec: ModelSpec, format_name: str) -> dict[str, Link]:
    """Map each of our parameters to their arrays, by exactly one rule."""
    links: dict[str, Link] = {}
    for name in allocate(spec).state_dict():
        found = [(match, rule) for rule in rules if (match := re.fullmatch(rule.ours, name))]
        if not found:
            part = name.split(".")[0]
            hint = f"Leave it out with {spell_drop(part)}." if part in PARTS else None
            raise UsageError(f"the {format_name} format has no place for '{name}'", hint=hint)
        if len(found) > 1:
            raise AssertionError(f"{format_name}: '{name}' is matched by {[rule.ours for _, rule in found]}")
        match, rule = found[0]
        place = int(match[1]) if rule.stacked else None
        links[name] = Link(tuple(match.expand(name_) for name_ in rule.theirs), rule.move, place)
    return links


def bring_in(links: Mapping[str, Link], arrays: dict[str, Tensor], spec: ModelSpec, origin: str) -> dict[str, Tensor]:
    """Turn their arrays into our state, each used exactly once, or raise.

    Empties `arrays` as it goes, so that a model never stands in memory twice. Values and types stay as they are; only where
    parts of different types become one parameter, it takes the smallest type that holds them all, which changes no value.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in allocate(spec).state_dict().items()}
    wanted = Counter(name for found in links.values() for name in found.theirs)
    _require_none(origin, "lacks", [name for name in wanted if name not in arrays])
    _require_none(origin, "has no use for", sorted(arrays.keys() - wanted.keys()))
    unread = wanted.copy()
    state: dict[str, Tensor] = {}
    for name, found in links.items():
        given = [arrays[theirs] for theirs in found.theirs]
        unread.subtract(found.theirs)
        for theirs in found.theirs:
            if not unread[theirs]:
                del arrays[theirs]
        try:
            tensor = _take(found, given, wanted[found.theirs[0]] if found.theirs else 0)
        except (RuntimeError, IndexError):
            tensor = None
        if tensor is None or tuple(tensor.shape) != shapes[name]:
            shape = ", ".join(str(list(array.shape)) for array in given)
            raise FileProblem(f"{origin}: {found.theirs[0]} has shape {shape}, which does not fit {list(shapes[name])}")
        state[name] = tensor
    return state


def _take(found: Link, arrays: Sequence[Tensor], height: int) -> Tensor:
    """One parameter out of their arrays; `height` parameters share a stacked one."""
    if found.place is None:
        return found.move.inward(arrays).contiguous()
    if any(array.shape[0] != height for array in arrays):
        raise IndexError
    # Copied, because a view would keep the whole stack in memory, and begin anywhere in it.
    parameter = found.move.inward([array[found.place] for array in arrays])
    return parameter.clone(memory_format=torch.contiguous_format)


def send_out(links: Mapping[str, Link], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn our state into their arrays, in the order of our parameters; mostly views."""
    parts: dict[str, list[Tensor]] = {}
    stacked: set[str] = set()
    for name, found in links.items():
        stacked.update(found.theirs if found.place is not None else ())
        for theirs, array in zip(found.theirs, found.move.outward(state[name]), strict=True):
            if len(parts.setdefault(theirs, [])) != (found.place or 0):
                raise AssertionError(f"'{theirs}' would be written twice, or with a gap")
            parts[theirs].append(array)
    return {name: torch.stack(part) if name in stacked else part[0] for name, part in parts.items()}


def spell_drop(*names: str) -> str:
    """How to leave something out, on the command line and in Python."""
    return f"{command_line('convert', options={'drop': names})} (in Python: drop={list(names)})"


def _require_none(origin: str, what: str, names: Sequence[str]) -> None:
    if names:
        hint = None if what == "lacks" else f"If the model does not need them, leave them out: {spell_drop('NAME')}."
        raise FileProblem(f"{origin} {what} {some_of(names, _SHOWN)}", hint=hint)
