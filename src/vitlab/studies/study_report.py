"""The report of a study: its answer, the paper's plot with our points, every condition, and whether each claim holds.

From records alone, and without the time of day: the same records give the same files.
"""

import dataclasses
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.errors import amount
from vitlab.evaluation.fits import Estimate, fit_power_law, pareto_front
from vitlab.evaluation.published import find_table
from vitlab.report.forest import Strip
from vitlab.report.page import Report, Section, Snippets, Table, Verdict, Verdicts, plots, render
from vitlab.report.plot import Plot, PlotPoint, PlotSeries
from vitlab.studies.inspected import read_heads
from vitlab.studies.outcome import (
    FAILS,
    HOLDS,
    NOT_YET,
    ClaimOutcome,
    Condition,
    Outcome,
    TestOutcome,
    count_verdicts,
)
from vitlab.studies.printed import beside, printed_plot
from vitlab.studies.study import Drawing
from vitlab.studies.tables import in_cell, printed_table
from vitlab.studies.units import goodness, is_share, shown, spoken

PAGE, NUMBERS, TEXT, PLOTS = "report.html", "results.json", "results.md", "plots"
_CURVE_POINTS = 100  # of a fit that is drawn


def write_study(outcome: Outcome, folder: Path, command: str) -> Path:
    """Page, text, numbers and plots in a folder of the study's own; returns the page."""
    place = fsio.make_folder(folder / f"{outcome.study.name}-{outcome.scale.name}")
    report = build_page(outcome, command)
    fsio.write_file(place / PAGE, render(report))
    fsio.write_file(place / TEXT, to_markdown(outcome, command))
    fsio.write_json(place / NUMBERS, outcome_to_dict(outcome))
    for name, data in plots(report).items():
        fsio.write_file(fsio.make_folder(place / PLOTS) / name, data)
    return place / PAGE


def outcome_lines(outcome: Outcome) -> list[str]:
    """The outcome for a terminal."""
    study, scale = outcome.study, outcome.scale
    lines = [f"{study.title} ({scale.name}), {study.paper}: {study.question}"]
    width = max((len(condition.name) for condition in outcome.conditions), default=0)
    for condition in outcome.conditions:
        found = condition.estimate(scale.measure)
        value = NOT_YET if found is None else shown(found, scale.measure)
        lines.append(f"  {condition.name:<{width}}  {value}")
    for one in outcome.claims:
        lines.append(f"{one.verdict}: {one.claim.says} ({one.claim.where})")
        lines += [f"  {test.sentence}" for test in one.tests]
    return lines


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """All numbers, for programs."""
    study, scale = outcome.study, outcome.scale
    return {
        "study": study.name,
        "scale": scale.name,
        "about": scale.about,
        "cells": outcome.cells,
        "measured": outcome.measured,
        "measure": scale.measure,
        "conditions": [
            {
                **condition.labels,
                **_estimate(condition.estimate(scale.measure)),
                "flops": condition.mean("flops"),
                "seconds": condition.mean("seconds"),
                "runs": {str(one.cell.seed): one.record.key for one in condition.seeds},
                "by_seed": {str(seed): value for seed, value in condition.numbers(scale.measure).items()},
            }
            for condition in outcome.conditions
        ],
        "claims": [
            {
                "claim": one.claim.name,
                "says": one.claim.says,
                "where": one.claim.where,
                "verdict": one.verdict,
                "tests": [
                    {
                        "sentence": test.sentence,
                        **_estimate(test.found),
                        "above": test.test.above,
                        "below": test.test.below,
                        "verdict": test.verdict,
                        "by_seed": {str(seed): value for seed, value in test.by_seed.items()},
                    }
                    for test in one.tests
                ],
            }
            for one in outcome.claims
        ],
    }


def _estimate(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"mean": None, "interval": None, "seeds": 0}
    return {"mean": found.mean, "interval": found.interval, "seeds": found.n}


# --- the page ---------------------------------------------------------------------------------------------------------


def build_page(outcome: Outcome, command: str) -> Report:
    """The report as a page with interactive plots."""
    study, scale = outcome.study, outcome.scale
    missing = outcome.cells - outcome.measured
    number, headline = count_verdicts(one.verdict for one in outcome.claims)
    drawings = [drawing for drawing in study.drawings if scale.name in drawing.scales]
    plots = [(drawing, _plot(outcome, drawing, command)) for drawing in drawings]
    own = [plot for drawing, plot in plots if plot.shown or drawing.x != "layer"]
    sections: list[Section] = [*own]
    printed = printed_plot(study)
    if printed is not None:  # side by side: narrow sections share a row
        sections[:1] = [*(dataclasses.replace(one, wide=False) for one in own[:1]), printed]
    if outcome.claims:
        rows = [verdict_row(one) for one in outcome.claims]
        sections.insert(1 if printed is None else 2, Verdicts("Claims", f"{_HOW_JUDGED} {HOW_DRAWN}", rows))
    sections += [_conditions_table(outcome), *_paper_sections(outcome)]
    sections.append(Snippets("Repeat it", "What has a record is not run again.", [("On the command line", command)]))
    records = [one.record for condition in outcome.conditions for one in condition.seeds]
    hardware = {f"{one.hardware.get('name', '?')}, torch {one.versions.get('torch', '?')}" for one in records}
    facts = [
        ("question", study.question),
        ("paper", study.paper),
        ("scale", f"{scale.name}: {scale.about}"),
        ("seeds", ", ".join(map(str, scale.seeds))),
        ("machines", "; ".join(sorted(hardware)) or "none yet"),
        ("interval", "95 %, Student's t over the seeds"),
    ]
    undrawn = [drawing.title for drawing, plot in plots if plot not in own]
    if undrawn and records:
        facts.append(("not drawn", f"{', '.join(undrawn)}: older records have no numbers of single heads"))
    return Report(
        title=study.title,
        number=number if outcome.claims else f"{outcome.measured} runs",
        headline=headline if outcome.claims else "measured",
        subline=study.question,
        stats=[
            ("cells", f"{outcome.measured} of {outcome.cells}"),
            ("seeds", str(len(scale.seeds))),
            ("scale", scale.name),
            ("paper", study.paper),
        ],
        facts=facts,
        sections=sections,
        footer=f"from records alone · all numbers are in {NUMBERS}",
        warnings=[]
        if not missing
        else [f"{amount(missing, 'cell')} {'has' if missing == 1 else 'have'} no record yet"],
    )


def _plot(outcome: Outcome, drawing: Drawing, command: str) -> Plot:
    measure = drawing.measure or outcome.scale.measure
    if drawing.x == "layer":
        return _plot_heads(outcome, drawing, measure)
    share, lines = is_share(measure), _lines(outcome, drawing)
    axis = outcome.scale.axes.get(drawing.x, ())
    categories = [] if not axis or all(value.x is not None for value in axis) else [value.label for value in axis]
    series: list[PlotSeries] = []
    for number, (name, conditions) in enumerate(lines.items()):
        shift = beside(number, len(lines)) if categories else 0.0
        found = [_point(one, drawing, measure, command, categories, shift) for one in conditions]
        points = [point for point in found if point is not None]
        if not categories:
            points.sort(key=lambda point: point.x)
        joined = not drawing.front and not categories  # a line between names would mean nothing
        series.append(PlotSeries(name or measure, points, colour=number, joined=joined))
        if drawing.fit:
            series += _fit(name or measure, points, number, share=share)
    shared = _how_shared(outcome) if drawing.x == "seconds" else ""
    if drawing.front and not shared:  # of seconds that others took part in, none is the least
        series.append(_front(series, measure))
    about = shared or ("" if drawing.title else outcome.scale.about)
    return Plot(
        title=drawing.title or outcome.study.paper[:1].upper() + outcome.study.paper[1:],
        caption=f"Each point is the mean over the seeds with its 95 % interval; point at one for its runs. {about}".strip(),
        series=series,
        x_label=drawing.x_label or drawing.x,
        y_label=drawing.y_label or spoken(measure),
        log_x=drawing.log_x,
        log_y=drawing.log_y,
        percent=share,
        categories=categories,
        wide=True,
    )


def _plot_heads(outcome: Outcome, drawing: Drawing, measure: str) -> Plot:
    """Every head of every layer, as Figure 7 right and Figure 11; empty where the records have no numbers of heads."""
    series: list[PlotSeries] = []
    deepest, lines = 0, _lines(outcome, drawing)
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
                            command=_anywhere(first.command),
                        )
                    )
        series.append(PlotSeries(name or measure, points, colour=number, joined=False))
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
        f"{100 * value:.2f} %" if is_share(measure) else f"{value:.4g}" for value in condition.numbers(measure).values()
    )
    flops, seconds = condition.mean("flops"), condition.mean("seconds")
    facts = [
        ("each seed", by_seed),
        ("model", first.record.model),
        *([("training compute", f"{flops:.3g} FLOPs")] if flops else []),
        *([("seconds", f"{seconds:.0f}")] if seconds and first.record.workers == 1 else []),
        ("run", first.record.key),
    ]
    repeat = command if first.record.verb == "speed" else _anywhere(first.record.command)  # a timing has no command
    return PlotPoint(x, found.mean, condition.name, found.interval, facts, first.record.curve, repeat)


def _anywhere(command: str) -> str:
    """A run's command without the folder of its study: `--out runs/KEY`, and what lies beside it likewise."""
    found = re.search(r"--out[ =]'?(?P<study>[^']*/)runs/[0-9a-f]{16}\b", command)
    return command if found is None else command.replace(found["study"], "")


def _fit(name: str, points: Sequence[PlotPoint], colour: int, *, share: bool) -> list[PlotSeries]:
    """A power law of the error, drawn over the range that was measured; nothing where there are too few points."""
    xs, ys = [point.x for point in points], [1 - point.y if share else point.y for point in points]
    if len(set(xs)) < 3 or min([*xs, *ys]) <= 0:  # a line through two points says nothing about its own error
        return []
    law = fit_power_law(xs, ys)
    low, high = law.exponent_interval
    what = f"{name}: {'error' if share else 'fit'} ∝ x^{law.exponent:.2f} ({low:.2f} to {high:.2f})"
    steps = [min(xs) * (max(xs) / min(xs)) ** (i / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)]
    drawn = [PlotPoint(x, 1 - law.at(x) if share else law.at(x), what) for x in steps]
    return [PlotSeries(what, drawn, colour=colour, dashed=True)]


def _front(series: Sequence[PlotSeries], measure: str) -> PlotSeries:
    points = [point for one in series for point in one.points]
    best = pareto_front([point.x for point in points], [goodness(measure, point.y) for point in points])
    kept = [PlotPoint(points[i].x, points[i].y, points[i].name) for i in best]
    return PlotSeries("Pareto front", kept, colour=len(series), dashed=True)


def _paper_sections(outcome: Outcome) -> list[Section]:
    """The published numbers, where the paper has them as a table."""
    if not outcome.study.table:
        return []
    newest = find_table(outcome.study.table)[0]
    return [dataclasses.replace(printed_table(newest), title="The paper's numbers", caption=f"{newest.title}.")]


_HOW_JUDGED = (
    "A claim holds here if the 95 % interval over the seeds lies where the claim says it should, and does not hold if all of "
    "it lies elsewhere."
)
HOW_DRAWN = "Shaded is where the claim says the number lies; each dot is a seed, the bar their mean with its interval."
_GOOD = {HOLDS: True, FAILS: False}  # green or red; grey where nothing can be told


def verdict_row(one: ClaimOutcome, command: str = "", also: Sequence[str] = ()) -> Verdict:
    """A claim for a page; `also` is said after what was measured."""
    good = _GOOD.get(one.verdict)
    claim = one.claim
    measured = [*((test.sentence, strip_of(test)) for test in one.tests), *((line, None) for line in also)]
    return Verdict(claim.says, one.verdict, measured, good, claim.where, claim.note, command)


def strip_of(test: TestOutcome) -> Strip | None:
    """The number of a test beside where the claim says it lies; None where it is not measured."""
    if test.found is None:
        return None
    unit = 100 if test.in_points else 1
    low, high = (None if border is None else unit * border for border in (test.test.above, test.test.below))
    values = list(test.by_seed.values())
    return Strip(
        mean=unit * test.found.mean,
        interval=None
        if test.found.interval is None
        else (unit * test.found.interval[0], unit * test.found.interval[1]),
        seeds=[unit * value for value in values],
        low=low,
        high=high,
        log=test.by_logarithm,
        good=_GOOD.get(test.verdict),
    )


def _conditions_table(outcome: Outcome) -> Table:
    scale = outcome.scale
    flops = [condition.mean("flops") for condition in outcome.conditions]
    trained = any(flops)  # what is timed alone has none
    rows: list[tuple[str, ...]] = []
    for condition, spent in zip(outcome.conditions, flops, strict=True):
        found = condition.estimate(scale.measure)
        said = NOT_YET if found is None else shown(found, scale.measure)
        rows.append((*condition.labels.values(), said, *([f"{spent:.3g}" if spent else ""] if trained else [])))
    header = (*scale.axes, spoken(scale.measure), *(["FLOPs of training"] if trained else []))
    return Table("Every condition", "Mean and 95 % interval over the seeds.", header, rows)


# --- as text ----------------------------------------------------------------------------------------------------------


def to_markdown(outcome: Outcome, command: str) -> str:
    """The same as Markdown, for docs and for reading without a browser."""
    study, scale = outcome.study, outcome.scale
    texts = (f"# {study.title} ({scale.name})", study.question, scale.about)
    parts = [line for text in texts for line in (in_cell(text), "")]
    if outcome.claims:
        rows = [
            (one.claim.says, one.claim.where, "; ".join(test.sentence for test in one.tests), one.verdict)
            for one in outcome.claims
        ]
        parts += ["## Claims", "", _HOW_JUDGED, ""]
        parts += [*markdown_table(("the paper says", "where", "measured", "verdict"), rows), ""]
    table = _conditions_table(outcome)
    parts += [f"## {table.title}", "", table.caption, "", *markdown_table(table.header, table.rows), ""]
    return "\n".join([*parts, f"`{command}`", ""])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(in_cell(cell.replace("\n", " ")) for cell in cells) + " |"

    return [line(header), "|" + " --- |" * len(header), *map(line, rows)]
