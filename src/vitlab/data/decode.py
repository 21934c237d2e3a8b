"""One decoder for every use: bytes, path, PIL image or array -> uint8 [C, Y, X].

Owns what is accepted and how odd images become plain ones. Only formats on the list are tried, whatever the file is called,
because most decoder faults live in formats that nobody photographs with. Error texts name the file and nothing internal.
"""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import MAX_PIXELS, Mode

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

ImageInput = str | Path | bytes | Image.Image | np.ndarray[Any, Any]


def decode(source: ImageInput, mode: Mode) -> Tensor:
    """The first frame, upright, in 8 bits and the wanted channels."""
    name = str(source) if isinstance(source, str | Path) else "the given image"
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    try:
        if isinstance(source, Image.Image):
            plain = _plain(source, mode)
        else:
            opened: Any = io.BytesIO(source) if isinstance(source, bytes) else Path(source)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own, lower limit speaks below
                opened_image = Image.open(opened, formats=FORMATS)
            with opened_image as image:
                if image.width * image.height > MAX_PIXELS:
                    raise FileProblem(f"{name} has {image.width}x{image.height} pixels; the limit is {MAX_PIXELS:,}")
                plain = _plain(image, mode)
    except FileNotFoundError:
        raise FileProblem(f"{name} does not exist") from None
    except IsADirectoryError:
        raise FileProblem(f"{name} is a folder, not an image") from None
    except PermissionError:
        raise FileProblem(f"no permission to read {name}") from None
    except FileProblem:
        raise
    except Image.DecompressionBombError:
        raise FileProblem(f"{name} has too many pixels; the limit is {MAX_PIXELS:,}") from None
    except Exception:  # Pillow lets many types escape on damaged files, some with addresses in their text
        raise FileProblem(f"{name} is not a readable image", hint=f"Accepted: {', '.join(FORMATS)}.") from None
    pixels = torch.from_numpy(np.array(plain))
    return pixels[None] if mode == "L" else pixels.permute(2, 0, 1).contiguous()


def _plain(image: Image.Image, mode: Mode) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # Pillow's own conversion clips 16-bit images to white
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(np.asarray(image).clip(0, 255).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")  # what is see-through is shown on white, as a page would
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert(mode)


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)):
        given = f"{array.dtype} {list(array.shape)}"
        raise UsageError(f"an image array must be uint8 [rows, columns] or [rows, columns, 1 or 3], not {given}")
    if not array.size:
        raise UsageError(f"an image array needs at least one pixel, not {array.shape}")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
