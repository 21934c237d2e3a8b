"""Plots of scaling studies: a point for each training run, with a card.

A point may also be the mean of several runs. All is drawn here: the page's script only shows the card of a point where one
points, focuses or taps, and moves the focus.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import markupsafe

from vitlab.report import svg
from vitlab.report.svg import COLOURS, Frame, Point, Tick

NO_RUNS = "no runs yet"
# One for each colour, for readers who cannot tell these apart; each covers some 70 square pixels.
_MARKERS = (
    "M-4.8 0a4.8 4.8 0 1 0 9.6 0a4.8 4.8 0 1 0-9.6 0z",  # disc
    "M-4.2-4.2h8.4v8.4h-8.4z",  # square
    "M0-7.2 6.2 3.6h-12.4z",  # triangle
    "M0-6 6 0 0 6-6 0z",  # diamond
    "M0 7.2 6.2-3.6h-12.4z",  # triangle that points down
    "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",  # plus
    "M0-2.6 3.4-6 6-3.4 2.6 0 6 3.4 3.4 6 0 2.6-3.4 6-6 3.4-2.6 0-6-3.4-3.4-6z",  # cross
    "M0-7 1.9-2.6 6.7-2.2 3 1 4.1 5.7 0 3.2-4.1 5.7-3 1-6.7-2.2-1.9-2.6z",  # star
)
_SHARED_MARKER = (
    '<path class="marker hollow ink" d="M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0z"/>'  # a ring in no series' colour
)
_SHARED = "on several lines"
_EMPTY_PX = 96  # height of a plot without points: a sentence needs no more
_HALO_PX = 11  # radius of the ring round the point whose card is shown
_SWATCH_PX = 26  # of a line in the legend, seen on both sides of a marker
_CAP_PX = 4  # from the middle of a whisker to the end of its cap
_MARGIN = 0.04  # of the axis, between its ends and the outermost points, so that markers stay clear of the edges
_MOST_LOG_TICKS = 12  # four decades of 1, 2 and 5
_FEW_PLACES, _LONGEST_NUMBER = 6, 7  # where the axis has ticks where the points are: how many places, how many letters
_Y_TICKS, _Y_LOG_TICKS = 6, 9  # fewer where steps are even: one reads between them
_MOST_SPOKEN = 8  # values of a series that a summary lists
_MOST_LINES = 5  # of a name under the axis; more would be higher than a slanted one
_BETWEEN_PX = 2  # names in lines, at least: most letters are narrower than is reckoned with
_LONGEST_NAME_PX = 135  # of a category that is slanted under the axis; the card has the whole name
_BESIDE = 0.12  # of a category: how far apart the points of several series stand there
_ASIDE_PX = 8  # between series whose intervals overlap, or whose points would hide each other
_MARKER_PX = 10  # high
_NEAR = 0.04  # of the upright axis: points of a series that are so close at a name hide each other
_FAN = 0.05  # of a category: how far these part
_NAMES_OWN = 0.8  # of a category: what many of them fill
_CURVE_PX, _CURVE_POINTS = (300, 56), 120  # of the small training curve, in a card of 20 rem
_FILE_STYLE = (
    ".solid{stroke:$paper;stroke-width:1.5}.hollow{fill:$paper;stroke-width:2}.whisker{fill:none;stroke-width:1.5}"
    ".ink{stroke:$ink}"
)

_Key = tuple[float, float, str]  # x, y and the name of a point


@dataclasses.dataclass(frozen=True)
class PlotPoint:
    """A run, or the mean of some: where it stands, and what its card holds."""

    x: float
    y: float
    name: str  # heading of the card
    interval: tuple[float, float] | None = None  # drawn as a whisker
    facts: Sequence[tuple[str, str]] = ()  # rows of the card
    curve: Sequence[tuple[float, float]] = ()  # (step, loss) of training, drawn small in the card
    command: str = ""  # in the card, to be copied

    @property
    def key(self) -> _Key:
        """What it has in common with itself in another series."""
        return self.x, self.y, self.name

    @property
    def ends(self) -> tuple[float, float] | None:
        """The interval, unless an end of it is not a number."""
        return self.interval if self.interval and all(map(math.isfinite, self.interval)) else None


@dataclasses.dataclass(frozen=True)
class PlotSeries:
    """Points of one kind, in the order in which a line joins them.

    `colour` counts the colours of the style sheet.
    """

    name: str
    points: Sequence[PlotPoint]
    colour: int = 0
    joined: bool = True  # a line through the points
    kind: Literal["runs", "fit", "front"] = "runs"  # what is computed from runs is dashed, without markers and cards
    hollow: bool = False  # for the paper's numbers or single-seed values
    note: str = ""  # behind the name in the legend

    @property
    def has_runs(self) -> bool:
        return self.kind == "runs"

    @property
    def label(self) -> str:
        """The name with what is noted of it."""
        return f"{self.name}: {self.note}" if self.note else self.name

    @property
    def css(self) -> str:
        return str(self.colour % COLOURS)


@dataclasses.dataclass(frozen=True)
class PlotCard:
    """What the page shows of a point.

    Its index in `Plot.cards` is the number that the point has in the drawing.
    """

    name: str
    series: str
    marker: markupsafe.Markup
    value: str
    facts: Sequence[tuple[str, str]]
    curve: markupsafe.Markup  # empty if there is none
    curve_note: str
    command: str


@dataclasses.dataclass(frozen=True)
class Plot:
    """Runs over two axes, each with a card.

    Points that have no place on an axis are left out: NaN, infinity, and zero or less on a log axis.
    """

    title: str
    caption: str
    series: Sequence[PlotSeries]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    percent: bool = False  # y values are shares, shown in per cent
    percent_unit: str = "%"  # "points" for differences of shares, whose ticks are bare numbers
    categories: Sequence[str] = ()  # x is 0, 1, 2, ...: names instead of numbers on the axis
    from_zero: bool = False  # the upright axis, even where all points lie far above
    wide: bool = False

    @property
    def shown(self) -> list[PlotSeries]:
        """The series as they are drawn, with the points that have a place, side by side at names."""
        kept = [dataclasses.replace(one, points=[p for p in one.points if self._has_place(p)]) for one in self.series]
        kept = [one for one in kept if one.points]
        return _spread(kept, self) if self.categories else kept

    @property
    def cards(self) -> list[PlotCard]:
        shared = self.shared
        return [self._card(one, point, shared) for one in self.shown if one.has_runs for point in one.points]

    @property
    def shared(self) -> dict[_Key, list[str]]:
        """The points that several series have, by their keys, with the names of these series."""
        names: dict[_Key, list[str]] = {}
        for one in self.shown:
            for point in one.points if one.has_runs else ():
                names.setdefault(point.key, []).append(one.name)
        return {key: those for key, those in names.items() if len(those) > 1}

    @property
    def summary(self) -> str:
        """The plot in words, for whoever cannot see it."""
        parts = [self._summary(one) for one in self.shown]
        return f"{self.title}: {self.y_label} over {self.x_label}; {', '.join(parts) or NO_RUNS}"

    def value(self, point: PlotPoint) -> str:
        """The point's value with its interval, such as 45.2 % (44.0 to 46.1)."""
        ends = point.ends
        between = f" ({self._number(ends[0])} to {self._number(ends[1])})" if ends else ""
        return self._number(point.y) + (f" {self.percent_unit}" if self.percent else "") + between

    def draw(self, width: int, height: int) -> str:
        """The plot as an SVG element for a page, whose points can be focused."""
        return _draw(self, (width, height), on_page=True)

    def file(self) -> bytes:
        """The plot as an SVG file, whose points have their names as titles."""
        size = svg.FILE_SIZE if self.wide else svg.HALF_FILE_SIZE
        return svg.as_file(_draw(self, size, on_page=False), _FILE_STYLE)

    def place(self, x: float, y: float) -> Point:
        """Values as the axes count them."""
        return math.log10(x) if self.log_x else x, math.log10(y) if self.log_y else y

    def _has_place(self, point: PlotPoint) -> bool:
        return all(
            math.isfinite(value) and (value > 0 or not log)
            for value, log in ((point.x, self.log_x), (point.y, self.log_y))
        )

    def _number(self, y: float) -> str:
        if self.percent:
            return f"{100 * y:.1f}"
        return f"{y:,.0f}" if abs(y) >= 1000 else f"{y:.4g}"  # four digits either way

    def _x_text(self, x: float) -> str:
        k = round(x)  # points of several series stand beside the middle
        return self.categories[k] if 0 <= k < len(self.categories) else svg.tick_text(x)

    def _summary(self, one: PlotSeries) -> str:
        lists = bool(self.categories) and len(one.points) <= _MOST_SPOKEN  # names have no order to go along
        points = one.points if lists or len(one.points) == 1 else (one.points[0], one.points[-1])
        values = [f"{self.value(point)} at {self._x_text(point.x)}" for point in points]
        if lists or len(values) == 1:
            return f"{one.label} is {', '.join(values)}"
        return f"{one.label} goes from {values[0]} to {values[1]}"

    def _card(self, one: PlotSeries, point: PlotPoint, shared: Mapping[_Key, list[str]]) -> PlotCard:
        curve, note = _small_curve(point.curve, one.css)
        drawn = _SHARED_MARKER if point.key in shared else _marker(one)
        marker = f'<svg viewBox="-8 -8 16 16" width="16" height="16" aria-hidden="true">{drawn}</svg>'
        return PlotCard(
            point.name,
            ", ".join(shared.get(point.key, [one.name])),
            markupsafe.Markup(marker),
            self.value(point),
            point.facts,
            markupsafe.Markup(curve),
            note,
            point.command,
        )


def _spread(series: Sequence[PlotSeries], plot: Plot) -> list[PlotSeries]:
    """Series over categories with their points beside each other: around the middle of each, those that have any there."""
    low, high = _y_range(plot, series) if series else (0.0, 1.0)
    near = _NEAR * (high - low)
    at: dict[float, list[int]] = {}
    for number, one in enumerate(series):
        for x in {point.x for point in one.points}:
            at.setdefault(x, []).append(number)
    return [
        dataclasses.replace(
            one,
            points=[
                dataclasses.replace(point, x=point.x + _shift(at[point.x], number) + aside)
                for point, aside in zip(one.points, _fanned(one.points, plot, near), strict=True)
            ],
        )
        for number, one in enumerate(series)
    ]


def _fanned(points: Sequence[PlotPoint], plot: Plot, near: float) -> list[float]:
    """How far each point of a series stands aside of the next one at the same name, which it would hide otherwise."""
    asides, before = [0.0] * len(points), None
    heights = [plot.place(point.x, point.y)[1] for point in points]
    for k in sorted(range(len(points)), key=lambda k: (points[k].x, heights[k])):
        if before is not None and points[before].x == points[k].x and heights[k] - heights[before] < near:
            asides[k] = -_FAN if asides[before] > 0 else _FAN
        before = k
    return asides


def _shift(there: Sequence[int], number: int) -> float:
    step = min(_BESIDE, _NAMES_OWN / len(there))
    return step * (there.index(number) - (len(there) - 1) / 2)


# --- how it is drawn --------------------------------------------------------------------------------------------------


def _draw(plot: Plot, size: tuple[int, int], on_page: bool) -> str:
    shown = plot.shown
    width, height = size = size if shown else (size[0], _EMPTY_PX)
    start = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-label="{svg.escaped(plot.summary)}"'
    if not shown:
        middle = svg.text(width / 2, height / 2, NO_RUNS, anchor="middle", soft=True)
        edge = (
            f'<path class="axis" fill="none" stroke-dasharray="2 4" d="M1 1h{width - 2}v{height - 2}h-{width - 2}z"/>'
        )
        return f'{start} role="img">{edge}{middle}</svg>'
    shared = plot.shared
    named: list[tuple[str, Callable[[float, int], str]]]
    named = [(one.label, functools.partial(_swatch, one)) for one in shown]
    if shared:
        named.append((_SHARED, lambda x, y: _at(x + _SWATCH_PX / 2, y, _SHARED_MARKER)))
    legend, legend_px = svg.draw_legend(named, width, _SWATCH_PX, alone=any(one.note for one in shown))
    ranges = _x_range(plot, shown), _y_range(plot, shown)
    y_ticks = _y_ticks(plot, ranges[1])
    frame = svg.frame_within(size, legend_px, y_ticks, ranges)
    names = _wrapped(plot.categories, frame.width)
    slanted = not names and bool(plot.categories)
    if slanted:
        names = [svg.shortened(name, _LONGEST_NAME_PX) for name in plot.categories]
    more_px = svg.slanted_px(names) if slanted else svg.LINE_PX * max((name.count("\n") for name in names), default=0)
    frame = svg.frame_within(size, legend_px, y_ticks, ranges, svg.BELOW_PX + more_px)
    ticks = _x_ticks(plot, frame, names, width, slanted), y_ticks
    axes = svg.draw_axes(frame, size, legend_px, ticks, (plot.x_label, plot.y_label), slanted)
    asides = (
        [0.0] * len(shown) if shared else _asides(plot, shown, frame)
    )  # what several lines share stands at one place
    placed = [(one, dataclasses.replace(frame, left=frame.left + px)) for one, px in zip(shown, asides, strict=True)]
    behind = [part for one, at in placed for part in (_line(plot, one, at), *_whiskers(plot, one, at, shared))]
    numbers = itertools.count()  # of the cards
    points = [_points(plot, one, at, shared, numbers if on_page else None) for one, at in placed if one.has_runs]
    # Screen readers read the summary and then the points; ticks and legend between them would only be in the way.
    hidden, role = (' aria-hidden="true"', "group") if on_page else ("", "img")
    return f'{start} role="{role}"><g{hidden}>{legend}{axes}{"".join(behind)}</g>{"".join(points)}</svg>'


def _asides(plot: Plot, shown: Sequence[PlotSeries], frame: Frame) -> list[float]:
    """How many pixels each series stands aside, so that what overlaps at one x is seen beside each other."""

    def collide(a: PlotPoint, b: PlotPoint) -> bool:
        if a.x != b.x:
            return False
        if a.ends and b.ends and a.ends[0] <= b.ends[1] and b.ends[0] <= a.ends[1]:
            return True
        (_, a_px), (_, b_px) = (frame.at(plot.place(point.x, point.y)) for point in (a, b))
        return abs(a_px - b_px) < _MARKER_PX

    crowded = sorted(
        {
            number
            for (i, one), (j, other) in itertools.combinations(enumerate(shown), 2)
            for a, b in itertools.product(one.points, other.points)
            if one.has_runs and other.has_runs and collide(a, b)
            for number in (i, j)
        }
    )
    aside = {number: _ASIDE_PX * (k - (len(crowded) - 1) / 2) for k, number in enumerate(crowded)}
    return [aside.get(number, 0.0) for number in range(len(shown))]


def _x_range(plot: Plot, shown: Sequence[PlotSeries]) -> Point:
    if plot.categories:
        return -0.5, len(plot.categories) - 0.5
    return _with_margin([plot.place(point.x, point.y)[0] for one in shown for point in one.points])


def _y_range(plot: Plot, shown: Sequence[PlotSeries]) -> Point:
    points = [point for one in shown for point in one.points]
    ends = [end for point in points for end in (point.y, *(point.ends or ()))]
    if plot.log_y:
        return _with_margin([math.log10(end) for end in ends if end > 0])
    return svg.range_from_zero([*ends, 0.0] if plot.from_zero else ends)


def _with_margin(values: Sequence[float]) -> Point:
    low, high = svg.value_range(values)
    return low - _MARGIN * (high - low), high + _MARGIN * (high - low)


def _wrapped(names: Sequence[str], width_px: float) -> list[str]:
    """Names in lines that fit beside each other; empty where they do not, or would be too high."""
    most = int((width_px / max(len(names), 1) - _BETWEEN_PX) / svg.LETTER_PX)
    lines = [svg.wrapped(name, most, len, split_words=False) for name in names]
    fit = all(len(one) <= _MOST_LINES and max(map(len, one)) <= most for one in lines)
    return ["\n".join(one) for one in lines] if fit else []


def _x_ticks(plot: Plot, frame: Frame, names: Sequence[str], width: int, slanted: bool) -> list[Tick]:
    if names:
        return [
            (k, svg.shortened(name, svg.slanted_room_px(frame, k)) if slanted else name) for k, name in enumerate(names)
        ]
    choices = [*_places_as_ticks(plot), *_round_x_ticks(plot, frame, width)]
    return next((ticks for ticks in choices if svg.are_apart(ticks, frame, width)), choices[-1][:1])


def _places_as_ticks(plot: Plot) -> list[list[Tick]]:
    """Ticks where the points are, if these are few places with short numbers."""
    places = sorted({point.x for one in plot.shown if one.has_runs for point in one.points})
    texts = svg.exact_texts(places)
    if len(places) > _FEW_PLACES or max(map(len, texts), default=0) > _LONGEST_NUMBER:
        return []
    return [[(plot.place(x, 1)[0], label) for x, label in zip(places, texts, strict=True)]]


def _round_x_ticks(plot: Plot, frame: Frame, width: int) -> list[list[Tick]]:
    """Ticks at round numbers: as many as are wanted, and ever fewer."""
    if plot.log_x:
        ranges = [svg.log_ticks(*_powers(frame.x_range), most) for most in range(_MOST_LOG_TICKS, 1, -1)]
        return [list(zip(map(math.log10, values), svg.short_texts(values), strict=True)) for values in ranges]
    ranges = [svg.round_ticks(*frame.x_range, most) for most in range(svg.tick_count(width), 1, -1)]
    return [[(value, svg.tick_text(value)) for value in values] for values in ranges]


def _y_ticks(plot: Plot, y_range: Point) -> list[Tick]:
    if plot.log_y:
        values = svg.log_ticks(*_powers(y_range), most=_Y_LOG_TICKS)
        return list(zip(map(math.log10, values), _y_texts(plot, values), strict=True))
    values = svg.round_ticks(*y_range, most=_Y_TICKS)
    return list(zip(values, _y_texts(plot, values), strict=True))


def _y_texts(plot: Plot, values: Sequence[float]) -> list[str]:
    unit = " %" if plot.percent_unit == "%" else ""
    return [f"{100 * value:.4g}{unit}" for value in values] if plot.percent else svg.short_texts(values)


def _powers(log_range: Point) -> Point:
    return 10 ** log_range[0], 10 ** log_range[1]


def _line(plot: Plot, one: PlotSeries, frame: Frame) -> str:
    if not one.joined or len(one.points) < 2:
        return ""
    line = svg.line_through([frame.at(plot.place(point.x, point.y)) for point in one.points])
    return f'<path class="{"line" if one.has_runs else "dashed"} c{one.css}" d="{line}"/>'


def _whiskers(plot: Plot, one: PlotSeries, frame: Frame, shared: Collection[_Key]) -> list[str]:
    drawn: list[str] = []
    for point in one.points:
        low, high = point.ends or (math.nan, math.nan)
        if math.isnan(high) or (plot.log_y and high <= 0):
            continue
        x, top = frame.at(plot.place(point.x, high))
        # On a log axis there is no zero: the whisker leaves the plot, and has no cap.
        ends_inside = low > 0 or not plot.log_y
        bottom = frame.at(plot.place(point.x, low))[1] if ends_inside else frame.bottom
        caps = [f"M{svg.px(x - _CAP_PX)} {svg.px(y)}h{2 * _CAP_PX}" for y in (top, bottom)[: 1 + ends_inside]]
        path = f"M{svg.px(x)} {svg.px(top)}V{svg.px(bottom)}{''.join(caps)}"
        colour = "ink" if point.key in shared else f"c{one.css}"
        drawn.append(f'<path class="whisker {colour}" d="{path}"/>')
    return drawn


def _points(
    plot: Plot,
    one: PlotSeries,
    frame: Frame,
    shared: Collection[_Key],
    numbers: "itertools.count[int] | None",
) -> str:
    """The markers of a series.

    With numbers for their cards they can be focused: the first by the tab key, the others from there by arrow keys.
    """
    drawn: list[str] = []
    for k, point in enumerate(one.points):
        x, y = frame.at(plot.place(point.x, point.y))
        at, name = f'transform="translate({svg.px(x)} {svg.px(y)})"', svg.escaped(f"{point.name}: {plot.value(point)}")
        marker = _SHARED_MARKER if point.key in shared else _marker(one)
        if numbers is None:
            drawn.append(f"<g {at}><title>{name}</title>{marker}</g>")
        else:
            attributes = f'data-card="{next(numbers)}" role="button" tabindex="{-1 if k else 0}" aria-label="{name}"'
            halo = f'<circle class="halo" r="{_HALO_PX}"/>'
            drawn.append(f'<g class="point" {at} {attributes}>{halo}{marker}</g>')
    name = "" if numbers is None else f' class="series" role="group" aria-label="{svg.escaped(one.name)}"'
    return f"<g{name}>{''.join(drawn)}</g>"


def _marker(one: PlotSeries) -> str:
    kind = f"hollow c{one.css}" if one.hollow else f"f{one.css} solid"
    return f'<path class="marker {kind}" d="{_MARKERS[one.colour % len(_MARKERS)]}"/>'


def _swatch(one: PlotSeries, x: float, y: int) -> str:
    line = f'<path class="{"line" if one.has_runs else "dashed"} c{one.css}" d="M{svg.px(x)} {y}h{_SWATCH_PX}"/>'
    return (line if one.joined else "") + (_at(x + _SWATCH_PX / 2, y, _marker(one)) if one.has_runs else "")


def _at(x: float, y: float, marker: str) -> str:
    return f'<g transform="translate({svg.px(x)} {svg.px(y)})">{marker}</g>'


def _small_curve(curve: Sequence[Point], css: str) -> tuple[str, str]:
    """The training curve for a card, and its ends in words; empty without two points."""
    points = svg.finite(curve)
    if len(points) < 2:
        return "", ""
    (width, height), room = _CURVE_PX, 4  # at the edges, for half the line and the dot at its end
    ranges = svg.value_range([x for x, _ in points]), svg.value_range([y for _, y in points])
    frame = Frame(room, room, width - 2 * room, height - 2 * room, *ranges)
    places = [frame.at(point) for point in svg.thinned(points, _CURVE_POINTS)]
    note = f"training loss {points[0][1]:.3g} to {points[-1][1]:.3g} in {points[-1][0]:,.0f} steps"
    floor = f'<path class="grid" d="M0 {height - 1}h{width}"/>'
    line = f'<path class="line c{css}" d="{svg.line_through(places)}"/>'
    end = f'<circle class="f{css}" cx="{svg.px(places[-1][0])}" cy="{svg.px(places[-1][1])}" r="3"/>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{svg.escaped(note)}">{floor}{line}{end}</svg>', note
