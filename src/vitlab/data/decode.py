"""The one image decoder: bytes, path, PIL image, array or tensor -> uint8 [C, Y, X].

Only formats on the list are tried, whatever the file is called: most decoder faults live in formats that nobody photographs
with. Plain JPEGs go through simplejpeg where it is installed, which gives Pillow's bits sooner.
Letters: C channels, Y X rows and columns.
"""

import contextlib
import io
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.reading import open_regular
from vitlab.data.preprocess import (
    MAX_PIXELS,
    Array,
    Box,
    Preprocess,
    as_tensor,
    middle,
    resize,
    scale_part,
    scaled_size,
)
from vitlab.data.rules import LEAST_BITS, MOST_BITS, PIXEL_LIMIT, Mode

try:
    import simplejpeg
except ImportError:  # the extra `fast`
    simplejpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
_PILLOWS_FORMATS = FORMATS[:-1]
_HEIC_BRANDS = b"heic heix heim heis hevc hevx mif1 msf1".split()  # ISO/IEC 23008-12; what phones write
_FIRST_BOX = 64  # bytes that hold the brands of such a file

# Arrays are [rows, columns, channels], tensors [C, Y, X].
ImageInput = str | Path | bytes | Image.Image | Array | Tensor

_UNNAMED = "the given image"  # in messages, where it is not a file
_JPEG = ("JPEG", "MPO")  # an MPO is a JPEG with more pictures behind the first
# How many times larger than its target an image must be -> what libjpeg may divide it by. Measured on mosaics of real photos,
# which have all their detail in single pixels; tests/unit/data/test_decode.py repeats it.
_SPARE_NEEDED = {24: 8, 12: 4, 4: 2}
_LEAST_SPARE = min(_SPARE_NEEDED)
_SHRINKS = (1, 2, 4, 8)  # what libjpeg may divide both sides by while it decodes
_JPEG_PIXELS = 200_000_000  # of a JPEG that is shrunk below the limit while it is decoded: a phone's largest sensor
# Of the limit, for HEIC: phones take 48 million pixels. libheif decodes in full, in 10 bytes for each: 1.5 times the
# memory of a progressive JPEG at the limit.
_HEIC_SHARE = 1.3
_JPEG_START = b"\xff\xd8\xff"
# Markers; the rest of 0xC0 to 0xCF is progressive etc.
_SEQUENTIAL, _TABLES, _SCAN = (0xC0, 0xC1), (0xC4, 0xC8, 0xCC), 0xDA
_USUAL_BITS = (8, 10, 12, 14, 16)
_WHITE_8 = 255.0
_WARNINGS_LOCK = threading.Lock()
ORIENTATION = 0x0112  # EXIF's tag; 1 is upright, 2 to 8 are turned or flipped
_UPRIGHT: dict[int, tuple[tuple[int, ...], bool]] = {
    # per value of the tag: which axes of [Y, X, C] to flip, before rows and columns are exchanged or not
    2: ((1,), False),
    3: ((0, 1), False),
    4: ((0,), False),
    5: ((), True),
    6: ((0,), True),
    7: ((0, 1), True),
    8: ((1,), True),
}


def decode(source: ImageInput, mode: Mode, bits: int = MOST_BITS) -> Tensor:
    """The first frame, upright, in 8 bits; `bits` are those of deep grey images."""
    if mode == "array":
        return as_tensor(channels_as_given(source, bits))[0].contiguous()
    with opened(source) as image:
        return pixels(image, mode, bits=bits).contiguous()


def read(source: ImageInput, rule: Preprocess) -> Tensor:
    """What a model with this rule sees, uint8 [C, rows, columns], not normalised."""
    if rule.mode == "array":
        return resize(rule, as_tensor(channels_as_given(source, rule.bits)))[0]
    with opened(source) as image:
        size = upright_size(image)
        target = scaled_size(rule, *size)
        shrink = shrinkage(image, size, target, rule)
        image_YXC = pixel_array(image, rule.mode, shrink, rule.bits)
    scaled_YXC = scale_part(image_YXC, Box(0, 0, *size), shrink, target, rule.filter, rule.antialias)
    return middle(as_tensor(scaled_YXC), *rule.image_size)[0]


# --- from a source to an open image, and back with one kind of error ----------------------------------------------------


@contextlib.contextmanager
def opened(source: ImageInput) -> Generator[Image.Image]:
    """The image, its header read, its pixels not yet; failures become FileProblem."""
    name, has_header = str(source) if isinstance(source, (str, Path)) else _UNNAMED, False
    try:
        if isinstance(source, Image.Image):
            yield _own_jpeg(source) or source
        elif isinstance(source, np.ndarray | Tensor):
            yield _from_array(source)
        else:
            with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
                image, has_header = _header(file, name), True
                yield image
    except VitlabError:
        raise
    except FileNotFoundError:
        raise FileProblem(f"{name} does not exist") from None
    except PermissionError:
        raise FileProblem(f"no permission to read {name}") from None
    except MemoryError:
        raise FileProblem(f"{name} needs more memory than is free") from None
    except Image.DecompressionBombError:
        raise FileProblem(f"{name} has too many pixels; {PIXEL_LIMIT}") from None
    except Exception:  # Pillow lets many types escape on damaged files, some with addresses in their text
        if has_header:
            raise FileProblem(f"{name} is not a readable image: it is damaged or cut short") from None
        if isinstance(source, str | Path | bytes) and _is_empty(source):
            raise FileProblem(f"{name} is not a readable image: it is empty") from None
        raise FileProblem(f"{name} is not a readable image", hint=f"Accepted: {', '.join(FORMATS)}.") from None


def _own_jpeg(image: Image.Image) -> Image.Image | None:
    """An unread JPEG opened once more: shrinking would change the caller's image."""
    file: Any = getattr(image, "fp", None)
    if file is None or not _unread_jpeg(image):
        return None
    file.seek(0)
    return _header(io.BytesIO(file.read()), _UNNAMED)


def _is_empty(source: str | Path | bytes) -> bool:
    with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or a name with a NUL in it
        return not source if isinstance(source, bytes) else not Path(source).stat().st_size
    return False


def why_unreadable(error: VitlabError | OSError) -> str:
    """Why an image cannot be read, as a predicate of its name."""
    if isinstance(error, UsageError):  # of an array, which has no name
        return f"cannot be read: {error.what}"
    if isinstance(error, VitlabError):
        return error.what.removeprefix(f"{_UNNAMED} ")
    if isinstance(error, FileNotFoundError):
        return "no longer exists"
    if isinstance(error, PermissionError):
        return "cannot be read: no permission"
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    return f"cannot be read: {error.strerror or type(error).__name__}"


def _header(file: Any, name: str) -> Image.Image:
    with _quiet():
        image = open_header(file, name)
    if least_shrinkage(image) is None:
        raise FileProblem(f"{name} has {image.width}x{image.height} pixels; {PIXEL_LIMIT}")
    return image


def open_header(file: Any, name: str = _UNNAMED) -> ImageFile:
    """The image of an accepted format, its pixels not yet read."""
    box = file.read(_FIRST_BOX)
    file.seek(0)
    if box[4:8] == b"ftyp" and box[8:12] in _HEIC_BRANDS and b"avif" not in box:
        if (heif := _heif_reader()) is None:
            raise FileProblem(f"{name} is a HEIC photo. {how_to_read('.heic')}")
        return heif(file)
    try:
        return Image.open(file, formats=_PILLOWS_FORMATS)
    except Image.DecompressionBombError:  # Pillow's own limit, made for images that are decoded in full
        file.seek(0)
        if file.read(len(_JPEG_START)) != _JPEG_START:
            raise
        file.seek(0)
        return JpegImageFile(file)


def how_to_read(ending: str) -> str:
    """What to do before images of that ending, `.heic`, can be read; empty where there is nothing to do."""
    if ending == ".dng":
        return "Convert them to JPEG or PNG: vitlab does not read DNG."
    if ending == ".avif" and not features.check("avif"):
        return "This Pillow was built without AVIF; install another build:  pip install --force-reinstall pillow"
    if ending in (".heic", ".heif") and _heif_reader() is None:
        return "Install what reads them:  pip install 'vitlab[heic]'"
    return ""


def _heif_reader() -> Callable[[Any], ImageFile] | None:
    """By its class: to register it would change what all of the process opens. Loaded when the first photo needs it."""
    try:
        from pillow_heif import HeifImageFile
    except ImportError:  # the extra `heic`
        return None
    return HeifImageFile


def least_shrinkage(image: Image.Image) -> int | None:
    """By how much a decoder has to shrink the image to keep to `MAX_PIXELS`; None where none can.

    That is for JPEGs in one sequential scan: of any other, libjpeg holds all coefficients in memory, at full size.
    """
    if image.width * image.height <= (round(MAX_PIXELS * _HEIC_SHARE) if image.format == "HEIF" else MAX_PIXELS):
        return 1
    in_one_scan = _unread_jpeg(image) and _is_in_one_scan(getattr(image, "fp", None))
    if image.width * image.height > _JPEG_PIXELS or not in_one_scan:
        return None
    return next((n for n in _SHRINKS if -(-image.width // n) * -(-image.height // n) <= MAX_PIXELS), None)


def _is_in_one_scan(file: Any) -> bool:
    """Whether the first scan of a sequential JPEG holds all its components."""
    at, components = 2, 0
    while True:
        file.seek(at)
        segment = file.read(10)  # marker, length, and as much as is looked at
        if len(segment) < 10 or segment[0] != 0xFF:
            return False
        marker = segment[1]
        if marker == _SCAN:
            return 0 < components == segment[4]
        if marker in _SEQUENTIAL:
            components = segment[9]
        elif marker >> 4 == 0xC and marker not in _TABLES:
            return False
        at += 1 if marker == 0xFF else 2 + int.from_bytes(segment[2:4])  # 0xFF again is padding


def _quiet() -> contextlib.AbstractContextManager[None]:
    """Without Pillow's warnings, of metadata and of a limit above ours."""
    return _HUSHED_ALREADY if _hushed else _without_warnings()


@contextlib.contextmanager
def _without_warnings() -> Generator[None]:
    """One thread at a time: two at once would restore the filters of each other."""
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_hushed = False
_HUSHED_ALREADY = contextlib.nullcontext()


def hush_process(_worker: int = 0) -> None:
    """Ignore warnings for good in a process that only decodes: cheaper than per image."""
    global _hushed  # noqa: PLW0603
    _hushed = True
    warnings.simplefilter("ignore")


def bytes_of_array(given: Array | Tensor, bits: int = MOST_BITS) -> Array:
    """uint8 [rows, columns(, channels)] of an array of that shape, or of a tensor [C, Y, X].

    Floats go from 0 to 1; of uint16, 2^bits - 1 is white.
    """
    image = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    what = f"{image.dtype} {list(image.shape)}"
    if image.ndim not in (2, 3) or not image.size:
        shapes = "a tensor [C, Y, X]" if isinstance(given, Tensor) else "an array [rows, columns(, channels)]"
        raise UsageError(f"an image array must be uint8, or float from 0 to 1, in {shapes}, not {what}")
    if isinstance(given, Tensor) and image.ndim == 3:
        image = image.transpose(1, 2, 0)
    if image.dtype.kind == "f":
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 1):  # not a number is neither
            raise UsageError(
                f"an image array must be uint8, or float from 0 to 1, not {what} from {low:.4g} to {high:.4g}",
                hint="Divide values up to 255 by 255; give normalised images to the model itself, clf.model.",
            )
        return (image * np.float32(_WHITE_8)).round().astype(np.uint8)
    if image.dtype == np.uint16:
        return (np.minimum(image, 2**bits - 1) >> (bits - LEAST_BITS)).astype(np.uint8)
    if image.dtype != np.uint8:
        raise UsageError(f"an image array must be uint8, or float from 0 to 1, not {what}")
    return image


def _from_array(given: Array | Tensor) -> Image.Image:
    if isinstance(given, np.ndarray) and given.dtype == np.uint16 and given.size and given.shape[2:] in ((), (1,)):
        return Image.fromarray(np.ascontiguousarray(given.reshape(given.shape[:2])))  # deep grey, like a file's
    array = bytes_of_array(given)
    if array.ndim == 3 and array.shape[2] not in (1, 3):
        raise UsageError(
            f"an image array must be uint8 or float with 1 or 3 channels, not {array.shape[2]}",
            hint="Arrays are [rows, columns, channels], and tensors [channels, rows, columns].",
        )
    array = np.ascontiguousarray(array)
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def channels_as_given(source: ImageInput, bits: int = MOST_BITS) -> Array:
    """[Y, X, C] for models of other channels than grey or RGB."""
    if not isinstance(source, np.ndarray | Tensor):
        raise UsageError("this model takes uint8 arrays [rows, columns, channels], not image files")
    image = bytes_of_array(source, bits)
    return (image if image.ndim == 3 else image[:, :, None]).copy()


# --- from an open image to pixels -------------------------------------------------------------------------------------


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Rows and columns as a viewer would show them."""
    turned = _UPRIGHT.get(_orientation(image), ((), False))[1]
    return (image.width, image.height) if turned else (image.height, image.width)


def shrinkage(image: Image.Image, size: tuple[int, int], target: tuple[int, int], rule: Preprocess) -> int:
    """By how much a JPEG may be shrunk inside its decoder: 1, 2, 4 or 8.

    `size` of it will end as `target`. It saves most of the work, and pixels move by less than one grey level on average.
    Without antialias nothing may be shrunk: a resize that looks at single pixels would look at other ones. The decoder pads
    sides that are not a multiple at the far end, where a picture to be flipped begins, so those are shrunk only by what divides
    their sides. An image beyond the limit of pixels is shrunk in any case, for the memory.
    """
    least = least_shrinkage(image) or 1
    spare = min(size[0] // target[0], size[1] // target[1])
    # The cells of "area" have sharp edges, and show more of the grid that was shrunk to.
    spare //= 2 if rule.filter == "area" else 1
    if spare < _LEAST_SPARE or not rule.antialias or not _unread_jpeg(image):
        return least
    upright = _orientation(image) not in _UPRIGHT
    fits = (
        shrink
        for needed, shrink in _SPARE_NEEDED.items()
        if spare >= needed and (upright or image.width % shrink == image.height % shrink == 0)
    )
    return max(least, next(fits, 1))


def _unread_jpeg(image: Image.Image) -> bool:
    """A JPEG of which Pillow has read the header only."""
    return image.format in _JPEG and len(getattr(image, "tile", ())) == 1


def pixels(image: Image.Image, mode: Mode, shrink: int = 1, bits: int = MOST_BITS) -> Tensor:
    """uint8 [C, Y, X], upright, as many times smaller as `shrinkage` allowed."""
    return as_tensor(pixel_array(image, mode, shrink, bits))[0]


def pixel_array(image: Image.Image, mode: Mode, shrink: int = 1, bits: int = MOST_BITS) -> Array:
    """The same as uint8 [Y, X, C], which may be read-only; a JPEG beyond the limit of pixels is shrunk in any case."""
    flipped, exchanged = _UPRIGHT.get(_orientation(image), ((), False))
    shrink = max(shrink, least_shrinkage(image) or 1)
    image_YXC = _fast_jpeg(image, mode, shrink)
    if image_YXC is None:
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        image = _plain(image, mode, bits)
        image_YXC = np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, -1)
    image_YXC = np.flip(image_YXC, flipped) if flipped else image_YXC
    return image_YXC.swapaxes(0, 1) if exchanged else image_YXC


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # Pillow turns these upright itself, sizes included
        return 1
    if image.format is None and not image.info and getattr(image, "_exif", image) is None:  # of an array, as mostly
        return 1
    try:
        if image.format == "PNG":  # may have it behind the pixels
            image.load()
        with _quiet():
            exif = image.getexif()
            return int(exif[ORIENTATION]) if ORIENTATION in exif else 1  # `get` would raise and catch for most
    except Exception:  # metadata may be broken where the image is not
        return 1


def _fast_jpeg(image: Image.Image, mode: Mode, shrink: int) -> Array | None:
    """The pixels of a plain JPEG by simplejpeg; None where Pillow has to decode."""
    if simplejpeg is None or not _unread_jpeg(image) or image.mode != mode:
        return None
    file: Any = image.fp  # pyright: ignore[reportAttributeAccessIssue]
    file.seek(0)
    rows, cols = -(-image.height // shrink), -(-image.width // shrink)
    try:
        image_YXC = simplejpeg.decode_jpeg(
            file.read(), colorspace="GRAY" if mode == "L" else "RGB", min_height=rows, min_width=cols
        )
    except ValueError:
        return None
    return image_YXC if image_YXC.shape[:2] == (rows, cols) else None


def largest_value(source: ImageInput) -> int:
    """Of a grey image of more than 8 bits, up to 16, or of an array of these; 0 of any other."""
    if isinstance(source, np.ndarray):
        return int(source.max(initial=0)) if source.dtype == np.uint16 else 0
    with opened(source) as image:
        if image.mode[0] not in "IF":
            return 0
        largest = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0).max(initial=0.0)
        return 0 if image.mode == "F" and largest <= _WHITE_8 else int(min(largest, 2**MOST_BITS - 1))


def bits_for(largest: int) -> int:
    """The least that cameras and scanners have and that holds the value."""
    return next(bits for bits in _USUAL_BITS if largest < 2**bits)


def _plain(image: Image.Image, mode: Mode, bits: int) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's own conversion clips 16-bit images to white
        values = np.asarray(image).astype(np.int64).clip(0, 2**bits - 1)
        image = Image.fromarray((values >> (bits - LEAST_BITS)).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(_from_floats(np.asarray(image), bits))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        rgba = image.convert("RGBA")  # what is see-through is shown on white, as a page would
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    if image.mode in ("LAB", "HSV", "CMYK"):  # have no direct way to grey
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)  # which would copy


def _from_floats(values: Array, bits: int) -> Array:
    """Floats to bytes: white is the least of 1, 255 and 2^bits - 1 that holds them."""
    values = np.nan_to_num(values.astype(np.float64), nan=0.0)
    largest = values.max(initial=0.0)
    white = 1.0 if largest <= 1 else _WHITE_8 if largest <= _WHITE_8 else 2.0**bits - 1
    return (values.clip(0, white) * (_WHITE_8 / white)).round().astype(np.uint8)
