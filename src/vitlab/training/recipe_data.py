"""A recipe with the data that completes it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.core.console import Console
from vitlab.data.parts import Parts, arrange
from vitlab.data.sources.opening import Source, open_data
from vitlab.training.recipe import Recipe, read_data_config, recipe_from_dict


def open_recipe(
    table: Mapping[str, Any],
    console: Console | None = None,
    copies: Sequence[Sequence[str]] = (),
    source: Source | None = None,
) -> tuple[Recipe, Parts]:
    """A recipe's table with its data, or `source`, opened: the recipe is complete only when the classes are known."""
    data = read_data_config(table)
    opened = open_data(data.source if source is None else source, columns=data.columns, console=console)
    parts = arrange(dataclasses.replace(opened, copies=copies), data)
    return recipe_from_dict(table, len(parts.train.classes)), parts
