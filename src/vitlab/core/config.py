"""Frozen dataclasses as schema, TOML as stored form, `a.b=c` as override.

Owns the passage between text, plain dictionaries and typed values, for any frozen dataclass; knows no particular one.
An unknown key, a wrong type or a value outside its closed set is an error that names the key and the nearest one.

    recipe = from_dict(Recipe, with_overrides(load_toml(path), ["optim.lr=3e-4"]))
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from vitlab.core import reading
from vitlab.core.errors import FileProblem, UnknownName, UsageError, shortened

Config = TypeVar("Config")
Table = dict[str, Any]

_MOST_BYTES = 2**18  # of a recipe; those that ship have a thousand or two
_MOST_DOTS = 256  # in a line: a key of n parts takes tomllib n^2 steps and bytes
_MOST_LEVELS = 16  # of tables in tables; a recipe has four
_MOST_BITS = 4096  # of a whole number; Python refuses to print one of 4300 digits
NONE = "none"  # TOML has no null; an optional key says "none" where its default is something else


# --- text -> plain dictionaries ---------------------------------------------------------------------------------------


def load_toml(path: Path) -> Table:
    """The tables of a TOML file."""
    try:
        return parse_toml(reading.read_text(path, _MOST_BYTES), str(path))
    except FileNotFoundError as error:
        raise FileProblem(f"{path} does not exist") from error
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from error


def parse_toml(text: str, origin: str) -> Table:
    """Parse TOML of plain values: text, numbers, booleans, lists and tables."""
    try:
        if max(line.count(".") for line in text.split("\n")) > _MOST_DOTS:
            raise ValueError("a line has too many dots")
        table = tomllib.loads(text)
        _require_plain(table)
        return table
    except RecursionError:
        raise FileProblem(f"{origin} is nested too deeply") from None
    except ValueError as error:  # a number of too many digits is one, too
        raise FileProblem(f"{origin} is not valid TOML: {error}") from error


def _require_plain(table: Table) -> None:
    level: list[Any] = [table]
    for _ in range(_MOST_LEVELS):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                inner += cast(dict[str, Any], value).values() if isinstance(value, dict) else cast(list[Any], value)
            elif not isinstance(value, str | int | float):
                raise ValueError(f"{value} is a date, which no key takes")
            elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError("a whole number has too many digits")
        level = inner
    if level:
        raise ValueError(f"more than {_MOST_LEVELS} levels of tables and lists")


def with_overrides(table: Table, overrides: Iterable[str]) -> Table:
    """A copy of `table` with each `path.to.key=value` applied, not yet validated."""
    result = copy.deepcopy(table)
    for override in overrides:
        keys, value = split_override(override)
        target = result
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise UsageError(f"'{shortened(override)}': '{key}' is a value, not a table of keys")
        _assign(target, keys[-1], _parse_value(value))
    return result


def _assign(table: Table, key: str, value: Any) -> None:
    """A table changes the keys that it names, and leaves the others: `optim={lr=0.1}` is `optim.lr=0.1`."""
    if isinstance(value, dict) and isinstance(table.get(key), dict):
        for inner, item in cast(Table, value).items():
            _assign(table[key], inner, item)
    else:
        table[key] = value


def override_texts(overrides: Iterable[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides as `path.to.key=value`; in Python they may be a mapping from path to value."""
    if isinstance(overrides, str):
        return (overrides,)
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    return tuple(f"{key}={_toml_value(value)}" for key, value in overrides.items())


def overridden(overrides: Iterable[str]) -> Table:
    """The dotted path and the value of every leaf that is overridden, also those inside a table such as `optim={lr=0.1}`."""
    return flat(with_overrides({}, overrides))


def split_override(override: str) -> tuple[list[str], str]:
    """`path.to.key=value` as the keys of the path and the text of the value."""
    path, equals, value = override.partition("=")
    keys = [part.strip() for part in path.split(".")]
    if not equals or not all(keys) or len(keys) > _MOST_LEVELS:
        raise UsageError(
            f"'{shortened(override)}' is not an override",
            hint="Write --set path.to.key=value, for example --set optim.lr=3e-4",
        )
    return keys, value.strip()


def split_sweep(entry: str) -> tuple[str, tuple[str, ...]]:
    """`path.to.key=value,value` as the key and the text of each different value; a value may be a list itself."""
    try:
        keys, listed = split_override(entry)
    except UsageError:
        keys, listed = [], ""
    values = _split_values(listed)
    if not values or not all(values):
        raise UsageError(
            f"'{shortened(entry)}' is not a sweep",
            hint="Write --sweep path.to.key=value,value, for example --sweep optim.lr=0.003,0.01",
        )
    return ".".join(keys), tuple(dict.fromkeys(values))


def _split_values(listed: str) -> tuple[str, ...]:
    try:
        found = parse_toml(f"values = [{listed}]", "--sweep")["values"]
        return tuple(_toml_value(value) for value in found)
    except FileProblem:  # bare words
        words = [word.strip() for word in listed.split(",")]
        return tuple(words if words[-1] else words[:-1])


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Every leaf by its dotted path."""
    rows: Table = {}
    for key, value in table.items():
        rows |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return rows


def _parse_value(text: str) -> Any:
    """Parse as TOML, else take the text: `8` an integer, `[8, 8]` a list, `gap` text."""
    try:
        parsed = parse_toml(f"value = {text}", "--set")
    except FileProblem:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


# --- plain dictionaries <-> typed values ------------------------------------------------------------------------------


def from_dict(schema: type[Config], table: Mapping[str, Any], where: str = "") -> Config:
    """Build the dataclass `schema`; `where` is the dotted path so far, for errors."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{where.rstrip('.') or 'the config'} must be a table of keys, not {shortened(repr(table))}")
    hints = _type_hints(schema)
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            if elsewhere := [] if where else _paths_of(schema, key):
                raise UnknownName("config key", key, [], hint=f"Is it {' or '.join(elsewhere)}?")
            raise UnknownName("config key", where + key, [where + name for name in fields])
    missing = [
        name
        for name, field in fields.items()
        if name not in table and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"config key '{where}{missing[0]}' is missing")
    return schema(**{key: _coerce(hints[key], value, where + key) for key, value in table.items()})


def _paths_of(schema: type, key: str, where: str = "") -> list[str]:
    """Where a key stands in the tables below: `optim.lr` of `lr`."""
    found: list[str] = []
    for name, hint in _type_hints(schema).items():
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                found += [f"{where}{name}.{key}"] if key in _type_hints(inner) else []
                found += _paths_of(inner, key, f"{where}{name}.")
    return found


@functools.cache
def _type_hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


def to_dict(config: Any) -> Table:
    """Plain values, in field order, without calling `__getattribute__` of the class."""
    # So that storing a config does not count as using it, for the test that every key is used.
    return {field.name: _plain(object.__getattribute__(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in typing.cast(tuple[Any, ...], value)]
    return value


def _coerce(wanted: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type `wanted`, or an error that names the key."""
    origin, choices = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        if (value is None or value == NONE) and type(None) in choices:
            return None
        inner = [choice for choice in choices if choice is not type(None)]
        if dataclasses.is_dataclass(value) and isinstance(value, tuple(inner)):
            return value
        fitting = [choice for choice in inner if _fits(choice, value)]
        if not fitting and len(inner) > 1:
            raise UsageError(
                f"config key '{where}' must be {' or '.join(map(_type_name, inner))}, not {shortened(repr(value))}"
            )
        return _coerce((fitting or inner)[0], value, where)
    if origin is Literal:
        if value not in choices:
            raise UnknownName(f"value for {where}:", str(value), tuple(map(str, choices)), list_all=True)
        return value
    if origin is tuple:
        return _coerce_tuple(choices, value, where)
    if dataclasses.is_dataclass(wanted):
        if isinstance(value, typing.cast(type[Any], wanted)):
            return value
        if isinstance(value, Mapping):
            return from_dict(typing.cast(type[Any], wanted), typing.cast(Mapping[str, Any], value), where + ".")
    elif origin is Mapping and choices[1] is not Any and isinstance(value, Mapping):
        rows = typing.cast(Mapping[str, Any], value).items()
        return {key: _coerce(choices[1], item, f"{where}.{key}") for key, item in rows}
    elif wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # a whole number beyond any float falls through to the error
            return float(value)
    elif isinstance(value, origin or wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    raise UsageError(f"config key '{where}' must be {_type_name(wanted)}, not {shortened(repr(value))}")


def _fits(choice: Any, value: Any) -> bool:
    """Whether a value is of the kind of one of several types; what is inside it is checked later."""
    origin = typing.get_origin(choice)
    if origin is Literal:
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, list | tuple)
    kind = origin or choice
    return isinstance(kind, type) and isinstance(value, kind)


def _coerce_tuple(choices: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"config key '{where}' must be a list, not {shortened(repr(value))}")
    items = typing.cast(list[Any], value)
    if choices[-1] is Ellipsis:
        choices = (choices[0],) * len(items)
    if len(items) != len(choices):
        raise UsageError(f"config key '{where}' must have {len(choices)} values, not {len(items)}")
    return tuple(
        _coerce(choice, item, f"{where}[{i}]") for i, (choice, item) in enumerate(zip(choices, items, strict=True))
    )


def _type_name(wanted: Any) -> str:
    if typing.get_origin(wanted) is Literal:
        return " or ".join(map(str, typing.get_args(wanted)))
    if typing.get_origin(wanted) is tuple:
        return "a list"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(wanted, "a table of keys")


# --- plain dictionaries -> text ---------------------------------------------------------------------------------------


def dump_toml(table: Mapping[str, Any]) -> str:
    """Write TOML that `parse_toml` reads back; keys of value None are left out."""
    return "\n".join(_toml_lines(table, ())).strip() + "\n"


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterable[str]:
    scalars = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    tables: dict[str, Mapping[str, Any]] = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (scalars or not tables):
        yield ""
        yield f"[{'.'.join(map(_toml_key, path))}]"
    for key, value in scalars.items():
        yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tables.items():
        yield from _toml_lines(value, (*path, key))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = typing.cast(Mapping[str, Any], value).items()
        return f"{{{', '.join(f'{_toml_key(key)} = {_toml_value(item)}' for key, item in pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in typing.cast(list[Any], value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON's spelling of strings, numbers and booleans is TOML's too, save for the delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def fingerprint(table: Mapping[str, Any]) -> str:
    """Twelve hex digits that change when any value does."""
    canonical = json.dumps(table, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
