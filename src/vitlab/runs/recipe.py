"""A recipe: everything that decides a training run, as frozen data stored in TOML.

Owns the schema and the way from a file plus `--set` overrides to a checked `Recipe`. What it says is carried out in `run.py`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple

from vitlab.core import config
from vitlab.core.duration import UNITS, Duration
from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ModelSpec, changed, spec_from_dict, spec_to_dict
from vitlab.training.schedule import Decay

SCRATCH = "scratch"


class DataFacts(NamedTuple):
    """What a data set decides about a model."""

    num_classes: int
    channels: int
    drawn: bool  # as many images as `data.count` says, instead of all there are


DATA_SETS = {"digits": DataFacts(10, 1, drawn=False), "letters": DataFacts(26, 1, drawn=True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: Literal["digits", "letters"]
    image_size: tuple[int, int]
    test_frac: float = 0.2
    count: int = 0  # how many images to draw, for sets that are drawn
    turn_deg: float = 0.0
    zoom: float = 0.0
    shift_frac: float = 0.0

    def __post_init__(self) -> None:
        _require(min(self.image_size) > 0, f"data.image_size must be positive, not {list(self.image_size)}")
        _require(0 < self.test_frac < 1, f"data.test_frac must lie between 0 and 1, not {self.test_frac}")
        for name in ("turn_deg", "zoom", "shift_frac"):
            _require(
                0 <= getattr(self, name) < math.inf, f"data.{name} must not be negative, not {getattr(self, name)}"
            )
        least = 2 * self.facts.num_classes
        if self.facts.drawn:
            _require(self.count >= least, f"data.count must be at least {least}, two per class, not {self.count}")
        else:
            _require(
                self.count == 0, f"data.count is for sets that are drawn; {self.name} has its own number of images"
            )

    @property
    def facts(self) -> DataFacts:
        return DATA_SETS[self.name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Duration):
    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1:
            raise UsageError(f"train.batch_size must be at least 1, not {self.batch_size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_frac: float = 0.1
    decay: Decay = "cosine"
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm"):
            _require(0 < getattr(self, name) < math.inf, f"optim.{name} must be positive, not {getattr(self, name)}")
        for name in ("weight_decay", "warmup_frac", "label_smoothing"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optim.{name} must be at least 0 and below 1, not {value}")
        _require(all(0 <= beta < 1 for beta in self.betas), f"optim.betas must lie in 0 to 1, not {list(self.betas)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectConfig:
    """The number a reader should see, measured with this recipe, and how far another machine may be from it."""

    test_top1: float
    tolerance: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    title: str
    seed: int = 0
    init: str = SCRATCH  # or the bundle or run folder whose weights it starts from
    data: DataConfig
    model: ModelSpec
    train: TrainConfig
    optim: OptimConfig
    expect: ExpectConfig | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**63, f"seed must be a whole number from 0 to 2^63-1, not {self.seed}")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(what)


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe that ships with vitlab, with `path.to.key=value` overrides applied."""
    folder = resources.files("vitlab.runs") / "recipes"
    known = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    if name not in known:
        raise UnknownName("recipe", name, known)
    table = config.parse_toml((folder / f"{name}.toml").read_text(encoding="utf-8"), f"recipe {name}")
    return recipe_from_dict(table, overrides)


def recipe_from_dict(table: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """A checked recipe. What the data decides about the model is filled in, so a recipe is always whole."""
    given = list(overrides)
    merged = config.with_overrides(dict(table), given)
    # A length given on the command line replaces the recipe's, whatever unit that was in.
    keys = {line.partition("=")[0].strip() for line in given}
    if chosen := {unit for unit in UNITS if f"train.{unit}" in keys}:
        merged["train"] = {key: v for key, v in merged["train"].items() if key not in UNITS or key in chosen}
    data = config.from_dict(DataConfig, merged.get("data", {}), "data.")
    return config.from_dict(Recipe, {**merged, "data": data, "model": _read_model(merged.get("model"), data)})


def _read_model(table: Any, data: DataConfig) -> ModelSpec:
    """`name` gives the starting point and every other key changes one field; the stored form has all fields instead."""
    if not isinstance(table, Mapping):
        raise UsageError(f"config key 'model' wants a table of keys, not {table!r}")
    changes = dict(table)
    facts = data.facts
    decided = {"image_size": data.image_size, "num_classes": facts.num_classes, "in_channels": facts.channels}
    for key, value in decided.items():
        asked = changes.get(key, value)
        asked = tuple(asked) if isinstance(asked, list) else asked
        _require(asked == value, f"config key 'model.{key}' is decided by the data ({value}), so {asked} cannot be had")
    name = changes.pop("name", None)
    if "kind" in changes:
        return spec_from_dict({**changes, **decided})
    if not isinstance(name, str):
        raise UsageError("config key 'model.name' is missing", hint='For example: name = "ViT-S/16"')
    return changed(parse_name(name), {**changes, **decided})


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Every key written out, in the form that `recipe_from_dict` reads."""
    return {**config.to_dict(recipe), "model": spec_to_dict(recipe.model)}


def recipe_to_toml(recipe: Recipe) -> str:
    """The resolved recipe: running it again repeats the run."""
    return f"# {format_name(recipe.model)}\n" + config.dump_toml(recipe_to_dict(recipe))
