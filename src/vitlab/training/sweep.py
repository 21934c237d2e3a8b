"""Which recipes a sweep tries: a key, its values, and the share of the training images that chooses among them.

Each value is trained on the training images less a held-out part, which chooses, as Table 4 of the paper has it for the
learning rate; then one run trains on all of them, and it alone is tested.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from vitlab.core import config
from vitlab.core.errors import UsageError
from vitlab.data.dataset import Opened
from vitlab.data.parts import Parts, arrange
from vitlab.training.recipe import (
    MODEL_NAME,
    SCRATCH,
    Recipe,
    for_other_data,
    model_by_name,
    probe_ignores,
    recipe_from_dict,
    recipe_to_dict,
    with_changes,
)

_DEV_SHARE = 0.1  # of the training images, where neither recipe nor caller says; Table 4 has it for the small sets
_DECIDES_PARTS = (
    "data.source",
    "data.test_frac",
    "data.val_frac",
    "data.val_from",
    "data.split_seed",
    "data.min_images",
    "data.train_images",
)


class Grid(NamedTuple):
    """What was asked for: `--sweep key=value,value`."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"--sweep {self.key}={','.join(self.values)}"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The recipe of each trial, and the recipe and parts of the run that follows, but for the value that is chosen."""

    grid: Grid
    recipes: tuple[Recipe, ...]
    final: Parts
    final_val_frac: float

    def final_recipe(self, value: str) -> Recipe:
        chosen = self.recipes[self.grid.values.index(value)]
        return dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, val_frac=self.final_val_frac))

    def sentence(self) -> str:
        key, values = self.grid
        images = self.final.num_fitted(self.recipes[0].train.method)
        trials = f"{key} = {', '.join(values)}: {len(values)} runs"
        return f"{trials}, and one with the best on all {images:,} training images"


def read_grid(text: str, table: Mapping[str, Any]) -> Grid:
    """`optim.lr=0.003,0.01` -> the key and its values; `optim.lr` alone takes the rates that the recipe has in `[sweep]`."""
    if text.strip() == "optim.lr" and isinstance(table.get("sweep"), Mapping):
        key, values = "optim.lr", tuple(dict.fromkeys(map(str, table["sweep"]["lr"])))
    else:
        key, values = config.split_sweep(text)
    if len(values) < 2:
        raise UsageError(
            f"--sweep {text}: two different values or more are needed", hint="For example: --sweep optim.lr=0.003,0.01"
        )
    if key in _DECIDES_PARTS:
        raise UsageError(f"{key} decides which images are held out, so trials that differ in it cannot be compared")
    return Grid(key, values)


def with_dev_split(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with a share of the training images held out to choose on: the recipe's, or the usual one."""
    sweep, data = table.get("sweep"), table["data"]
    if isinstance(sweep, Mapping):  # a share of the training images, whatever other parts the data has
        return {**table, "data": {**data, "val_frac": sweep["val_frac"], "val_from": "train"}}
    return {**table, "data": {**data, "val_frac": data.get("val_frac") or _DEV_SHARE}}


def settle_sweep(grid: Grid, recipe: Recipe, opened: Opened) -> Sweep:
    """All recipes of a sweep, so that a wrong value is reported before the first trial."""
    if recipe.train.method == "probe" and probe_ignores(grid.key):
        raise UsageError(
            f"{grid.key} changes nothing where a linear probe is fitted, so there is nothing to choose",
            hint="--set train.method=steps trains it in steps.",
        )
    table, num_classes = for_other_data(recipe_to_dict(recipe)), recipe.model.num_classes
    if grid.key == MODEL_NAME:
        if recipe.init != SCRATCH:
            raise UsageError("the start weights decide the model, so that there are no others to try")
        table["model"] = model_by_name(recipe.model)
    changed = [with_changes(table, [f"{grid.key}={value}"]) for value in grid.values]
    recipes = tuple(recipe_from_dict(one, num_classes) for one in changed)
    # Nothing is held out of the final run, but for a linear probe: it chooses its l2 on them and is refitted to all.
    val_frac = recipe.data.val_frac if recipe.train.method == "probe" else 0.0
    final = arrange(opened, dataclasses.replace(recipe.data, val_frac=val_frac))
    return Sweep(grid, recipes, final, val_frac)
