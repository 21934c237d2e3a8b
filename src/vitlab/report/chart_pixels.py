"""Charts as pixels, for whoever cannot use SVG: what a chart's drawing holds, painted with Pillow.

Not a renderer of SVG: it knows the few elements and classes that `charts` writes, and no others.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from PIL import Image, ImageColor, ImageDraw, ImageOps

from vitlab.inspection.canvas import font_of, spelled
from vitlab.report.charts import Chart
from vitlab.report.svg import FILE_SIZE, LIGHT, Point

_FINER = 3  # times the pixels, of which the mean is taken: smooth lines
_LETTERS_PX, _MARGIN_PX = 12, 8


class _Line(NamedTuple):
    """How a class of lines looks; without a colour, it has that of its series."""

    width: float
    colour: str = ""
    opacity: float = 1.0
    dash: tuple[float, float] = (0.0, 0.0)  # drawn, and left out


# As the style sheet of a chart's file has them.
_LINES = {
    "line": _Line(2),
    "dashed": _Line(2, dash=(6, 4)),
    "faint": _Line(1, opacity=0.3),
    "guide": _Line(1.2, LIGHT["soft"], dash=(2, 4)),
    "grid": _Line(1, LIGHT["line"]),
    "axis": _Line(1, LIGHT["soft"]),
}
_FILLS = {"bars": 0.45, "points": 0.6}  # opacity


def chart_pixels(chart: Chart, zoom: float = 2.0) -> Image.Image:
    """The chart on white; `zoom` is how many pixels stand for one of a screen."""
    root = ElementTree.fromstring(chart.draw(*FILE_SIZE))
    size = [round(float(root.get(side, "0")) * zoom) * _FINER for side in ("width", "height")]
    image = Image.new("RGB", (size[0], size[1]), "white")
    draw = ImageDraw.Draw(image, "RGBA")
    for node in root:
        classes = node.get("class", "").split()
        match node.tag.rpartition("}")[2]:
            case "path" if "cursor" not in classes:
                _paint_path(draw, node, classes, zoom * _FINER)
            case "circle":
                x, y, r = (float(node.get(name, "0")) * zoom * _FINER for name in ("cx", "cy", "r"))
                draw.ellipse((x - r, y - r, x + r, y + r), _fill(classes))
            case "rect":
                x, y, width, height = (
                    float(node.get(name, "0")) * zoom * _FINER for name in ("x", "y", "width", "height")
                )
                draw.rectangle((x, y, x + width, y + height), _fill(classes))
            case _:
                pass
    image = image.reduce(_FINER)
    letters = ImageDraw.Draw(image)  # not finer: fonts have smooth edges of their own
    for node in root:
        if node.tag.endswith("text"):
            anchor = {"middle": "ms", "end": "rs"}.get(node.get("text-anchor", ""), "ls")
            at = float(node.get("x", "0")) * zoom, float(node.get("y", "0")) * zoom
            colour = LIGHT["soft" if node.get("class") == "soft" else "ink"]
            letters.text(at, spelled("".join(node.itertext())), colour, font_of(round(_LETTERS_PX * zoom)), anchor)
    return ImageOps.expand(image, round(_MARGIN_PX * zoom), "white")


def _paint_path(draw: ImageDraw.ImageDraw, node: ElementTree.Element, classes: Sequence[str], fine: float) -> None:
    look = _LINES[classes[0]]
    colour = look.colour or LIGHT[classes[1]]
    points = [(x * fine, y * fine) for x, y in _points(node.get("d", ""))]
    pieces = _dashes(points, (look.dash[0] * fine, look.dash[1] * fine)) if look.dash[0] else [points]
    for piece in pieces:
        draw.line(piece, _with_alpha(colour, look.opacity), max(1, round(look.width * fine)), joint="curve")


def _points(data: str) -> list[Point]:
    """Where a path goes: from one place (M) along lines (L), or straight across (h) or down (v)."""
    points: list[Point] = []
    for command, text in re.findall(r"([MLhv])([^MLhv]*)", data):
        numbers = [float(number) for number in text.split()]
        if command in "ML":
            points.append((numbers[0], numbers[1]))
        else:
            x, y = points[-1]
            points.append((x + numbers[0], y) if command == "h" else (x, y + numbers[0]))
    return points


def _dashes(points: Sequence[Point], dash: Point) -> Iterator[list[Point]]:
    """The parts of a line that are drawn."""
    period, done = sum(dash), 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        start = -(done % period)  # of the period that the piece begins in
        while length and start < length:
            ends = (max(0.0, start), min(length, start + dash[0]))
            if ends[1] > ends[0]:
                yield [(x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length) for at in ends]
            start += period
        done += length


def _fill(classes: Sequence[str]) -> tuple[int, int, int, int]:
    (number,) = (name[1:] for name in classes if re.fullmatch(r"f\d", name))
    return _with_alpha(LIGHT[f"c{number}"], next((_FILLS[name] for name in classes if name in _FILLS), 1.0))


def _with_alpha(colour: str, opacity: float) -> tuple[int, int, int, int]:
    red, green, blue = ImageColor.getrgb(colour)[:3]
    return red, green, blue, round(255 * opacity)
