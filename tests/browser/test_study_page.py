"""The page of a study in a real browser: each point of its plot shows the run behind it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after
from study_records import HOSTILE, TINY, records_of, tiny_study

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
