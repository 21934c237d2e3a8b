"""`vitlab evaluate MODEL --vtab`, as typed."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

_found = importlib.util.spec_from_file_location("vtab_copies", Path(__file__).parents[1] / "data" / "vtab_copies.py")
assert _found and _found.loader
copies = importlib.util.module_from_spec(_found)
_found.loader.exec_module(copies)

SMALL = [
    word
    for setting in ("data.image_size=[16,16]", "train.steps=2", "train.batch_size=8", "train.precision=fp32")
    for word in ("--set", setting)
]
ALONE = ["--device", "cpu", "--threads", "1"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    copies.svhn(tmp_path / "data")
    model = create_model("ViT-w16d1m32h2/8", num_classes=2, image_size=16, seed=0)
    save_bundle(tmp_path / "start", Bundle(model, Preprocess(image_size=(16, 16)), ("a", "b"), "card", {}))
    return "start"


def test_the_tasks_that_are_here_are_measured_and_the_same_call_resumes(call: Callable[..., Any], start: str) -> None:
    words = ["evaluate", start, "--vtab", "--out", "out", *SMALL, *ALONE]
    first = call(*words, "--json")
    assert first.code == 0, first.err
    found = json.loads(first.out)["vtab"]
    assert list(found["tasks"]) == ["svhn"] and len(found["missing"]) == 18 and found["mean"] is None
    again = call(*words)
    assert again.code == 0 and "1 of 19 tasks, so no mean" in again.out and "measured before" in again.err
    assert len(list(Path("out/records").iterdir())) == 1


def test_wrong_calls_are_refused_before_any_work(call: Callable[..., Any], start: str) -> None:
    for words, text in (
        (["--vtab", "--task", "mnist"], "unknown VTAB task 'mnist'"),
        (["--vtab", "--sweep", "x"], "'x' is not a sweep"),
        (["svhn", "--task", "svhn"], "go with --vtab"),
    ):
        printed = call("evaluate", start, *words, "--out", "out", *ALONE)
        assert (printed.code, printed.out) == (2, "") and text in printed.err and "Traceback" not in printed.err
    printed = call("evaluate", start, "--vtab", "--task", "dtd", "--out", "out", *ALONE)
    assert printed.code == 1 and "dtd-r1.0.1.tar.gz" in printed.err
    assert not Path("out").exists()
