"""Labels of several parts, as numbers or texts, to one list of classes and the number of each image's."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitlab.core.errors import FileProblem
from vitlab.data.dataset import Labels, class_order, one_spelling, several_labels, single_labels

Value = int | str
Numbered = tuple[tuple[str, ...], dict[str, Labels]]


def number_labels(where: object, labels: Mapping[str, Sequence[Any]], given: Sequence[str] | None) -> Numbered:
    """The classes, and the labels of each part by their numbers.

    A label is a whole number or a text, or a list of these where images have several. `given` are the classes' names, if known:
    then a number is a place among them. Without them, numbers are classes in their order, and texts as everywhere.
    """
    multi = any(isinstance(value, list) for own in labels.values() for value in own)
    rows = {
        part: [_values(where, part, i, value, multi) for i, value in enumerate(own)] for part, own in labels.items()
    }
    present = {value for own in rows.values() for values in own for value in values}
    if len({type(value) for value in present}) > 1:
        raise FileProblem(f"{where}: some labels are numbers, and some are texts")
    numbers = all(isinstance(value, int) for value in present)
    if given is not None:
        number: dict[Value, int] = {i if numbers else one_spelling(name): i for i, name in enumerate(given)}
        if outside := sorted(present - number.keys()):
            raise FileProblem(f"{where}: the label {outside[0]} is outside its {len(given)} classes, numbered from 0")
        classes = distinct_names(given)
    else:
        ordered: list[Any] = sorted(present) if numbers else class_order(map(str, present))
        classes, number = tuple(map(str, ordered)), {value: i for i, value in enumerate(ordered)}
    named = {part: [[number[value] for value in values] for values in own] for part, own in rows.items()}
    if multi:
        return classes, {part: several_labels(own) for part, own in named.items()}
    return classes, {part: single_labels([value for (value,) in own]) for part, own in named.items()}


def distinct_names(given: Iterable[Any]) -> tuple[str, ...]:
    """Class names, each its own: ImageNet's lists have `crane` for bird and machine, and torchvision's tuples of synonyms."""
    names = [", ".join(map(str, one)) if isinstance(one, tuple | list) else str(one) for one in given]
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({label})" for label, name in enumerate(names))


def _values(where: object, part: str, i: int, value: Any, multi: bool) -> tuple[Value, ...]:
    found = tuple(dict.fromkeys(map(_value, (value or ()) if multi and not isinstance(value, str) else (value,))))
    if None in found:
        raise FileProblem(f"{where}: image {i} of {part} has the label {value!r:.40}, not a whole number or a text")
    return found  # pyright: ignore[reportReturnType]


def _value(value: Any) -> Value | None:
    """Whole numbers may be stored as floats, because one of them is missing."""
    if isinstance(value, str):
        return one_spelling(value.strip()) or None
    if isinstance(value, bool | int):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None
