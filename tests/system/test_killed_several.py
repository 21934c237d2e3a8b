"""`--seeds` and `--sweep` that are stopped in any way leave, after `--resume`, every file of a call that was never stopped.

SIGKILL before a fixed sample of the disk operations by default; with VITLAB_SOAK=1 before every one of them.
"""

import os
from typing import Any

import pytest
from forked_work import in_child
from slow_cases import slow_after

SAMPLE = 0 if os.environ.get("VITLAB_SOAK") == "1" else 3


@pytest.fixture(scope="module", params=slow_after(0, ["sweep", "seeds"]))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("several")

    def work() -> dict[str, Any]:
        from killed_several import operations

        return operations(place, request.param, SAMPLE)

    return in_child(work, place)


def require_same(end: dict[str, Any], whole: dict[str, Any], where: str) -> None:
    assert end["again"] == 0, (where, end["left"]["printed"])
    assert end["left"]["printed"] == whole["printed"], where
    files, wanted = end["left"]["files"], whole["files"]
    assert sorted(files) == sorted(wanted), where
    assert [name for name in wanted if files[name] != wanted[name]] == [], where


def test_sigkill_at_any_disk_operation_costs_nothing(found: dict[str, Any]) -> None:
    assert found["whole"] == 0
    assert found["total"] > 200
    assert len(found["kills"]) == (SAMPLE or found["total"])
    for point, end in found["kills"].items():
        assert end["died"] == -9, point
        require_same(end, found["left"], point)


def test_signal_saves_the_run_it_meets_and_names_the_whole_call(found: dict[str, Any]) -> None:
    assert len(found["signals"]) == (1 if SAMPLE else 2)
    for name, end in found["signals"].items():
        assert end["code"] == {"SIGINT": 130, "SIGTERM": 143}[name]
        assert end["reported"].endswith("Saved at step 3. Resume with:  vitlab train --resume out\n")
        assert "step-000000003" in end["saved"]
        require_same(end, found["left"], name)
