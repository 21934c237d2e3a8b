"""A recipe: everything that decides a training run, as frozen data stored in TOML.

Owns the schema and the way from a file plus `--set` overrides to a checked `Recipe`. What it says is carried out in `run.py`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Literal

from vitlab.core import config
from vitlab.core.duration import UNITS, Duration
from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ModelSpec, changed, spec_from_dict, spec_to_dict
from vitlab.training.schedule import Decay


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: Literal["digits", "letters"]
    image_size: tuple[int, int]
    test_frac: float = 0.2
    count: int = 0  # how many images to draw, for sets that are drawn
    turn_deg: float = 0.0
    zoom: float = 0.0
    shift_frac: float = 0.0


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
            if getattr(self, name) <= 0:
                raise UsageError(f"optim.{name} must be positive, not {getattr(self, name)}")
        for name in ("weight_decay", "warmup_frac", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"optim.{name} must be at least 0 and below 1, not {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectConfig:
    """The number a reader should see, measured with this recipe, and how far another machine may be from it."""

    test_top1: float
    tolerance: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    title: str
    seed: int = 0
    data: DataConfig
    model: ModelSpec
    train: TrainConfig
    optim: OptimConfig
    expect: ExpectConfig | None = None


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe that ships with vitlab, with `path.to.key=value` overrides applied."""
    folder = resources.files("vitlab.runs") / "recipes"
    known = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    if name not in known:
        raise UnknownName("recipe", name, known)
    table = config.parse_toml((folder / f"{name}.toml").read_text(encoding="utf-8"), f"recipe {name}")
    return recipe_from_dict(table, overrides)


def recipe_from_dict(table: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    given = list(overrides)
    merged = config.with_overrides(dict(table), given)
    # A length given on the command line replaces the recipe's, whatever unit that was in.
    if chosen := {unit for unit in UNITS if any(line.startswith(f"train.{unit}=") for line in given)}:
        merged["train"] = {key: v for key, v in merged["train"].items() if key not in UNITS or key in chosen}
    return config.from_dict(Recipe, {**merged, "model": _read_model(merged.get("model", {}))})


def _read_model(table: Any) -> ModelSpec:
    """`name` gives the starting point and every other key changes one field; the stored form has all fields instead."""
    if not isinstance(table, Mapping):
        raise UsageError(f"config key 'model' wants a table of keys, not {table!r}")
    changes = dict(table)
    name = changes.pop("name", None)
    if "kind" in changes:
        return spec_from_dict(changes)
    if not isinstance(name, str):
        raise UsageError("config key 'model.name' is missing", hint='For example: name = "ViT-S/16"')
    return changed(parse_name(name), changes)


def recipe_to_toml(recipe: Recipe) -> str:
    """The resolved recipe, every key written out: running it again repeats the run."""
    table = config.to_dict(recipe)
    table["model"] = spec_to_dict(recipe.model)
    return f"# {format_name(recipe.model)}\n" + config.dump_toml(table)
