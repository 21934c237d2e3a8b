"""Sockets, connections and the graceful stop: not ready first, then no new connections, then all that was admitted."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from vitlab.core.errors import VitlabError
from vitlab.serving.protocol import BoundedProtocol
from vitlab.serving.service import Service
from vitlab.serving.settings import Limits

_BACKLOG = 1024
_DRAIN_LOOK_SECONDS = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not yet listening."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise VitlabError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        if os.name == "posix":  # on Windows it would let two servers have one port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise VitlabError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}", hint="Choose another with --port."
        ) from None
    return made


async def listen(app: ASGIApp, service: Service, sock: socket.socket, started: Callable[[], None]) -> None:
    """Serve until a signal comes, then drain. Raises what keeps the models from being loaded."""
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    limits = service.limits
    config, state = _config(app, service), ServerState()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}, loop), sock=sock, backlog=_BACKLOG)

    def stop_or_hurry() -> None:
        (hurry if stop.is_set() else stop).set()

    with _signals(lambda: loop.call_soon_threadsafe(stop_or_hurry)):
        loading = asyncio.ensure_future(service.start())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return
            loading.result()
            started()
            await stopping
            service.draining = True
            await _drain(server, state, limits, hurry)
        finally:
            server.close()
            service.close()
            for task in (loading, stopping):
                task.cancel()


def _config(app: ASGIApp, service: Service) -> uvicorn.Config:
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
    config.timeout_keep_alive = service.limits.keep_alive  # pyright: ignore[reportAttributeAccessIssue]
    vars(config)["service"] = service
    config.load()
    return config


async def _drain(server: asyncio.Server, state: ServerState, limits: Limits, hurry: asyncio.Event) -> None:
    """Listen a while longer, close what is idle, and wait until the last answer is written; a second signal ends that."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(hurry.wait(), limits.grace)
    server.close()
    for connection in list(state.connections):
        connection.shutdown()
    end = loop.time() + limits.drain
    while state.connections and loop.time() < end and not hurry.is_set():
        await asyncio.sleep(_DRAIN_LOOK_SECONDS)


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
