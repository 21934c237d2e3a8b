"""A measurement survives its file, and nothing that is not one is taken for one."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import from_arrays
from vitlab.evaluation.records import (
    Record,
    Subject,
    hash_weights,
    new_record,
    read_record,
    read_records,
    record_to_dict,
    write_record,
)
from vitlab.models.build import create_model

IMAGES = from_arrays(torch.zeros(6, 3, 4, 4, dtype=torch.uint8), [0, 1, 0, 1, 0, 1], ["a", "b"])


def measured(**changes: Any) -> Record:
    model = create_model("ViT-mu/16", num_classes=2, image_size=16, seed=0)
    subject = Subject(
        model=model,
        dataset=IMAGES,
        data="cifar10",
        part="test",
        settings={"image_size": [16, 16], "note": "größer | <b>"},
        device=torch.device("cpu"),
        seconds=1.23456,
        command="vitlab evaluate x cifar10",
    )
    record = new_record(subject, "top1", [0.5, 0.75], seeds=[0, 1])
    return dataclasses.replace(record, **changes)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    record = measured(interval=(0.25, 1.0), pretrained_on="jft", recipe="transfer-cifar10")
    path = write_record(tmp_path / "new" / "folder", record)
    assert read_record(path) == record
    assert read_records(tmp_path) == [record]
    assert path.name.startswith(record.date[:4]) and "vit-mu-16-cifar10-top1" in path.name


def test_a_record_knows_model_data_machine_and_moment() -> None:
    record = measured()
    assert (record.model, record.n, record.fingerprint) == ("ViT-mu/16", 6, IMAGES.fingerprint())
    assert record.versions["torch"] == torch.__version__ and record.versions["vitlab"] and record.versions["code"]
    assert record.hardware["device"] == "cpu" and record.hardware["threads"] == torch.get_num_threads()
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(record.date)
    assert datetime.timedelta(seconds=-1) < age < datetime.timedelta(minutes=1)
    assert record.seconds == 1.235


def test_value_and_spread_are_those_of_the_seeds() -> None:
    record = measured()
    assert record.value == 0.625 and record.spread == pytest.approx(0.25 / 2**0.5)  # n - 1
    assert measured(values=(0.5,), seeds=()).spread is None


def test_every_measurement_is_a_file_of_its_own(tmp_path: Path) -> None:
    first = write_record(tmp_path, measured(seconds=1.0))
    second = write_record(tmp_path, measured(seconds=2.0))
    content = first.read_bytes()
    assert first != second
    with pytest.raises(UsageError, match="exists already, and nothing saved is overwritten"):
        write_record(tmp_path, read_record(first))
    assert first.read_bytes() == content


def test_records_come_oldest_first(tmp_path: Path) -> None:
    dates = ["2026-03-01T00:00:00+00:00", "2025-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"]
    for date in dates:
        write_record(tmp_path / date[:4], measured(date=date))
    assert [record.date for record in read_records(tmp_path)] == sorted(dates)


def test_a_changed_number_is_noticed_wherever_it_stands(tmp_path: Path) -> None:
    table = record_to_dict(measured(interval=(0.25, 1.0)))
    path = write_record(tmp_path, measured(interval=(0.25, 1.0), date=table["date"]))
    text = path.read_text(encoding="utf-8")
    for old, new in (("0.75", "0.76"), ('"n": 6', '"n": 7'), ("cifar10", "cifar11"), ("größer", "grösser")):
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(FileProblem, match="its content is not what was written"):
            read_record(path)


def test_every_cut_of_a_record_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = write_record(tmp_path, measured())
    whole = path.read_bytes()
    for size in range(0, len(whole) - 2, 7):  # the last two bytes are the closing brace and a line end
        path.write_bytes(whole[:size])
        with pytest.raises(FileProblem, match="cannot be read as a record"):
            read_record(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "does not say which form it has"),
        ('{"a": 1}', "does not say which form it has"),
        ('{"schema": "vitlab-record-99"}', "'vitlab-record-99', and this version knows vitlab-record-1"),
        ('{"schema": "vitlab-record-1"}', "its content is not what was written"),
        ("{", "cannot be read as a record"),
        ('{"schema": NaN}', "its form is nan"),
        ("[" * 100_000, "cannot be read as a record"),
        ("\x00", "cannot be read as a record"),
    ],
)
def test_foreign_files_are_named_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(FileProblem, match=r"other\.json") as caught:
        read_records(tmp_path)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", -1),
        ("n", True),
        ("values", []),
        ("values", ["0.5"]),
        ("values", [0.5, 0.5, 0.5]),
        ("seeds", [0.5, 1]),
        ("interval", [1.0]),
        ("interval", [1.0, 0.5]),
        ("weights", "abc"),
        ("settings", []),
        ("date", "yesterday"),
        ("date", "2026-01-01T00:00:00"),
        ("model", None),
        ("extra", 1),
    ],
)
def test_a_sealed_file_of_the_wrong_form_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """Even one whose hash is right: a later version, or a program that means well."""
    import vitlab.evaluation.records as records

    table = {**record_to_dict(measured()), key: value}
    (tmp_path / "r.json").write_text(json.dumps({**table, "sha256": records._seal(table)}))
    with pytest.raises(FileProblem, match="not a record that vitlab can use"):
        read_record(tmp_path / "r.json")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    import vitlab.evaluation.records as records

    table = record_to_dict(measured())
    del table["fingerprint"]
    (tmp_path / "r.json").write_text(json.dumps({**table, "sha256": records._seal(table)}))
    with pytest.raises(FileProblem, match="key 'fingerprint' is missing"):
        read_record(tmp_path / "r.json")


def test_non_finite_numbers_make_no_record() -> None:
    for values in ((), (float("nan"), 0.5), (float("inf"), 0.5)):
        with pytest.raises(UsageError, match="needs finite numbers"):
            measured(values=values, seeds=())
    with pytest.raises(UsageError, match="one value for each seed"):
        measured(seeds=(1, 2, 3))


def test_the_hash_is_of_the_weights_alone() -> None:
    model, same = (create_model("ViT-mu/16", num_classes=2, image_size=16, seed=0) for _ in range(2))
    assert hash_weights(model) == hash_weights(same)
    with torch.no_grad():
        next(iter(same.parameters())).view(-1)[0].add_(1e-6)
    assert hash_weights(model) != hash_weights(same)
    assert hash_weights(model) != hash_weights(model.to(torch.bfloat16))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="is not a folder of records"):
        read_records(tmp_path / "nothing")
