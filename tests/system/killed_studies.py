"""Workers of a study that are killed, stopped and woken up.

To be imported by a child that was forked for it, whose arguments are a folder, a study, and `killed` or `silent`.

Workers are those of `python -m vitlab.studies.worker`, forked from one parent, which saves importing torch, and with short
pauses in place of training. Each notes in one file what it begins, ends and publishes.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.studies import cell_run, leases, worker
from vitlab.studies.cell_records import CellRecord, read_cell, record_path
from vitlab.studies.grid import StudyRun

KILLS = 200 if os.environ.get("VITLAB_SOAK") == "1" else 25
LONGEST = 120.0  # seconds for all of it
GONE = 1.0
PLACE, STUDY, KIND = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


def note(what: str, key: str = "", **more: Any) -> None:
    row = {"what": what, "key": key, "pid": os.getpid(), "time": time.monotonic(), **more}
    with (PLACE / "log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def execute(run: StudyRun, place: Path, start: Path | None, **_: Any) -> CellRecord:
    note("begin", run.key, repeated=record_path(PLACE, run.key).exists(), place=place.name)
    assert start is None or (start / "bundle").is_dir(), "the run before it is not finished"
    fsio.make_folder(place)
    time.sleep(random.uniform(0.05, 0.2) if KIND == "killed" else 2 * GONE)
    fsio.make_folder(place / "bundle")
    note("end", run.key)
    return CellRecord(
        **{"key": run.key, "verb": "train", "model": "m", "data": "d", "seed": run.seed, "numbers": {"top1": 0.5}},
        **{"flops": 1.0, "seconds": random.random(), "workers": 2, "command": "c", "hardware": {}, "versions": {}},
        date=str(os.getpid()),
    )


def publish(folder: Path, record: CellRecord) -> Path:
    path = write_cell(folder, record)
    note("published", record.key, kept=read_cell(path) == record)
    return path


write_cell = worker.write_cell


def forked(host: str | None = None) -> int:
    """A worker; with a host, one that says it is there."""
    if pid := os.fork():
        return pid
    code = os.EX_SOFTWARE
    try:
        random.seed(os.getpid())
        leases._TOKEN = f"{os.getpid():x}"  # drawn anew in a process that is not forked
        if host is not None:
            leases.platform.node = lambda: host
        cell_run.execute_run, worker.write_cell, worker._PAUSE_S = execute, publish, 0.02
        sys.argv = ["worker", str(PLACE), "--study", f"{STUDY}:laptop", "--heartbeat", "0.05", "--lease-timeout"]
        sys.argv.append("60" if KIND == "killed" else str(GONE))
        code = worker.main()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed() -> list[int]:
    """Two at work at all times, one of which is killed again and again; at last both may finish."""
    random.seed(0)
    pids, kills = [forked(), forked()], 0
    while kills < KILLS:
        time.sleep(random.uniform(0.0, 0.2))
        chosen = random.randrange(2)
        if os.waitpid(pids[chosen], os.WNOHANG)[0]:
            break  # nothing was left to do
        os.kill(pids[chosen], signal.SIGSTOP)  # so that it notes nothing more once its end is noted
        if not os.WIFSTOPPED(os.waitpid(pids[chosen], os.WUNTRACED)[1]):
            break
        note("kill", killed=pids[chosen])
        os.kill(pids[chosen], signal.SIGKILL)
        ended(pids[chosen])
        kills += 1
        pids[chosen] = forked()
    codes = [ended(pid) for pid in {*pids, forked()} if exists(pid)]
    note("kills", count=kills)
    return codes


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def silent() -> list[int]:
    """The first works elsewhere and falls silent in the middle of a run; the second waits, and takes over."""
    first = forked("elsewhere")
    wait_for(lambda rows: any(row["what"] == "begin" for row in rows))
    second = forked()
    time.sleep(1.5 * GONE)  # longer than a silence may last: but it is not silent
    key = next(row["key"] for row in rows() if row["pid"] == first)
    os.kill(first, signal.SIGSTOP)
    os.waitpid(first, os.WUNTRACED)
    beat = (PLACE / leases.LEASES / f"{key}.1").stat().st_mtime
    note("stop", stopped=first, silent=time.time() - beat)  # a busy machine lets it wait for a while between beats
    wait_for(lambda rows: any(row["what"] == "begin" and (row["key"], row["pid"]) == (key, second) for row in rows))
    note("wake", woken=first)
    os.kill(first, signal.SIGCONT)
    return [ended(first), ended(second)]


def rows() -> list[dict[str, Any]]:
    path = PLACE / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not condition(rows()):
        assert time.monotonic() < end
        time.sleep(0.02)


def act() -> dict[str, Any]:
    """How they ended, and what each of them did."""
    codes = killed() if KIND == "killed" else silent()
    return {"codes": codes, "log": rows()}
