"""The folder of a run: its files, its log, and whether a run that was stopped may go on in it.

`config.toml env.json split.csv metrics.jsonl metrics.csv checkpoints/ features/ bundle/ plots/ report.html log.txt`
"""

import csv
import dataclasses
import hashlib
import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, fsio
from vitlab.core.errors import FileProblem, UsageError, printable
from vitlab.data.dataset import some_of
from vitlab.models.spec import DROPS

CONFIG, ENVIRONMENT, SPLIT = "config.toml", "env.json", "split.csv"
METRICS, TABLE, LOG = "metrics.jsonl", "metrics.csv", "log.txt"
CHECKPOINTS, FEATURES, REPORT = "checkpoints", "features", "report.html"
BUNDLE, ADAPTER = "bundle", "adapter"
RUNS = "runs.json"  # in a folder of several runs, see `several.py`
# What a run's bits depend on besides config and data; another value is no fault, but it is said.
_SOFT = ("code", "torch", "threads", "device", "world")
# Keys that say how the work is shared out and when it is saved, not what is learned: a resumed run may have others.
_SHARED_OUT = {"train.micro_batch", "train.recompute", "train.sharded"}
_KEEPS_BITS = {"data.workers", "data.max_bad", "train.save_every", "train.save_async", "train.keep", "train.log"}
_CUTS = {"world", "train.micro_batch"}  # what decides who draws for which images
_CONFIG_HASH = "config_sha256"  # of the file itself, so that nobody changes it unseen
_SHOWN = 3  # lines of a difference


def start(
    folder: Path,
    config_toml: str,
    environment: Mapping[str, Any],
    split: str,
    said: Sequence[str],
    runs: Mapping[str, Any] | None = None,
) -> None:
    """A new run folder with what is known before the first step: there whole, or not at all.

    `said` opens the log, where a run that is killed before it could write it finds it again. `runs` is for several.
    """
    with fsio.new_folder(folder, manifest=False) as new:
        new.write_json(ENVIRONMENT, {**environment, _CONFIG_HASH: _hash(config_toml)})
        new.write(SPLIT, split)
        new.write(LOG, "".join(f"{printable(line)}\n" for line in said))
        if runs is not None:
            new.write_json(RUNS, dict(runs))
        new.write(CONFIG, config_toml)


def holds_several(folder: Path) -> bool:
    """Whether it is the folder of several runs. A `runs.json` alone may be anybody's."""
    return (folder / RUNS).is_file() and (folder / CONFIG).is_file()


def how_to_go_on(folder: Path, *more: str) -> str:
    """For who has stopped a run: a line that can be pasted. One of several goes on with the others."""
    whole = folder.parent if holds_several(folder.parent) else folder
    return "Go on with:  " + shlex.join(["vitlab", "train", "--resume", str(whole), *more])


def told_at_start(folder: Path, what: str) -> str:
    """What `env.json` says: the `command` that began the run, or the `folder` it was given in. Empty where it is not known."""
    try:
        return str(json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))[what])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def copies_at_start(folder: Path) -> list[list[str]]:
    """The images that the run kept in one part, because they show the same picture. None where `env.json` tells none: then
    other parts are noticed by their fingerprints."""
    try:
        return [
            list(map(str, keys)) for keys in json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))["copies"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def check_resume(
    folder: Path, config_toml: str, environment: Mapping[str, Any], split: str, spelled_out: Callable[[str], str]
) -> list[str]:
    """An error with the difference where config or data are not those of the run; a note where the machine is not.

    `spelled_out` writes a stored config with the keys of today: one that was added since has its default.
    """
    try:
        old_config = (folder / CONFIG).read_text(encoding="utf-8")
        old = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        data, soft = old["data"], {name: old[name] for name in _SOFT if name in old}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileProblem(f"{folder} is no run that can be resumed: {error}") from None
    if old.get(_CONFIG_HASH) not in (None, _hash(old_config)):
        raise UsageError(
            f"{folder / CONFIG} is not what the run began with",
            hint="Put it back as it was, or start a new run with it: `vitlab train --recipe FILE`.",
        )
    free = _SHARED_OUT | _KEEPS_BITS
    changed = {} if old_config == config_toml else _differences(spelled_out(old_config), config_toml)
    if lines := [f"{key}: {was} in the run, {now} now" for key, (was, now) in changed.items() if key not in free]:
        raise UsageError(f"the config is not that of {folder}:\n" + "\n".join(lines), hint="Start a new run for it.")
    now = environment["data"]
    if other := sorted(name for name in {*data, *now} if data.get(name) != now.get(name)):
        raise UsageError(
            f"the images or labels to {' and '.join(other)} on are not those that {folder} began with"
            + _difference(folder, split),
            hint="Put them back, or start a new run for them.",
        )
    if old.get("teacher") != environment.get("teacher", old.get("teacher")):
        raise UsageError(f"the teacher is not the one that {folder} began with", hint="Start a new run for it.")
    soft_now = {name: environment[name] for name in _SOFT}
    changed |= {name: (was, soft_now[name]) for name, was in soft.items() if soft_now[name] != was}
    dropping = any(map(config.parse_toml(config_toml, CONFIG)["model"].get, DROPS))
    notes: list[str] = []
    for name, (was, now) in changed.items():
        others = "dropout draws others" if dropping and name in _CUTS else "the last bits may differ"
        notes.append(f"{name} is {now} now and was {was}" + ("" if name in _KEEPS_BITS else f": {others}"))
    return notes


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(folder: Path, split: str) -> str:
    """Which lines of `split.csv` would be others now; nothing where that cannot be told."""
    try:
        was = set((folder / SPLIT).read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return ""
    now = set(split.splitlines())
    told = {"no longer there": sorted(was - now), "new": sorted(now - was)}
    return "".join(f"\n{what}: {some_of(lines, _SHOWN, '; ')}" for what, lines in told.items() if lines)


def _differences(old_toml: str, new_toml: str) -> dict[str, tuple[Any, Any]]:
    """`key.path`, and the value on each side; None where there is no such key."""
    old, new = (_flat(config.parse_toml(text, CONFIG)) for text in (old_toml, new_toml))
    keys = list(dict.fromkeys([*old, *new]))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for key, value in table.items():
        rows |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return rows


def read_log(folder: Path) -> str:
    """What was said before; nothing where the run was killed before it could be written."""
    path = folder / LOG
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def cut_metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    """The records up to `step`; later ones were of updates that a crash undid, and are taken out.

    So are those of step 0, of a head that is fitted at once: it writes them anew.
    """
    path = folder / METRICS
    kept = [record for record in _metrics(folder) if 0 < record["step"] <= step]
    if path.is_file():
        fsio.write_file(path, _lines(kept))
    return kept


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All that a run without steps has measured, at once; `write_notes` makes the table of it."""
    fsio.write_file(folder / METRICS, _lines(rows))


def _metrics(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    path = folder / METRICS
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # a crash can cut the last line short
    return rows


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_notes(folder: Path, records: Sequence[Any], log: str, *, every_record: bool) -> list[str]:
    """What a run has measured and said, also one that was stopped. Returns what could not be written: it costs no weights.

    `every_record` writes the records again that had found no room. A run without steps has none, and its rows on the disk.
    """
    rows = [dataclasses.asdict(record) for record in records] or _metrics(folder)
    files = {TABLE: as_csv(rows), LOG: log}
    if every_record:
        files[METRICS] = _lines(rows)
    failed: list[str] = []
    for name, text in files.items():
        try:
            fsio.write_file(folder / name, text)
        except FileProblem as problem:
            failed.append(problem.what)
    return failed


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return text.getvalue()
