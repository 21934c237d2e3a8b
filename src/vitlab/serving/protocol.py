"""HTTP/1.1 on a socket: uvicorn's protocol with deadlines and bounds that it does not have.

A request has to be here within some seconds, and may take longer only as long as bytes keep coming; a header has a largest
size; connections are counted; what nobody reads any more is dropped; a client that does not take its answer is let go.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vitlab.serving.errors import Refusal
from vitlab.serving.service import Service

_SLOWEST = 32 * 2**10  # bytes per second, of a body that takes longer than the first seconds
_LONGEST_BODY = 120.0  # seconds, however fast it comes
_WRITE_SECONDS = 10.0
_LINGER_SECONDS = 1.0  # after a refusal, in which more is read: closing at once would reset the connection, and lose it


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `config.service` is the server's, put there by whoever makes the config."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._service: Service = config.service
        self._limits = self._service.limits
        self._refused = False
        self._in_header = True  # of a request that has begun, or may begin
        self._header_bytes = self._body_bytes = self._checked_bytes = self._unread_bytes = 0
        self._since = 0.0
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse("too_many_connections")
        else:
            self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._in_header and self._receiving is None:
            self._start_clock()
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if not self._in_header:
            self._drop_unread(len(data))
        elif self._header_bytes + len(data) > self._limits.max_header and self._receiving is not None:
            self._refuse("headers_too_large")
        elif self._receiving is not None:
            self._header_bytes += len(data)
        elif not self._is_answering() and self.timeout_keep_alive_task is None:
            # The rest of a body that was refused has come: uvicorn, which counts from the answer, has stopped counting.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete  # none yet before the first request

    def _drop_unread(self, size: int) -> None:
        """A client that goes on sending what was refused is heard out, within limits: a reset could lose it the answer."""
        if not self._is_answering():
            self._unread_bytes += size
            if self._unread_bytes > self._limits.max_body:
                self.transport.abort()

    # --- the clock of a request: from the connection, or its first byte, to its last -------------------------------------

    def _start_clock(self) -> None:
        self._since, self._body_bytes, self._checked_bytes = self.loop.time(), 0, 0
        self._receiving = self.loop.call_later(self._limits.receive_seconds, self._check_clock)

    def _check_clock(self) -> None:
        is_wanted = self._is_answering()  # what comes after its answer buys no time
        window = self._limits.receive_seconds / 2
        enough = self._body_bytes - self._checked_bytes >= _SLOWEST * window and is_wanted
        in_time = self.loop.time() < self._since + _LONGEST_BODY
        self._checked_bytes = self._body_bytes
        if self._in_header and is_wanted:  # the next request, pipelined
            self._receiving = self.loop.call_later(1.0, self._check_clock)
        elif (
            not self._in_header and enough and in_time
        ):  # what came before buys no time: each half of the deadline anew
            self._receiving = self.loop.call_later(window, self._check_clock)
        elif self._in_header and self._header_bytes:
            self._refuse("too_slow")
        elif self._in_header or not is_wanted:  # nothing was asked, or all is said
            self.transport.close()
        else:
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
        if self._receiving is None:  # pipelined behind another one, in the same piece of data
            self._start_clock()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._refused or self.transport.is_closing():
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header:
            self._refuse("headers_too_large")
            return
        self._in_header = False
        super().on_headers_complete()
        if self._service.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not (self._refused or self.transport.is_closing()):
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_clock()
        self._in_header, self._header_bytes = True, 0
        if not (self._refused or self.transport.is_closing()):
            super().on_message_complete()

    # --- answers of its own -------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's own words)
        self._refuse("bad_request")

    def _unsupported_upgrade_warning(self) -> None:
        """It is answered like any other request."""

    def _refuse(self, code: str) -> None:
        """Answer in place of the application, which hears that the client is gone, and close."""
        self._stop_clock()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._service.metrics.refused.add(f'code="{code}"')
        if self._is_answering():
            answered, self.cycle.disconnected = self.cycle.response_started, True
            self.cycle.message_event.set()
        else:
            answered = False
        if not answered:
            self.transport.write(_raw(Refusal(code)))
        if answered or code == "too_many_connections" or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()
            self._receiving = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)


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
