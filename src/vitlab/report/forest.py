"""Forest plots: a number with its interval, beside the range in which a claim says that it lies.

Each row has an axis of its own, since claims are about points, ratios and exponents alike.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from vitlab.report import svg

_STRIP_PX, _FLOOR_PX = (320, 46), 27  # size of a strip; from its top to its axis
_WHISKER_PX, _SEEDS_PX, _DOT_PX = 10, 20, 3.2  # from its top to the interval, and to the seeds below; their radius
_MARGIN = 0.1  # of the axis, between its ends and what is drawn
_CAP_PX = 5  # from the middle of a whisker to the end of its cap
_APART_PX = 4  # two labels, at least
_TICKS = 5  # round numbers along the axis, at most about as many
_LABEL_PX, _GAP_PX, _NUMBER_PX = 400, 12, 250  # columns of a drawing of many, and between them
_PAD_PX = 6  # above and below a row
_FILE_STYLE = (
    ".head text,.said text{font-weight:600}.zone{fill:$good;opacity:.16}.border{stroke:$good;stroke-width:1.5}"
    ".mark{fill:$soft;stroke:$soft}.mark.yes{fill:$good;stroke:$good}.mark.no{fill:$bad;stroke:$bad}"
    ".mark .seed{stroke:none;opacity:.45}.mark .mean{stroke-width:3}.mark .whisker{fill:none;stroke-width:2}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strip:
    """One number: its mean, its interval, the seeds behind it, and between which borders the claim says it lies."""

    mean: float
    interval: tuple[float, float] | None
    seeds: Sequence[float]
    low: float | None = None  # None where there is no such border
    high: float | None = None
    log: bool = False  # ratios: half is as far from one as double; where all that is shown is above 0
    unit: str = ""  # behind the borders: " points", " %"
    beside: Sequence["Strip"] = ()  # others of the same claim, which have its axis
    good: bool | None = None  # green, red or grey

    def draw(self) -> str:
        """An SVG element for a page. The sentence beside it says the same, so screen readers pass over the drawing."""
        width, height = _STRIP_PX
        start = (
            f'<svg class="strip" viewBox="0 0 {width} {height}" width="{width}" height="{height}" aria-hidden="true">'
        )
        return f"{start}{self.parts()}</svg>"

    def parts(self) -> str:
        """What is drawn, with the strip's corner at the origin."""
        width, middle, (at, ticks) = _STRIP_PX[0], _WHISKER_PX, self._axis()
        left, right = (0 if self.low is None else at(self.low)), (width if self.high is None else at(self.high))
        parts = [
            f'<rect class="zone" x="{svg.px(left)}" y="1" width="{svg.px(right - left)}" height="{_FLOOR_PX - 1}"/>'
        ]
        parts.append(f'<path class="axis" d="M0 {_FLOOR_PX}h{width}"/>')
        for border, (x, anchor) in zip(self._borders(), self._labels(at), strict=True):
            parts.append(f'<path class="border" d="M{svg.px(at(border))} 1V{_FLOOR_PX + 3}"/>')
            parts.append(svg.text(x, _FLOOR_PX + 14, self._written(border), anchor=anchor, soft=True))
        taken = [
            _span(x, self._written(border), anchor)
            for border, (x, anchor) in zip(self._borders(), self._labels(at), strict=True)
        ]
        for tick in ticks:
            x, label = at(tick), svg.tick_text(tick)
            parts.append(f'<path class="axis" d="M{svg.px(x)} {_FLOOR_PX}v3"/>')
            left, right = _span(x, label, "middle")
            if left >= 0 and right <= width and all(right + _APART_PX < a or b + _APART_PX < left for a, b in taken):
                taken.append((left, right))
                parts.append(svg.text(x, _FLOOR_PX + 14, label, anchor="middle", soft=True))
        marks = [f'<circle class="seed" cx="{svg.px(at(one))}" cy="{_SEEDS_PX}" r="{_DOT_PX}"/>' for one in self.seeds]
        if self.interval is not None:
            low, high = (svg.px(at(end)) for end in self.interval)
            caps = "".join(f"M{x} {svg.px(middle - _CAP_PX)}v{2 * _CAP_PX}" for x in (low, high))
            marks.append(f'<path class="whisker" d="M{low} {middle}H{high}{caps}"/>')
        tick = f"M{svg.px(at(self.mean))} {svg.px(middle - _CAP_PX - 2)}v{2 * _CAP_PX + 4}"
        kind = {True: " yes", False: " no", None: ""}[self.good]
        return f'{"".join(parts)}<g class="mark{kind}">{"".join(marks)}<path class="mean" d="{tick}"/></g>'

    def _written(self, border: float) -> str:
        unit = self.unit.removesuffix("s") if abs(border) == 1 and self.unit.endswith("points") else self.unit
        return f"{border:g}{unit}" if border else "0"

    def _borders(self) -> list[float]:
        return [border for border in (self.low, self.high) if border is not None]

    def _labels(self, at: Callable[[float], float]) -> list[tuple[float, str]]:
        """Where the labels of the borders stand, inside the strip.

        Two lean away from each other, however close their borders are.
        """
        borders, width = self._borders(), _STRIP_PX[0]
        if len(borders) < 2:
            return [(svg.label_place(at(border), self._written(border), width), "middle") for border in borders]
        left_px, right_px = (svg.text_px(self._written(border)) for border in borders)
        left = max(at(borders[0]), left_px)
        right = min(max(at(borders[1]), left + _APART_PX), width - right_px)
        return [(min(left, right - _APART_PX), "end"), (right, "start")]

    def _shown(self) -> list[float]:
        return [self.mean, *self.seeds, *(self.interval or ()), *self._borders()]

    def _axis(self) -> tuple[Callable[[float], float], list[float]]:
        """Where a number lies, so that all that is drawn has its place on the strip; and round numbers along it."""
        shown = [value for one in (self, *self.beside) for value in one._shown()]
        by_logarithm = self.log and min(shown) > 0
        place = math.log if by_logarithm else float
        low, high = svg.value_range([place(one) for one in shown])
        room = _MARGIN * (high - low)
        low, high = low - room, high + room
        ticks: list[float] = []
        if math.isfinite(low) and math.isfinite(high):
            ends = (math.exp(low), math.exp(high)) if by_logarithm else (low, high)
            ticks = (svg.log_ticks if by_logarithm else svg.round_ticks)(*ends, _TICKS)
        return lambda value: _STRIP_PX[0] * (place(value) - low) / (high - low), ticks


def _span(x: float, label: str, anchor: str) -> tuple[float, float]:
    """From where to where a label goes."""
    wide = svg.text_px(label)
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * wide
    return left, left + wide


@dataclasses.dataclass(frozen=True)
class ForestRow:
    """What was claimed, whether it holds, and for each number what it came to, with its strip where it was measured."""

    says: str
    verdict: str
    numbers: Sequence[tuple[str, Strip | None]]


def draw_forest(title: str, groups: Sequence[tuple[str, Sequence[ForestRow]]]) -> bytes:
    """Claims below each other as an SVG file: what is said, the strip, the number."""
    strip_px, line_px = _STRIP_PX[0], _STRIP_PX[1] + _PAD_PX
    width = _LABEL_PX + strip_px + _NUMBER_PX + 2 * _GAP_PX
    parts: list[str] = []
    y = _PAD_PX
    for name, rows in groups:
        parts.append(f'<g class="head">{svg.text(0, y + svg.LINE_PX, name)}</g>')
        y += svg.LINE_PX + 2 * _PAD_PX
        for row in rows:
            lines = svg.wrapped(row.says, _LABEL_PX)
            for number, line in enumerate(lines):
                parts.append(svg.text(0, y + _PAD_PX + 13 + number * svg.LINE_PX, line))
            said = svg.text(0, y + _PAD_PX + 13 + len(lines) * svg.LINE_PX, row.verdict)
            parts.append(f'<g class="said">{said}</g>')
            top = y + _PAD_PX
            for text, strip in row.numbers:
                if strip is not None:
                    parts.append(f'<g transform="translate({_LABEL_PX + _GAP_PX} {top})">{strip.parts()}</g>')
                words = svg.wrapped(text, _NUMBER_PX)  # why there is none may be long
                for number, line in enumerate(words):
                    place = top + _WHISKER_PX + 4 + number * svg.LINE_PX
                    parts.append(svg.text(_LABEL_PX + strip_px + 2 * _GAP_PX, place, line))
                top += max(line_px, len(words) * svg.LINE_PX)
            y = max(y + (len(lines) + 1) * svg.LINE_PX, top - _PAD_PX) + 2 * _PAD_PX
            parts.append(f'<path class="grid" d="M0 {y}h{width}"/>')
        y += 2 * _PAD_PX
    start = f'<svg viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img" aria-label="{svg.escaped(title)}"'
    return svg.as_file(f"{start}>{''.join(parts)}</svg>", _FILE_STYLE)
