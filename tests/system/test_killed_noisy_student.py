"""A Noisy Student that is stopped in any way ends, after `--resume`, with every file of one that was never stopped.

SIGKILL in teacher training, labelling and student training, and before a sample of all disk operations; with VITLAB_SOAK=1
before every one of them.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from forked_work import in_child

SAMPLE = 0 if os.environ.get("VITLAB_SOAK") == "1" else 3


def stop(place: Path, how_many: int | None) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        from killed_noisy_student import INSIDE, main

        return {"inside": INSIDE, **main(place, how_many)}

    return in_child(work, place)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return stop(tmp_path_factory.mktemp("noisy"), SAMPLE)


def require_same(end: dict[str, Any], whole: dict[str, Any], where: str) -> None:
    assert end["again"] == 0, (where, end["left"]["printed"])
    assert end["left"]["printed"] == whole["printed"], where
    files, wanted = end["left"]["files"], whole["files"]
    assert sorted(files) == sorted(wanted), where
    assert [name for name in wanted if files[name] != wanted[name]] == [], where


def require_nothing_lost(found: dict[str, Any]) -> None:
    assert found["whole"] == 0
    assert {
        "generation-0/bundle/model.safetensors",
        "generation-1/bundle/model.safetensors",
        "pseudo_labels-1.npz",
    } <= set(found["left"]["files"])
    assert set(found["kills"]) <= set(found["points"])
    for point, end in found["kills"].items():
        assert end["died"] == -9, point
        require_same(end, found["left"], point)


def test_sigkill_in_student_training_costs_nothing(tmp_path: Path) -> None:
    found = stop(tmp_path, None)
    assert list(found["kills"]) == [found["inside"]["student training"]]
    require_nothing_lost(found)


@pytest.mark.slow
def test_sigkill_anywhere_costs_nothing(found: dict[str, Any]) -> None:
    assert set(found["inside"].values()) <= set(found["kills"])
    require_nothing_lost(found)


@pytest.mark.slow
def test_sigterm_says_how_to_resume(found: dict[str, Any]) -> None:
    assert set(found["signals"]) == {"labelling", "student training"}
    for name, end in found["signals"].items():
        assert end["code"] == 143, (name, end["reported"])
        assert end["reported"].endswith("Resume with:  vitlab noisy-student --resume out\n"), end["reported"]
        require_same(end, found["left"], name)
    assert "Saved at step 4." in found["signals"]["student training"]["reported"]
