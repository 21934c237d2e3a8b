"""Printed letters drawn on the fly: a pre-training set that needs no download and shares no image with the digits.

Each image is a pure function of (seed, index), so any part of the endless set can be drawn anywhere.
"""

import string

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vitlab.core.runtime import generator
from vitlab.data.samples import Samples

_CANVAS = 64  # drawn large, then shrunk: the grey levels of the small image come from averaging, as a scanner's do
_FONT_SIZES = (44, 60)
_STROKES = (0, 3)
_MAX_TURN_DEG = 15.0
_MAX_SHIFT = 5


def draw_letters(count: int, image_size: tuple[int, int], seed: int) -> Samples:
    """`count` grey letters A-Z in turn, white on black like the digits, each turned, shifted and thickened a little."""
    labels = torch.arange(count) % 26
    images = [_draw(string.ascii_uppercase[index % 26], image_size, seed, index) for index in range(count)]
    classes = tuple(string.ascii_uppercase)
    ids = tuple(f"letters/{seed}/{index}" for index in range(count))
    return Samples(torch.stack(images)[:, None], labels, classes, ids)


def _draw(letter: str, image_size: tuple[int, int], seed: int, index: int) -> torch.Tensor:
    size, stroke, turn, dx, dy = torch.rand(5, generator=generator(seed, index)).tolist()
    font = ImageFont.load_default(_FONT_SIZES[0] + size * (_FONT_SIZES[1] - _FONT_SIZES[0]))
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    ink = ImageDraw.Draw(canvas)
    centre = (_CANVAS / 2 + (2 * dx - 1) * _MAX_SHIFT, _CANVAS / 2 + (2 * dy - 1) * _MAX_SHIFT)
    width = int(_STROKES[0] + stroke * (_STROKES[1] + 1 - _STROKES[0]))
    ink.text(centre, letter, fill=255, font=font, anchor="mm", stroke_width=width)
    turned = canvas.rotate((2 * turn - 1) * _MAX_TURN_DEG, resample=Image.Resampling.BILINEAR)
    small = turned.resize((image_size[1], image_size[0]), Image.Resampling.BOX)
    return torch.from_numpy(np.asarray(small).copy())
