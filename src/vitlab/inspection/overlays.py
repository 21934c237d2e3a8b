"""Heat maps over photos: the one way in which `clf.explain`, reports and figures draw them (the paper's Figures 6 and 14).

The photo keeps its size and its brightness. Where a patch does not stand out, nothing is drawn over it; the more it does,
the denser the colour. Letters: C channels, Y X rows and columns, of pixels or of patches.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.preprocess import Region
from vitlab.inspection.canvas import INK, TEXT_PX, Canvas, text_width, wrapped
from vitlab.inspection.colours import table
from vitlab.inspection.scales import Scale, measured

Array = np.ndarray[Any, Any]

_MOST_OPAQUE = 0.78  # so that what stands out stays recognisable
_RISE = 0.75  # of the opacity: below 1, a little heat is soon seen
_BLEACH = 0.6  # the same of how grey the photo gets below it: orange heat would be lost on orange petals
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue (BT.601)
_DIMMED, _GREY = 0.45, 110  # of what was cut off: how far it fades, and into which level
_LEVELS = 256  # of heat that are drawn apart, as many as a colour map has
_STRIP_PX = 1 << 20  # pixels that are mixed at a time, so that a large photo needs little memory besides
_FEW_PX, _ENOUGH_PX = 96, 320  # sides of images whose pixels one can count, and of what they are enlarged to
_LEGEND_PX = 480  # width of a picture below which the letters of its legend would be too large for it
_BAR_PX, _TICK_PX, _GAP_PX, _MOST_TICKS = 10, 4, 8, 6


@dataclasses.dataclass(frozen=True)
class Look:
    """How heat is drawn: `grid` shows the borders of the patches."""

    colours: str = "ember"
    smooth: bool = True  # or each patch in one colour
    grid: bool = False
    opacity: float = _MOST_OPAQUE


LOOK = Look()


def overlay(
    image_CYX: Tensor,
    heat_YX: Tensor,
    scale: Scale | None = None,
    *,
    region: Region | None = None,
    look: Look = LOOK,
    zoom: int = 1,
    with_legend: bool = False,
) -> Image.Image:
    """Heat on the patch grid over a uint8 image of any size, RGB, as large as the image.

    Args:
        image_CYX: The photo; where its channels are not colours, the first is shown.
        heat_YX: A value per patch; without a `scale` of any unit, otherwise in the unit of the scale.
        scale: What the colours stand for; by default times the mean patch, as `measured` has it.
        region: What the model saw of the image, where that is not all: the rest fades, and has a line around it.
        look: Colours, borders of patches.
        zoom: Enlarges the image in whole pixels, and the heat smoothly.
        with_legend: Whether the colour bar stands below.
    """
    if scale is None:
        heat_YX, scale = measured(heat_YX)
    photo_YX3 = _rgb(image_CYX).repeat(zoom, axis=0).repeat(zoom, axis=1)
    rows, cols = photo_YX3.shape[:2]
    seen = Region(0, 0, rows, cols) if region is None else Region(*(zoom * side for side in region))
    top, left, bottom, right = _whole(seen, rows, cols)
    place_YX = _enlarged(scale.place(heat_YX.float().numpy()), (bottom - top, right - left), look.smooth)
    drawn_YX3 = photo_YX3 if region is None else _faded(photo_YX3)
    drawn_YX3[top:bottom, left:right] = _mixed(photo_YX3[top:bottom, left:right], place_YX, look)
    inside_YX3 = drawn_YX3[top:bottom, left:right]
    if look.grid:
        _draw_grid(inside_YX3, (heat_YX.shape[0], heat_YX.shape[1]))
    if region is not None:
        _draw_border(drawn_YX3, (top, left, bottom, right))
    picture = Image.fromarray(drawn_YX3)
    return framed_with_legend(picture, scale, look) if with_legend else picture


def to_picture(image_CYX: Tensor, *, scale: int = 1) -> Image.Image:
    """uint8 [C, Y, X] as a PIL image; where the channels are not colours, the first one."""
    pixels = np.ascontiguousarray(_shown(image_CYX).permute(1, 2, 0).numpy())
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def whole_zoom(rows: int, cols: int) -> int:
    """How often the pixels of a tiny image should be enlarged to be seen; 1 for photos."""
    return 1 if max(rows, cols) > _FEW_PX else -(-_ENOUGH_PX // max(rows, cols))


# --- legend -----------------------------------------------------------------------------------------------------------


def legend(scale: Scale, *, width: float = 320, look: Look = LOOK, size: float = TEXT_PX) -> Canvas:
    """The colour bar with ticks, and below it what they count: `.svg()` and `.pixels()`."""
    canvas = Canvas(width, legend_height(scale, width, size), margin=1)
    draw_legend(canvas, scale, (0, 0), width, look=look, size=size)
    return canvas


def legend_height(scale: Scale, width: float, size: float = TEXT_PX) -> float:
    return size * (_BAR_PX + _TICK_PX) / TEXT_PX + 1.35 * size * (1 + len(wrapped(scale.sentence, width, size))) + 2


def draw_legend(
    canvas: Canvas,
    scale: Scale,
    at: tuple[float, float],
    width: float,
    *,
    look: Look = LOOK,
    size: float = TEXT_PX,
) -> None:
    """The same on a canvas, from its upper left corner `at`."""
    (x, y), unit = at, size / TEXT_PX
    bar, tick = _BAR_PX * unit, _TICK_PX * unit
    canvas.picture(_bar(look), (x, y, width, bar))
    canvas.frame((x, y, width, bar), width=0.75 * unit)
    for place, text, start in _placed_ticks(scale, width, size):
        across = x + width * place
        canvas.path([(across, y + bar), (across, y + bar + tick)], width=0.75 * unit)
        canvas.text((x + start, y + bar + tick + size), text, size=size)
    for number, line in enumerate(wrapped(scale.sentence, width, size)):
        canvas.text((x, y + bar + tick + 2.35 * size + 1.3 * size * number), line, size=size, colour=INK)


def framed_with_legend(picture: Image.Image, scale: Scale, look: Look = LOOK) -> Image.Image:
    """The picture with its legend below it, on white; small ones are enlarged so that the letters fit."""
    wide = max(1, -(-_LEGEND_PX // picture.width))
    width, height = wide * picture.width, wide * picture.height
    size = TEXT_PX * max(1.0, min(max(width, height) / 640, width / 420))  # of a tall one, by what fits beside it
    gap = _GAP_PX * size / TEXT_PX
    bar = min(width - 2 * gap, 420 * size / TEXT_PX)
    canvas = Canvas(width, height + 2 * gap + legend_height(scale, bar, size), margin=0)
    canvas.picture(picture, (0, 0, width, height), crisp=max(picture.size) <= _FEW_PX)
    draw_legend(canvas, scale, (gap, height + gap), bar, look=look, size=size)
    return canvas.pixels(1)


def _placed_ticks(scale: Scale, width: float, size: float) -> list[tuple[float, str, float]]:
    """Place and text of each tick, and where the text begins: within the bar; as many as do not touch."""
    most = _MOST_TICKS
    while True:
        wide = [(place, text, text_width(text, size)) for place, text in scale.ticks(most)]
        placed = [(place, text, min(max(0.0, width * place - w / 2), width - w), w) for place, text, w in wide]
        if most == 2 or all(a[2] + a[3] + 0.8 * size < b[2] for a, b in itertools.pairwise(placed)):
            return [(place, text, start) for place, text, start, _ in placed]
        most -= 1


def _bar(look: Look) -> Image.Image:
    """The colours as they lie over a photo: on squares of two greys, which show where they let it through."""
    rows, cols = 16, 512
    square = rows // 2
    checks_YX = (np.arange(rows)[:, None] // square + np.arange(cols)[None] // square) % 2
    photo_YX3 = np.repeat((250 - 34 * checks_YX).astype(np.uint8)[..., None], 3, axis=2)
    return Image.fromarray(_mixed(photo_YX3, np.tile(np.linspace(0, 1, cols, dtype=np.float32), (rows, 1)), look))


# --- how it is drawn --------------------------------------------------------------------------------------------------


def _shown(image_CYX: Tensor) -> Tensor:
    return image_CYX if len(image_CYX) in (1, 3) else image_CYX[:1]


def _rgb(image_CYX: Tensor) -> Array:
    """A copy as [Y, X, 3]."""
    if image_CYX.ndim != 3 or image_CYX.dtype.itemsize != 1:
        raise UsageError(f"an overlay needs a uint8 image [channels, rows, columns], not {list(image_CYX.shape)}")
    return np.array(_shown(image_CYX).expand(3, -1, -1).permute(1, 2, 0).cpu().numpy(), order="C")


def _whole(region: Region, rows: int, cols: int) -> tuple[int, int, int, int]:
    """Its edges at the nearest pixels of the image: top, left, bottom, right."""
    top, left = round(region.top), round(region.left)
    bottom, right = round(region.top + region.rows), round(region.left + region.cols)
    if not (0 <= top < bottom <= rows and 0 <= left < right <= cols):
        raise UsageError(f"the region {tuple(region)} does not lie in an image of {rows}x{cols}")
    return top, left, bottom, right


def _enlarged(place_YX: Array, size: tuple[int, int], smooth: bool) -> Array:
    """The grid as float32 pixels; the middle of a patch has its own value.

    Places are enlarged, not heat: between a patch of 30 and one of 1 lies what looks like half of both.
    """
    how = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    picture = Image.fromarray(np.ascontiguousarray(place_YX, np.float32)).resize((size[1], size[0]), how)
    return np.clip(np.asarray(picture), 0, 1)  # bicubic swings beyond its values


def _mixed(photo_YX3: Array, place_YX: Array, look: Look) -> Array:
    """The photo under the colours; it loses its own where it gets others. By tables, a strip of rows at a time."""
    place_N1 = np.linspace(0, 1, _LEVELS, dtype=np.float32)[:, None]
    alpha_N1, grey_N1 = look.opacity * place_N1**_RISE, place_N1**_BLEACH
    of_photo_N1, of_grey_N1 = (1 - alpha_N1) * (1 - grey_N1), (1 - alpha_N1) * grey_N1
    added_N3 = alpha_N1 * table(look.colours)
    mixed_YX3 = photo_YX3.copy()
    step = max(1, _STRIP_PX // photo_YX3.shape[1])
    for first in range(0, len(photo_YX3), step):
        rows = slice(first, first + step)
        level_YX = (place_YX[rows] * (_LEVELS - 1)).round().astype(np.uint8)
        marked_YX = level_YX > 0
        level_N, photo_N3 = level_YX[marked_YX], photo_YX3[rows][marked_YX].astype(np.float32)
        grey_N = (photo_N3 @ _LUMINANCE)[:, None]
        mixed_N3 = photo_N3 * of_photo_N1[level_N] + grey_N * of_grey_N1[level_N] + added_N3[level_N]
        mixed_YX3[rows][marked_YX] = mixed_N3.round()
    return mixed_YX3


def _faded(photo_YX3: Array) -> Array:
    grey = np.array(_GREY * _DIMMED, np.float32)
    return (photo_YX3 * np.float32(1 - _DIMMED) + grey).round().astype(np.uint8)


def _draw_grid(drawn_YX3: Array, grid: tuple[int, int]) -> None:
    """Lines of a fixed share of a patch, light on dark and dark on light."""
    for axis, count in enumerate(grid):
        side = drawn_YX3.shape[axis]
        wide = max(1, round(side / count / 40))
        for edge in (round(side * number / count) for number in range(1, count)):
            lines = np.s_[edge - wide // 2 : edge - wide // 2 + wide]
            _blend(drawn_YX3[lines] if axis == 0 else drawn_YX3[:, lines], 255, 0.4)


def _draw_border(drawn_YX3: Array, box: tuple[int, int, int, int]) -> None:
    """A white line just outside of what the model saw."""
    top, left, bottom, right = box
    wide = max(1, round(max(drawn_YX3.shape[:2]) / 500))
    outer = max(0, top - wide), max(0, left - wide), bottom + wide, right + wide
    for part in (
        drawn_YX3[outer[0] : top, outer[1] : outer[3]],
        drawn_YX3[bottom : outer[2], outer[1] : outer[3]],
        drawn_YX3[top:bottom, outer[1] : left],
        drawn_YX3[top:bottom, right : outer[3]],
    ):
        _blend(part, 255, 0.9)


def _blend(part_YX3: Array, level: int, alpha: float) -> None:
    part_YX3[:] = (part_YX3 * (1 - alpha) + level * alpha).round()
