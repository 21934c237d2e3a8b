"""Images of strangers are decoded in processes of their own, with a limit of memory and a deadline for each image.

One that takes too long is killed and replaced, as is one that dies. What they say is read as plain bytes, never unpickled: a
decoder that an image has taken over can give wrong pixels for that image, and nothing else.
"""

import asyncio
import contextlib
import io
import os
import queue
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from vitlab.core.errors import VitlabError
from vitlab.data.rules import Preprocess
from vitlab.serving.errors import OF_IMAGES, Refusal
from vitlab.serving.processes import process_context

_FEWEST, _MOST = 2, 8  # decoders: with one, a hostile image would stop all others for as long as it is allowed to take
_NICE = 5  # the model's threads wait for each other, so that one that is interrupted costs all of them
_START_SECONDS = 120.0
_READY, _PIXELS, _REFUSED = b"r", b"+", b"-"
_LARGEST_PHOTO = 4_000_000  # pixels of a photo that is explained: more cannot be seen
# What decoding says -> the code of the answer, first match first. The texts stay inside.
_REASONS = (
    ("pixels", "too_many_pixels"),
    ("too long and thin", "bad_shape"),
    ("HEIC", "unsupported_format"),
    ("more memory", "costly_image"),
)


def usual_decoders() -> int:
    """One core is the model's."""
    return max(_FEWEST, min(_MOST, (os.cpu_count() or 1) - 1))


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

    try:
        image_CYX = read(data, rule)
        return _PIXELS + (_photo(data, rule) if whole else image_CYX.permute(1, 2, 0).numpy().tobytes())
    except VitlabError as error:
        return _REFUSED + next((code for words, code in _REASONS if words in error.what), "bad_image").encode()
    except MemoryError:
        return _REFUSED + b"costly_image"
    except Exception:
        return _REFUSED + b"bad_image"


def _photo(data: bytes, rule: Preprocess) -> bytes:
    """The file itself, now that it is known to be harmless; a very large one made smaller."""
    from PIL import Image

    from vitlab.data.decode import decode

    photo_CYX = decode(data, rule.mode, rule.bits)
    rows, cols = photo_CYX.shape[1:]
    if rows * cols <= _LARGEST_PHOTO:
        return data
    times = (_LARGEST_PHOTO / (rows * cols)) ** 0.5
    photo_YXC = photo_CYX.permute(1, 2, 0).numpy()
    photo = Image.fromarray(photo_YXC if rule.channels > 1 else photo_YXC[:, :, 0])
    buffer = io.BytesIO()
    photo.resize((max(1, int(cols * times)), max(1, int(rows * times))), Image.Resampling.BOX).save(
        buffer, format="PNG", compress_level=1
    )
    return buffer.getvalue()


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
        self._threads = ThreadPoolExecutor(count, "decode")
        self._idle: queue.SimpleQueue[_Decoder] = queue.SimpleQueue()
        self._all = [_Decoder(memory) for _ in range(count)]
        for decoder in self._all:
            self._idle.put(decoder)

    async def decode(self, data: bytes, rule: Preprocess, *, whole: bool = False) -> bytes:
        """What `data.decode.read` gives, as uint8 [rows, columns, channels]; or, if `whole`, the photo as a file."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decode, data, rule, whole)

    def _decode(self, data: bytes, rule: Preprocess, whole: bool) -> bytes:
        decoder = self._idle.get()
        try:
            return decoder.decode(data, rule, self._seconds, whole=whole)
        except (EOFError, OSError, TimeoutError):
            decoder.close()
            self._all.remove(decoder)
            decoder = _Decoder(self._memory)
            self._all.append(decoder)
            self._lost()
            raise Refusal("costly_image") from None
        finally:
            self._idle.put(decoder)

    def close(self) -> None:
        for decoder in self._all:
            decoder.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
