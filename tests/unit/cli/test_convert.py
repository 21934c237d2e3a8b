"""`vitlab convert` at a terminal: what it prints, with which code it leaves, and what it leaves behind."""

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_command import Command

from vitlab.core import fsio
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.spec import ViTSpec
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.foreign import ConvertReport

Call = Callable[..., Any]
SPEC = ViTSpec(width=64, depth=1, mlp_dim=64, heads=1, patch=8, image_size=(16, 16), num_classes=3)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    model = build(SPEC, seed=0)
    torch.nn.init.ones_(model.head.weight)  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
    save_bundle(tmp_path / "small", Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee", "cat"), "card", {}))
    return tmp_path / "small"


def test_answer_is_the_account_and_json_is_the_same(call: Call, small: Path) -> None:
    code, out, err = call("convert", "small", "a.npz", "--to", "google-npz")
    first, *notes, last = out.splitlines()
    assert (code, err) == (0, "")
    assert first == "vitlab: ViT-w64d1m64h1/8, 24 of 24 arrays matched, none missing"
    assert (notes[0], last) == (
        "labels and preprocessing stay behind: this format has no place for them",
        "google-npz -> a.npz",
    )
    code, out, err = call("convert", "small", "b.npz", "--to", "google-npz", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert list(report) == [field.name for field in dataclasses.fields(ConvertReport)]
    assert (report["out"], report["notes"]) == ("b.npz", notes)


def test_quiet_keeps_the_result_and_what_was_assumed(call: Call, small: Path) -> None:
    _, loud, _ = call("convert", "small", "a.npz", "--to", "google-npz")
    _, quiet, err = call("convert", "small", "b.npz", "--to", "google-npz", "--quiet")
    assert (quiet, err) == (loud.replace("a.npz", "b.npz"), "")


@pytest.mark.parametrize(
    ("arguments", "code", "reported"),
    [
        (["--to", "npz"], 2, "unknown value for to: 'npz'"),
        (["--to", "hf", "--drop", "blocks"], 2, "pre_logits and head can be left out, not 'blocks'"),
        (["--drop", "pre_logits"], 2, "has no pre_logits to leave out"),
        (["--drop", "head", "--classes", "4"], 2, "exclude each other"),
        (["--labels", "ant", "--labels", "0"], 2, "names a class twice"),
        (["--pos-resize", "bicubic"], 2, "give image_size or patch_size too"),
        (["--channels", "2"], 2, "3 channels to 2"),
        (["--heads", "2"], 2, "has its own spec"),
        (["--image-size", "80000000"], 2, "image_size must be positive and at most 65,536"),
        (["--patch-size", "100000"], 2, "image_size must be positive and at most 65,536"),
        (["--classes", "100000000000"], 2, "num_classes must not be negative, or above"),
        (["--channels", "100000000"], 2, "parameters, more than any ViT has"),
    ],
)
def test_wrong_call_is_a_sentence_and_writes_nothing(
    call: Call, small: Path, arguments: list[str], code: int, reported: str
) -> None:
    found, out, err = call("convert", "small", "x", *arguments)
    assert (found, out) == (code, "")
    assert reported in err
    assert [path.name for path in small.parent.iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        ("absent", "absent does not exist"),
        ("x" * 300, "File name too long"),
        ("ViT-B/16", "Published weights of that name: ViT-B/16@"),
        ("ViT-B/16@AugReg-i21k", "Nearest: ViT-B/16@augreg-i21k"),
    ],
)
def test_source_that_is_not_there_is_reported(call: Call, source: str, reported: str) -> None:
    code, out, err = call("convert", source, "x")
    assert (code, out) == (2 if "@A" in source else 1, "")
    assert reported in err


def test_classes_0_leaves_the_head_out(call: Call, small: Path) -> None:
    _, out, _ = call("convert", "small", "x", "--classes", "0")
    assert "head of 3 classes left out" in out.splitlines()


def test_ctrl_c_exits_with_its_code_and_nothing_behind(small: Path) -> None:
    """A real signal, at the moment when the file is whole and has not got its name yet."""

    def stop(operation: fsio.Operation, path: Path) -> None:
        if operation == "rename":
            os.kill(os.getpid(), signal.SIGINT)

    stack = contextlib.ExitStack()
    command = ["convert", "small", "x.npz", "--to", "google-npz"]
    code, out, err = Command(command, small.parent, lambda: stack.enter_context(fsio.intercept(stop))).end()
    assert (code, out) == (130, "")
    assert err.strip() == "vitlab: stopped"
    assert [path.name for path in small.parent.iterdir()] == ["small"]
