"""Download files, resume after a break, verify size and SHA-256.

Owns the transfer: retries, limits, checks. Knows nothing of what the files are. Standard library only.
"""

import contextlib
import http.client
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
_ATTEMPTS = 4  # in a row without progress; with the pauses between, 3.5 seconds
_PAUSE = 0.5  # seconds before the second attempt, doubled each time
_TIMEOUT = 30.0  # seconds without a byte
_REDIRECTS = 5  # real ones need two or three
_MB = 10**6
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}  # any other refusal is final


class _Broken(OSError):
    """The transfer ended early, or cannot be resumed; another attempt may help."""


def fetch(
    url: str, to: Path, *, size: int | None = None, sha256: str | None = None, console: Console | None = None
) -> None:
    """Download `url` to `to`, unless it exists; call it again to resume after a break.

    A broken connection is resumed where it broke. A later call resumes only a file of known `size` or `sha256`: nothing
    else tells whether two parts belong together. If two processes fetch the same file, one downloads it and the other waits.
    """
    console = console or Console()
    resumable, version = size is not None or sha256 is not None, _Version()
    _require_address(url)
    fsio.make_folder(to.parent)
    with fsio.partial_file(
        to, lambda: console.say(f"Another process is downloading {to.name}; waiting for it.")
    ) as file:
        if to.exists():
            file.discard()
            _verify(to, f"{to}, which exists,", size, sha256)
            return
        try:
            _retry(
                lambda: _transfer(url, file, size, version, console, resumable=resumable),
                file,
                url,
                resumable=resumable,
            )
        except BaseException:
            if not file.size or not resumable:
                file.discard()
            raise
        try:
            _verify(file.path, shown(url), size, sha256)
        except FileProblem:
            file.discard()
            raise
        file.publish()


def shown(url: str) -> str:
    """Format an address for messages, without a password or a token that may be in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _require_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or "@" in parts.netloc:
        raise UsageError(
            f"{shown(url)} is not an address to fetch from", hint="Use https, http or file, without a password."
        )


def _verify(path: Path, what: str, size: int | None, sha256: str | None) -> None:
    found = path.stat().st_size
    if size is not None and found != size:
        raise FileProblem(f"{what} has {found:,} bytes, and {size:,} were expected")
    if sha256 is not None and (digest := fsio.hash_file(path)) != sha256:
        raise FileProblem(f"{what} has the SHA-256 {digest}, and {sha256} was expected")


# --- attempts ---------------------------------------------------------------------------------------------------------


class _Version:
    """What the server calls the file that is being fetched (its strong ETag); empty where it does not say."""

    etag = ""


def _retry(transfer: Callable[[], None], file: fsio.PartialFile, url: str, *, resumable: bool) -> None:
    """Retry; only a file longer than ever before counts as progress, so this ends."""
    longest = failures = 0
    while True:
        try:
            return transfer()
        except (OSError, http.client.HTTPException) as error:
            if file.size > longest:
                longest, failures = file.size, 0
            failures += 1
            if failures == _ATTEMPTS:
                after = f" after {file.size:,} bytes, which are kept" if file.size and resumable else ""
                raise FileProblem(
                    f"{shown(url)} cannot be fetched: {_reason(error)}{after}",
                    hint="Check the connection and run the same command again.",
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
    url: str, file: fsio.PartialFile, size: int | None, version: _Version, console: Console, *, resumable: bool
) -> None:
    """One attempt, from where the file ends if it is `resumable` or has the version of an attempt before."""
    if file.size == size:
        return
    start = file.size if (resumable or version.etag) and not url.startswith("file:") else 0
    with _open(url, start, file, version.etag) as response:
        etag = response.headers.get("ETag", "")
        version.etag = "" if etag.startswith("W/") else etag
        is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if not start or not is_rest:
            file.restart()
        if response.status == http.client.PARTIAL_CONTENT and not is_rest:
            raise _Broken("the server sent another part of the file than was requested")
        length = response.headers.get("Content-Length", "")
        total = file.size + int(length) if length.isdecimal() else None
        if size is not None and total not in (None, size):
            raise FileProblem(f"{shown(url)} has {total:,} bytes, and {size:,} were expected")
        _require_room(file.path.parent, total, file.size)
        _receive(response, file, size if total is None else total, console)
    if total is not None and file.size != total:
        raise _Broken(f"the connection broke at {file.size:,} of {total:,} bytes")


def _receive(response: http.client.HTTPResponse, file: fsio.PartialFile, limit: int | None, console: Console) -> None:
    """Append the body to the file; without a length, no progress and no limit."""
    started, resumed_at, shown_mb = time.perf_counter(), file.size, 0
    total = max(1, (limit or 0) // _MB)
    with console.progress("download", total) if limit is not None else contextlib.nullcontext() as advance:
        while chunk := response.read(_CHUNK):
            file.append(chunk)
            if limit is None or advance is None:
                continue
            if file.size > limit:
                file.restart()
                raise FileProblem(f"the server sends more than the {limit:,} bytes that were expected")
            if file.size // _MB != shown_mb:
                shown_mb, got = file.size // _MB, file.size - resumed_at
                speed = got / _MB / max(1e-3, time.perf_counter() - started)  # a millisecond, against division by zero
                advance(shown_mb, f"MB, {speed:.1f} MB/s, {seconds_left(started, got, limit - resumed_at)} left")


def _require_room(folder: Path, total: int | None, have: int) -> None:
    if total is not None and (missing := total - have) > (free := free_bytes(folder)):
        raise FileProblem(
            f"{folder} has {free / _MB:,.0f} MB free, and {missing / _MB:,.0f} MB are needed",
            hint="Free some space there and run the same command again.",
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
            raise FileProblem(f"{shown(req.full_url)} redirects to {shown(newurl)}, which is not allowed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, start: int, file: fsio.PartialFile, etag: str) -> http.client.HTTPResponse:
    headers = {"User-Agent": f"vitlab/{package_version('vitlab')}", "Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-"} | ({"If-Range": etag} if etag else {})
    try:
        opener = urllib.request.build_opener(_Redirects)
        response = opener.open(fullurl=urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
        return cast(http.client.HTTPResponse, response)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _TRANSIENT:
            raise
        if start and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # the range is refused, not the file
            file.restart()
            raise _Broken(_reason(error)) from error
        raise FileProblem(f"{shown(url)} cannot be fetched: {_reason(error)}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, FileNotFoundError):  # a file: address
            raise FileProblem(f"{shown(url)} does not exist") from error
        raise
