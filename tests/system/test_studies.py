"""Studies with workers in processes of their own: killed, stopped, silent, failing. No run is done twice, and none is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_work import in_child

from vitlab.studies.cell_records import read_cells
from vitlab.studies.grid import StudyRun, list_runs
from vitlab.studies.study_file import read_study
from vitlab.studies.study_run import run_study

VITLAB = str(Path(sys.executable).with_name("vitlab"))
Run = Callable[..., subprocess.CompletedProcess[str]]
HEAD = """
title = "Tiny"
question = "Does it?"
paper = "Figure 0"
drawings = [{ x = "kind" }]
[scales.laptop]
about = "Nothing."
"""
BODY = '"data.image_size" = [8, 8], "train.batch_size" = 8, "train.steps" = 2'
MODEL = '"model.name" = "ViT-w8d1m8h1/4"'
LONG = 300  # steps of a run that is not done when the first ones are
CHAIN = f"""
seeds = [0]
[scales.laptop.stages.first]
recipe = "study-laptop-vit"
set = {{ {MODEL}, {BODY} }}
[scales.laptop.stages.second]
recipe = "study-laptop-vit"
set = {{ {BODY} }}
[scales.laptop.axes.kind]
A = {{}}
B = {{ second = {{ "optim.lr" = 1e-4, "train.steps" = {LONG} }} }}
few = {{ second = {{ init = "scratch", {MODEL}, "data.train_images" = 100 }} }}
"""
MANY = """
seeds = [0, 1, 2, 3]
[scales.laptop.stages.first]
recipe = "study-laptop-vit"
[scales.laptop.stages.second]
recipe = "study-laptop-vit"
[scales.laptop.axes.kind]
A = {}
B = { second = { "optim.lr" = 1e-4 } }
C = { first = { "optim.lr" = 1e-4 } }
D = { first = { "optim.lr" = 1e-5 } }
"""


def study(folder: Path, text: str, name: str = "tiny") -> tuple[Path, list[StudyRun]]:
    path = folder / f"{name}.toml"
    path.write_text(HEAD + text)
    found = read_study(str(path))
    return path, list_runs([(found, found.at("laptop"))])


def acted(folder: Path, path: Path, kind: str) -> dict[str, Any]:
    (folder / "out").mkdir()

    def work() -> dict[str, Any]:
        sys.argv = ["killed_studies", str(folder / "out"), str(path), kind]
        from killed_studies import act

        return act()

    return in_child(work, folder)


def test_workers_killed_at_random_repeat_nothing_and_lose_nothing(tmp_path: Path) -> None:
    path, runs = study(tmp_path, MANY)
    found = acted(tmp_path, path, "killed")
    log, keys = found["log"], {one.key for one in runs}
    assert set(found["codes"]) == {0} and len(keys) == 28
    assert set(read_cells(tmp_path / "out")) == keys
    published = [row for row in log if row["what"] == "published"]
    assert all(row["kept"] for row in published), "nobody published what another had published"
    assert max(Counter(row["key"] for row in published).values()) == 1
    assert not any(row["repeated"] for row in log if row["what"] == "begin"), "what has a record is not begun again"
    at_work: dict[str, int] = {}
    for row in log:
        if row["what"] == "begin":
            assert row["key"] not in at_work, "two at one run"
            at_work[row["key"]] = row["pid"]
        elif row["what"] == "end":
            assert at_work.pop(row["key"]) == row["pid"]
        elif row["what"] == "kill":
            at_work = {key: pid for key, pid in at_work.items() if pid != row["killed"]}
    begun = Counter(row["key"] for row in log if row["what"] == "begin")
    kills = next(row["count"] for row in log if row["what"] == "kills")
    assert kills >= 5 and sum(begun.values()) > len(keys), "some were killed in the middle"
    print(f"{kills} workers killed, {sum(begun.values())} beginnings of {len(keys)} runs")


def test_silent_worker_is_taken_over_in_time_and_both_end_with_one_record(tmp_path: Path) -> None:
    path, runs = study(tmp_path, MANY.replace("[0, 1, 2, 3]", "[0]").split("B = ", maxsplit=1)[0])
    found = acted(tmp_path, path, "silent")
    log, (first, second) = found["log"], runs
    assert found["codes"] == [0, 0]
    begun = [row for row in log if row["what"] == "begin"]
    stop = next(row for row in log if row["what"] == "stop")
    assert [row["key"] for row in begun[:2]] == [first.key, first.key]
    assert begun[1]["time"] - stop["time"] + stop["silent"] > 0.9, "not before it was silent for a second"
    assert (begun[0]["place"], begun[1]["place"]) == (first.key, f"{first.key}-2")
    kept = [row["kept"] for row in log if row["what"] == "published" and row["key"] == first.key]
    assert sorted(kept) == [False, True], "both finished it, and one record stays"
    assert [row["key"] for row in begun[2:]] == [second.key]
    assert set(read_cells(tmp_path / "out")) == {first.key, second.key}


# --- real runs --------------------------------------------------------------------------------------------------------


def workers_in(folder: Path) -> list[int]:
    """The processes of this machine that work in a folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"vitlab.studies.worker" in words and str(folder).encode() in words:
                found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def left_by(out: Path, keys: set[str]) -> dict[str, tuple[int, int]]:
    """Files of finished runs and their records, with their times: a run that is done again writes them anew."""
    paths = [path for path in out.rglob("*") if path.is_file() and {path.stem, *path.parts} & keys]
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths if "checkpoints" not in path.parts
    }


def done(out: Path) -> set[str]:
    return {path.stem for path in (out / "records" / "cells").glob("*.json")}


def steps(out: Path, key: str) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "runs" / key / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_stopped_study_says_how_to_resume_and_repeats_nothing(tmp_path: Path) -> None:
    """SIGTERM to the command, then SIGKILL to its workers; what each left is gone on with."""
    path, runs = study(tmp_path, CHAIN)
    out, keys = tmp_path / "out", {one.key for one in runs}
    assert len(keys) == 4
    command = [
        VITLAB,
        "study",
        "run",
        str(path),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--workers",
        "2",
    ]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(done(out)) >= 1 or first.poll() is not None)
    first.send_signal(signal.SIGTERM)
    stdout, stderr = first.communicate(timeout=120)
    assert (first.returncode, stdout) == (143, ""), stderr
    assert workers_in(out) == []
    assert re.search(r"[0-3] of 4 runs are done\.", stderr)
    again = re.search(r"Resume with:  (vitlab study run .*)", stderr)
    assert again and "Traceback" not in stderr
    assert sorted(again[1].split()) == sorted(["vitlab", *command[1:]])
    assert list((out / "leases").iterdir()) == [], "who is asked to end gives back what it holds"
    before = done(out)
    assert 1 <= len(before) < 4
    kept = left_by(out, before)

    second = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: bool(workers_in(out)) or second.poll() is not None)
    time.sleep(0.5)
    for pid in workers_in(out):
        os.kill(pid, signal.SIGKILL)
    stdout, stderr = second.communicate(timeout=240)
    assert second.returncode == 0, stderr
    assert f"4 runs, {len(before)} done before" in stdout and workers_in(out) == []
    assert done(out) == keys and left_by(out, before) == kept, "what was finished was not touched"
    long = next(one.key for one in runs if one.stage.set.get("train.steps") == LONG)
    assert all(steps(out, key) == list(range(1, LONG + 1 if key == long else 3)) for key in keys)
    records = read_cells(out)
    few = next(one for one in runs if one.stage.init == "scratch")
    assert records[few.key].numbers["train_images"] == 100, "data.train_images is what is trained on"
    assert (out / "tiny-laptop" / "report.html").is_file()

    third = run_study(str(path), out=out, device="cpu", quiet=True)
    assert (third.runs, third.done_before, third.failed) == (4, 4, {})
    assert read_cells(out) == records


@pytest.mark.slow
def test_failing_cells_are_reported_and_the_others_finished_and_shared(tmp_path: Path, run: Run) -> None:
    scratch = f'[scales.laptop.stages.train]\nrecipe = "study-laptop-vit"\nset = {{ {MODEL}, {BODY} }}\n'
    well = f"seeds = [0]\n{scratch}[scales.laptop.axes.kind]\nwell = {{}}\n"
    wrong = 'wrong = { train = { data = "photos" } }\nmissing = { train = { data = "nowhere/photos" } }\n'
    path, runs = study(tmp_path, well + wrong)
    (tmp_path / "photos").mkdir()
    options = ["--out", tmp_path / "out", "--device", "cpu", "--threads", "1", "--workers", "1"]
    printed = run([VITLAB, "study", "run", path, *options], cwd=tmp_path, code=1)
    lines = [line for line in printed.stdout.splitlines() if line.startswith("Failed: ")]
    assert len(lines) == 2 and "Traceback" not in printed.stdout + printed.stderr
    assert any("photos holds no images" in line for line in lines)
    assert any("nowhere/photos" in line for line in lines)
    (record,) = read_cells(tmp_path / "out").values()
    assert record.key == runs[0].key
    assert (
        record.flops == 6 * record.numbers["macs"] * record.numbers["images_seen"]
        and record.numbers["images_seen"] == 16
    )
    assert "2 cells have no record yet" in (tmp_path / "out" / "tiny-laptop" / "report.html").read_text()
    other, same = study(tmp_path, well.replace("well", "alone"), "other")
    assert same[0].key == runs[0].key
    shared = run_study(str(other), out=tmp_path / "out", device="cpu", quiet=True)
    assert (shared.runs, shared.done_before) == (1, 1) and shared.reports["other"].is_file()
