"""Files from the net, whole and checked: what is under its name was received to the last byte and is what was asked for.

Owns the transfer: going on after a break, retries, limits, checks. Knows nothing of what the files are. Standard library only.
"""

import contextlib
import dataclasses
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from vitlab.core import fsio
from vitlab.core.console import Console, seconds_left
from vitlab.core.environment import free_bytes, package_version
from vitlab.core.errors import FileProblem, UsageError

_SCHEMES = ("file", "http", "https")
_CHUNK = 2**20  # bytes at a time: few calls, and little is lost when it breaks
_ATTEMPTS = 4  # in a row that bring nothing new; with the pauses between, 3.5 seconds
_PAUSE = 0.5  # seconds before the second attempt, doubled each time
_TIMEOUT = 30.0  # seconds of silence, which no healthy server keeps
_REDIRECTS = 5  # real ones need two or three
_MB = 10**6
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # answers that mean "not now"; any other refusal is final
_WRONG_RANGE = 416


class _Broken(OSError):
    """The transfer ended early, or brought what cannot be joined to the rest; another attempt may help."""


@dataclasses.dataclass(frozen=True)
class _Version:
    """What tells one state of the remote file from another; kept beside the unfinished file."""

    url: str
    etag: str | None
    modified: str | None
    total: int | None


def fetch(
    url: str, to: Path, *, size: int | None = None, sha256: str | None = None, console: Console | None = None
) -> None:
    """Brings the file at `url` to `to`, unless it is there. A break, even of this process, is mended by calling it again.

    Two processes may ask for the same file: one brings it, the other waits.
    """
    console = console or Console()
    _require_address(url)
    fsio.make_folder(to.parent)
    notes = to.with_name(f".{to.name}.partial.json")
    with fsio.growing_file(to, lambda: console.say(f"Another process is bringing {to.name}; waiting for it.")) as file:
        if to.exists():
            file.discard()
            _require_right(to, f"{to}, there already,", size, sha256)
            return
        try:
            _retry(lambda: _transfer(url, file, notes, size, sha256, console), file, url)
        except BaseException:
            if not file.size:
                file.discard()
                fsio.remove_file(notes)
            raise
        try:
            _require_right(file.path, shown(url), size, sha256)
        except FileProblem:
            file.discard()
            fsio.remove_file(notes)
            raise
        file.publish()
        fsio.remove_file(notes)


def shown(url: str) -> str:
    """An address for people: without a password or a token that may be in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _require_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or "@" in parts.netloc:
        raise UsageError(
            f"{shown(url)} is not an address to fetch from", hint="Use https, http or file, without a password."
        )


def _require_right(path: Path, what: str, size: int | None, sha256: str | None) -> None:
    found = path.stat().st_size
    if size is not None and found != size:
        raise FileProblem(f"{what} has {found:,} bytes, and {size:,} were expected")
    if sha256 is not None and (digest := fsio.hash_file(path)) != sha256:
        raise FileProblem(f"{what} has the SHA-256 {digest}, and {sha256} was expected")


# --- attempts ---------------------------------------------------------------------------------------------------------


def _retry(transfer: Callable[[], None], file: fsio.PartialFile, url: str) -> None:
    """Only a file longer than ever before counts as progress, so that this ends whatever a server does."""
    longest = failures = 0
    while True:
        try:
            return transfer()
        except (OSError, http.client.HTTPException) as error:
            if file.size > longest:
                longest, failures = file.size, 0
            failures += 1
            if failures == _ATTEMPTS:
                kept = f" after {file.size:,} bytes, which are kept" if file.size else ""
                raise FileProblem(
                    f"{shown(url)} cannot be fetched: {_reason(error)}{kept}",
                    hint="Check the connection and run the same again.",
                ) from error
            time.sleep(_PAUSE * 2 ** (failures - 1))


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(inner, BaseException):
        return _reason(inner)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _transfer(
    url: str, file: fsio.PartialFile, notes: Path, size: int | None, sha256: str | None, console: Console
) -> None:
    """One attempt, from where the last one ended if the server can and the remote file is still the same."""
    known = _read_version(notes, url) if file.size else None
    # Without a validator only a known hash can tell that the two parts belong together.
    goes_on = known is not None and bool(known.etag or known.modified or sha256) and not url.startswith("file:")
    if known is not None and goes_on and known.total == file.size:
        return
    with _open(url, file.size if goes_on else 0, file) as response:
        version = _version(url, response)
        if size is not None and version.total not in (None, size):
            raise FileProblem(f"{shown(url)} has {version.total:,} bytes, and {size:,} were expected")
        if not (goes_on and response.status == http.client.PARTIAL_CONTENT):
            file.restart()
            fsio.write_json(notes, dataclasses.asdict(version))
        elif version != known or _range_start(response) != file.size:
            file.restart()
            raise _Broken("the server sent another part of the file than was asked for")
        _require_room(notes.parent, version.total, file.size)
        _receive(response, file, size if version.total is None else version.total, console)
    if version.total is not None and file.size != version.total:
        raise _Broken(f"the connection broke at {file.size:,} of {version.total:,} bytes")


def _receive(response: http.client.HTTPResponse, file: fsio.PartialFile, limit: int | None, console: Console) -> None:
    """The body, piece by piece. Without a length there is nothing to show, and nothing that would stop a mistaken server."""
    started, begun, told = time.perf_counter(), file.size, 0
    total = max(1, (limit or 0) // _MB)
    with console.progress("download", total) if limit is not None else contextlib.nullcontext() as advance:
        while chunk := response.read(_CHUNK):
            file.append(chunk)
            if limit is None or advance is None:
                continue
            if file.size > limit:
                file.restart()
                raise FileProblem(f"the server sends more than the {limit:,} bytes that were expected")
            if file.size // _MB != told:
                told, got = file.size // _MB, file.size - begun
                speed = got / _MB / max(1e-3, time.perf_counter() - started)  # a millisecond, against division by zero
                advance(told, f"MB, {speed:.1f} MB/s, {seconds_left(started, got, limit - begun)} left")


def _require_room(folder: Path, total: int | None, have: int) -> None:
    if total is not None and (missing := total - have) > (free := free_bytes(folder)):
        raise FileProblem(
            f"{folder} has {free / _MB:,.0f} MB free, and {missing / _MB:,.0f} MB are needed",
            hint="Make room there and run the same again.",
        )


# --- the protocol -----------------------------------------------------------------------------------------------------


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A few, and never from https to something weaker."""

    max_redirections = _REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            raise FileProblem(f"{shown(req.full_url)} leads to {shown(newurl)}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, start: int, file: fsio.PartialFile) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"vitlab/{package_version('vitlab')}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        opener = urllib.request.build_opener(_Redirects)
        response = opener.open(fullurl=urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
        return cast(http.client.HTTPResponse, response)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _WRONG_RANGE and start:
            file.restart()
            raise _Broken("the server has less than was received before") from error
        if error.code in _PASSING:
            raise
        raise FileProblem(f"{shown(url)} cannot be fetched: {_reason(error)}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, FileNotFoundError):  # a file: address
            raise FileProblem(f"{shown(url)} does not exist") from error
        raise


def _version(url: str, response: http.client.HTTPResponse) -> _Version:
    """The same for a whole file and for a part of it."""
    if match := _content_range(response):
        total: int | None = int(match[3])
    else:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
    return _Version(url, response.headers.get("ETag"), response.headers.get("Last-Modified"), total)


def _content_range(response: http.client.HTTPResponse) -> re.Match[str] | None:
    return re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", response.headers.get("Content-Range", ""))


def _range_start(response: http.client.HTTPResponse) -> int | None:
    match = _content_range(response)
    return int(match[1]) if match else None


def _read_version(notes: Path, url: str) -> _Version | None:
    """None where there are no notes, none that can be read, or those of another address."""
    try:
        version = _Version(**json.loads(notes.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return version if version.url == url else None
