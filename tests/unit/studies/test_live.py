"""The table of a study while it runs."""

import dataclasses
import io
from pathlib import Path

import pytest
import rich.console
from study_records import HOSTILE, TINY, records_of, tiny_study

from vitlab.core.console import Console
from vitlab.studies import live
from vitlab.studies.grid import list_cells
from vitlab.studies.live import LiveTable


def test_table_shows_done_running_and_waiting(tmp_path: Path) -> None:
    study = tiny_study(
        tmp_path, TINY.replace("A = {}", f"'{HOSTILE}' = {{}}").replace('{ kind = "A" }', '{ size = "1" }')
    )
    scale = study.at("laptop")
    cells, records = list_cells(scale), records_of(scale)
    done = {cells[0].run.key: records[cells[0].run.key]}
    table = live._table(study, scale, cells, done, {cells[1].run.key})
    out = rich.console.Console(width=200, record=True, file=(tmp_path / "x").open("w"))
    out.print(table)
    out.file.close()
    lines = out.export_text().splitlines()
    assert lines[1].split() == ["kind", "size", "seed", "0", "seed", "1", "seed", "2"]
    assert lines[2].strip().startswith(HOSTILE) and lines[2].split()[-4:] == ["30.0", "%", "·", "·"]
    assert lines[3].split()[-3:] == ["running", "·", "·"]


def test_title_above_a_narrow_table_stays_one_line_and_a_margin_is_in_points(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, TINY.replace('"Tiny"', '"Axial against full attention"'))
    scale = dataclasses.replace(study.at("laptop"), measure="margin", seeds=(0,))
    cells = list_cells(scale)
    record = next(iter(records_of(scale).values()))
    done = {cells[0].run.key: dataclasses.replace(record, numbers={"margin": 0.015})}
    out = rich.console.Console(width=100, file=io.StringIO())
    out.print(live._table(study, scale, cells, done, set()))
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "Axial against full attention (laptop)"
    assert lines[2].split() == ["A", "1", "1.5", "points"] and len(lines[2].rstrip()) < len(lines[0])


def test_lines_are_printed_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tiny_study(tmp_path)
    with LiveTable([(study, study.at("laptop"))], Console(quiet=False)) as table:
        table.update({}, set())
        table.say("1/18  tiny: A, 1, seed 0")
    assert "1/18  tiny: A, 1, seed 0" in "".join(capsys.readouterr())


def test_terminal_has_the_table_and_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = rich.console.Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(live.rich.console, "Console", lambda **_: screen)
    study = tiny_study(tmp_path)
    with LiveTable([(study, study.at("laptop"))], Console(quiet=False)) as table:
        table.update({}, set(), "0 of 18 runs done, 2 running, left ?")
    assert isinstance(screen.file, io.StringIO)
    assert "Tiny (laptop)" in screen.file.getvalue() and "0 of 18 runs done" in screen.file.getvalue()
