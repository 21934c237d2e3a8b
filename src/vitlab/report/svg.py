"""Parts of SVG drawings: axes with round ticks, a legend, text, files.

Written by hand: small, the same bytes every time, and in the colours of the page around them. A drawing on a page has
classes, and the page's style sheet gives them colours in light and in dark. As a file of its own it carries a style sheet
with the same colours as numbers, since few programs outside browsers know variables; those that know no dark mode show light.
"""

import dataclasses
import itertools
import math
import re
import string
from collections.abc import Callable, Sequence
from html import escape

Point = tuple[float, float]
Tick = tuple[float, str]  # a value and its label

COLOURS = 8  # in the style sheets; a ninth series has the first again
# The variables of the page's style sheet; colours of series are far apart also for colour-blind readers.
LIGHT = {
    **{"ink": "#1b2430", "soft": "#52606d", "line": "#dfe5ec", "paper": "#fff", "inset": "#f1f4f8"},
    **{"good": "#15803d", "bad": "#c2410c"},
    **{"c0": "#1438da", "c1": "#c42e0a", "c2": "#088677", "c3": "#7c2b90"},
    **{"c4": "#e84abd", "c5": "#2f8ff5", "c6": "#a98d08", "c7": "#3a353e"},
}
DARK = {
    **{"ink": "#e6eaf0", "soft": "#a3afbd", "line": "#2c3541", "paper": "#171d26", "inset": "#212935"},
    **{"good": "#4ade80", "bad": "#fb923c"},
    **{"c0": "#1f74fb", "c1": "#de5320", "c2": "#45d78a", "c3": "#bfb1ff"},
    **{"c4": "#e477b2", "c5": "#afe3dd", "c6": "#ecac12", "c7": "#847972"},
}
FILE_SIZE = (640, 360)  # of a drawing as a file, in pixels
HALF_FILE_SIZE = (480, 340)  # of one that stands beside another: smaller, so that its letters are larger there
LETTER_PX, LINE_PX = 6.7, 18  # of a letter: the mean width in a sans-serif font; and from line to line
_WIDTHS_PX = (
    ("fijlrtI.,:;'|()[]/- ", 4.4),
    (string.ascii_uppercase, 8.8),
    ("mw%@…—∝", 11.5),
)  # of letters that differ from most
_OTHER_PX = 7.5
MOST_POINTS = 300  # of a line: as many as a screen can show apart
SWATCH_LINE_PX = 16  # of a line in the legend, unless markers hide most of it
BELOW_PX = 2 * LINE_PX + 4  # under the axis: its numbers, and what it counts
_LEGEND_LINES, _LONGEST_NAME = 3, 300  # of a name in the legend: lines, and letters that are looked at
_SWATCH_GAP_PX, _LEGEND_GAP_PX = 6, 14  # before a name, and after it
_TICKS_WIDE, _TICKS_NARROW, _NARROW_PX = 7, 4, 420  # phones have drawings narrower than the last
_FLAT, _ROOM = 0.7, 0.07  # share of its greatest value that a curve keeps all along; what is left free at its ends
_SLANT_DEGREES = 35  # of long names under an axis: flat enough to read
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_FILE_STYLE = (
    "text{font:12px sans-serif;fill:$ink}.soft{fill:$soft}.grid{stroke:$line}.axis{stroke:$soft}"
    ".paper{fill:$paper}.inset{fill:$inset}.good{fill:$good}.bad{fill:$bad}"
    ".line,.dashed,.faint,.guide{fill:none;stroke-width:2;stroke-linejoin:round}.faint{stroke-width:1;opacity:.3}"
    ".dashed{stroke-dasharray:6 4}.bars{opacity:.45}.points{opacity:.6}"
    ".cursor{display:none}"
    + "".join(f".c{number}{{stroke:$c{number}}}.f{number}{{fill:$c{number};stroke:none}}" for number in range(COLOURS))
    + ".guide{stroke:$soft;stroke-width:1.2;stroke-dasharray:2 4}"
)
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)" width="[\d.]+" height="[\d.]+"')
_MARGIN_PX = 10  # around a drawing on paper


@dataclasses.dataclass(frozen=True)
class Frame:
    """Where the values lie: the plot's corner and size in pixels, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_range: Point
    y_range: Point

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def at(self, point: Point) -> Point:
        y0, y1 = self.y_range
        return self.across(point[0]), self.top + self.height * (1 - (point[1] - y0) / (y1 - y0))

    def across(self, x: float) -> float:
        x0, x1 = self.x_range
        return self.left + self.width * (x - x0) / (x1 - x0)


def frame_within(
    size: tuple[int, int],
    legend_px: float,
    y_ticks: Sequence[Tick],
    ranges: tuple[Point, Point],
    below_px: float = BELOW_PX,
) -> Frame:
    """The frame in a drawing: beside the numbers of the upright axis, under the legend."""
    left = LETTER_PX * max((len(label) for _, label in y_ticks), default=1) + 10
    top = legend_px + LINE_PX + 12
    return Frame(left, top, size[0] - left - 14, size[1] - top - below_px, *ranges)


def draw_axes(
    frame: Frame,
    size: tuple[int, int],
    legend_px: float,
    ticks: tuple[Sequence[Tick], Sequence[Tick]],
    labels: tuple[str, str],
    slanted: bool = False,
) -> str:
    """Both axes with their ticks and labels, and lines behind the values.

    `slanted` is for long names on the lower one; a name may have several lines.
    """
    (x_ticks, y_ticks), width = ticks, size[0]
    parts = [text(0, legend_px + 13, labels[1], soft=True)]
    for tick, label in y_ticks:
        y = frame.at((frame.x_range[0], tick))[1]
        parts.append(f'<path class="grid" d="M{px(frame.left)} {px(y)}h{px(frame.width)}"/>')
        parts.append(text(frame.left - 6, y + 4, label, anchor="end", soft=True))
    bottom = frame.bottom
    for tick, label in x_ticks:
        x = frame.across(tick)
        parts.append(f'<path class="axis" d="M{px(x)} {px(bottom)}v4"/>')
        if slanted:
            turn = f"translate({px(x + 4)} {px(bottom + LINE_PX - 2)}) rotate(-{_SLANT_DEGREES})"
            parts.append(f'<g transform="{turn}">{text(0, 0, label, anchor="end", soft=True)}</g>')
        else:
            for line, words in enumerate(label.split("\n"), 1):
                middle = label_place(x, words, width)
                parts.append(text(middle, bottom + LINE_PX * line, words, anchor="middle", soft=True))
    parts.append(f'<path class="axis" d="M{px(frame.left)} {px(bottom)}h{px(frame.width)}"/>')
    parts.append(text(frame.left + frame.width / 2, size[1] - 4, labels[0], anchor="middle", soft=True))
    return "".join(parts)


def are_apart(ticks: Sequence[Tick], frame: Frame, width: int) -> bool:
    """Whether the labels under the axis, by rising place, have a letter's width between them."""
    places = [(label_place(frame.across(tick), label, width), text_px(label)) for tick, label in ticks]
    return all(a + (a_px + b_px) / 2 + LETTER_PX <= b for (a, a_px), (b, b_px) in itertools.pairwise(places))


def label_place(x: float, label: str, width: float) -> float:
    """The middle of a label under the axis: at its tick, unless it would leave the drawing there."""
    half = text_px(label) / 2
    return max(half, min(x, width - half))


def slanted_px(names: Sequence[str]) -> float:
    """The height that the longest of slanted names takes."""
    return max(map(text_px, names), default=0) * math.sin(math.radians(_SLANT_DEGREES))


def slanted_room_px(frame: Frame, tick: float) -> float:
    """The longest that a slanted name may be without leaving the drawing at its left."""
    return frame.across(tick) / math.cos(math.radians(_SLANT_DEGREES))


def draw_legend(
    entries: Sequence[tuple[str, Callable[[float, int], str]]],
    width: int,
    line_px: int = SWATCH_LINE_PX,
    alone: bool = False,
) -> tuple[str, int]:
    """Swatches with names, and the pixels they take; one series needs none, unless `alone`.

    An entry is a name, and what draws its swatch, `line_px` wide, with the left end at x and the middle at y.
    """
    if len(entries) < 2 and not alone:
        return "", 0
    parts, x, line, swatch_px = list[str](), 0.0, 0, line_px + _SWATCH_GAP_PX
    for name, draw_swatch in entries:
        lines = _legend_lines(name, width - swatch_px)
        takes = swatch_px + max(map(text_px, lines))
        if x and x + takes > width:
            x, line = 0.0, line + 1
        parts.append(draw_swatch(x, LINE_PX * line + 9))
        for number, words in enumerate(lines):
            parts.append(text(x + swatch_px, LINE_PX * (line + number) + 13, words))
        line += len(lines) - 1
        x += takes + _LEGEND_GAP_PX
    return "".join(parts), LINE_PX * (line + 1) + 4


def _legend_lines(name: str, room_px: float) -> list[str]:
    """A name in few lines, the last of them cut off where there are more."""
    *lines, last = wrapped(name[:_LONGEST_NAME], room_px)
    if len(lines) < _LEGEND_LINES and len(name) <= _LONGEST_NAME:
        return [*lines, last]
    kept = [*lines, last][:_LEGEND_LINES]
    return [*kept[:-1], shortened(f"{kept[-1]}…", room_px)]


def text(x: float, y: float, content: str, *, anchor: str = "", soft: bool = False) -> str:
    attributes = (' class="soft"' if soft else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{px(x)}" y="{px(y)}"{attributes}>{escaped(content)}</text>'


def escaped(content: str) -> str:
    """Text for an element or an attribute.

    Without the control characters that no XML may hold, escaped or not.
    """
    return escape("".join(letter if letter.isprintable() else " " for letter in content))


def text_px(content: str) -> float:
    """How wide a line of text is, in the widest of the usual sans-serif fonts."""
    return sum(next((px for letters, px in _WIDTHS_PX if letter in letters), _OTHER_PX) for letter in content)


def shortened(name: str, room_px: float) -> str:
    if text_px(name) <= room_px:
        return name
    return next((cut for end in range(len(name) - 1, 0, -1) if text_px(cut := name[:end] + "…") <= room_px), "…")


def wrapped(content: str, room: float, width: Callable[[str], float] = text_px, split_words: bool = True) -> list[str]:
    """Text in lines that are no wider than there is room, broken after spaces and hyphens, and within a word that is."""
    lines = [""]
    for part in re.findall(r"\S+?(?:-|\s+|$)", content):
        if lines[-1] and width((lines[-1] + part).rstrip()) > room:
            lines.append("")
        lines[-1] += part
        while split_words and width(whole := lines[-1].rstrip()) > room and len(whole) > 1:
            fits = next((end for end in range(len(whole), 1, -1) if width(whole[:end]) <= room), 1)
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return [line.rstrip() for line in lines]


def line_through(places: Sequence[Point]) -> str:
    """The data of a path."""
    return "M" + "L".join(f"{px(x)} {px(y)}" for x, y in places)


def as_file(element: str, style: str = "") -> bytes:
    """A drawing as a file of its own; `style` adds to the style sheet, and names colours as `$ink` and `$c0`.

    Paper lies behind it and a margin around it, so that it is seen on pages of any colour, light or dark.
    """
    tag, _, inside = element.removeprefix("<svg").partition(">")
    margin = _MARGIN_PX

    def widened(size: re.Match[str]) -> str:
        width, height = (px(float(number) + 2 * margin) for number in size.groups())
        return f'viewBox="-{margin} -{margin} {width} {height}" width="{width}" height="{height}"'

    start = f'<svg xmlns="http://www.w3.org/2000/svg"{_SIZE.sub(widened, tag, count=1)}>'
    paper = f'<rect class="paper" x="-{margin}" y="-{margin}" width="100%" height="100%"/>'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{start}{_style_element(style)}{paper}{inside}\n'.encode()


def _style_element(more: str) -> str:
    rules = re.findall(r"[^}]+}", _FILE_STYLE + more)
    light = string.Template("".join(rules)).substitute(LIGHT)
    dark = string.Template("".join(rule for rule in rules if "$" in rule)).substitute(DARK)
    return f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"


def value_range(values: Sequence[float]) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = max(0.5, abs(low) / 100)  # a half is nothing beside 1e17: to a double they are one number
    return (low, high) if high > low else (low - room, high + room)


def range_from_zero(values: Sequence[float]) -> Point:
    """With some room above, and below what is negative; from zero on, unless a curve would be a flat line far above it."""
    low, high = min([*values, 0.0]), max([*values, 0.0])
    if low == high:
        return 0.0, 1.0 + _ROOM
    if values and min(values) > _FLAT * high and max(values) > min(values):
        low = min(values)
    room = _ROOM * (high - low)
    return low - room if low else low, high + room


def tick_count(width: int) -> int:
    return _TICKS_NARROW if width < _NARROW_PX else _TICKS_WIDE


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round values from `low` to `high`, at most about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2 and 5 times powers of ten, at most `most` of them.

    If these are too many, the powers alone; if they are too few to read a value by, round values.
    """
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    # As text, since 10.0 ** -3 * 5 is not 0.005.
    fine = [
        value for power in range(first, last + 1) for f in (1, 2, 5) if low <= (value := float(f"{f}e{power}")) <= high
    ]
    if len(fine) <= 2:  # they do not say where the values between them are
        return round_ticks(low, high, most)
    powers = [value for value in fine if f"{value:e}"[0] == "1"]
    return fine if len(fine) <= most else powers[:: math.ceil(len(powers) / most)]


def tick_text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.4g}"


def short_text(value: float) -> str:
    """A number in few letters: 500, 1k, 2.5M; beyond the units 1e18."""
    unit, letter = next(((unit, letter) for unit, letter in _UNITS if abs(value) >= unit), (1.0, ""))
    return f"{value / unit:.4g}{letter}" if abs(value) < 1e15 else _power_text(value)


def exact_texts(values: Sequence[float]) -> list[str]:
    """Those of one axis in few letters if they say all of each: 2.5M, but 16,384."""
    return (
        short_texts(values) if all(float(f"{one:.4g}") == one for one in values) else [f"{one:,.12g}" for one in values]
    )


def short_texts(values: Sequence[float]) -> list[str]:
    """Those of one axis, all written alike: where one needs a power of ten, every one has it."""
    if any(abs(value) >= 1e15 for value in values):
        return [f"{value:.4g}" if abs(value) < 1e3 else _power_text(value) for value in values]
    return [short_text(value) for value in values]


def _power_text(value: float) -> str:
    digits, power = f"{value:.3e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Evenly chosen ones of many, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def px(value: float) -> str:
    """A coordinate: a tenth of a pixel is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")
