"""The report of a study: its answer, the paper's plot with our points, every condition, and whether each claim holds.

From records alone, and without the time of day: the same records give the same files.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.errors import amount
from vitlab.evaluation.fits import Estimate
from vitlab.evaluation.published import find_table
from vitlab.report.forest import Strip
from vitlab.report.page import Report, Section, Snippets, Table, Verdict, Verdicts, place, plots, render
from vitlab.report.plot import Plot
from vitlab.studies.outcome import (
    FAILS,
    HOLDS,
    NOT_YET,
    ClaimOutcome,
    Outcome,
    TestOutcome,
    count_verdicts,
)
from vitlab.studies.printed import printed_plot
from vitlab.studies.study import Claim
from vitlab.studies.study_plots import Drawn, draw_all
from vitlab.studies.tables import in_cell, printed_table
from vitlab.studies.units import clipped, format_estimate, is_timed, measure_label, percent_unit

PAGE, NUMBERS, TEXT, PLOTS = "report.html", "results.json", "results.md", "plots"


def write_study(outcome: Outcome, folder: Path, command: str) -> Path:
    """Page, text, numbers and plots in a folder of the study's own; returns the page."""
    home = fsio.make_folder(folder / f"{outcome.study.name}-{outcome.scale.name}")
    page = build_page(outcome, command)
    fsio.write_file(
        home / PAGE, render(dataclasses.replace(page, footer=f"{page.footer} · all numbers are in {NUMBERS}"))
    )
    fsio.write_file(home / TEXT, to_markdown(outcome, page, command, f"{PLOTS}/"))
    fsio.write_json(home / NUMBERS, outcome_to_dict(outcome))
    fsio.make_folder(home / PLOTS)
    for name, data in plots(page).items():
        fsio.write_file(home / PLOTS / name, data)
    return home / PAGE


def outcome_lines(outcome: Outcome) -> list[str]:
    """The outcome for a terminal."""
    study, scale = outcome.study, outcome.scale
    lines = [f"{study.title} ({scale.name}), {study.paper}: {study.question}"]
    width = max((len(condition.name) for condition in outcome.conditions), default=0)
    for condition in outcome.conditions:
        found = condition.estimate(scale.measure)
        value = NOT_YET if found is None else format_estimate(found, scale.measure)
        lines.append(f"  {condition.name:<{width}}  {value}")
    for one in outcome.claims:
        lines.append(f"{one.verdict_in_words}: {one.claim.says} ({one.claim.where})")
        lines += [f"  {test.sentence}" for test in one.tests]
    return [*lines, *(sentence for drawn in draw_all(outcome, "") for sentence in drawn.sentences)]


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
                **_estimate(condition.estimate(scale.measure), scale.measure),
                "flops": condition.mean("flops"),
                "seconds": condition.mean("seconds"),
                "runs": {str(one.cell.seed): one.record.key for one in condition.seeds},
                "by_seed": {str(seed): value for seed, value in condition.numbers(scale.measure).items()},
                "also": {
                    measure: _estimate(condition.estimate(measure), measure) for measure in _measures(outcome)[1:]
                },
            }
            for condition in outcome.conditions
        ],
        "claims": [
            {
                "claim": one.claim.name,
                "says": one.claim.says,
                "where": one.claim.where,
                "post_hoc": one.claim.post_hoc,
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
        "drawings": [_drawn(one) for one in draw_all(outcome, "")],
    }


def _drawn(one: Drawn) -> dict[str, Any]:
    return {
        "title": one.plot.title,
        "x": one.drawing.x,
        "measure": one.measure,
        "lines": {
            line.name: [
                {"of": point.name, "x": point.x, "y": point.y, "interval": point.interval} for point in line.points
            ]
            for line in one.plot.series
            if line.kind != "fit"
        },
        "fits": [
            {"line": fit.line, "of": fit.of, "exponent": fit.law.exponent, "interval": fit.law.exponent_interval}
            for fit in one.fits
        ],
        "front": list(one.front),
    }


def _estimate(found: Estimate | None, measure: str = "") -> dict[str, Any]:
    """The estimate of a measure, with the interval that is drawn; or of a statistic, which has no bounds."""
    if found is None:
        return {"mean": None, "interval": None, "seeds": 0}
    return {"mean": found.mean, "interval": clipped(found, measure).interval, "seeds": found.n}


# --- the page ---------------------------------------------------------------------------------------------------------


def build_page(outcome: Outcome, command: str) -> Report:
    """The report as a page with interactive plots."""
    study, scale = outcome.study, outcome.scale
    missing = outcome.cells - outcome.measured
    number, headline = count_verdicts(one.verdict for one in outcome.claims)
    marked = [one for one in outcome.claims if one.claim.post_hoc and one.verdict != NOT_YET]
    drawn = draw_all(outcome, command)
    own = [one.plot for one in drawn if one.plot.shown or one.drawing.x != "layer"]
    sections: list[Section] = [*own]
    printed = printed_plot(study)
    if printed is not None:  # side by side: narrow sections share a row
        sections[:1] = [*(dataclasses.replace(one, wide=False) for one in own[:1]), printed]
    if outcome.claims:
        rows = [verdict_row(one) for one in outcome.claims]
        sections.insert(1 if printed is None else 2, Verdicts("Claims", f"{HOW_JUDGED} {HOW_DRAWN}", rows))
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
    undrawn = [one.drawing.title for one in drawn if one.plot not in own]
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
            *([("post hoc", f"{len(marked)} of {amount(len(outcome.claims), 'claim')}")] if marked else []),
        ],
        facts=facts,
        sections=sections,
        footer="from records alone",
        warnings=[]
        if not missing
        else [f"{amount(missing, 'cell')} {'has' if missing == 1 else 'have'} no record yet"],
    )


def _paper_sections(outcome: Outcome) -> list[Section]:
    """The published numbers, where the paper has them as a table."""
    if not outcome.study.table:
        return []
    newest = find_table(outcome.study.table)[0]
    return [dataclasses.replace(printed_table(newest), title="The paper's numbers", caption=f"{newest.title}.")]


HOW_JUDGED = (
    "A claim holds here if the 95 % interval over the seeds lies where the claim says it should, and does not hold if all of "
    "it lies elsewhere."
)
HOW_DRAWN = "Shaded is where the claim says the number lies; each dot is a seed, the bar their mean with its interval."
HOW_FITTED = "Fits are of the means that are drawn, with the interval of one line; intervals of claims are over seeds."
WHAT_POST_HOC = "Post hoc says what of a test was set or changed after results had been seen."
_GOOD = {HOLDS: True, FAILS: False}  # green or red; grey where nothing can be told


def notes_of(claim: Claim) -> str:
    """What a reader must know of how a claim is tested."""
    return "; ".join(filter(None, [claim.note, f"post hoc: {claim.post_hoc}" if claim.post_hoc else ""]))


def verdict_row(one: ClaimOutcome, command: str = "", also: Sequence[str] = ()) -> Verdict:
    """A claim for a page; `also` is said after what was measured."""
    good = _GOOD.get(one.verdict)
    claim = one.claim
    sentences = (test.sentence for test in one.tests)
    measured = [*zip(sentences, strips_of(one), strict=True), *((line, None) for line in also)]
    post_hoc = "" if one.verdict == NOT_YET else claim.post_hoc
    return Verdict(claim.says, one.verdict, measured, good, claim.where, claim.note, post_hoc, command)


def strips_of(one: ClaimOutcome) -> list[Strip | None]:
    """Those of all tests of a claim; of the same kind of number on the same axis, so that they compare."""
    strips = [strip_of(test) for test in one.tests]
    kinds = [(test.test.measure, test.in_points, test.log_scale) for test in one.tests]
    return [
        strip
        and dataclasses.replace(
            strip, beside=[other for other, its in zip(strips, kinds, strict=True) if other is not None and its == kind]
        )
        for strip, kind in zip(strips, kinds, strict=True)
    ]


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
        log=test.log_scale,
        unit=f" {percent_unit(test.test.measure) if test.test.statistic == 'value' else 'points'}"
        if test.in_points
        else "",
        good=_GOOD.get(test.verdict),
    )


def _conditions_table(outcome: Outcome) -> Table:
    measures = _measures(outcome)
    counts = {
        found.n for row in outcome.conditions for measure in measures if (found := row.estimate(measure)) is not None
    }
    count = next(iter(counts)) if len(counts) == 1 else None  # said once, where it is the same for all
    flops = [condition.mean("flops") for condition in outcome.conditions]
    trained = any(flops)  # what is timed alone has none
    rows: list[tuple[str, ...]] = []
    for condition, spent in zip(outcome.conditions, flops, strict=True):
        found = [(condition.estimate(measure), measure) for measure in measures]
        said = [
            NOT_YET if one is None else format_estimate(one, measure, counted=count is None) for one, measure in found
        ]
        rows.append((*condition.labels.values(), *said, *([f"{spent:.3g}" if spent else ""] if trained else [])))
    header = (*outcome.scale.axes, *map(measure_label, measures), *(["FLOPs of training"] if trained else []))
    repeated = "measurement" if any(map(is_timed, measures)) else "seed"
    over = f"the {repeated}s" if count is None else amount(count, repeated)
    caption = f"One {repeated} of each." if count == 1 else f"Mean and 95 % interval over {over}."
    return Table("Every condition", caption, header, rows)


def _measures(outcome: Outcome) -> list[str]:
    """What counts, and whatever else is drawn or tested; a margin with what it is between."""
    main = outcome.scale.measure
    between = ["teacher_top1", "top1"] if main == "margin" else []
    drawn = [one.measure for one in outcome.study.drawings if outcome.scale.name in one.scales and one.x != "layer"]
    tested = [test.test.measure for claim in outcome.claims for test in claim.tests]
    return list(dict.fromkeys(one for one in (main, *between, *drawn, *tested) if one not in ("", "flops", "seconds")))


# --- as text ----------------------------------------------------------------------------------------------------------


def to_markdown(outcome: Outcome, page: Report, command: str, prefix: str) -> str:
    """The page as Markdown, for docs and for reading without a browser; `prefix` begins the names of its pictures."""
    study, scale = outcome.study, outcome.scale
    pictures = _pictures(page, prefix)
    about = "" if any(scale.about in line for line in pictures) else scale.about
    texts = (f"# {study.title} ({scale.name})", study.question, about)
    parts = [line for text in filter(None, texts) for line in (in_cell(text), "")]
    parts += pictures
    if outcome.claims:
        rows = [
            (
                claim.verdict,
                f"{claim.claim.says} ({claim.claim.where})",
                "; ".join(test.sentence for test in claim.tests),
                notes_of(claim.claim),
            )
            for claim in outcome.claims
        ]
        parts += ["## Claims", "", f"{HOW_JUDGED} {WHAT_POST_HOC}", ""]
        parts += [*markdown_table(("verdict", "claim", "measured here", "notes"), rows), ""]
    table = _conditions_table(outcome)
    parts += [f"## {table.title}", "", table.caption, "", *markdown_table(table.header, table.rows), ""]
    found = [sentence for drawn in draw_all(outcome, command) for sentence in drawn.sentences]
    if found:
        parts += ["## Fits and fronts", "", HOW_FITTED, "", *(f"- {in_cell(sentence)}" for sentence in found), ""]
    return "\n".join([*parts, f"`{command}`", ""])


def _pictures(report: Report, prefix: str) -> list[str]:
    """Every plot in a row of its own, but those that share one on the page: ours and the paper's."""
    shown = [
        (one.wide, one.part, f"![{in_cell(one.part.title)}]({prefix}{one.anchor}.svg)")
        for one in place(report.sections)
        if isinstance(one.part, Plot)
    ]
    lines: list[str] = []
    beside = [(plot, picture) for wide, plot, picture in shown if not wide]
    if beside:
        lines += [
            *markdown_table([plot.title for plot, _ in beside], []),
            f"| {' | '.join(picture for _, picture in beside)} |",
            "",
            in_cell(beside[0][0].caption),
            "",
        ]
    alone = [(plot, picture) for wide, plot, picture in shown if wide]
    for number, (plot, picture) in enumerate(alone):
        if beside or number:  # the first plot of a study needs no heading under the study's own
            lines += [f"**{in_cell(plot.title)}**", ""]
        lines += [picture, "", in_cell(plot.caption), ""]
    return lines


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(in_cell(cell.replace("\n", " ")) for cell in cells) + " |"

    return [line(header), "|" + " --- |" * len(header), *map(line, rows)]
