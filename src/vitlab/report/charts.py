"""Charts and matrices as SVG; the page's script shows values beside the pointer."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Literal

from vitlab.report import svg
from vitlab.report.svg import COLOURS, Frame, Point

# dots stand on a line, points alone; faint, guide and points have no value to point at
Mark = Literal["line", "faint", "dashed", "dots", "points", "bars", "guide"]

_CELL_PX = 26  # of a matrix as a file
_DARKEST = 0.75  # of a cell, so that its number can be read


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
                "p": [[_short(x), _short(y)] for x, y in svg.thinned(one.points)],
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
        return svg.as_file(_draw(self, *svg.FILE_SIZE))


def draw_matrix(
    rows: Sequence[str], columns: Sequence[str], counts: Sequence[Sequence[str]], heat: list[list[float]]
) -> bytes:
    """A table of counts as an SVG file; `heat` is 0 to 1, and negative on the diagonal, which would drown the mistakes."""
    left, top = (svg.LETTER_PX * max(map(len, names), default=0) + 12 for names in (rows, columns))
    note = "rows: true class, columns: predicted class"
    width = left + max(_CELL_PX * len(columns) + 8, svg.LETTER_PX * len(note))
    height = top + _CELL_PX * len(rows) + 2 * svg.LINE_PX
    drawn: list[str] = []
    for y, row in enumerate(rows):
        middle = top + _CELL_PX * (y + 0.5)
        drawn.append(svg.text(left - 6, middle + 4, row, anchor="end"))
        for x, text in enumerate(counts[y]):
            at, value = left + _CELL_PX * x, heat[y][x]
            kind = "inset" if not value else "good" if value < 0 else "bad"
            alpha = 1 if not value else 0.15 if value < 0 else _DARKEST * value
            place = (
                f'x="{svg.px(at)}" y="{svg.px(middle - _CELL_PX / 2)}" width="{_CELL_PX - 1}" height="{_CELL_PX - 1}"'
            )
            drawn.append(f'<rect class="{kind}" {place} fill-opacity="{alpha:.2f}"/>')
            drawn.append(svg.text(at + _CELL_PX / 2, middle + 4, text, anchor="middle") if text else "")
    for x, column in enumerate(columns):
        at = left + _CELL_PX * (x + 0.5) + 4
        drawn.append(
            f'<g transform="translate({svg.px(at)} {svg.px(top - 6)}) rotate(-90)">{svg.text(0, 0, column)}</g>'
        )
    drawn.append(svg.text(left, height - 8, note, soft=True))
    size = f'viewBox="0 0 {svg.px(width)} {svg.px(height)}" width="{svg.px(width)}" height="{svg.px(height)}"'
    return svg.as_file(f"<svg {size}>{''.join(drawn)}</svg>")


def smooth(values: Sequence[float], span: float = 0.04) -> list[float]:
    """Mean over a centred window of `span` of the run; at its ends, the window is cut."""
    half = round(span * len(values) / 2)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


# --- how it is drawn --------------------------------------------------------------------------------------------------


def _draw(chart: Chart, width: int, height: int) -> str:
    size = (width, height)
    x_range = chart.x_range or svg.value_range([x for one in chart.series for x, _ in svg.finite(one.points)])
    y_range = chart.y_range or svg.range_from_zero([y for one in chart.series for _, y in svg.finite(one.points)])
    x_values = svg.round_ticks(*x_range, most=svg.tick_count(width))
    x_values = [tick for tick in x_values if tick == int(tick)] if chart.whole_x else x_values
    x_ticks = [(tick, svg.tick_text(tick)) for tick in x_values]
    y_ticks = [
        (tick, f"{100 * tick:.4g} %" if chart.percent else svg.tick_text(tick))
        for tick in svg.round_ticks(*y_range, most=5)
    ]
    named = [(one.name, functools.partial(_swatch, one)) for one in chart.series if one.mark != "faint"]
    legend, legend_px = svg.draw_legend(named, width)
    frame = svg.frame_within(size, legend_px, y_ticks, (x_range, y_range))
    parts = [
        legend,
        svg.draw_axes(frame, size, legend_px, (x_ticks, y_ticks), (chart.x_label, chart.y_label)),
        *(_series(one, frame) for one in chart.series),
        f'<path class="cursor" d="M0 {svg.px(frame.top)}v{svg.px(frame.height)}"/>',
    ]
    box = ",".join(f"{number:.8g}" for number in (frame.left, frame.width, *x_range))
    place = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {place} role="img" aria-label="{svg.escaped(chart.summary)}" data-box="{box}">{"".join(parts)}</svg>'


def _series(one: Series, frame: Frame) -> str:
    colour = one.colour % COLOURS
    # Points are all shown: those of a line can be left out because their neighbours tell where it goes.
    chosen = svg.finite(one.points) if one.mark == "points" else svg.thinned(svg.finite(one.points))
    places = [frame.at(point) for point in chosen]
    if one.mark == "bars":
        # Bars stand evenly, so that the least distance is that of neighbours, also where one between them is missing.
        between = [b[0] - a[0] for a, b in itertools.pairwise(places)]
        wide, bottom = 0.8 * min([*between, frame.width / 10]), frame.bottom
        return "".join(
            f'<rect class="bars f{colour}" x="{svg.px(x - wide / 2)}" y="{svg.px(y)}" width="{svg.px(wide)}"'
            f' height="{svg.px(bottom - y)}"/>'
            for x, y in places
        )
    if one.mark == "points":
        return "".join(
            f'<circle class="points f{colour}" cx="{svg.px(x)}" cy="{svg.px(y)}" r="3.2"/>' for x, y in places
        )
    line = svg.line_through(places)
    path = (
        f'<path class="{"line" if one.mark == "dots" else one.mark} c{colour}" d="{line}"/>' if len(places) > 1 else ""
    )
    dotted = one.mark == "dots" or (len(places) == 1 and one.mark != "faint")
    dots = (
        [f'<circle class="f{colour}" cx="{svg.px(x)}" cy="{svg.px(y)}" r="3.2"/>' for x, y in places] if dotted else []
    )
    return path + "".join(dots)


def _swatch(one: Series, x: float, y: int) -> str:
    colour = one.colour % COLOURS
    if one.mark == "bars":
        return f'<rect class="bars f{colour}" x="{svg.px(x)}" y="{y - 5}" width="{svg.SWATCH_LINE_PX}" height="10"/>'
    if one.mark == "points":
        return f'<circle class="points f{colour}" cx="{svg.px(x + 8)}" cy="{y}" r="3.2"/>'
    shown = "line" if one.mark == "dots" else one.mark
    line = f'<path class="{shown} c{colour}" d="M{svg.px(x)} {y}h{svg.SWATCH_LINE_PX}"/>'
    return line + (f'<circle class="f{colour}" cx="{svg.px(x + 8)}" cy="{y}" r="3.2"/>' if one.mark == "dots" else "")


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")
