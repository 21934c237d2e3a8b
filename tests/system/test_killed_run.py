"""A run that is stopped in any way and resumed leaves the bits of one that was never stopped.

Forty-five kill points by default; with VITLAB_SOAK=1 every disk operation of the run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("forked_runs.py")
HOW_MANY = 0 if os.environ.get("VITLAB_SOAK") == "1" else 45
Run = Callable[..., subprocess.CompletedProcess[str]]


def said(run: Run, place: Path, *arguments: str) -> dict[str, Any]:
    return json.loads(run([sys.executable, SCRIPT, arguments[0], place, *arguments[1:]], cwd=place).stdout)


def test_sigkill_at_any_disk_operation_costs_no_bit(tmp_path: Path, run: Run) -> None:
    found = said(run, tmp_path, "kills", str(HOW_MANY))
    assert found["whole"] == 0
    assert found["total"] >= 80
    assert len(found["kills"]) >= 40
    assert found["left"]["temporary"] == []
    began = 0
    for k, end in found["kills"].items():
        assert end["died"] == -9, k
        if end["began"]:
            began += 1
            assert (end["resumed"], end["left"]) == (0, found["left"]), k
        else:  # killed before it was a run: nothing to go on with, and that is said
            assert end["resumed"] == 1, k
            assert not {"bundle", "metrics.jsonl"} & set(end["left"]["files"] or ()), k
    assert began >= 30


def test_signal_lets_the_step_end_saves_and_leaves(tmp_path: Path, run: Run) -> None:
    found = said(run, tmp_path, "signals")
    assert found["whole"] == 0
    for name, code in (("SIGTERM", 143), ("SIGINT", 130)):
        end = found["signals"][name]
        assert (end["code"], len(end["saved"]), end["resumed"]) == (code, 1, 0), name
        assert 3 <= int(end["saved"][0].removeprefix("step-")) < 60, name
        for part in ("rows", "state", "bundle", "temporary"):
            assert end["left"][part] == found["left"][part], (name, part)


def test_every_kind_of_state_is_in_the_checkpoint(tmp_path: Path, run: Run) -> None:
    found = said(run, tmp_path, "variants")
    assert len(found) == 6
    for name, rows in found.items():
        whole = rows.pop("whole")
        assert whole["temporary"] == []
        for after, end in rows.items():
            assert (end["code"], end["left"]) == (0, whole), (name, after)
    assert len({rows["1"]["left"]["state"] for rows in found.values()}) == 6, "each variant is another run"
