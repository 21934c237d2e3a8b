"""`vitlab study report`: a study, a published table, or all claims, from records alone."""

import dataclasses
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.command import command_line
from vitlab.core.errors import FileProblem, UnknownName
from vitlab.evaluation.published import published_tables
from vitlab.options.option import takes
from vitlab.options.study_options import StudyReportOptions
from vitlab.report.page import plots, render
from vitlab.studies.cell_records import CellRecord, read_cells
from vitlab.studies.claims import CLAIMS, ClaimsReport, report_claims
from vitlab.studies.outcome import Outcome, find_outcome
from vitlab.studies.study import SCALES, Study
from vitlab.studies.study_file import list_study_names, read_study
from vitlab.studies.study_report import build_page, outcome_lines, outcome_to_dict, to_markdown
from vitlab.studies.tables import RECORDS, TableReport, report_table, require_file

_STUDIES = Path("runs") / "studies"  # where `vitlab study run` puts them


@dataclasses.dataclass(frozen=True)
class StudyReport:
    """A study at one scale."""

    outcome: Outcome
    out: Path | None = None

    def measured(self) -> str:
        return f"{self.outcome.measured} of {self.outcome.cells} cells measured"

    def text(self) -> str:
        return "\n".join([*outcome_lines(self.outcome), self.measured()])

    def sentences(self) -> list[str]:
        return [self.text()] if self.out is None else [self.measured(), f"Written to {self.out}."]

    def to_json(self) -> dict[str, Any]:
        return {**outcome_to_dict(self.outcome), "out": None if self.out is None else str(self.out)}


@takes(StudyReportOptions)
def report_study(options: StudyReportOptions) -> StudyReport | TableReport | ClaimsReport:
    """Report a study, a published table beside our own numbers, or with `claims` what holds of the paper's claims.

    From records alone: nothing is trained. The same records give the same file.
    """
    if options.name in published_tables():
        return report_table(options.name, records=options.records, out=options.out, gpu_tflops=options.gpu_tflops)
    place = require_file(options.out)
    if options.name == CLAIMS:
        folder, records = _records(options.records)
        return report_claims(records, scale=options.scale, out=place, folder=folder)
    if not options.name.endswith(".toml") and options.name not in list_study_names():
        known = [CLAIMS, *list_study_names(), *published_tables()]
        raise UnknownName("study", options.name, known, hint="See `vitlab study list`.")
    study, (_, records) = read_study(options.name), _records(options.records)
    outcome = find_outcome(study, study.at(options.scale or _largest(study, records)), records)
    report = StudyReport(outcome, place)
    if place is not None:
        repeat = command_line("study run", options.name, options={"scale": outcome.scale.name})
        page = build_page(outcome, repeat)
        fsio.make_folder(place.parent)
        if place.suffix == ".md":
            prefix = f"{place.stem}-"
            beside = {fsio.require_free(place.parent / f"{prefix}{name}"): data for name, data in plots(page).items()}
            fsio.write_new_file(place, to_markdown(outcome, page, repeat, prefix))
            for path, data in beside.items():
                fsio.write_new_file(path, data)
        else:
            fsio.write_new_file(place, render(page))
    return report


def _records(folder: str | Path | None) -> tuple[Path | None, dict[str, CellRecord]]:
    """A folder with those in it; by default of the last studies here, then of vitlab's own results."""
    if folder is not None:
        if not Path(folder).is_dir():
            raise FileProblem(f"{folder} is not a folder of records")
        return Path(folder), read_cells(Path(folder))
    places = [_STUDIES, RECORDS, Path(__file__).parents[3] / RECORDS]
    found = ((place, read_cells(place)) for place in places if place.is_dir())
    return next(((place, cells) for place, cells in found if cells), (None, {}))


def _largest(study: Study, records: dict[str, CellRecord]) -> str:
    """The largest scale that is complete; else the one of which most is measured.

    Scales share runs: a few records are no sign that anybody wants to see that scale.
    """
    outcomes = {scale: find_outcome(study, study.at(scale), records) for scale in SCALES if scale in study.scales}
    complete = [scale for scale, found in outcomes.items() if found.measured == found.cells]
    return (
        complete[-1] if complete else max(outcomes, key=lambda scale: outcomes[scale].measured / outcomes[scale].cells)
    )
