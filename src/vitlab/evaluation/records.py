"""One measurement, one JSON file: what was measured on what, with which settings, on which machine, by which command.

Owns the form of a record and its check. A record is never changed: measuring again writes another file. Each carries the
SHA-256 of its own content, so that a number that was edited afterwards is not taken for a measured one.
"""

import dataclasses
import datetime
import hashlib
import json
import math
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from vitlab.core import config, fsio
from vitlab.core.environment import code_fingerprint, describe_machine, package_version
from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.core.reading import read_text
from vitlab.data.dataset import Dataset
from vitlab.data.parts import test_part
from vitlab.data.sources.named import find_named
from vitlab.models.build import Model
from vitlab.models.names import format_name
from vitlab.weights.hashing import hash_weights

SCHEMA = "vitlab-record-1"
CELLS = "cells"  # a folder of records of another form: those of studies
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEAL = 8  # hex digits of the content's hash in a file name: enough to tell the records of one second apart
_NAME = 60  # characters of a file name before the hash; a data set may be a long path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Accuracies are fractions. `values` has one number for each of `seeds`, or a single one."""

    model: str  # the paper's name: ViT-L/16
    weights: str  # SHA-256 of what was measured, see `hash_weights`
    data: str  # as it was named
    fingerprint: str  # SHA-256 of the images' names and labels
    part: str
    n: int  # images
    measure: str  # top1, few-shot-5, ...
    values: tuple[float, ...]
    seeds: tuple[int, ...] = ()
    interval: tuple[float, float] | None = None
    settings: Mapping[str, Any]
    pretrained_on: str = ""
    recipe: str = ""  # of the fine-tuning
    seconds: float  # of the whole measurement; vectors that were kept from before cost none
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    date: str  # ISO 8601, UTC
    command: str

    def __post_init__(self) -> None:
        numbers = [*self.values, *(self.interval or ()), self.seconds]
        if not self.values or not all(map(math.isfinite, numbers)):
            raise UsageError(f"a record needs finite numbers, and {self.measure} is {list(self.values)}")
        if len(self.seeds) not in (0, len(self.values)):
            raise UsageError(f"a record has one value for each seed, not {len(self.values)} for {len(self.seeds)}")
        if self.interval is not None and self.interval[0] > self.interval[1]:
            raise UsageError(f"an interval goes from low to high, not from {self.interval[0]} to {self.interval[1]}")
        if self.n < 0 or not all(map(_SHA256.fullmatch, (self.weights, self.fingerprint))):
            raise UsageError("a record has a number of images, and the SHA-256 of weights and data")
        if datetime.datetime.fromisoformat(self.date).tzinfo is None:
            raise UsageError(f"a record says in which time zone its date is, and {self.date} does not")

    @property
    def value(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds, of n - 1; None for a single run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """Who was measured on what, and how: what all records of one measurement have in common."""

    model: Model
    dataset: Dataset
    data: str
    part: str
    settings: Mapping[str, Any]
    device: torch.device
    seconds: float
    command: str
    pretrained_on: str = ""
    recipe: str = ""
    weights: str | None = None  # their SHA-256, where it is known already


def new_record(
    subject: Subject,
    measure: str,
    values: Sequence[float],
    *,
    seeds: Sequence[int] = (),
    interval: tuple[float, float] | None = None,
    n: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Record:
    """A record of now and of this machine; `settings` are added to those of the subject."""
    return Record(
        model=format_name(subject.model.spec),
        weights=subject.weights or hash_weights(subject.model),
        data=subject.data,
        fingerprint=subject.dataset.fingerprint(),
        part=subject.part,
        n=len(subject.dataset) if n is None else n,
        measure=measure,
        values=tuple(float(value) for value in values),
        seeds=tuple(seeds),
        interval=interval,
        settings={**subject.settings, **(settings or {})},
        pretrained_on=subject.pretrained_on,
        recipe=subject.recipe,
        seconds=round(subject.seconds, 3),  # milliseconds: no clock here means more
        hardware=describe_hardware(subject.device),
        versions=describe_versions(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=subject.command,
    )


def describe_hardware(device: torch.device) -> dict[str, Any]:
    machine = describe_machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine["processor"]
    return {
        "device": device.type,
        "name": name,
        "cpus": machine["cpus"],
        "threads": torch.get_num_threads(),
        "system": machine["system"],
    }


def describe_versions() -> dict[str, Any]:
    """`code` tells apart what one version number covers, and what runs without being installed."""
    return {
        "vitlab": package_version("vitlab"),
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# --- files ------------------------------------------------------------------------------------------------------------


def write_record(folder: Path, record: Record) -> Path:
    """Puts the record into a new file of `folder`, named after when and what."""
    table = record_to_dict(record)
    seal = _seal(table)
    when = re.sub(r"[^0-9]", "", record.date.partition("+")[0])
    words = re.sub(r"[^a-z0-9]+", "-", f"{record.model} {record.data} {record.measure}".casefold()).strip("-")
    path = fsio.make_folder(folder) / f"{when}-{words[:_NAME]}-{seal[:_SEAL]}.json"
    fsio.write_new_file(path, fsio.json_text({**table, "sha256": seal}))
    return path


def read_records(folder: Path) -> list[Record]:
    """The records in a folder and below, oldest first. A file that is none, or not as it was written, is an error."""
    if not folder.is_dir():
        raise FileProblem(f"{folder} is not a folder of records")
    return sorted((read_record(path) for path in _files(folder)), key=lambda record: record.date)


def _files(folder: Path) -> Iterator[Path]:
    paths = (path for path in sorted(folder.rglob("*.json")) if path.is_file())
    return (path for path in paths if path.parent.name != CELLS)


def read_record(path: Path) -> Record:
    """One record, checked."""
    try:
        table: Any = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise FileProblem(f"{path} cannot be read as a record: {error}") from None
    try:
        return _checked(table)
    except (UsageError, ValueError, TypeError) as error:
        what = error.what if isinstance(error, UsageError) else str(error)
        raise FileProblem(f"{path} is not a record that vitlab can use: {what}", hint="Measure again.") from None


def record_to_dict(record: Record) -> dict[str, Any]:
    """Plain values, as the file has them but for its own hash."""
    return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(record), allow_nan=False))}


def _seal(table: Mapping[str, Any]) -> str:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _checked(table: Any) -> Record:
    if not isinstance(table, dict) or "schema" not in table:
        raise ValueError("it does not say which form it has")
    given = cast(dict[str, Any], table)
    if given["schema"] != SCHEMA:
        raise ValueError(f"its form is {given['schema']!r}, and this version knows {SCHEMA}")
    seal = given.pop("sha256", None)
    if seal != _seal(given):
        raise ValueError("its content is not what was written; the SHA-256 differs")
    del given["schema"]
    return config.from_dict(Record, given)


RECORDS = "records"  # the folder of them, in a run or an evaluation
# What the weights behind a tag of the catalogue were first trained on, in the words of the published tables.
_PRETRAINING = {
    **dict.fromkeys(("i21k", "i21k-i1k-384", "i21k-i1k-224", "bit-m", "bit-m-i1k"), "imagenet21k"),
    **dict.fromkeys(("augreg-i21k", "augreg-i21k-i1k-384", "augreg-i21k-i1k-224"), "imagenet21k-augreg"),
    "bit-s": "imagenet",
}


def pretraining_of(start: str) -> str:
    """What the weights of that catalogue name were first trained on; empty for a file or a run, which does not say it."""
    return _PRETRAINING.get(start.partition("@")[2], "")


def part_to_test(data: str) -> str:
    """`val` is what a set without `test` is tested on, as ImageNet is everywhere."""
    try:
        parts = find_named(data).parts
    except UnknownName:
        return "test"
    return test_part(parts) or "test"
