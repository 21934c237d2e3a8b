"""Strips and forest plots: the interval beside the range of the claim, and the same bytes every time."""

import itertools
import math
from typing import Any
from xml.etree import ElementTree

import pytest

from vitlab.report import svg
from vitlab.report.forest import ForestRow, Strip, draw_forest
from vitlab.report.page import Report, Verdict, Verdicts, render

HOSTILE = ["<script>alert(1)</script>", "a & b", '"quoted"', "]]>", "中文"]


def strip(**options: Any) -> Strip:
    given: dict[str, Any] = {"mean": 2.0, "interval": (1.0, 3.0), "seeds": (1.5, 2.0, 2.5), "low": 0.0}
    return Strip(**{**given, **options})


def of_class(drawn: str, name: str) -> list[ElementTree.Element]:
    return [node for node in ElementTree.fromstring(drawn).iter() if name in (node.get("class") or "").split()]


def ends_of_zone(drawn: str) -> tuple[float, float]:
    (zone,) = of_class(drawn, "zone")
    left = float(zone.get("x") or 0)
    return left, left + float(zone.get("width") or 0)


def seed_places(drawn: str) -> list[float]:
    return [float(node.get("cx") or 0) for node in of_class(drawn, "seed")]


def labels(drawn: str) -> list[tuple[str, str]]:
    return [(node.text or "", node.get("text-anchor") or "") for node in ElementTree.fromstring(drawn).iter("text")]


def test_zone_reaches_from_a_border_to_the_end_on_its_side() -> None:
    above, below = ends_of_zone(strip().draw()), ends_of_zone(strip(low=None, high=4.0).draw())
    assert 0 < above[0] < 320 and above[1] == 320
    assert below[0] == 0 and 0 < below[1] < 320


def test_interval_and_seeds_lie_inside_the_zone_exactly_where_the_numbers_do() -> None:
    """Zero, the interval from 1 to 3 and the border at 4 are one step apart each."""
    drawn = strip(high=4.0).draw()
    left, right = ends_of_zone(drawn)
    step = (right - left) / 4
    assert seed_places(drawn) == pytest.approx([left + 1.5 * step, left + 2 * step, left + 2.5 * step], abs=0.11)
    (whisker,) = of_class(drawn, "whisker")
    low, high = (whisker.get("d") or "").removeprefix("M").split("H")
    assert float(low.split()[0]) == pytest.approx(left + step, abs=0.11)
    assert float(high.partition("M")[0]) == pytest.approx(left + 3 * step, abs=0.11)


def test_ratios_have_equal_steps_for_equal_factors() -> None:
    drawn = strip(mean=1.0, interval=(0.5, 2.0), seeds=(0.5, 1.0, 2.0), low=0.5, log=True).draw()
    half, one, double = seed_places(drawn)
    assert one - half == pytest.approx(double - one, abs=0.11)


def test_ratios_that_are_not_all_above_zero_have_equal_steps_for_equal_differences() -> None:
    """They have no logarithm: neither a border of zero, nor the interval of a mean of ratios."""
    for options in ({"low": 0.0}, {"low": None, "high": 4.0, "interval": (-1.0, 5.0)}):
        assert strip(**options, log=True).draw() == strip(**options).draw()
    assert strip(low=1.0, log=True).draw() != strip(low=1.0).draw()


def test_one_seed_has_no_interval_and_all_of_one_value_a_place() -> None:
    assert of_class(strip(interval=None, seeds=(2.0,)).draw(), "whisker") == []
    same = strip(mean=1.0, interval=(1.0, 1.0), seeds=(1.0, 1.0, 1.0), low=1.0).draw()
    assert all(math.isfinite(x) and 0 <= x <= 320 for x in seed_places(same))


def test_labels_of_two_borders_lean_away_from_each_other() -> None:
    assert labels(strip(low=-1.5, high=1.5).draw())[:2] == [("-1.5", "end"), ("1.5", "start")]
    assert labels(strip().draw())[0] == ("0", "middle")


def test_axis_has_round_numbers_beside_the_borders() -> None:
    said = [label for label, _ in labels(strip(mean=3.0, interval=(2.0, 4.0), seeds=(3.0,), low=0.0, high=None).draw())]
    assert said == ["0", "1", "2", "3", "4"]
    ratio = strip(mean=0.5, interval=(0.3, 0.8), seeds=(0.5,), low=1.0, high=None, log=True).draw()
    assert {"0.6", "1"} <= {label for label, _ in labels(ratio)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_has_no_ticks(value: float) -> None:
    assert strip(mean=value, interval=None, seeds=()).draw().startswith("<svg")


def test_one_point_is_not_several() -> None:
    assert [label for label, _ in labels(strip(low=-1.0, high=2.0, unit=" points").draw())][:2] == [
        "-1 point",
        "2 points",
    ]


def spans(drawn: str) -> list[tuple[float, float]]:
    """From where to where the labels of borders reach."""
    share = {"end": 1.0, "middle": 0.5, "start": 0.0}
    found: list[tuple[float, float]] = []
    for node in ElementTree.fromstring(drawn).iter("text"):
        width = svg.text_px(node.text or "")
        left = float(node.get("x") or 0) - share[node.get("text-anchor") or ""] * width
        found.append((left, left + width))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"mean": 0.0, "interval": (-0.125, 0.125), "seeds": (0.0,), "low": -0.125, "high": 0.125},
        {"mean": 9.0, "interval": None, "seeds": (9.0,), "low": -0.125, "high": 0.125},
        {"mean": -9.0, "interval": None, "seeds": (-9.0,), "low": -0.125, "high": 0.125},
        {"mean": 9.0, "interval": None, "seeds": (9.0,), "low": 0.1234567, "high": None},
        {"mean": -9.0, "interval": None, "seeds": (-9.0,), "low": None, "high": -0.1234567},
    ],
)
def test_labels_of_borders_stay_on_the_strip_and_apart(options: dict[str, Any]) -> None:
    found = sorted(spans(strip(**options).draw()))
    assert all(left >= -0.06 and right <= 320.06 for left, right in found), "as exact as coordinates are written"
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("good", "classes"), [(True, "mark yes"), (False, "mark no"), (None, "mark")])
def test_verdict_has_its_colour(good: bool | None, classes: str) -> None:
    (mark,) = of_class(strip(good=good).draw(), "mark")
    assert mark.get("class") == classes


def test_page_has_a_strip_beside_each_sentence_that_has_a_number() -> None:
    row = Verdict("a claim", "holds here", [("with a number", strip(good=True)), ("without one", None)], True)
    page = render(Report("t", "h", "s", [], [Verdicts("Claims", "", [row])]))
    assert page.count('<svg class="strip"') == 1
    assert page.index("with a number") < page.index('<svg class="strip"') < page.index("without one")


def test_forest_is_a_file_that_repeats_to_the_byte_and_whose_text_is_escaped() -> None:
    rows = [
        ForestRow(text, "holds here", [("+2.0 (1.0 to 3.0)", strip()), ("not measured yet", None)]) for text in HOSTILE
    ]
    one, two = (draw_forest("2 of 5 hold", [("A study & more", rows)]) for _ in range(2))
    assert one == two
    drawn = one.decode()
    assert len(of_class(drawn, "zone")) == len(HOSTILE) and "<script" not in drawn
    written = ["".join(node.itertext()) for node in ElementTree.fromstring(drawn).iter() if node.tag.endswith("text")]
    assert written.count("not measured yet") == len(HOSTILE) and "A study & more" in written
    assert set(HOSTILE) <= set(written) and written.count("holds here") == len(HOSTILE), "not by colour alone"


def test_long_claims_are_broken_into_lines_that_do_not_reach_the_strips() -> None:
    rows = [ForestRow(says, "holds here", [("1", strip())]) for says in ("word " * 60, "WORD " * 60, "next")]
    drawn = draw_forest("t", [("s", rows)])
    texts = [node for node in ElementTree.fromstring(drawn).iter() if node.tag.endswith("text")]
    assert all(svg.text_px(node.text or "") <= 400 for node in texts if (node.text or "").lower().startswith("word"))
    lines = [node for node in texts if (node.text or "").startswith("word")]
    (after,) = [node for node in texts if node.text == "next"]
    verdict = next(node for node in texts if node.text == "holds here")
    assert len(lines) > 3 and max(len(node.text or "") for node in lines) < 61
    assert float(after.get("y") or 0) > float(verdict.get("y") or 0) > max(float(node.get("y") or 0) for node in lines)
