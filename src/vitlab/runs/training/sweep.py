"""Several runs for one question: which value of a key is best? As Table 4 of the paper has it for the learning rate.

Each value is tried on the training images less a part held out of them, which chooses; then one run trains on all of them, and
it alone is tested. The test images are in no try. A value that training cannot bear has failed; the others go on.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, reading
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.data.dataset import Opened
from vitlab.data.parts import Parts, arrange
from vitlab.report.page import Table
from vitlab.runs.training import run_folder
from vitlab.runs.training.live_run import best_of, describe_validation
from vitlab.runs.training.probing import changes_nothing
from vitlab.runs.training.run import RunResult
from vitlab.training.loop import NonFinite
from vitlab.training.recipe import (
    MODEL_NAME,
    SCRATCH,
    DataConfig,
    Recipe,
    for_other_data,
    model_by_name,
    read_data_config,
    recipe_from_dict,
    recipe_to_dict,
    with_changes,
)

SWEEP = "sweep.json"
FINAL = "final"  # the folder of the run that is tested, beside try-1, try-2, ...
_DEV_SHARE = 0.1  # of the training images, where neither recipe nor caller says; Table 4 has it for the small sets
_SCORES = ("top1", "loss", "n")
_DECIDES_PARTS = ("data.source", "data.test_frac", "data.val_frac", "data.val_from", "data.split_seed")

CarryOut = Callable[[Recipe, Parts, Path, Sequence[str]], RunResult]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A key, the values to try, the recipe of each, and the parts of the run that follows."""

    key: str
    values: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    final: Parts
    val_frac: float  # of the run that follows

    def sentence(self) -> str:
        tries = f"{self.key} = {', '.join(self.values)}: {len(self.values)} runs"
        images = self.final.num_fitted(self.recipes[0].train.method)
        return f"{tries}, and one with the best on all {images:,} training images"


@dataclasses.dataclass(frozen=True)
class Found:
    key: str
    # A try each: value, step, top1, loss, n, with several labels mean_ap; and failed, which says why the others are None.
    rows: list[dict[str, Any]]
    recipe: Recipe  # of the run that follows
    seconds: float  # that the tries took, save for those that failed

    @property
    def best(self) -> dict[str, Any]:
        return _best(self.rows)

    def sentence(self) -> str:
        best = self.best
        told = f"{self.key}={best['value']} was the best of {len(self.rows)}: {describe_validation(best)}"
        return f"{told}; trained again on all training images"

    def table(self) -> Table:
        several = "mean_ap" in self.best
        rows = [
            (
                str(row["value"]),
                f"{row['mean_ap']:.3f}" if several else f"{row['top1']:.1%}",
                f"{row['loss']:.4f}",
                str(row["step"]),
            )
            if row["failed"] is None
            else (str(row["value"]), "failed", "not finite", str(row["step"]))
            for row in self.rows
        ]
        caption = (
            f"On {self.best['n']} images held out of the training part. {self.key}={self.best['value']} was taken."
        )
        return Table(
            "Sweep", caption, (self.key, "mean average precision" if several else "right", "loss", "at step"), rows
        )


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return dict(best_of([row for row in rows if row.get("failed") is None]))


def read_sweep(text: str, table: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """`optim.lr=0.003,0.01` -> the key and its values; `optim.lr` alone takes the rates that the recipe has in `[sweep]`."""
    key, equals, listed = (part.strip() for part in text.partition("="))
    if not equals and key == "optim.lr" and isinstance(table.get("sweep"), Mapping):
        values = tuple(str(value) for value in table["sweep"]["lr"])
    else:
        values = _values(listed)
    if not key or len(set(values)) < 2:
        raise UsageError(
            f"--sweep {text}: a key and two values or more are needed", hint="For example: --sweep optim.lr=0.003,0.01"
        )
    if key in _DECIDES_PARTS:
        raise UsageError(f"{key} decides who is held out, so tries that differ in it cannot be compared")
    return key, tuple(dict.fromkeys(values))


def _values(listed: str) -> tuple[str, ...]:
    """Separated by commas; a value may be a list itself."""
    try:
        found = config.parse_toml(f"values = [{listed}]", "--sweep")["values"]
        return tuple(config.dump_toml({"v": value}).removeprefix("v = ").strip() for value in found)
    except FileProblem:  # bare words
        return tuple(word.strip() for word in listed.split(",") if word.strip())


def with_dev_split(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with a share of the training images held out to choose on: the recipe's, or the usual one."""
    sweep, data = table.get("sweep"), table["data"]
    if isinstance(sweep, Mapping):  # a share of the training images, whatever other parts the data has
        return {**table, "data": {**data, "val_frac": sweep["val_frac"], "val_from": "train"}}
    return {**table, "data": {**data, "val_frac": data.get("val_frac") or _DEV_SHARE}}


def require_effect(key: str, recipe: Recipe) -> None:
    """An error where all values would give the same."""
    if recipe.train.method == "probe" and changes_nothing(key):
        raise UsageError(
            f"{key} changes nothing where a linear probe is fitted, so there is nothing to choose",
            hint="--set train.method=steps trains it in steps.",
        )


def settle_sweep(
    asked: tuple[str, tuple[str, ...]], recipe: Recipe, opened: Opened, folder: Path | None = None
) -> Sweep:
    """All recipes of a sweep, so that a wrong value is told before the first try. `folder` is where it has begun."""
    key, values = asked
    whole, num_classes = for_other_data(recipe_to_dict(recipe)), recipe.model.num_classes
    if key == MODEL_NAME:
        if recipe.init != SCRATCH:
            raise UsageError("the start weights decide the model, so that there are no others to try")
        whole["model"] = model_by_name(recipe.model)
    recipes = tuple(recipe_from_dict(with_changes(whole, [f"{key}={value}"]), num_classes) for value in values)
    final_data = _final_data(recipe, folder)
    return Sweep(key, values, recipes, arrange(opened, final_data), final_data.val_frac)


def try_each(sweep: Sweep, parts: Parts, folder: Path, carry_out: CarryOut, console: Console) -> Found:
    """A run for each value, in `try-1` and so on. One whose numbers are no longer finite has failed, and the others go on."""
    rows: list[dict[str, Any]] = []
    blind, seconds = dataclasses.replace(parts, test=None), 0.0
    for number, (value, recipe) in enumerate(zip(sweep.values, sweep.recipes, strict=True), start=1):
        said = [f"try {number} of {len(sweep.values)}: {sweep.key}={value}"]
        try:
            result = carry_out(recipe, blind, folder / f"try-{number}", said)
        except NonFinite as error:
            console.say(f"{sweep.key}={value} failed: {error.what}")
            rows.append(
                {"key": sweep.key, "value": value, "step": error.step, **dict.fromkeys(_SCORES), "failed": error.what}
            )
            continue
        best, seconds = _best(result.evaluations), seconds + result.seconds
        scores = {name: best[name] for name in (*_SCORES, "mean_ap") if name in best}
        rows.append({"key": sweep.key, "value": value, "step": best["step"], **scores, "failed": None})
    rows = _chosen_before(folder, sweep.values) or rows
    if all(row["failed"] for row in rows):
        raise VitlabError(
            f"none of the {len(rows)} values of {sweep.key} could be trained; {rows[0]['value']}: {rows[0]['failed']}",
            hint="A lower optim.lr or a longer warm-up usually helps.",
        )
    chosen = sweep.recipes[sweep.values.index(_best(rows)["value"])]
    final = dataclasses.replace(chosen, data=dataclasses.replace(chosen.data, val_frac=sweep.val_frac))
    return Found(sweep.key, rows, final, seconds)


def _final_data(recipe: Recipe, folder: Path | None) -> DataConfig:
    """Of the run that follows: nothing is held out of the training images, save by a linear probe. It chooses
    its regularisation on them, and is then fitted to all of them anyway. One that has begun, by an earlier version too, goes
    on as it is."""
    val_frac = recipe.data.val_frac if recipe.train.method == "probe" else 0.0
    if folder is not None and (folder / FINAL / run_folder.CONFIG).is_file():
        val_frac = read_data_config(run_folder.read_config(folder / FINAL)).val_frac
    return dataclasses.replace(recipe.data, val_frac=val_frac)


def _chosen_before(folder: Path, values: Sequence[str]) -> list[dict[str, Any]]:
    """The rows by which the run that follows was chosen, where it has begun: an earlier version may have had another rule."""
    if not (folder / FINAL / run_folder.CONFIG).is_file():
        return []
    path = folder / SWEEP
    try:
        rows = reading.read_json(path)
        chosen_among = [_as_tried(row)["value"] for row in rows]
    except (FileProblem, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FileProblem(f"{path} does not say what was chosen: {error}") from None
    if chosen_among != list(values):
        raise FileProblem(f"{path} does not say what was chosen: it has other values")
    return rows


def _as_tried(row: dict[str, Any]) -> dict[str, Any]:
    """`row` if it is one of `try_each`; an error of Python's else."""
    if row["failed"] is None:
        numbers = [row[name] for name in (*_SCORES, *(["mean_ap"] if "mean_ap" in row else []))]
        if not all(type(number) in (int, float) for number in numbers) or not math.isfinite(sum(numbers)):
            raise ValueError("a score is not a number")
    if (
        not (row["failed"] is None or (row["failed"] and isinstance(row["failed"], str)))
        or type(row["step"]) is not int
    ):
        raise ValueError("a row is not that of a trial")
    return row
