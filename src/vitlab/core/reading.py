"""Reading files that somebody else wrote: regular files only, of a bounded size, with one kind of error.

The counterpart of `fsio`, which writes. A path may name a FIFO, a device or a folder; opening those would wait for ever, so
nothing but a regular file is ever opened. What a file holds is data: it is parsed, never executed.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from vitlab.core.errors import FileProblem

_JSON_BYTES = 2**28  # a table of 1.3 million file names and labels has 100 MB
# Without O_NONBLOCK, a FIFO that takes the file's place between the look and the opening would wait for a writer.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading bytes. Absent or forbidden is an OSError; any other kind of file, a FileProblem."""
    require_regular(path, Path(path).stat())
    descriptor = os.open(path, _FLAGS)
    try:
        require_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(path: str | Path, found: os.stat_result) -> None:
    """An error for a FIFO, a socket, a device or a folder."""
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "special file")
        raise FileProblem(f"{path} is a {kind}, not a regular file", hint="Name a file, or remove it from the folder.")


_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "FIFO"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def read_bytes(path: str | Path, limit: int | None = None) -> bytes:
    """All bytes of a regular file; an error for one of more than `limit`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise FileProblem(f"{path} has {size:,} bytes; at most {limit:,} are read of such a file")
        return file.read() if limit is None else file.read(limit + 1)[:limit]


def read_text(path: str | Path, limit: int | None = None, encoding: str = "utf-8") -> str:
    """The text of a regular file, with `\\n` at the end of every line; an error for bytes that are no text."""
    try:
        text = read_bytes(path, limit).decode(encoding)
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not {encoding} text: byte {error.start} does not belong there") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path, limit: int = _JSON_BYTES) -> Any:
    """The document in a JSON file. Whatever the file holds, the only errors are FileProblem and, for its absence, OSError."""
    text = read_text(path, limit)
    try:
        return json.loads(text)
    except RecursionError:
        raise FileProblem(f"{path} is nested too deeply to be read") from None
    except ValueError as error:  # not JSON, or a whole number of thousands of digits
        raise FileProblem(f"{path} is not a JSON file that can be read: {error}") from None
