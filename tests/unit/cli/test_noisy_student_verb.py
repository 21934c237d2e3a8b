"""`vitlab noisy-student` in a shell: a plan, configs and errors; `test_noisy_student.py` has what it does."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

DIGITS = ("noisy-student", "digits", "--recipe", "noisy-student-digits", "--device", "cpu", "--threads", "1")


@pytest.mark.slow
def test_a_dry_run_names_every_student(call: Any, tmp_path: Path) -> None:
    words = (
        "--generations",
        "2",
        "--student",
        "ViT-w64d4m128h4/4",
        "--student",
        "ViT-w128d4m256h4/4",
        "--dry-run",
        "--json",
    )
    code, out, err = call(*DIGITS, *words, "--out", str(tmp_path / "out"))
    assert code == 0, err
    would = json.loads(out)
    assert [text.split(",")[0] for text in would["students"]] == ["ViT-w64d4m128h4/4", "ViT-w128d4m256h4/4"]
    assert "100 to train on" in would["images"]


@pytest.mark.slow
def test_print_config_is_toml_that_has_the_noise_of_the_student(call: Any) -> None:
    code, out, err = call(*DIGITS, "--student-set", "model.dropout=0.25", "--print-config")
    assert code == 0, err
    table = tomllib.loads(out)
    assert [table[name]["model"]["dropout"] for name in ("generation-0", "generation-1")] == [0.0, 0.25]
    assert table["generation-1"]["data"]["augment"]["randaugment"] == "torchvision"


def test_a_wrong_call_exits_with_2_and_a_sentence(call: Any, tmp_path: Path) -> None:
    for words, what in (
        (("noisy-student", "digits", "--recipe", "demo-digits"), "there are no unlabelled images"),
        ((*DIGITS, "--unlabelled", str(tmp_path / "nowhere.npz")), "does not exist"),
        ((*DIGITS, "--teacher", str(tmp_path / "no-run")), "does not exist"),
        (("noisy-student", "--resume", str(tmp_path)), "is not a folder of `vitlab noisy-student`"),
        (("noisy-student", "--resume", str(tmp_path), "--teacher", "x"), "leave --teacher out"),
    ):
        code, out, err = call(*words)
        assert (code, out) == (2, ""), err
        assert what in err
