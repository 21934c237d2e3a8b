"""Every kind of page in a real browser, wide and narrow, light and dark: no error, no request, no scrolling sideways.

With `VITLAB_SCREENSHOTS=FOLDER` every page is stored there as a picture, and the whole demo is run instead of a tiny one, for
`report.png`, the picture of the documentation.
"""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from slow_cases import slow_after

import vitlab
from vitlab.core.errors import MissingExtra
from vitlab.data.decode import decode
from vitlab.data.sources.digits import load_digits
from vitlab.evaluation.vtab import VtabResult, task_groups
from vitlab.inspection.overlays import to_picture
from vitlab.report.page import render
from vitlab.report.vtab_page import build_vtab_page
from vitlab.studies.reporting import report_study

PICTURES = os.environ.get("VITLAB_SCREENSHOTS")
DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[3] / "shared" / "data")

KINDS = ("demo", "training", "evaluation", "many-classes", "comparison", "curves", "audit", "vtab", "study")
WIDTHS, THEMES = (390, 1280), ("light", "dark")
HOSTILE = "<img src=x onerror=alert(1)> & “such”"  # the name of a class and of its folder
QUIETLY: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
_FEW_COLOURS = 160  # enough for a page without photos, and a third of the bytes
BODY = "ViT-w32d2m64h2/4"

Open, Serious = Callable[..., Any], Callable[[Any], list[str]]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind, of small real runs."""
    place = tmp_path_factory.mktemp("pages")
    digits: dict[str, Any] = {"init": "scratch", "model": BODY, **QUIETLY}
    few = ("train.steps=30", "train.batch_size=64", "train.eval_every=10", "data.image_size=[16,16]")
    try:
        first = vitlab.train("digits", out=place / "first", overrides=[*few, "optim.lr=3e-3"], **digits)
    except MissingExtra as error:
        pytest.skip(str(error))
    second = vitlab.train("digits", out=place / "second", overrides=[*few, "optim.lr=3e-4"], **digits)
    vitlab.evaluate(first.run, out=place / "evaluation", resamples=50, **QUIETLY)
    many = "fractals:categories=40,instances=20,image_size=16"
    shapes = vitlab.train(many, out=place / "shapes", overrides=["train.steps=10", "train.batch_size=32"], **digits)
    vitlab.evaluate(shapes.run, out=place / "many", resamples=50, **QUIETLY)
    vitlab.compare(first.run, second.run, out=place / "both", resamples=50, **QUIETLY)
    vitlab.check_data(_photos(place / "photos"), out=place / "audit", workers=1, quiet=True)
    report_study("table2", out=place / "study.html")
    (place / "vtab.html").write_text(
        render(build_vtab_page(_vtab(), BODY, "vitlab evaluate m --vtab")), encoding="utf-8"
    )
    return {
        "demo": _demo(place / "demo"),
        "training": first.report,
        "evaluation": place / "evaluation" / "report.html",
        "many-classes": place / "many" / "report.html",
        "comparison": place / "both" / "report.html",
        "curves": place / "both" / "curves.html",
        "audit": place / "audit" / "audit.html",
        "vtab": place / "vtab.html",
        "study": place / "study.html",
    }


def _demo(out: Path) -> Path:
    fractals = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
    bodies = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
    tiny = ["pretrain.train.steps=2", fractals, *bodies, "transfer.train.steps=2"]
    return vitlab.demo(out, overrides=[] if PICTURES else tiny, device="cpu", quiet=True).report


def _photos(folder: Path) -> Path:
    """Digits as files in class folders: one twice, one in two classes, one that is no picture, and a hostile name."""
    digits = load_digits()
    names = {k: str(k) if k else HOSTILE for k in range(10)}
    for i in range(200):
        path = folder / names[int(digits.labels.single()[i])] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        to_picture(decode(digits.read(i), "L")).save(path)
    ones = sorted((folder / "1").iterdir())
    shutil.copy(ones[0], folder / "1" / "again.png")
    shutil.copy(ones[1], folder / "2" / "of another class.png")
    (folder / "3" / "broken.png").write_bytes(b"no picture")
    return folder


def _vtab() -> VtabResult:
    names = [name for group in task_groups().values() for name in group]
    tasks = {name: 0.3 + 0.03 * i for i, name in enumerate(names[:-2])}
    missing = {name: f"{name} is not here" for name in names[-2:]}
    means = dict(zip(task_groups(), (0.5, 0.6, None), strict=True))
    return VtabResult(tasks, missing, means, None, (), (), (0, 1), 12.0, Path("records"), Path("report.html"))


@pytest.mark.parametrize("width", slow_after(1, WIDTHS))
@pytest.mark.parametrize("kind", KINDS)
def test_page_is_whole_and_readable(
    pages: dict[str, Path], opened: Open, serious: Serious, kind: str, width: int
) -> None:
    page = opened(pages[kind], width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("[...document.images].filter(image => !image.naturalWidth).length") == 0
    assert pages[kind].stat().st_size < 5_000_000
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(PICTURES) / f"{kind}-{width}-{theme}.png", full_page=True)
        assert not serious(page), theme


@pytest.mark.parametrize("kind", KINDS)
def test_contents_lead_to_the_sections_and_rows_are_filled(pages: dict[str, Path], opened: Open, kind: str) -> None:
    page = opened(pages[kind])
    anchors = page.evaluate("[...document.querySelectorAll('nav a')].map(link => link.hash.slice(1))")
    sections = page.evaluate(
        "[...document.querySelectorAll('section')].map(one => [one, one.getBoundingClientRect()])"
        ".map(([one, box]) => [one.id, box.left, box.right])"
    )
    assert anchors in ([], [name for name, *_ in sections])
    edge = max(right for *_, right in sections)
    following = [left for _, left, _ in sections[1:]] + [sections[0][1]]
    for (name, left, right), following_left in zip(sections, following, strict=True):
        assert right == edge or following_left > left, f"there is nothing beside {name}"


def test_links_lead_to_files_of_the_run(pages: dict[str, Path], opened: Open) -> None:
    for kind in ("demo", "training", "evaluation", "comparison"):
        page = opened(pages[kind])
        links = page.evaluate("[...document.querySelectorAll('.files a')].map(link => link.getAttribute('href'))")
        assert links
        assert all((pages[kind].parent / link).exists() for link in links), links


def test_theme_follows_the_system_until_the_reader_chooses(pages: dict[str, Path], opened: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(pages["study"], theme=theme).evaluate(ground) for theme in THEMES)
    assert light != dark
    page = opened(pages["study"], theme="dark")
    page.click("#theme")
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light, "the choice is kept"
    page.click("#theme")
    assert page.evaluate(ground) == dark


READ_MATRIX = (
    """[...document.querySelectorAll('.matrix tr')].map(row => [...row.cells].map(cell => cell.textContent))"""
)


def test_matrix_is_sorted_by_errors_and_back(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["evaluation"])
    (_, *names), *rows = page.evaluate(READ_MATRIX)
    counts = {(row[0], name): int(cell or 0) for row in rows for name, cell in zip(names, row[1:], strict=True)}
    page.select_option("select", "errors")
    (_, *sorted_names), *sorted_rows = page.evaluate(READ_MATRIX)
    assert [row[0] for row in sorted_rows] == sorted_names and sorted(sorted_names) == sorted(names)
    assert {
        (row[0], name): int(cell or 0) for row in sorted_rows for name, cell in zip(sorted_names, row[1:], strict=True)
    } == counts, "every count is still that of its pair"

    def wrong(name: str) -> int:
        return sum(count for pair, count in counts.items() if (pair[0] == name) != (pair[1] == name))

    errors = [wrong(name) for name in sorted_names]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1]
    page.select_option("select", "order")
    assert page.evaluate(READ_MATRIX)[0][1:] == names


def test_pointer_shows_the_values_of_a_curve(pages: dict[str, Path], opened: Open) -> None:
    for width, where in ((1280, "desk"), (390, "phone")):
        page = opened(pages["curves"], width)
        chart = page.locator("#training-loss .chart")
        assert not chart.locator(".tip").is_visible()
        chart.locator(f".{where} svg").hover()
        text = chart.locator(".tip").inner_text()
        assert text.startswith("step ") and "A: " in text and "B: " in text
        page.mouse.move(0, 0)
        assert not chart.locator(".tip").is_visible()


def test_line_is_copied(pages: dict[str, Path], opened: Open) -> None:
    page = opened(pages["training"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".snippet .copy").first.click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.locator(".snippet code").first.text_content()


def test_policy_stops_a_script_and_a_picture_from_elsewhere(pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page()
    ended: dict[str, str] = {}
    page.on("requestfailed", lambda request: ended.update({request.url: request.failure}))
    page.on("requestfinished", lambda request: ended.update({request.url: "answered"}))
    page.goto(pages["audit"].absolute().as_uri())
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          const picture = document.createElement("img");
          picture.src = "http://127.0.0.1:9/x.png";
          document.body.append(script, picture);
          document.body.insertAdjacentHTML("beforeend", '<img src="data:," onerror="window.ran = true">');
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    assert ended["http://127.0.0.1:9/x.png"] == "csp"
    page.close()


@pytest.mark.skipif(not PICTURES, reason="pictures for the documentation are made with VITLAB_SCREENSHOTS")
def test_pictures_for_the_documentation(pages: dict[str, Path], browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1180, "height": 868})
    page.goto(pages["demo"].absolute().as_uri())
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shown.quantize(_FEW_COLOURS).save(Path(str(PICTURES)) / "report.png", optimize=True)
    looked = page.locator("section", has=page.get_by_role("heading", name="What the model attended to"))
    shown = Image.open(io.BytesIO(looked.screenshot())).convert("RGB")
    # At three quarters, which the documentation shows it in; by means, or the few pixels of some colours would get another.
    small = shown.resize((3 * shown.width // 4, 3 * shown.height // 4), Image.Resampling.LANCZOS)
    small.quantize(256, kmeans=3).save(Path(str(PICTURES)) / "attention.png", optimize=True)
    page.close()
    assert shown.width > shown.height / 2, "the section is there, and drawn"
