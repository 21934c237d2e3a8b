"""The folder of a run: its files, its log, and whether a run that was stopped may go on in it.

`config.toml env.json split.csv metrics.jsonl metrics.csv checkpoints/ features/ bundle/ plots/ report.html log.txt`
"""

import csv
import dataclasses
import hashlib
import io
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vitlab.core import config, fsio, reading
from vitlab.core.errors import FileProblem, UsageError, printable
from vitlab.data.dataset import some_of
from vitlab.models.spec import DROPOUT_FIELDS
from vitlab.training.loop import StepRecord

CONFIG, ENVIRONMENT, SPLIT = "config.toml", "env.json", "split.csv"
METRICS, TABLE, LOG = "metrics.jsonl", "metrics.csv", "log.txt"
CHECKPOINTS, FEATURES, REPORT = "checkpoints", "features", "report.html"
BUNDLE, ADAPTER = "bundle", "adapter"
RUNS = "runs.json"  # in a folder of several runs, see `several.py`
# What a run's bits depend on besides config and data; another value is no fault, but it is said.
_SOFT = ("code", "torch", "threads", "device", "world")
# Keys that say how the work is shared out and when it is saved, not what is learned: a resumed run may have others.
_SHARED_OUT = {"train.micro_batch", "train.recompute", "train.sharded"}
RESUME_SAFE_KEYS = {"data.workers", "data.max_bad", "train.save_every", "train.save_async", "train.keep", "train.log"}
_CUTS = {"world", "train.micro_batch"}  # what decides who draws for which images
# Files that never change, and where env.json has their SHA-256. Runs of earlier versions lack some.
_SEALS = {CONFIG: "config_sha256", SPLIT: "split_sha256", RUNS: "runs_sha256"}
_SLOWEST = 1e-9  # images per second, below which a record is damaged
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
    files = {SPLIT: split, CONFIG: config_toml} | ({} if runs is None else {RUNS: fsio.json_text(dict(runs))})
    with fsio.new_folder(folder, manifest=False) as new:
        new.write_json(ENVIRONMENT, {**environment, **{_SEALS[name]: _hash(text) for name, text in files.items()}})
        new.write(LOG, "".join(f"{printable(line)}\n" for line in said))
        for name, text in files.items():
            new.write(name, text)


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, also of one that has lost its config."""
    return (folder / CONFIG).exists() or ((folder / ENVIRONMENT).exists() and (folder / SPLIT).exists())


def holds_several(folder: Path) -> bool:
    """Whether it is the folder of several runs. A `runs.json` alone may be anybody's."""
    return (folder / RUNS).is_file() and (folder / CONFIG).is_file()


def resume_command(folder: Path, *more: str) -> str:
    """For who has stopped a run: a line that can be pasted. One of several goes on with the others."""
    whole = folder.parent if holds_several(folder.parent) else folder
    return "Resume with:  " + shlex.join(["vitlab", "train", "--resume", str(whole), *more])


def recorded_at_start(folder: Path, what: str) -> str:
    """What `env.json` says: the `command` that began the run, or the `folder` it was given in. Empty where it is not known."""
    try:
        value = _environment(folder).get(what)
    except FileProblem:
        return ""
    return value if isinstance(value, str) and value.isprintable() else ""


def read_sealed(folder: Path, name: str) -> str:
    """The text of a file that never changes, after it agreed with the hash in `env.json`."""
    path = folder / name
    try:
        text = reading.read_bytes(path).decode()
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is damaged: byte {error.start} is not UTF-8 text") from None
    if _environment(folder).get(_SEALS[name]) not in (None, _hash(text)):
        mend = f"or let `vitlab train --resume {shlex.quote(str(folder))}` write it anew"
        other = "or start a new run with it: `vitlab train --recipe FILE`"
        hint = f"Put it back as it was, {mend if name == SPLIT else other}."
        raise UsageError(f"{path} is not what the run began with", hint=hint)
    return text


def read_config(folder: Path) -> config.Table:
    """The recipe that the run began with."""
    return config.parse_toml(read_sealed(folder, CONFIG), str(folder / CONFIG))


def _environment(folder: Path) -> dict[str, Any]:
    """What `env.json` has; nothing where there is none."""
    path = folder / ENVIRONMENT
    try:
        table = reading.read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(table, dict):
        raise FileProblem(f"{path} is damaged: it is not a table of keys")
    return cast(dict[str, Any], table)


def copies_at_start(folder: Path) -> list[list[str]]:
    """The images that the run kept in one part, because they show the same picture. None where `env.json` tells none: then
    other parts are noticed by their fingerprints."""
    copies = _environment(folder).get("copies")
    groups = [keys for keys in copies if isinstance(keys, list)] if isinstance(copies, list) else []
    return [[str(key) for key in keys] for keys in groups]


def check_resume(
    folder: Path, config_toml: str, environment: Mapping[str, Any], split: str, spelled_out: Callable[[str], str]
) -> list[str]:
    """An error with the difference where config or data are not those of the run; a note where the machine is not.

    `spelled_out` writes a stored config with the keys of today: one that was added since has its default.
    """
    old_config, old = read_sealed(folder, CONFIG), _environment(folder)
    data, soft = old.get("data"), {name: old[name] for name in _SOFT if name in old}
    if not isinstance(data, dict):
        raise FileProblem(f"{folder / ENVIRONMENT} is damaged: it does not say what data the run began with")
    free = _SHARED_OUT | RESUME_SAFE_KEYS
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
    dropping = any(map(config.parse_toml(config_toml, CONFIG)["model"].get, DROPOUT_FIELDS))
    notes: list[str] = []
    for name, (was, now) in changed.items():
        others = "dropout draws others" if dropping and name in _CUTS else "the last bits may differ"
        notes.append(f"{name} is {now} now and was {was}" + ("" if name in RESUME_SAFE_KEYS else f": {others}"))
    return notes


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(folder: Path, split: str) -> str:
    """Which lines of `split.csv` would be others now; nothing where that cannot be told."""
    try:
        was = set(reading.read_text(folder / SPLIT).splitlines())
    except (OSError, FileProblem):
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


def mend_split(folder: Path, split: str) -> list[str]:
    """Puts `split.csv` back where it was changed: it follows from the data, which was compared. Says so."""
    try:
        if reading.read_bytes(folder / SPLIT) == split.encode():
            return []
    except (OSError, FileProblem):
        pass
    fsio.write_file(folder / SPLIT, split)
    return [f"{SPLIT} was not what the run began with: written anew"]


def read_log(folder: Path) -> str:
    """What was said before; nothing where the run was killed before it could be written. Damaged text is marked, not lost."""
    try:
        return reading.read_bytes(folder / LOG).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise FileProblem(f"{folder / LOG} cannot be read: {error.strerror or error}") from None


def cut_metrics(folder: Path, step: int) -> list[StepRecord]:
    """The records up to `step`; later ones were of updates that a crash undid, and are taken out.

    So are damaged ones, and those of a linear probe: it writes them anew.
    """
    path = folder / METRICS
    try:
        lines = reading.read_bytes(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    found = (_record(line) for line in lines)
    kept = [record for record in found if record is not None and 0 < record.step <= step]
    fsio.write_file(path, _lines([dataclasses.asdict(record) for record in kept]))
    return kept


def _record(line: str) -> StepRecord | None:
    """None for a line that a crash cut short, or damaged."""
    try:
        row = json.loads(line)
        record = config.from_dict(StepRecord, row)
    except (ValueError, RecursionError):  # of which UsageError is one
        return None
    numbers = [value for value in dataclasses.astuple(record) if value is not None]
    return StepRecord(**row) if all(map(math.isfinite, numbers)) and record.images_per_second > _SLOWEST else None


def curve_line(record: StepRecord) -> bytes:
    """What a record adds to the hash in the checkpoint: all but what the clock decides, which no two runs have in common."""
    return f"{record.step} {record.loss!r} {record.lr!r} {record.grad_norm!r}\n".encode()


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All that a run without steps has measured, at once."""
    fsio.write_file(folder / METRICS, _lines(rows))
    fsio.write_file(folder / TABLE, as_csv(rows))


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_notes(folder: Path, records: Sequence[StepRecord], log: str, *, every_record: bool) -> list[str]:
    """What a run has measured and said, also one that was stopped. Returns what could not be written: it costs no weights.

    `every_record` writes the records again that had found no room. A run without steps has none, and its rows on the disk.
    """
    rows = [dataclasses.asdict(record) for record in records]
    files = {LOG: log} | ({TABLE: as_csv(rows)} if rows else {}) | ({METRICS: _lines(rows)} if every_record else {})
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
