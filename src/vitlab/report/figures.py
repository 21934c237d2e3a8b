"""Pictures as bytes: PNG, and JPEG of photos. They carry no date, so the same run draws the same bytes."""

import io

from PIL import Image


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
