"""What a run of a study has measured, as one sealed JSON file. Loads no torch.

Named after the run, so that a run has one record whoever did it, and a report needs nothing else. Each carries the SHA-256 of
its own content: a number that was edited afterwards is not taken for a measured one.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from vitlab.core import config, fsio, reading
from vitlab.core.errors import FileProblem, UsageError, require

SCHEMA = "vitlab-cell-1"
RECORDS, CELLS = "records", "cells"  # records/cells/KEY.json, below the folder of a study
_MOST_BYTES = 2**20
_AGAIN = "Remove it; `vitlab study run` measures it again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellRecord:
    """One finished run. Accuracies in `numbers` are fractions."""

    key: str
    verb: str
    model: str  # by name
    data: str
    seed: int
    numbers: Mapping[str, float]  # top1, loss, ...: whatever the verb measures
    flops: float  # of training, by formula: 6 per multiply-add and image; 0 where nothing was trained
    seconds: float  # of a training run with the steps of all tries, of others with those of the last
    workers: int  # runs that shared the machine: with more than one, seconds compare with those of no other machine
    curve: tuple[tuple[float, float], ...] = ()  # (step, loss), thinned
    command: str
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]
    date: str
    source: str = ""  # where it was not measured by `vitlab study run`: how it came here

    def __post_init__(self) -> None:
        require(all(map(math.isfinite, (*self.numbers.values(), self.flops, self.seconds))), "numbers must be finite")


def record_path(folder: Path, key: str) -> Path:
    """Where the record of a run lies, below the folder of a study."""
    return folder / RECORDS / CELLS / f"{key}.json"


def write_cell(folder: Path, record: CellRecord) -> Path:
    """Publish a record. Where another worker was faster, its record stays, and this one is dropped."""
    path = record_path(folder, record.key)
    fsio.make_folder(path.parent)
    table = {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(record), allow_nan=False))}
    try:
        fsio.write_new_file(path, _text({**table, "sha256": _checksum(table)}))
    except fsio.Taken:
        read_cell(path)
    return path


def read_cells(folder: Path) -> dict[str, CellRecord]:
    """The records in a folder and below, by key. A file that is not as it was written is an error."""
    places: dict[str, Path] = {}
    records: dict[str, CellRecord] = {}
    for path in sorted(path for path in folder.rglob("*.json") if path.parent.name == CELLS and path.is_file()):
        record = read_cell(path)
        if records.setdefault(record.key, record) != record:  # folders of two machines that both ran it
            hint = "Remove one of them: a run counts once."
            raise FileProblem(f"{places[record.key]} and {path} are different records of one run", hint=hint)
        places.setdefault(record.key, path)
    return records


def read_cell(path: Path) -> CellRecord:
    try:
        table = reading.read_json(path, _MOST_BYTES)
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    except FileProblem as error:
        raise FileProblem(error.what, hint=_AGAIN) from None
    given = cast(dict[str, Any], table) if isinstance(table, dict) else {}
    checksum = given.pop("sha256", None)
    if given.get("schema") != SCHEMA or checksum != _checksum(given):
        raise FileProblem(f"{path} is not a record as vitlab wrote it: its SHA-256 differs", hint=_AGAIN)
    del given["schema"]
    if path.stem != given.get("key"):
        raise FileProblem(f"{path} is the record of another run, {given.get('key')}", hint="Remove it, or name it so.")
    try:
        return config.from_dict(CellRecord, given)
    except (UsageError, ValueError) as error:
        raise FileProblem(f"{path} is not a record that vitlab can use: {error}") from None


def _text(table: Mapping[str, Any]) -> str:
    """A line for each key: a curve of sixty points would fill three hundred."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _checksum(table: Mapping[str, Any]) -> str:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
