"""`vitlab evaluate` and `vitlab compare` as commands: one JSON document, sentences, exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

Call = Callable[..., Any]
FAST = ("--device", "cpu", "--threads", "1", "--resamples", "10")


@pytest.fixture
def model(tmp_path: Path) -> str:
    net = create_model("ViT-w16d1m32h2/8", num_classes=2, image_size=16, seed=0).eval()
    with torch.no_grad():
        assert net.head is not None
        net.head.weight.copy_(torch.randn(2, 16, generator=torch.Generator().manual_seed(0)))
    save_bundle(tmp_path / "model", Bundle(net, Preprocess(image_size=(16, 16)), ("a", "b"), "card", {}))
    return str(tmp_path / "model")


@pytest.fixture
def data(tmp_path: Path) -> str:
    noise = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for i in range(12 if part == "train" else 6):  # nearest neighbours are twenty
                picture = Image.fromarray(noise.integers(0, 256, (16, 16, 3), dtype=np.uint8))
                picture.save(tmp_path / "data" / part / name / f"{i}.png")
    return str(tmp_path / "data")


def test_json_is_one_document_and_progress_goes_elsewhere(call: Call, model: str, data: str) -> None:
    code, out, err = call("evaluate", model, data, "--json", *FAST)
    found = json.loads(out)
    assert code == 0 and "evaluate" in err
    assert found["n"] == 12 and 0 <= found["top1"] <= 1 and found["few_shot"] is None


def test_sentences_say_the_number_and_its_interval(call: Call, model: str, data: str) -> None:
    code, out, err = call("evaluate", model, data, "-q", *FAST)
    assert (code, err) == (0, "")
    assert "top-1" in out and " to " in out and "15 bins of equal width" in out and "fitted on val" in out


def test_features_are_measured_when_asked_for(
    call: Call, model: str, data: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    code, out, _ = call("evaluate", model, data, "--json", "-q", "--few-shot", "1,5", "--knn", "--probe", *FAST)
    found = json.loads(out)
    assert code == 0 and found["few_shot"].keys() == {"1", "5"}
    assert found["knn"].keys() >= {"k", "top1"} and 0 <= found["probe"]["top1"] <= 1
    assert found["top1"] is not None


def test_features_of_a_model_whose_head_means_something_else(
    call: Call, model: str, data: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    for part in ("train", "val", "test"):
        (tmp_path / "data" / part / "b").rename(tmp_path / "data" / part / "other")
    code, out, _ = call("evaluate", model, data, "--json", "-q", "--knn", "--out", "out", *FAST)
    found = json.loads(out)
    assert code == 0 and found["top1"] is None and found["knn"]["top1"] is not None
    assert any("the head was not measured" in note for note in found["notes"])
    assert "20-NN" in (tmp_path / "out" / "report.html").read_text()


def test_comparison_is_one_document_too(call: Call, model: str, data: str) -> None:
    code, out, _ = call("compare", model, model, data, "--json", *FAST)
    assert code == 0 and json.loads(out)["p"] == 1
    assert "McNemar" in call("compare", model, model, data, "-q", *FAST).out


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--few-shot", "1;5"], "whole numbers separated by commas"),
        (["--part", "nope"], "no nope part"),
        (["--label-map", "none.json"], "none.json"),
        (["--seeds", "3"], "--vtab"),
    ],
    ids=str,
)
def test_wrong_call_exits_with_its_code_and_a_sentence(
    call: Call, model: str, data: str, arguments: list[str], printed: str
) -> None:
    code, out, err = call("evaluate", model, data, "-q", *arguments, *FAST)
    assert out == "" and printed in err and code == (1 if "none.json" in printed else 2)


def test_call_without_a_model_is_wrong(call: Call) -> None:
    assert call("evaluate").code == 2 and "give the model" in call("evaluate").err
