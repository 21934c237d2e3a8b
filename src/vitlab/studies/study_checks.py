"""What a study must fulfil before its first run: labels that exist, sides that differ, numbers where axes need them."""

import math
from collections.abc import Sequence

from vitlab.core.errors import UnknownName, require
from vitlab.evaluation.published import PublishedTable
from vitlab.studies.study import (
    BEST,
    ENDS,
    AxisValue,
    Drawing,
    Printed,
    Scale,
    Selection,
    Test,
    list_combinations,
    named_values,
)
from vitlab.studies.units import ANY_MEASURES, MEASURES, is_measure


def require_printed(printed: Printed, table: PublishedTable) -> None:
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


def require_test(test: Test, who: str) -> None:
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


def require_testable(test: Test, scale: Scale, who: str) -> None:
    """A label that a scale does not have would never be measured, and the claim never judged."""
    for side in (test.a, test.b):
        require_labels(scale, side, who, (*ENDS, BEST))
    alike = test.compares and all(
        values_at(scale, axis, test.a) == values_at(scale, axis, test.b) for axis in {*test.a, *test.b}
    )
    require(not alike, f"{who}: a and b are the same at the scale {scale.name}")
    if test.along:
        require_axes(scale, [test.along], who)
    for side in (test.a, test.b) if test.compares else (test.a,):
        named = {axis: values_at(scale, axis, side) for axis in side}
        there = [
            chosen
            for chosen in list_combinations(scale)
            if all(chosen[axis] in values for axis, values in named.items())
        ]
        require(there != [], f"{who} names cells that skip leaves out at the scale {scale.name}")
        if test.along:
            require_places(test, list({chosen[test.along].label: chosen[test.along] for chosen in there}.values()), who)


def require_seeds_matter(scale: Scale) -> None:
    """Few-shot of named weights has no chance in it: its seeds would be one number, as often as there are."""
    first = next(iter(scale.stages.values()))
    require(
        first.verb != "few-shot" or len(scale.seeds) == 1,
        f"scales.{scale.name}: few-shot of named weights is the same for every seed",
        "Write seeds = [0].",
    )


def require_measure(name: str, scale: Scale, who: str) -> None:
    """A name that no run writes would be missed with the first run, or after the last."""
    *_, (last, stage) = scale.stages.items()
    changes = [value.changes.get(last, {}) for values in scale.axes.values() for value in values]
    verbs = {stage.verb, *(change["verb"] for change in changes if "verb" in change)}
    if not any(is_measure(name, verb) for verb in verbs):
        known = [*dict.fromkeys(measure for verb in sorted(verbs) for measure in (*MEASURES[verb], *ANY_MEASURES))]
        raise UnknownName(f"measure of {who}", name, known)


def require_places(test: Test, values: Sequence[AxisValue], who: str) -> None:
    where = f"{who} goes along {test.along}, of which"
    require_numbers(values, where)
    require_above_zero(values, where)
    least = 2 if test.statistic.startswith("slope") else 3
    places = {value.x for value in values}
    require(len(places) >= least, f"{where} a side has fewer than {least} places, which a {test.statistic} needs")


def require_drawable(drawing: Drawing, scale: Scale) -> None:
    """Logarithms and costs of names would be those of 0, 1, 2, and points at 0 would be left out."""
    wanted = [key for key in ("log_x", "fit", "front") if getattr(drawing, key)]
    if not wanted or drawing.x in ("flops", "seconds"):
        return
    who = f"a drawing with {wanted[0]}"
    require(drawing.x != "layer", f"{who} cannot go along layer")
    where = f"{who} goes along {drawing.x}, of which"
    require_numbers(scale.axes[drawing.x], where)
    if wanted != ["front"]:
        require_above_zero(values_at(scale, drawing.x, drawing.only), where)


def require_numbers(values: Sequence[AxisValue], where: str) -> None:
    without = [value.label for value in values if value.x is None]
    require(without == [], f"{where} {', '.join(without)} has no x")


def require_above_zero(values: Sequence[AxisValue], where: str) -> None:
    require(
        all(value.x is None or value.x > 0 for value in values),
        f"{where} an x is not above 0, and it goes by its logarithm",
    )


def values_at(scale: Scale, axis: str, selection: Selection) -> Sequence[AxisValue]:
    """The values of an axis that a selection names; all where it names none."""
    return named_values(scale.axes[axis], selection.get(axis, BEST))


def require_labels(scale: Scale, selection: Selection, who: str, also: Sequence[str] = ()) -> None:
    require_axes(scale, [*selection], who)
    for axis, label in selection.items():
        known = {name for value in scale.axes[axis] for name in value.names}
        require(
            label in (*known, *also),
            f"{who} names {axis} {label}, which the scale {scale.name} does not have",
            f"It has {', '.join(sorted(known))}. What makes sense at some scales alone lists them: scales.",
        )


def require_axes(scale: Scale, axes: Sequence[str], who: str) -> None:
    for axis in axes:
        has = f"It has {', '.join(scale.axes)}." if scale.axes else None
        require(axis in scale.axes, f"{who} names the axis {axis}, which the scale {scale.name} does not have", has)
