"""`vitlab study report claims`: every claim of the paper that a study tests, and whether it holds here."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.command import command_line
from vitlab.core.errors import UsageError
from vitlab.report.forest import ForestRow, draw_forest
from vitlab.report.page import Report, Verdicts, render
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.outcome import (
    LEAST_SEEDS,
    ClaimOutcome,
    Outcome,
    count_verdicts,
    find_outcome,
)
from vitlab.studies.study import SCALES, list_study_names, read_study
from vitlab.studies.study_report import HOW_DRAWN, HOW_JUDGED, markdown_table, strip_of, verdict_row

CLAIMS = "claims"

_TITLE = "The paper's claims, measured here"
_INTERVALS = (
    "Intervals are of Student's t, paired over seeds where two conditions are compared; each is of 95 % by itself, so that of "
    "many claims one or two may be decided by chance."
)
_HEADER = ("the paper says", "where", "measured here", "scale", "verdict", "command")


@dataclasses.dataclass(frozen=True)
class ClaimRow:
    """One claim at the largest scale that has records of it."""

    study: str
    scale: str
    found: ClaimOutcome
    unfinished: tuple[str, ...] = ()  # larger scales with too few seeds of this claim

    @property
    def verdict(self) -> str:
        return self.found.verdict

    @property
    def command(self) -> str:
        return command_line("study run", self.study, options={"scale": self.scale})

    def begun(self) -> list[str]:
        """That a larger scale may say something else, where it is begun."""
        return [f"the scale {scale} has too few seeds so far" for scale in self.unfinished]

    def cells(self) -> tuple[str, ...]:
        claim = self.found.claim
        measured = "; ".join([*(test.sentence for test in self.found.tests), *self.begun()])
        says = f"{claim.says} ({claim.note})" if claim.note else claim.says
        return says, claim.where, measured, self.scale, self.verdict, self.command


@dataclasses.dataclass(frozen=True)
class ClaimsReport:
    """Every claim, as text, Markdown, a page or JSON."""

    rows: tuple[ClaimRow, ...]
    out: Path | None = None

    def measured(self) -> str:
        """`19 of 30 claims hold here, 3 do not, 8 are inconclusive at this scale`."""
        return " ".join(count_verdicts(row.found.verdict for row in self.rows))

    def text(self) -> str:
        lines = [self.measured(), ""]
        for row in self.rows:
            says, where, measured, scale, verdict, command = row.cells()
            lines += [f"{verdict}: {says} ({where})", f"  {scale}: {measured}", f"  {command}"]
        return "\n".join(lines)

    def sentences(self) -> list[str]:
        return [self.text()] if self.out is None else [self.measured(), f"Written to {self.out}."]

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "claim": row.found.claim.name,
                "study": row.study,
                **dict(zip(("says", "where", "measured", "scale", "verdict", "command"), row.cells(), strict=True)),
                "records": list(row.found.records),
            }
            for row in self.rows
        ]
        return {"claims": rows, "out": None if self.out is None else str(self.out)}

    def markdown(self) -> str:
        parts = [
            f"# {_TITLE}",
            "",
            "Made by `vitlab study report claims --records docs/results/records` from [records](records/README.md) alone.",
            f"{HOW_JUDGED} Otherwise it is inconclusive at this scale. {_INTERVALS}",
            "",
            f"{self.measured()}.",
            "",
            f"![{self.measured()}]({_picture_of(self.out or Path(CLAIMS)).name})",
            "",
            HOW_DRAWN,
            "",
            *markdown_table(_HEADER, [(*row.cells()[:-1], f"`{row.command}`") for row in self.rows]),
            "",
            "## What was trained",
            "",
            *markdown_table(
                ("study", "scale", "grid"),
                [(rows[0].study, rows[0].scale, about) for _, _, about, rows in self._by_study()],
            ),
            "",
            "## Records",
            "",
            *markdown_table(
                ("the paper says", "study", "records"),
                [(row.found.claim.says, row.study, ", ".join(row.found.records) or "none yet") for row in self.rows],
            ),
            "",
        ]
        return "\n".join(parts)

    def picture(self) -> bytes:
        """All claims below each other, each with its numbers: an SVG file."""
        groups = [
            (
                title,
                [
                    ForestRow(
                        row.found.claim.says,
                        row.verdict,
                        [(test.number or test.what, strip_of(test)) for test in row.found.tests],
                    )
                    for row in rows
                ],
            )
            for title, _, _, rows in self._by_study()
        ]
        return draw_forest(self.measured(), groups)

    def page(self) -> str:
        sections = [
            Verdicts(title, f"{question} {about}", [verdict_row(row.found, row.command, row.begun()) for row in rows])
            for title, question, about, rows in self._by_study()
        ]
        how = f"{HOW_JUDGED} {_INTERVALS} {HOW_DRAWN}"
        return render(Report(_TITLE, self.measured(), how, [], sections, "from records alone"))

    def _by_study(self) -> list[tuple[str, str, str, list[ClaimRow]]]:
        """The title, the question and the grid of a study at one scale, with its claims."""
        groups: dict[tuple[str, str], list[ClaimRow]] = {}
        for row in self.rows:
            groups.setdefault((row.study, row.scale), []).append(row)
        studies = {name: read_study(name) for name, _ in groups}
        return [
            (f"{studies[name].title} ({scale})", studies[name].question, studies[name].at(scale).about, rows)
            for (name, scale), rows in groups.items()
        ]


def report_claims(records: Mapping[str, CellRecord], *, scale: str | None, out: Path | None) -> ClaimsReport:
    """Every claim of every study that ships; with `scale`, at that one alone."""
    if scale is not None and scale not in SCALES:
        raise UsageError(f"'{scale}' is not a scale; there are {', '.join(SCALES)}")
    rows = [row for name in list_study_names() for row in _rows(name, records, scale)]
    report = ClaimsReport(tuple(rows), out)
    if out is not None:
        fsio.make_folder(out.parent)
        if out.suffix == ".md":
            picture = fsio.require_free(_picture_of(out))
            fsio.write_new_file(out, report.markdown())
            fsio.write_new_file(picture, report.picture())
        else:
            fsio.write_new_file(out, report.page())
    return report


def _picture_of(out: Path) -> Path:
    """Where the picture of a report in Markdown lies: beside it."""
    return out.with_suffix(".svg")


def _rows(name: str, records: Mapping[str, CellRecord], asked: str | None) -> list[ClaimRow]:
    study = read_study(name)
    scales = [scale for scale in SCALES if scale in study.scales and asked in (None, scale)]
    outcomes = {scale: find_outcome(study, study.at(scale), records) for scale in scales}
    rows = (_row(name, claim.name, outcomes) for claim in study.claims)
    return [row for row in rows if row is not None]


def _row(name: str, claim: str, outcomes: Mapping[str, Outcome]) -> ClaimRow | None:
    """The largest scale with enough seeds to tell; else the largest at which anything is known. None where none tests it.

    Where a smaller one has the same runs, that one: its command asks for no others.
    """
    found = {scale: one for scale, outcome in outcomes.items() for one in outcome.claims if one.claim.name == claim}
    if not found:
        return None
    known = sorted(found, key=lambda scale: min(found[scale].seeds, LEAST_SEEDS))  # of equals, the largest is last
    best = known[-1] if found[known[-1]].seeds else known[0]
    larger = list(found)[list(found).index(best) + 1 :]
    scale = next(one for one in found if found[one].records == found[best].records)  # the fewest runs that it rests on
    return ClaimRow(name, scale, found[scale], tuple(one for one in larger if found[one].is_begun))
