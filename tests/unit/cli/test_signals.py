"""A real demo, stopped by a real signal in the middle of its training."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked_command import Command
from slow_cases import slow_after

from vitlab.core.errors import FileProblem
from vitlab.engines.classifier import load
from vitlab.training import checkpoint


@dataclasses.dataclass(frozen=True)
class Stopped:
    code: int | None
    out: str
    err: str
    folder: Path


# A few images are drawn quickly, and a small model soon reports, after a tenth of its steps; the others are enough to be
# stopped in their midst.
FRACTALS = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
BODIES = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
STEPS = ("pretrain.train.steps=600", "pretrain.train.batch_size=8")
SOON_AT_WORK = [word for key in (FRACTALS, *BODIES, *STEPS) for word in ("--set", key)]


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SAID = {signal.SIGINT: "vitlab: stopped", signal.SIGTERM: "vitlab: stopped by SIGTERM"}


@pytest.fixture(scope="module", params=slow_after(1, CODES))
def number(request: pytest.FixtureRequest) -> signal.Signals:
    return request.param


@pytest.fixture(scope="module")
def stopped(number: signal.Signals, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A demo that gets its signal when it reports its first progress."""
    folder = tmp_path_factory.mktemp("stopped")
    process = Command(["demo", "--threads", "1", "--json", "--out", str(folder / "demo"), *SOON_AT_WORK], folder)
    try:
        seen = ""
        while "\ntraining  " not in seen:
            line = process.stderr.readline()
            assert line, f"the demo ended before its training: {seen}"
            seen += line
        process.send_signal(number)
        code, out, rest = process.end()
    finally:
        process.kill()
    return Stopped(code, out, seen + rest, folder)


def test_signal_exits_with_its_code_and_without_a_traceback(stopped: Stopped, number: signal.Signals) -> None:
    assert stopped.code == CODES[number]
    assert stopped.out == ""
    assert "Traceback" not in stopped.err


def test_signal_is_reported(stopped: Stopped, number: signal.Signals) -> None:
    last = stopped.err.splitlines()[-1]
    assert re.match(rf"{SAID[number]}\. Saved at step \d+\. Resume with:  vitlab train --resume .*demo/pretrain$", last)


def test_nothing_half_written_counts_as_a_bundle(stopped: Stopped) -> None:
    folder = stopped.folder
    assert (folder / "demo" / "pretrain" / "config.toml").exists(), "it was really at work"
    assert list(folder.rglob("bundle")) == []
    assert list(folder.rglob("*.tmp")) == []
    for place in ("demo", "demo/pretrain"):
        with pytest.raises(FileProblem):
            load(folder / place)


def test_what_training_had_reached_is_saved(stopped: Stopped) -> None:
    printed = re.search(r"Saved at step (\d+)", stopped.err)
    assert printed is not None
    path = stopped.folder / "demo" / "pretrain" / "checkpoints" / f"step-{int(printed[1]):09d}"
    assert checkpoint.restore(path).step == int(printed[1])


def test_interrupt_while_libraries_are_imported_leaves_no_traceback(tmp_path: Path) -> None:
    """A library that takes its time stands in for a cold disk."""
    (tmp_path / "typer.py").write_text("import time; print('importing', flush=True); time.sleep(100)")
    # Below a shell's background job or nohup, SIGINT is ignored, and children inherit that.
    listen = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    with subprocess.Popen(
        [sys.executable, "-c", f"{listen} runpy.run_module('vitlab', run_name='__main__')", "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
        finally:
            process.kill()
    assert process.returncode == 130
