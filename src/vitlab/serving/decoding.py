"""Untrusted uploads are decoded in processes of their own, with a limit of memory and a deadline for each image.

One that takes too long is killed and replaced, as is one that dies. What they say is read as plain bytes, never unpickled: a
decoder that an image has taken over can give wrong pixels, also for later images, but cannot make other processes run anything.
"""

import asyncio
import contextlib
import os
import queue
import signal
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vitlab.core.environment import usable_cores
from vitlab.core.errors import VitlabError
from vitlab.data.rules import Preprocess
from vitlab.serving.errors import OF_IMAGES, Refusal
from vitlab.serving.processes import process_context

if TYPE_CHECKING:
    from torch import Tensor

    from vitlab.serving.explaining import SeenPhoto

_FEWEST, _MOST = 2, 8  # decoders: with one, a hostile image would stop all others for as long as it is allowed to take
_NICE = 5  # the model's threads wait for each other, so that one that is interrupted costs all of them
_START_SECONDS = 120.0
_READY, _PIXELS, _REFUSED = b"r", b"+", b"-"
_SIZES = struct.Struct(">4I")  # rows and columns of a photo, and of what is shown of it
# What decoding says -> the code of the answer, first match first. The texts stay inside.
_REASONS = (
    ("pixels", "too_many_pixels"),
    ("too long and thin", "bad_shape"),
    ("HEIC", "unsupported_format"),
    ("more memory", "costly_image"),
)


def usual_decoders() -> int:
    """One core is the model's."""
    return max(_FEWEST, min(_MOST, usable_cores() - 1))


# --- inside a process -------------------------------------------------------------------------------------------------


def main(connection: Connection, memory: int) -> None:
    """Decode until the front is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import torch

    from vitlab.core.memory import limit_memory
    from vitlab.data.decode import hush_process

    torch.set_num_threads(1)
    hush_process()
    if hasattr(os, "nice"):
        os.nice(_NICE)
    limit_memory(memory)
    connection.send_bytes(_READY)
    with contextlib.suppress(EOFError, OSError):
        while True:
            rule, whole = connection.recv()
            connection.send_bytes(_decoded(connection.recv_bytes(), rule, whole=whole))


def _decoded(data: bytes, rule: Preprocess, *, whole: bool) -> bytes:
    from vitlab.data.decode import read
    from vitlab.serving.explaining import see

    try:
        return _PIXELS + (pack_photo(see(data, rule)) if whole else _together(read(data, rule)))
    except VitlabError as error:
        return _REFUSED + next((code for words, code in _REASONS if words in error.what), "bad_image").encode()
    except MemoryError:
        return _REFUSED + b"costly_image"
    except Exception:
        return _REFUSED + b"bad_image"


def _together(image_CYX: "Tensor") -> bytes:
    """uint8 [rows, columns, channels]"""
    return image_CYX.permute(1, 2, 0).numpy().tobytes()


def pack_photo(photo: "SeenPhoto") -> bytes:
    """What is seen of a photo that is to be explained, as bytes."""
    sizes = (*photo.size, *photo.shown_CYX.shape[1:])
    return _SIZES.pack(*sizes) + _together(photo.pixels_CYX) + _together(photo.shown_CYX)


def unpack_photo(data: bytes, rule: Preprocess) -> "SeenPhoto":
    from vitlab.serving.explaining import SeenPhoto

    rows, cols, shown_rows, shown_cols = _SIZES.unpack_from(data)
    start = _SIZES.size + rule.channels * rule.image_size[0] * rule.image_size[1]
    pixels_CYX = unpack_pixels(data[_SIZES.size : start], rule.image_size, rule.channels)
    return SeenPhoto(pixels_CYX, unpack_pixels(data[start:], (shown_rows, shown_cols), rule.channels), (rows, cols))


def unpack_pixels(data: bytes, size: tuple[int, int], channels: int) -> "Tensor":
    """[C, Y, X], in the memory layout that `data.decode.read` gives: the last bits of an answer depend on it."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(*size, channels).permute(2, 0, 1)


# --- in the front -----------------------------------------------------------------------------------------------------


class _Decoder:
    """One process and the pipe to it."""

    def __init__(self, memory: int) -> None:
        context = process_context()
        self._connection, there = context.Pipe()
        self._process: Any = context.Process(target=main, args=(there, memory), daemon=True, name="vitlab-decoder")
        self._process.start()
        there.close()
        self._ready = False

    def decode(self, data: bytes, rule: Preprocess, seconds: float, *, whole: bool) -> bytes:
        """Raises EOFError, OSError or TimeoutError where the process has to be replaced."""
        if not self._ready:
            self._receive(_START_SECONDS)
            self._ready = True
        self._connection.send((rule, whole))
        self._connection.send_bytes(data)
        found = self._receive(seconds)
        if found[:1] == _PIXELS:
            return found[1:]
        code = found[1:].decode("ascii", "replace")
        raise Refusal(code if code in OF_IMAGES else "bad_image")

    def _receive(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes()

    def close(self) -> None:
        self._process.kill()
        self._connection.close()


class Decoders:
    """As many processes as threads that wait for them."""

    def __init__(self, count: int, seconds: float, memory: int, lost: Callable[[], None]) -> None:
        self._seconds, self._memory, self._lost = seconds, memory, lost
        self._closed = False
        self._threads = ThreadPoolExecutor(count, "decode")
        self._idle: queue.SimpleQueue[_Decoder] = queue.SimpleQueue()
        self._all = {_Decoder(memory) for _ in range(count)}
        for decoder in self._all:
            self._idle.put(decoder)

    async def decode(self, data: bytes, rule: Preprocess, *, whole: bool = False) -> bytes:
        """What `data.decode.read` gives, as uint8 [rows, columns, channels]; or, if `whole`, a packed photo."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, data, rule, whole)

    def _decode(self, data: bytes, rule: Preprocess, whole: bool) -> bytes:
        decoder = self._idle.get()
        try:
            for last_try in (False, True):
                try:
                    return decoder.decode(data, rule, self._seconds, whole=whole)
                except TimeoutError:
                    decoder = self._replace(decoder)
                    raise Refusal("costly_image") from None
                except (EOFError, OSError):  # it has died: of this image, or somebody has killed it
                    decoder = self._replace(decoder)
                    if last_try:
                        raise Refusal("costly_image") from None
            raise AssertionError
        finally:
            self._idle.put(decoder)

    def _replace(self, decoder: _Decoder) -> _Decoder:
        """A new one; where none can be started now, the next use of the dead one tries again."""
        decoder.close()
        if self._closed:
            raise Refusal("not_ready")
        try:
            fresh = _Decoder(self._memory)
        except OSError:
            raise Refusal("not_ready") from None
        self._lost()
        self._all.discard(decoder)
        self._all.add(fresh)
        return fresh

    def close(self) -> None:
        self._closed = True
        for decoder in list(self._all):
            decoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
