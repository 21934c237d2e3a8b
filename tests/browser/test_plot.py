"""Plots in a real browser: the card of a point by pointer, by keys and by touch.

With `VITLAB_SCREENSHOTS=FOLDER` pictures of the page with an open card are stored there.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after

from vitlab.report.page import Report, render
from vitlab.report.plot import Plot, PlotPoint, PlotSeries

PICTURES = os.environ.get("VITLAB_SCREENSHOTS")
HOSTILE = "<img src=x onerror=alert(1)> & “such”"
SIZES = (1000, 2000, 5000, 10_000, 50_000)
KINDS = {"ResNet-26": (0.42, 0.06), "R26+ViT-w192d6": (0.38, 0.085), HOSTILE: (0.25, 0.11)}
LAST = len(SIZES) * len(KINDS) - 1  # the card of the last run, at the right edge
WIDTHS = ((1280, "desk"), (390, "phone"))

Open, Serious = Callable[..., Any], Callable[[Any], list[str]]


def run(kind: str, size: int, accuracy: float) -> PlotPoint:
    facts = [("data", "CIFAR-10"), ("seeds", "3"), ("parameters", "2.7 M"), ("time", "14 min on one H200")]
    curve = [(50 * i, 0.4 + 1.9 * math.exp(-i / 30)) for i in range(200)]
    command = f"vitlab train cifar10 --model '{kind}' --set data.train_images={size} --set train.steps=10000 --seed 0"
    return PlotPoint(
        size, accuracy, f"{kind} · {size:,} images", (accuracy - 0.02, accuracy + 0.01), facts, curve, command
    )


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = [
        PlotSeries(name, [run(name, size, low + step * k) for k, size in enumerate(SIZES)], colour)
        for colour, (name, (low, step)) in enumerate(KINDS.items())
    ]
    fit = PlotSeries("fit", [PlotPoint(1000, 0.3, ""), PlotPoint(100_000, 0.6, "")], 2, kind="fit")
    labels = ("training images", "test accuracy")
    scaling = Plot("Scaling", "Point at a run.", [*kinds, fit], *labels, log_x=True, percent=True, wide=True)
    names = ["learned", "no position embedding", "1-D", "relative", "sine and cosine"]
    runs = [PlotPoint(k, 0.5 + 0.01 * k, name, facts=[("seeds", "1")]) for k, name in enumerate(names)]
    ablations = PlotSeries("ViT", runs, 3, joined=False, hollow=True)
    categories = Plot("Ablations", "", [ablations], "positions", "accuracy", percent=True, categories=names)
    empty = Plot("Planned", "", [], "images", "accuracy")
    path = tmp_path_factory.mktemp("plots") / "page.html"
    path.write_text(render(Report("Plots", "Runs", "", [], [scaling, categories, empty], "")), encoding="utf-8")
    return path


def point(page: Any, where: str, number: int, section: str = "scaling") -> Any:
    return page.locator(f"#{section} .{where} [data-card='{number}']")


def card(page: Any, section: str = "scaling") -> Any:
    return page.locator(f"#{section} .card")


def assert_shows_run(shown: Any, kind: str, size: int) -> None:
    assert shown.locator("h3").inner_text() == f"{kind} · {size:,} images"
    assert shown.locator("dt").all_inner_texts() == ["data", "seeds", "parameters", "time"]
    assert shown.locator("dd").first.inner_text() == "CIFAR-10"
    assert shown.locator(".curve svg .line").bounding_box()["width"] > 200
    assert "training loss 2.3 to 0.40" in shown.locator(".curve").inner_text()
    assert f"data.train_images={size} " in shown.locator("code").inner_text()


def is_kept(shown: Any) -> bool:
    return shown.locator(".close").is_visible()


def test_pointer_shows_the_run_and_leaves_it(page_path: Path, opened: Open) -> None:
    for width, where in WIDTHS:
        page = opened(page_path, width)
        shown = card(page)
        assert not shown.is_visible()
        point(page, where, 8).hover()
        assert_shows_run(shown, "R26+ViT-w192d6", 10_000)
        assert "R26+ViT-w192d6 63.5\N{NO-BREAK SPACE}% (61.5 to 64.5)" in shown.locator(".value").inner_text().replace(
            "\n", " "
        )
        assert not is_kept(shown)
        point(page, where, LAST).hover()
        assert_shows_run(shown, HOSTILE, 50_000)
        page.mouse.move(0, 0)
        assert not shown.is_visible()


def test_a_near_miss_counts_and_a_far_one_does_not(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    box = point(page, "desk", 0).locator(".marker").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 15, y - 10)
    assert_shows_run(card(page), "ResNet-26", 1000)
    page.mouse.move(x, y - 80)
    assert not card(page).is_visible()


def test_keys_move_between_points_keep_the_card_and_close_it(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    shown, name = card(page), card(page).locator("h3")
    page.keyboard.press("Tab")
    while page.evaluate("!document.activeElement.matches('.point')"):
        page.keyboard.press("Tab")
    assert name.inner_text() == "ResNet-26 · 1,000 images"
    for key, expected in (
        ("ArrowLeft", "ResNet-26 · 1,000 images"),
        ("ArrowRight", "ResNet-26 · 2,000 images"),
        ("ArrowDown", "R26+ViT-w192d6 · 2,000 images"),
        ("ArrowRight", "R26+ViT-w192d6 · 5,000 images"),
        ("ArrowUp", "ResNet-26 · 5,000 images"),
    ):
        page.keyboard.press(key)
        assert name.inner_text() == expected, key
    page.keyboard.press("Tab")
    assert name.inner_text() == "R26+ViT-w192d6 · 1,000 images", "a stop for each series"
    page.keyboard.press("Enter")
    assert is_kept(shown)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "close"
    page.keyboard.press("Escape")
    assert not shown.is_visible()
    assert page.evaluate("document.activeElement.dataset.card") == "5", "back at the point"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    assert not shown.is_visible()


def test_click_keeps_the_card_until_one_clicks_elsewhere(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    shown = card(page)
    point(page, "desk", 1).click()
    page.mouse.move(0, 0)
    assert is_kept(shown)
    point(page, "desk", LAST).hover()
    assert_shows_run(shown, "ResNet-26", 2000)
    code = shown.locator("code").bounding_box()
    page.mouse.move(code["x"] + 2, code["y"] + 4)
    page.mouse.down()
    page.mouse.move(code["x"] + 80, code["y"] + 4)
    page.mouse.up()
    assert page.evaluate("getSelection().toString()").startswith("vitlab")
    assert is_kept(shown)
    point(page, "desk", LAST).click()
    assert_shows_run(shown, HOSTILE, 50_000)
    page.locator("#scaling h2").click()
    assert not shown.is_visible()
    point(page, "desk", 1).click()
    shown.locator(".close").click()
    assert not shown.is_visible()


def test_a_selection_that_ends_outside_keeps_the_card(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    point(page, "desk", 1).click()
    code = card(page).locator("code").bounding_box()
    page.mouse.move(code["x"] + 60, code["y"] + 4)
    page.mouse.down()
    page.mouse.move(code["x"] - 200, code["y"] + 4, steps=5)
    page.mouse.up()
    assert page.evaluate("getSelection().toString()")
    assert is_kept(card(page))


def test_command_of_a_card_is_copied(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    point(page, "desk", 0).click()
    card(page).locator(".copy").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == run("ResNet-26", 1000, 0).command


def test_tap_keeps_the_card_inside_the_plot(page_path: Path, opened: Open) -> None:
    page = opened(page_path, 390)
    shown = card(page)
    for number in (0, 7, LAST):
        point(page, "phone", number).tap()
        assert is_kept(shown)
        outer, inner = page.locator("#scaling .plot").bounding_box(), shown.bounding_box()
        assert inner["x"] >= outer["x"] and inner["x"] + inner["width"] <= outer["x"] + outer["width"]
        assert inner["y"] >= outer["y"] and inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator("#ablations h2").tap()
    assert not shown.is_visible()


def test_card_stays_on_the_page_beside_its_point(page_path: Path, opened: Open) -> None:
    for width in (1280, 900):
        page = opened(page_path, width)
        for section, numbers in (("scaling", range(LAST + 1)), ("ablations", range(5))):
            for number in numbers:
                place = point(page, "desk", number, section)
                place.scroll_into_view_if_needed()
                marker = place.locator(".marker").bounding_box()
                # Not by the element, which another may cover in part: the nearest is meant.
                page.mouse.click(marker["x"] + marker["width"] / 2, marker["y"] + marker["height"] / 2)
                assert place.get_attribute("class") == "point open"
                inner = card(page, section).bounding_box()
                assert inner["x"] >= 0 and inner["x"] + inner["width"] <= width
                assert inner["x"] > marker["x"] or inner["x"] + inner["width"] < marker["x"], (
                    "it does not hide the point"
                )
                assert page.evaluate("document.documentElement.scrollWidth") == width
                page.keyboard.press("Escape")


def test_card_is_inside_a_low_window(page_path: Path, opened: Open) -> None:
    page = opened(page_path, 1100)
    page.set_viewport_size({"width": 1100, "height": 480})
    for number in range(LAST + 1):
        for end in ("start", "end"):  # the point at the upper edge of the window, and at the lower
            point(page, "desk", number).evaluate(
                "(point, block) => point.scrollIntoView({ block, behavior: 'instant' })", end
            )
            marker = point(page, "desk", number).locator(".marker").bounding_box()
            page.mouse.move(marker["x"] + marker["width"] / 2, marker["y"] + marker["height"] / 2)
            inner = card(page).bounding_box()
            assert inner["y"] >= 0 and inner["y"] + inner["height"] <= 480
            page.mouse.move(0, 0)


def test_page_says_which_keys_reach_the_points(page_path: Path, opened: Open) -> None:
    for width, where in WIDTHS:
        hints = opened(page_path, width).locator(".plot").get_by_text("Tab and the arrow keys")
        assert [hint.is_visible() for hint in hints.all()] == [where == "desk"] * 2, "a phone has no keys"


def test_a_click_does_not_move_what_the_card_shows(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    point(page, "desk", 8).hover()
    before = [card(page).locator(name).bounding_box() for name in ("h3", "dl", "code")]
    point(page, "desk", 8).click()
    assert [card(page).locator(name).bounding_box() for name in ("h3", "dl", "code")] == before


def test_empty_plot_has_its_sentence_and_no_card(page_path: Path, opened: Open) -> None:
    page = opened(page_path)
    assert page.locator("#planned .desk text").text_content() == "no runs yet"
    page.locator("#planned .desk svg").click()
    assert not card(page, "planned").is_visible()


@pytest.mark.parametrize(("width", "where"), slow_after(1, WIDTHS))
def test_page_with_an_open_card_is_readable(
    page_path: Path, opened: Open, serious: Serious, width: int, where: str
) -> None:
    page = opened(page_path, width)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert not serious(page), f"{theme}, closed"
        point(page, where, 7).click()
        assert is_kept(card(page))
        assert not serious(page), f"{theme}, open"
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(PICTURES) / f"plot-{width}-{theme}.png", full_page=True)
        page.keyboard.press("Escape")
