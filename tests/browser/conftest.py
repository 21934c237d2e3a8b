"""A real browser for every test of this folder: Chromium (`VITLAB_CHROMIUM`, or on the path), driven by Playwright.

Needs `pip install playwright axe-playwright-python`; without them, or without Chromium, the tests are skipped.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("VITLAB_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PACKAGES = ("playwright", "axe_playwright_python")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before any fixture is made: pages take a while."""
    reason = "needs Chromium on the path, or VITLAB_CHROMIUM" if CHROMIUM is None else ""
    if MISSING:
        reason = f"needs {', '.join(MISSING)}: pip install playwright axe-playwright-python"
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")  # ended before a file elsewhere starts one: two cannot run in one process
def browser() -> Generator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Generator[Callable[..., Any]]:
    """Opens a page file; whatever it logs, throws or asks for is noted on it, and must be nothing at the end."""
    contexts: list[Any] = []
    noted: list[str] = []

    def call(path: Path, width: int = 1280, theme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, has_touch=width < 500
        )
        contexts.append(context)
        page = context.new_page()
        address = path.absolute().as_uri()
        page.on("console", lambda message: noted.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: noted.append(f"error: {error}"))
        page.on("request", lambda request: _is_inside(request.url, address) or noted.append(f"request: {request.url}"))
        page.goto(address)
        return page

    yield call
    for context in contexts:
        context.close()
    assert not noted


def _is_inside(url: str, address: str) -> bool:
    return url.startswith("data:") or url.partition("#")[0] == address


@pytest.fixture
def serious() -> Callable[[Any], list[str]]:
    """What axe finds that keeps people from reading a page."""

    def call(page: Any) -> list[str]:
        import axe_playwright_python

        page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    return call
