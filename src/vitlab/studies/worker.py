"""A worker of a study: takes one run after the other until none is left. `python -m vitlab.studies.worker` starts one.

Several may work in one folder, on one machine or on many: leases decide who does what, and a record says that it is done.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vitlab.core import fsio
from vitlab.core.errors import VitlabError
from vitlab.core.signals import Stopped
from vitlab.studies.cell_records import CellRecord, read_cell, record_path, write_cell
from vitlab.studies.grid import StudyRun, list_runs
from vitlab.studies.leases import BEAT_S, GONE_S, LEASES, LeaseLost, Leases
from vitlab.studies.study import Scale, Study, first_seeds, read_study

RUNS, FAILURES = "runs", "failures"
_PAUSE_S = 0.5  # between looks, where others have all that is left


def work(
    folder: Path, runs: Sequence[StudyRun], leases: Leases, *, device: str, threads: int | None, workers: int
) -> dict[str, str]:
    """Do what is left, also what others leave behind; returns why runs failed, by key. What failed is tried once by each."""
    failed: dict[str, str] = {}
    while todo := [run for run in runs if not record_path(folder, run.key).exists() and not _is_blocked(run, failed)]:
        for run in todo:
            if run.start is not None and not record_path(folder, run.start.key).exists():
                continue
            try:
                with leases.take(run.key) as lease:
                    if lease is None or record_path(folder, run.key).exists():  # a moment ago
                        continue
                    place = run_place(folder, run, lease.attempt)
                    if (said := _do(folder, run, place, device=device, threads=threads, workers=workers)) is not None:
                        failed[run.key] = said
            except LeaseLost:  # who has it now brings it to its end, if this one did not
                continue
            break
        else:
            time.sleep(_PAUSE_S)
    return failed


def _do(folder: Path, run: StudyRun, place: Path, *, device: str, threads: int | None, workers: int) -> str | None:
    """Do one run and publish its record; returns why it failed."""
    from vitlab.studies.cell_run import execute_run, forget_checkpoints  # loads torch

    start = None if run.start is None else _done_place(folder, run.start)
    try:
        record = execute_run(run, place, start, device=device, threads=threads, workers=workers)
    except Exception as error:
        return _explain(folder, run, error)
    write_cell(folder, record)
    forget_checkpoints(place)
    return None


def run_place(folder: Path, run: StudyRun, attempt: int = 1) -> Path:
    """The folder of a run. A second try beside a silent worker has one of its own: it may still be writing."""
    return folder / RUNS / (run.key if attempt == 1 else f"{run.key}-{attempt}")


def _done_place(folder: Path, run: StudyRun) -> Path:
    """Where a finished run lies: the first try that has a bundle."""
    places = [run_place(folder, run), *sorted((folder / RUNS).glob(f"{run.key}-*"))]
    return next((place for place in places if (place / "bundle").is_dir()), places[0])


def _is_blocked(run: StudyRun, failed: dict[str, str]) -> bool:
    """Whether it, or what it starts from, has failed here."""
    return any(one.key in failed for one in run.chain())


def _explain(folder: Path, run: StudyRun, error: Exception) -> str:
    """A sentence for people, and all that is known in a file."""
    said = str(error) if isinstance(error, VitlabError) else f"unexpected {type(error).__name__}: {error}"
    fsio.make_folder(folder / FAILURES)
    fsio.write_file(folder / FAILURES / f"{run.key}.txt", f"{said}\n\n{traceback.format_exc()}")
    return said


def finished(folder: Path, runs: Sequence[StudyRun]) -> dict[str, CellRecord]:
    """The records that there are, by key."""
    paths = {run.key: record_path(folder, run.key) for run in runs}
    return {key: read_cell(path) for key, path in paths.items() if path.exists()}


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise Stopped(number)


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
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--beat", type=float, default=BEAT_S)
    parser.add_argument("--gone", type=float, default=GONE_S)
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    studies = [_chosen(one, given.seeds) for one in given.study]
    leases = Leases(given.folder / LEASES, given.beat, given.gone)
    try:
        failed = work(
            given.folder, list_runs(studies), leases, device=given.device, threads=given.threads, workers=given.workers
        )
    except Stopped as stopped:
        return stopped.exit_code
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
