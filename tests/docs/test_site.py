"""The documentation as a site: strict, searchable from a server and from the disk, and without a request to anybody else."""

import functools
import http.server
import importlib.util
import json
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # the site's builder brings it
from slow_cases import slow_after

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WORDS = ["gradient accumulation", "early stopping", "EMA", "linear probe", "attention rollout", "resume", "TrainResult"]


def _load_build() -> Any:
    """docs/build.py is a script, not a part of a package."""
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documentation") / "site"
    built = build.build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    # results/records has a README about the files beside it, for those who open the folder
    found = [path.relative_to(DOCS) for path in DOCS.rglob("*.md") if path.parent.name != "records"]
    pages = {path.with_suffix(".html").as_posix() for path in found}
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert pages <= built
    home = (site / "index.html").read_text(encoding="utf-8")
    linked = {target.removeprefix("./") for target in re.findall(r'href="([^"#]+\.html)"', home)}
    assert not pages - linked


def test_every_study_and_the_claims_have_an_interactive_page_that_is_linked(site: Path) -> None:
    for report in ("claims", *(f"studies/{path.stem}" for path in (DOCS / "results" / "studies").glob("*.md"))):
        page = site / "results" / f"{report}-interactive.html"
        assert f'href="{page.name}"' in (site / "results" / f"{report}.html").read_text(encoding="utf-8")
        assert report == "claims" or "data-card=" in page.read_text(encoding="utf-8"), "points to look at"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    html = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html"))
    assert not re.findall(r"""<(?:script|img|link|iframe)[^>]+(?:src|href)=["'](?:https?:)?//[^"']+""", html)
    css = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^)"']+""", css)


@pytest.mark.parametrize("words", WORDS)
def test_the_search_index_has_the_words_that_people_look_for(site: Path, words: str) -> None:
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    assert [
        item for item in index["items"] if words.lower() in re.sub("<[^>]+>", "", item["title"] + item["text"]).lower()
    ]
    assert (site / "search.js").read_text(encoding="utf-8").removeprefix("var __index = ").startswith("{")


def test_code_can_be_copied_and_colours_switched(site: Path) -> None:
    page = (site / "how-to" / "train-on-your-photos.html").read_text(encoding="utf-8")
    assert '"content.code.copy"' in page
    assert 'data-md-color-scheme="slate"' in page and 'data-md-color-scheme="default"' in page
    assert "no-run" not in re.sub("<[^>]+>", "", page)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[x](nothing.md)", "[x](how-to/see-attention.md#nothing)"])
def test_a_broken_link_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str) -> None:
    """Of pages and anchors; a missing picture is found by test_relative_links_lead_somewhere."""
    copy = tmp_path / "project"
    shutil.copytree(DOCS, copy / "docs")
    shutil.copy(ROOT / "zensical.toml", copy)
    with (copy / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{link}\n")
    monkeypatch.setattr(build, "DOCS", copy / "docs")
    monkeypatch.setattr(build, "ROOT", copy)
    assert build.build(tmp_path / "site").returncode != 0
    assert not (tmp_path / "site").exists()


def test_marks_and_patterns_are_replaced(tmp_path: Path) -> None:
    assert build.without_marks("```python no-run\nx\n```\n") == "```python\nx\n```\n"
    (tmp_path / "results").mkdir()
    for name in ("b.md", "a.md", "c.csv"):
        (tmp_path / "results" / name).touch()
    assert build.with_pages('nav = ["results/*.md"]', tmp_path) == 'nav = ["results/a.md", "results/b.md"]'


def test_the_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert len(citation["preferred-citation"]["authors"]) == 12


def test_settings_are_valid_toml() -> None:
    assert tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["use_directory_urls"] is False


# --- in a browser, where there is one -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("way", slow_after(1, ["served", "disk"]))
def test_the_search_answers_and_no_request_leaves(way: str, site: Path, served: str, browser: Any) -> None:
    start = served if way == "served" else f"file://{site}"
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{start}/index.html")
    page.wait_for_timeout(1000)
    page.keyboard.press("/")
    page.wait_for_timeout(500)
    page.keyboard.type("gradient accumulation", delay=30)
    page.get_by_text("results", exact=False).first.wait_for(timeout=30_000)
    page.get_by_text("Glossary").last.wait_for(timeout=30_000)
    assert page.get_by_role("textbox").or_(page.get_by_role("combobox")).first.input_value() == "gradient accumulation"
    assert requests and not [url for url in requests if not url.startswith((start, "data:", "blob:"))]
    page.close()


def test_a_console_block_is_copied_without_prompts_and_answers(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"file://{site}/how-to/train-on-your-photos.html")
    # As the theme's own script does: it marks the block, and takes the text that is visible then.
    copied = page.evaluate(
        """() => {
            const code = [...document.querySelectorAll(".highlight code")].find(each => each.querySelector(".gp"))
            code.setAttribute("data-md-copying", "")
            return code.innerText.trim()
        }"""
    )
    assert copied == "vitlab data check photos -q"
    page.close()
