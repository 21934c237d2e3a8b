"""The page of a data check shows a bounded number of pictures, and says how much it leaves out."""

import numpy as np

from vitlab.data.auditing.audit import Audit, Finding, Item
from vitlab.report.data_page import render_audit


def many(count: int) -> Audit:
    items = [Item("train", f"{i}.jpg", "a", i) for i in range(count)]
    findings = [Finding("duplicate", "the same picture", tuple(items[:10]))] * count
    classes = {f"class {i}": i for i in range(100)}
    return Audit({"train": classes}, {"train": count}, {"JPEG": count}, 1.0, 8, tuple(findings), ("a <note>",))


def test_page_is_bounded_and_says_what_it_leaves_out() -> None:
    page = render_audit(many(1000), "<b>title</b>", lambda _: np.zeros((8, 8, 3), np.uint8))
    assert page.count('src="data:image/jpeg') == 48 * 4
    assert "and 952 more, in audit.json" in page
    assert page.count("and 6 more") == 48
    assert "and 60 more classes" in page
    assert "&lt;b&gt;title" in page and "a &lt;note&gt;" in page


def test_picture_that_has_gone_leaves_its_name() -> None:
    def gone(item: Item) -> bytes:
        raise FileNotFoundError

    page = render_audit(many(1), "x", gone)
    assert "<img" not in page
    assert "0.jpg" in page
