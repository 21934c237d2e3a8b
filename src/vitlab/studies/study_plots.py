"""The drawings of a study from its records: conditions as points, the power laws of lines, and the Pareto front."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from vitlab.evaluation.fits import PowerLaw, fit_power_law, pareto_front
from vitlab.report.plot import Plot, PlotPoint, PlotSeries
from vitlab.report.svg import COLOURS
from vitlab.studies.conditions import Condition
from vitlab.studies.inspected import read_heads
from vitlab.studies.outcome import Outcome
from vitlab.studies.repeat import repeat_commands
from vitlab.studies.study import Drawing, named_values
from vitlab.studies.units import clipped, goodness, is_share, is_timed, measure_label, percent_unit

_CURVE_POINTS = 100  # of a fit that is drawn
_FAMILIES = (("ViT",), ("hybrid",), ("ResNet",))  # whichever of them a study has, each has one colour in all studies

_Line = tuple[str, ...]  # its label, or those of all axes that are not along x


@dataclasses.dataclass(frozen=True)
class LineFit:
    """The power law of one line: of the error where the line is an accuracy."""

    line: str
    of: str
    law: PowerLaw

    @property
    def has_trend(self) -> bool:
        low, high = self.law.exponent_interval
        return not low <= 0 <= high

    @property
    def power(self) -> str:
        low, high = self.law.exponent_interval
        return f"x^{self.law.exponent:.2f} ({low:.2f} to {high:.2f} by the fit)"

    @property
    def sentence(self) -> str:
        """`ViT: error ∝ x^-0.31 (-0.35 to -0.27 by the fit)`."""
        return f"{self.line}: {self.found}"

    @property
    def found(self) -> str:
        """What it says, or that it says nothing: no slope is in the interval, which few points leave wide."""
        return (
            f"{self.of} ∝ {self.power}" if self.has_trend else f"power law of the {self.of} inconclusive, {self.power}"
        )


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A drawing with what was found by it."""

    drawing: Drawing
    measure: str
    plot: Plot
    fits: tuple[LineFit, ...] = ()
    front: tuple[str, ...] = ()  # the conditions that none is better than for less

    @property
    def sentences(self) -> list[str]:
        """The fits and the front in words."""
        front = [f"Pareto front over {self.drawing.x}: {'; '.join(self.front)}"] if self.front else []
        return [*(fit.sentence for fit in self.fits), *front]


def draw_all(outcome: Outcome, command: str) -> list[Drawn]:
    """The drawings of a scale; `command` runs its study."""
    return [_draw(outcome, one, command) for one in outcome.study.drawings if outcome.scale.name in one.scales]


def _draw(outcome: Outcome, drawing: Drawing, command: str) -> Drawn:
    measure = drawing.measure or outcome.scale.measure
    if drawing.x == "layer":
        return Drawn(drawing, measure, _plot_heads(outcome, drawing, measure))
    measured = _measured(outcome, drawing, measure, command)
    fits = [_fit(one, measure) if drawing.fit else None for one in measured]
    series = [one for line, fit in zip(measured, fits, strict=True) for one in _with_fit(line, fit, measure)]
    shared = _how_shared(outcome) if drawing.x == "seconds" else ""
    # Of seconds that others took part in, none is the least.
    front = _front(measured, measure) if drawing.front and not shared else []
    if front:
        colours = [one.colour for one in series]
        colour = _unlike(colours, 1 + max(colours))
        series.append(PlotSeries("Pareto front", front, colour=colour, kind="front"))
    about = shared or ("" if drawing.title else outcome.scale.about)
    plot = Plot(
        title=drawing.title or f"Measured here: {outcome.study.paper}",
        caption=f"{_what_points_are(outcome, measure)} {about}".strip(),
        series=series,
        x_label=drawing.x_label or drawing.x,
        y_label=drawing.y_label or measure_label(measure),
        log_x=drawing.log_x,
        log_y=drawing.log_y,
        percent=is_share(measure),
        percent_unit=percent_unit(measure),
        categories=_categories(outcome, drawing),
        wide=True,
    )
    return Drawn(drawing, measure, plot, tuple(fit for fit in fits if fit), tuple(point.name for point in front))


def _what_points_are(outcome: Outcome, measure: str) -> str:
    if len(outcome.scale.seeds) == 1:
        return "Each point is one run."
    over = "measurements" if is_timed(measure) else "seeds"
    return f"Each point is the mean over the {over} with its 95 % interval."


def _measured(outcome: Outcome, drawing: Drawing, measure: str, command: str) -> list[PlotSeries]:
    """The lines with a point for each of their conditions that has what is drawn."""
    lines, categories = _lines(outcome, drawing), _categories(outcome, drawing)
    colours = _colours(outcome, drawing, lines)
    joined = not drawing.front and not categories  # a line between names would mean nothing
    series: list[PlotSeries] = []
    for line, conditions in lines.items():
        found = [_point(one, drawing, measure, command, categories) for one in conditions]
        points = [point for point in found if point is not None]
        if not categories:
            points.sort(key=lambda point: point.x)
        series.append(
            PlotSeries(_line_name(line) or measure_label(measure), points, colour=colours[line], joined=joined)
        )
    return series


def _categories(outcome: Outcome, drawing: Drawing) -> list[str]:
    """The names along an axis that has values without a number."""
    axis = outcome.scale.axes.get(drawing.x, ())
    return [] if all(value.x is not None for value in axis) else [value.label for value in axis]


def _plot_heads(outcome: Outcome, drawing: Drawing, measure: str) -> Plot:
    """Every head of every layer, as Figure 7 right and Figure 11; empty where the records have no numbers of heads."""
    lines = _lines(outcome, drawing)
    colours = _colours(outcome, drawing, lines)
    series: list[PlotSeries] = []
    for line, conditions in lines.items():
        points = [point for one in conditions for point in _head_points(one, measure)]
        series.append(
            PlotSeries(_line_name(line) or measure_label(measure), points, colour=colours[line], joined=False)
        )
    layers = 1 + max((round(point.x) for one in series for point in one.points), default=-1)
    return Plot(
        title=drawing.title,
        caption="Each point is a head: the mean over the seeds, whose heads are put in order.",
        series=series,
        x_label=drawing.x_label or drawing.x,
        y_label=drawing.y_label or measure_label(measure),
        categories=[str(layer) for layer in range(1, layers + 1)],
        from_zero=True,
        wide=True,
    )


def _head_points(condition: Condition, measure: str) -> list[PlotPoint]:
    """The heads of a condition, layer by layer; the first layer stands at 0."""
    if not condition.seeds:
        return []
    first, before = condition.seeds[0].record, condition.seeds[0].before
    curve = first.curve or (before[-1].curve if before else ())  # what is only looked at was trained before
    seeds = [read_heads(one.record.numbers, measure) for one in condition.seeds]
    points: list[PlotPoint] = []
    for layer in sorted({layer for heads in seeds for layer in heads}):
        ranks = list(zip(*(heads[layer] for heads in seeds if layer in heads), strict=True))
        for rank, values in enumerate(ranks, 1):
            name = f"{condition.name}: layer {layer}, head {rank} of {len(ranks)} by {measure_label(measure)}"
            facts = [("each seed", ", ".join(f"{value:.4g}" for value in values)), ("run", first.key)]
            repeat = repeat_commands((*before, first))
            points.append(PlotPoint(layer - 1, statistics.fmean(values), name, None, facts, curve, repeat))
    return points


def _most_at_once(conditions: Iterable[Condition]) -> int:
    """How many runs shared a machine, at most, with any run of these conditions or of the stages before."""
    runs = [run for condition in conditions for one in condition.seeds for run in (*one.before, one.record)]
    return max((run.workers for run in runs), default=1)


def _how_shared(outcome: Outcome) -> str:
    """What a reader must know before comparing seconds."""
    most = _most_at_once(outcome.conditions)
    return f"Up to {most} runs at once shared a machine, so that each took longer than alone." if most > 1 else ""


def _lines(outcome: Outcome, drawing: Drawing) -> dict[_Line, list[Condition]]:
    """The conditions that are drawn, by the line that they are on."""
    only = {axis: named_values(outcome.scale.axes[axis], label) for axis, label in drawing.only.items()}
    lines: dict[_Line, list[Condition]] = {}
    for condition in outcome.conditions:
        if all(condition.values[axis] in values for axis, values in only.items()):
            for line in _lines_of(condition, drawing):
                lines.setdefault(line, []).append(condition)
    return lines


def _colours(outcome: Outcome, drawing: Drawing, lines: Iterable[_Line]) -> dict[_Line, int]:
    """The colours of lines: the same at every scale, though not each has all of them, and of families in every study.

    Where all scales together have more lines than there are colours, the last of this one take those that it leaves free.
    """
    axes = [scale.axes.get(drawing.line, ()) for scale in outcome.study.scales.values()]
    scales: list[list[_Line]] = [[(line,) for value in axis for line in value.lines or (value.label,)] for axis in axes]
    scales.sort(key=lambda names: -len(set(names)))  # the order of the fullest is kept
    names = [*itertools.chain(*scales), *lines]
    every = list(dict.fromkeys([*(_FAMILIES if set(_FAMILIES) & set(names) else ()), *names]))
    colours: dict[_Line, int] = {}
    for line in sorted(lines, key=every.index):
        colours[line] = _unlike(colours.values(), every.index(line))
    return colours


def _unlike(taken: Iterable[int], wanted: int) -> int:
    """The wanted colour, or the next that looks like none of those taken, as long as there are any."""
    looks = {colour % COLOURS for colour in taken}
    return next((colour for colour in range(wanted, wanted + COLOURS) if colour % COLOURS not in looks), wanted)


def _lines_of(condition: Condition, drawing: Drawing) -> list[_Line]:
    """The lines that a condition is on: its label of that axis, what it is grouped under, or of several axes all others."""
    if drawing.line:
        value = condition.values[drawing.line]
        return [(line,) for line in value.lines or (value.label,)]
    others = [value for axis, value in condition.values.items() if axis != drawing.x]
    return [tuple((value.lines or (value.label,))[0] for value in others)]


def _line_name(line: _Line) -> str:
    """Of several labels, those with a comma in quotation marks; empty where there is but one line."""
    return line[0] if len(line) == 1 else ", ".join(f"“{label}”" if ", " in label else label for label in line)


def _point(
    condition: Condition, drawing: Drawing, measure: str, command: str, categories: Sequence[str]
) -> PlotPoint | None:
    found, x = condition.estimate(measure), _place(condition, drawing, categories)
    if found is None or x is None:
        return None
    first = condition.seeds[0]
    by_seed = ", ".join(
        f"{100 * value:.2f} {percent_unit(measure)}" if is_share(measure) else f"{value:.4g}"
        for value in condition.numbers(measure).values()
    )
    flops, seconds = condition.mean("flops"), condition.mean("seconds")
    facts = [
        ("each seed", by_seed),
        ("model", first.record.model),
        *([("training compute", f"{flops:.3g} FLOPs")] if flops else []),
        *([("seconds", f"{seconds:.0f}")] if seconds and _most_at_once([condition]) == 1 else []),
        ("run", first.record.key),
    ]
    timed = first.record.verb == "speed"  # what times has no command
    repeat = command if timed else repeat_commands((*first.before, first.record))
    interval = clipped(found, measure).interval
    return PlotPoint(x, found.mean, condition.name, interval, facts, first.record.curve, repeat)


def _place(condition: Condition, drawing: Drawing, categories: Sequence[str]) -> float | None:
    """Where a condition stands along x."""
    if drawing.x not in condition.values:
        return condition.mean(drawing.x)
    value = condition.values[drawing.x]
    return categories.index(value.label) if categories else value.x


def _fit(line: PlotSeries, measure: str) -> LineFit | None:
    """A power law, of an accuracy that of its error; None where there are too few points."""
    share = is_share(measure)
    xs, ys = [point.x for point in line.points], [1 - point.y if share else point.y for point in line.points]
    if len(set(xs)) < 3 or min([*xs, *ys]) <= 0:  # a line through two points says nothing about its own error
        return None
    return LineFit(line.name, "error" if share else measure_label(measure), fit_power_law(xs, ys))


def _with_fit(line: PlotSeries, fit: LineFit | None, measure: str) -> list[PlotSeries]:
    """A line and its power law. One that says nothing is noted alone: drawn, it would look as if it held."""
    if fit is None:
        return [line]
    if not fit.has_trend:
        return [dataclasses.replace(line, note=fit.found)]
    return [line, _fitted(fit, line, share=is_share(measure))]


def _fitted(fit: LineFit, line: PlotSeries, *, share: bool) -> PlotSeries:
    """The curve over the range that was measured."""
    start, end = min(point.x for point in line.points), max(point.x for point in line.points)
    steps = [start * (end / start) ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]
    drawn = [PlotPoint(x, 1 - fit.law.at(x) if share else fit.law.at(x), fit.sentence) for x in steps]
    return PlotSeries(fit.sentence, drawn, colour=line.colour, kind="fit")


def _front(series: Sequence[PlotSeries], measure: str) -> list[PlotPoint]:
    """The measured points that none is better than for less."""
    points = [point for one in series for point in one.points]
    best = pareto_front([point.x for point in points], [goodness(measure, point.y) for point in points])
    return [PlotPoint(points[i].x, points[i].y, points[i].name) for i in best]
