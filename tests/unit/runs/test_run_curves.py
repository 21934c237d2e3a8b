"""The curves of a run: read from its folder alone, and refused in plain words where there are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.core.errors import UsageError
from vitlab.report.curves_page import build_curves_page
from vitlab.report.page import render
from vitlab.runs.evaluation.comparison import read_curves
from vitlab.training.recipe import Recipe

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Recipe], parts: Call, run: Call) -> Path:
    """Two runs of eight steps, validated twice, that differ in their learning rate."""
    folder = tmp_path_factory.mktemp("curves")
    for name, lr in (("slow", "1e-4"), ("fast", "1e-2")):
        recipe = tiny(f"optim.lr={lr}", "train.eval_every=4")
        run(recipe, folder / name, parts(val=True))
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_curves_are_those_of_the_metrics_and_the_validation(place: Path) -> None:
    for name in ("slow", "fast"):
        one, stored = read_curves(place / name, name), rows(place / name)
        assert one.name == name
        assert one.loss == [(row["step"], row["loss"]) for row in stored]
        assert one.lr == [(row["step"], row["lr"]) for row in stored]
        assert [step for step, _ in one.val_metric] == [step for step, _ in one.val_loss] == [4, 8]


def test_page_has_every_curve_and_the_settings_that_differ(place: Path) -> None:
    page = render(build_curves_page([read_curves(place / name, name) for name in ("slow", "fast")], "vitlab compare"))
    for title in ("Training loss", "Validation accuracy", "Validation loss", "Learning rate", "Settings that differ"):
        assert f"<h2>{title}</h2>" in page
    differing = page[page.index("<h2>Settings that differ</h2>") :]
    assert "optim.lr" in differing and "0.0001" in differing and "train.steps" not in differing


def test_runs_are_only_read(place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    read_curves(place / "slow", "A")
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_line_that_a_crash_cut_short_is_left_out(tmp_path: Path, tiny: Call, run: Call) -> None:
    run(tiny(), tmp_path / "cut")
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_curves(tmp_path / "cut", "A").loss) == 7


def test_what_has_no_curve_is_refused(tmp_path: Path, tiny: Call, run: Call) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        read_curves(tmp_path, "A")
    run(tiny(), tmp_path / "begun")
    (tmp_path / "begun" / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="has not taken a step yet"):
        read_curves(tmp_path / "begun", "A")
