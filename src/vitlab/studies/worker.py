"""A worker of a study: takes one run after the other until none is left. `python -m vitlab.studies.worker` starts one.

Several may work in one folder, on one machine or on many: leases decide who does what, and a record says that it is done.
"""

import argparse
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import VitlabError
from vitlab.core.signals import Stopped
from vitlab.studies.cell_records import CellRecord, read_cell, record_path, write_cell
from vitlab.studies.grid import StudyRun, list_runs
from vitlab.studies.leases import HEARTBEAT_S, LEASE_TIMEOUT_S, LEASES, MOST_BEGINNINGS, LeaseLost, Leases
from vitlab.studies.study import Scale, Study, first_seeds
from vitlab.studies.study_file import read_study

RUNS, FAILURES = "runs", "failures"
BUNDLE = "bundle"  # of a training run: its weights
_PAUSE_S = 0.5  # between looks, where others have all that is left


class Machine(NamedTuple):
    """What a worker computes on."""

    device: str
    threads: int | None = None
    timed_threads: int | None = None  # of what is timed
    workers: int = 1  # of the same call, on this device


def work(folder: Path, runs: Sequence[StudyRun], leases: Leases, machine: Machine) -> dict[str, str]:
    """Do what is left, also what others leave behind; returns why runs failed, by key. What failed is tried once by each."""
    failed: dict[str, str] = {}
    while todo := [run for run in _left(folder, runs) if not _is_blocked(run, failed)]:
        for run in todo:
            start = None if run.start is None else done_place(folder, run.start)
            if run.start is not None and start is None:
                continue
            try:
                with leases.acquire(run.key) as lease:
                    if lease is None or run.key not in {one.key for one in _left(folder, runs)}:  # done a moment ago
                        continue
                    if lease.kills:
                        killed = VitlabError(
                            f"{MOST_BEGINNINGS} workers were killed at it: out of memory?",
                            hint="Fewer at once need less of it: --workers 1.",
                        )
                        failed[run.key] = _explain(folder, run, killed)
                        continue
                    place = run_place(folder, run, lease.attempt)
                    reason = _do(folder, run, place, start, leases, machine)
                    if reason is not None:
                        failed[run.key] = reason
            except LeaseLost:  # who has it now brings it to its end, if this one did not
                continue
            break
        else:
            time.sleep(_PAUSE_S)
    return failed


def _left(folder: Path, runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Runs without a record; and those whose weights others need, where the records alone were brought here."""
    left = {run.key for run in runs if not record_path(folder, run.key).exists()}
    for run in reversed(runs):  # what others start from stands before them
        if run.key in left and run.start is not None and done_place(folder, run.start) is None:
            left.add(run.start.key)
    return [run for run in runs if run.key in left]


def _do(
    folder: Path,
    run: StudyRun,
    place: Path,
    start: Path | None,
    leases: Leases,
    machine: Machine,
) -> str | None:
    """Do one run and publish its record; returns why it failed."""
    from vitlab.studies.cell_run import execute_run, forget_checkpoints  # loads torch

    beside = leases.count_here()
    try:
        threads = machine.timed_threads if run.stage.verb == "speed" else machine.threads
        record = execute_run(run, place, start, device=machine.device, threads=threads, workers=machine.workers)
        shared = max(record.workers, beside, leases.count_here())  # also with those of another call
        write_cell(folder, dataclasses.replace(record, workers=shared))
    except Exception as error:
        return _explain(folder, run, error)
    fsio.remove_file(folder / FAILURES / f"{run.key}.txt")  # of an earlier try
    forget_checkpoints(place)  # not before there is a record: what cannot be written need not be trained again
    return None


def run_place(folder: Path, run: StudyRun, attempt: int = 1) -> Path:
    """The folder of a run. A second try beside a silent worker has one of its own: it may still be writing."""
    return folder / RUNS / (run.key if attempt == 1 else f"{run.key}-{attempt}")


def done_place(folder: Path, run: StudyRun) -> Path | None:
    """Where the weights of a finished run lie; None where it is not finished, or they are gone."""
    places = [run_place(folder, run), *sorted((folder / RUNS).glob(f"{run.key}-*"))]
    whole = (place for place in places if (place / BUNDLE).is_dir())
    return next(whole, None) if record_path(folder, run.key).exists() else None


def _is_blocked(run: StudyRun, failed: dict[str, str]) -> bool:
    """Whether it, or what it starts from, has failed here."""
    return any(one.key in failed for one in run.chain())


def _explain(folder: Path, run: StudyRun, error: Exception) -> str:
    """A sentence for people, and all that is known in a file."""
    reason = str(error) if isinstance(error, VitlabError) else f"unexpected {type(error).__name__}: {error}"
    fsio.make_folder(folder / FAILURES)
    fsio.write_file(folder / FAILURES / f"{run.key}.txt", f"{reason}\n\n{traceback.format_exc()}")
    return reason


def finished(folder: Path, runs: Sequence[StudyRun]) -> dict[str, CellRecord]:
    """The records that there are, by key."""
    paths = {run.key: record_path(folder, run.key) for run in runs}
    return {key: read_cell(path) for key, path in paths.items() if path.exists()}


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise Stopped(number)


def _end_with(parent: int) -> None:
    """Stop, as on SIGTERM, when whoever started this worker is gone: a closed terminal leaves no work behind."""
    while os.getppid() == parent:
        time.sleep(_PAUSE_S)
    signal.raise_signal(signal.SIGTERM)


def _chosen(name: str, seeds: int | None) -> tuple[Study, Scale]:
    """`positions:laptop`, with the first seeds alone where a number is given."""
    study, _, scale = name.rpartition(":")
    found = read_study(study)
    return found, first_seeds(found.at(scale), seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--study", action="append", required=True, help="NAME:SCALE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--timed-threads", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--parent", type=int, help="End when this process is gone.")
    parser.add_argument("--call", default="", help="What the workers of one call know each other by.")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT_S)
    parser.add_argument("--lease-timeout", type=float, default=LEASE_TIMEOUT_S)
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    if given.parent is not None:
        threading.Thread(target=_end_with, args=(given.parent,), daemon=True).start()
    studies = [_chosen(one, given.seeds) for one in given.study]
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "") if given.device == "cuda" else ""
    leases = Leases(given.folder / LEASES, given.heartbeat, given.lease_timeout, given.call, gpu)
    try:
        machine = Machine(given.device, given.threads, given.timed_threads, given.workers)
        failed = work(given.folder, list_runs(studies), leases, machine)
    except Stopped as stopped:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        leases.release_all()
        return stopped.exit_code
    except VitlabError as error:
        Console(quiet=False).say(f"vitlab: {error}")
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # while Python shuts down, nobody would catch ours
            signal.signal(number, signal.SIG_DFL)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
