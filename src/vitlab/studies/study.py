"""A study: one question of the paper as a grid of training runs, at three scales. Read from TOML; loads no torch.

Owns the schema. A cell of the grid is one value of every axis and a seed; its stages are runs, each starting from the last:

    [scales.laptop.stages.train]
    recipe = "study-laptop-vit"
    [scales.laptop.axes.positions]
    none = { train = { "model.pos" = "none" } }         # what this value changes, stage by stage
    "1-D" = { train = { "model.pos" = "learned" } }
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

from vitlab.core import config
from vitlab.core.errors import UnknownName, UsageError, require
from vitlab.evaluation.published import PublishedTable, find_table

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
_OF_A_STAGE = ("recipe", "data", "init", "verb")  # beside config keys, in what an axis changes
_OF_A_VALUE = ("x", "line")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ScaleTable:
    about: str
    seeds: tuple[int, ...] = (0, 1, 2)
    stages: Mapping[str, Stage]
    axes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    skip: tuple[Mapping[str, Any], ...] = ()
    measure: str = ""  # other than the study's
    minutes: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StudyTable:
    title: str
    question: str
    paper: str
    table: str = ""
    measure: str = "top1"
    printed: Printed | None = None
    drawings: tuple[Drawing, ...]
    claims: tuple[Claim, ...] = ()
    scales: Mapping[str, _ScaleTable]


def list_study_names() -> list[str]:
    """The studies that ship with vitlab."""
    folder = resources.files("vitlab.studies") / "book"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_study(name: str) -> Study:
    """A study that ships with vitlab, or one in a TOML file of your own."""
    if name.endswith(".toml"):
        return _checked(Path(name).stem, config.load_toml(Path(name)))
    return _shipped(name)


@functools.cache
def _shipped(name: str) -> Study:
    if name not in list_study_names():
        hint = "See `vitlab study list`; a study of your own is a file that ends in .toml."
        raise UnknownName("study", name, list_study_names(), hint=hint)
    text = (resources.files("vitlab.studies") / "book" / f"{name}.toml").read_text(encoding="utf-8")
    return _checked(name, config.parse_toml(text, f"study {name}"))


def _checked(name: str, table: Mapping[str, Any]) -> Study:
    try:
        return _study(name, config.from_dict(_StudyTable, table))
    except UnknownName:
        raise
    except UsageError as error:
        raise UsageError(f"study {name}: {error.what}", hint=error.hint) from error


def _study(name: str, given: _StudyTable) -> Study:
    require(bool(given.scales), f"a study has at least one of the scales {', '.join(SCALES)}")
    published = find_table(given.table)[0] if given.table else None
    scales: dict[ScaleName, Scale] = {}
    for scale, table in given.scales.items():
        require(scale in SCALES, f"scales.{scale} is not one of {', '.join(SCALES)}")
        scales[cast(ScaleName, scale)] = _scale(cast(ScaleName, scale), table, given.measure)
    if given.printed is not None:
        if published is None:
            raise UsageError("printed needs the name of a published table: table")
        _require_printed(given.printed, published)
    study = Study(
        name=name,
        title=given.title,
        question=given.question,
        paper=given.paper,
        table=given.table,
        drawings=given.drawings,
        claims=given.claims,
        scales=scales,
        printed=given.printed,
    )
    names = [claim.name for claim in study.claims]
    for claim in study.claims:
        require(names.count(claim.name) == 1, f"two claims have the name {claim.name}")
        require(any(map(claim.is_tested_at, scales)), f"claim {claim.name} has no test at any scale of the study")
        for test in claim.tests:
            _require_test(test, f"claim {claim.name}")
            for at in (scales[scale] for scale in test.scales if scale in scales):
                _require_testable(test, at, f"claim {claim.name}")
    for drawing in study.drawings:
        axes = [*filter(None, (drawing.line, "" if drawing.x in NO_AXES else drawing.x))]
        for at in (scales[scale] for scale in drawing.scales if scale in scales):
            _require_axes(at, axes, "a drawing")
            _require_labels(at, drawing.only, "a drawing")
            _require_drawable(drawing, at)
    return study


def _require_printed(printed: Printed, table: PublishedTable) -> None:
    """A column or row that the table does not have would be missed after the last run."""
    columns, rows = [column.title for column in table.columns], [row.title for row in table.rows]
    for title in filter(None, (printed.x, printed.y, *(() if printed.y else printed.lines))):
        if title not in columns:
            raise UnknownName(f"column of {table.name}", title, columns)
    for title in printed.places:
        if title not in rows:
            raise UnknownName(f"row of {table.name}", title, rows)
    require(bool(printed.x) == bool(printed.y), "printed has both columns, x and y, or neither")
    require(not printed.places or not printed.y, "printed has places for rows, or a column of them: x")
    placed = printed.places or printed.y
    require(not printed.log_x or bool(placed), "printed has log_x, and neither places nor x to be drawn on it")


def _require_test(test: Test, who: str) -> None:
    low, high = test.above, test.below
    numbers = [bound for bound in (low, high) if bound is not None]
    require(all(map(math.isfinite, numbers)), f"{who}: above and below must be finite numbers")
    require(low is not None or high is not None, f"{who}: a test says above or below what its number must be")
    is_ratio = test.statistic.endswith("ratio")
    require(not is_ratio or all(number > 0 for number in numbers), f"{who}: above and below of a ratio must be above 0")
    require(low is None or high is None or low < high, f"{who}: no number is above {low} and below {high}")
    needs_axis = test.statistic.startswith(("slope", "exponent"))
    require(not needs_axis or test.along != "", f"{who}: a {test.statistic} needs the name of an axis: along")
    sides = bool(test.a) and bool(test.b) and test.a != test.b
    require(not test.compares or sides, f"{who}: a {test.statistic} needs two different sides: a and b")


def _require_testable(test: Test, scale: Scale, who: str) -> None:
    """A label that a scale does not have would never be measured, and the claim never judged."""
    for side in (test.a, test.b):
        _require_labels(scale, side, who, (*ENDS, BEST))
    alike = test.compares and all(_at(scale, axis, test.a) == _at(scale, axis, test.b) for axis in {*test.a, *test.b})
    require(not alike, f"{who}: a and b are the same at the scale {scale.name}")
    if test.along:
        _require_axes(scale, [test.along], who)
        for side in (test.a, test.b) if test.compares else (test.a,):
            _require_places(
                test, [value for value in scale.axes[test.along] if value in _at(scale, test.along, side)], who
            )


def _require_places(test: Test, values: Sequence[AxisValue], who: str) -> None:
    where = f"{who} goes along {test.along}, of which"
    _require_numbers(values, where)
    _require_above_zero(values, where)
    least = 2 if test.statistic.startswith("slope") else 3
    places = {value.x for value in values}
    require(len(places) >= least, f"{where} a side has fewer than {least} places, which a {test.statistic} needs")


def _require_drawable(drawing: Drawing, scale: Scale) -> None:
    """Logarithms and costs of names would be those of 0, 1, 2, and points at 0 would be left out."""
    wanted = [key for key in ("log_x", "fit", "front") if getattr(drawing, key)]
    if not wanted or drawing.x in ("flops", "seconds"):
        return
    who = f"a drawing with {wanted[0]}"
    require(drawing.x != "layer", f"{who} cannot go along layer")
    where = f"{who} goes along {drawing.x}, of which"
    _require_numbers(scale.axes[drawing.x], where)
    if wanted != ["front"]:
        _require_above_zero(_at(scale, drawing.x, drawing.only), where)


def _require_numbers(values: Sequence[AxisValue], where: str) -> None:
    without = [value.label for value in values if value.x is None]
    require(without == [], f"{where} {', '.join(without)} has no x")


def _require_above_zero(values: Sequence[AxisValue], where: str) -> None:
    require(
        all(value.x is None or value.x > 0 for value in values),
        f"{where} an x is not above 0, and it goes by its logarithm",
    )


def _at(scale: Scale, axis: str, selection: Selection) -> Sequence[AxisValue]:
    """The values of an axis that a selection names; all where it names none."""
    return named_values(scale.axes[axis], selection.get(axis, BEST))


def named_values(values: Sequence[AxisValue], label: str) -> Sequence[AxisValue]:
    """The values of an axis that a label stands for; of `best`, which only the records know, all."""
    if label in ENDS:
        return [values[0 if label == ENDS[0] else -1]]
    exact = [value for value in values if value.label == label]  # a label may be a line of others, too
    return exact or (values if label == BEST else [value for value in values if label in value.lines])


def _require_labels(scale: Scale, selection: Selection, who: str, also: Sequence[str] = ()) -> None:
    _require_axes(scale, [*selection], who)
    for axis, label in selection.items():
        known = {name for value in scale.axes[axis] for name in value.names}
        require(
            label in (*known, *also),
            f"{who} names {axis} {label}, which the scale {scale.name} does not have",
            "A test or a drawing that makes sense at some scales alone lists them: scales.",
        )


def _require_axes(scale: Scale, axes: Sequence[str], who: str) -> None:
    for axis in axes:
        require(axis in scale.axes, f"{who} names the axis {axis}, which the scale {scale.name} does not have")


def _scale(name: ScaleName, table: _ScaleTable, measure: str) -> Scale:
    require(bool(table.stages), f"scales.{name} has no stages")
    seeds = set(table.seeds)
    require(
        len(seeds) == len(table.seeds) > 0 <= min(seeds), f"scales.{name}.seeds must be different whole numbers, from 0"
    )
    axes = {
        axis: tuple(
            _axis_value(f"scales.{name}.axes.{axis}", label, value, table.stages) for label, value in values.items()
        )
        for axis, values in table.axes.items()
    }
    for axis, values in axes.items():
        require(values != (), f"scales.{name}.axes.{axis} has no values")
        special = {label for value in values for label in value.names if label in (*ENDS, BEST)}
        require(
            not special, f"scales.{name}.axes.{axis}: {', '.join((*ENDS, BEST))} are no labels: tests mean more by them"
        )
        require(axis not in NO_AXES, f"scales.{name}.axes.{axis}: {', '.join(NO_AXES)} have a meaning of their own")
    skip = tuple({axis: str(label) for axis, label in one.items()} for one in table.skip)
    scale = Scale(name, table.about, table.seeds, table.stages, axes, skip, table.measure or measure, table.minutes)
    for one in skip:
        _require_axes(scale, list(one), f"scales.{name}.skip")
        for axis, label in one.items():
            labels = [value.label for value in axes[axis]]
            require(
                label in labels, f"scales.{name}.skip names {axis} {label}, which is not one of {', '.join(labels)}"
            )
    require(count_cells(scale) > 0, f"scales.{name}.skip leaves no cell")
    return scale


def _axis_value(where: str, label: str, value: Any, stages: Mapping[str, Stage]) -> AxisValue:
    require(isinstance(value, Mapping), f"{where}.{label} must be a table of keys, not {value!r}")
    given = cast(Mapping[str, Any], value)
    for key in given:
        if key not in (*stages, *_OF_A_VALUE):
            raise UnknownName(
                "stage", f"{where}.{label}.{key}", [f"{where}.{label}.{name}" for name in (*stages, *_OF_A_VALUE)]
            )
    changes = {key: change for key, change in given.items() if key in stages}
    for stage, change in changes.items():
        require(isinstance(change, Mapping), f"{where}.{label}.{stage} must be a table of keys, not {change!r}")
        is_table = isinstance(change.get("data"), Mapping)  # TOML takes the dot of a bare key for a table
        require(not is_table, f'{where}.{label}.{stage}: write keys of data in quotation marks, as "data.train_images"')
        own = {key: change[key] for key in _OF_A_STAGE if key in change}
        config.from_dict(Stage, own, f"{where}.{label}.{stage}.")
    x = given.get("x")
    is_number = isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    require(x is None or is_number, f"{where}.{label}.x must be a number, not {x!r}")
    lines: Any = given.get("line", [])
    lines = [lines] if isinstance(lines, str) else lines
    are_texts = isinstance(lines, list) and all(isinstance(line, str) for line in cast(list[Any], lines))
    require(are_texts, f"{where}.{label}.line must be text or a list of texts, not {lines!r}")
    return AxisValue(label, None if x is None else float(x), tuple(dict.fromkeys(filter(None, lines))), changes)


def changed_stage(stage: Stage, changes: Mapping[str, Any]) -> Stage:
    """A stage after what one axis changes of it."""
    own = {key: changes[key] for key in _OF_A_STAGE if key in changes}
    keys = {key: value for key, value in changes.items() if key not in _OF_A_STAGE}
    return dataclasses.replace(stage, **own, set={**stage.set, **keys})


def first_seeds(scale: Scale, count: int | None) -> Scale:
    """The same grid with fewer seeds."""
    if count is None:
        return scale
    if not 1 <= count <= len(scale.seeds):
        raise UsageError(f"--seeds must be from 1 to {len(scale.seeds)}, not {count}")
    return dataclasses.replace(scale, seeds=scale.seeds[:count])


def count_cells(scale: Scale) -> int:
    """How many cells there are, without a look at their recipes."""
    grid = (dict(zip(scale.axes, values, strict=True)) for values in itertools.product(*scale.axes.values()))
    return len(scale.seeds) * sum(not is_skipped(scale, chosen) for chosen in grid)


def is_skipped(scale: Scale, chosen: Mapping[str, AxisValue]) -> bool:
    """Whether a combination is left out of the grid."""
    return any(all(chosen[axis].label == label for axis, label in one.items()) for one in scale.skip)
