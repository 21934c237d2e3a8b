"""The verbs that look before they work: `demo --dry-run`, `demo --print-config`, `doctor`."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitlab.core.environment import DATA_VARIABLE
from vitlab.runs.checkup import doctor

Call = Callable[..., Any]


def test_dry_run_prints_the_plan_and_writes_nothing(call: Call, tmp_path: Path) -> None:
    code, out, err = call("demo", "--dry-run", "--out", "x/y")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["device", "out", "pretrain", "transfer"]
    assert "x/y" in out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_as_json_is_one_document(call: Call) -> None:
    code, out, err = call("demo", "--dry-run", "--json", "--set", "transfer.train.steps=5")
    assert (code, err) == (0, "")
    assert "5 steps" in json.loads(out)["transfer"]


def test_printed_config_parses_and_holds_the_override(call: Call, tmp_path: Path) -> None:
    code, out, err = call("demo", "--print-config", "--seed", "5", "--set", "transfer.optim.lr=0.25")
    assert (code, err) == (0, "")
    tables = tomllib.loads(out)
    assert tables["transfer"]["optim"]["lr"] == 0.25
    assert [table["seed"] for table in tables.values()] == [5, 5]
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_this_installation_sound(call: Call) -> None:
    code, out, err = call("doctor")
    assert (code, err) == (0, "")
    assert out.startswith("vitlab ")
    assert "!!" not in out


def test_doctor_as_json_is_one_document(call: Call) -> None:
    code, out, err = call("doctor", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found.keys() == {"healthy", "machine", "findings"}
    assert found["healthy"] is True
    assert all(finding.keys() == {"topic", "state", "text"} for finding in found["findings"])


def test_doctor_exits_with_one_when_something_is_wrong(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, "/nowhere")
    code, out, err = call("doctor", "--json")
    assert code == 1
    assert json.loads(out)["healthy"] is False
    assert err.startswith("vitlab: something is wrong with this installation")
    assert re.search("  !!  data +VITLAB_DATA points to /nowhere, which is not a folder\n", call("doctor").out)


def test_doctor_is_two_aligned_columns_with_one_line_each_in_a_file(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    _, *lines = call("doctor").out.splitlines()
    assert len(lines) == len(doctor().findings)
    topics = [finding.topic for finding in doctor().findings]
    assert [line[6:].startswith(topic) for line, topic in zip(lines, topics, strict=True)] == [True] * len(lines)
    texts = [line[6 + len(topic) :].lstrip() for line, topic in zip(lines, topics, strict=True)]
    assert len({len(line) - len(text) for line, text in zip(lines, texts, strict=True)}) == 1


def test_doctor_wraps_to_the_terminal_under_its_second_column(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, *lines = call("doctor").out.splitlines()
    start = len(lines[0]) - len(lines[0].split(maxsplit=2)[2])
    assert any(line.startswith(" " * start) for line in lines)
    assert all(len(line) <= 60 or " " not in line[start:] for line in lines), "a path is not torn"
    assert all(line[start - 1] == " " != line[start] for line in lines)
