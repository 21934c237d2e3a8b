"""The report: one self-contained HTML file, readable offline, in light and in dark.

A page is a list of sections; the macro of the template that has the name of a section draws it. Text from data (class names,
file names, titles) is escaped by the template engine or by `charts`. Nothing is fetched, and no scripts may run but our own:
the policy names their hashes.
"""

import base64
import dataclasses
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import jinja2
import markupsafe

from vitlab.core.environment import package_version
from vitlab.report.charts import Chart, draw_matrix
from vitlab.report.forest import Strip
from vitlab.report.plot import Plot
from vitlab.report.viewer import Viewer

_CHART_PX = ((500, 300), (1040, 320), (330, 270))  # beside another, alone, on a phone
_PLOT_PX = ((500, 340), (1040, 420), (330, 300))  # higher: points with whiskers lie closer than curves
_READABLE_BESIDE = 12  # columns of a matrix, or rows of a table, in half a page
_SMALLEST_CELL_REM, _LARGEST_CELL_REM, _MATRIX_REM = 1.75, 5.5, 21  # of a matrix, in the page's letters
_BESIDE = 2  # pictures of an example in half a page
_FEW_COLUMNS, _LETTERS_BESIDE = 4, 60  # of a table in half a page
_NUMBER = re.compile(r"[-+−<≈]?\d(?![\d.]*-\w)")  # how a cell with a number begins
_MOST_IN_A_FILE = 60  # classes of a matrix as a file; beyond, it is a grey square
_LOADER = jinja2.PackageLoader("vitlab.report", "")
# Tiles in a row, by preference: the first that leaves the fewest places empty is taken.
_ROWS_OF_TILES = {
    "small": ((6, 8, 7, 5, 4), (3, 4, 2)),
    "photos": ((6, 5, 4, 7), (2, 3)),
    "double": ((3, 4, 2), (2, 1)),
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture with the sentence that says what to look for."""

    title: str
    caption: str
    data: bytes  # SVG, PNG or JPEG
    wide: bool = False  # over the whole page


@dataclasses.dataclass(frozen=True)
class Tile:
    """One small picture with its caption; without data, the caption alone."""

    data: bytes
    caption: str
    good: bool | None = True  # green or red frame; None for a plain one


@dataclasses.dataclass(frozen=True)
class Gallery:
    title: str
    caption: str
    tiles: Sequence[Tile]
    photos: bool = False  # larger tiles, whose pixels may be blended
    double: bool = False  # tiles of two pictures beside each other
    legend: Tile | None = None  # what the colours in the tiles stand for
    in_a_row: tuple[int, int] | None = None  # tiles on a page and on a phone, where their order matters

    @property
    def columns(self) -> tuple[int, int]:
        """Tiles in a row of the page, and in one of a phone, such that the last row is full, or nearly."""
        if self.in_a_row is not None:
            return self.in_a_row
        wide, narrow = _ROWS_OF_TILES["double" if self.double else "photos" if self.photos else "small"]
        return _fullest(len(self.tiles), wide), _fullest(len(self.tiles), narrow)


@dataclasses.dataclass(frozen=True)
class Sheets:
    """Wide pictures below each other, to be scrolled sideways on a phone: scaled down, one could not read them."""

    title: str
    caption: str
    sheets: Sequence[Tile]


@dataclasses.dataclass(frozen=True)
class Bar:
    """One line of a chart; `value` is the length, 0 to 1, and `text` what it says."""

    name: str
    value: float
    text: str
    marked: bool = False
    note: str = ""  # in smaller letters below the name


@dataclasses.dataclass(frozen=True)
class Bars:
    wide: ClassVar[bool] = False
    title: str
    caption: str
    bars: Sequence[Bar]
    more: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a matrix; `heat` is 0 to 1, the diagonal has none. `hint` is shown where one points."""

    text: str
    heat: float = 0.0
    plain: bool = False
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A table with names on both sides, to be scrolled where it is wide.

    With `sortable`, row k and column k are the same class, and the reader may choose their order; `errors` orders them.
    """

    title: str
    caption: str
    columns: Sequence[str]
    cells: Sequence[tuple[str, Sequence[Cell]]]  # the name of a row, and its cells
    corner: str = ""
    sortable: bool = False
    errors: Sequence[int] = ()

    @property
    def wide(self) -> bool:
        return len(self.columns) > _READABLE_BESIDE

    @property
    def cell_rem(self) -> float:
        """The side of a cell: few classes have large ones."""
        return max(_SMALLEST_CELL_REM, min(_LARGEST_CELL_REM, _MATRIX_REM / max(1, len(self.columns))))


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

    @property
    def wide(self) -> bool:
        return len(self.examples) > 1 or any(len(example.tiles) > _BESIDE for example in self.examples)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text; a row of one cell is the title of those below it, and the first cell of others is the row's name.

    `bold` has (row, column) of the cells whose number is marked.
    """

    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    bold: frozenset[tuple[int, int]] = frozenset()

    @property
    def wide(self) -> bool:
        lines = [self.header, *(row for row in self.rows if len(row) == len(self.header))]
        letters = sum(max(map(len, column)) for column in zip(*lines, strict=True))
        return len(self.rows) > _READABLE_BESIDE or len(self.header) > _FEW_COLUMNS or letters > _LETTERS_BESIDE

    @property
    def numeric(self) -> Sequence[bool]:
        """Which columns hold numbers or intervals, with units or without; the names of rows stay text."""
        columns = list(zip(*(row for row in self.rows if len(row) == len(self.header)), strict=True))
        return [number > 0 and _is_numeric(cells) for number, cells in enumerate(columns)] or [False] * len(self.header)


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether most of the filled cells begin with a number: a run that failed, or is not done, has a word in its place."""
    filled = [cell for cell in cells if any(map(str.isalnum, cell))]  # a dash is an empty cell
    return 2 * sum(_NUMBER.match(cell) is not None for cell in filled) > len(filled)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One claim, what was measured of it, and what follows: `good` colours that green or red, None neither."""

    says: str
    verdict: str
    measured: Sequence[tuple[str, Strip | None]]  # a number in words, and drawn
    good: bool | None = None
    where: str = ""
    note: str = ""
    post_hoc: str = ""  # what was set or changed after results had been seen
    command: str = ""


@dataclasses.dataclass(frozen=True)
class Verdicts:
    title: str
    caption: str
    rows: Sequence[Verdict]


@dataclasses.dataclass(frozen=True)
class Snippets:
    """Lines to copy: what each does, and the line."""

    title: str
    caption: str
    lines: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Files:
    """Links to files beside the page, by their path from its folder, with what each holds."""

    title: str
    caption: str
    links: Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Facts:
    title: str
    rows: Sequence[tuple[str, str]]
    caption: str = ""


Section = (
    Figure
    | Gallery
    | Sheets
    | Table
    | Bars
    | Matrix
    | Examples
    | Chart
    | Plot
    | Snippets
    | Verdicts
    | Files
    | Facts
    | Viewer
)


@dataclasses.dataclass(frozen=True)
class Report:
    """The page. `number` is the one large number, with which the sentence of the headline begins."""

    title: str
    headline: str
    subline: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str = ""  # behind the version of vitlab
    warnings: Sequence[str] = ()  # what seemed amiss
    number: str = ""
    stats: Sequence[tuple[str, str]] = ()  # what it is, and its value


@dataclasses.dataclass(frozen=True)
class Placed:
    """A section with its anchor and its width on the page."""

    part: Section
    anchor: str
    wide: bool

    @property
    def kind(self) -> str:
        """The macro of the template that draws it."""
        return type(self.part).__name__.lower()

    def drawings(self) -> list[tuple[str, markupsafe.Markup]]:
        """A chart or plot twice, for wide screens and for phones: one that is scaled has letters too small or too large."""
        assert isinstance(self.part, Chart | Plot)
        half, wide, phone = _PLOT_PX if isinstance(self.part, Plot) else _CHART_PX
        sizes = {"desk": wide if self.wide else half, "phone": phone}
        return [(where, markupsafe.Markup(self.part.draw(*size))) for where, size in sizes.items()]


def render(report: Report) -> str:
    """The page as text. Whatever is put into the template is escaped."""
    sections = [*report.sections, *([Facts("Facts", report.facts)] if report.facts else [])]
    has_viewer = any(isinstance(part, Viewer) for part in sections)
    styles = [_asset(name) for name in ("style.css", "viewer.css")[: 1 + has_viewer]]
    scripts = [_asset(name) for name in ("page.js", "viewer.js")[: 1 + has_viewer]]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    footer = " · ".join(filter(None, [f"vitlab {package_version('vitlab')}", report.footer]))
    filters = _filters(sections)
    return _template().render(
        report=report,
        sections=place(sections),
        footer=footer,
        styles=styles,
        scripts=scripts,
        digests=digests,
        kinds=[kind for kind, _ in filters],
        filters=filters if sum(isinstance(part, Verdicts) for part in sections) > 1 else [],
    )


def _filters(sections: Sequence[Section]) -> list[tuple[str, int]]:
    """Every verdict of a page and how often it is given: what holds, what does not, and the others by their number."""
    rows = [row for part in sections if isinstance(part, Verdicts) for row in part.rows]
    counts = Counter(row.verdict for row in rows)
    rank = {row.verdict: {True: 0, False: 1, None: 2}[row.good] for row in rows}
    return sorted(counts.items(), key=lambda item: (rank[item[0]], -item[1], item[0]))


@functools.cache  # several runs in one process, as in a sweep, compile it once
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"wrapped": _wrapped, "uri": _uri, "aligned": _aligned, "drawn": _drawn}
    return environment.get_template("report.html.j2")


@functools.cache
def _asset(name: str) -> markupsafe.Markup:
    """A style or a script, not as a template: a script must be to the byte what its hash was made of."""
    return markupsafe.Markup(_LOADER.get_source(jinja2.Environment(loader=_LOADER), name)[0])


def _wrapped(text: str) -> markupsafe.Markup:
    """Text that breaks behind underscores, as class names have them, and never before the sign of a per cent."""
    kept = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)
    return markupsafe.escape(kept).replace("_", markupsafe.Markup("_<wbr>"))


def _aligned(numeric: bool) -> markupsafe.Markup:
    """The attribute of a cell, as the columns of its table are."""
    return markupsafe.Markup(' class="number"' if numeric else "")


def _drawn(strip: Strip | None) -> markupsafe.Markup:
    return markupsafe.Markup("" if strip is None else strip.draw())


def place(sections: Sequence[Section]) -> list[Placed]:
    """Each with an anchor, two narrow ones beside each other. A narrow one without a neighbour has the whole width."""
    placed: list[Placed] = []
    anchors = set[str]()
    alone: int | None = None  # the place of a narrow one that still has room beside it
    for part in sections:
        wide = getattr(part, "wide", True)  # what can be narrow says so
        if wide:
            alone = _widen(placed, alone)
        placed.append(Placed(part, _anchor(part.title, anchors), wide))
        if not wide:
            alone = len(placed) - 1 if alone is None else None
    _widen(placed, alone)
    return placed


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def percent_range(low: float, high: float) -> str:
    return f"{100 * low:.1f}–{100 * high:.1f} %"


def plots(report: Report) -> dict[str, bytes]:
    """The page's drawings as files of their own, by name."""
    files: dict[str, bytes] = {}
    for placed in place(report.sections):
        part, name = placed.part, placed.anchor
        if isinstance(part, Chart | Plot):
            files[f"{name}.svg"] = part.file()
        elif isinstance(part, Figure):
            files[f"{name}.{_kind(part.data).removesuffix('+xml')}"] = part.data
        elif isinstance(part, Matrix) and len(part.cells) <= _MOST_IN_A_FILE:
            rows, cells = [name for name, _ in part.cells], [row for _, row in part.cells]
            heat = [[-1.0 if cell.plain else cell.heat for cell in row] for row in cells]
            files[f"{name}.svg"] = draw_matrix(rows, part.columns, [[cell.text for cell in row] for row in cells], heat)
    return files


def _widen(placed: list[Placed], alone: int | None) -> None:
    if alone is not None:
        placed[alone] = dataclasses.replace(placed[alone], wide=True)


def _anchor(title: str, taken: set[str]) -> str:
    """A name for links and files: letters, digits and dashes, and no two alike."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
    number = 1
    while (anchor := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    taken.add(anchor)
    return anchor


def _fullest(count: int, choices: Sequence[int]) -> int:
    return min(choices, key=lambda columns: -count % columns)


def _uri(data: bytes) -> str:
    return f"data:image/{_kind(data)};base64,{base64.b64encode(data).decode()}"


def _kind(data: bytes) -> str:
    return {b"\x89P": "png", b"\xff\xd8": "jpeg"}.get(data[:2], "svg+xml")
