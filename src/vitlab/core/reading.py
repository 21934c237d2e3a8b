"""Read files from others: regular files of bounded size, one kind of error.

The counterpart of `fsio`, which writes. A path may name a FIFO, a device or a folder; opening those would block forever, so
nothing but a regular file is ever opened. What a file holds is data: it is parsed, never executed.
"""

import contextlib
import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from vitlab.core.errors import FileProblem, Unreadable

_JSON_BYTES = 2**28  # a table of 1.3 million file names and labels has 100 MB
_SPARSE_CHECK_FROM = 2**28  # bytes of a file, a second of reading: a longer one is checked for holes
_MOST_SPARSE = 16  # length of a file by what is on disk; file systems that compress reach three on weights
# Without O_NONBLOCK, a FIFO that takes the file's place between the look and the opening would wait for a writer.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "FIFO"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def open_regular(path: str | Path, limit: int | None = None) -> io.BufferedReader:
    """Open a regular file of at most `limit` bytes.

    Raises OSError if it is absent or forbidden, FileProblem for any other kind of file or a longer one.
    """
    try:
        require_regular(path, os.stat(path))  # noqa: PTH116 (a million images)
    except ValueError:  # a name that no file can have
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    descriptor = os.open(path, _FLAGS)
    try:
        found = os.fstat(descriptor)
        require_regular(path, found)
        if limit is not None and found.st_size > limit:
            raise FileProblem(f"{path} has {found.st_size:,} bytes, more than the {limit:,} allowed for such a file")
        if found.st_size > _SPARSE_CHECK_FROM:
            _require_on_disk(path, descriptor, found)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_regular(path: str | Path, found: os.stat_result) -> None:
    """An error for a FIFO, a socket, a device or a folder."""
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "special file")
        raise Unreadable(f"{path} is a {kind}, not a regular file", hint="Name a file, or remove it from the folder.")


def _require_on_disk(path: str | Path, descriptor: int, found: os.stat_result) -> None:
    """Raise for a file that is mostly holes: a terabyte of them takes no room, but an hour."""
    on_disk, first_hole = getattr(found, "st_blocks", found.st_size) * 512, found.st_size
    if on_disk * _MOST_SPARSE < found.st_size:
        # Some network file systems report no blocks for any file, and do not know holes.
        with contextlib.suppress(OSError):
            first_hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    if first_hole < found.st_size:
        raise FileProblem(
            f"{path} has {found.st_size:,} bytes, of which only {on_disk:,} are on disk: it was never written completely",
            hint="Download or copy it again.",
        )
    os.lseek(descriptor, 0, os.SEEK_SET)


def file_version(path: str | Path) -> str:
    """Size and time of the last change, as text; empty for a file that is gone."""
    try:
        status = os.stat(path)  # noqa: PTH116 (a million images)
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def require_inside(path: Path, folder: Path) -> None:
    """Raise for a link that leads out of `folder`.

    A snapshot in a Hugging Face cache is links to `blobs` beside it, which the same download wrote.
    """
    if not path.is_symlink():
        return
    place = Path(os.path.realpath(folder))  # unlike Path.resolve, tolerates circular links
    blobs = [place.parent.parent / "blobs"] if place.parent.name == "snapshots" else []
    if not any(Path(os.path.realpath(path)).is_relative_to(home) for home in (place, *blobs)):
        raise FileProblem(
            f"{path} is a link to a file outside its folder", hint="Copy the folder with its files (cp -rL)."
        )


def read_bytes(path: str | Path, limit: int | None = None) -> bytes:
    """All bytes of a regular file; an error for one of more than `limit`."""
    with open_regular(path, limit) as file:
        return file.read()


def read_text(path: str | Path, limit: int | None = None, encoding: str = "utf-8") -> str:
    """Read a text file, with `\\n` line ends; raise for bytes that are not text."""
    try:
        text = read_bytes(path, limit).decode(encoding)
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is not {encoding} text: invalid byte at position {error.start}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path, limit: int = _JSON_BYTES, *, unique: bool = False) -> Any:
    """Parse a JSON file; raises FileProblem or, if it is absent, OSError."""
    return parse_json(read_text(path, limit), str(path), unique=unique)


def load_json(path: str | Path, limit: int = _JSON_BYTES) -> Any:
    """As `read_json`, where the file must be there: raises FileProblem alone."""
    try:
        return read_json(path, limit)
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from error


def parse_json(text: str, origin: str, *, unique: bool = False) -> Any:
    """Parse JSON, or raise FileProblem; `unique` refuses duplicate keys."""
    try:
        found = json.loads(text, object_pairs_hook=unique_keys if unique else None)
        if "\\ud" in text.lower():  # JSON can spell half a character, which no file and no terminal takes
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise FileProblem(f"{origin} is nested too deeply to be read") from None
    except ValueError as error:  # not JSON, or a whole number of thousands of digits
        raise FileProblem(f"{origin} is not valid JSON: {error}") from None
    return found


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all differ; of two values under one key, Python would silently drop the first."""
    if len(table := dict(pairs)) != len(pairs):
        raise ValueError("it has a duplicate key")
    return table
