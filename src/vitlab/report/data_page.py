"""The page of `vitlab data check`: what was found, with the pictures beside each other, in one HTML file.

Owns the choice of what is shown: of each kind the first few dozen, because a page of ten thousand pictures helps nobody.
File names are other people's text: they go into the template as values, and it escapes every value.
"""

import base64
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitlab.core.environment import package_version
from vitlab.data.auditing.audit import SERIOUS, TITLES, Audit, Finding, Item
from vitlab.data.decode import decode
from vitlab.data.preprocess import MOST_BITS
from vitlab.report.page import template

Read = Callable[[Item], "bytes | np.ndarray[Any, Any]"]
Decoded = Callable[[Item], Image.Image]

_SHOWN = 48  # findings of a kind; a multiple of the 1, 2 or 3 columns
_SIDE_BY_SIDE = 4  # pictures of a finding
_BARS = 40  # classes of a part
_THUMB_PX = 192  # twice what the page shows, for screens that draw two pixels for one


@dataclasses.dataclass(frozen=True)
class _Picture:
    key: str
    label: str
    part: str
    uri: str | None


@dataclasses.dataclass(frozen=True)
class _Row:
    text: str
    pictures: Sequence[_Picture]
    more: int


@dataclasses.dataclass(frozen=True)
class _Section:
    title: str
    serious: bool
    count: int
    rows: Sequence[_Row]

    @property
    def single(self) -> bool:
        """Whether the pictures are singles, which stand closer together than pairs."""
        return all(len(row.pictures) == 1 and row.pictures[0].uri for row in self.rows)


@dataclasses.dataclass(frozen=True)
class _Bar:
    name: str
    count: int
    percent: float


@dataclasses.dataclass(frozen=True)
class _Chart:
    title: str
    total: int
    bars: Sequence[_Bar]
    more: int


@dataclasses.dataclass(frozen=True)
class _Page:
    title: str
    headline: str
    subline: str
    notes: Sequence[str]
    sections: Sequence[_Section]
    charts: Sequence[_Chart]
    footer: str


def render_audit(audit: Audit, title: str, read: Read) -> str:
    """The page as text. `read` fetches the pictures that are shown."""
    serious = sum(finding.serious for finding in audit.findings)
    others = len(audit.findings) - serious
    parts = ", ".join(f"{name} {count:,}" for name, count in audit.sizes.items())
    formats = ", ".join(f"{name} {count:,}" for name, count in audit.formats.items())
    page = _Page(
        title=f"Data check: {title}",
        headline=f"{serious:,} serious finding{'' if serious == 1 else 's'}, {others:,} other"
        if audit.findings
        else "Nothing found",
        subline=f"{audit.images:,} images ({parts}) · {formats} · {audit.megabytes:,.1f} MB"
        f" · median shorter side {audit.median_side} pixels",
        notes=audit.notes,
        sections=[_section(audit, kind, lambda item: _decoded(read(item), audit.bits)) for kind in audit.counts],
        charts=[_chart(name, counts) for name, counts in audit.parts.items()],
        footer=f"vitlab {package_version('vitlab')} · every finding is in audit.json as well",
    )
    return template("data.html.j2").render(page=page)


def _section(audit: Audit, kind: Any, read: Decoded) -> _Section:
    found = [finding for finding in audit.findings if finding.kind == kind]
    return _Section(TITLES[kind], kind in SERIOUS, len(found), [_row(finding, read) for finding in found[:_SHOWN]])


def _row(finding: Finding, read: Decoded) -> _Row:
    text = finding.text if finding.score is None else f"{finding.text} ({finding.score:.0%} of its neighbours)"
    shown = finding.items[:_SIDE_BY_SIDE]
    # What could not be decoded in a process of its own is not tried in this one.
    pictures = [
        _Picture(item.key, item.label, item.part, None if finding.kind == "unreadable" else _uri(read, item))
        for item in shown
    ]
    return _Row(text, pictures, len(finding.items) - len(shown))


def _chart(name: str, counts: Mapping[str, int]) -> _Chart:
    """Every class, or the largest and the smallest."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = ordered if len(ordered) <= _BARS else [*ordered[: _BARS // 2], *ordered[-_BARS // 2 :]]
    most = max(1, *counts.values())
    bars = [_Bar(label, count, round(100 * count / most, 1)) for label, count in shown]
    return _Chart(name, sum(counts.values()), bars, len(ordered) - len(shown))


def _decoded(source: "bytes | np.ndarray[Any, Any]", bits: int | None) -> Image.Image:
    if isinstance(source, np.ndarray) and source.shape[2] not in (1, 3):
        source = source[:, :, :1]  # pixels of other channels have no colours; the first one is shown
    return Image.fromarray(decode(source, "RGB", bits or MOST_BITS).permute(1, 2, 0).numpy())


def _uri(read: Decoded, item: Item) -> str | None:
    try:
        picture = read(item)
    except Exception:  # it could be read a minute ago: a page without one picture is better than no page
        return None
    if (zoom := _THUMB_PX // max(picture.size)) > 1:
        picture = picture.resize((zoom * picture.width, zoom * picture.height), Image.Resampling.NEAREST)
    picture.thumbnail((_THUMB_PX, _THUMB_PX))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
