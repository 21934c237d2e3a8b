"""Plots: points where the axes say, a card for each, the same bytes every time."""

import dataclasses
import itertools
import math
import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from vitlab.report import svg
from vitlab.report.page import Report, place, plots, render
from vitlab.report.plot import NO_RUNS, Plot, PlotPoint, PlotSeries

HOSTILE = ["<script>alert(1)</script>", "a & b", '"quoted"', "it's", "{{ 7*7 }}", "]]>", "</template>", "中文"]


def point(x: float, y: float, **options: Any) -> PlotPoint:
    return PlotPoint(x, y, options.pop("name", f"run at {x:g}"), **options)


def plot(*series: PlotSeries, **options: Any) -> Plot:
    return Plot("title", "", series, "images", "accuracy", **options)


def line(*values: tuple[float, float], **options: Any) -> PlotSeries:
    return PlotSeries(options.pop("name", "ViT"), [point(x, y) for x, y in values], **options)


def elements(drawn: bytes | str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawn).iter())


def of_class(drawn: bytes | str, name: str) -> list[ElementTree.Element]:
    return [node for node in elements(drawn) if name in (node.get("class") or "").split()]


def texts(drawn: bytes | str) -> list[str]:
    return ["".join(node.itertext()) for node in elements(drawn) if node.tag.endswith("text")]


def places(drawn: str) -> list[tuple[float, float]]:
    """Where the markers are."""
    found = [
        re.fullmatch(r"translate\((\S+) (\S+)\)", node.get("transform") or "") for node in of_class(drawn, "point")
    ]
    return [(float(match[1]), float(match[2])) for match in found if match]


def tick_places(drawn: str) -> dict[str, float]:
    """The labels under the axis, by their text."""
    nodes = [node for node in elements(drawn) if node.tag == "text" and node.get("text-anchor") == "middle"]
    return {node.text or "": float(node.get("x") or 0) for node in nodes}


def test_log_axis_has_equal_steps_for_equal_ratios() -> None:
    between = line(*((x, 0.3) for x in (2000, 5000, 20_000, 50_000)), name="so many that ticks are at round numbers")
    drawn = plot(line((1000, 0.2), (10_000, 0.4), (100_000, 0.6)), between, log_x=True).draw(500, 340)
    (x0, y0), (x1, y1), (x2, y2) = places(drawn)[:3]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    # The labels 0, 0.1, ... have at most 3 letters of 6.7 px, with 10 px beside them; at the right are 14 px. Of the axis
    # between, two decades and a margin of 4 % of these on either side, the first point lies 0.04 / 1.08 from the left.
    left = 3 * 6.7 + 10
    width = 500 - left - 14
    assert x0 == pytest.approx(left + width * 0.04 / 1.08, abs=0.1)
    assert x1 == pytest.approx(left + width * 0.54 / 1.08, abs=0.1)
    assert x2 == pytest.approx(left + width * 1.04 / 1.08, abs=0.1)
    ticks = tick_places(drawn)
    assert [ticks["1k"], ticks["10k"]] == pytest.approx([x0, x1], abs=0.1)
    assert ticks["5k"] == pytest.approx(x0 + (x1 - x0) * math.log10(5), abs=0.2)


@pytest.mark.parametrize(
    ("values", "log", "expected"),
    [
        ((64, 128, 224, 384), True, ["64", "128", "224", "384"]),
        ((0.0003, 0.001, 0.003), True, ["0.0003", "0.001", "0.003"]),
        ((16_384, 36_864, 102_400), True, ["16,384", "36,864", "102,400"]),
        ((1000, 1e6), True, ["1k", "1M"]),
        ((32, 48), False, ["32", "48"]),
    ],
)
@pytest.mark.parametrize("width", [330, 1040])
def test_ticks_are_at_the_places_of_points_where_these_are_few(
    values: tuple[float, ...], log: bool, expected: list[str], width: int
) -> None:
    drawn = plot(line(*((x, 0.5) for x in values)), log_x=log).draw(width, 300)
    ticks = tick_places(drawn)
    assert list(ticks)[:-1] == expected
    assert [ticks[label] for label in expected] == pytest.approx([x for x, _ in places(drawn)], abs=0.1)


@pytest.mark.parametrize("values", [(411_263_827_968_000, 1_330_000_000_000_001), (224, 230, 384), tuple(range(1, 8))])
def test_ticks_are_round_where_places_are_many_or_long_or_close(values: tuple[float, ...]) -> None:
    labels = list(tick_places(plot(line(*((x, 0.5) for x in values)), log_x=True).draw(500, 300)))[:-1]
    assert len(labels) > 1 and labels != svg.exact_texts(values)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("high", [90, 470, 6000, 300_000_000, 5e15])
def test_labels_under_a_narrow_axis_do_not_touch(high: float, log: bool) -> None:
    values = [60 + (high - 60) * share for share in (0, 0.1, 0.15, 0.3, 0.5, 0.6, 0.8, 0.9, 1)]
    ticks = list(tick_places(plot(line(*((x, 0.5) for x in values)), log_x=log).draw(330, 300)).items())[:-1]
    assert len(ticks) > 1
    for (a, a_x), (b, b_x) in itertools.pairwise(ticks):
        assert a_x + (svg.text_px(a) + svg.text_px(b)) / 2 < b_x


def test_upright_log_axis_goes_up_with_the_logarithm() -> None:
    (_, y0), (_, y1), (_, y2) = places(plot(line((1, 1), (2, 10), (3, 1000)), log_y=True).draw(500, 340))
    assert y0 > y1 > y2 and y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.3)


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (1, 10, 12, [1, 2, 5, 10]),
        (900, 60_000, 12, [1000, 2000, 5000, 10_000, 20_000, 50_000]),
        (0.001, 0.02, 12, [0.001, 0.002, 0.005, 0.01, 0.02]),
        (1, 1e5, 7, [1, 10, 100, 1000, 1e4, 1e5]),
        (1, 1e12, 7, [1, 100, 1e4, 1e6, 1e8, 1e10, 1e12]),
        (40, 60, 5, [40, 45, 50, 55, 60]),
    ],
)
def test_log_ticks_are_round_and_not_too_many(low: float, high: float, most: int, expected: list[float]) -> None:
    assert svg.log_ticks(low, high, most) == expected


@pytest.mark.parametrize(
    ("value", "label"),
    [(0.005, "0.005"), (500, "500"), (1000, "1k"), (2500, "2.5k"), (1e6, "1M"), (3e9, "3B"), (1e18, "1e18")],
)
def test_labels_are_short(value: float, label: str) -> None:
    assert svg.short_text(value) == label


def test_labels_of_one_axis_are_written_alike() -> None:
    assert svg.short_texts([2e14, 5e14, 1e15, 2e15]) == ["2e14", "5e14", "1e15", "2e15"]
    assert svg.short_texts([500, 1e4, 2.5e6]) == ["500", "10k", "2.5M"]


def test_whisker_reaches_from_end_to_end() -> None:
    series = PlotSeries(
        "a", [point(1, 10, interval=(5, 15)), point(2, 5), point(3, 15), point(4, 7, interval=(1, math.nan))]
    )
    drawn = plot(series).draw(500, 340)
    (x, _), (_, low), (_, high), _ = places(drawn)
    (whisker,) = of_class(drawn, "whisker")
    assert (whisker.get("d") or "").startswith(f"M{svg.px(x)} {svg.px(high)}V{svg.px(low)}M")
    assert (whisker.get("d") or "").count("h8") == 2, "a cap at either end"


def test_whisker_to_zero_leaves_a_log_axis_without_a_cap() -> None:
    series = PlotSeries("a", [point(1, 10, interval=(0, 20)), point(2, 1)])
    (whisker,) = of_class(plot(series, log_y=True).draw(500, 340), "whisker")
    assert (whisker.get("d") or "").count("h8") == 1
    below = PlotSeries("a", [point(1, 10, interval=(-2, -1)), point(2, 1)])
    assert not of_class(plot(below, log_y=True).draw(500, 340), "whisker")


def test_points_without_a_place_are_left_out() -> None:
    series = line((1, math.nan), (math.inf, 1), (0, 1), (10, 2), (-5, 3), (100, 3))
    assert len(places(plot(series).draw(500, 340))) == 4
    made = plot(series, line((0, 1), name="nothing left"), log_x=True)
    assert len(places(made.draw(500, 340))) == 2 == len(made.cards)
    assert "nothing left" not in texts(made.draw(500, 340))


@pytest.mark.parametrize("width", [330, 500, 1040])
def test_categories_are_named_under_their_points(width: int) -> None:
    names = ["none", "1-D", "relative"]
    drawn = plot(line((0, 1), (1, 2), (2, 3)), categories=names).draw(width, 300)
    ticks = tick_places(drawn)
    assert [ticks[name] for name in names] == pytest.approx([x for x, _ in places(drawn)], abs=0.1)


def test_categories_of_several_words_are_wrapped_before_they_are_slanted() -> None:
    names = ["masked patch prediction", "from scratch", "supervised on all", "labels"]
    drawn = plot(line(*((k, k) for k in range(4))), categories=names).draw(500, 300)
    assert "rotate" not in drawn
    words = [text for text in texts(drawn) if len(text) > 1 and any(text in name for name in names)]
    assert " ".join(words).split() == " ".join(names).split(), "none is cut"
    below = [
        float(node.get("y") or 0) for node in elements(drawn) if "".join(node.itertext()) in words and node.get("y")
    ]
    assert max(below) < 300 - 4 - 10, "above the label of the axis"


def test_names_are_whole_on_a_phone_also_with_hyphens() -> None:
    names = ["masked patch prediction on JFT-300M", "from scratch", "supervised on ImageNet-21k", "supervised on all"]
    drawn = plot(line(*((k, 0.8) for k in range(4))), categories=names, percent=True).draw(330, 300)
    assert "rotate" not in drawn and "…" not in drawn
    assert {"masked", "prediction", "ImageNet-", "21k"} <= set(texts(drawn))


def test_points_of_several_series_stand_around_the_middle_of_their_category() -> None:
    """Each in its series' order; one that is alone is not moved aside for those that are elsewhere."""
    made = plot(line((0, 1), (1, 1)), line((1, 2), (2, 2)), line((1, 3), (1, 4), (2, 3)), categories=["a", "b", "c"])
    assert [[one.x for one in each.points] for each in made.shown] == [
        [0, pytest.approx(0.88)],
        [1, pytest.approx(1.94)],
        [pytest.approx(1.12), pytest.approx(1.12), pytest.approx(2.06)],
    ]


def test_many_series_stay_at_their_name() -> None:
    made = plot(*(line((0, k), (1, k), name=str(k)) for k in range(20)), categories=["a", "b"])
    places = [point.x for one in made.shown for point in one.points]
    assert all(abs(x - round(x)) < 0.5 for x in places) and len(set(places)) == 40


def test_summary_names_the_categories_of_points_beside_each_other() -> None:
    series = [line((0, 0.687), (1, 0.7)), line((0, 0.5), (1, 0.6), name="ResNet")]
    made = plot(*series, categories=["none", "1-D"], percent=True)
    assert made.summary.endswith("; ViT is 68.7 % at none, 70.0 % at 1-D, ResNet is 50.0 % at none, 60.0 % at 1-D")
    for x in (-1, 2):
        beyond = plot(line((x, 0.5)), categories=["none", "1-D"])
        assert beyond.summary.endswith(f"is 0.5 at {x}"), "no name for what has none"


def test_points_of_a_series_that_would_hide_each_other_stand_beside_each_other() -> None:
    made = plot(line((0, 0.5), (0, 0.505), (0, 0.51), (0, 0.9), (1, 0.5)), categories=["a", "b"])
    (one,) = made.shown
    places = [point.x for point in one.points]
    assert len(set(places[:3])) == 3 and places[3] == 0 and places[4] == 1
    assert [point.y for point in one.points] == [0.5, 0.505, 0.51, 0.9, 0.5], "in the order of their cards"


def test_equal_points_stand_beside_each_other_and_a_log_axis_counts_its_own_way() -> None:
    (alike,) = plot(line((0, 1.0), (0, 1.0), (0, 1.0)), categories=["a"]).shown
    assert len({point.x for point in alike.points}) > 1
    (apart,) = plot(line((0, 1e-3), (0, 0.1), (0, 10.0)), categories=["a"], log_y=True).shown
    assert {point.x for point in apart.points} == {0.0}


@pytest.mark.parametrize("size", [(330, 300), (640, 360)])
def test_a_long_name_leaves_room_for_the_points(size: tuple[int, int]) -> None:
    long = plot(line((1, 0.5), (2, 0.6), name="a long name of words " * 80), line((1, 0.4), name="B"))
    heights = [float(y) for y in re.findall(r"translate\([\d.]+ ([\d.]+)\)", long.draw(*size))]
    assert max(heights) < size[1]
    assert "…" in long.draw(*size)


def test_series_whose_points_would_hide_each_other_stand_beside_each_other() -> None:
    """With a distance of a few pixels, without intervals; where the points are apart, the series have one place."""
    close, apart = (plot(line((1, 0.5), (2, 0.9)), line((1, 0.5 + more), (2, 0.1), name="B")) for more in (0.002, 0.3))

    def places(made: Plot) -> list[str]:
        marked = [node for node in elements(made.file().decode()) if node.tag.endswith("g") and node.get("transform")]
        return [(node.get("transform") or "").split()[0] for node in marked][-4:]

    assert len(set(places(close))) == 4 and len(set(places(apart))) == 2


def test_long_categories_are_slanted_and_stay_inside() -> None:
    names = [f"a name that is far too long for its place {k}" for k in range(6)]
    drawn = plot(line(*((k, k) for k in range(6))), categories=names).draw(330, 300)
    slanted = [node for node in elements(drawn) if "rotate(-35)" in (node.get("transform") or "")]
    assert len(slanted) == 6
    for node in slanted:
        x, y = map(float, re.findall(r"[\d.]+", node.get("transform") or "")[:2])
        length = 6.7 * len("".join(node.itertext()))
        assert x - length * math.cos(math.radians(35)) > -6.7, "half a letter or so is within the estimate"
        assert y + length * math.sin(math.radians(35)) < 300 - 18, "above the label of the axis"
    assert plot(line((1, 0.5)), categories=["a", "b"]).summary.endswith("ViT is 0.5 at b")


@pytest.mark.parametrize("options", [{}, {"log_x": True, "log_y": True}, {"categories": ["a"]}, {"percent": True}])
@pytest.mark.parametrize("series", [[], [PlotSeries("a", [])], [line((math.nan, 1))]])
def test_empty_plot_has_a_note(series: list[PlotSeries], options: dict[str, Any]) -> None:
    made = plot(*series, **options)
    assert texts(made.draw(500, 340)) == texts(made.file()) == [NO_RUNS]
    assert made.cards == [] and made.summary == "title: accuracy over images; no runs yet"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    run = PlotPoint(1, 2, name, (1, 3), [(name, name)], [(0, 2), (1, 1)], name)
    made = Plot(name, name, [PlotSeries(name, [run]), line((1, 1))], name, name, categories=["first", name])
    for drawn in (made.draw(1040, 420), made.file()):
        assert name in texts(drawn)
        for node in elements(drawn):
            assert not node.tag.endswith(("script", "foreignObject", "image", "template"))
            assert not any(key.lower().startswith("on") or key.endswith("href") for key in node.attrib)
    titles = [node.text or "" for node in elements(made.file()) if node.tag.endswith("title")]
    assert f"{name}: 2 (1 to 3)" in titles
    page = render(Report("t", "h", "", [], [made], ""))
    assert page.count("<template>") == page.count("</template>") == 2 and page.count("<script>") == 1


def test_control_characters_do_not_break_the_file() -> None:
    drawn = plot(PlotSeries("a\x00b", [point(1, 2, name="c\x1bd")]), line((1, 1))).file()
    assert "a b" in texts(drawn)


def test_point_and_plot_are_named_for_screen_readers() -> None:
    run = PlotPoint(10_000, 0.452, "ViT 10,000 images", (0.44, 0.461))
    made = plot(PlotSeries("ViT", [point(1000, 0.2), run]), log_x=True, percent=True)
    drawn = made.draw(500, 340)
    assert of_class(drawn, "point")[1].get("aria-label") == "ViT 10,000 images: 45.2 % (44.0 to 46.1)"
    assert ElementTree.fromstring(drawn).get("aria-label") == (
        "title: accuracy over images; ViT goes from 20.0 % at 1,000 to 45.2 % (44.0 to 46.1) at 10,000"
    )


def test_interval_that_is_not_a_number_is_not_named() -> None:
    assert plot().value(point(1, 2.5, interval=(1, math.nan))) == "2.5"
    assert plot().value(point(1, 12_345.6, interval=(12_000, 13_000))) == "12,346 (12,000 to 13,000)"


def test_one_point_of_each_series_is_reached_by_the_tab_key() -> None:
    drawn = plot(line((1, 1), (2, 2)), line((1, 3), (2, 4), name="ResNet")).draw(500, 340)
    nodes = of_class(drawn, "point")
    assert [node.get("tabindex") for node in nodes] == ["0", "-1", "0", "-1"]
    assert [node.get("data-card") for node in nodes] == ["0", "1", "2", "3"]


def test_a_file_stands_alone_and_has_nothing_to_focus() -> None:
    drawn = plot(line((1, 1), (2, 2))).file()
    assert drawn.startswith(b"<?xml") and ElementTree.fromstring(drawn).get("role") == "img"
    assert not [node for node in elements(drawn) if {"tabindex", "data-card"} & set(node.attrib)]
    made = dataclasses.replace(plot(line((1, 1))), title="By images")
    assert plots(Report("t", "h", "", [], [made], "")) == {"by-images.svg": made.file()}


def test_every_colour_has_a_shape_of_its_own() -> None:
    drawn = plot(*(line((k, k), name=str(k), colour=k) for k in range(svg.COLOURS))).file()
    assert len({node.get("d") for node in of_class(drawn, "marker")}) == svg.COLOURS


def test_fit_has_a_dashed_line_and_no_markers_and_the_papers_numbers_have_hollow_ones() -> None:
    fit, paper = line((1, 1), (2, 2), kind="fit"), line((1, 2), (2, 3), hollow=True, colour=1)
    drawn = plot(fit).draw(500, 340)
    assert len(of_class(drawn, "dashed")) == 1 and not of_class(drawn, "marker") and not plot(fit).cards
    drawn = plot(paper).draw(500, 340)
    assert not of_class(drawn, "dashed") and len(of_class(drawn, "hollow")) == 2 == len(plot(paper).cards)


def test_a_point_of_several_lines_has_a_marker_of_its_own() -> None:
    base = point(2, 2, interval=(1, 3), facts=[("seeds", "3")])
    made = plot(
        PlotSeries("depth", [point(1, 1), base]),
        PlotSeries("width", [base, point(3, 3)], 1),
        PlotSeries("front", [PlotPoint(2, 2, base.name), PlotPoint(3, 3, "")], 2, kind="front"),
    )
    drawn = made.draw(500, 340)
    assert [node.get("class") for node in of_class(drawn, "whisker")] == ["whisker ink"] * 2
    assert len(of_class(drawn, "ink")) == 2 + 2 + 1, "whiskers, markers and the legend"
    assert "on several lines" in texts(drawn) and "on several lines" in texts(made.file())
    assert [card.series for card in made.cards] == ["depth", "depth, width", "depth, width", "width"]
    assert not of_class(plot(line((1, 1)), line((1, 1.5), name="b")).draw(500, 340), "ink")


def test_note_of_a_series_stands_in_the_legend_alone() -> None:
    made = plot(line((1, 1), note="no trend"))
    assert "ViT: no trend" in texts(made.draw(500, 340)) and made.cards[0].series == "ViT"
    assert made.summary.endswith("; ViT: no trend is 1 at 1")


def test_differences_of_shares_are_in_points() -> None:
    made = plot(line((1, 0.015), (2, -0.005)), percent=True, percent_unit="points")
    assert made.cards[0].value == "1.5 points"
    labels = texts(made.draw(500, 340))
    assert {"0", "1"} <= set(labels) and not any("%" in label for label in labels)


def test_values_far_from_zero_fill_the_plot() -> None:
    _, (_, low), (_, high) = places(plot(line((1, 0.6), (2, 0.55), (3, 0.7)), percent=True).draw(500, 340))
    axis = of_class(plot(line((1, 0.6)), percent=True).draw(500, 340), "axis")[-1]
    bottom = float((axis.get("d") or "").split("h")[0].split()[-1])
    assert low - high > 0.8 * (bottom - high) and low < bottom - 7, "its marker is clear of the axis"


def test_points_are_joined_only_where_asked() -> None:
    assert of_class(plot(line((1, 1), (2, 2))).draw(500, 340), "line")
    assert not of_class(plot(line((1, 1), (2, 2), joined=False)).draw(500, 340), "line")
    assert not of_class(plot(line((1, 1))).draw(500, 340), "line")


def test_card_holds_the_run_and_a_small_curve() -> None:
    curve = [(step, 2 / (1 + step)) for step in range(1000)] + [(1000, math.nan)]
    run = point(1, 0.5, interval=(0.4, 0.6), facts=[("seeds", "3")], curve=curve, command="vitlab train digits")
    card, other = plot(PlotSeries("ViT", [run, point(2, 1, curve=[(1, 1)])], colour=9), percent=True).cards
    assert (card.name, card.series, card.value) == ("run at 1", "ViT", "50.0 % (40.0 to 60.0)")
    assert (card.facts, card.command) == ([("seeds", "3")], "vitlab train digits")
    (path,) = of_class(card.curve, "line")
    assert path.get("class") == "line c1" and (path.get("d") or "").startswith("M4 4L") and len(card.curve) < 2000
    assert card.curve_note == "training loss 2 to 0.002 in 999 steps"
    assert other.curve == "", "one step is no curve"


@pytest.mark.parametrize("size", [(330, 300), (500, 340), (1040, 420)])
@pytest.mark.parametrize(
    "values", [[(1, 0.5)], [(1, 5.0), (1, 5.0)], [(1e9, 1e-9), (2e9, 3e-9)], [(1e-3, 1), (1e15, 1e6)], [(3e17, 3e17)]]
)
@pytest.mark.parametrize("log", [False, True])
def test_whatever_the_values_points_lie_inside(
    values: list[tuple[float, float]], size: tuple[int, int], log: bool
) -> None:
    drawn = plot(line(*values), line(*values, name="b", colour=5), log_x=log, log_y=log).draw(*size)
    assert all(0 < x < size[0] and 0 < y < size[1] for x, y in places(drawn))


def test_plot_is_higher_than_a_chart_and_has_a_drawing_for_phones() -> None:
    (placed,) = place([plot(line((1, 1), (2, 2)))])
    sizes = {where: ElementTree.fromstring(drawn).get("viewBox") for where, drawn in placed.drawings()}
    assert sizes == {"desk": "0 0 1040 420", "phone": "0 0 330 300"}


def test_same_data_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "import sys; from vitlab.report.plot import *\n"
        "p = [PlotPoint(1, 2, 'a', (1, 3)), PlotPoint(10, 3, 'b')]\n"
        "sys.stdout.buffer.write(Plot('t', '', [PlotSeries('s', p)], 'x', 'y', log_x=True).file())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    points = [PlotPoint(1, 2, "a", (1, 3)), PlotPoint(10, 3, "b")]
    assert there == Plot("t", "", [PlotSeries("s", points)], "x", "y", log_x=True).file()


def test_intervals_that_overlap_at_one_place_stand_beside_each_other() -> None:
    def whiskers(name: str, *values: tuple[float, float]) -> PlotSeries:
        return PlotSeries(name, [point(x, y, interval=(y - 0.1, y + 0.1)) for x, y in values])

    apart = [whiskers("low", (1, 0.2), (2, 0.2)), whiskers("high", (1, 0.8), (2, 0.8))]
    (x, _), (_, _), (same, _), _ = places(plot(*apart).draw(500, 340))
    assert x == same, "what is seen anyway stays in place"
    crowded = [*apart, whiskers("higher", (2, 0.85))]
    found = places(plot(*crowded).draw(500, 340))
    alone, left, right = found[1][0], found[3][0], found[4][0]
    assert right - left > 5 and (left + right) / 2 == pytest.approx(alone, abs=0.1)
