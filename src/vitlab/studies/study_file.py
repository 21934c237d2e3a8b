"""Reads a study from TOML: one that ships with vitlab, or a file of your own. Loads no torch.

Everything that could not be run, measured or judged later is refused here, before the first run.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, cast

from vitlab.core import config
from vitlab.core.errors import UnknownName, UsageError, require
from vitlab.evaluation.published import find_table
from vitlab.studies.study import (
    BEST,
    ENDS,
    NO_AXES,
    SCALES,
    STAGE_KEYS,
    AxisValue,
    Claim,
    Drawing,
    Printed,
    Scale,
    ScaleName,
    Stage,
    Study,
    count_cells,
)
from vitlab.studies.study_checks import (
    require_axes,
    require_drawable,
    require_labels,
    require_measure,
    require_printed,
    require_seeds_matter,
    require_test,
    require_testable,
)

_VALUE_KEYS = ("x", "line")  # of an axis value, beside its stages


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
    given = table.get("scales")
    for scale in given if isinstance(given, Mapping) else ():  # before what a misspelt one lacks
        if scale not in SCALES:
            raise UnknownName(f"scale in study {name}", scale, SCALES, list_all=True)
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
        scales[cast(ScaleName, scale)] = _scale(cast(ScaleName, scale), table, given.measure)
    if given.printed is not None:
        if published is None:
            raise UsageError("printed needs the name of a published table: table")
        require_printed(given.printed, published)
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
    for at in scales.values():
        require_seeds_matter(at)
    names = [claim.name for claim in study.claims]
    for claim in study.claims:
        require(names.count(claim.name) == 1, f"two claims have the name {claim.name}")
        require(any(map(claim.is_tested_at, scales)), f"claim {claim.name} has no test at any scale of the study")
        for test in claim.tests:
            require_test(test, f"claim {claim.name}")
            for at in (scales[scale] for scale in test.scales if scale in scales):
                require_testable(test, at, f"claim {claim.name}")
                require_measure(test.measure or at.measure, at, f"claim {claim.name}")
    for drawing in study.drawings:
        axes = [*filter(None, (drawing.line, "" if drawing.x in NO_AXES else drawing.x))]
        for at in (scales[scale] for scale in drawing.scales if scale in scales):
            require_axes(at, axes, "a drawing")
            require_labels(at, drawing.only, "a drawing")
            require_drawable(drawing, at)
            if drawing.x != "layer":  # of every head, by how their names begin
                require_measure(drawing.measure or at.measure, at, "a drawing")
    return study


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
        places = Counter(value.x for value in values if value.x is not None)
        alike = [value.label for value in values if value.x is not None and places[value.x] > 1]
        require(not alike, f"scales.{name}.axes.{axis}: {' and '.join(alike)} have the same x")
        require(axis not in NO_AXES, f"scales.{name}.axes.{axis}: {', '.join(NO_AXES)} have a meaning of their own")
    skip = tuple({axis: str(label) for axis, label in one.items()} for one in table.skip)
    scale = Scale(name, table.about, table.seeds, table.stages, axes, skip, table.measure or measure, table.minutes)
    for one in skip:
        require_axes(scale, list(one), f"scales.{name}.skip")
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
        if key not in (*stages, *_VALUE_KEYS):
            raise UnknownName(
                "stage", f"{where}.{label}.{key}", [f"{where}.{label}.{name}" for name in (*stages, *_VALUE_KEYS)]
            )
    changes = {key: change for key, change in given.items() if key in stages}
    for stage, change in changes.items():
        require(isinstance(change, Mapping), f"{where}.{label}.{stage} must be a table of keys, not {change!r}")
        is_table = isinstance(change.get("data"), Mapping)  # TOML takes the dot of a bare key for a table
        require(not is_table, f'{where}.{label}.{stage}: write keys of data in quotation marks, as "data.train_images"')
        own = {key: change[key] for key in STAGE_KEYS if key in change}
        config.from_dict(Stage, own, f"{where}.{label}.{stage}.")
    x = given.get("x")
    is_number = isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
    require(x is None or is_number, f"{where}.{label}.x must be a number, not {x!r}")
    lines: Any = given.get("line", [])
    lines = [lines] if isinstance(lines, str) else lines
    are_texts = isinstance(lines, list) and all(isinstance(line, str) for line in cast(list[Any], lines))
    require(are_texts, f"{where}.{label}.line must be text or a list of texts, not {lines!r}")
    return AxisValue(label, None if x is None else float(x), tuple(dict.fromkeys(filter(None, lines))), changes)
