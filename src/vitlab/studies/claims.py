"""`vitlab study report claims`: every claim of the paper that a study tests, and whether it holds here."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.command import command_line
from vitlab.core.errors import UsageError
from vitlab.report.forest import ForestRow, draw_forest
from vitlab.report.page import Report, Verdicts, render
from vitlab.studies.cell_records import CELLS, RECORDS, CellRecord
from vitlab.studies.outcome import (
    FAILS,
    HOLDS,
    LEAST_SEEDS,
    NOT_YET,
    ClaimOutcome,
    Outcome,
    count_verdicts,
    find_outcome,
)
from vitlab.studies.study import SCALES
from vitlab.studies.study_file import list_study_names, read_study
from vitlab.studies.study_report import HOW_DRAWN, HOW_JUDGED, markdown_table, notes_of, strips_of, verdict_row
from vitlab.studies.units import measure_label

CLAIMS = "claims"

_KEY_LETTERS = 6  # of a record's key that are shown where it is a link
_TITLE = "The paper's claims, measured here"
_INTERVALS = (
    "Intervals are of Student's t, paired over seeds where two conditions are compared; each is of 95 % by itself, so that of "
    "many claims one or two may be decided by chance. All seeds are tested on the same images: what other test images would "
    "give is in no interval."
)
_SCALES = (
    "laptop, gpu and paper are the scales of a study: minutes on two cores, a reduced grid for one GPU, and the grid of the "
    "paper."
)
_HEADER = ("verdict", "the paper says", "measured here", "notes", "command")


@dataclasses.dataclass(frozen=True)
class ClaimRow:
    """One claim at the largest scale that has records of it."""

    study: str
    scale: str
    found: ClaimOutcome
    unfinished: tuple[str, ...] = ()  # larger scales with too few whole seeds of this claim
    others: tuple[tuple[str, str], ...] = ()  # other scales with another verdict that is decided

    @property
    def verdict(self) -> str:
        return self.found.verdict

    @property
    def command(self) -> str:
        return command_line("study run", self.study, options={"scale": self.scale})

    def elsewhere(self) -> list[str]:
        """What other scales say, or may say once they are finished."""
        said = [f"at the scale {scale}: {verdict}" for scale, verdict in self.others]
        return [*said, *(f"the scale {scale} is not finished" for scale in self.unfinished)]

    @property
    def measured(self) -> str:
        return "; ".join([*(test.sentence for test in self.found.tests), *self.elsewhere()])

    def cells(self) -> tuple[str, ...]:
        claim = self.found.claim
        return self.verdict, f"{claim.says} ({claim.where})", self.measured, notes_of(claim), f"`{self.command}`"


@dataclasses.dataclass(frozen=True)
class ClaimsReport:
    """Every claim, as text, Markdown, a page or JSON."""

    rows: tuple[ClaimRow, ...]
    out: Path | None = None
    records: Path | None = None  # the folder they lie in

    def measured(self) -> str:
        """`19 of 30 claims hold here, 3 do not, 8 are inconclusive at this scale`."""
        return " ".join(count_verdicts(row.found.verdict for row in self.rows))

    def post_hoc(self) -> str:
        """How many were tested by what had been seen: these are explored, not confirmed."""
        marked = [row for row in self.rows if row.found.claim.post_hoc and row.verdict != NOT_YET]
        holding = sum(row.verdict == HOLDS for row in self.rows)
        among = sum(row.verdict == HOLDS for row in marked)
        return (
            f"{len(marked)} of the {len(self.rows)} are post hoc, {among} of the {holding} that hold among them: "
            "their test, a bound or the seeds were set or changed after results had been seen."
        )

    def text(self) -> str:
        lines = [self.measured(), self.post_hoc(), ""]
        for row in self.rows:
            claim = row.found.claim
            lines += [f"{row.found.verdict_in_words}: {claim.says} ({claim.where})", f"  {row.scale}: {row.measured}"]
            lines += [f"  {line}" for line in (notes_of(claim), row.command) if line]
        return "\n".join(lines)

    def sentences(self) -> list[str]:
        return [self.text()] if self.out is None else [self.measured(), f"Written to {self.out}."]

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "claim": claim.name,
                "study": row.study,
                "says": claim.says,
                "where": claim.where,
                "measured": row.measured,
                "scale": row.scale,
                "verdict": row.verdict,
                "note": claim.note,
                "post_hoc": claim.post_hoc,
                "command": row.command,
                "records": list(row.found.records),
            }
            for row in self.rows
            for claim in [row.found.claim]
        ]
        return {"claims": rows, "out": None if self.out is None else str(self.out)}

    def markdown(self) -> str:
        links = self._links()
        parts = [
            f"# {_TITLE}",
            "",
            f"Made by `{self._command()}` from records alone.",
            f"{HOW_JUDGED} Otherwise it is inconclusive at this scale. {_INTERVALS} {_SCALES}",
            "",
            f"{self.measured()}. {self.post_hoc()}",
            "",
            f"![{self.measured()}]({_picture_of(self.out or Path(CLAIMS)).name})",
            "",
            HOW_DRAWN,
            "",
            *markdown_table(_HEADER, [row.cells() for row in self.rows]),
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
                [
                    (
                        row.found.claim.says,
                        row.study,
                        ", ".join(_record_link(key, links) for key in row.found.records) or "none yet",
                    )
                    for row in self.rows
                ],
            ),
            "",
        ]
        return "\n".join(parts)

    def _command(self) -> str:
        return command_line("study report", CLAIMS, options={"records": self.records} if self.records else {})

    def _links(self) -> str:
        """The folder of the records from where the report is written, so that both may be taken elsewhere together.

        Empty where they lie in several, as those of two machines that were put side by side.
        """
        if self.records is None or self.out is None:
            return ""
        places = [self.records / CELLS, self.records / RECORDS / CELLS]
        found = next((place for place in places if place.is_dir()), None)
        return "" if found is None else Path(os.path.relpath(found, self.out.parent)).as_posix()

    def picture(self) -> bytes:
        """All claims below each other, each with its numbers: an SVG file."""
        groups = [
            (
                title,
                [
                    ForestRow(
                        row.found.claim.says,
                        row.found.verdict_in_words,
                        list(zip(_numbers_of(row.found), strips_of(row.found), strict=True)),
                    )
                    for row in rows
                ],
            )
            for title, _, _, rows in self._by_study()
        ]
        return draw_forest(self.measured(), groups)

    def page(self) -> str:
        sections = [
            Verdicts(
                title, f"{question} {about}", [verdict_row(row.found, row.command, row.elsewhere()) for row in rows]
            )
            for title, question, about, rows in self._by_study()
        ]
        facts = [("drawn", HOW_DRAWN), ("intervals", _INTERVALS), ("scales", _SCALES)]
        how = f"{HOW_JUDGED} {self.post_hoc()}"
        return render(Report(_TITLE, self.measured(), how, facts, sections, "from records alone"))

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


def report_claims(
    records: Mapping[str, CellRecord], *, scale: str | None, out: Path | None, folder: Path | None = None
) -> ClaimsReport:
    """Every claim of every study that ships; with `scale`, at that one alone. `folder` is where the records lie."""
    if scale is not None and scale not in SCALES:
        raise UsageError(f"'{scale}' is not a scale; there are {', '.join(SCALES)}")
    rows = [row for name in list_study_names() for row in _rows(name, records, scale)]
    report = ClaimsReport(tuple(rows), out, folder)
    if out is not None:
        fsio.make_folder(out.parent)
        if out.suffix == ".md":
            picture = fsio.require_free(_picture_of(out))
            fsio.write_new_file(out, report.markdown())
            fsio.write_new_file(picture, report.picture())
        else:
            fsio.write_new_file(out, report.page())
    return report


def _numbers_of(found: ClaimOutcome) -> list[str]:
    """What each test came to; of several, with what it is about, but for what they have in common at its beginning."""
    if len({test.what for test in found.tests}) == 1:
        return [found.tests[0].number or found.tests[0].what for _ in found.tests]
    measures = {measure_label(test.test.measure) for test in found.tests}
    (common, *others) = measures
    names = [test.what if others else test.what.removeprefix(f"{common}, ") for test in found.tests]
    return [f"{name}: {test.number}" if test.number else name for name, test in zip(names, found.tests, strict=True)]


def _record_link(key: str, folder: str) -> str:
    return f"[{key[:_KEY_LETTERS]}]({folder}/{key}.json)" if folder else key


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
    same = [one for one in found if found[one].records and found[one].records == found[best].records]
    scale = same[0] if same else best  # the fewest runs that it rests on
    others = [
        (one, found[one].verdict) for one in found if found[one].verdict in {HOLDS, FAILS} - {found[scale].verdict}
    ]
    return ClaimRow(name, scale, found[scale], tuple(one for one in larger if found[one].is_begun), tuple(others))
