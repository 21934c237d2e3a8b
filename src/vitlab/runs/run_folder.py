"""The folder of a run: its files, its log, and whether a run that was stopped may go on in it.

`config.toml env.json split.csv metrics.jsonl metrics.csv checkpoints/ bundle/ plots/ report.html log.txt`
"""

import csv
import dataclasses
import difflib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError

CONFIG, ENVIRONMENT, SPLIT = "config.toml", "env.json", "split.csv"
METRICS, TABLE, LOG = "metrics.jsonl", "metrics.csv", "log.txt"
CHECKPOINTS, BUNDLE, REPORT = "checkpoints", "bundle", "report.html"
# What a run's bits depend on besides config and data; another value is no fault, but it is said.
_SOFT = ("torch", "threads", "device", "world")


def start(folder: Path, config_toml: str, environment: Mapping[str, Any], split: str) -> None:
    """A new run folder with what is known before the first step."""
    fsio.make_folder(folder / CHECKPOINTS)
    fsio.write_json(folder / ENVIRONMENT, dict(environment))
    fsio.write_file(folder / SPLIT, split)
    fsio.write_file(folder / CONFIG, config_toml)  # last: with it, the folder is a run


def check_resume(folder: Path, config_toml: str, environment: Mapping[str, Any]) -> list[str]:
    """An error with the difference where config or data are not those of the run; a note where the machine is not."""
    try:
        old_config = (folder / CONFIG).read_text(encoding="utf-8")
        old = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        data, soft = old["data"], {name: old.get(name) for name in _SOFT}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileProblem(f"{folder} is no run that can be resumed: {error}") from None
    if old_config != config_toml:
        lines = difflib.unified_diff(
            old_config.splitlines(), config_toml.splitlines(), "the run", "now", lineterm="", n=0
        )
        changed = [line for line in lines if line[:1] in "+-" and not line.startswith(("+++", "---"))]
        raise UsageError(f"the config is not that of {folder}:\n" + "\n".join(changed), hint="Start a new run for it.")
    now = environment["data"]
    if other := sorted(name for name in {*data, *now} if data.get(name) != now.get(name)):
        raise UsageError(
            f"the images or labels to {' and '.join(other)} on are not those that {folder} began with",
            hint="Start a new run for them.",
        )
    return [
        f"{name} is {environment[name]} now and was {was}: the last bits may differ"
        for name, was in soft.items()
        if environment[name] != was
    ]


def read_log(folder: Path) -> str:
    """What was said before; nothing where the run was killed before it could be written."""
    path = folder / LOG
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def cut_metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    """The records up to `step`; later ones were of updates that a crash undid, and are taken out."""
    path = folder / METRICS
    kept: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                break  # a crash can cut the last line short
            if record["step"] <= step:
                kept.append(record)
        fsio.write_file(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def as_csv(records: Sequence[Any]) -> str:
    text = io.StringIO()
    if records:
        rows = csv.DictWriter(text, [field.name for field in dataclasses.fields(records[0])], lineterminator="\n")
        rows.writeheader()
        rows.writerows(dataclasses.asdict(record) for record in records)
    return text.getvalue()
