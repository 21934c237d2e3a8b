"""The time that is left goes by the steps behind the first one of a process, which compiles and starts workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.core import fsio
from vitlab.core.console import Console, seconds_left
from vitlab.runs.recipe import Recipe

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]


def test_nothing_done_tells_no_pace() -> None:
    assert seconds_left(0.0, done=0, total=14) == "?"
    assert seconds_left(0.0, done=0, total=0) == "0:00"


def test_log_of_a_resumed_run_begins_without_a_guess(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    class Crash(BaseException):
        pass

    def crash(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "metrics.jsonl" and path.exists() and len(path.read_text().splitlines()) == 5:
            raise Crash

    with pytest.raises(Crash), fsio.intercept(crash):
        run(tiny(), tmp_path / "run")
    console = Console(quiet=True)
    run(tiny(), tmp_path / "run", resume=True, console=console)
    left = [line.partition("left ")[2] for line in console.lines if line.startswith("training")]
    assert left[0] == "?"
    assert "?" not in left[1:]
