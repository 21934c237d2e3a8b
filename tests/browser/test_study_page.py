"""The page of a study in a real browser: each point of its plot shows the run behind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after
from study_records import HOSTILE, TINY, records_of, tiny_study

from vitlab.report.page import Report, Verdict, Verdicts, render
from vitlab.studies.outcome import find_outcome
from vitlab.studies.study_report import write_study

Open, Serious = Callable[..., Any], Callable[[Any], list[str]]
WIDTHS, THEMES = ((1280, "desk"), (390, "phone")), ("light", "dark")
LABEL = f"'{HOSTILE}'"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    study = tiny_study(
        folder, TINY.replace("B = {", f"{LABEL} = {{").replace('{ kind = "B" }', f"{{ kind = {LABEL} }}")
    )
    scale = study.at("laptop")
    return write_study(find_outcome(study, scale, records_of(scale)), folder, "vitlab study run tiny")


@pytest.mark.parametrize(("width", "where"), slow_after(1, WIDTHS))
def test_page_is_readable_and_points_show_their_runs(
    page_path: Path, opened: Open, serious: Serious, width: int, where: str
) -> None:
    page = opened(page_path, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    plot = page.locator("section:has(.card)").first
    points = plot.locator(f".{where} [data-card]")
    assert points.count() == 6, "conditions, and none for the curve of a fit"
    shown = plot.locator(".card")
    for number, name in ((0, "A, 1"), (5, f"{HOSTILE}, 4")):
        plot.locator(f".{where} [data-card='{number}']").hover()
        assert shown.locator("h3").inner_text() == name
        facts = dict(zip(shown.locator("dt").all_inner_texts(), shown.locator("dd").all_inner_texts(), strict=True))
        assert len(facts["each seed"].split(", ")) == 3 and facts["model"] == "ViT-w64d4m128h4/4"
        assert len(facts["run"]) == 16 and "FLOPs" in facts["training compute"]
        assert shown.locator(".curve svg .line").bounding_box()["width"] > 100
        assert shown.locator("code").inner_text() == "vitlab train digits --seed 0 --set 'a=\"<b>\"'"
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        assert not serious(page), theme


@pytest.mark.parametrize(("width", "where"), slow_after(1, WIDTHS))
def test_claims_are_shown_by_their_verdict(
    tmp_path: Path, opened: Open, serious: Serious, width: int, where: str
) -> None:
    rows = {
        "one": [("a", "holds here", True, ""), ("b", "does not hold here", False, "the bound")],
        "two": [("c", "holds here", True, "the seeds"), ("d", "inconclusive at this scale", None, "")],
    }
    sections = [
        Verdicts(
            title, "", [Verdict(says, verdict, [], good, post_hoc=post_hoc) for says, verdict, good, post_hoc in given]
        )
        for title, given in rows.items()
    ]
    path = tmp_path / f"claims-{where}.html"
    path.write_text(render(Report("Claims", "2 of 4", "", [("seeds", "3")], sections, "")), encoding="utf-8")
    page = opened(path, width)

    def shown() -> tuple[list[str], list[str]]:
        return page.locator(".says:visible").all_inner_texts(), page.locator("h2:visible").all_inner_texts()

    assert shown() == (["a", "b", "c", "d"], ["one", "two", "Facts"])
    for label, expected in (
        ("holds here: 2", (["a", "c"], ["one", "two", "Facts"])),
        ("does not hold here: 1", (["b"], ["one", "Facts"])),
        ("inconclusive at this scale: 1", (["d"], ["two", "Facts"])),
    ):
        page.get_by_label(label, exact=True).check()
        assert shown() == expected
    page.get_by_label("without post hoc").check()
    assert shown() == (["d"], ["two", "Facts"])
    page.get_by_label("holds here: 2", exact=True).check()
    assert shown() == (["a"], ["one", "Facts"]), "a section of which no claim is left goes"
    assert not serious(page)


def test_tab_goes_from_the_page_to_a_point_and_not_to_the_drawing(page_path: Path, opened: Open) -> None:
    page = opened(page_path, 1280)
    stops: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate("document.activeElement.tagName + '.' + (document.activeElement.getAttribute('class') ?? '')")
        )
    assert any(stop.startswith("g.point") for stop in stops) and not any(stop.startswith("svg") for stop in stops)
