"""The page stands alone: nothing is fetched, nothing runs, and text from data stays text."""

import base64
import dataclasses
import re
from html.parser import HTMLParser

import pytest

from vitlab.report.page import Figure, Gallery, Report, Table, Tile, render

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


def report(word: str = "plain") -> Report:
    return Report(
        title=f"title {word}",
        headline=f"headline {word}",
        subline=f"subline {word}",
        facts=[(f"name {word}", f"value {word}")],
        sections=[
            Figure(f"figure {word}", f"caption {word}", SVG),
            Gallery(
                f"gallery {word}", f"says {word}", [Tile(PNG, f"good {word}"), Tile(PNG, f"bad {word}", good=False)]
            ),
        ],
        footer=f"footer {word}",
    )


PLACES = [
    "title",
    "headline",
    "subline",
    "name",
    "value",
    "figure",
    "caption",
    "gallery",
    "says",
    "good",
    "bad",
    "footer",
]


@pytest.mark.parametrize("place", PLACES)
def test_hostile_text_is_shown_as_text_everywhere(place: str) -> None:
    page = Page(render(report(EVIL)))
    assert f"{place} {EVIL}" in page.text


def test_hostile_text_adds_no_tag_and_no_attribute() -> None:
    plain, evil = Page(render(report())), Page(render(report(EVIL)))
    assert [(tag, sorted(attributes)) for tag, attributes in evil.tags] == [
        (tag, sorted(attributes)) for tag, attributes in plain.tags
    ]
    assert "script" not in {tag for tag, _ in evil.tags}


def test_nothing_is_fetched() -> None:
    text = render(report())
    page = Page(text)
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert sources
    assert all(value is not None and value.startswith("data:image/") for value in sources)
    assert not re.search(r"https?://|url\(|@import|<link", text)


def test_policy_forbids_scripts_and_requests() -> None:
    policy = next(
        a["content"] for _, a in Page(render(report())).tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.split("; ") == ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'"]


def test_page_is_readable_on_a_phone_and_names_its_language() -> None:
    page = Page(render(report()))
    assert ("html", {"lang": "en"}) in page.tags
    assert any(a.get("name") == "viewport" for _, a in page.tags)
    assert all(a.get("alt") for tag, a in page.tags if tag == "img")


def test_pictures_travel_inside_the_page() -> None:
    sources = [a["src"] for tag, a in Page(render(report())).tags if tag == "img"]
    kinds = [(source or "").split(",")[0] for source in sources]
    assert kinds == ["data:image/svg+xml;base64", "data:image/png;base64", "data:image/png;base64"]
    assert base64.b64decode((sources[0] or "").split(",")[1]) == SVG


def test_mistakes_are_marked() -> None:
    classes = [a.get("class") for tag, a in Page(render(report())).tags if tag == "figure"]
    assert classes == ["good", "bad"]


def test_same_report_gives_the_same_page() -> None:
    assert render(report()) == render(report())


@pytest.mark.parametrize(
    ("section", "wide"),
    [
        (Figure("f", "", SVG), False),
        (Figure("f", "", SVG, wide=True), True),
        (Table("t", "", ("class", "right"), [("a", "1")] * 12), False),
        (Table("t", "", ("class", "right"), [("a", "1")] * 13), True),
        (Table("t", "", ("a", "b", "c", "d", "e"), [("1",) * 5]), True),
    ],
)
def test_what_needs_the_whole_width_has_it(section: Figure | Table, wide: bool) -> None:
    page = Page(render(dataclasses.replace(report(), sections=[section])))
    first = next(attributes for tag, attributes in page.tags if tag == "section")
    assert first.get("class") == ("wide" if wide else None)
