"""A study: one question of the paper as a grid of training runs, at three scales. Loads no torch.

Owns the schema, which `study_file` reads. A cell of the grid is one value of every axis and a seed; its stages are runs, each
starting from the last:

    [scales.laptop.stages.train]
    recipe = "study-laptop-vit"
    [scales.laptop.axes.positions]
    none = { train = { "model.pos" = "none" } }         # what this value changes, stage by stage
    "1-D" = { train = { "model.pos" = "learned" } }
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vitlab.core.errors import UnknownName, UsageError

ScaleName = Literal["laptop", "gpu", "paper"]
SCALES: tuple[ScaleName, ...] = ("laptop", "gpu", "paper")
StageVerb = Literal["train", "noisy-student", "few-shot", "inspect", "speed"]
# one number for each seed; those that compare have a and b
Statistic = Literal[
    "value", "difference", "ratio", "slope", "slope-difference", "exponent", "exponent-difference", "cost-ratio"
]
Selection = Mapping[str, str]  # the label of some axes
ENDS = ("first", "last")  # labels of whatever stands at the ends of an axis
BEST = "best"  # the label of whatever has the highest mean over the seeds, for each side of a comparison
NO_AXES = ("flops", "seconds", "layer")  # what a drawing may have along x besides axes
STAGE_KEYS = ("recipe", "data", "init", "verb")  # beside config keys, in what an axis changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One run. `init` is where it starts; empty means the stage before, or for the first what its recipe says."""

    verb: StageVerb = "train"
    recipe: str = ""
    data: str = ""
    init: str = ""
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedRule:
    """The settings of a `speed` stage."""

    model: str
    image_size: int
    batch: int = 0  # 0 for the best of several
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclasses.dataclass(frozen=True)
class AxisValue:
    """One value of an axis, and what it changes."""

    label: str
    x: float | None  # its place on a numeric axis
    lines: tuple[
        str, ...
    ]  # that it is drawn on, and by which it can be named like by its label; empty for one of its own
    changes: Mapping[str, Mapping[str, Any]]  # by stage

    @property
    def names(self) -> tuple[str, ...]:
        return (self.label, *self.lines)


@dataclasses.dataclass(frozen=True)
class Scale:
    """The grid at one scale, and what it can and cannot show."""

    name: ScaleName
    about: str
    seeds: tuple[int, ...]
    stages: Mapping[str, Stage]
    axes: Mapping[str, tuple[AxisValue, ...]]
    skip: tuple[Selection, ...]
    measure: str  # what counts: top1, few_shot_5, ...
    # On two cores of an AMD EPYC, or on one H200 that a dozen runs share; None where nobody has measured it
    minutes: float | None

    @property
    def takes(self) -> str:
        """How long it takes, and on what; empty where nobody has measured it."""
        machine = "two cores of an AMD EPYC" if self.name == "laptop" else "one H200"
        if self.minutes is None:
            return ""
        return f"about {self.minutes:g} minute{'' if self.minutes == 1 else 's'} on {machine}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Test:
    """One number for each seed, and where its interval must lie for the claim to hold: above, below or within."""

    statistic: Statistic
    a: Selection = dataclasses.field(default_factory=dict[str, str])
    b: Selection = dataclasses.field(default_factory=dict[str, str])
    along: str = ""  # the axis of a slope or an exponent
    measure: str = ""  # other than the study's
    cost: Literal["flops", "seconds"] = "flops"
    above: float | None = None
    below: float | None = None
    scales: tuple[ScaleName, ...] = SCALES  # where the test makes sense

    @property
    def compares(self) -> bool:
        """Whether it has two sides."""
        return self.statistic.endswith(("difference", "ratio"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, and the tests that must all hold."""

    name: str
    says: str
    where: str  # in the paper
    tests: tuple[Test, ...]
    note: str = ""  # how the scale differs from the paper's
    post_hoc: str = ""  # what of its tests, their bounds or their seeds was set or changed after results had been seen
    post_hoc_scales: tuple[ScaleName, ...] = SCALES  # of which these results were

    def is_tested_at(self, scale: str) -> bool:
        return any(scale in test.scales for test in self.tests)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the paper draws it. `x` and `line` are axes; x may also be flops, seconds, or layer: a point for each head."""

    x: str
    line: str = ""
    measure: str = ""  # other than the study's
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    fit: bool = False  # a power law of the error, or of the measure where it is not an accuracy
    front: bool = False  # the Pareto front
    # The conditions that are drawn, where not all are
    only: Selection = dataclasses.field(default_factory=dict[str, str])
    scales: tuple[ScaleName, ...] = SCALES  # where its measure is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """How the study's published table is drawn, in the layout of the study's own plot.

    Its columns are lines over its rows; with `y`, each row is a point instead: the column `y` over the column `x`.
    """

    title: str
    x_label: str
    y_label: str
    x: str = ""  # a column
    y: str = ""
    places: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])  # of rows on a numeric axis
    lines: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # by column, or by how a row begins
    log_x: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A question of the paper, the claims about it, and a grid of runs at each scale."""

    name: str
    title: str
    question: str
    paper: str  # the figure or table it repeats
    table: str  # of `vitlab study list`: the published numbers beside ours; empty where there are none
    drawings: tuple[Drawing, ...]
    claims: tuple[Claim, ...]
    scales: Mapping[ScaleName, Scale]
    printed: Printed | None = None  # how that table is drawn

    def at(self, scale: str) -> Scale:
        if scale not in SCALES:
            raise UnknownName("scale", scale, SCALES)
        found = self.scales.get(scale)
        if found is None:
            raise UsageError(f"the study {self.name} has no scale {scale}; it has {', '.join(self.scales)}")
        return found


def named_values(values: Sequence[AxisValue], label: str) -> Sequence[AxisValue]:
    """The values of an axis that a label stands for; of `best`, which only the records know, all."""
    if label in ENDS:
        return [values[0 if label == ENDS[0] else -1]]
    exact = [value for value in values if value.label == label]  # a label may be a line of others, too
    return exact or (values if label == BEST else [value for value in values if label in value.lines])


def changed_stage(stage: Stage, changes: Mapping[str, Any]) -> Stage:
    """A stage after what one axis changes of it."""
    own = {key: changes[key] for key in STAGE_KEYS if key in changes}
    keys = {key: value for key, value in changes.items() if key not in STAGE_KEYS}
    return dataclasses.replace(stage, **own, set={**stage.set, **keys})


def first_seeds(scale: Scale, count: int | None) -> Scale:
    """The same grid with fewer seeds."""
    if count is None:
        return scale
    if not 1 <= count <= len(scale.seeds):
        raise UsageError(f"--seeds must be from 1 to {len(scale.seeds)}, not {count}")
    return dataclasses.replace(scale, seeds=scale.seeds[:count])


def list_combinations(scale: Scale) -> list[dict[str, AxisValue]]:
    """One value of every axis, as the grid has them."""
    grid = (dict(zip(scale.axes, values, strict=True)) for values in itertools.product(*scale.axes.values()))
    return [chosen for chosen in grid if not is_skipped(scale, chosen)]


def count_cells(scale: Scale) -> int:
    """How many cells there are, without a look at their recipes."""
    return len(scale.seeds) * len(list_combinations(scale))


def is_skipped(scale: Scale, chosen: Mapping[str, AxisValue]) -> bool:
    """Whether a combination is left out of the grid."""
    return any(all(chosen[axis].label == label for axis, label in one.items()) for one in scale.skip)
