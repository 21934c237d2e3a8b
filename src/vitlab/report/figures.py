"""Pictures as bytes: photos as PNG and JPEG, and the maps of positions as SVG around pixels.

They carry no date and no random ids, so the same run draws the same bytes.
"""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

_GREY = "#7b8794"  # of the text, which is read on white and on black
_MAPS_PX, _MARGIN_PX, _SCALE_PX = 400, 34, 70  # of the maps themselves, of the numbers beside them, of the colour scale
_MOST_TICKS = 8  # of an axis, so that their numbers do not touch
# matplotlib's viridis at nine places, for -1 to 1.
_VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")


def position_maps(similarity_YXYX: Tensor) -> bytes:
    """A map per patch: how alike its position is to every other."""
    rows, cols = similarity_YXYX.shape[:2]
    gap = 1
    canvas = np.zeros((rows * (rows + gap) - gap, cols * (cols + gap) - gap, 4), np.uint8)
    for row in range(rows):
        for col in range(cols):
            top, left = row * (rows + gap), col * (cols + gap)
            canvas[top : top + rows, left : left + cols] = _coloured(similarity_YXYX[row, col].numpy())
    width, height = _MAPS_PX, round(_MAPS_PX * rows / cols)
    parts = [_image(canvas, _MARGIN_PX, 0, width, height)]
    for count, size, across in ((cols, width, True), (rows, height, False)):
        for i in range(0, count, -(-count // _MOST_TICKS)):
            middle = size * (i + 0.5) / count
            x, y = (_MARGIN_PX + middle, height + 16) if across else (_MARGIN_PX - 8, middle + 4)
            parts.append(_text(x, y, str(i + 1), "middle" if across else "end"))
    parts.append(_text(_MARGIN_PX + width / 2, height + 34, "patch column (rows on the left)", "middle"))
    scale = _coloured(np.linspace(1, -1, 64)[:, None])
    left = _MARGIN_PX + width + 16
    parts.append(_image(scale, left, height * 0.1, 12, height * 0.8))
    for value in (1, 0, -1):
        parts.append(_text(left + 18, height * (0.5 - 0.4 * value) + 4, str(value), "start"))
    whole = _MARGIN_PX + width + _SCALE_PX, height + 42
    size = f'viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" height="{whole[1]}"'
    style = f"<style>text{{font:12px sans-serif;fill:{_GREY}}}image{{image-rendering:pixelated}}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(parts)}</svg>\n'.encode()


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def jpeg(picture: Image.Image, side: int) -> bytes:
    """A photo no larger than `side`; small ones are enlarged in whole pixels."""
    if (zoom := side // max(picture.size)) > 1:
        picture = picture.resize((zoom * picture.width, zoom * picture.height), Image.Resampling.NEAREST)
    picture = picture.convert("RGB")
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


def _coloured(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """-1 to 1 as opaque colours."""
    anchors = np.array([list(bytes.fromhex(colour)) for colour in _VIRIDIS], float)
    places, at = np.linspace(-1, 1, len(anchors)), np.clip(values, -1, 1)
    channels = [np.interp(at, places, anchors[:, channel]) for channel in range(3)]
    return np.stack([*channels, np.full(at.shape, 255.0)], axis=-1).round().astype(np.uint8)


def _image(pixels: np.ndarray[Any, Any], x: float, y: float, width: float, height: float) -> str:
    data = base64.b64encode(png(Image.fromarray(pixels))).decode()
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none"'
    return f'<image {place} href="data:image/png;base64,{data}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'
