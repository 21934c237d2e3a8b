"""The drawings of a study from its records: conditions as points, the power laws of lines, and the Pareto front."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from vitlab.evaluation.fits import PowerLaw, fit_power_law, pareto_front
from vitlab.report.plot import Plot, PlotPoint, PlotSeries
from vitlab.studies.inspected import read_heads
from vitlab.studies.outcome import Condition, Outcome
from vitlab.studies.printed import beside
from vitlab.studies.repeat import repeat_commands
from vitlab.studies.study import Drawing
from vitlab.studies.units import goodness, is_share, percent_unit, spoken

_CURVE_POINTS = 100  # of a fit that is drawn


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
        found = f"{self.of} ∝ {self.power}" if self.has_trend else f"no trend of the {self.of}, {self.power}"
        return f"{self.line}: {found}"


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
    share, lines = is_share(measure), _lines(outcome, drawing)
    axis = outcome.scale.axes.get(drawing.x, ())
    categories = [] if not axis or all(value.x is not None for value in axis) else [value.label for value in axis]
    series: list[PlotSeries] = []
    fits: list[LineFit] = []
    colours = _colours(outcome, drawing, lines)
    for number, (name, conditions) in enumerate(lines.items()):
        shift = beside(number, len(lines)) if categories else 0.0
        found = [_point(one, drawing, measure, command, categories, shift) for one in conditions]
        points = [point for point in found if point is not None]
        if not categories:
            points.sort(key=lambda point: point.x)
        joined = not drawing.front and not categories  # a line between names would mean nothing
        own = PlotSeries(name or measure, points, colour=colours[name], joined=joined)
        fit = _fit(own, measure) if drawing.fit else None
        fits += [] if fit is None else [fit]
        if fit is None or fit.has_trend:
            series += [own] if fit is None else [own, _fitted(fit, own, share=share)]
        else:  # drawn, it would look as if it held
            series.append(dataclasses.replace(own, note=f"no trend, {fit.power}"))
    shared = _how_shared(outcome) if drawing.x == "seconds" else ""
    front = [] if shared or not drawing.front else _front(series, measure)
    if front:  # of seconds that others took part in, none is the least
        colour = 1 + max((one.colour for one in series), default=-1)
        series.append(PlotSeries("Pareto front", front, colour=colour, kind="front"))
    about = shared or ("" if drawing.title else outcome.scale.about)
    plot = Plot(
        title=drawing.title or f"Measured here: {outcome.study.paper}",
        caption=f"Each point is the mean over the seeds with its 95 % interval; point at one for its runs. {about}".strip(),
        series=series,
        x_label=drawing.x_label or drawing.x,
        y_label=drawing.y_label or spoken(measure),
        log_x=drawing.log_x,
        log_y=drawing.log_y,
        percent=share,
        percent_unit=percent_unit(measure),
        categories=categories,
        wide=True,
    )
    return Drawn(drawing, measure, plot, tuple(fits), tuple(point.name for point in front))


def _plot_heads(outcome: Outcome, drawing: Drawing, measure: str) -> Plot:
    """Every head of every layer, as Figure 7 right and Figure 11; empty where the records have no numbers of heads."""
    series: list[PlotSeries] = []
    deepest, lines = 0, _lines(outcome, drawing)
    colours = _colours(outcome, drawing, lines)
    for number, (name, conditions) in enumerate(lines.items()):
        points: list[PlotPoint] = []
        for condition in (one for one in conditions if one.seeds):
            seeds = [read_heads(one.record.numbers, measure) for one in condition.seeds]
            first, before = condition.seeds[0].record, condition.seeds[0].before
            curve = first.curve or (before[-1].curve if before else ())  # what is only looked at was trained before
            for layer in sorted({layer for heads in seeds for layer in heads}):
                deepest = max(deepest, layer)
                ranks = list(zip(*(heads[layer] for heads in seeds if layer in heads), strict=True))
                for rank, values in enumerate(ranks, 1):
                    title = f"{condition.name}: layer {layer}, head {rank} of {len(ranks)} by {spoken(measure)}"
                    facts = [("each seed", ", ".join(f"{value:.4g}" for value in values)), ("run", first.key)]
                    x = layer - 1 + beside(number, len(lines))
                    points.append(
                        PlotPoint(
                            x,
                            statistics.fmean(values),
                            title,
                            facts=facts,
                            curve=curve,
                            command=repeat_commands((*before, first)),
                        )
                    )
        series.append(PlotSeries(name or measure, points, colour=colours[name], joined=False))
    return Plot(
        title=drawing.title,
        caption="Each point is a head: the mean over the seeds, whose heads are put in order.",
        series=series,
        x_label=drawing.x_label or drawing.x,
        y_label=drawing.y_label or spoken(measure),
        categories=[str(layer) for layer in range(1, deepest + 1)],
        wide=True,
    )


def _how_shared(outcome: Outcome) -> str:
    """What a reader must know before comparing seconds."""
    runs = [run for condition in outcome.conditions for one in condition.seeds for run in (*one.before, one.record)]
    most = max((run.workers for run in runs), default=1)
    return f"Up to {most} runs at once shared a machine, so that each took longer than alone." if most > 1 else ""


def _lines(outcome: Outcome, drawing: Drawing) -> dict[str, list[Condition]]:
    """The conditions that are drawn, by the line that they are on."""
    lines: dict[str, list[Condition]] = {}
    for condition in outcome.conditions:
        if all(label in condition.values[axis].names for axis, label in drawing.only.items()):
            for line in _lines_of(condition, drawing):
                lines.setdefault(line, []).append(condition)
    return lines


def _colours(outcome: Outcome, drawing: Drawing, lines: Iterable[str]) -> dict[str, int]:
    """The colours of lines: the same at every scale, though not each has all of them."""
    axes = [scale.axes.get(drawing.line, ()) for scale in outcome.study.scales.values()]
    scales = [[line for value in axis for line in value.lines or (value.label,)] for axis in axes]
    scales.sort(key=lambda names: -len(set(names)))  # the order of the fullest is kept
    return {name: number for number, name in enumerate(dict.fromkeys([*itertools.chain(*scales), *lines]))}


def _lines_of(condition: Condition, drawing: Drawing) -> tuple[str, ...]:
    """The lines that a condition is on: its label of that axis, what it is grouped under, or of several axes all others."""
    if drawing.line:
        value = condition.values[drawing.line]
        return value.lines or (value.label,)
    others = [value for axis, value in condition.values.items() if axis != drawing.x]
    return (", ".join((value.lines or (value.label,))[0] for value in others),)


def _point(
    condition: Condition, drawing: Drawing, measure: str, command: str, categories: Sequence[str], shift: float
) -> PlotPoint | None:
    found = condition.estimate(measure)
    if found is None:
        return None
    if drawing.x in condition.values:
        value = condition.values[drawing.x]
        x = categories.index(value.label) + shift if categories else value.x
    else:
        x = condition.mean(drawing.x)
    if x is None:
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
        *([("seconds", f"{seconds:.0f}")] if seconds and first.record.workers == 1 else []),
        ("run", first.record.key),
    ]
    timed = first.record.verb == "speed"  # what times has no command
    repeat = command if timed else repeat_commands((*first.before, first.record))
    return PlotPoint(x, found.mean, condition.name, found.interval, facts, first.record.curve, repeat)


def _fit(line: PlotSeries, measure: str) -> LineFit | None:
    """A power law, of an accuracy that of its error; None where there are too few points."""
    share = is_share(measure)
    xs, ys = [point.x for point in line.points], [1 - point.y if share else point.y for point in line.points]
    if len(set(xs)) < 3 or min([*xs, *ys]) <= 0:  # a line through two points says nothing about its own error
        return None
    return LineFit(line.name, "error" if share else spoken(measure), fit_power_law(xs, ys))


def _fitted(fit: LineFit, line: PlotSeries, *, share: bool) -> PlotSeries:
    """The curve over the range that was measured."""
    start, end = min(point.x for point in line.points), max(point.x for point in line.points)
    steps = [start * (end / start) ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]
    drawn = [PlotPoint(x, 1 - fit.law.at(x) if share else fit.law.at(x), fit.sentence) for x in steps]
    return PlotSeries(fit.sentence, drawn, colour=line.colour, kind="fit")


def _front(series: Sequence[PlotSeries], measure: str) -> list[PlotPoint]:
    points = [point for one in series for point in one.points]
    best = pareto_front([point.x for point in points], [goodness(measure, point.y) for point in points])
    return [PlotPoint(points[i].x, points[i].y, points[i].name) for i in best]
