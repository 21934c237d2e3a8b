"""A run that is stopped in any way and resumed leaves the bits of one that was never stopped.

SIGKILL before a fixed sample of the disk operations by default; with VITLAB_SOAK=1 before every one of them, and at a hundred
random moments.
"""

import os
from pathlib import Path
from typing import Any

import forked_runs
import killed_runs
import pytest
from forked_work import in_child
from slow_cases import slow_after

SOAK = os.environ.get("VITLAB_SOAK") == "1"
# How many kill points by default, of all processes together, and the fewest operations that there must be in all.
VARIANTS = {
    "alone-beside": (4, 100),
    "two-beside": (3, 100),
    "alone-waiting": (3, 100),
    "two-waiting": (3, 100),
    "two-sharded": (3, 140),
    "two-sharded-waiting": (2, 140),
    "masked": (2, 100),
    "resumed": (3, 60),
}
MOMENTS = 100 if SOAK else 3


def require_same_bits(found: dict[str, Any]) -> None:
    assert set(found["whole"]) == {0}
    assert found["left"]["temporary"] == []
    for point, end in found["kills"].items():
        assert set(end["again"]) == {0}, point
        assert end["left"] == found["left"], point


def kill(place: Path, variant: str, how_many: int) -> dict[str, Any]:
    return in_child(lambda: killed_runs.do_work(place, variant, how_many), place)


@pytest.mark.parametrize("variant", slow_after(2, VARIANTS))
def test_sigkill_at_any_disk_operation_costs_no_bit(tmp_path: Path, variant: str) -> None:
    how_many, fewest = VARIANTS[variant]
    found = kill(tmp_path, variant, 0 if SOAK else how_many)
    require_same_bits(found)
    assert found["total"] >= fewest
    assert len(found["kills"]) == found["total"] if SOAK else len(found["kills"]) >= how_many
    assert {end["died"] for end in found["kills"].values()} == {-9}
    print(
        f"{variant}: {len(found['kills'])} of {found['total']} operations were a process's last; all resumed bit by bit"
    )


def test_sigkill_at_any_moment_costs_no_bit(tmp_path: Path) -> None:
    found = kill(tmp_path, "random", MOMENTS)
    require_same_bits(found)
    ends = found["kills"].values()
    killed = sum(end["died"] == -9 for end in ends)
    assert killed == MOMENTS
    assert {end["died"] for end in ends} <= {-9, 0}, "0: a run that was faster than its killer"
    print(f"{killed} runs were killed at a random moment; all resumed bit by bit")


def test_signal_lets_the_step_end_saves_and_leaves(tmp_path: Path) -> None:
    found = in_child(lambda: forked_runs.do_work("signals", tmp_path), tmp_path)
    assert found["whole"] == 0
    for name, code in (("SIGTERM", 143), ("SIGINT", 130)):
        end = found["signals"][name]
        assert (end["code"], len(end["saved"]), end["resumed"]) == (code, 1, 0), name
        assert 3 <= int(end["saved"][0].removeprefix("step-")) < 60, name
        for part in ("rows", "state", "bundle", "temporary"):
            assert end["left"][part] == found["left"][part], (name, part)


def test_every_kind_of_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    found = in_child(lambda: forked_runs.do_work("variants", tmp_path, 3 if SOAK else 1), tmp_path)
    assert len(found) == 8
    for name, rows in found.items():
        whole = rows.pop("whole")
        assert whole["temporary"] == []
        for after, end in rows.items():
            assert (end["code"], end["left"]) == (0, whole), (name, after)
    assert len({rows["5"]["left"]["state"] for rows in found.values()}) == 8, "each variant is another run"
