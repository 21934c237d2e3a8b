"""Sockets, connections and the graceful stop: not ready first, then no new connections, then all that was admitted."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from vitlab.core.errors import FileProblem
from vitlab.serving.protocol import BoundedProtocol
from vitlab.serving.service import Service
from vitlab.serving.settings import Limits

_BACKLOG = 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not yet listening."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise FileProblem(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        if hasattr(socket, "SO_REUSEADDR") and socket.has_dualstack_ipv6 is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise FileProblem(
            f"cannot listen on {host}, port {port}: {error.strerror or error}", hint="Choose another with --port."
        ) from None
    return made


async def listen(app: ASGIApp, service: Service, sock: socket.socket, started: Callable[[], None]) -> None:
    """Serve until a signal comes, then drain. Raises what keeps the models from being loaded."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    limits = service.limits
    config, state = _config(app, limits), ServerState()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}, loop), sock=sock, backlog=_BACKLOG)
    with _signals(lambda: loop.call_soon_threadsafe(stop.set)):
        try:
            loading = asyncio.ensure_future(service.start())
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                started()
            await stopping
            service.draining = True
            await asyncio.sleep(limits.grace)
            await _drain(server, state, limits.drain)
        finally:
            server.close()
            service.close()


def _config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    config.timeout_keep_alive = limits.keep_alive  # pyright: ignore[reportAttributeAccessIssue]
    vars(config)["limits"] = limits
    config.load()
    return config


async def _drain(server: asyncio.Server, state: ServerState, seconds: float) -> None:
    """Close what is idle, and wait for what is not."""
    server.close()
    for connection in list(state.connections):
        connection.shutdown()
    tasks: set[asyncio.Task[Any]] = set(state.tasks)
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
    await asyncio.sleep(0)  # for the transports to write what they have
    for connection in list(state.connections):
        connection.transport.close()


@contextlib.contextmanager
def _signals(stop: Callable[[], object]) -> Generator[None]:
    """`stop` is called by SIGINT and SIGTERM; Python lets the main thread listen only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
