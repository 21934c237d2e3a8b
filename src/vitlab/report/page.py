"""The report: one HTML file with everything inside, readable offline on a phone or a desk.

Owns the look. Text from data (class names, titles) is escaped by the template engine; nothing is fetched and no script runs.
"""

import base64
import dataclasses
from collections.abc import Sequence

import jinja2


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture with the sentence that says what to look for."""

    title: str
    caption: str
    data: bytes  # SVG or PNG

    @property
    def uri(self) -> str:
        kind = "png" if self.data.startswith(b"\x89PNG") else "svg+xml"
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"


@dataclasses.dataclass(frozen=True)
class Tile:
    """One small picture of a gallery, with what stands under it."""

    data: bytes
    caption: str
    good: bool = True

    uri = Figure.uri


@dataclasses.dataclass(frozen=True)
class Gallery:
    title: str
    caption: str
    tiles: Sequence[Tile]


@dataclasses.dataclass(frozen=True)
class Report:
    title: str
    headline: str
    subline: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Figure | Gallery]
    footer: str


def render(report: Report) -> str:
    return template("report.html.j2").render(report=report)


def template(name: str) -> jinja2.Template:
    """One of the templates beside this file. Whatever is put into it is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vitlab.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
