"""The routes: from a request to an answer, and from every failure to a row of the table of errors."""

import asyncio
import contextlib
import json
import mimetypes
import traceback
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.core.console import Console
from vitlab.serving.admission import Visitors
from vitlab.serving.bodies import check_body, read_images
from vitlab.serving.errors import Refusal
from vitlab.serving.openapi import MOST_LABELS, document
from vitlab.serving.service import Service

_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_SAFE = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_BY_STATUS = {404: "not_found", 405: "bad_method"}
_NAMES = 64 * 2**10  # characters of a query


def make_app(service: Service, visitors: Visitors, console: Console) -> ASGIApp:
    """The server as an ASGI application."""
    handlers = _Handlers(service)
    get, post = ["GET"], ["POST"]
    routes = [
        Route("/", handlers.page, methods=get),
        Route("/assets/{file:path}", handlers.asset, methods=get),
        Route("/v1/predict", handlers.predict, methods=post),
        Route("/v1/embed", handlers.embed, methods=post),
        Route("/v1/explain", handlers.explain, methods=post),
        Route("/v1/models", handlers.models, methods=get),
        Route("/v1/model", handlers.model, methods=get),
        Route("/healthz", handlers.health, methods=get),
        Route("/readyz", handlers.readiness, methods=get),
        Route("/metrics", handlers.metrics, methods=get),
        Route("/openapi.json", handlers.openapi, methods=get),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http, Refusal: _refused})
    app.router.redirect_slashes = False
    known = frozenset(route.path for route in routes)
    return _Guard(app, service, visitors, console, known)


class _Guard:
    """Around all routes: who may ask, what every answer carries, what is counted, and what becomes of a fault of ours."""

    def __init__(
        self, app: ASGIApp, service: Service, visitors: Visitors, console: Console, known: frozenset[str]
    ) -> None:
        self.app, self.service, self.visitors, self.console, self.known = app, service, visitors, console, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request, path, started = Request(scope, receive), scope["path"], False
        route = path if path in self.known else "/assets" if path.startswith("/assets/") else "other"

        async def safely(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *_SAFE]
                self.service.metrics.requests.add(f'route="{route}",status="{message["status"]}"')
            await send(message)

        try:
            self.visitors.check(scope["method"], path, request.headers)
            await self.app(scope, receive, safely)
        except Refusal as refusal:
            await (await _refused(request, refusal))(scope, receive, safely)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except Exception:
            self.console.say(f"error: a request failed\n{traceback.format_exc().rstrip()}")
            if not started:
                await (await _refused(request, Refusal("internal")))(scope, receive, safely)


def to_response(found: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "backslashreplace"), status, headers, "application/json")


async def _refused(_: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return to_response({"error": refusal.to_json()}, refusal.problem.status, refusal.headers())


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = await _refused(request, Refusal(_BY_STATUS.get(error.status_code, "bad_request")))
    if error.headers and "Allow" in error.headers:
        answer.headers["allow"] = error.headers["Allow"]
    return answer


class _Handlers:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.files = _page_files()

    # --- images -------------------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        query = _query(request, {"model", "top"})
        top = _whole_number(query.get("top", "5"))

        def check(labels: int) -> None:
            if not labels:
                raise Refusal("no_labels")

        return await self._images(request, "predict", {"top": top}, "top", check)

    async def embed(self, request: Request) -> Response:
        _query(request, {"model"})
        return await self._images(request, "embed", {}, "vector", lambda _: None)

    async def _images(
        self, request: Request, kind: Any, wanted: dict[str, Any], key: str, check: Callable[[int], None]
    ) -> Response:
        service = self.service
        deadline = asyncio.get_running_loop().time() + service.limits.deadline
        self._admit(request)
        number, model = service.model(request.query_params.get("model"))
        check(len(model.labels))
        uploads = await read_images(request, service.limits, service.receiving)
        names = [upload.name for upload in uploads]
        found = await _unless_gone(request, service.answer((number, model), kind, uploads, wanted, deadline))
        if all(isinstance(each, Refusal) for each in found):
            raise found[0]
        results = [
            {"name": name} | ({"error": each.to_json()} if isinstance(each, Refusal) else {key: each})
            for name, each in zip(names, found, strict=True)
        ]
        more = {"dimensions": model.dimensions} if kind == "embed" else {}
        return to_response({"model": model.name, **more, "results": results})

    async def explain(self, request: Request) -> Response:
        query, service = _query(request, {"model", "method", "label"}), self.service
        deadline = asyncio.get_running_loop().time() + service.limits.deadline
        self._admit(request)
        number, model = service.model(query.get("model"))
        method, label = query.get("method"), query.get("label")
        if method is not None and method not in model.methods:
            raise Refusal("bad_parameter")
        if label is not None and label not in model.labels:
            raise Refusal("unknown_label")
        uploads = await read_images(request, service.limits, service.receiving)
        if len(uploads) != 1:
            raise Refusal("one_image")
        png = "image/png" in request.headers.get("accept", "")
        wanted = {"method": method, "label": label, "png": png}
        (found,) = await _unless_gone(request, service.answer((number, model), "explain", uploads, wanted, deadline))
        if isinstance(found, Refusal):
            raise found
        return Response(found, media_type="image/png") if png else to_response({"model": model.name} | found)

    def _admit(self, request: Request) -> None:
        """By the header alone."""
        if not self.service.process.ready:
            raise Refusal("not_ready")
        self.service.room.require()
        check_body(request, self.service.limits)

    # --- facts --------------------------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        return to_response({"models": [model.to_json() for model in self.service.process.models]})

    async def model(self, request: Request) -> Response:
        return to_response(self.service.model(_query(request, {"model"}).get("model"))[1].to_json())

    async def health(self, _: Request) -> Response:
        return to_response({"status": "ok"})

    async def readiness(self, _: Request) -> Response:
        if not self.service.ready:
            raise Refusal("not_ready")
        return to_response({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        text = self.service.metrics.text(self.service.gauges())
        return Response(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(self, _: Request) -> Response:
        return to_response(document(self.service.limits))

    # --- the page -----------------------------------------------------------------------------------------------------

    async def page(self, _: Request) -> Response:
        return self._file("index.html")

    async def asset(self, request: Request) -> Response:
        return self._file(request.path_params["file"])

    def _file(self, name: str) -> Response:
        if name not in self.files:
            raise Refusal("not_found")
        kind, data = self.files[name]
        return Response(data, media_type=kind)


def _page_files() -> dict[str, tuple[str, bytes]]:
    """Read once: nothing that a request says is ever part of a path."""
    found = dict[str, tuple[str, bytes]]()

    def collect(folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            name = f"{prefix}{entry.name}"
            if entry.is_dir():
                collect(entry, f"{name}/")
            else:
                kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
                found[name] = (kind, entry.read_bytes())  # of the package's own resources

    if (folder := resources.files("vitlab.serving") / "page").is_dir():
        collect(folder, "")
    return found


def _query(request: Request, known: set[str]) -> dict[str, str]:
    pairs = request.query_params.multi_items()
    if len({name for name, _ in pairs} & known) < len(pairs) or len(request.url.query) > _NAMES:
        raise Refusal("bad_parameter")
    return dict(pairs)


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= MOST_LABELS):
        raise Refusal("bad_parameter")
    return int(text)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled as soon as the client has closed its connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError, Refusal, ClientDisconnect):
            await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
