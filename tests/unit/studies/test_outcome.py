"""What records say: every statistic on numbers known by hand, what is selected, and when a claim holds."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from study_records import HEAD, SCALE, TINY, records_of, tiny_study

from vitlab.evaluation.fits import t_quantile
from vitlab.studies import outcome as module
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.grid import Cell
from vitlab.studies.outcome import FAILS, HOLDS, NOT_YET, UNKNOWN, ClaimOutcome, find_outcome
from vitlab.studies.units import count_in_words, format_mean

Level = Callable[[Cell], float]
NUMBERS = {"A": {"1": 0.50, "2": 0.60, "4": 0.70}, "B": {"1": 0.40, "2": 0.45, "4": 0.50}}


def by_hand(cell: Cell) -> float:
    """A gains 10 points with each doubling, B 5; each seed adds 1 point to both."""
    return NUMBERS[cell.labels["kind"]][cell.labels["size"]] + 0.01 * cell.seed


def claim(*tests: str) -> str:
    rows = "".join(f"[[claims.tests]]\n{test}\n" for test in tests)
    return f'[[claims]]\nname = "c"\nsays = "s"\nwhere = "w"\n{rows}'


def judged(
    folder: Path,
    *tests: str,
    level: Level = by_hand,
    flops: Callable[[Cell], float] | None = None,
    scale: str = SCALE,
    without: Callable[[Cell], bool] = lambda _: False,
    change: Callable[[Cell, CellRecord], CellRecord] = lambda _, record: record,
) -> ClaimOutcome:
    study = tiny_study(folder, HEAD + claim(*tests) + scale)
    at = study.at("laptop")
    records = records_of(at, level, flops)
    outcome = find_outcome(study, at, records)
    left = [one for row in outcome.conditions for one in row.seeds if not without(one.cell)]
    return find_outcome(study, at, {one.record.key: change(one.cell, one.record) for one in left}).claims[0]


def only(found: ClaimOutcome) -> module.TestOutcome:
    (test,) = found.tests
    return test


AB = 'a = { kind = "A" }\nb = { kind = "B" }'
BA = 'a = { kind = "B" }\nb = { kind = "A" }'
STATISTICS = {
    "difference": (f'statistic = "difference"\n{AB}', (0.1 + 0.15 + 0.2) / 3),
    "difference at one place": (
        'statistic = "difference"\na = { kind = "A", size = "2" }\nb = { kind = "B", size = "2" }',
        0.15,
    ),
    "ends": ('statistic = "difference"\na = { kind = "A", size = "last" }\nb = { kind = "A", size = "first" }', 0.2),
    "slope": ('statistic = "slope"\nalong = "size"\na = { kind = "A" }', 0.1),
    "slope of all": ('statistic = "slope"\nalong = "size"', 0.075),
    "slope-difference": (f'statistic = "slope-difference"\nalong = "size"\n{AB}', 0.05),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_differences_are_paired_by_seed(tmp_path: Path, name: str) -> None:
    """A seed that lifts both sides alike does not widen the interval."""
    text, expected = STATISTICS[name]
    test = only(judged(tmp_path, f"{text}\nabove = 0.0"))
    assert list(test.by_seed) == [0, 1, 2] and list(test.by_seed.values()) == pytest.approx([expected] * 3)
    assert test.found is not None and test.found.interval == pytest.approx((expected, expected))
    assert test.verdict == HOLDS


@pytest.mark.parametrize("kind", ["A", "B"])
def test_a_slope_counts_no_seed_that_lacks_a_place(tmp_path: Path, kind: str) -> None:
    """A curve that flattens has another slope over its first half: such seeds, or sides, cannot be compared."""
    text, expected = STATISTICS["slope-difference"]
    lacks = {"kind": kind, "size": "4"}
    found = judged(tmp_path, f"{text}\nabove = 0.0", without=lambda cell: cell.seed == 1 and {**cell.labels} == lacks)
    assert only(found).by_seed == pytest.approx({0: expected, 2: expected})


@pytest.mark.parametrize("statistic", ["value", "difference", "ratio", "cost-ratio"])
def test_a_seed_without_all_its_cells_is_left_out(tmp_path: Path, statistic: str) -> None:
    """A mean or a front of some of them is another number."""
    sides = 'a = { kind = "A" }' if statistic == "value" else AB
    lacks = {"kind": "A", "size": "4"}
    found = judged(
        tmp_path,
        f'statistic = "{statistic}"\n{sides}\nabove = 0.01',
        without=lambda cell: cell.seed == 1 and {**cell.labels} == lacks,
    )
    assert list(only(found).by_seed) == [0, 2] and found.verdict == UNKNOWN


def test_best_is_chosen_by_seeds_that_have_every_value(tmp_path: Path) -> None:
    """Seed 0, a bad one, lacks size 4: without it 1 is best, with it 4 would be."""

    def level(cell: Cell) -> float:
        return {"1": 0.5, "2": 0.3, "4": 0.4}[cell.labels["size"]] - (0.4 if cell.seed == 0 else 0.0)

    text = 'statistic = "value"\na = { kind = "A", size = "best" }\nabove = 0.2'
    lacks = {"kind": "A", "size": "4"}
    found = judged(tmp_path, text, level=level, without=lambda cell: cell.seed == 0 and {**cell.labels} == lacks)
    assert only(found).test.a["size"] == "1"


def test_value_has_the_interval_over_seeds(tmp_path: Path) -> None:
    test = only(judged(tmp_path, 'statistic = "value"\na = { kind = "A", size = "1" }\nabove = 0.4'))
    assert list(test.by_seed.values()) == pytest.approx([0.5, 0.51, 0.52])
    half = t_quantile(0.975, 2) * 0.01 / 3**0.5
    assert test.found is not None and test.found.interval == pytest.approx((0.51 - half, 0.51 + half))
    assert test.sentence == "test accuracy, A, 1 size: 51.00 % (48.52 to 53.48), 3 seeds"


def test_a_label_that_is_also_a_line_of_others_is_the_one_value(tmp_path: Path) -> None:
    scale = SCALE.replace("A = {}", 'A = { line = "B" }')
    outcome = judged(tmp_path, 'statistic = "value"\na = { kind = "B" }\nabove = 0.0', scale=scale)
    assert only(outcome).by_seed[0] == pytest.approx(sum(NUMBERS["B"].values()) / 3)


def test_borders_have_the_size_of_the_measure(tmp_path: Path) -> None:
    def spent(cell: Cell) -> float:
        return 1e15 * (2 if cell.labels["kind"] == "A" else 1)

    for border, verdict in (("above = 5e14", HOLDS), ("above = 5e15", FAILS), ("below = 5e14", FAILS)):
        found = judged(tmp_path, f'statistic = "difference"\nmeasure = "flops"\n{AB}\n{border}', flops=spent)
        assert only(found).by_seed[0] == pytest.approx(1e15) and found.verdict == verdict


def test_multiply_adds_a_second_are_those_of_an_image_at_its_rate(tmp_path: Path) -> None:
    test = only(judged(tmp_path, 'statistic = "value"\nmeasure = "macs_per_second"\nabove = 0.0'))
    assert (
        test.by_seed[0] == 2000 * 100
        and test.sentence == "multiply-adds per second, all: 200,000, 3 measurements, all alike"
    )


def test_ends_and_numbers_are_spoken_with_their_axis(tmp_path: Path) -> None:
    text = 'statistic = "difference"\na = { size = "last" }\nb = { size = "first" }\nabove = 0.0'
    assert only(judged(tmp_path, text)).what == "test accuracy, 4 size minus 1 size"
    comma = SCALE.replace("A = {}", '"A, large" = {}')
    text = 'statistic = "difference"\na = { kind = "A, large" }\nb = { kind = "B" }\nabove = -1.0'
    found = judged(tmp_path, text, scale=comma, level=lambda _: 0.5)
    assert only(found).what == "test accuracy, “A, large” minus B"


def test_ratio_of_a_named_measure(tmp_path: Path) -> None:
    test = only(judged(tmp_path, f'statistic = "ratio"\nmeasure = "loss"\n{AB}\nbelow = 1.0'))
    expected = (0.5 / 0.6 * 0.4 / 0.55 * 0.3 / 0.5) ** (1 / 3)
    assert test.by_seed[0] == pytest.approx(expected) and test.verdict == HOLDS
    assert test.sentence.startswith("loss of A, as a multiple of that of B: 0.7")


def test_exponents_of_a_power_law(tmp_path: Path) -> None:
    power = {"A": 2.0, "B": 1.0}

    def level(cell: Cell) -> float:
        x = cell.values["size"].x
        assert x is not None
        return 0.05 * x ** power[cell.labels["kind"]]

    test = only(
        judged(tmp_path, 'statistic = "exponent"\nalong = "size"\na = { kind = "A" }\nabove = 1.6', level=level)
    )
    assert test.by_seed[1] == pytest.approx(2) and test.verdict == HOLDS
    between = judged(tmp_path, f'statistic = "exponent-difference"\nalong = "size"\n{AB}\nbelow = 0.5', level=level)
    assert only(between).by_seed[2] == pytest.approx(1) and between.verdict == FAILS
    two_places = judged(
        tmp_path,
        'statistic = "exponent"\nalong = "size"\na = { kind = "A" }\nabove = 1.6',
        level=level,
        without=lambda cell: cell.labels["size"] == "4",
    )
    assert only(two_places).sentence == "not measured yet", "two points lie on every power law"


def test_cost_ratio_is_that_of_b_to_a(tmp_path: Path) -> None:
    text = f'statistic = "cost-ratio"\n{AB}\nabove = 1.0'

    def alike(cell: Cell) -> float:
        return 0.1 * (cell.values["size"].x or 0)

    def threefold(cell: Cell) -> float:
        return 1e9 * (cell.values["size"].x or 0) * (3 if cell.labels["kind"] == "B" else 1)

    found = judged(tmp_path, text, level=alike, flops=threefold)
    assert list(only(found).by_seed.values()) == pytest.approx([3.0] * 3) and found.verdict == HOLDS
    for_more = judged(tmp_path, text, level=lambda cell: 0.1 if cell.labels["kind"] == "A" else 0.9, flops=threefold)
    assert only(for_more).sentence == "not comparable: with seed 0 one side has more test accuracy for more FLOPs"
    assert for_more.verdict == UNKNOWN and for_more.seeds == 3
    none = judged(tmp_path, text, without=lambda cell: cell.labels["kind"] == "B")
    assert only(none).sentence == "not measured yet"


def _better(cell: Cell) -> float:
    """Where A is, every point of it lies above those of B."""
    return 0.9 if cell.labels["kind"] == "A" else 0.1


def _threefold(cell: Cell) -> float:
    return 1e9 * (3 if cell.labels["kind"] == "B" else 1)


@pytest.mark.parametrize(
    ("bounds", "sides", "expected"),
    [
        ("above = 1.0", AB, HOLDS),
        ("above = 2.0\nbelow = 4.0", AB, UNKNOWN),
        ("below = 2.0", AB, FAILS),
        ("above = 4.0", AB, UNKNOWN),
        ("below = 1.0", BA, HOLDS),
        ("above = 0.5", BA, FAILS),
        ("below = 0.2", BA, UNKNOWN),
    ],
)
def test_fronts_that_do_not_meet_decide_only_what_their_bound_does(
    tmp_path: Path, bounds: str, sides: str, expected: str
) -> None:
    found = judged(tmp_path, f'statistic = "cost-ratio"\n{sides}\n{bounds}', level=_better, flops=_threefold)
    assert list(only(found).by_seed.values()) == pytest.approx([3.0 if sides == AB else 1 / 3] * 3)
    assert only(found).number.startswith("at least 3" if sides == AB else "at most 0.333")
    assert found.verdict == expected


def test_a_seed_that_cannot_be_compared_leaves_the_claim_inconclusive(tmp_path: Path) -> None:
    """The seeds that are left would have been selected by their outcome."""

    def level(cell: Cell) -> float:
        return _better(cell) if cell.seed else 1 - _better(cell)

    found = judged(tmp_path, f'statistic = "cost-ratio"\n{AB}\nabove = 1.0', level=level, flops=_threefold)
    assert found.verdict == UNKNOWN and only(found).sentence.startswith("not comparable: with seed 0")


def test_ratio_is_the_inverse_of_the_ratio_the_other_way_round(tmp_path: Path) -> None:
    def level(cell: Cell) -> float:
        return 0.8 if (cell.labels["kind"] == "A") == (cell.labels["size"] == "1") else 0.4

    one, other = (only(judged(tmp_path, f'statistic = "ratio"\n{sides}\nabove = 1.0')) for sides in (AB, BA))
    assert one.by_seed[0] * other.by_seed[0] == pytest.approx(1)
    assert only(judged(tmp_path, f'statistic = "ratio"\n{AB}\nabove = 1.0', level=level)).by_seed[0] < 1


@pytest.mark.parametrize("kind", ["A", "B"])
def test_there_is_no_ratio_of_zero(tmp_path: Path, kind: str) -> None:
    found = judged(
        tmp_path, f'statistic = "ratio"\n{AB}\nabove = 1.0', level=lambda cell: float(cell.labels["kind"] != kind)
    )
    assert found.verdict == UNKNOWN and "with seed 0 test accuracy is not above 0" in only(found).sentence


def test_there_is_no_exponent_of_zero(tmp_path: Path) -> None:
    text = 'statistic = "exponent"\nalong = "size"\na = { kind = "A" }\nabove = 0.0'
    found = judged(tmp_path, text, level=lambda cell: float(cell.labels["size"] != "2"))
    assert found.verdict == UNKNOWN and only(found).sentence.startswith("with seed 0 test accuracy is 0, and")


def test_exponent_of_what_does_not_change_decides_nothing(tmp_path: Path) -> None:
    text = 'statistic = "exponent"\nalong = "size"\na = { kind = "A" }\nabove = 0.0'
    found = judged(tmp_path, text, level=lambda _: 0.63)
    assert set(only(found).by_seed.values()) == {0.0} and found.verdict == UNKNOWN


@pytest.mark.parametrize("statistic", ["ratio", "cost-ratio"])
def test_times_of_two_machines_or_of_a_shared_one_are_not_compared(tmp_path: Path, statistic: str) -> None:
    how = 'measure = "images_per_second"' if statistic == "ratio" else 'cost = "seconds"'
    text = f'statistic = "{statistic}"\n{how}\n{AB}\nabove = 0.1'

    def rated(cell: Cell, record: CellRecord) -> CellRecord:
        numbers = {**record.numbers, "images_per_second": 10.0 if cell.labels["kind"] == "A" else 1.0}
        return dataclasses.replace(record, numbers=numbers, workers=1)

    def elsewhere(cell: Cell, record: CellRecord) -> CellRecord:
        return dataclasses.replace(rated(cell, record), hardware={"name": f"machine of {cell.labels['kind']}"})

    def shared(cell: Cell, record: CellRecord) -> CellRecord:
        return dataclasses.replace(rated(cell, record), workers=1 + (cell.labels["kind"] == "B"))

    assert only(judged(tmp_path, text, change=rated)).found is not None
    two = only(judged(tmp_path, text, change=elsewhere))
    assert two.sentence == "not comparable: measured on machine of A and machine of B" and two.verdict == UNKNOWN
    beside = only(judged(tmp_path, text, change=shared))
    assert "some runs shared their machine" in beside.sentence and beside.verdict == UNKNOWN


@pytest.mark.parametrize(
    "test",
    [
        f'statistic = "ratio"\n{AB}',
        'statistic = "value"\na = { kind = "A" }',
        'statistic = "exponent"\nalong = "size"\na = { kind = "A" }',
    ],
    ids=["ratio", "value", "exponent"],
)
def test_times_with_other_cores_are_of_another_machine_also_along_an_axis(tmp_path: Path, test: str) -> None:
    def timed(threads: Callable[[Cell], int]) -> Callable[[Cell, CellRecord], CellRecord]:
        def change(cell: Cell, record: CellRecord) -> CellRecord:
            numbers = {**record.numbers, "images_per_second": cell.values["size"].x or 0.0}
            hardware = {"name": "x86_64", "cpus": 64, "threads": threads(cell)}
            return dataclasses.replace(record, numbers=numbers, hardware=hardware, workers=1)

        return change

    text = f'{test}\nmeasure = "images_per_second"\nabove = 0.1'
    assert only(judged(tmp_path, text, change=timed(lambda _: 64))).found is not None
    two = only(judged(tmp_path, text, change=timed(lambda cell: 64 if cell.labels["size"] == "1" else 2)))
    assert "x86_64 with 2 threads of 64 cores and x86_64 with 64 threads of 64 cores" in two.sentence
    assert two.verdict == UNKNOWN


def test_a_claim_that_fails_counts_the_seeds_of_the_test_that_does(tmp_path: Path) -> None:
    lacking = 'statistic = "value"\nmeasure = "mean_ap"\nabove = 0.0'
    found = judged(tmp_path, 'statistic = "value"\nabove = 1.0', lacking)
    assert found.verdict == FAILS and found.seeds == 3
    assert judged(tmp_path, 'statistic = "value"\nabove = 0.0', lacking).seeds == 0


def test_a_claim_that_is_post_hoc_says_so_with_its_verdict(tmp_path: Path) -> None:
    found = judged(tmp_path, 'statistic = "value"\nabove = 0.0')
    assert found.verdict_in_words == HOLDS
    marked = dataclasses.replace(found, claim=dataclasses.replace(found.claim, post_hoc="the bound"))
    assert marked.verdict_in_words == f"{HOLDS}, post hoc"
    assert dataclasses.replace(marked, verdict=NOT_YET).verdict_in_words == NOT_YET


def test_a_claim_is_post_hoc_at_the_scales_that_say_so(tmp_path: Path) -> None:
    for scales, said in (('["laptop"]', "the bound"), ('["gpu"]', "")):
        text = TINY.replace(
            'where = "section 0"', f'where = "section 0"\npost_hoc = "the bound"\npost_hoc_scales = {scales}'
        )
        study = tiny_study(tmp_path, text)
        (found,) = find_outcome(study, study.at("laptop"), records_of(study.at("laptop"))).claims
        assert study.claims[0].post_hoc == "the bound" and found.claim.post_hoc == said


def test_records_of_a_claim_are_those_that_its_number_is_made_of(tmp_path: Path) -> None:
    (test,) = judged(tmp_path, 'statistic = "value"\na = { kind = "A", size = "1" }\nabove = 0.0').tests
    assert len(test.records) == 3, "one for each seed, none of what it is not compared with"


def test_cost_ratio_of_a_measure_that_is_better_when_lower(tmp_path: Path) -> None:
    """Both start alike, and A reaches every lower loss with a third of the compute of B."""

    def spent(cell: Cell) -> float:
        return (
            1e9 * (cell.values["size"].x or 0) * (3 if cell.labels["kind"] == "B" and cell.labels["size"] != "1" else 1)
        )

    found = judged(
        tmp_path,
        f'statistic = "cost-ratio"\nmeasure = "loss"\n{AB}\nabove = 1.0',
        level=lambda cell: 0.1 * (cell.values["size"].x or 0),
        flops=spent,
    )
    assert all(2 < ratio < 3 for ratio in only(found).by_seed.values()) and found.verdict == HOLDS


def test_a_measure_that_no_run_has_is_named_with_those_there_are(tmp_path: Path) -> None:
    (test,) = judged(tmp_path, 'statistic = "value"\nmeasure = "mean_ap"\nabove = 0.2').tests
    assert test.verdict == UNKNOWN and re.search("no number mean_ap; they have .*top1", test.sentence)


def test_best_counts_measurements_of_zero(tmp_path: Path) -> None:
    """A size with accuracies of 0, 0 and 0.6 is worse than one with 0.3 each."""

    def level(cell: Cell) -> float:
        return {"1": 0.6 if cell.seed == 2 else 0.0, "2": 0.3, "4": 0.1}[cell.labels["size"]]

    test = only(judged(tmp_path, 'statistic = "value"\na = { size = "best" }\nabove = 0.2', level=level))
    assert test.test.a == {"size": "2"}


def test_line_selects_all_values_that_are_drawn_as_one(tmp_path: Path) -> None:
    lines = SCALE.replace('"1" = { x = 1,', '"1" = { x = 1, line = "few",').replace(
        '"2" = { x = 2,', '"2" = { x = 2, line = "few",'
    )
    found = judged(tmp_path, 'statistic = "value"\na = { kind = "A", size = "few" }\nabove = 0.0', scale=lines)
    assert only(found).by_seed[0] == pytest.approx(0.55)


def test_ends_are_those_of_the_axis_also_where_a_cell_is_skipped(tmp_path: Path) -> None:
    skipping = SCALE + '[[scales.laptop.skip]]\nkind = "A"\nsize = "1"\n'
    text = 'statistic = "value"\na = { kind = "B", size = "END" }\nabove = 0.0'
    for end, expected in (("first", 0.40), ("last", 0.50)):
        found = judged(tmp_path, text.replace("END", end), scale=skipping)
        assert only(found).by_seed[0] == pytest.approx(expected)


A_MINUS_B = f'statistic = "difference"\n{AB}\n'
YES, NO, OPEN = f"{A_MINUS_B}above = 0.0", f"{A_MINUS_B}below = 0.0", 'statistic = "value"\nabove = 0.52'


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ((YES,), HOLDS),
        ((NO,), FAILS),
        ((OPEN,), UNKNOWN),
        ((YES, YES), HOLDS),
        ((YES, NO), FAILS),
        ((YES, OPEN), UNKNOWN),
        ((OPEN, NO), FAILS),
        ((f'{NO}\nscales = ["gpu"]', YES), HOLDS),
    ],
)
def test_claim_holds_if_all_tests_do_and_fails_if_one_does(
    tmp_path: Path, tests: tuple[str, ...], expected: str
) -> None:
    assert judged(tmp_path, *tests).verdict == expected


@pytest.mark.parametrize(("seeds", "expected"), [(1, UNKNOWN), (2, UNKNOWN), (3, HOLDS)])
def test_fewer_than_three_seeds_decide_nothing(tmp_path: Path, seeds: int, expected: str) -> None:
    scale = SCALE.replace(
        'about = "Nothing to speak of."', f'about = "Nothing to speak of."\nseeds = {[*range(seeds)]}'
    )
    assert judged(tmp_path, YES, scale=scale).verdict == expected, "all that there are"
    found = judged(tmp_path, YES, without=lambda cell: cell.seed >= seeds)
    assert found.verdict == expected and len(only(found).by_seed) == seeds
    assert ("3 seeds" if seeds == 3 else f"{seeds} of 3 seeds") in only(found).sentence


def test_seed_that_one_side_lacks_is_left_out(tmp_path: Path) -> None:
    found = judged(tmp_path, YES, without=lambda cell: cell.seed == 1 and cell.labels["kind"] == "B")
    assert list(only(found).by_seed) == [0, 2]


def test_seeds_that_are_left_of_more_decide_nothing(tmp_path: Path) -> None:
    """Of five seeds the two that diverged left no records, and would have turned the verdict."""

    def level(cell: Cell) -> float:
        return by_hand(cell) - (0.4 if cell.labels["kind"] == "A" and cell.seed > 2 else 0.0)

    scale = SCALE.replace('about = "Nothing to speak of."', 'about = "Nothing to speak of."\nseeds = [0, 1, 2, 3, 4]')
    assert judged(tmp_path, YES, level=level, scale=scale).verdict != HOLDS
    left = judged(tmp_path, YES, level=level, scale=scale, without=lambda cell: cell.seed > 2)
    assert left.verdict == UNKNOWN and only(left).seeds == 3 and "3 of 5 seeds" in only(left).sentence


def test_a_difference_is_of_cells_that_are_alike_but_for_what_is_compared(tmp_path: Path) -> None:
    """B lacks the size at which A is best: its mean over all sizes is of other cells."""
    scale = SCALE.replace(
        "[scales.laptop.stages.train]", '[[scales.laptop.skip]]\nkind = "B"\nsize = "4"\n[scales.laptop.stages.train]'
    )
    found = only(judged(tmp_path, f'statistic = "difference"\n{AB}\nabove = 0.0', scale=scale))
    assert list(found.by_seed.values()) == pytest.approx([(0.10 + 0.15) / 2] * 3)


def test_the_best_loss_is_the_lowest(tmp_path: Path) -> None:
    text = 'statistic = "value"\nmeasure = "loss"\na = { kind = "A", size = "best" }\nbelow = 0.9'
    assert only(judged(tmp_path, text)).test.a["size"] == "4", "where the accuracy is highest"


def test_within_bounds(tmp_path: Path) -> None:
    assert judged(tmp_path, f"{A_MINUS_B}above = 0.1\nbelow = 0.2").verdict == HOLDS
    assert judged(tmp_path, f"{A_MINUS_B}above = 0.2\nbelow = 0.3").verdict == FAILS


def test_flops_are_those_of_all_stages_and_a_chain_with_a_gap_is_not_measured(tmp_path: Path) -> None:
    stages = '[scales.laptop.stages.second]\nrecipe = "study-laptop-vit"\n[scales.laptop.axes.kind]\n'
    study = tiny_study(tmp_path, HEAD + SCALE.replace("[scales.laptop.axes.kind]\n", stages))
    scale = study.at("laptop")
    records = records_of(scale, by_hand, lambda _: 1e9)
    outcome = find_outcome(study, scale, records)
    assert outcome.measured == outcome.cells == 18
    assert {condition.mean("flops") for condition in outcome.conditions} == {2e9}
    gone = outcome.conditions[0].seeds[0]
    assert [one.key for one in gone.before] != [gone.record.key]
    del records[gone.before[0].key]
    assert find_outcome(study, scale, records).measured == 17


def test_claim_without_measurements_has_no_verdict(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, HEAD + claim(YES) + SCALE)
    outcome = find_outcome(study, study.at("laptop"), {})
    assert (outcome.measured, outcome.cells, outcome.claims[0].verdict) == (0, 18, NOT_YET)
    assert all(
        condition.estimate("top1") is None and condition.mean("flops") is None for condition in outcome.conditions
    )


def test_numbers_are_written_with_their_unit(tmp_path: Path) -> None:
    found = only(judged(tmp_path, YES)).found
    assert found is not None
    assert format_mean(found, share=True, signed=True) == "+15.00 points"
    assert format_mean(found, share=False) == "0.15"
    assert count_in_words(found, "top1") == "3 seeds, all alike"


def test_a_number_made_of_two_is_not_called_missing(tmp_path: Path) -> None:
    """Where one side is not measured yet, the other has what the test is about."""
    text = f'statistic = "ratio"\nmeasure = "macs_per_second"\n{AB}\nabove = 0.1'
    assert only(judged(tmp_path, text, without=lambda cell: cell.labels["kind"] == "B")).sentence == NOT_YET


def test_the_best_is_not_compared_with_itself(tmp_path: Path) -> None:
    text = (
        'statistic = "difference"\na = { kind = "A", size = "best" }\nb = { kind = "A", size = "last" }\nabove = -1.0'
    )
    found = judged(tmp_path, text)
    assert found.verdict == UNKNOWN and "compared with itself" in only(found).sentence


def test_what_cannot_be_compared_still_names_its_records(tmp_path: Path) -> None:
    found = judged(tmp_path, f'statistic = "ratio"\n{AB}\nabove = 1.0', level=lambda _: 0.0)
    assert found.verdict == UNKNOWN and len(found.records) == 18
