"""`vitlab data check` says what it found and leaves with 1 when that is serious; `vitlab data split` writes a table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Call = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(draw.integers(0, 256, (150, 150, 3), dtype=np.uint8)).save(
                tmp_path / "pets" / name / f"{i}.png"
            )
    return tmp_path / "pets"


def test_clean_data_leaves_with_0(call: Call, folder: Path) -> None:
    said = call("data", "check", str(folder), "--workers", "1")
    assert said.code == 0
    assert said.out.startswith("all      20 images of 2 classes\nfiles    PNG 20")
    assert said.out.endswith("nothing to report\n")
    assert "checking   20/20" in said.err


def test_broken_file_leaves_with_1_and_a_name_cannot_command_the_terminal(call: Call, folder: Path) -> None:
    table = folder / "list.csv"
    (folder / "x\x1b[31m.png").write_bytes(b"")
    table.write_text("path,label\nx\x1b[31m.png,cat\ncat/1.png,cat\n")
    said = call("data", "check", str(table), "-q", "--workers", "1")
    assert said.code == 1
    assert "\x1b" not in said.out
    assert "!!  Files that cannot be used: 1\n      x\\x1b[31m.png: is empty" in said.out
    assert "1 serious finding(s)" in said.err


def test_json_is_the_whole_answer(call: Call, folder: Path) -> None:
    (folder / "dog" / "same.png").write_bytes((folder / "cat" / "3.png").read_bytes())
    said = call("data", "check", str(folder), "-q", "--json", "--workers", "1")
    found = json.loads(said.out)
    assert (said.code, found["counts"], found["parts"]["all"]) == (1, {"contradiction": 1}, {"cat": 10, "dog": 11})


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_no_workers_is_a_wrong_call(call: Call, folder: Path, workers: str) -> None:
    assert call("data", "check", str(folder), "--workers", workers).code == 2


def test_split_writes_a_table(call: Call, folder: Path) -> None:
    said = call("data", "split", str(folder), "--out", "split.csv", "--val", "0", "--test", "0.2")
    assert said.out == ("train    16 images of 2 classes\ntest     4 images of 2 classes\ntable    split.csv\n")
    assert len(Path("split.csv").read_text().splitlines()) == 21


@pytest.mark.parametrize("options", [["--val", "0.5"], ["--out", "x.txt"], ["--group-by", "("], ["--train", "nan"]])
def test_wrong_split_is_a_wrong_call(call: Call, folder: Path, options: list[str]) -> None:
    out = [] if "--out" in options else ["--out", "split.csv"]
    said = call("data", "split", str(folder), *out, *options)
    assert said.code == 2
    assert not Path("split.csv").exists()
