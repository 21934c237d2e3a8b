"""The page of `vitlab data check`: findings with their pictures, in one HTML file.

Owns the choice of what is shown: of each kind the first few dozen, because a page of ten thousand pictures helps nobody.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vitlab.data.auditing.audit import SERIOUS, TITLES, Audit, Finding, Item, Kind
from vitlab.data.rules import MOST_BITS
from vitlab.report.figures import thumbnail
from vitlab.report.page import Bar, Bars, Example, Examples, Report, Tile, percent, render

Read = Callable[[Item], "bytes | np.ndarray[Any, Any]"]

_SHOWN = 48  # findings of a kind
_SIDE_BY_SIDE = 4  # pictures of a finding
_BARS = 40  # classes of a part
_THUMB_PX = 192  # twice what the page shows, for screens that draw two pixels for one


def render_audit(audit: Audit, title: str, read: Read) -> str:
    """The page as text. `read` fetches the pictures that are shown."""
    serious = sum(finding.serious for finding in audit.findings)
    other = len(audit.findings) - serious
    headline = f"serious finding{'' if serious == 1 else 's'}, {other:,} other, in {audit.images:,} images"
    formats = ", ".join(f"{name} {count:,}" for name, count in audit.formats.items())
    classes = {name for counts in audit.parts.values() for name in counts}
    return render(
        Report(
            title=f"Data check: {title}",
            number=f"{serious:,}",
            headline=headline if audit.findings else f"findings in {audit.images:,} images",
            subline="",
            stats=[
                *((f"images: {name}", f"{count:,}") for name, count in audit.sizes.items()),
                ("classes", f"{len(classes):,}"),
                ("formats", formats),
                ("size", f"{audit.megabytes:,.1f} MB"),
                ("median shorter side", f"{audit.median_side} pixels"),
            ],
            facts=[],
            sections=[
                *(_section(audit, kind, read) for kind in audit.counts),
                *(_class_counts(name, counts) for name, counts in audit.parts.items()),
            ],
            footer="every finding is in audit.json as well",
            warnings=audit.notes,
        )
    )


def _section(audit: Audit, kind: Kind, read: Read) -> Examples:
    findings = [finding for finding in audit.findings if finding.kind == kind]
    more = f"and {len(findings) - _SHOWN:,} more, in audit.json" if len(findings) > _SHOWN else ""
    examples = [_example(finding, audit.bits, read) for finding in findings[:_SHOWN]]
    return Examples(f"{TITLES[kind]}: {len(findings):,}", "", examples, more, kind in SERIOUS)


def _example(finding: Finding, bits: int | None, read: Read) -> Example:
    text = finding.text if finding.score is None else f"{finding.text} ({percent(finding.score, 0)} of its neighbours)"
    shown, rest = finding.items[:_SIDE_BY_SIDE], len(finding.items) - _SIDE_BY_SIDE
    # What could not be decoded in a process of its own is not tried in this one.
    pictures = [b"" if finding.kind == "unreadable" else _thumbnail(read, item, bits) for item in shown]
    captions = [f"{item.key}\n{item.label} · {item.part}" for item in shown]
    tiles = [Tile(data, caption, None) for data, caption in zip(pictures, captions, strict=True)]
    return Example(text, tiles, f"and {rest:,} more" if rest > 0 else "")


def _class_counts(part: str, counts: Mapping[str, int]) -> Bars:
    """Every class, or the largest and the smallest."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = ordered if len(ordered) <= _BARS else [*ordered[: _BARS // 2], *ordered[-_BARS // 2 :]]
    most = max(1, *counts.values())
    left = len(ordered) - len(shown)
    more = f"and {left:,} more classes between the largest and the smallest" if left else ""
    bars = [Bar(label, count / most, f"{count:,}") for label, count in shown]
    return Bars(f"Images per class: {part}, {sum(counts.values()):,}", "", bars, more)


def _thumbnail(read: Read, item: Item, bits: int | None) -> bytes:
    try:
        return thumbnail(read(item), _THUMB_PX, bits or MOST_BITS)
    except Exception:  # it could be read a minute ago: a page without one picture is better than no page
        return b""
