"""Every image examined once: format, whether it decodes, a perceptual hash.

Owns `FACTS`, one fixed-size record per image, so that a hundred thousand take tens of megabytes, and the processes that fill
it: a file that kills its decoder costs one file.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vitlab.core.errors import VitlabError
from vitlab.data.dataset import Dataset, Reader
from vitlab.data.decode import (
    FORMATS,
    ORIENTATION,
    bits_for,
    bytes_of_array,
    decode,
    largest_value,
    least_shrinkage,
    open_header,
    simplejpeg,
    why_unreadable,
)
from vitlab.data.processes import num_workers, process_pool, worker_state
from vitlab.data.rules import MOST_BITS, PIXEL_LIMIT

THUMB_SIDE = 12  # pixels of the miniature that confirms a likeness: 432 bytes, and it still tells photos apart
FACTS = np.dtype(
    [
        ("format", "u1"),  # index into FORMATS, from 1; 0 for pixels that come without a file
        ("rows", "u4"),
        ("cols", "u4"),
        ("bytes", "u8"),
        ("damaged", "?"),  # but decodes
        ("turned", "?"),  # by EXIF
        ("animated", "?"),
        ("cmyk", "?"),
        ("deep", "?"),  # more than 8 bits per channel
        ("largest", "u2"),  # value of a deep grey image, whose range is not stored
        ("content", "S32"),  # SHA-256
        ("hash", "u1", (8,)),
        ("contrast", "f4"),  # standard deviation of the miniature, in levels
        ("thumb", "u1", (THUMB_SIDE, THUMB_SIDE, 3)),
    ]
)
Facts = np.ndarray[Any, np.dtype[np.void]]
Faults = dict[int, str]  # by image, why it cannot be used, as a predicate of the file name: "is empty"


class Chunk(NamedTuple):
    """A range of images, examined by one process at a time."""

    start: int
    stop: int


_Result = tuple[Chunk, Facts, Faults]

_JPEG = FORMATS.index("JPEG") + 1  # as a "format"; also that of MPO, a JPEG with more pictures behind the first
_CHUNK = 32  # images per message between processes: a few seconds of work at most, and the overhead is small
_MOVING = ("GIF", "PNG", "TIFF", "WEBP")  # where a second frame is a second picture; in JPEGs of phones it is a preview

_FREQUENCIES = 11  # the 64 slowest waves of the hash need frequencies 0 to 10
_HASH_SIDE = 32  # at least three pixels to the fastest wave, and images of 32 pixels are not resampled
_SLOWEST = sorted(
    ((u, v) for u in range(_FREQUENCIES) for v in range(_FREQUENCIES) if u + v), key=lambda wave: (sum(wave), wave)
)[:64]
# Candidates for duplicates agree in some bytes of the hash. Those of slow waves alone would agree for most photos, and those of
# fast ones alone would differ between a photo and its copy; so each byte has waves of every speed.
_WAVES = [_SLOWEST[i] for byte in range(8) for i in range(byte, 64, 8)]
# In whole numbers, so that a wave near zero has the same sign on every processor.
_COSINES = np.rint(
    2**12 * np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * (2 * np.arange(_HASH_SIDE) + 1) / (2 * _HASH_SIDE))
).astype(np.int64)
# A mirrored picture has the opposite sign in every wave of odd horizontal frequency, and the same in all others.
MIRROR = np.packbits(np.array([v % 2 == 1 for _, v in _WAVES]))


def scan(dataset: Dataset, facts: Facts, *, workers: int | None, advance: Callable[[int], None]) -> Faults:
    """Fill in the facts of every image, and return the faults of unusable ones.

    `advance` gets the number of images done. The result is the same for any number of workers.
    """
    faults, done = Faults(), 0
    chunks = [Chunk(start, min(start + _CHUNK, len(dataset))) for start in range(0, len(dataset), _CHUNK)]
    for (start, stop), part, wrong in _in_processes(dataset.read, chunks, num_workers(workers)):
        facts[start:stop] = part
        faults.update(wrong)
        done += stop - start
        advance(done)
    return dict(sorted(faults.items()))


# --- processes --------------------------------------------------------------------------------------------------------


def _in_processes(read: Reader, chunks: list[Chunk], workers: int) -> Iterator[_Result]:
    """Results as they come; chunks whose process died are examined one by one."""
    waiting = deque(chunks)
    while waiting:
        running: dict[concurrent.futures.Future[_Result], Chunk] = {}
        try:
            with process_pool(min(workers, len(waiting)), read) as pool:
                while waiting or running:
                    while waiting and len(running) < 2 * workers:  # a small queue: results must not pile up
                        running[pool.submit(_examine_chunk, waiting[0])] = waiting[0]
                        waiting.popleft()  # only now: a pool that broke meanwhile takes nothing, and nothing is lost
                    for future in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                        result = future.result()
                        del running[future]
                        yield result
        except BrokenProcessPool:
            for chunk in sorted(running.values()):
                yield from _alone(read, chunk)


def _alone(read: Reader, chunk: Chunk) -> Iterator[_Result]:
    """One chunk in its own process, halved until the image that kills it is found."""
    start, stop = chunk
    try:
        with process_pool(1, read) as pool:
            yield pool.submit(_examine_chunk, chunk).result()
    except BrokenProcessPool:
        if stop - start == 1:
            yield chunk, np.zeros(1, FACTS), {start: "makes the decoder crash"}
            return
        middle = (start + stop) // 2
        yield from _alone(read, Chunk(start, middle))
        yield from _alone(read, Chunk(middle, stop))


def _examine_chunk(chunk: Chunk) -> _Result:
    start, stop = chunk
    facts, faults = np.zeros(stop - start, FACTS), Faults()
    for i in range(start, stop):
        if fault := _examine(i, facts[i - start]):
            faults[i] = fault
    return chunk, facts, faults


# --- one image --------------------------------------------------------------------------------------------------------


def _examine(i: int, record: Any) -> str | None:
    """Fill the record, and return what is wrong, whatever the file does."""
    read: Reader = worker_state()
    try:
        source = read(i)
    except OSError as error:
        return why_unreadable(error)
    except VitlabError as error:
        return f"cannot be read: {error.what}"
    except Exception as error:
        return f"cannot be read: {type(error).__name__}"
    if isinstance(source, np.ndarray):
        return _examine_pixels(source, record)
    record["bytes"], record["content"] = len(source), hashlib.sha256(source).digest()
    return _examine_file(source, record) if source else "is empty"


def _examine_file(source: bytes, record: Any) -> str | None:
    try:
        with open_header(io.BytesIO(source)) as image:
            record["format"] = FORMATS.index(image.format) + 1 if image.format in FORMATS else _JPEG
            record["rows"], record["cols"] = image.height, image.width
            if least_shrinkage(image) is None:
                return f"has {image.width:,}x{image.height:,} pixels; {PIXEL_LIMIT}"
            record["cmyk"] = image.mode == "CMYK"
            record["deep"] = image.mode[0] in "IF" or any(map(_has_16_bits, image.tile))
            with contextlib.suppress(Exception):  # damaged metadata do not make a damaged picture
                record["animated"] = image.format in _MOVING and getattr(image, "is_animated", False)
                record["turned"] = image.getexif().get(ORIENTATION, 1) in range(2, 9)
    except VitlabError as error:
        return why_unreadable(error)
    except Image.DecompressionBombError:
        return f"has too many pixels; {PIXEL_LIMIT}"
    except Exception:  # Pillow lets many types escape on damaged files
        return f"is not an image of an accepted format ({', '.join(FORMATS)})"
    try:
        with open_header(io.BytesIO(source)) as image:
            image.verify()  # the checksums of a PNG, which its decoder passes over
        record["damaged"] = record["format"] == _JPEG and _is_corrupt(source)
        record["largest"] = largest_value(source) if record["deep"] else 0
        bits = bits_for(int(record["largest"])) if record["largest"] else MOST_BITS
        _fill_thumbnail_and_hash(np.asarray(decode(source, "RGB", bits).permute(1, 2, 0)), record)
    except Exception:
        return "is damaged or cut short: its pixels cannot be decoded"
    return None


def _has_16_bits(tile: Any) -> bool:
    """By the raw mode, such as `RGB;16B`; `BGR;16` has 16 bits for all three."""
    mode = tile[-1]
    return re.search(r";16[BLN]", str(mode[0] if isinstance(mode, tuple) and mode else mode)) is not None


def _is_corrupt(jpeg: bytes) -> bool:
    """Whether libjpeg warns of wrong data, which Pillow does not report."""
    if simplejpeg is None:
        return False
    try:  # at an eighth of the size: everything is read, and little is computed
        simplejpeg.decode_jpeg(jpeg, "GRAY", min_height=1, min_width=1)
    except ValueError as error:  # it raises for colours that it does not know as well
        return any(word in str(error) for word in ("Corrupt", "marker", "structure"))
    return False


def _examine_pixels(pixels: "np.ndarray[Any, Any]", record: Any) -> str | None:
    shape = str(pixels.shape).encode()
    record["bytes"], record["content"] = pixels.nbytes, hashlib.sha256(shape + pixels.tobytes()).digest()
    if pixels.ndim != 3 or not pixels.size:
        return f"is not a picture: {pixels.dtype} {list(pixels.shape)}"
    largest = largest_value(pixels)
    if pixels.shape[2] == 1:  # deep grey, like that of a file
        record["deep"], record["largest"] = largest > 0, largest
    try:
        pixels = bytes_of_array(pixels, bits_for(largest) if largest else MOST_BITS)
    except VitlabError as error:
        return f"is not a picture: {error.what}"
    record["rows"], record["cols"] = pixels.shape[:2]
    # Two channels or many have no colours to look at: the first one stands for all.
    _fill_thumbnail_and_hash(pixels if pixels.shape[2] == 3 else pixels[:, :, :1].repeat(3, axis=2), record)
    return None


def _fill_thumbnail_and_hash(pixels_YX3: "np.ndarray[Any, Any]", record: Any) -> None:
    """The thumbnail, and the perceptual hash: signs of the 64 slowest DCT waves."""
    picture = Image.fromarray(np.ascontiguousarray(pixels_YX3))
    record["thumb"] = _shrink(picture, THUMB_SIDE)
    record["contrast"] = record["thumb"].std()
    grey = _shrink(picture.convert("L"), _HASH_SIDE).astype(np.int64)
    waves = _COSINES @ grey @ _COSINES.T
    record["hash"] = np.packbits(np.array([waves[wave] > 0 for wave in _WAVES]))


def _shrink(picture: Image.Image, side: int) -> "np.ndarray[Any, Any]":
    # The gap lets large photos be halved cheaply first; it changes no bit that matters here.
    return np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR, reducing_gap=3.0))
