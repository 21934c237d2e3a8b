"""Pictures, words and lines at their places, drawn once and given out as SVG and as pixels.

Neither holds a date or random ids, so the same items give the same bytes. Pixels use Pillow's own font, so that every machine
draws the same letters; it has few signs beyond ASCII, and what it lacks is spelled out. An SVG, whose background is
transparent, uses the reader's fonts.
"""

import base64
import dataclasses
import functools
import io
import unicodedata
from collections.abc import Sequence
from html import escape
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]

INK = "ink"  # of letters and axes: dark in pixels, on white; in SVG a grey that is read on white and on black
_INKS = {"pixels": "#1f2933", "svg": "#74808d"}
_BACKGROUND = "white"
_MARGIN_PX = 6.0
_ANCHORS: dict[Anchor, str] = {"start": "l", "middle": "m", "end": "r"}
_JPEG_QUALITY = 92  # of photos inside an SVG
_MEASURED_PX = 64  # of the letters that widths are measured with
_FEW_COLOURS_PX = 128  # side of a picture that is stored without loss in an SVG
TEXT_PX = 12.0
_SPELLED = str.maketrans({"×": "x", "–": "-", "−": "-", "≥": ">=", "²": "2", "“": '"', "”": '"', "’": "'"})
_KNOWN = "·…±°"  # to the font of the pixels, beyond ASCII


@dataclasses.dataclass(frozen=True)
class _Page:
    """The pixels that are drawn on."""

    image: Image.Image
    zoom: float
    margin: float

    def at(self, point: Point) -> Point:
        return (point[0] + self.margin) * self.zoom, (point[1] + self.margin) * self.zoom


@dataclasses.dataclass(frozen=True)
class _Picture:
    place: tuple[float, float, float, float]  # left, top, width, height
    picture: Image.Image
    crisp: bool

    def svg(self) -> str:
        lossless = max(self.picture.size) <= _FEW_COLOURS_PX or self.crisp or "A" in self.picture.mode
        buffer = io.BytesIO()
        if lossless:
            self.picture.save(buffer, "PNG")
        else:
            self.picture.convert("RGB").save(buffer, "JPEG", quality=_JPEG_QUALITY)
        data = base64.b64encode(buffer.getvalue()).decode()
        x, y, width, height = map(_coordinate, self.place)
        style = ' style="image-rendering:pixelated"' if self.crisp else ""
        where = f'x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none"'
        return f'<image {where}{style} href="data:image/{"png" if lossless else "jpeg"};base64,{data}"/>'

    def paint(self, page: _Page) -> None:
        left, top, width, height = self.place
        (x, y), (right, bottom) = (map(round, page.at(point)) for point in ((left, top), (left + width, top + height)))
        size = max(1, right - x), max(1, bottom - y)
        how = Image.Resampling.NEAREST if self.crisp else Image.Resampling.LANCZOS
        picture = self.picture.convert("RGBA" if "transparency" in self.picture.info else None)
        picture = picture if picture.size == size else picture.resize(size, how)
        page.image.paste(picture, (x, y), picture if "A" in picture.mode else None)


@dataclasses.dataclass(frozen=True)
class _Text:
    at: Point  # the baseline
    text: str
    size: float
    anchor: Anchor
    colour: str
    upwards: bool

    def svg(self) -> str:
        x, y = map(_coordinate, self.at)
        turn = f' transform="rotate(-90 {x} {y})"' if self.upwards else ""
        fill = _colour(self.colour, "svg")
        look = f'font-size="{_coordinate(self.size)}" text-anchor="{self.anchor}" fill="{fill}"{turn}'
        return f'<text x="{x}" y="{y}" {look}>{escape(printable(self.text))}</text>'

    def paint(self, page: _Page) -> None:
        font, colour = font_of(round(self.size * page.zoom)), _colour(self.colour, "pixels")
        x, y = page.at(self.at)
        anchor, text = f"{_ANCHORS[self.anchor]}s", spelled(self.text)
        if not self.upwards:
            ImageDraw.Draw(page.image).text((x, y), text, colour, font, anchor)
            return
        # Written on a strip of its own, which is then turned: a mask, so that the letters' edges stay smooth.
        left, top, right, bottom = (round(number) for number in font.getbbox(text, anchor=anchor))
        strip = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(strip).text((-left, -top), text, 255, font, anchor)
        strip = strip.transpose(Image.Transpose.ROTATE_90)
        page.image.paste(colour, (round(x + top), round(y - right)), strip)


@dataclasses.dataclass(frozen=True)
class _Path:
    points: Sequence[Point]
    colour: str
    width: float
    fill: str

    def svg(self) -> str:
        line = "M" + "L".join(f"{_coordinate(x)} {_coordinate(y)}" for x, y in self.points)
        stroke = (
            f'stroke="{_colour(self.colour, "svg")}" stroke-width="{_coordinate(self.width)}"' if self.width else ""
        )
        fill = _colour(self.fill, "svg") if self.fill else "none"
        return f'<path d="{line}" fill="{fill}" stroke-linejoin="round" {stroke}/>'

    def paint(self, page: _Page) -> None:
        points, draw = [page.at(point) for point in self.points], ImageDraw.Draw(page.image)
        if self.fill:
            draw.polygon(points, _colour(self.fill, "pixels"))
        if self.width:
            draw.line(points, _colour(self.colour, "pixels"), max(1, round(self.width * page.zoom)), joint="curve")


class Canvas:
    """A page of `width` and `height` in pixels of a screen, and a margin around it; what is added later lies above."""

    def __init__(self, width: float, height: float, margin: float = _MARGIN_PX) -> None:
        self.width, self.height, self.margin = width, height, margin
        self._items: list[_Picture | _Text | _Path] = []

    def picture(self, picture: Image.Image, place: tuple[float, float, float, float], *, crisp: bool = False) -> None:
        """At left, top, width and height; enlarged in whole squares where `crisp`, smoothly elsewhere."""
        self._items.append(_Picture(place, picture, crisp))

    def text(
        self,
        at: Point,
        text: str,
        *,
        anchor: Anchor = "start",
        size: float = TEXT_PX,
        colour: str = INK,
        upwards: bool = False,
    ) -> None:
        """One line of text; `at` is where its baseline starts, has its middle or ends."""
        self._items.append(_Text(at, text, size, anchor, colour, upwards))

    def path(self, points: Sequence[Point], *, colour: str = INK, width: float = 1.0, fill: str = "") -> None:
        self._items.append(_Path(points, colour, width, fill))

    def frame(self, place: tuple[float, float, float, float], *, colour: str = INK, width: float = 1.0) -> None:
        """The outline of a box, from its left, top, width and height."""
        x, y, wide, high = place
        corners = [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high), (x, y)]
        self.path(corners, colour=colour, width=width)

    def svg(self) -> bytes:
        """As a file, with a transparent background."""
        width, height = _coordinate(self.width + 2 * self.margin), _coordinate(self.height + 2 * self.margin)
        start = _coordinate(-self.margin)
        size = f'viewBox="{start} {start} {width} {height}" width="{width}" height="{height}"'
        style = "<style>text{font-family:sans-serif}</style>"
        inside = "".join(item.svg() for item in self._items)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{inside}</svg>\n'.encode()

    def pixels(self, zoom: float = 2.0) -> Image.Image:
        """On white; `zoom` is how many pixels stand for one of a screen."""
        size = round((self.width + 2 * self.margin) * zoom), round((self.height + 2 * self.margin) * zoom)
        page = _Page(Image.new("RGB", size, _BACKGROUND), zoom, self.margin)
        for item in self._items:
            item.paint(page)
        return page.image


def text_width(text: str, size: float = TEXT_PX) -> float:
    """In pixels of a screen, by the font of the pixels; a reader's own font is about as wide."""
    return font_of(_MEASURED_PX).getlength(spelled(text)) * size / _MEASURED_PX


def wrapped(text: str, width: float, size: float = TEXT_PX) -> list[str]:
    """The text in lines that are no wider, unless a single word is."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def shortened(text: str, width: float, size: float = TEXT_PX) -> str:
    """The text, with dots for its end where it is wider."""
    if text_width(text, size) <= width:
        return text
    kept = len(text)
    while kept and text_width(text[:kept] + "…", size) > width:
        kept -= 1
    return text[:kept].rstrip() + "…"


def printable(text: str) -> str:
    """Without the control characters that no XML may hold, escaped or not."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def spelled(text: str) -> str:
    """In signs that the font of the pixels has; accents are left out."""
    plain = unicodedata.normalize("NFKD", printable(text).translate(_SPELLED))
    kept = (letter for letter in plain if not unicodedata.combining(letter))
    return "".join(letter if letter.isascii() or letter in _KNOWN else "?" for letter in kept)


@functools.cache
def font_of(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(max(1, size))
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow's wheels have FreeType"
    return font


def _colour(colour: str, where: Literal["pixels", "svg"]) -> str:
    return _INKS[where] if colour == INK else colour


def _coordinate(value: float) -> str:
    """A hundredth of a pixel is finer than any screen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
