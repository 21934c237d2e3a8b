"""Which classes of a model are meant by the classes of the data: by name, by number, or as a file says.

Letters: K classes of the data, M classes of the model, W the most of them that one class of the data stands for.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.core.reading import load_json
from vitlab.data.dataset import one_spelling
from vitlab.data.sources.synsets import ilsvrc_synsets, synset_of

_NAMED = 5  # unknown labels in an error; the number of the others follows


@dataclasses.dataclass(frozen=True)
class Match:
    """For every class of the data the classes of the model that are right for it; empty where the model lacks the class."""

    members: tuple[tuple[int, ...], ...]
    note: str = ""

    @classmethod
    def identity(cls, classes: int, note: str = "") -> "Match":
        """Each class of the data is the model's of the same number."""
        return cls(tuple((k,) for k in range(classes)), note)

    @property
    def known(self) -> Tensor:
        """bool [K]."""
        return torch.tensor([bool(found) for found in self.members])

    @property
    def table(self) -> Tensor:
        """int64 [K, W], filled up with -1."""
        width = max([1, *map(len, self.members)])
        return torch.tensor([[*found, *[-1] * (width - len(found))] for found in self.members])

    def owners(self, classes: int) -> Tensor:
        """int64 [M]: the class of the data that each class of the model stands for; K where it stands for none."""
        owners = torch.full((classes,), len(self.members))
        for k, found in enumerate(self.members):
            owners[list(found)] = k
        return owners

    def restricted(self, classes: int) -> tuple["Match", Tensor]:
        """The same among the matched classes alone, and their numbers in the model."""
        kept = (self.owners(classes) < len(self.members)).nonzero()[:, 0]
        place = {int(old): new for new, old in enumerate(kept)}
        return Match(tuple(tuple(place[i] for i in found) for found in self.members), self.note), kept


def match_by_name(classes: Sequence[str], labels: Sequence[str], data: str, empty: Collection[str] = ()) -> Match:
    """By the names, written alike or but for case and underscores. All classes of the data must be known, except `empty`."""
    numbers = [str(i) for i in range(len(labels))]
    if list(labels) == numbers and list(classes) != numbers and len(classes) == len(labels):
        note = "the model's classes have numbers only: they are taken in the order of the data's classes"
        return Match.identity(len(classes), note)
    if (by_synset := _match_by_synset(classes, labels)) is not None:
        return by_synset
    exact, alike = _places(labels), _places([_folded(label) for label in labels])
    members = [exact.get(name) or alike.get(_folded(name)) or () for name in classes]
    if several := [name for name, found in zip(classes, members, strict=True) if len(found) > 1]:
        raise UsageError(
            f"the model has several classes of the name '{several[0]}'", hint="Say which is meant with --label-map."
        )
    if unknown := [name for name, found in zip(classes, members, strict=True) if not found and name not in empty]:
        more = f" and {len(unknown) - _NAMED:,} more" if len(unknown) > _NAMED else ""
        raise UsageError(
            f"the model does not know {len(unknown):,} of the {len(classes):,} classes of {data}: "
            f"{', '.join(unknown[:_NAMED])}{more}; its own are {', '.join(labels[:_NAMED])}"
            f"{' …' if len(labels) > _NAMED else ''}",
            hint="Name the folders as the model does, or give --label-map FILE.json.",
        )
    others = len(labels) - sum(map(bool, members))
    return Match(tuple(members), _note_others(others))


def _match_by_synset(classes: Sequence[str], labels: Sequence[str]) -> Match | None:
    """Where the data's classes are synsets: by the synsets of the model's labels, or by ImageNet's order where it has that.

    So that a set with 200 of the thousand classes finds them in a model whose labels are plain names, or numbers.
    """
    data_synsets = [synset_of(name) for name in classes]
    model_synsets = [synset_of(label) for label in labels]
    if not all(model_synsets):
        model_synsets = list(ilsvrc_synsets()) if _in_imagenets_order(labels) else []
    places = {synset: i for i, synset in enumerate(model_synsets)}
    if not all(synset in places for synset in data_synsets) or len(set(data_synsets)) < len(data_synsets):
        return None
    others = len(labels) - len(data_synsets)
    return Match(tuple((places[synset],) for synset in data_synsets), _note_others(others))


def _note_others(count: int) -> str:
    if count <= 0:
        return ""
    known = f"{count:,} classes" if count > 1 else "a class"
    return f"the model knows {known} that the data does not have; predicting {'one' if count > 1 else 'it'} counts as an error"


def _in_imagenets_order(labels: Sequence[str]) -> bool:
    """Whether these are ImageNet's thousand classes in its order: numbers, or names of which most are those of their place.

    Lists of names differ in spelling and in which of several names they give; none agrees in half of them by chance.
    """
    names = list(ilsvrc_synsets().values())
    if len(labels) != len(names):
        return False
    if list(labels) == [str(i) for i in range(len(labels))]:
        return True
    words = ({_folded(word) for word in label.split(",")} for label in labels)
    return 2 * sum(_folded(name) in found for name, found in zip(names, words, strict=True)) > len(names)


def match_by_file(path: Path, classes: Sequence[str], labels: Sequence[str]) -> Match:
    """By a table in JSON: a class of the data, and the model's label, its number, or a list of them, that is right for it.

    Classes that the table leaves out are not evaluated: so it is done with ObjectNet, of whose classes ImageNet has a third.
    """
    table = _read_table(path)
    for name in table:
        if name not in classes:
            raise UnknownName(f"class of the data in {path}:", name, classes)
    places = _places(labels)
    members = tuple(_members(path, name, table.get(name, []), places, len(labels)) for name in classes)
    owner: dict[int, str] = {}
    for name, found in zip(classes, members, strict=True):
        for i in found:
            if owner.setdefault(i, name) != name:
                raise UsageError(f"{path}: the model's '{labels[i]}' stands for both '{owner[i]}' and '{name}'")
    left = sum(not found for found in members)
    note = f"{len(classes) - left:,} of {len(classes):,} classes are in the label map; the others are left out"
    return Match(members, note if left else "")


def _members(path: Path, name: str, given: Any, places: Mapping[str, tuple[int, ...]], count: int) -> tuple[int, ...]:
    found: list[int] = []
    for value in given if isinstance(given, list) else [given]:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise FileProblem(f"{path}: '{name}' must have a label, a number, or a list of them")
        if isinstance(value, int):
            if not 0 <= value < count:
                raise UsageError(f"{path}: '{name}' asks for class {value}, and the model has 0 to {count - 1}")
            found.append(value)
        elif value in places:
            found += places[value]
        else:
            raise UnknownName(f"label of the model in {path}:", value, places)
    return tuple(dict.fromkeys(found))


def _read_table(path: Path) -> dict[str, Any]:
    table = load_json(path)
    if not isinstance(table, dict) or not table:
        raise FileProblem(f'{path} must hold a table such as {{"mug": "coffee mug"}}')
    return table


def _places(labels: Sequence[str]) -> dict[str, tuple[int, ...]]:
    places: dict[str, tuple[int, ...]] = {}
    for i, label in enumerate(labels):
        places[label] = (*places.get(label, ()), i)
    return places


def _folded(name: str) -> str:
    return " ".join(one_spelling(name).casefold().replace("_", " ").split())
