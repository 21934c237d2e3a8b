"""Which recipe fits this data, these start weights and this machine, and why: a rule of thumb that is printed, not hidden.

Owns the thresholds. Whatever it chooses can be overridden, key by key or by naming a recipe.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from vitlab.core import config
from vitlab.core.runtime import multiplies_bfloat16
from vitlab.data.dataset import Dataset
from vitlab.data.preprocess import Preprocess
from vitlab.models.families import FAMILIES, family_of
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ModelSpec, spec_to_dict
from vitlab.training.recipe import SCRATCH, Recipe, merged, read_data_config
from vitlab.training.start import PREFERRED
from vitlab.weights.surgery import may_differ

TuningMode = Literal["head", "probe", "lora", "last", "full"]
# What a caller may ask for: a mode; a head alone, fitted or in steps; or steps, of as much as suits the data.
Requested = TuningMode | Literal["head alone", "steps"]

_SKEWED = 3.0  # times as many images in the largest class as in the smallest: then classes are weighted
_FEW, _SOME, _MANY = 1_000, 10_000, 50_000  # images to train and tune on
_FEW_EACH = 20  # images of a class
_ENLARGED = 2.0  # times: an image that is blown up this much looks unlike what the start weights have seen
_STEPS_FROM_SCRATCH = 20_000  # at most; fewer where the data is small
_STEPS_PER_EPOCH, _SMALLEST_BATCH = 4, 4  # where images are few: one step a pass would learn next to nothing
_PATIENCE = 5  # evaluations: half of a run's, so that a rate which has yet to fall gets its chance
_BLOCKS = 4  # the last of them, which are trained: a third of a ViT-B
_FEWEST_TO_STOP = 500  # images: a tenth of fewer says too little to stop by
_FEATURE_BYTES = 3 * 4  # of a float32: the features, the same standardised, and what the fit works with
# What a model's name shows.
_IN_NAME = ("kind", "width", "depth", "mlp_dim", "heads", "patch", "attention", "stem", "trunk")
_PIXELS = ("mode", "mean", "std")  # what the numbers mean that the first layer has learned to read
_UPWARDS: tuple[TuningMode, ...] = ("probe", "lora", "last", "full")
_METHODS = {
    "probe": "a linear probe on features of the frozen backbone",
    "head": "a linear head on the frozen backbone, trained in steps",
    "lora": "adapters (LoRA) in a frozen backbone",
    "full": "all weights are trained",
}


class Choice(NamedTuple):
    table: dict[str, Any]  # a recipe without its data source
    because: str
    advice: str = ""  # what would do better


class Started(NamedTuple):
    """A recipe's table for start weights that it does not know, and what it has of them instead of its own."""

    table: dict[str, Any]
    model: str = ""
    pixels: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the choice rests on. `train_images` are those that may be learnt from, after what is held out to test on."""

    train_images: int
    classes: int
    median_side: int
    skew: float
    several_labels: bool
    device: torch.device
    memory: int  # bytes for features, on the host
    processes: int = 1


def gather_facts(train: Dataset, median_side: int, device: torch.device, memory: int, processes: int) -> Facts:
    counts_K = train.labels.counts(len(train.classes))
    present_K = counts_K[counts_K > 0]
    skew = float(present_K.max() / present_K.min()) if len(present_K) else 1.0
    several = train.labels.multi
    return Facts(len(train), len(train.classes), median_side, skew, several, device, memory, processes)


def choose(facts: Facts, start: tuple[ModelSpec, Preprocess] | None, requested: Requested | None = None) -> Choice:
    """A recipe's table without its data source, and why this one. `requested` is how much to train, if the caller says so."""
    table, because, advice = _from_scratch(facts) if start is None else _from_start(facts, *start, requested)
    objective = table.setdefault("objective", {})
    if facts.several_labels:
        objective["kind"] = "sigmoid"
    elif facts.skew > _SKEWED:
        objective["class_weights"] = "auto"
        because += f"; classes are weighted, since the largest has {facts.skew:.0f} times the images of the smallest"
    return Choice(table, because, advice)


def describe_choice(recipe: Recipe, train_images: int, because: str) -> str:
    """The reason in a sentence, about the recipe as it was settled: what was chosen may have been overridden since."""
    rows, cols = recipe.model.image_size
    model = f"{format_name(recipe.model)} at {rows}x{cols} pixels"
    images = f"{train_images:,} images of {recipe.model.num_classes:,} classes to train on"
    if recipe.init == SCRATCH:
        return f"{images}, {because}: {model}, from scratch"
    return f"{images}, {because}: {model}, {describe_method(recipe)}"


def describe_method(recipe: Recipe) -> str:
    mode = "probe" if recipe.train.method == "probe" else recipe.optim.train
    if mode.startswith("last:"):
        return f"its last {mode.removeprefix('last:')} blocks are trained, the others stay"
    return _METHODS[mode]


def requested_mode(overrides: Sequence[str]) -> Requested | None:
    """How much of the model the caller wants trained: rates and lengths must fit that."""
    given = config.overridden(overrides)
    what, method = str(given.get("optim.train", "")), given.get("train.method")
    if method == "probe":
        return "probe"
    if what == "lora" or what == "full":
        return what
    if what.startswith("last:"):
        return "last"
    if what == "head":
        return "head" if method == "steps" else "head alone"
    return "steps" if method == "steps" else None


# --- with start weights -----------------------------------------------------------------------------------------------


def pick_tuning_mode(facts: Facts, spec: ModelSpec, side: int) -> tuple[TuningMode, str]:
    """How much of the model, which sees `side` pixels, is trained, and why: the more images, the more of it."""
    mode, because = _by_images(facts, spec)
    enlarged = side / max(1, facts.median_side)
    if facts.device.type != "cpu" and _is_tuned(spec) and mode != "full" and enlarged > _ENLARGED:
        mode = _UPWARDS[_UPWARDS.index(mode) + 1]
        because += f", one step more since {facts.median_side} pixels are enlarged {enlarged:.0f} times"
    return _pick_head(facts, spec, because) if mode == "probe" else (mode, because)


def _pick_head(facts: Facts, spec: ModelSpec, because: str) -> tuple[TuningMode, str]:
    """How a head alone is trained: as a linear probe, or in steps where that cannot be."""
    if facts.processes > 1:
        return "head", f"{because}, and several processes share the work"
    if facts.train_images * spec.representation_width * _FEATURE_BYTES > facts.memory:
        return "head", f"{because}, and their features do not fit into memory"
    return "probe", because


def _by_images(facts: Facts, spec: ModelSpec) -> tuple[TuningMode, str]:
    each = facts.train_images / facts.classes
    if facts.device.type == "cpu":
        return "probe", "and there is no GPU"
    if not _is_tuned(spec):
        return "probe", f"and {format_name(spec)} to start from"
    if facts.train_images < _FEW:
        return "probe", "so few that they change no large model well"
    if each < _FEW_EACH:
        return "probe", f"{each:.0f} of each, so few that they change no large model well"
    if facts.train_images < _SOME:
        return "lora", f"fewer than {_SOME:,}"
    if facts.train_images < _MANY:
        return "last", f"fewer than {_MANY:,}"
    return "full", "enough to change everything"


def _is_tuned(spec: ModelSpec) -> bool:
    """Whether more than a head is trained without being asked for: LoRA is where that begins."""
    return bool(family_of(spec).lora_targets)


def _from_start(facts: Facts, spec: ModelSpec, rule: Preprocess, requested: Requested | None) -> Choice:
    data = {key: value for key, value in config.to_dict(rule).items() if key not in ("decoder", "bits")}
    table: dict[str, Any] = {"data": data, "model": _model_of(spec), "schedule": {"warmup": "10 %"}}
    mode, because = pick_tuning_mode(facts, spec, min(rule.image_size))
    if requested == "steps":
        mode = "head" if mode == "probe" else mode
    elif requested == "head alone":
        mode, because = _pick_head(facts, spec, "as asked")
    elif requested is not None:
        mode, because = requested, "as asked"
    fast = _fast(facts.device)
    if mode == "probe":
        # Features of convolutions and batch norms in half precision differ too much from those of the finished model, which
        # is tested in float32: a head fitted to the ones does poorly on the others.
        precision = fast if _is_tuned(spec) else "fp32"
        table["train"] = {"method": "probe", "epochs": 1, "batch_size": 64, "precision": precision}
        table["optim"] = {"lr": 1.0, "train": "head"}
        table["data"]["val_frac"] = 0.2
        return Choice(table, because)
    epochs = {"head": 5, "lora": 20, "last": 10, "full": 10}[mode]
    batch = max(_SMALLEST_BATCH, min(128, facts.train_images // _STEPS_PER_EPOCH))
    if mode == "lora" and facts.train_images >= _SOME:
        epochs = 10
    table["train"] = {"epochs": epochs, "batch_size": batch, "precision": fast, "ema": 0.999}
    table["train"] |= {"eval_every": "1 epoch", "save_every": "1 epoch", "patience": _patience(facts)}
    table["data"] |= {"val_frac": 0.1, "workers": 8 if facts.device.type == "cuda" else 1}
    table["data"]["crop"] = {"area": [0.3, 1.0]}
    if rule.filter == "area":  # made for shrinking whole images; big_vision, whose it is, trains like this
        table["data"]["crop"] |= {"filter": "bilinear", "antialias": False}
    rates: dict[str, dict[str, Any]] = {
        "head": {"lr": 1e-3, "train": "head"},
        "lora": {"lr": 1e-3, "weight_decay": 0.01, "train": "lora"},
        "last": {"lr": 3e-4, "weight_decay": 0.05, "train": f"last:{_BLOCKS}"},
        "full": {"lr": 3e-4, "weight_decay": 0.05, "layer_decay": 0.75},
    }
    if mode == "last" and requested != "last" and spec.num_blocks <= _BLOCKS:
        mode = "full"  # there are no others
    table["optim"] = rates[mode]
    return Choice(table, because)


def _model_of(spec: ModelSpec) -> dict[str, Any]:
    """The model table of a recipe that starts from weights of `spec`. The head is new, and the data decides the rest."""
    fixed = ("image_size", "num_classes", "in_channels")
    return {key: value for key, value in spec_to_dict(spec.with_linear_head()).items() if key not in fixed}


# --- with start weights and a recipe ----------------------------------------------------------------------------------


def start_from(table: Mapping[str, Any], spec: ModelSpec, rule: Preprocess) -> Started:
    """The recipe for weights of any body: this and what pixels mean is theirs; image size, dropout and all else stay."""
    model, data = table.get("model", {}), table.get("data", {})
    if not isinstance(model, Mapping) or not isinstance(data, Mapping):
        return Started(dict(table))  # refused by whoever reads it
    theirs = {key: value for key, value in _model_of(spec).items() if key not in family_of(spec).dropout_fields}
    fields = {field.name for family in FAMILIES.values() for field in dataclasses.fields(family.spec)}
    replaced = {"name", "kind", "head", *fields} - {key for key in may_differ(spec) if key != "head"}
    kept = {key: value for key, value in model.items() if key not in replaced}  # also a slip, to be refused
    here = {key: data[key] for key in _PIXELS if key in data}
    own = read_data_config({"data": {"source": "", "image_size": [1, 1], **here}}).preprocess()
    pixels = {key: getattr(rule, key) for key in _PIXELS}
    other = [key for key in _PIXELS if _short(getattr(own, key)) != _short(pixels[key])]
    note = f"pixels: {_listed(pixels, other)}, as the start weights have it; the recipe says "
    return Started(
        {**table, "model": {**theirs, **kept}, "data": {**data, **(pixels if other else {})}},
        _replaced_model(spec, theirs, model),
        note + _listed({key: getattr(own, key) for key in other}, other) if other else "",
    )


def _replaced_model(spec: ModelSpec, theirs: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """The model of the start weights beside that of the recipe; nothing where they are the same."""
    name = format_name(parse_name(str(written["name"]))) if "name" in written else ""
    ours = merged(spec_to_dict(parse_name(name)) if name else {}, written)
    fixed = [key for key in theirs if key not in may_differ(spec) and key in ours]
    other = [key for key in fixed if _short(ours[key]) != _short(theirs[key])]
    if not other:
        return ""
    beyond = [key for key in other if key not in _IN_NAME]
    untold = [key for key in other if key in written or key in beyond]
    here = format_name(spec) + (f" with {_listed(theirs, beyond)}" if beyond else "")
    there = " with ".join(part for part in (name, _listed(ours, untold)) if part)
    return f"{here}, as the start weights have it; the recipe says {there}"


def _listed(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={_short(values[key])}" for key in keys)


def _short(value: Any) -> Any:
    """As a recipe has it, with one number for channels that all have it."""
    if not isinstance(value, tuple):
        return config.NONE if value is None else value
    numbers: tuple[float, ...] = value
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


# --- without ----------------------------------------------------------------------------------------------------------


def _from_scratch(facts: Facts) -> Choice:
    large = facts.median_side > 96 and facts.device.type != "cpu"
    side = 224 if large else 64 if facts.median_side > 48 else 32
    name = {224: "ViT-S/16", 64: "ViT-Ti/8", 32: "ViT-Ti/4"}[side]
    batch = min(256, max(16, facts.train_images // 20))
    epochs = max(10.0, min(300.0, _STEPS_FROM_SCRATCH * batch / facts.train_images))
    table: dict[str, Any] = {
        "data": {"image_size": [side, side], "val_frac": 0.1, "crop": {"area": [0.3, 1.0]}, "mix": {"mixup": 0.2}},
        "model": {"name": name, "pool": "gap", "stochastic_depth": 0.1},
        "train": {"epochs": epochs, "batch_size": batch, "precision": _fast(facts.device), "eval_every": "10%"},
        "optim": {"lr": 1e-3 * (batch / 256) ** 0.5, "weight_decay": 0.1},
        "schedule": {"warmup": "10 %"},
    }
    table["train"]["patience"] = _patience(facts)
    if facts.device.type == "cuda":
        table["data"]["workers"] = 8  # in one process, images took two thirds of the time
    # Not augreg's, whose shifts and cutouts are in pixels of images of 224: at 32 they blank a third of the images, also where
    # the caller gives another size later. docs/results/augment-scratch-h200.md has the accuracies with either.
    table["data"]["augment"] = {"randaugment": "torchvision", "magnitude": 9.0}
    advice = f"A Vision Transformer needs more images than these: --init {PREFERRED[0]} would do far better."
    because = f"{facts.median_side} pixels large, and no start weights"
    return Choice(table, because, advice if facts.train_images < _MANY else "")


def _patience(facts: Facts) -> int:
    return _PATIENCE if facts.train_images >= _FEWEST_TO_STOP else 0


def _fast(device: torch.device) -> str:
    """The fastest precision that keeps the range of float32 here."""
    if device.type == "cuda":
        return "bf16" if multiplies_bfloat16(device) else "fp16"
    return "bf16" if multiplies_bfloat16(device) else "fp32"
