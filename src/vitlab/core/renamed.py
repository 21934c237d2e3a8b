"""Names that were retired: each still works, and warns once with the name of today.

For how long, says docs/explanation/stability.md. Who renames a recipe or an option adds a line here.
"""

import warnings
from collections.abc import Collection, Mapping

RECIPES: Mapping[str, str] = {}  # old -> new, without .toml
OPTIONS: Mapping[str, str] = {}  # old -> new, of any verb, as Python writes them: label_map

_warned: set[tuple[str, str]] = set()


class RenamedWarning(FutureWarning):
    """Something was called by a name that it once had. Python shows a FutureWarning without being asked to."""


def today(kind: str, given: str, known: Collection[str], table: Mapping[str, str]) -> str:
    """The name of today for `given`: itself, unless it is not known any longer and the table has a new one that is."""
    new = table.get(given)
    if new is None or given in known or new not in known:
        return given
    if (kind, given) not in _warned:
        _warned.add((kind, given))
        warnings.warn(f"the {kind} {given} is called {new} now; the old name will go", RenamedWarning, stacklevel=3)
    return new
