"""The page stands alone: nothing is fetched, only its own script runs, and text from data stays text."""

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from vitlab.report.charts import Chart, Series
from vitlab.report.page import (
    Bar,
    Bars,
    Cell,
    Example,
    Examples,
    Figure,
    Files,
    Gallery,
    Matrix,
    Report,
    Section,
    Snippets,
    Table,
    Tile,
    place,
    plots,
    render,
)
from vitlab.report.plot import Plot, PlotPoint, PlotSeries

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}{% raw %}"
SVG, PNG = b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Tags with their attributes, and the text between them, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def run_of(word: str) -> PlotPoint:
    facts = [(f"fact {word}", f"is {word}")]
    return PlotPoint(1, 2, f"run {word}", (1, 3), facts, [(0, 3), (1, 2)], f"command {word}")


def report(word: str = "plain") -> Report:
    return Report(
        title=f"title {word}",
        headline=f"headline {word}",
        subline=f"subline {word}",
        number=f"number {word}",
        stats=[(f"stat {word}", f"amount {word}")],
        warnings=[f"warning {word}"],
        facts=[(f"name {word}", f"value {word}")],
        sections=[
            Figure(f"figure {word}", f"caption {word}", SVG),
            Gallery(
                f"gallery {word}", f"says {word}", [Tile(PNG, f"good {word}"), Tile(PNG, f"bad {word}", good=False)]
            ),
            Table(f"table {word}", "", (f"head {word}",), [(f"cell {word}",)], [f"note {word}"]),
            Bars(f"bars {word}", "", [Bar(f"bar {word}", 0.5, f"text {word}", note=f"remark {word}")], f"more {word}"),
            Matrix(
                f"matrix {word}",
                "",
                [f"column {word}"],
                [(f"row {word}", [Cell(f"count {word}", hint=f"hint {word}")])],
                f"corner {word}",
                sortable=True,
                errors=[1],
            ),
            Examples(f"examples {word}", "", [Example(f"example {word}", [Tile(PNG, f"tile {word}", None)])]),
            Chart(
                f"chart {word}", "", [Series(f"a {word}", [(0, 1)]), Series("b", [(0, 2)])], f"x {word}", f"y {word}"
            ),
            Plot(f"plot {word}", "", [PlotSeries(f"kind {word}", [run_of(word)])], f"across {word}", f"up {word}"),
            Snippets(f"snippets {word}", "", [(f"what {word}", f"line {word}")]),
            Files(f"files {word}", "", [(f"path {word}", f"holds {word}")]),
        ],
        footer=f"footer {word}",
    )


PLACES = (
    *("title", "headline", "subline", "number", "stat", "amount", "warning", "name", "value", "figure", "caption"),
    *("gallery", "says", "good", "bad", "table", "head", "cell", "note", "bars", "bar", "text", "remark", "more"),
    *("matrix", "column", "row", "count", "corner", "examples", "example", "tile", "chart", "x", "y"),
    *("plot", "kind", "across", "up", "run", "fact", "is", "command"),
    *("snippets", "what", "line", "files", "path", "holds", "footer"),
)


@pytest.mark.parametrize("place", PLACES)
def test_hostile_text_is_shown_as_text_everywhere(place: str) -> None:
    page = Page(render(report(EVIL)))
    assert f"{place} {EVIL}" in page.text


def test_hostile_text_adds_no_tag_and_no_attribute() -> None:
    plain, evil = Page(render(report())), Page(render(report(EVIL)))
    # Long names take several lines in a legend: these alone may be more.
    drawn = {"x", "y", "class", "text-anchor"}
    assert all(set(attributes) <= drawn for tag, attributes in evil.tags if tag == "text")
    assert [(tag, sorted(attributes)) for tag, attributes in evil.tags if tag != "text"] == [
        (tag, sorted(attributes)) for tag, attributes in plain.tags if tag != "text"
    ]
    assert [tag for tag, _ in evil.tags].count("script") == 1


def test_hostile_path_stays_a_path_beside_the_page() -> None:
    for name in ("javascript:alert(1)", "//example.org/x", "a b/ü#?.csv", EVIL):
        page = Page(render(dataclasses.replace(report(), sections=[Files("f", "", [(name, "")])])))
        (link,) = (a["href"] for tag, a in page.tags if tag == "a" and not (a["href"] or "").startswith("#"))
        assert link is not None and link.startswith("./") and unquote(link[2:]) == name


def test_nothing_is_fetched() -> None:
    text = render(report())
    page = Page(text)
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert sources
    assert all(value is not None and value.startswith(("data:image/", "#", "./")) for value in sources)
    assert not re.search(r"https?://|url\(|@import|<link", text)


def test_policy_forbids_requests_and_every_script_but_our_own() -> None:
    text = render(report(EVIL))
    policy = next(a["content"] for _, a in Page(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    script = text[text.index("<script>") + len("<script>") : text.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert policy.split("; ") == [
        *("default-src 'none'", "img-src data:", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'"),
        *("base-uri 'none'", "form-action 'none'"),
    ]


def test_page_is_readable_on_a_phone_and_names_its_language() -> None:
    page = Page(render(report()))
    assert ("html", {"lang": "en"}) in page.tags
    assert any(a.get("name") == "viewport" for _, a in page.tags)
    assert all(a.get("alt") for tag, a in page.tags if tag == "img")


def test_pictures_travel_inside_the_page() -> None:
    sources = [a["src"] for tag, a in Page(render(report())).tags if tag == "img"]
    kinds = [(source or "").split(",")[0] for source in sources]
    assert kinds == ["data:image/svg+xml;base64", *["data:image/png;base64"] * 3]
    assert base64.b64decode((sources[0] or "").split(",")[1]) == SVG


def test_mistakes_are_marked() -> None:
    classes = [a.get("class") for tag, a in Page(render(report())).tags if tag == "figure"]
    assert classes == ["good", "bad", None]


def test_same_report_gives_the_same_page() -> None:
    assert render(report()) == render(report())


@pytest.mark.parametrize(
    ("section", "wide"),
    [
        (Figure("f", "", SVG), False),
        (Figure("f", "", SVG, wide=True), True),
        (Table("t", "", ["a", "b"], [["x" * 40, "y" * 30]]), True),
        (Table("t", "", ["a", "b"], [["x" * 30, "y" * 20]]), False),
        (Table("t", "", ("class", "right"), [("a", "1")] * 12), False),
        (Table("t", "", ("class", "right"), [("a", "1")] * 13), True),
        (Table("t", "", ("a", "b", "c", "d", "e"), [("1",) * 5]), True),
    ],
)
def test_what_needs_the_whole_width_has_it(section: Figure | Table, wide: bool) -> None:
    (first, _) = place([section, Figure("beside it", "", SVG)])
    assert first.wide == wide


NUMBERS = ("59.65 % (59.02 to 60.28), 3 seeds", "4.11e+14", "-0.3", "+1.2 (0.1 to 2.3)", "2.5k", "16 px", "1,567")


@pytest.mark.parametrize(
    "cells", [*((cell,) for cell in NUMBERS), NUMBERS, ("1", "", "2", "—", "failed"), ("", "1", "")]
)
def test_column_of_numbers_is_right_aligned_wherever_it_stands(cells: tuple[str, ...]) -> None:
    rows = [("a group",), *((cell or "1", "ViT-B/16", cell, "no better", cell) for cell in cells)]
    table = Table("t", "", ("name", "model", "", "verdict", "last"), rows)
    assert list(table.numeric) == [False, False, True, False, True]
    page = render(Report("t", "", "", [], [table]))
    assert page.count('<td class="number">') == 2 * len(cells) + 1 and page.count('<th class="number">') == 1


@pytest.mark.parametrize(
    "rows", [[], [("a group",)], [("a", "", "—")], [("a", "ViT", "1 patch"), ("b", "1", "vit"), ("c", "x", "y")]]
)
def test_column_without_numbers_stays_text(rows: list[tuple[str, ...]]) -> None:
    assert not any(Table("t", "", ("name", "b", "c"), rows).numeric)


def test_no_half_of_a_row_stays_empty() -> None:
    half, wide = Figure("half", "", SVG), Gallery("wide", "", [])
    assert [one.wide for one in place([half, half, wide, half, wide, half])] == [False, False, True, True, True, True]


def test_contents_lead_to_every_section_also_to_those_of_the_same_title() -> None:
    sections: list[Section] = [Figure("Same title", "", SVG), Figure("Same title", "", SVG), Figure("…", "", SVG)]
    page = Page(render(dataclasses.replace(report(), sections=sections, facts=[])))
    links = [(a["href"] or "")[1:] for tag, a in page.tags if tag == "a"]
    assert links == [a["id"] for tag, a in page.tags if tag == "section"] == ["same-title", "same-title-2", "section"]


@pytest.mark.parametrize(("count", "wide"), [(12, 6), (7, 7), (8, 8), (10, 5), (5, 5), (4, 4), (11, 6)])
def test_last_row_of_tiles_is_as_full_as_can_be(count: int, wide: int) -> None:
    assert Gallery("g", "", [Tile(PNG, "")] * count).columns[0] == wide


def test_drawings_become_files_by_their_titles() -> None:
    files = plots(report())
    assert set(files) == {"figure-plain.svg", "matrix-plain.svg", "chart-plain.svg", "plot-plain.svg"}
    assert files["figure-plain.svg"] == SVG


def test_long_names_break_behind_underscores_and_stay_text() -> None:
    gallery = Gallery("g", "", [Tile(PNG, "a_b <i>c_d</i> (5 %)")])
    text = render(dataclasses.replace(report(), sections=[gallery]))
    assert "<figcaption>a_<wbr>b &lt;i&gt;c_<wbr>d&lt;/i&gt; (5\N{NO-BREAK SPACE}%)</figcaption>" in text
