"""The images in the body of a request, read piece by piece and never beyond the limits."""

import dataclasses
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from vitlab.serving.errors import Refusal
from vitlab.serving.settings import Limits

_LONGEST_NAME = 255
_PART = b"image"
_FORM = "multipart/form-data"
_MOST_PART_HEADERS = 4096  # bytes


@dataclasses.dataclass
class Upload:
    """One image, with the name that its sender gave it."""

    name: str | None
    data: bytes


class Memory:
    """Bytes of bodies that are being received or decoded, of all requests together."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0


class Body:
    """The share of one request in that memory; given back at the end of a `with`."""

    def __init__(self, memory: Memory, limits: Limits) -> None:
        self._memory, self.limits, self._bytes = memory, limits, 0

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.bytes -= self._bytes

    def add(self, count: int) -> None:
        self._bytes += count
        self._memory.bytes += count
        if self._memory.bytes > self._memory.limit:
            raise Refusal("queue_full")
        if self._bytes > self.limits.max_body:  # cannot be, for the length was checked
            raise Refusal("body_too_large")


def check_body(request: Request, limits: Limits) -> None:
    """What the header says of the body; raises before a byte of it is read."""
    headers = request.headers
    length = headers.get("content-length")
    if length is None:
        raise Refusal("no_length")
    if not (length.isascii() and length.isdigit()):
        raise Refusal("bad_request")
    if int(length) > limits.max_body:
        raise Refusal("body_too_large")
    kind, _ = _media_type(headers.get("content-type", ""))
    if not (kind.startswith("image/") or kind in ("application/octet-stream", _FORM)):
        raise Refusal("bad_media_type")
    if headers.get("content-encoding", "identity") != "identity":
        raise Refusal("bad_media_type")


async def read_images(request: Request, body: Body) -> list[Upload]:
    """The images, once all of the body is here."""
    kind, options = _media_type(request.headers.get("content-type", ""))
    form = _Form(options.get("boundary", ""), body.limits.max_images) if kind == _FORM else None
    whole = bytearray()
    async for piece in request.stream():
        body.add(len(piece))
        if form is None:
            whole += piece
        else:
            form.feed(piece)
    images = [Upload(None, bytes(whole))] if form is None else form.images()
    if not images or (form is None and not whole):
        raise Refusal("no_image")
    return images


def _media_type(text: str) -> tuple[str, dict[str, str]]:
    kind, options = parse_options_header(text)
    return kind.decode("latin-1").lower(), {
        key.decode("latin-1"): value.decode("latin-1") for key, value in options.items()
    }


class _Form:
    """Collects the parts named `image`; any other part is an error."""

    def __init__(self, boundary: str, most: int) -> None:
        self._most, self._parts = most, list[Upload]()
        self._header, self._name, self._value = 0, bytearray(), bytearray()
        self._disposition: bytes = b""
        self._data = bytearray()
        self._ended = False
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._head(self._name, data[start:end]),
            "on_header_value": lambda data, start, end: self._head(self._value, data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": lambda data, start, end: self._data.extend(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._finish,
        }
        try:
            self._parser = MultipartParser(boundary.encode("latin-1"), callbacks)
        except (FormParserError, ValueError):
            raise Refusal("bad_multipart") from None
        if not boundary:
            raise Refusal("bad_multipart")

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError:
            raise Refusal("bad_multipart") from None

    def images(self) -> list[Upload]:
        if not self._ended:
            raise Refusal("bad_multipart")
        return self._parts

    def _begin(self) -> None:
        if len(self._parts) == self._most:
            raise Refusal("too_many_images")
        self._header, self._disposition, self._data = 0, b"", bytearray()

    def _head(self, where: bytearray, data: bytes) -> None:
        self._header += len(data)
        if self._header > _MOST_PART_HEADERS:
            raise Refusal("bad_multipart")
        where += data

    def _header_end(self) -> None:
        if bytes(self._name).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if options.get(b"name") != _PART:
            raise Refusal("bad_multipart")
        name = options.get(b"filename")
        self._parts.append(Upload(None if name is None else name.decode("utf-8", "replace")[:_LONGEST_NAME], b""))

    def _end(self) -> None:
        self._parts[-1].data = bytes(self._data)
        self._data = bytearray()

    def _finish(self) -> None:
        self._ended = True
