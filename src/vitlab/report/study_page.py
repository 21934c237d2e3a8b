"""The page of `vitlab study report --out report.html`: tables, one below the other, in one HTML file."""

import dataclasses
from collections.abc import Sequence

from vitlab.core.environment import package_version
from vitlab.report.page import template


@dataclasses.dataclass(frozen=True)
class StudySection:
    """A table with its title and what has to be said about it. The first row is the head; one of a single cell is the title of
    the rows below it. `bold` has (row, column) of the cells whose number was printed in bold."""

    title: str
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    bold: frozenset[tuple[int, int]] = frozenset()


@dataclasses.dataclass(frozen=True)
class StudyPage:
    title: str
    headline: str
    subline: str
    sections: Sequence[StudySection]


def render_study(page: StudyPage) -> str:
    """The page as text."""
    return template("study.html.j2").render(page=page, footer=f"vitlab {package_version('vitlab')}")
