"""TIFF images of more bands than Pillow has modes for, as satellites and microscopes write them."""

import io
import struct
from typing import Any

import numpy as np
from PIL import Image

from vitlab.core.errors import FileProblem
from vitlab.data.rules import MAX_PIXELS, PIXEL_LIMIT

SUFFIXES = (".tif", ".tiff")
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}  # of the bytes, by how a file begins
_SAMPLES = 277  # the tag with the number of bands
_ENTRY = 12  # bytes of a tag


def tiff_bands(data: bytes) -> "np.ndarray[Any, Any] | None":
    """[rows, columns, bands] of the first page, where Pillow cannot read it for its bands; None of any other file."""
    bands = _bands(data)
    if bands < 2 or _is_pillows(data):
        return None
    try:
        import tifffile
    except ImportError:  # the extra `tiff`
        what = f"is a TIFF of {bands} bands. Install what reads them:  pip install 'vitlab[tiff]'"
        raise FileProblem(what) from None
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page: Any = file.pages[0]
            if page.imagelength * page.imagewidth > MAX_PIXELS:
                raise FileProblem(f"has {page.imagewidth}x{page.imagelength} pixels; {PIXEL_LIMIT}")
            pixels, axes = np.asarray(page.asarray()), str(page.axes)
    except FileProblem:
        raise
    except Exception as error:  # on damaged files tifffile lets many types out
        if "imagecodecs" in str(error):
            what = f"is a TIFF of {bands} bands, packed in a way that needs another package:  pip install imagecodecs"
            raise FileProblem(what) from None
        raise FileProblem(f"is not a readable TIFF of {bands} bands: it is damaged or cut short") from None
    return pixels.transpose(1, 2, 0) if axes == "SYX" else pixels


def _is_pillows(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data), formats=["TIFF"]) as image:
            return len(image.getbands()) > 1  # of some it would show one band as a grey image
    except Image.DecompressionBombError:  # refused later, with the limit
        return True
    except Exception:  # Pillow lets many types escape
        return False


def _bands(data: bytes) -> int:
    """What the first page says of its bands; 0 for what is not a TIFF."""
    order = _ORDERS.get(data[:4])
    if order is None:
        return 0
    try:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, start)
        for at in range(start + 2, start + 2 + count * _ENTRY, _ENTRY):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", data, at)
            if tag == _SAMPLES:
                return value
    except struct.error:  # cut short
        return 0
    return 1
