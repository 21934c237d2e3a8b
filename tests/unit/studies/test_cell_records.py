"""Records of runs: sealed, one for each run, and refused with a reason when they are not as they were written."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from study_records import record_of, tiny_study

from vitlab.core.errors import FileProblem, UsageError
from vitlab.evaluation.records import read_records
from vitlab.studies.cell_records import CellRecord, read_cell, read_cells, record_path, write_cell
from vitlab.studies.grid import list_cells


@pytest.fixture
def record(tmp_path: Path) -> CellRecord:
    run = list_cells(tiny_study(tmp_path).at("laptop"))[0].run
    return record_of(run, {"top1": 0.1 + 0.2, "loss": 1e-17}, seconds=1 / 3)


def test_what_is_read_is_what_was_written(tmp_path: Path, record: CellRecord) -> None:
    path = write_cell(tmp_path, record)
    assert path == record_path(tmp_path, record.key) == tmp_path / "records" / "cells" / f"{record.key}.json"
    assert read_cell(path) == record
    assert read_cells(tmp_path) == {record.key: record}
    assert set(json.loads(path.read_text())) == {"schema", "sha256", *(f.name for f in dataclasses.fields(CellRecord))}


def test_first_record_stays(tmp_path: Path, record: CellRecord) -> None:
    path = write_cell(tmp_path, record)
    before = path.read_bytes()
    assert write_cell(tmp_path, dataclasses.replace(record, numbers={"top1": 0.9})) == path
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing temporary is left"


@pytest.mark.parametrize(
    ("old", "new"),
    [("0.30000000000000004", "0.4"), ('"seed": 0', '"seed": 1'), ("vitlab-cell-1", "vitlab-cell-0"), ("sha256", "sha")],
)
def test_edited_record_is_refused(tmp_path: Path, record: CellRecord, old: str, new: str) -> None:
    path = write_cell(tmp_path, record)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(FileProblem, match=rf"{path.name} is not a record") as caught:
        read_cells(tmp_path)
    assert "measures it again" in str(caught.value)
    with pytest.raises(FileProblem, match="not a record as vitlab wrote it"):
        write_cell(tmp_path, record)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"schema": "vitlab-cell-1"}', "\N{BULLET}" * 10])
def test_damaged_record_is_named(tmp_path: Path, record: CellRecord, text: str) -> None:
    path = write_cell(tmp_path, record)
    path.write_text(text)
    with pytest.raises(FileProblem, match=path.name) as caught:
        read_cell(path)
    assert "measures it again" in str(caught.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FileProblem, match=rf"{path.name} is not utf-8 text"):
        read_cell(path)
    path.unlink()
    with pytest.raises(FileProblem, match=rf"{path.name} cannot be read: No such file"):
        read_cell(path)


def test_record_of_another_run_under_this_name_is_refused(tmp_path: Path, record: CellRecord) -> None:
    path = write_cell(tmp_path, record)
    other = path.with_name("0" * 16 + ".json")
    path.rename(other)
    with pytest.raises(FileProblem, match=f"{other.name} .*another run, {record.key}"):
        read_cell(other)


def test_number_that_is_none_is_not_recorded(record: CellRecord) -> None:
    for wrong in (math.nan, math.inf):
        with pytest.raises(UsageError, match="finite"):
            dataclasses.replace(record, numbers={"top1": wrong})
        with pytest.raises(UsageError, match="finite"):
            dataclasses.replace(record, seconds=wrong)


def test_records_of_evaluations_and_of_studies_lie_in_one_folder(tmp_path: Path, record: CellRecord) -> None:
    write_cell(tmp_path, record)
    assert read_records(tmp_path / "records") == []
    (tmp_path / "records" / "other.json").write_text("{}")
    assert list(read_cells(tmp_path)) == [record.key]


def test_two_different_records_of_one_run_are_refused(tmp_path: Path, record: CellRecord) -> None:
    write_cell(tmp_path / "one", record)
    write_cell(tmp_path / "two", record)
    assert read_cells(tmp_path) == {record.key: record}, "a copy is the same record"
    write_cell(tmp_path / "three", dataclasses.replace(record, seconds=record.seconds + 1))
    with pytest.raises(FileProblem, match=r"one/records.*three/records.*different records of one run"):
        read_cells(tmp_path)
