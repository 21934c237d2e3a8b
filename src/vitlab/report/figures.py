"""Pictures as bytes: PNG, and JPEG of photos. They carry no date, so the same run draws the same bytes."""

import io
from typing import Any

import numpy as np
from PIL import Image

from vitlab.data.decode import decode
from vitlab.data.rules import MOST_BITS


def thumbnail(source: "bytes | np.ndarray[Any, Any]", side: int, bits: int = MOST_BITS) -> bytes:
    """An image as it lies in the data, before any preprocessing."""
    if isinstance(source, np.ndarray) and source.shape[2] not in (1, 3):
        source = source[:, :, :1]  # pixels of other channels have no colours; the first one is shown
    return jpeg(Image.fromarray(decode(source, "RGB", bits).permute(1, 2, 0).numpy()), side)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=4)  # the files are many, and time matters more
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
