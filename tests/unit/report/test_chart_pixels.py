"""Charts as pixels have the same things at the same places as their SVG."""

from xml.etree import ElementTree

import numpy as np
import pytest

from vitlab.report.chart_pixels import chart_pixels
from vitlab.report.charts import Chart, Mark, Series
from vitlab.report.svg import LIGHT


def chart(*series: Series) -> Chart:
    return Chart("title", "", series, "step", "loss", x_range=(0, 10), y_range=(0, 10))


def rgb(number: int) -> list[int]:
    return list(bytes.fromhex(LIGHT[f"c{number}"][1:]))


def near(drawn: np.ndarray, colour: list[int], tolerance: int = 40) -> np.ndarray:
    return (np.abs(drawn.astype(int) - colour) <= tolerance).all(axis=2)


def test_dots_lie_where_the_file_has_them() -> None:
    one = chart(Series("a", [(1, 1), (5, 9), (9, 3)], "dots", 1))
    drawn = np.asarray(chart_pixels(one, 2))
    assert drawn.shape == (720 + 32, 1280 + 32, 3)
    circles = [node for node in ElementTree.fromstring(one.file()).iter() if node.tag.endswith("circle")]
    assert len(circles) == 3
    for node in circles:
        x, y = (16 + round(2 * float(node.get(name) or 0)) for name in ("cx", "cy"))  # behind the margin
        assert near(drawn, rgb(1))[y - 4 : y + 4, x - 4 : x + 4].all()


@pytest.mark.parametrize("mark", ["line", "dashed", "faint", "dots", "points", "bars", "guide"])
def test_every_mark_is_painted(mark: Mark) -> None:
    empty, drawn = (
        np.asarray(chart_pixels(chart(Series("a", points, mark, 2)), 1)) for points in ([], [(2, 3), (8, 3)])
    )
    assert 20 < (empty != drawn).any(axis=2).sum() < 40_000


def test_dashed_line_has_gaps_of_the_right_length() -> None:
    drawn = np.asarray(chart_pixels(chart(Series("a", [(0, 5), (10, 5)], "dashed", 0)), 4))
    rows = near(drawn, rgb(0)).any(axis=1).nonzero()[0]
    row = near(drawn, rgb(0), 120)[round(float(rows.mean()))]
    first, last = row.nonzero()[0][[0, -1]]
    assert row[first:last].mean() == pytest.approx(0.6, abs=0.05), "6 of every 10 pixels"
    assert np.diff(row.astype(int)).clip(min=0).sum() == pytest.approx((last - first) / 40, abs=2)


def test_same_chart_is_the_same_pixels_with_letters() -> None:
    one = chart(Series("é × 中", [(1, 1), (5, 9)]), Series("b", [(0, 2), (9, 2)], "guide"))
    assert chart_pixels(one).tobytes() == chart_pixels(one).tobytes()
    assert near(np.asarray(chart_pixels(one)), [0x1F, 0x29, 0x33]).sum() > 50
