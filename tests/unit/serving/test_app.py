"""The routes of a server whose model is not loaded: what is open, what is guarded, and what every answer carries."""

import asyncio
from typing import Any

import httpx
import pytest

from vitlab.core.console import Console
from vitlab.serving.admission import Visitors
from vitlab.serving.app import _Handlers, make_app
from vitlab.serving.service import Service
from vitlab.serving.settings import Limits, ModelSettings, Source

TOKEN = {"Authorization": "Bearer open sesame"}


def ask(
    method: str, path: str, token: str | None = None, console: Console | None = None, **more: Any
) -> httpx.Response:
    async def once() -> httpx.Response:
        service = Service(ModelSettings((Source("m", "nowhere"),)), Limits())
        app = make_app(service, Visitors(frozenset(), token), console or Console(quiet=True))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(once())


def test_server_without_a_model_is_alive_and_not_ready() -> None:
    assert ask("GET", "/healthz").json() == {"status": "ok"}
    answer = ask("GET", "/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert answer.headers["retry-after"] == "1"
    assert ask("POST", "/v1/predict", content=b"x").json()["error"]["code"] == "not_ready"
    assert ask("GET", "/v1/models").json() == {"models": []}


def test_token_opens_what_is_guarded() -> None:
    closed = ask("GET", "/v1/models", "open sesame")
    assert (closed.status_code, closed.json()["error"]["code"]) == (401, "bad_token")
    assert closed.headers["www-authenticate"] == "Bearer"
    assert ask("GET", "/v1/models", "open sesame", headers=TOKEN).status_code == 200
    assert ask("GET", "/openapi.json", "open sesame").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/nothing", "/v1/predict"])
def test_every_answer_has_security_headers(path: str) -> None:
    headers = ask("GET", path).headers
    assert (
        "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
    )
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_method_that_is_not_there_names_those_that_are() -> None:
    assert ask("PUT", "/v1/predict").headers["allow"] == "POST"


def test_ranges_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.serving.app._page_files", lambda: {"a.js": ("text/javascript", b"0123456789")})
    answer = ask("GET", "/assets/a.js", headers={"Range": "bytes=" + ",".join(["0-1"] * 1000)})
    assert (answer.status_code, answer.content) == (200, b"0123456789")
    assert answer.headers["content-type"].startswith("text/javascript")


def test_fault_of_ours_is_logged_for_the_operator_and_not_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret of /root at 0x7f00")

    monkeypatch.setattr(_Handlers, "_described", fail)
    monkeypatch.setattr("vitlab.serving.service.Service.model", lambda *_: (0, None))
    console = Console(quiet=True)
    answer = ask("GET", "/v1/model", console=console)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text and any("secret" in line for line in console.lines)
