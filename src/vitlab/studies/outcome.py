"""What the records of a study say: a mean and interval for each condition, and whether each claim holds. Loads no torch.

From records alone, so that the same records give the same answer anywhere.
"""

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from vitlab.evaluation.fits import Estimate, Verdict, verdict
from vitlab.studies.cell_records import CellRecord
from vitlab.studies.conditions import (
    Condition,
    Measured,
    is_complete,
    number_of,
    resolve_selection,
    select,
    select_seed,
)
from vitlab.studies.grid import list_cells
from vitlab.studies.statistic import NoNumberError, estimate_numbers, find_number, require_one_machine, sides_of
from vitlab.studies.study import AxisValue, Claim, Scale, Selection, Study, Test
from vitlab.studies.units import clipped, count_in_words, format_mean, is_share, measure_label

NOT_YET = "not measured yet"
ClaimVerdict = Verdict | Literal["not measured yet"]
HOLDS, FAILS, UNKNOWN = "holds here", "does not hold here", "inconclusive at this scale"
LEAST_SEEDS = 3  # below, chance is not bounded by anything


@dataclasses.dataclass(frozen=True)
class TestOutcome:
    """The number of a test for each seed, and whether it lies where the claim says."""

    test: Test
    verdict: Verdict
    what: str  # the number in words; without one, why there is none
    seeds: int = 0  # that have every cell that is compared, whether or not these give a number
    missing: int = 0  # the other seeds of the scale: not run yet, or failed
    by_seed: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])  # the statistic
    found: Estimate | None = None
    number: str = ""  # with its interval
    in_points: bool = False  # shares of images, to be shown as points of a hundred
    records: tuple[str, ...] = ()  # the keys of what it rests on

    @property
    def sentence(self) -> str:
        if self.found is None:
            return self.what
        return f"{self.what}: {self.number}, {count_in_words(self.found, self.test.measure, self.missing)}"

    @property
    def log_scale(self) -> bool:
        """Whether half is as far from one as double."""
        return self.test.statistic.endswith("ratio")


@dataclasses.dataclass(frozen=True)
class ClaimOutcome:
    """A claim with all its tests: it holds if all do, and does not if one does not."""

    claim: Claim
    tests: tuple[TestOutcome, ...]
    verdict: ClaimVerdict
    is_begun: bool = False  # some of the cells that it compares are measured

    @property
    def verdict_in_words(self) -> str:
        """With what a reader must know before believing it."""
        return f"{self.verdict}, post hoc" if self.claim.post_hoc and self.verdict != NOT_YET else self.verdict

    @property
    def records(self) -> tuple[str, ...]:
        """The keys of what it rests on."""
        return tuple(dict.fromkeys(key for test in self.tests for key in test.records))

    @property
    def seeds(self) -> int:
        """Those that the verdict rests on: of a claim that fails, of a test that does; else of the test that has fewest."""
        failing = [test.seeds for test in self.tests if test.verdict == FAILS]
        return max(failing) if failing else min((test.seeds for test in self.tests), default=0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the records say about a study at one scale."""

    study: Study
    scale: Scale
    cells: int
    conditions: tuple[Condition, ...]
    claims: tuple[ClaimOutcome, ...]

    @property
    def measured(self) -> int:
        return sum(len(condition.seeds) for condition in self.conditions)


def find_outcome(study: Study, scale: Scale, records: Mapping[str, CellRecord]) -> Outcome:
    """Everything that the records say about one study at one scale."""
    cells = list_cells(scale)
    rows: dict[tuple[str, ...], list[Measured]] = {}
    values: dict[tuple[str, ...], Mapping[str, AxisValue]] = {}
    for cell in cells:
        name = tuple(cell.labels.values())
        values[name] = cell.values
        rows.setdefault(name, [])
        chain = [records.get(run.key) for run in cell.run.chain()]
        if None not in chain:
            *before, last = [record for record in chain if record is not None]
            rows[name].append(Measured(cell, last, tuple(before)))
    conditions = tuple(Condition(values[name], tuple(found)) for name, found in rows.items())
    claims = tuple(_judge(claim, scale, conditions) for claim in study.claims if claim.is_tested_at(scale.name))
    return Outcome(study, scale, len(cells), conditions, claims)


def _judge(claim: Claim, scale: Scale, conditions: Sequence[Condition]) -> ClaimOutcome:
    tests = tuple(_test(test, scale, conditions) for test in claim.tests if scale.name in test.scales)
    if scale.name not in claim.post_hoc_scales:
        claim = dataclasses.replace(claim, post_hoc="")
    verdicts = {test.verdict for test in tests}
    result: ClaimVerdict = NOT_YET if all(test.what == NOT_YET for test in tests) else UNKNOWN
    if FAILS in verdicts:
        result = FAILS
    elif verdicts == {HOLDS}:
        result = HOLDS
    is_begun = any(
        condition.seeds
        for test in tests
        for side in sides_of(test.test)
        for condition in select(conditions, scale, side)
    )
    return ClaimOutcome(claim, tests, result, is_begun)


def _test(test: Test, scale: Scale, conditions: Sequence[Condition]) -> TestOutcome:
    measure = test.measure or scale.measure
    a, b = (resolve_selection(side, measure, scale, conditions) for side in (test.a, test.b))
    test = dataclasses.replace(test, a=a, b=b, measure=measure)
    sides = sides_of(test)
    seeds = [seed for seed in scale.seeds if all(is_complete(conditions, scale, seed, side, measure) for side in sides)]
    used = [one for seed in seeds for side in sides for one in select_seed(conditions, scale, seed, side)]
    records = tuple(dict.fromkeys(record.key for one in used for record in one.stages))
    if not seeds:
        return TestOutcome(test, UNKNOWN, _why_unmeasured(measure, scale, conditions, sides))
    try:
        if test.compares and a == b:
            raise NoNumberError(f"both sides are {', '.join(_labels(a, scale))}: the best one is compared with itself")
        require_one_machine(test, used)
        numbers = {
            seed: find_number(test, [select_seed(conditions, scale, seed, side) for side in sides], seed)
            for seed in seeds
        }
        found, bound = estimate_numbers(test, list(numbers.values()))
    except NoNumberError as error:
        return TestOutcome(test, UNKNOWN, str(error), len(seeds), records=records)
    missing = len(scale.seeds) - len(seeds)  # those that are left may be the ones that went well
    in_points = is_share(measure) and test.statistic in ("value", "difference", "slope", "slope-difference")
    signed = test.statistic.endswith("difference") or test.statistic == "slope" or measure == "margin"
    said = clipped(found, measure) if test.statistic == "value" else found
    at = {-1: "at most ", 0: "", 1: "at least "}[bound]
    return TestOutcome(
        test,
        _verdict(test, found, bound) if not missing else UNKNOWN,
        _in_words(test, measure, scale),
        seeds=len(seeds),
        missing=missing,
        by_seed={seed: one.value for seed, one in numbers.items()},
        found=said,
        number=at + format_mean(said, share=in_points, signed=signed),
        in_points=in_points,
        records=records,
    )


def _why_unmeasured(measure: str, scale: Scale, conditions: Sequence[Condition], sides: Sequence[Selection]) -> str:
    measured = [one for seed in scale.seeds for side in sides for one in select_seed(conditions, scale, seed, side)]
    return (lacks_measure(measured[0].record, measure) if measured else "") or NOT_YET


def lacks_measure(record: CellRecord, measure: str) -> str:
    """What a record has instead of a measure, which may be misspelt; empty where it has it."""
    if number_of(record, measure) is not None or measure in ("flops", "seconds"):
        return ""
    names = sorted(name for name in record.numbers if "_layer" not in name)  # of single heads there are hundreds
    return f"its runs have no number {measure}; they have {', '.join(names)}"


def _verdict(test: Test, found: Estimate, bound: int) -> Verdict:
    """Of a bound, one end of the interval is as far as numbers go."""
    low, high = (-math.inf if test.above is None else test.above), (math.inf if test.below is None else test.below)
    if bound and found.interval is not None:
        start, end = found.interval
        found = dataclasses.replace(found, interval=(start, sys.float_info.max) if bound > 0 else (0.0, end))
    return verdict(found, low, high, least=LEAST_SEEDS)


def _in_words(test: Test, measure: str, scale: Scale) -> str:
    """`test accuracy, 1-D minus none (stem)`: what a and b have in common comes last."""
    both = {axis: label for axis, label in test.a.items() if test.b.get(axis) == label}
    a, b = (", ".join(_labels({x: y for x, y in side.items() if x not in both}, scale)) for side in (test.a, test.b))
    what = {
        "value": f"{measure_label(measure)}, {a or 'all'}",
        "difference": f"{measure_label(measure)}, {a} minus {b}",
        "ratio": f"{measure_label(measure)} of {a}, as a multiple of that of {b}",
        "slope": f"{measure_label(measure)} for each doubling of {test.along}, {a or 'all'}",
        "slope-difference": f"{measure_label(measure)} for each doubling of {test.along}, {a} minus {b}",
        "cost-ratio": f"{measure_label(test.cost)} of {b} for the same {measure_label(measure)}, as a multiple of those of {a}",
        "exponent": f"exponent of {measure_label(measure)} over {test.along}{f', {a}' if a else ''}",
        "exponent-difference": f"exponent of {measure_label(measure)} over {test.along}, {a} minus {b}",
    }[test.statistic]
    common = f" ({', '.join(_labels(both, scale))})" if both else ""
    return what + common


def _labels(selection: Selection, scale: Scale) -> list[str]:
    """Numbers with what they are of, and what has a comma in quotation marks."""
    numbers = {axis for axis in selection if all(value.x is not None for value in scale.axes[axis])}
    words = {axis: f"“{label}”" if ", " in label else label for axis, label in selection.items()}
    return [f"{word} {axis}" if axis in numbers else word for axis, word in words.items()]


def count_verdicts(verdicts: Iterable[ClaimVerdict]) -> tuple[str, str]:
    """As a number and what it is of: `19 of 30`, `claims hold here, 3 do not, 8 are inconclusive at this scale`."""
    counts = Counter(verdicts)
    parts = ["claims hold here"]
    if counts[FAILS]:
        parts.append(f"{counts[FAILS]} {'does' if counts[FAILS] == 1 else 'do'} not")
    parts += [
        f"{counts[verdict]} {'is' if counts[verdict] == 1 else 'are'} {verdict}"
        for verdict in (UNKNOWN, NOT_YET)
        if counts[verdict]
    ]
    return f"{counts[HOLDS]} of {counts.total()}", ", ".join(parts)
