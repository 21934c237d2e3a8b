"""A checkpoint is whole or no checkpoint, holds finite numbers only, and the newest and the best ones stay."""

import dataclasses
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.core.runtime import generator
from vitlab.training import checkpoint
from vitlab.training.checkpoint import Saver, Snapshot


def snapshot(step: int, **changes: Any) -> Snapshot:
    draw = generator(step)
    whole = Snapshot(
        step=step,
        model={"w": torch.randn(3, 2, generator=draw), "b": torch.randn(2, generator=draw)},
        optimizer={"w/step": torch.tensor(float(step)), "w/exp_avg": torch.randn(3, 2, generator=draw).bfloat16()},
        ema={"w": torch.randn(3, 2, generator=draw)},
        progress={"best": None, "evaluations": [{"step": 1, "top1": 0.1 + 0.2}], "bad": {"ü.jpg": "no image"}},
    )
    return dataclasses.replace(whole, **changes)


def assert_equal(first: Snapshot, second: Snapshot) -> None:
    assert (first.step, first.progress) == (second.step, second.progress)
    for name in ("model", "optimizer", "ema"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert (ours is None) == (theirs is None)
        assert (ours or {}).keys() == (theirs or {}).keys()
        for key in ours or {}:
            assert ours[key].dtype == theirs[key].dtype
            assert torch.equal(ours[key], theirs[key])


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(folder)]


@pytest.mark.parametrize("averaged", [True, False])
def test_what_is_stored_comes_back_bit_for_bit(tmp_path: Path, averaged: bool) -> None:
    given = snapshot(12) if averaged else snapshot(12, ema=None)
    path = checkpoint.store(tmp_path, given)
    assert path.name == "step-000000012"
    assert_equal(checkpoint.restore(path), given)


@pytest.mark.parametrize("part", ["model", "optimizer", "ema"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, part: str, value: float) -> None:
    broken = snapshot(3, **{part: {"odd": torch.tensor([1.0, value])}})
    with pytest.raises(VitlabError, match=r"'odd'.*NaN.*step 3.*nothing was saved"):
        checkpoint.store(tmp_path, broken)
    assert list(tmp_path.iterdir()) == []


def test_copies_do_not_change_with_what_they_were_made_from() -> None:
    weights = {"w": torch.zeros(2, requires_grad=True)}
    kept = checkpoint.copied(weights)
    with torch.no_grad():
        weights["w"] += 1
    assert kept["w"].tolist() == [0, 0]
    assert not kept["w"].requires_grad


def test_newest_whole_checkpoint_is_found_and_damaged_ones_are_reported(tmp_path: Path) -> None:
    assert checkpoint.newest_valid(tmp_path / "nowhere") == (None, [])
    for step in (5, 10, 20):
        checkpoint.store(tmp_path, snapshot(step))
    (tmp_path / "step-000000020" / checkpoint.PROGRESS).write_text("{}")
    (tmp_path / "notes").mkdir()  # somebody else's
    found, printed = checkpoint.newest_valid(tmp_path)
    assert found is not None
    assert_equal(found, snapshot(10))
    assert len(printed) == 1
    assert printed[0].startswith("step-000000020 cannot be used: ")


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", '{"step": 7, "ema": false}'])
def test_malformed_progress_is_a_file_problem(tmp_path: Path, text: str) -> None:
    """With a manifest that fits, so that it is not the hash which tells."""
    with fsio.new_folder(tmp_path / "step-000000005") as new:
        for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
            new.write(name, (checkpoint.store(tmp_path / name, snapshot(5)) / name).read_bytes())
        new.write(checkpoint.PROGRESS, text)
    with pytest.raises(FileProblem):
        checkpoint.restore(tmp_path / "step-000000005")


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 7):
        checkpoint.store(tmp_path, snapshot(step))
    checkpoint.prune(tmp_path, keep=2, best=3)
    assert names(tmp_path) == ["step-000000003", "step-000000005", "step-000000006"]
    checkpoint.prune(tmp_path, keep=1, best=6)
    assert names(tmp_path) == ["step-000000006"]
    checkpoint.prune(tmp_path, keep=5, best=None)
    assert names(tmp_path) == ["step-000000006"]


def test_crash_while_pruning_leaves_no_half_checkpoint_that_counts(tmp_path: Path) -> None:
    """The manifest goes first, whichever operation is the last."""
    for last in range(3):
        folder = tmp_path / str(last)
        for step in (1, 2):
            checkpoint.store(folder, snapshot(step))
        seen = 0

        def stop(_operation: fsio.Operation, _path: Path, last: int = last) -> None:
            nonlocal seen
            seen += 1
            if seen > last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), fsio.intercept(stop):
            checkpoint.prune(folder, keep=1, best=None)
        path = folder / "step-000000001"
        if last == 0:
            assert_equal(checkpoint.restore(path), snapshot(1))
        else:
            with pytest.raises(FileProblem, match=r"manifest\.json"):
                checkpoint.restore(path)
        assert checkpoint.newest_valid(folder)[1] == []
        checkpoint.prune(folder, keep=1, best=None)
        assert names(folder) == ["step-000000002"]


def test_what_comes_after_a_step_can_be_removed(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        checkpoint.store(tmp_path, snapshot(step))
    checkpoint.remove_after(tmp_path, 2)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]
    checkpoint.remove_after(tmp_path, -1)
    assert names(tmp_path) == []


# --- beside training --------------------------------------------------------------------------------------------------


def test_saver_works_beside_its_caller_one_at_a_time(tmp_path: Path) -> None:
    saver, gate = Saver(tmp_path, keep=2), threading.Event()
    threads: set[int] = set()

    def wait(_operation: fsio.Operation, _path: Path) -> None:
        threads.add(threading.get_ident())
        assert gate.wait(30)

    with fsio.intercept(wait):
        saver.submit(snapshot(1), None)  # comes back though nothing can be written yet
        assert names(tmp_path) == []
        gate.set()
        for step in (2, 3):
            saver.submit(snapshot(step), None)
        saver.close()
    assert names(tmp_path) == ["step-000000002", "step-000000003"]
    assert threading.get_ident() not in threads
    saver.close()


def test_failure_of_the_saver_comes_out_at_the_next_call(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=1)
    saver.submit(snapshot(1, model={"w": torch.tensor(math.nan)}), None)
    with pytest.raises(VitlabError, match="NaN"):
        saver.submit(snapshot(2), None)
    saver.close()
    assert names(tmp_path) == [], "the second was not begun: its caller was asked to stop"


def test_progress_is_plain_json(tmp_path: Path) -> None:
    path = checkpoint.store(tmp_path, snapshot(4))
    assert json.loads((path / checkpoint.PROGRESS).read_text()) == {
        "format": 1,
        "step": 4,
        "ema": True,
        **snapshot(4).progress,
    }
