"""Which keys of a config are read: for the tests that no documented key is without effect."""

import dataclasses
from typing import Any, TypeVar

Config = TypeVar("Config")


def watch(config: Config, read: set[str], where: str = "") -> Config:
    """A twin of `config` that notes in `read` the dotted path of every leaf that is looked at.

    For the test that no key is decoration: documented keys which nothing reads are how settings get lost in silence.
    """
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    kind: type[Any] = type(config)

    def look(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names and not dataclasses.is_dataclass(value):
            read.add(where + name)
        return value

    twin: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": look}))
    for name in names:
        value = getattr(config, name)
        object.__setattr__(
            twin, name, watch(value, read, f"{where}{name}.") if dataclasses.is_dataclass(value) else value
        )
    return twin


def leaf_paths(config: Any, where: str = "") -> set[str]:
    """The dotted path of every leaf key, as `watch` reports them."""
    paths: set[str] = set()
    for field in dataclasses.fields(config):
        value = object.__getattribute__(config, field.name)
        paths |= leaf_paths(value, f"{where}{field.name}.") if dataclasses.is_dataclass(value) else {where + field.name}
    return paths
