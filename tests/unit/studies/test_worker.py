"""A worker: does each run once, in order, whatever the others do; and says in a sentence why one failed."""

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from study_records import HEAD, measured, record_of, tiny_study

from vitlab.core.errors import FileProblem, UsageError
from vitlab.studies import cell_run
from vitlab.studies import leases as leases_module
from vitlab.studies import worker as worker_module
from vitlab.studies.cell_records import CellRecord, read_cells, write_cell
from vitlab.studies.cell_run import forget_checkpoints, thinned_curve
from vitlab.studies.grid import StudyRun, list_runs
from vitlab.studies.leases import LEASES, Lease, Leases
from vitlab.studies.worker import FAILURES, Machine, finished, work

CHAIN = """
[scales.laptop]
about = "Two stages."
seeds = [0]
[scales.laptop.stages.first]
recipe = "study-laptop-vit"
[scales.laptop.stages.second]
recipe = "study-laptop-vit"
[scales.laptop.axes.kind]
A = {}
B = { first = { "optim.lr" = 1e-4 } }
[scales.laptop.axes.size]
"1" = { x = 1 }
"""
Execute = Callable[[StudyRun, Path, Path | None], None]


@pytest.fixture
def runs(tmp_path: Path) -> list[StudyRun]:
    study = tiny_study(tmp_path, HEAD + CHAIN)
    return list_runs([(study, study.at("laptop"))])


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """What was done, in place of real runs: key, folder, folder of the start."""
    done: list[tuple[str, str, str]] = []

    def execute(run: StudyRun, place: Path, start: Path | None, **_: Any) -> CellRecord:
        (place / "bundle").mkdir(parents=True, exist_ok=True)
        (place / "checkpoints" / "step-000000001").mkdir(parents=True, exist_ok=True)
        done.append((run.key, place.name, "" if start is None else start.name))
        return record_of(run, measured(run, 0.5))

    monkeypatch.setattr(cell_run, "execute_run", execute)
    return done


def go(folder: Path, runs: list[StudyRun], **options: float) -> dict[str, str]:
    return work(folder, runs, Leases(folder / LEASES, **options), Machine("cpu", threads=1))


def test_every_run_once_and_after_its_start(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]]
) -> None:
    assert go(tmp_path, runs) == {}
    assert sorted(key for key, _, _ in executed) == sorted(run.key for run in runs)
    assert {start for key, _, start in executed} == {"", *(run.start.key for run in runs if run.start is not None)}
    assert set(finished(tmp_path, runs)) == {run.key for run in runs}
    assert list((tmp_path / LEASES).iterdir()) == []
    before = list(executed)
    assert go(tmp_path, runs) == {} and executed == before, "nothing is left to do"
    assert not list(tmp_path.rglob("step-*")), "checkpoints of hundreds of runs would fill a disk"
    (tmp_path / "records" / "cells" / f"{runs[0].key}.json").unlink()
    go(tmp_path, runs)
    assert [key for key, _, _ in executed[len(before) :]] == [runs[0].key]


def test_failure_is_a_sentence_and_stops_what_starts_from_it_alone(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    well, wrong = cell_run.execute_run, runs[0]
    assert [run.start is wrong for run in runs] == [False, True, False, False]

    def execute(run: StudyRun, place: Path, start: Path | None, **options: Any) -> CellRecord:
        if run is wrong:
            raise UsageError("unknown config key 'x'", hint="Leave it out.")
        if run is runs[2]:
            raise ValueError("of a kind that nobody foresaw")
        return well(run, place, start, **options)

    monkeypatch.setattr(cell_run, "execute_run", execute)
    failed = go(tmp_path, runs)
    assert failed == {
        wrong.key: "unknown config key 'x'\nLeave it out.",
        runs[2].key: "unexpected ValueError: of a kind that nobody foresaw",
    }
    assert executed == []
    text = (tmp_path / FAILURES / f"{wrong.key}.txt").read_text()
    assert text.startswith("unknown config key 'x'\n") and "Traceback" in text
    monkeypatch.setattr(cell_run, "execute_run", well)
    assert go(tmp_path, runs) == {} and len(executed) == 4, "what failed is tried again by the next"
    assert not list((tmp_path / FAILURES).iterdir()), "and is then no failure any more"


def test_a_start_whose_weights_are_gone_is_run_again_for_what_needs_it(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]]
) -> None:
    """As where the records alone were brought to another machine."""
    go(tmp_path, runs)
    first, second, *_ = runs
    assert second.start is first
    (tmp_path / "records" / "cells" / f"{second.key}.json").unlink()
    shutil.rmtree(tmp_path / "runs")
    before = len(executed)
    assert go(tmp_path, runs) == {}
    assert [key for key, _, _ in executed[before:]] == [first.key, second.key]


def test_runs_that_kill_their_workers_fail_and_the_others_go_on(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model too large for the memory is several runs, one for each seed. A worker that is killed leaves its lease behind."""
    killers, well, kills = {runs[0].key, runs[2].key}, cell_run.execute_run, list[str]()

    class Killed(BaseException):
        pass

    def execute(run: StudyRun, place: Path, start: Path | None, **options: Any) -> CellRecord:
        if run.key in killers:
            kills.append(run.key)
            (lease,) = (tmp_path / LEASES).glob(f"{run.key}.*")
            dead = {**json.loads(lease.read_text()), "pid": 2**22 + 1, "started": 1, "token": "theirs"}
            after = {lease: json.dumps(dead)}
            raise Killed(after)
        return well(run, place, start, **options)

    monkeypatch.setattr(cell_run, "execute_run", execute)

    def call(name: str) -> dict[str, str]:
        for _ in range(20):
            try:
                return work(tmp_path, runs, Leases(tmp_path / LEASES, call=name), Machine("cpu", threads=1))
            except Killed as killed:
                for lease, text in killed.args[0].items():
                    lease.write_text(text)  # the process is gone, and its file is as it was
        raise AssertionError("workers die without end")

    failed = call("one")
    assert set(failed) == killers and all("3 workers were killed at it" in why for why in failed.values())
    assert sorted(kills) == sorted([*killers] * 3), "no more than three for each"
    healthy = {run.key for run in runs if not killers & {one.key for one in run.chain()}}
    assert {key for key, _, _ in executed} == healthy
    monkeypatch.setattr(cell_run, "execute_run", well)
    assert call("the next") == {} and set(finished(tmp_path, runs)) == {run.key for run in runs}


def test_a_record_that_cannot_be_written_is_a_failure_of_its_run_alone(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(folder: Path, record: CellRecord) -> Path:
        if record.key == runs[2].key:
            raise FileProblem("no space left on device")
        return write_cell(folder, record)

    monkeypatch.setattr(worker_module, "write_cell", full)
    assert go(tmp_path, runs)[runs[2].key] == "no space left on device"
    assert list((tmp_path / "runs" / runs[2].key).rglob("step-*")), "what was trained is not trained again"
    assert {run.key for run in runs} - set(finished(tmp_path, runs)) == {
        run.key for run in runs if runs[2] in run.chain()
    }
    assert executed


def test_two_workers_share_the_runs(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = cell_run.execute_run

    def execute(*arguments: Any, **options: Any) -> CellRecord:
        time.sleep(0.05)
        return quick(*arguments, **options)

    monkeypatch.setattr(cell_run, "execute_run", execute)
    both = [threading.Thread(target=go, args=(tmp_path, runs)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(key for key, _, _ in executed) == sorted(run.key for run in runs)


def test_run_that_another_finished_between_the_look_and_the_lease_is_not_run_again(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]]
) -> None:
    last = runs[1]

    class Slow(Leases):
        def acquire(self, key: str) -> AbstractContextManager[Lease | None]:
            if key == last.key:
                write_cell(tmp_path, record_of(last, measured(last, 0.5)))
            return super().acquire(key)

    assert work(tmp_path, runs, Slow(tmp_path / LEASES), Machine("cpu", threads=1)) == {}
    assert sorted(key for key, _, _ in executed) == sorted(run.key for run in runs if run is not last)


def test_silent_worker_elsewhere_is_followed_in_a_folder_of_its_own_and_its_record_is_dropped(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]]
) -> None:
    """And the weights that the next stage starts from are those of the attempt that was finished."""
    first = runs[0]
    (tmp_path / LEASES).mkdir()
    path = tmp_path / LEASES / f"{first.key}.1"
    owner = {**json.loads(leases_module._text(Lease(path, 1), 3)), "host": "elsewhere", "token": "theirs"}
    path.write_text(json.dumps(owner))
    (tmp_path / "runs" / first.key).mkdir(parents=True)  # half a run, which it may be writing still
    began = time.monotonic()
    assert go(tmp_path, runs, timeout_s=1.0) == {}
    assert time.monotonic() - began > 1
    places = {key: (place, start) for key, place, start in executed}
    assert places[first.key] == (f"{first.key}-2", "")
    assert places[runs[1].key] == (runs[1].key, f"{first.key}-2")
    assert executed[-1][0] == runs[1].key, "the others were done meanwhile"
    kept = read_cells(tmp_path)[first.key]
    write_cell(tmp_path, dataclasses.replace(kept, numbers={"top1": 0.9}))  # it woke up, and was done too
    assert read_cells(tmp_path)[first.key] == kept


def test_worker_that_wakes_up_goes_on_with_the_next(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = cell_run.execute_run

    def execute(run: StudyRun, *arguments: Any, **options: Any) -> CellRecord:
        if run is runs[0]:  # taken over meanwhile, and finished by the other
            (tmp_path / LEASES / f"{run.key}.1").unlink()
            write_cell(tmp_path, record_of(run, {"top1": 0.1}))
        return quick(run, *arguments, **options)

    monkeypatch.setattr(cell_run, "execute_run", execute)
    assert go(tmp_path, runs) == {}
    assert sorted(key for key, _, _ in executed) == sorted(run.key for run in runs)
    assert read_cells(tmp_path)[runs[0].key].numbers == {"top1": 0.1}, "the first record stays"


def test_record_counts_the_runs_of_other_calls_on_this_machine(
    tmp_path: Path, runs: list[StudyRun], executed: list[tuple[str, str, str]]
) -> None:
    others = Leases(tmp_path / LEASES)
    with others.acquire("another"), others.acquire("a-third") as third:
        assert third is not None and others.count_here() == 2
        text = json.loads(third.path.read_text())
        third.path.write_text(json.dumps({**text, "host": "elsewhere"}))
        assert others.count_here() == 1
        assert go(tmp_path, runs) == {} and executed
    assert {record.workers for record in read_cells(tmp_path).values()} == {2}
    assert others.count_here() == 0


# --- what goes into a record ------------------------------------------------------------------------------------------


def test_plain_numbers_of_a_test_are_kept(tmp_path: Path) -> None:
    assert cell_run.tested({"top1": 0.5, "n": 3, "per_class": {"a": 1}, "name": "x"}) == {"top1": 0.5, "n": 3.0}
    assert cell_run.tested({"knn": {"top1": 0.25, "n": 3}}) == {"knn": 0.25}


def test_curve_is_thinned_to_means() -> None:
    assert thinned_curve([]) == ()
    assert thinned_curve([(1, 2.0), (2, 1.0)]) == ((1.0, 2.0), (2.0, 1.0))
    thin = thinned_curve([(step, float(step)) for step in range(1, 601)])
    assert len(thin) == 60 and thin[0] == (10.0, 5.5) and thin[-1] == (600.0, 595.5)
    assert len(thinned_curve([(step, 0.0) for step in range(61)])) <= 60


def test_checkpoints_of_a_finished_run_go(tmp_path: Path) -> None:
    for place in (tmp_path / "checkpoints" / "step-1", tmp_path / "student" / "checkpoints" / "step-2"):
        place.mkdir(parents=True)
        (place / "model").write_text("x")
    (tmp_path / "bundle").mkdir()
    forget_checkpoints(tmp_path)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == ["bundle", "checkpoints", "student", "student/checkpoints"]
    forget_checkpoints(tmp_path / "nowhere")
