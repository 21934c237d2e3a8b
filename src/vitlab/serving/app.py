"""The routes: from a request to an answer, and from every failure to a row of the table of errors."""

import asyncio
import contextlib
import json
import traceback
from collections.abc import Awaitable, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.core.console import Console
from vitlab.serving.admission import Visitors
from vitlab.serving.bodies import check_body, read_images
from vitlab.serving.errors import Refusal
from vitlab.serving.openapi import DETAILS, MOST_LABELS, document
from vitlab.serving.service import Ask, Service
from vitlab.serving.settings import ServedModel

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpg": "image/jpeg",
    "webp": "image/webp",
}
_BY_STATUS = {404: "not_found", 405: "bad_method"}
_FAULTS_LOGGED = 100  # with their traceback; all are counted
_CLIENT_CLOSED = 499  # as nginx has it


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
    app = Starlette(
        routes=routes,
        exception_handlers={
            HTTPException: handlers.http,
            Refusal: handlers.refused,
            ClientDisconnect: handlers.gone,
            Exception: handlers.failed,
        },
    )
    app.router.redirect_slashes = False
    return _Guard(app, handlers, visitors, console, frozenset(route.path for route in routes))


class _Guard:
    """Around all routes: who may ask, what every answer carries, what is counted, and who hears of a fault of ours."""

    def __init__(
        self, app: ASGIApp, handlers: "_Handlers", visitors: Visitors, console: Console, known: frozenset[str]
    ) -> None:
        self._app, self._handlers, self._visitors, self._console, self._known = app, handlers, visitors, console, known
        self._faults = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        route = path if path in self._known else "/assets" if path.startswith("/assets/") else "other"
        counts = self._handlers.service.metrics

        async def safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SAFE]
                counts.requests.add(f'route="{route}",status="{message["status"]}"')
            await send(message)

        try:
            self._visitors.check(scope["method"], path, Headers(scope=scope))
        except Refusal as refusal:
            await (await self._handlers.refused(None, refusal))(scope, receive, safely)
            return
        try:
            await self._app(scope, receive, safely)
        except Exception:  # answered already, by `failed`
            self._faults += 1
            if self._faults <= _FAULTS_LOGGED:
                self._console.say(f"error: a request failed\n{traceback.format_exc().rstrip()}")


def to_response(found: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "backslashreplace"), status, headers, "application/json")


class _Handlers:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.files = _page_files()
        self.document = to_response(document(service.limits)).body

    # --- what went wrong ----------------------------------------------------------------------------------------------

    async def refused(self, _: Request | None, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        self.service.metrics.refused.add(f'code="{refusal.code}"')
        return to_response({"error": refusal.to_json()}, refusal.problem.status, refusal.headers())

    async def http(self, _: Request, error: Exception) -> Response:
        """Starlette's own: no such route, no such method."""
        assert isinstance(error, HTTPException)
        answer = await self.refused(None, Refusal(_BY_STATUS.get(error.status_code, "bad_request")))
        answer.headers.update({name.lower(): value for name, value in (error.headers or {}).items()})
        return answer

    async def failed(self, *_: object) -> Response:
        return await self.refused(None, Refusal("internal"))

    async def gone(self, *_: object) -> Response:
        """Nobody reads this; it is counted."""
        return Response(status_code=_CLIENT_CLOSED)

    # --- images -------------------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        query = _query(request, {"model", "top"})
        top = _whole_number(query.get("top", "5"))
        model = self._admit(request, query)
        if not model[1].labels:
            raise Refusal("no_labels")
        names, found = await self._answers(request, Ask(*model, "predict", {"top": top}))
        return to_response({"model": model[1].name, "results": _results(names, found, "top")})

    async def embed(self, request: Request) -> Response:
        model = self._admit(request, _query(request, {"model"}))
        names, found = await self._answers(request, Ask(*model, "embed", {}))
        results = _results(names, found, "vector")
        return to_response({"model": model[1].name, "dimensions": model[1].dimensions, "results": results})

    async def explain(self, request: Request) -> Response:
        query = _query(request, {"model", "method", "label", "detail"})
        model = self._admit(request, query)
        method, label, detail = query.get("method"), query.get("label"), query.get("detail", "full")
        if not model[1].methods:
            raise Refusal("cannot_explain")
        if detail not in DETAILS or method not in (None, *model[1].methods):
            raise Refusal("bad_parameter")
        if label not in (None, *model[1].labels):
            raise Refusal("unknown_label")
        png = "image/png" in request.headers.get("accept", "")
        wanted = {"method": method, "label": label, "detail": detail, "png": png}
        names, (found,) = await self._answers(request, Ask(*model, "explain", wanted))
        _results(names, [found], "found")
        return Response(found, media_type="image/png") if png else to_response({"model": model[1].name, **found})

    def _admit(self, request: Request, query: dict[str, str]) -> tuple[int, ServedModel]:
        """By the header alone; which model it is about."""
        if not self.service.process.ready:
            raise Refusal("not_ready")
        self.service.room.require()
        check_body(request, self.service.limits)
        return self.service.model(query.get("model"))

    async def _answers(self, request: Request, ask: Ask) -> tuple[list[str | None], list[Any]]:
        """The names of the images, and what is found of each."""
        with self.service.body() as body:
            uploads = await read_images(request, body)
            if ask.kind == "explain" and len(uploads) > 1:
                raise Refusal("one_image")
            names = [upload.name for upload in uploads]
            return names, await _unless_gone(request, self.service.answer(ask, uploads))

    # --- facts --------------------------------------------------------------------------------------------------------

    async def models(self, _: Request) -> Response:
        return to_response({"models": [self._described(model) for model in self.service.process.models]})

    async def model(self, request: Request) -> Response:
        return to_response(self._described(self.service.model(_query(request, {"model"}).get("model"))[1]))

    def _described(self, model: ServedModel) -> dict[str, Any]:
        limits = self.service.limits
        return model.to_json() | {"limits": {"image_bytes": limits.max_body, "images_per_request": limits.max_images}}

    async def health(self, _: Request) -> Response:
        """Unhealthy where the last try to load the models again failed: whoever started the server can start another."""
        if self.service.process.failing:
            raise Refusal("model_failed")
        return to_response({"status": "ok"})

    async def readiness(self, _: Request) -> Response:
        if not self.service.ready:
            raise Refusal("not_ready")
        return to_response({"status": "ready"})

    async def metrics(self, _: Request) -> Response:
        text = self.service.metrics.text(self.service.gauges())
        return Response(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(self, _: Request) -> Response:
        return Response(self.document, media_type="application/json")

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
                found[name] = (_TYPES.get(name.rpartition(".")[2], "application/octet-stream"), entry.read_bytes())

    if (folder := resources.files("vitlab.serving") / "page").is_dir():
        collect(folder, "")
    return found


def _query(request: Request, known: set[str]) -> dict[str, str]:
    """Each at most once, and no other; what is left empty is not given."""
    pairs = request.query_params.multi_items()
    if len({name for name, _ in pairs} & known) < len(pairs):
        raise Refusal("bad_parameter")
    return {name: value for name, value in pairs if value}


def _results(names: Sequence[str | None], found: Sequence[Any], key: str) -> list[dict[str, Any]]:
    """One for each image; an error where there is none but errors."""
    if all(isinstance(each, Refusal) for each in found):
        raise found[0]
    return [
        {"name": name} | ({"error": each.to_json()} if isinstance(each, Refusal) else {key: each})
        for name, each in zip(names, found, strict=True)
    ]


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
