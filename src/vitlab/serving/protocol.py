"""HTTP/1.1 on a socket: uvicorn's protocol with deadlines and bounds that it does not have.

A request has to be here within some seconds, and more only as long as bytes keep coming; a header has a largest size; what
nobody reads any more is not kept; a client that does not take its answer is let go.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vitlab.serving.errors import Refusal
from vitlab.serving.settings import Limits

_SLOWEST = 32 * 2**10  # bytes per second of a body that may take longer than its first seconds
_WRITE_SECONDS = 10.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection. The limits lie in `config.limits`, set by whoever makes the config."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits: Limits = config.limits
        self._in_header = True  # of a request that has begun or may begin
        self._header_bytes = self._body_bytes = self._unread_bytes = 0
        self._since = 0.0
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse("too_many_connections")
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._receiving is None and self._in_header:
            self._expect_request()
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_header:
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.max_header:
                self._refuse("headers_too_large")
        elif self.cycle is not None and self.cycle.response_complete:
            self._unread_bytes += len(data)
            if self._unread_bytes > self._limits.max_body:
                self.transport.abort()

    # --- the clock ----------------------------------------------------------------------------------------------------

    def _expect_request(self) -> None:
        self._since, self._body_bytes = self.loop.time(), 0
        self._receiving = self.loop.call_later(self._limits.receive_seconds, self._check_clock)

    def _check_clock(self) -> None:
        end = self._since + self._limits.receive_seconds + self._body_bytes / _SLOWEST
        if self.loop.time() < end:
            self._receiving = self.loop.call_at(end, self._check_clock)
            return
        self._receiving = None
        self._refuse("too_slow")

    def _stop_clock(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(_WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    # --- parts of a request -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_header, self._header_bytes, self._unread_bytes = True, 0, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_header = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header:
            self._refuse("headers_too_large")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_clock()
        self._in_header, self._header_bytes = True, 0
        if self.cycle is not None:
            super().on_message_complete()

    # --- answers of its own -------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse("bad_request")

    def _unsupported_upgrade_warning(self) -> None:
        """Answered like any other request."""

    def _refuse(self, code: str) -> None:
        """Where no application can answer any more, or none has been asked yet."""
        self._stop_clock()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_raw(Refusal(code)))
        self.transport.close()


def _raw(refusal: Refusal) -> bytes:
    body = json.dumps({"error": refusal.to_json()}).encode()
    headers = refusal.headers() | {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[refusal.problem.status] + lines.encode() + b"\r\n" + body
