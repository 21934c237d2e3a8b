"""Charts are well-formed, show their values where they belong, and are the same bytes every time."""

import json
import math
import subprocess
import sys
from html import unescape
from xml.etree import ElementTree

import pytest

from vitlab.report import svg
from vitlab.report.charts import Chart, Mark, Series, draw_matrix, smooth

HOSTILE = [
    "<script>alert(1)</script>",
    "a & b",
    '"quoted"',
    "it's",
    "C:\\path",
    "100 %",
    "{x}",
    "]]>",
    "$x$",
    "中文",
    "ไทย",
]


def chart(*series: Series, **options: object) -> Chart:
    return Chart("title", "", series or (Series("loss", [(1, 2.0), (2, 1.0)]),), "step", "loss", **options)  # pyright: ignore[reportArgumentType]


def elements(svg: bytes | str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


def texts(svg: bytes | str) -> list[str]:
    return ["".join(node.itertext()) for node in elements(svg) if node.tag.endswith("text")]


def path_of(drawn: str, kind: str) -> list[tuple[float, float]]:
    """The places of the line of a class, as the SVG has them."""
    (data,) = (node.get("d") or "" for node in elements(drawn) if (node.get("class") or "").split()[:1] == [kind])
    return [(float(x), float(y)) for x, y in (pair.split() for pair in data[1:].split("L"))]


def test_line_goes_where_its_values_are() -> None:
    drawn = chart(Series("a", [(0, 0), (5, 10), (10, 5)]), x_range=(0, 10), y_range=(0, 10)).draw(500, 300)
    (x0, bottom), (x1, top), (x2, middle) = path_of(drawn, "line")
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.2)
    assert middle == pytest.approx((bottom + top) / 2, abs=0.2) and top < bottom
    assert {"0", "2", "4", "6", "8", "10", "step", "loss"} <= set(texts(drawn))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    drawn = chart(Series(name, [(0, 1), (1, 2)]), Series("other", [(0, 1), (1, 2)])).file()
    assert name in texts(drawn)
    assert name in texts(draw_matrix([name], [name], [["3"]], [[-1.0]]))
    for node in elements(drawn):
        assert not node.tag.endswith(("script", "foreignObject", "image"))
        assert not any(key.lower().startswith("on") or key.endswith("href") for key in node.attrib)


def test_control_characters_do_not_break_the_file() -> None:
    assert "a b" in texts(draw_matrix(["a\x00b"], ["c\nd"], [["1"]], [[0.0]]))


def test_an_axis_that_counts_has_whole_ticks() -> None:
    line = Series("accuracy", [(0, 10.0), (1, 20.0)])
    assert "0.2" in texts(chart(line).draw(640, 360))
    assert not [text for text in texts(chart(line, whole_x=True).draw(640, 360)) if text.startswith("0.")]
    assert {"0", "1"} <= set(texts(chart(line, whole_x=True).draw(640, 360)))


def test_values_for_the_pointer_are_those_of_the_lines() -> None:
    made = chart(
        Series("raw", [(1, 9.0)], "faint"),
        Series('"<b>', [(1, 0.123456), (2, math.inf)]),
        Series("g", [(0, 0)], "guide"),
    )
    assert json.loads(made.values) == [{"name": '"<b>', "c": 0, "p": [[1, 0.1235], [2, None]]}]


def test_chart_says_in_words_what_it_shows() -> None:
    drawn = chart(Series("accuracy", [(1, 0.5), (2, 0.75)]), percent=True).draw(400, 300)
    assert 'aria-label="title: loss over step; accuracy ends at 75 %"' in unescape(drawn)


@pytest.mark.parametrize("mark", ["line", "dashed", "dots", "bars", "guide", "faint"])
@pytest.mark.parametrize(
    "points", [[], [(1, 0.0)], [(1, 5.0), (2, 5.0)], [(0, math.nan), (1, -1.0)], [(1e9, 1e-9), (2e9, 3e-9)]]
)
def test_every_mark_is_drawn_inside_whatever_the_values(mark: Mark, points: list[tuple[float, float]]) -> None:
    for node in elements(chart(Series("a", points, mark)).draw(400, 300)):
        for name in ("x", "y", "cx", "cy", "width", "height"):
            value = float(node.get(name) or 0)
            assert 0 <= value <= 400, (node.tag, name)


def test_long_curve_is_thinned_to_what_a_screen_shows_with_both_ends() -> None:
    made = chart(Series("a", [(i, float(i)) for i in range(10_000)]))
    values = json.loads(made.values)[0]["p"]
    assert len(values) == 300 and values[0] == [0, 0] and values[-1] == [9999, 9999]
    assert len(made.file()) < 20_000


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0, 1.07)),
        ([0.0, 0.0], (0, 1.07)),
        ([-100.0, -50.0], (-107, 7)),
        ([-100.0, 0.0], (-107, 7)),
        ([50.0, 100.0], (0, 107)),
        ([80.0, 100.0], (78.6, 101.4)),
        ([-1.0, 1.0], (-1.14, 1.14)),
    ],
)
def test_range_from_zero_is_as_wide_as_the_values(values: list[float], expected: tuple[float, float]) -> None:
    assert svg.range_from_zero(values) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, -5.0, 1e6, 3e17, -3e17, 1e300])
def test_range_of_one_value_lies_on_both_sides_of_it(value: float) -> None:
    low, high = svg.value_range([value, value])
    assert low < value < high and svg.round_ticks(low, high, 5)
    assert svg.value_range([5.0]) == (4.5, 5.5)


def test_text_is_wrapped_by_its_width_and_keeps_every_letter() -> None:
    for text in ("WIDE CAPITAL LETTERS " * 5, "m" * 90, "low-frequency " * 9, "one", ""):
        lines = svg.wrapped(text, 100)
        assert all(svg.text_px(line) <= 100 for line in lines)
        assert "".join("".join(lines).split()) == "".join(text.split())
    assert svg.wrapped("a low-frequency basis", 66) == ["a low-", "frequency", "basis"]


def test_legend_names_every_line_on_a_phone_too() -> None:
    series = [Series(f"a run with a rather long name {i}", [(0, 1), (1, 2)], colour=i) for i in range(9)]
    drawn = chart(*series).draw(330, 270)
    assert {one.name for one in series} <= set(texts(drawn))
    assert "nobody needs it" not in texts(chart(Series("nobody needs it", [(0, 1)])).draw(330, 270))


def test_same_data_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "import sys; from vitlab.report.charts import *\n"
        "sys.stdout.buffer.write(Chart('t', '', [Series('a', [(1, 2.0), (3, 1.0)])], 'x', 'y').file())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert there == Chart("t", "", [Series("a", [(1, 2.0), (3, 1.0)])], "x", "y").file()


def test_matrix_shows_every_count() -> None:
    drawn = texts(draw_matrix(["cat", "dog"], ["cat", "dog"], [["41", "1"], ["", "57"]], [[-1, 0.2], [0, -1]]))
    assert {"41", "57", "1", "cat", "dog"} <= set(drawn)


def test_smoothing_keeps_the_length_and_the_mean_of_a_window() -> None:
    assert smooth([]) == [] and smooth([3.0]) == [3.0]
    assert smooth([0.0, 3.0, 6.0, 3.0, 0.0], span=0.4) == pytest.approx([1.5, 3.0, 4.0, 3.0, 1.5])
