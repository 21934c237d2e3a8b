"""A recipe: everything that decides a training run, as frozen data stored in TOML.

Owns the schema and the way from a file plus `--set` overrides to a checked `Recipe`. `runs/training/execute.py` carries it out.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from vitlab.core import config
from vitlab.core.duration import UNITS, Duration, Interval, read_interval
from vitlab.core.errors import FileProblem, UnknownName, UsageError, require
from vitlab.data.rules import MOST_BITS, AugmentRule, CropRule, Filter, MixRule, Mode, Preprocess, require_workers
from vitlab.models.families import spec_from_dict
from vitlab.models.lora_rule import LoraRule
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ModelSpec, PositionStart, changed, spec_to_dict
from vitlab.training.pretext_rules import require_pretext
from vitlab.training.rules import NoisyStudentRule, Objective, OptimRule, Precision
from vitlab.training.schedule import Schedule

Tracker = Literal["tensorboard", "wandb", "mlflow"]
SCRATCH = "scratch"
MODEL_NAME = "model.name"
_MOST_REPEATS = 1_000_000
_MOST_IMAGES = 10**9  # in a batch
_MOST_BIAS = 1000  # a probability of exp(-1000) is 0 in float64
# Keys that mean nothing to a linear probe, or begin like this.
_OF_STEPS = ("optim.", "schedule.", "train.steps", "train.epochs", "train.examples", "train.ema", "train.patience")
_OF_TRAINING_IMAGES = ("data.crop.", "data.augment", "data.mix.", "data.balanced", "data.repeats")
_DECIDED = ("image_size", "num_classes", "in_channels")  # fields of the model that the data decides


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    source: str  # a folder, a table, shards, an address, or a name
    image_size: tuple[int, int]
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # what a table calls its columns
    mode: Mode = "RGB"
    bits: int = MOST_BITS  # of grey images of more than 8; where nobody says, those that the images make use of
    resize: Literal["squash", "shorter-side"] = "squash"  # for testing, as `crop_frac` is; see `crop` for training
    crop_frac: float = 1.0
    filter: Filter = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.5,)  # one value counts for every channel
    std: tuple[float, ...] = (0.5,)
    test_frac: float = 0.2  # held out to test on, where the data has no part for it
    split_seed: int = 0  # which images are held out; apart from `seed`, so that runs of several seeds test on the same
    val_frac: float = 0.0  # held out of the rest for validation, where the data has no part for it
    val_from: Literal["part", "train"] = "part"  # train: held out also where the data has a part, as in Table 4
    min_images: int = 0  # classes with fewer to train on are dropped
    train_images: int = 0  # so many of the training images, stratified; 0 for all
    workers: int = 0
    cache: Literal["none", "memory", "file", "device"] = "none"  # device: of a GPU, for sets that fit
    cache_gb: float = 8.0  # the most that a cache may take
    balanced: bool = False
    repeats: int = 1
    max_bad: int = 100
    crop: CropRule = dataclasses.field(default_factory=CropRule)
    augment: AugmentRule = dataclasses.field(default_factory=AugmentRule)
    augment_in: Literal["device", "workers"] = "device"  # workers: where they are idle and images are small
    mix: MixRule = dataclasses.field(default_factory=MixRule)
    also: tuple[str, ...] = ()  # further sources whose training images are added, for objectives without labels

    def __post_init__(self) -> None:
        require(min(self.image_size) > 0, f"data.image_size must be positive, not {list(self.image_size)}")
        for name in ("test_frac", "val_frac"):
            require(0 <= getattr(self, name) < 1, f"data.{name} must be at least 0 and below 1")
        for name in ("workers", "max_bad", "min_images", "train_images"):
            require(getattr(self, name) >= 0, f"data.{name} must not be negative, not {getattr(self, name)}")
        require(self.source not in self.also, f"data.also names {self.source}, whose test images would be trained on")
        require_workers(self.workers)
        require(
            1 <= self.repeats <= _MOST_REPEATS, f"data.repeats must be from 1 to {_MOST_REPEATS:,}, not {self.repeats}"
        )
        self.preprocess()

    def preprocess(self) -> Preprocess:
        """What the model is fed with when it is tested and used; stored in its bundle."""
        channels = {"L": 1, "RGB": len("RGB")}.get(self.mode, max(len(self.mean), len(self.std)))
        mean, std = (value * channels if len(value) == 1 else value for value in (self.mean, self.std))
        return Preprocess(
            mode=self.mode,
            bits=self.bits,
            image_size=self.image_size,
            resize=self.resize,
            crop_frac=self.crop_frac,
            filter=self.filter,
            antialias=self.antialias,
            mean=mean,
            std=std,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Duration):
    method: Literal["steps", "probe"] = "steps"  # probe: a linear probe on features of the frozen backbone
    batch_size: int
    micro_batch: int = 0  # images per forward pass and process; 0 for as many as fit
    precision: Precision = "fp32"
    ema: float = 0.0  # decay of a moving average of the weights, which is then what is tested and kept
    ema_warmup: bool = True  # at step t not above (1 + t) / (10 + t), so that the start is forgotten
    save_every: Interval = "10 %"  # Ctrl-C and SIGTERM save at once
    save_async: bool = True  # beside the steps that follow; off, each step waits for what is saved before it
    keep: int = 2  # newest checkpoints; the best one stays too
    eval_every: Interval = "100 %"  # where there are validation images
    patience: int = 0  # evaluations without more right answers after which to stop; 0 for never
    log: tuple[Tracker, ...] = ()  # besides metrics.jsonl and metrics.csv
    recompute: bool = False  # activations in the backward pass, for less memory and more time
    sharded: bool = False  # weights spread over the processes, for less memory and more traffic
    compiled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"and at most {_MOST_IMAGES:,}"
        require(
            0 < self.batch_size <= _MOST_IMAGES, f"train.batch_size must be at least 1 {most}, not {self.batch_size}"
        )
        require(
            0 <= self.micro_batch <= _MOST_IMAGES,
            f"train.micro_batch must not be negative {most}, not {self.micro_batch}",
        )
        require(0 <= self.ema < 1, f"train.ema must be at least 0 and below 1, not {self.ema}")
        for name in ("save_every", "eval_every"):
            value: Interval = getattr(self, name)
            require(read_interval(f"train.{name}", value)[0] > 0, f"train.{name} must be positive, not {value}")
        require(self.keep >= 1 and self.patience >= 0, "train.keep must be at least 1, and train.patience at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectConfig:
    """The number a reader should see, measured with this recipe, and how far another machine may be from it."""

    test_top1: float
    after: str = ""  # the recipe that follows, whose test gives the number: pre-training is judged by transfer
    tolerance: float = 0.0
    source: str = ""  # who measured it, and how
    hardware: str = ""
    hours: float | None = None

    def __post_init__(self) -> None:
        require(0 <= self.test_top1 <= 1, f"expect.test_top1 is a fraction, not {self.test_top1}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The learning rates that were tried when the recipe was published, and the share of training images that chose.

    One run takes no notice: it has the rate in `optim.lr`, and trains on everything.
    """

    lr: tuple[float, ...]
    val_frac: float

    def __post_init__(self) -> None:
        require(bool(self.lr) and min(self.lr) > 0, f"sweep.lr must be positive rates, not {list(self.lr)}")
        require(0 < self.val_frac < 1, f"sweep.val_frac must lie between 0 and 1, not {self.val_frac}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    title: str
    seed: int = 0
    init: str = SCRATCH  # or the bundle, run, file or name whose weights it starts from
    init_positions: PositionStart = "interpolate"  # sequence: cut or repeated in raster order; fresh: drawn anew
    teacher: str = ""  # whose answers are learned too, by `objective.distillation`, or whose features are
    keep_head: bool = False  # of the start weights, which then know the same classes; else the head is new
    head_bias: float = 0.0  # of a new head; below 0, a sigmoid loss starts from "no" to every class, as in AugReg
    data: DataConfig
    model: ModelSpec
    train: TrainConfig
    optim: OptimRule
    schedule: Schedule = dataclasses.field(default_factory=Schedule)
    objective: Objective = dataclasses.field(default_factory=Objective)
    lora: LoraRule = dataclasses.field(default_factory=LoraRule)  # of use with optim.train = lora
    noisy_student: NoisyStudentRule | None = None
    sweep: SweepConfig | None = None
    expect: ExpectConfig | None = None

    def __post_init__(self) -> None:
        require(abs(self.head_bias) <= _MOST_BIAS, f"head_bias must be from -{_MOST_BIAS} to {_MOST_BIAS}")
        require(
            not self.keep_head or (self.init != SCRATCH and not self.head_bias),
            "keep_head keeps that of the start weights: it needs init, and has no use for head_bias",
        )
        require(0 <= self.seed < 2**63, f"seed must be a whole number from 0 to 2^63-1, not {self.seed}")
        if self.init_positions != "interpolate":
            requested = f"init_positions={self.init_positions}"
            require(self.init != SCRATCH, f"{requested} is about start weights, and this run has none", "Give --init.")
            require(
                self.optim.train != "lora",
                f"{requested} does not go with optim.train=lora: an adapter stores no positions",
            )
            frozen = "train.method=probe" if self.train.method == "probe" else f"optim.train={self.optim.train}"
            require(
                self.train.method == "steps" and self.optim.train == "full",
                f"{requested} does not go with {frozen}: positions are not trained, so these would stay as they begin",
                "Leave init_positions out, or set optim.train=full and train.method=steps.",
            )
        require(
            not (self.objective.logit_adjustment and self.data.balanced),
            "objective.logit_adjustment is for images as often as they are: with data.balanced every class is as often already",
        )
        require(
            not (self.optim.name == "muon" and self.train.sharded),
            "optim.name=muon needs whole matrices, and train.sharded leaves each process some of their rows",
            "Set train.sharded=false, or optim.name=adamw.",
        )
        by_features = self.objective.kind == "feature-distillation"
        if by_features and not self.teacher:
            raise UsageError("objective.kind=feature-distillation needs a teacher", hint="Add --set teacher=MODEL.")
        if (by_features or self.objective.distillation is not None) != bool(self.teacher):
            lacking = "objective.distillation.weight=0.5" if self.teacher else "teacher=RUN"
            raise UsageError("a teacher and objective.distillation go together", hint=f"Add --set {lacking}.")
        if self.objective.is_pretext:
            require_pretext(self)
        require(
            self.objective.is_pretext or not self.data.also,
            f"data.also adds images without their labels, which objective.kind={self.objective.kind} needs",
            "Put all classes into one data set, or choose an objective without labels.",
        )


# --- from a file to a recipe ------------------------------------------------------------------------------------------


def list_recipes(pattern: str = "*") -> list[str]:
    """List the recipes that ship with vitlab and match a shell pattern.

    Args:
        pattern: As in a shell: * for any text, ? for one character.
    """
    folder = resources.files("vitlab.training") / "recipes"
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return sorted(fnmatch.filter(names, pattern))


def recipe_text(name: str) -> str:
    """The file of a recipe that ships with vitlab. Its first line says what it is."""
    if name not in list_recipes():
        hint = "See `vitlab recipes list`; a recipe of your own is a file that ends in .toml."
        raise UnknownName("recipe", name, list_recipes(), hint=hint)
    return (resources.files("vitlab.training") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def read_recipe(name: str) -> dict[str, Any]:
    """The table of a recipe that ships with vitlab, or of a TOML file, with what it `extends` filled in."""
    if name.endswith(".toml"):
        try:
            return for_other_data(extended(config.load_toml(Path(name)), Path(name).parent))
        except FileProblem as problem:  # the caller has named or written it
            raise UsageError(problem.what, hint=problem.hint) from problem
    return extended(config.parse_toml(recipe_text(name), f"recipe {name}"))


def extended(table: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """`table` on top of the recipe it `extends`. One level: who reads a recipe has at most two files to look at.

    It is one that ships or, for a recipe in `folder`, a file whose name counts from there. What that one gives was measured
    without the changes, so its `expect` goes over only beneath a number of the recipe's own.
    """
    own = dict(table)
    parent = own.pop("extends", None)
    if parent is None:
        return own
    if folder is not None and str(parent).endswith(".toml"):
        below = config.load_toml(folder / str(parent))
    else:
        below = config.parse_toml(recipe_text(str(parent)), f"recipe {parent}")
    require("extends" not in below, f"the recipe {parent} extends another one itself, so it cannot be extended")
    expect = own.get("expect")
    if not isinstance(expect, Mapping) or "test_top1" not in expect:
        below.pop("expect", None)
    return merged(below, own)


def for_other_data(table: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe without what its data decided about the model, so that other data or another image size can."""
    model = table.get("model")
    if not isinstance(model, Mapping) or "kind" not in model:
        return dict(table)
    return {**table, "model": {key: value for key, value in model.items() if key not in _DECIDED}}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables as one, key by key; where both say something, `above` counts."""
    both = dict(below)
    if isinstance(above.get("steps", above.get("epochs", above.get("examples"))), int | float):
        both = {key: value for key, value in both.items() if key not in UNITS}  # one length replaces another
    for key, value in above.items():
        nested = both.get(key)
        both[key] = merged(nested, value) if isinstance(nested, Mapping) and isinstance(value, Mapping) else value
    return both


def with_changes(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table after `path.to.key=value` overrides; a length on the command line replaces the recipe's, whatever its unit."""
    given = list(overrides)
    changed_table = config.with_overrides(dict(table), given)
    if chosen := {unit for unit in UNITS if f"train.{unit}" in config.overridden(given)}:
        train = {key: v for key, v in changed_table["train"].items() if key not in UNITS or key in chosen}
        changed_table["train"] = train
    return changed_table


def read_data_config(table: Mapping[str, Any]) -> DataConfig:
    """The part of a recipe that must be known to open the data, which then decides the rest."""
    data = table.get("data", {})
    side = data.get("image_size") if isinstance(data, Mapping) else None
    if isinstance(side, int) and not isinstance(side, bool):  # one number is a square
        data = {**data, "image_size": [side, side]}
    return config.from_dict(DataConfig, data, "data.")


def recipe_from_dict(table: Mapping[str, Any], num_classes: int) -> Recipe:
    """A checked recipe. What the data decides about the model is filled in, so a recipe is always whole."""
    data = read_data_config(table)
    model = _read_model(table.get("model"), data, 0 if is_pretext(table) else num_classes)
    return config.from_dict(Recipe, {**_head_of_probe(table), "data": data, "model": model})


def is_pretext(table: Mapping[str, Any]) -> bool:
    """Whether a recipe's table has an objective without labels: then its model has no head, and its data need no classes."""
    objective = table.get("objective")
    return isinstance(objective, Mapping) and config.from_dict(Objective, objective, "objective.").is_pretext


def _head_of_probe(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A linear probe is all that is trained, and a recipe that leaves it open then says so."""
    train, optim = table.get("train"), table.get("optim")
    if not isinstance(train, Mapping) or not isinstance(optim, Mapping) or train.get("method") != "probe":
        return table
    return {**table, "optim": {"train": "head", **optim}}


def _read_model(table: Any, data: DataConfig, num_classes: int) -> ModelSpec:
    """`name` gives the starting point and every other key changes one field; the stored form has all fields instead."""
    if not isinstance(table, Mapping):
        raise UsageError(f"config key 'model' must be a table of keys, not {table!r}")
    changes = dict(table)
    channels = data.preprocess().channels
    decided: dict[str, Any] = dict(zip(_DECIDED, (data.image_size, num_classes, channels), strict=True))
    for key, value in decided.items():
        requested = changes.get(key, value)
        requested = tuple(requested) if isinstance(requested, list) else requested
        require(
            requested == value,
            f"config key 'model.{key}' is decided by the data ({value}), so {requested} is not available",
        )
    name = changes.pop("name", None)
    require(name is None or isinstance(name, str), f"config key '{MODEL_NAME}' must be text, not {name!r}")
    if "kind" in changes:
        spec = spec_from_dict({**changes, **decided})
        if name is not None and format_name(changed(parse_name(name), decided)) != format_name(spec):
            raise UsageError(
                f"{MODEL_NAME}={name} would be ignored: start weights or a stored recipe give the model field by field",
                hint="Leave the name out; without start weights, a field can be changed, as model.depth.",
            )
        return spec
    if name is None:
        raise UsageError("config key 'model.name' is missing", hint='For example: name = "ViT-S/16"')
    return changed(parse_name(name), {**changes, **decided})


def probe_ignores(key: str) -> bool:
    """Whether a linear probe takes no notice of this key: it has no steps, and sees images as they are tested."""
    return key.startswith(_OF_STEPS + _OF_TRAINING_IMAGES)


def require_probe_alone(recipe: Recipe, *, explicit: bool) -> None:
    """An error where a linear probe is asked for more than a head. `explicit` is whether somebody wrote `optim.train`."""
    if recipe.train.method != "probe":
        return
    if recipe.teacher:
        raise UsageError("a teacher needs train.method=steps: a linear probe has none")
    what = recipe.optim.train
    if explicit and what != "head":
        raise UsageError(
            f"optim.train={what} needs train.method=steps: train.method=probe fits a head alone",
            hint=f"For {what}, drop train.method=probe or write steps; for a head, drop optim.train={what} or write head.",
        )


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Every key written out, in the form that `recipe_from_dict` reads."""
    return {**config.to_dict(recipe), "model": spec_to_dict(recipe.model)}


def positions_note(recipe: Recipe) -> str:
    """What became of the positions of the start weights, where they are not interpolated."""
    return {"interpolate": "", "sequence": "positions in sequence, not interpolated", "fresh": "positions drawn anew"}[
        recipe.init_positions
    ]


def model_by_name(spec: ModelSpec) -> dict[str, Any]:
    """The model as a recipe has it: a name, and the fields that differ from what the name says."""
    usual = spec_to_dict(parse_name(format_name(spec)))
    own = {key: value for key, value in spec_to_dict(spec).items() if key not in _DECIDED and value != usual[key]}
    return {"name": format_name(spec), **own}


def recipe_to_toml(recipe: Recipe) -> str:
    """The resolved recipe: running it again repeats the run."""
    return f"# {format_name(recipe.model)}\n" + config.dump_toml(recipe_to_dict(recipe))
