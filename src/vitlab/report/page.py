"""The report: one self-contained HTML file, readable offline.

Owns the look. Text from data (class names, titles) is escaped by the template engine; nothing is fetched and no script runs.
"""

import base64
import dataclasses
import functools
from collections.abc import Sequence

import jinja2


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture with the sentence that says what to look for."""

    title: str
    caption: str
    data: bytes  # SVG, PNG or JPEG
    wide: bool = False  # over the whole page

    @property
    def uri(self) -> str:
        kind = {b"\x89P": "png", b"\xff\xd8": "jpeg"}.get(self.data[:2], "svg+xml")
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"


@dataclasses.dataclass(frozen=True)
class Tile:
    """One small picture with its caption; without data, the caption alone."""

    data: bytes
    caption: str
    good: bool | None = True  # green or red frame; None for a plain one

    uri = Figure.uri


@dataclasses.dataclass(frozen=True)
class Gallery:
    title: str
    caption: str
    tiles: Sequence[Tile]
    photos: bool = False  # larger tiles, whose pixels may be blended
    double: bool = False  # tiles of two pictures beside each other


@dataclasses.dataclass(frozen=True)
class Bar:
    """One line of a chart; `value` is the length, 0 to 1, and `text` what it says."""

    name: str
    value: float
    text: str
    marked: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    title: str
    caption: str
    bars: Sequence[Bar]
    more: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a matrix; `heat` is 0 to 1, the diagonal has none."""

    text: str
    heat: float = 0.0
    plain: bool = False


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A table with names on both sides, to be scrolled where it is wide."""

    title: str
    caption: str
    columns: Sequence[str]
    cells: Sequence[tuple[str, Sequence[Cell]]]  # the name of a row, and its cells
    corner: str = ""


@dataclasses.dataclass(frozen=True)
class Example:
    text: str
    tiles: Sequence[Tile]
    more: str = ""


@dataclasses.dataclass(frozen=True)
class Examples:
    """Sentences with pictures beside each."""

    title: str
    caption: str
    examples: Sequence[Example]
    more: str = ""
    serious: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text; a row of one cell is the title of those below it.

    `bold` has (row, column) of the cells whose number is marked.
    """

    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    bold: frozenset[tuple[int, int]] = frozenset()


Section = Figure | Gallery | Table | Bars | Matrix | Examples


@dataclasses.dataclass(frozen=True)
class Report:
    title: str
    headline: str
    subline: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str
    warnings: Sequence[str] = ()  # what seemed amiss


def render(report: Report) -> str:
    """The page as text. Whatever is put into the template is escaped."""
    return _template().render(report=report)


@functools.cache  # several runs in one process, as in a sweep, compile it once
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vitlab.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")
