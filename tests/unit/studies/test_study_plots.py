"""The drawings of a study on numbers known by hand: where points stand, what joins them, and how lines are told apart."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from study_records import SCALE, TINY, records_of, tiny_study

from vitlab.report.plot import Plot, PlotSeries
from vitlab.report.svg import COLOURS
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.grid import Cell
from vitlab.studies.outcome import Outcome, find_outcome
from vitlab.studies.study import AxisValue, Study
from vitlab.studies.study_plots import Drawn, draw_all
from vitlab.studies.study_report import outcome_to_dict, strip_of

Level = Callable[[Cell], float]
LOG = "log_x = true\nfit = true"  # of the drawing in TINY
ERRORS = {"1": 0.5, "2": 0.5 / 2**0.5, "4": 0.25}  # 0.5 · x ^ -0.5


def by_size(cell: Cell) -> float:
    return 1 - ERRORS[cell.labels["size"]]


def outcome_of(study: Study, records: dict[str, CellRecord]) -> Outcome:
    return find_outcome(study, study.at("laptop"), records)


def drawn(folder: Path, text: str, level: Level | None = None) -> Drawn:
    study = tiny_study(folder, text)
    (found,) = draw_all(outcome_of(study, records_of(study.at("laptop"), level)), "vitlab x")
    return found


def places(one: PlotSeries) -> list[tuple[float, float]]:
    return [(point.x, point.y) for point in one.points]


# --- points and lines -------------------------------------------------------------------------------------------------


def test_a_fit_is_drawn_through_the_accuracies_and_not_through_their_errors(tmp_path: Path) -> None:
    plot = drawn(tmp_path, TINY, by_size).plot
    runs, fit = plot.series[:2]
    assert (runs.kind, fit.kind) == ("runs", "fit")
    first, middle, last = (fit.points[i] for i in (0, 50, 100))
    assert (first.x, first.y) == pytest.approx((1, 0.5))
    assert (middle.x, middle.y) == pytest.approx((2, 1 - 0.5 / 2**0.5))
    assert (last.x, last.y) == pytest.approx((4, 0.75))


def test_a_point_is_the_mean_of_its_seeds_with_their_interval(tmp_path: Path) -> None:
    """0.50, 0.51 and 0.52: a standard deviation of 0.01, and 4.3027 is the quantile of t with two degrees of freedom."""
    (point, *_), *_ = (one.points for one in drawn(tmp_path, TINY, lambda cell: 0.5 + 0.01 * cell.seed).plot.series)
    half = 4.3027 * 0.01 / 3**0.5
    assert point.y == pytest.approx(0.51) and point.interval == pytest.approx((0.51 - half, 0.51 + half), abs=1e-6)


def test_an_interval_of_accuracies_ends_at_their_bounds_wherever_it_is_written(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, TINY)
    levels = (0.99, 1.0, 1.0)
    outcome = outcome_of(study, records_of(study.at("laptop"), lambda cell: levels[cell.seed]))
    (found,) = draw_all(outcome, "")
    (_, high) = found.plot.series[0].points[0].interval or (0, 0)
    assert high == 1.0 and found.plot.cards[0].value.endswith("to 100.0)")
    table = outcome_to_dict(outcome)
    assert table["conditions"][0]["interval"] == table["drawings"][0]["lines"]["A"][0]["interval"]


def test_points_are_joined_by_rising_x_but_not_between_names(tmp_path: Path) -> None:
    backwards = SCALE.replace('"1" = { x = 1,', '"1" = { x = 9,')
    plot = drawn(tmp_path, TINY.replace(SCALE, backwards)).plot
    assert [x for x, _ in places(plot.series[0])] == [2, 4, 9] and plot.series[0].joined
    named = TINY.replace(LOG, "").replace('x = "size"\nline = "kind"', 'x = "kind"\nline = "size"')
    plot = drawn(tmp_path, named).plot
    assert plot.categories == ["A", "B"] and not any(one.joined for one in plot.series)
    front = drawn(tmp_path, TINY.replace(LOG, "front = true")).plot
    assert [(one.kind, one.joined) for one in front.series] == [("runs", False)] * 2 + [("front", True)]


def test_a_point_that_is_alone_at_its_name_stands_above_it(tmp_path: Path) -> None:
    named = TINY.replace(LOG, "").replace('x = "size"\nline = "kind"', 'x = "kind"\nline = "size"')
    plot = drawn(
        tmp_path,
        named.replace(
            "[scales.laptop]", '[scales.laptop]\nskip = [{ kind = "A", size = "1" }, { kind = "A", size = "2" }]'
        ),
    ).plot
    assert [[x for x, _ in places(one)] for one in plot.shown] == [
        [0, pytest.approx(0.88)],
        [1],
        [pytest.approx(1.12)],
    ]
    assert " at A" in plot.summary and "at 0.88" not in plot.summary


def test_front_is_of_measured_points_and_not_of_fitted_curves(tmp_path: Path) -> None:
    """The curve lies above the point in the middle, which must not keep that off the front."""
    levels = {"1": 0.5, "2": 0.6445, "4": 0.75}
    found = drawn(tmp_path, TINY.replace(LOG, f"{LOG}\nfront = true"), lambda cell: levels[cell.labels["size"]])
    assert [one.kind for one in found.plot.series] == ["runs", "fit", "runs", "fit", "front"]
    assert found.front == ("A, 1", "B, 1", "A, 2", "B, 2", "A, 4", "B, 4")
    assert {point.x for point in found.plot.series[-1].points} == {1, 2, 4}


# --- which lines ------------------------------------------------------------------------------------------------------


def test_only_means_by_a_label_what_tests_mean_by_it(tmp_path: Path) -> None:
    """B is the one value of that label, though A is drawn on a line of that name."""
    text = TINY.replace("A = {}", 'A = { line = "B" }\nC = { line = "D" }').replace(
        'a = { kind = "A"', 'a = { kind = "C"'
    )
    text = text.replace(LOG, 'only = { kind = "B" }').replace('line = "kind"', "")
    found = drawn(tmp_path, text)
    assert [point.name for one in found.plot.series for point in one.points] == ["B, 1", "B, 2", "B, 4"]
    named = drawn(tmp_path, text.replace('only = { kind = "B" }', 'only = { kind = "D" }'))
    assert [point.name for one in named.plot.series for point in one.points] == ["C, 1", "C, 2", "C, 4"], "or by a line"


def test_lines_of_several_axes_are_kept_apart_where_labels_have_commas(tmp_path: Path) -> None:
    axes = """
[scales.laptop.axes.first]
a = {}
"a, b" = { train = { "optim.lr" = 1e-4 } }
[scales.laptop.axes.second]
"b, c" = {}
c = { train = { "optim.weight_decay" = 0.1 } }
"""
    kinds = SCALE[SCALE.index("[scales.laptop.axes.kind]") : SCALE.index("[scales.laptop.axes.size]")]
    text = TINY.replace(kinds, axes).replace('line = "kind"\n', "").replace("kind = ", "first = ")
    text = text.replace('"A" }', '"a" }').replace('"B" }', '"a, b" }').replace(LOG, "")
    series = drawn(tmp_path, text).plot.series
    assert [one.name for one in series] == ["a, “b, c”", "a, c", "“a, b”, “b, c”", "“a, b”, c"]
    assert [len(one.points) for one in series] == [3, 3, 3, 3]


def test_one_line_without_a_name_is_called_what_it_measures(tmp_path: Path) -> None:
    kinds = SCALE[SCALE.index("[scales.laptop.axes.kind]") : SCALE.index("[scales.laptop.axes.size]")]
    text = (
        TINY.replace(kinds, "")
        .replace('line = "kind"\n', "")
        .replace(TINY[TINY.index("[[claims]]") : TINY.index(SCALE)], "")
    )
    found = drawn(tmp_path, text)
    assert found.plot.series[0].name == "test accuracy" and found.plot.cards[0].series == "test accuracy"


@pytest.mark.parametrize("numbers", [(0, 7), (0, 8), (1, 3, 9, 11), (8, 9, 16), tuple(range(12))])
def test_lines_look_different_as_long_as_there_are_colours(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Another scale has twelve lines, by which colours are numbered; this one has some of them."""
    study = tiny_study(tmp_path, TINY.replace(LOG, "front = true"))
    scale = study.at("laptop")
    values = [AxisValue(f"line {k}", None, (), {"train": {"optim.lr": 1e-4 * (k + 1)}}) for k in range(18)]
    laptop = dataclasses.replace(scale, axes={**scale.axes, "kind": tuple(values[k] for k in numbers)})
    full = dataclasses.replace(scale, name="gpu", axes={**scale.axes, "kind": tuple(values)})
    study = dataclasses.replace(study, scales={"laptop": laptop, "gpu": full}, claims=())
    (found,) = draw_all(outcome_of(study, records_of(laptop)), "")
    looks = [one.css for one in found.plot.series]
    assert found.plot.series[-1].kind == "front"
    assert len(set(looks)) == min(len(looks), COLOURS)
    kept = [one.css for one, k in zip(found.plot.series, numbers, strict=False) if k < COLOURS]
    assert kept == [str(k) for k in numbers if k < COLOURS], "the same as at the other scale"


# --- cards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [None, 0, 2])
def test_a_card_has_seconds_only_where_every_seed_was_alone_on_its_machine(tmp_path: Path, shared: int | None) -> None:
    study = tiny_study(tmp_path)
    records = {
        key: dataclasses.replace(one, workers=2 if one.seed == shared else 1)
        for key, one in records_of(study.at("laptop")).items()
    }
    (found,) = draw_all(outcome_of(study, records), "")
    assert [("seconds" in dict(card.facts)) for card in found.plot.cards] == [shared is None] * 6


# --- strips -----------------------------------------------------------------------------------------------------------


def test_strip_of_a_difference_is_in_points_as_its_sentence_is(tmp_path: Path) -> None:
    """A is 0.10, 0.11 and 0.12 above B; the border is one point, and 4.3027 is the quantile of t."""
    study = tiny_study(tmp_path, TINY.replace("above = 0.0", "above = 0.01\nbelow = 0.5"))

    def level(cell: Cell) -> float:
        return 0.5 + (0.1 + 0.01 * cell.seed) * (cell.labels["kind"] == "A")

    (claim,) = outcome_of(study, records_of(study.at("laptop"), level)).claims
    strip = strip_of(claim.tests[0])
    assert strip is not None and not strip.log and strip.good is True
    half = 100 * 4.3027 * 0.01 / 3**0.5
    assert strip.mean == pytest.approx(11) and list(strip.seeds) == pytest.approx([10, 11, 12])
    assert strip.interval == pytest.approx((11 - half, 11 + half), abs=1e-3)
    assert (strip.low, strip.high) == (1, 50)


def test_strip_of_a_ratio_is_by_its_logarithm_and_not_in_points(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, TINY.replace('"difference"', '"ratio"').replace("above = 0.0", "above = 1.0"))

    def level(cell: Cell) -> float:
        return 0.2 * (2.0**cell.seed if cell.labels["kind"] == "A" else 1.0)

    (claim,) = outcome_of(study, records_of(study.at("laptop"), level)).claims
    strip = strip_of(claim.tests[0])
    assert strip is not None and strip.log and strip.good is None
    assert strip.mean == pytest.approx(2) and list(strip.seeds) == pytest.approx([1, 2, 4])
    assert (strip.low, strip.high) == (1, None)


def test_no_strip_without_a_number(tmp_path: Path) -> None:
    (claim,) = outcome_of(tiny_study(tmp_path), {}).claims
    assert strip_of(claim.tests[0]) is None


def test_nothing_is_drawn_of_what_nobody_has_measured(tmp_path: Path) -> None:
    study = tiny_study(tmp_path)
    (found,) = draw_all(outcome_of(study, {}), "")
    assert isinstance(found.plot, Plot) and not found.plot.shown and found.fits == found.front == ()
