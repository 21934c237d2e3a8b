"""Charts and matrices as SVG, written by hand: small, the same bytes every time, and in the colours of the page around them.

A chart on a page has classes, and the page's style sheet gives them colours in light and in dark. As a file of its own it
carries a style sheet with fixed colours, since few programs outside browsers know variables.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from html import escape
from typing import ClassVar, Literal

# dots stand on a line, points alone; faint, guide and points have no value to point at
Mark = Literal["line", "faint", "dashed", "dots", "points", "bars", "guide"]
Point = tuple[float, float]

COLOURS = 8  # in the style sheets; a ninth series has the first again
_MOST_POINTS = 300  # of a line: as many as a screen can show apart
_FONT_PX, _LETTER_PX, _LINE_PX = 12, 6.7, 18  # of a letter: the mean width in a sans-serif font, on the large side
_SWATCH_PX, _LEGEND_GAP_PX = 22, 14
_TICKS_WIDE, _TICKS_NARROW, _NARROW_PX = 7, 4, 420
_SIZE = (640, 360)  # of a chart as a file, in pixels
_CELL_PX = 26  # of a matrix as a file
_FLAT, _ROOM = 0.7, 0.05  # share of its greatest value that a curve keeps all along; what is left free above it
_DARKEST = 0.75  # of a cell, so that its number can be read

FILE_COLOURS = ("#2563eb", "#c2410c", "#15803d", "#7c3aed", "#be185d", "#0f766e", "#a16207", "#475569")
_FILE_STYLE = (
    "text{font:12px sans-serif;fill:#1f2933}.soft{fill:#52606d}.grid{stroke:#e4e7eb}.axis{stroke:#9aa5b1}"
    ".line,.dashed,.faint,.guide{fill:none;stroke-width:2;stroke-linejoin:round}.faint{stroke-width:1;opacity:.3}"
    ".dashed{stroke-dasharray:6 4}.bars{opacity:.45}.points{opacity:.6}"
    ".cursor{display:none}"
    + "".join(
        f".c{number}{{stroke:{colour}}}.f{number}{{fill:{colour};stroke:none}}"
        for number, colour in enumerate(FILE_COLOURS)
    )
    + ".guide{stroke:#7b8794;stroke-width:1.2;stroke-dasharray:2 4}"
)


@dataclasses.dataclass(frozen=True)
class Series:
    """One line of a chart. `colour` counts the colours of the style sheet."""

    name: str
    points: Sequence[Point]
    mark: Mark = "line"
    colour: int = 0


@dataclasses.dataclass(frozen=True)
class Chart:
    """Values over two axes; without a range of its own, an axis fits its values, and the upright one mostly starts at zero."""

    kind: ClassVar[str] = "chart"
    title: str
    caption: str
    series: Sequence[Series]
    x_label: str
    y_label: str
    percent: bool = False  # values are shares, shown in per cent
    x_range: Point | None = None
    y_range: Point | None = None
    wide: bool = False
    whole_x: bool = False  # the axis counts something, and has no ticks in between

    @property
    def summary(self) -> str:
        """The chart in words, for whoever cannot see it."""
        ends = [f"{one.name} ends at {self.value(one.points[-1][1])}" for one in self.pointed if one.points]
        return f"{self.title}: {self.y_label} over {self.x_label}" + (f"; {', '.join(ends)}" if ends else "")

    @property
    def pointed(self) -> list[Series]:
        """The series whose values are shown where one points."""
        return [one for one in self.series if one.mark not in ("faint", "guide", "points")]

    @property
    def values(self) -> str:
        """What the page's script shows beside the pointer, as JSON."""
        table = [
            {
                "name": one.name,
                "c": one.colour % COLOURS,
                "p": [[_short(x), _short(y)] for x, y in _thinned(one.points)],
            }
            for one in self.pointed
        ]
        return json.dumps(table, separators=(",", ":"))

    def value(self, y: float) -> str:
        return f"{100 * y:.3g} %" if self.percent else f"{y:.3g}"

    def draw(self, width: int, height: int) -> str:
        """The chart as an SVG element for a page."""
        return _draw(self, width, height)

    def file(self) -> bytes:
        """The chart as an SVG file."""
        return _as_file(_draw(self, *_SIZE))


def draw_matrix(
    rows: Sequence[str], columns: Sequence[str], counts: Sequence[Sequence[str]], heat: list[list[float]]
) -> bytes:
    """A table of counts as an SVG file; `heat` is 0 to 1, and negative on the diagonal, which would drown the mistakes."""
    left, top = (_LETTER_PX * max(map(len, names), default=0) + 12 for names in (rows, columns))
    note = "rows: true class, columns: predicted class"
    width = left + max(_CELL_PX * len(columns) + 8, _LETTER_PX * len(note))
    height = top + _CELL_PX * len(rows) + 2 * _LINE_PX
    drawn: list[str] = []
    for y, row in enumerate(rows):
        middle = top + _CELL_PX * (y + 0.5)
        drawn.append(_text(left - 6, middle + 4, row, anchor="end"))
        for x, text in enumerate(counts[y]):
            at, value = left + _CELL_PX * x, heat[y][x]
            colour = "#15803d" if value < 0 else "#ea580c"
            alpha = 0.15 if value < 0 else _DARKEST * value
            place = f'x="{_n(at)}" y="{_n(middle - _CELL_PX / 2)}" width="{_CELL_PX - 1}" height="{_CELL_PX - 1}"'
            drawn.append(
                f'<rect {place} fill="{colour if value else "#f1f4f8"}" fill-opacity="{alpha if value else 1:.2f}"/>'
            )
            drawn.append(_text(at + _CELL_PX / 2, middle + 4, text, anchor="middle") if text else "")
    for x, column in enumerate(columns):
        at = left + _CELL_PX * (x + 0.5) + 4
        drawn.append(f'<g transform="translate({_n(at)} {_n(top - 6)}) rotate(-90)">{_text(0, 0, column)}</g>')
    drawn.append(_text(left, height - 8, note, soft=True))
    size = f'viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}"'
    return _as_file(f"<svg {size}>{''.join(drawn)}</svg>")


def smooth(values: Sequence[float], span: float = 0.04) -> list[float]:
    """Mean over a centred window of `span` of the run; at its ends, the window is cut."""
    half = round(span * len(values) / 2)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


# --- how it is drawn --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Where the values lie: the plot's corner and size in pixels, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_range: Point
    y_range: Point

    def at(self, point: Point) -> Point:
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        across, up = (point[0] - x0) / (x1 - x0), (point[1] - y0) / (y1 - y0)
        return self.left + self.width * across, self.top + self.height * (1 - up)


def _draw(chart: Chart, width: int, height: int) -> str:
    x_range = chart.x_range or _range([x for one in chart.series for x, _ in _finite(one.points)])
    y_range = chart.y_range or _range_from_zero([y for one in chart.series for _, y in _finite(one.points)])
    x_ticks = _ticks(*x_range, most=_TICKS_NARROW if width < _NARROW_PX else _TICKS_WIDE)
    y_ticks = _ticks(*y_range, most=5)
    x_ticks = [tick for tick in x_ticks if tick == int(tick)] if chart.whole_x else x_ticks
    x_texts = [_tick_text(tick) for tick in x_ticks]
    y_texts = [f"{100 * tick:.4g} %" if chart.percent else _tick_text(tick) for tick in y_ticks]
    legend, legend_px = _legend(chart, width)
    left, top = _LETTER_PX * max(map(len, y_texts), default=1) + 10, legend_px + _LINE_PX + 12
    frame = _Frame(left, top, width - left - 14, height - top - 2 * _LINE_PX - 4, x_range, y_range)
    parts = [legend, _text(0, legend_px + 13, chart.y_label, soft=True)]
    for tick, text in zip(y_ticks, y_texts, strict=True):
        y = frame.at((x_range[0], tick))[1]
        parts.append(f'<path class="grid" d="M{_n(left)} {_n(y)}h{_n(frame.width)}"/>')
        parts.append(_text(left - 6, y + 4, text, anchor="end", soft=True))
    bottom = frame.top + frame.height
    for tick, text in zip(x_ticks, x_texts, strict=True):
        x = frame.at((tick, y_range[0]))[0]
        parts.append(f'<path class="axis" d="M{_n(x)} {_n(bottom)}v4"/>')
        anchor = "end" if x > width - 30 else "middle"
        parts.append(_text(min(x, width - 2), bottom + _LINE_PX, text, anchor=anchor, soft=True))
    parts.append(f'<path class="axis" d="M{_n(left)} {_n(bottom)}h{_n(frame.width)}"/>')
    parts.append(_text(left + frame.width / 2, bottom + 2 * _LINE_PX, chart.x_label, anchor="middle", soft=True))
    parts += [_series(one, frame) for one in chart.series]
    parts.append(f'<path class="cursor" d="M0 {_n(top)}v{_n(frame.height)}"/>')
    box = ",".join(f"{number:.8g}" for number in (frame.left, frame.width, *x_range))
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(_printable(chart.summary))}" data-box="{box}">{"".join(parts)}</svg>'


def _series(one: Series, frame: _Frame) -> str:
    colour = one.colour % COLOURS
    # Points are all shown: those of a line can be left out because their neighbours tell where it goes.
    chosen = _finite(one.points) if one.mark == "points" else _thinned(_finite(one.points))
    places = [frame.at(point) for point in chosen]
    if one.mark == "bars":
        # Bars stand evenly, so that the least distance is that of neighbours, also where one between them is missing.
        between = [b[0] - a[0] for a, b in itertools.pairwise(places)]
        wide, bottom = 0.8 * min([*between, frame.width / 10]), frame.top + frame.height
        return "".join(
            f'<rect class="bars f{colour}" x="{_n(x - wide / 2)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(bottom - y)}"/>'
            for x, y in places
        )
    if one.mark == "points":
        return "".join(f'<circle class="points f{colour}" cx="{_n(x)}" cy="{_n(y)}" r="3.2"/>' for x, y in places)
    line = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)
    path = (
        f'<path class="{"line" if one.mark == "dots" else one.mark} c{colour}" d="{line}"/>' if len(places) > 1 else ""
    )
    dotted = one.mark == "dots" or (len(places) == 1 and one.mark != "faint")
    dots = [f'<circle class="f{colour}" cx="{_n(x)}" cy="{_n(y)}" r="3.2"/>' for x, y in places] if dotted else []
    return path + "".join(dots)


def _legend(chart: Chart, width: int) -> tuple[str, int]:
    """Swatches with names, on as many lines as they need; and the pixels they take. One series needs none."""
    named = [one for one in chart.series if one.mark != "faint"]
    if len(named) < 2:
        return "", 0
    parts, x, line = list[str](), 0.0, 0
    for one in named:
        name = (
            one.name
            if len(one.name) <= (most := int((width - _SWATCH_PX) / _LETTER_PX))
            else one.name[: most - 1] + "…"
        )
        takes = _SWATCH_PX + _LETTER_PX * len(name)
        if x and x + takes > width:
            x, line = 0.0, line + 1
        y, colour = _LINE_PX * line + 9, one.colour % COLOURS
        if one.mark == "bars":
            parts.append(f'<rect class="bars f{colour}" x="{_n(x)}" y="{y - 5}" width="16" height="10"/>')
        elif one.mark == "points":
            parts.append(f'<circle class="points f{colour}" cx="{_n(x + 8)}" cy="{y}" r="3.2"/>')
        else:
            shown = "line" if one.mark == "dots" else one.mark
            parts.append(f'<path class="{shown} c{colour}" d="M{_n(x)} {y}h16"/>')
            parts.append(f'<circle class="f{colour}" cx="{_n(x + 8)}" cy="{y}" r="3.2"/>' if one.mark == "dots" else "")
        parts.append(_text(x + _SWATCH_PX, y + 4, name))
        x += takes + _LEGEND_GAP_PX
    return "".join(parts), _LINE_PX * (line + 1) + 4


def _text(x: float, y: float, text: str, *, anchor: str = "", soft: bool = False) -> str:
    attributes = (' class="soft"' if soft else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{escape(_printable(text))}</text>'


def _printable(text: str) -> str:
    """Without the control characters that no XML may hold, escaped or not."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _as_file(element: str) -> bytes:
    start = f'<svg xmlns="http://www.w3.org/2000/svg"{element[4 : element.index(">") + 1]}<style>{_FILE_STYLE}</style>'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{start}{element[element.index(">") + 1 :]}\n'.encode()


def _range(values: Sequence[float]) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _range_from_zero(values: Sequence[float]) -> Point:
    """With some room above; from zero on, unless a curve would be a flat line far above it."""
    low, high = min([*values, 0.0]), max([*values, 0.0]) or 1.0
    if values and min(values) > _FLAT * high and max(values) > min(values):
        low = min(values) - (high - min(values)) / 2
    return low, high + _ROOM * (high - low)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round values from `low` to `high`, at most about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.4g}"


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Evenly chosen ones of many, the first and the last among them."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")


def _n(value: float) -> str:
    """A coordinate: a tenth of a pixel is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")
