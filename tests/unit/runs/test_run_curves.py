"""Curves of several runs: read from their folders alone, and refused in plain words where there are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.core.errors import UsageError
from vitlab.runs.evaluation.comparison import compare_curves
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
    found = compare_curves([place / "slow", place / "fast"])
    assert [one.name for one in found.runs] == ["slow", "fast"] and found.page is None
    for one in found.runs:
        stored = rows(place / one.name)
        assert one.loss == [(row["step"], row["loss"]) for row in stored]
        assert one.lr == [(row["step"], row["lr"]) for row in stored]
        assert [step for step, _ in one.val_metric] == [step for step, _ in one.val_loss] == [4, 8]
    assert "slow: 8 steps" in found.sentences()[0] and "best validation" in found.sentences()[0]


def test_page_has_every_curve_and_the_settings_that_differ(place: Path, tmp_path: Path) -> None:
    found = compare_curves([str(place / "slow"), str(place / "fast")], out=tmp_path / "out")
    assert found.page == tmp_path / "out" / "report.html"
    page = found.page.read_text()
    for title in ("Training loss", "Validation accuracy", "Validation loss", "Learning rate", "Settings that differ"):
        assert f"<h2>{title}</h2>" in page
    differing = page[page.index("<h2>Settings that differ</h2>") :]
    assert "optim.lr" in differing and "0.0001" in differing and "train.steps" not in differing
    assert len(json.loads((tmp_path / "out" / "curves.json").read_text())["runs"]) == 2
    with pytest.raises(UsageError, match="exists already"):
        compare_curves([place / "slow", place / "fast"], out=tmp_path / "out")


def test_runs_are_only_read(place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    compare_curves([place / "slow", place / "fast"])
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_line_that_a_crash_cut_short_is_left_out(place: Path, tmp_path: Path, tiny: Call, run: Call) -> None:
    run(tiny(), tmp_path / "cut")
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (cut, _) = compare_curves([tmp_path / "cut", place / "fast"]).runs
    assert len(cut.loss) == 7


def test_names_are_as_long_as_it_takes_to_tell_them_apart(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(place)
    found = compare_curves([tmp_path / "a" / "slow", place / "slow"])
    first, second = (one.name for one in found.runs)
    assert first != second and first.endswith("a/slow") and second.endswith("slow")


def test_what_has_no_curve_is_refused(place: Path, tmp_path: Path, tiny: Call, run: Call) -> None:
    with pytest.raises(UsageError, match="two runs or more"):
        compare_curves([place / "slow"])
    with pytest.raises(UsageError, match="named twice"):
        compare_curves([place / "slow", place / "slow"])
    with pytest.raises(UsageError, match="is not a run"):
        compare_curves([place / "slow", tmp_path])
    run(tiny(), tmp_path / "begun")
    (tmp_path / "begun" / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="has not taken a step yet"):
        compare_curves([place / "slow", tmp_path / "begun"])
