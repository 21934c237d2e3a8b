"""A Noisy Student that is stopped in any way ends, after `--resume`, with every file of one that was never stopped.

SIGKILL in teacher training, labelling and student training, and before a sample of all disk operations; with VITLAB_SOAK=1
before every one of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_noisy_student import INSIDE

HERE = Path(__file__).parent
SAMPLE = 0 if os.environ.get("VITLAB_SOAK") == "1" else 3
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, run: Run) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("noisy")
    return json.loads(run([sys.executable, HERE / "killed_noisy_student.py", place, str(SAMPLE)], cwd=place).stdout)


def require_same(end: dict[str, Any], whole: dict[str, Any], where: str) -> None:
    assert end["again"] == 0, (where, end["left"]["said"])
    assert end["left"]["said"] == whole["said"], where
    files, wanted = end["left"]["files"], whole["files"]
    assert sorted(files) == sorted(wanted), where
    assert [name for name in wanted if files[name] != wanted[name]] == [], where


def test_sigkill_anywhere_costs_nothing(found: dict[str, Any]) -> None:
    assert found["whole"] == 0
    assert {
        "generation-0/bundle/model.safetensors",
        "generation-1/bundle/model.safetensors",
        "pseudo_labels-1.npz",
    } <= set(found["left"]["files"])
    assert set(INSIDE.values()) <= set(found["kills"]) <= set(found["points"])
    for point, end in found["kills"].items():
        assert end["died"] == -9, point
        require_same(end, found["left"], point)


def test_sigterm_says_how_to_resume(found: dict[str, Any]) -> None:
    assert set(found["signals"]) == {"labelling", "student training"}
    for name, end in found["signals"].items():
        assert end["code"] == 143, (name, end["reported"])
        assert end["reported"].endswith("Resume with:  vitlab noisy-student --resume out\n"), end["reported"]
        require_same(end, found["left"], name)
    assert "Saved at step 4." in found["signals"]["student training"]["reported"]
