"""The recipes that ship, as a reader meets them: what each is, needs and gives, before its data is here.

Owns what is known of data that has not been opened: a recipe is whole only when its classes are counted, and these
numbers are the published ones. A file of one's own may leave the data to the command line; then nobody counts them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core import config
from vitlab.core.command import command_line
from vitlab.core.duration import UNITS
from vitlab.core.errors import UnknownName
from vitlab.data.part_names import test_part, validation_part
from vitlab.data.sources.named import find_named
from vitlab.data.sources.vtab import FINAL, TRAIN, find_task
from vitlab.data.synthetic.settings import KINDS, is_synthetic, part_sizes, read_name
from vitlab.models.cost import JFT_IMAGES
from vitlab.models.names import format_name
from vitlab.training.pretext_rules import count_task_macs
from vitlab.training.recipe import (
    DataConfig,
    Recipe,
    merged,
    read_data_config,
    read_recipe,
    recipe_from_dict,
    recipe_text,
    recipe_to_dict,
)


class DataFacts(NamedTuple):
    """`images` are those to train on, before any are held out; None where nobody has published how many there are."""

    classes: int
    images: int | None
    parts: frozenset[str]


_JFT = DataFacts(18_291, JFT_IMAGES, frozenset({"train"}))  # BiT, section 3.1; the paper, section 4.1
_I21K_IMAGES = 14_197_122  # image-net.org; the paper has "14M"
_VTAB = "vtab:"
# For hours on paper: the peak of an H100 or H200 in bfloat16, by its data sheet, and the share that is assumed to be reached.
_CHIP, _TFLOPS, _REACHED = "one H100 or H200", 989, 0.4
_LARGE = 1.0  # exaFLOPs; the models of shorter runs are too small to reach it


def known_data(source: str) -> DataFacts | None:
    """What is published about a data set, or follows from its settings; None for a folder or file of one's own."""
    if source == "shards/jft":
        return _JFT
    if is_synthetic(source):
        settings = read_name(source, KINDS)
        return DataFacts(len(settings.classes), len(settings), frozenset(part_sizes(settings)))
    if source.startswith(_VTAB):
        task, images = find_task(source.removeprefix(_VTAB))
        parts = {None: {"train", "val", "test"}, TRAIN: {"train", "val"}, FINAL: {"train", "test"}}
        return DataFacts(task.classes, images or TRAIN, frozenset(parts[images]))
    try:
        known = find_named(source)
    except UnknownName:
        return None
    images = _I21K_IMAGES if known.name == "imagenet21k" else known.parts.get("train", known.parts.get("all"))
    return DataFacts(known.classes, images, frozenset(known.parts))


def images_to_train_on(facts: DataFacts, data: DataConfig) -> int | None:
    """After what the recipe holds out to test and tune on, where the data has no parts for it: see `data/parts.py`."""
    if facts.images is None:
        return None
    share = 1 - (data.test_frac if test_part(facts.parts) is None else 0)
    share *= 1 - (data.val_frac if validation_part(facts.parts, data.val_from, data.val_frac) is None else 0)
    images = round(facts.images * share)
    return min(images, data.train_images) if data.train_images else images


@dataclasses.dataclass(frozen=True)
class ShownRecipe:
    """A recipe with every key written out. `images` and `steps` are None where the size of the data is not known.

    Where the recipe names no data, its `data.source` is empty and its model has no classes.
    """

    name: str
    about: str
    command: str
    images: int | None
    steps: int | None
    recipe: Recipe

    @property
    def length(self) -> str:
        return written_length(self.recipe)

    @property
    def exaflops(self) -> float | None:
        """Of the whole run, where all weights are trained."""
        if self.steps is None:
            return None
        return count_exaflops(self.recipe, self.steps * self.recipe.train.batch_size)

    def _compute(self, exaflops: float) -> str:
        if exaflops < _LARGE:
            return f"{_rounded(exaflops)} exaFLOPs"
        hours = exaflops * 1e18 / (_TFLOPS * 1e12 * _REACHED) / 3600
        compute = f"{_rounded(exaflops)} exaFLOPs; on paper {_rounded(hours)} hours of {_CHIP}"
        return f"{compute}, if {_REACHED:.0%} of its {_TFLOPS} TFLOP/s are reached"

    def table(self) -> dict[str, Any]:
        """Every key that is known: a source and classes that the recipe leaves open are not made up."""
        table = recipe_to_dict(self.recipe)
        if not self.recipe.data.source:
            del table["data"]["source"], table["model"]["num_classes"]
        return table

    def toml(self) -> str:
        """The recipe as TOML, with what a reader wants to know first above it."""
        above = [f"{self.name}: {self.about}", f"run it:   {self.command}"]
        if self.images is not None and self.steps is not None:
            above.append(f"length:   {self.steps:,} steps; {self.images:,} images to train on")
        if self.exaflops is not None:
            whose = "" if self.recipe.noisy_student is None else "; of the teacher alone"
            above.append(f"compute:  {self._compute(self.exaflops)}{whose}")
        if expected := written_expectation(self.recipe):
            above.append(f"expect:   {expected}")
        above.append(format_name(self.recipe.model))
        return "".join(f"# {line}\n" for line in above) + config.dump_toml(self.table())


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"  # no power of ten for what is large


def show_recipe(name: str) -> ShownRecipe:
    """A recipe with every key written out; its data need not be here.

    Args:
        name: One of `list_recipes`, or a TOML file of your own.
    """
    table = read_recipe(name)
    data = table.get("data")
    if isinstance(data, Mapping) and "source" not in data:
        recipe, images = recipe_from_dict(merged(table, {"data": {"source": ""}}), 0), None
    else:
        recipe, images = resolved(table)
    source = [] if recipe.data.source else ["DATA"]
    verb, rule = "train", recipe.noisy_student
    options = {"recipe": name, "out": f"runs/{Path(name).stem}"}
    if rule is not None:
        verb = "noisy-student"
        options |= {} if rule.labelled or rule.labelled_per_class else {"unlabelled": "SOURCE"}
    first = "" if name.endswith(".toml") else recipe_text(name).partition("\n")[0]
    return ShownRecipe(
        name=name,
        about=first.removeprefix("# ") or recipe.title,
        command=command_line(verb, *source, options=options),
        images=images,
        steps=None if images is None else recipe.train.in_steps(images * recipe.data.repeats, recipe.train.batch_size),
        recipe=recipe,
    )


def resolved(table: Mapping[str, Any]) -> tuple[Recipe, int | None]:
    """A recipe's table as a recipe, and the images it trains on: what is published of its data, or what lies there."""
    data = read_data_config(table)
    facts, *also = (known_data(source) or _opened_data(source) for source in (data.source, *data.also))
    images = [images_to_train_on(facts, data), *(one.images for one in also)]
    total = None if None in images else sum(count for count in images if count is not None)
    return recipe_from_dict(table, facts.classes), total


def count_exaflops(recipe: Recipe, images: int) -> float:
    """Compute of so many images in training; a backward pass costs two forward passes. Without that of a teacher."""
    return 6 * count_task_macs(recipe.objective, recipe.model) * images / 1e18


def _opened_data(source: str) -> DataFacts:
    from vitlab.data.sources.opening import open_data  # loads torch, which the recipes that ship can do without

    opened = open_data(source)
    train = opened.parts.get("train", opened.parts.get("all"))
    return DataFacts(len(opened.classes), None if train is None else len(train), frozenset(opened.parts))


def written_length(recipe: Recipe) -> str:
    return next(f"{length:,.6g} {unit}" for unit in UNITS if (length := getattr(recipe.train, unit)) is not None)


def written_expectation(recipe: Recipe) -> str:
    """`84.0 % after transfer-imagenet (Table 5)`, or nothing where nobody has measured it."""
    expect = recipe.expect
    if expect is None:
        return ""
    text = f"{100 * expect.test_top1:.2f} %" + (f" after {expect.after}" if expect.after else "")
    text += f" ({expect.source})" if expect.source else ""
    where = " on ".join(filter(None, (f"{expect.hours:g} hours" if expect.hours else "", expect.hardware)))
    return f"{text}; {where}" if where else text
