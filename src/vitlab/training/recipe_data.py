"""A recipe with the data that completes it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.core.console import Console
from vitlab.data.dataset import Dataset, train_part
from vitlab.data.parts import Parts, arrange
from vitlab.data.sources.opening import Source, open_data, open_images
from vitlab.training.recipe import DataConfig, Recipe, is_pretext, read_data_config, recipe_from_dict


def open_recipe(
    table: Mapping[str, Any],
    console: Console | None = None,
    copies: Sequence[Sequence[str]] = (),
    source: Source | None = None,
) -> tuple[Recipe, Parts]:
    """A recipe's table with its data, or `source`, opened: the recipe is complete only when the classes are known."""
    data = read_data_config(table)
    labelled = not is_pretext(table)
    opener = open_data if labelled else open_images
    opened = opener(data.source if source is None else source, columns=data.columns, console=console)
    opened = dataclasses.replace(opened, copies=copies)
    parts = arrange(opened, data, labelled=labelled, also=open_also(data, console))
    return recipe_from_dict(table, len(parts.train.classes)), parts


def open_also(data: DataConfig, console: Console | None = None) -> list[Dataset]:
    """The images of `data.also` to train on: the training part of each source that has parts, else all of it."""
    opened = [open_images(source, console=console).parts for source in data.also]
    return [parts[train_part(parts)] for parts in opened]
