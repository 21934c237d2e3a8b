"""The folder of a run: its files, what it knows of itself (`run.json`), and whether a stopped run may be resumed in it.

`config.toml env.json run.json split.csv metrics.jsonl metrics.csv checkpoints/ features/ bundle/ plots/ report.html log.txt`
`env.json` and `log.txt` are written for people, and never read back.
"""

import csv
import dataclasses
import hashlib
import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vitlab.core import config, fsio, reading
from vitlab.core.command import command_line
from vitlab.core.environment import describe_machine
from vitlab.core.errors import FileProblem, UsageError, printable
from vitlab.data.dataset import some_of
from vitlab.models.families import FAMILIES
from vitlab.training.loop import StepRecord

CONFIG, RUN, ENVIRONMENT, SPLIT = "config.toml", "run.json", "env.json", "split.csv"
METRICS, TABLE, LOG = "metrics.jsonl", "metrics.csv", "log.txt"
CHECKPOINTS, FEATURES, REPORT = "checkpoints", "features", "report.html"
BUNDLE, ADAPTER = "bundle", "adapter"
NOISY_STUDENT = "noisy_student.json"  # beside the runs of `vitlab noisy-student`, which are resumed together
FORMAT = 2  # of the folder; raised when an older vitlab could no longer resume in it
# Keys that decide how the work is divided and when it is saved, not what is learned: a resumed run may have others.
_DIVISION_KEYS = {"train.micro_batch", "train.recompute", "train.sharded"}
RESUME_SAFE_KEYS = {"data.workers", "data.max_bad", "train.save_every", "train.save_async", "train.keep", "train.log"}
_CHANGES_DROPOUT = {"world", "train.micro_batch"}  # what decides which process draws for which images
_SLOWEST = 1e-9  # images per second, below which a record is damaged
_SHOWN = 3  # lines of a difference
_PART_WORDS = {"train": "training", "val": "validation"}  # the names of parts as adjectives


@dataclasses.dataclass
class RunFile:
    """What a run knows of itself, besides its config: `run.json`."""

    command: str  # that began it
    cwd: str  # where it was given, from which relative paths count
    recipe: str = ""  # the name after --recipe; empty where one was chosen
    repeat: str = ""  # the command that trains it again, into a new folder; empty where there is none
    reason: str = ""  # why this recipe
    counts: dict[str, int] = dataclasses.field(default_factory=dict[str, int])  # see `resolve.count_images`
    notes: list[str] = dataclasses.field(default_factory=list[str])
    data_warnings: list[str] = dataclasses.field(default_factory=list[str])  # known before the first step
    # While it ran, by kind: each is given once
    warnings: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    data: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # the fingerprint of each part
    copies: list[list[str]] = dataclasses.field(default_factory=list[list[str]])
    teacher: str = ""  # the hash of its weights
    start: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # origin and licence of the start weights
    runs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # seeds or sweep, in a folder of several
    sha256: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # of what never changes
    # What the last bits depend on besides config and data: code, torch, threads, device, world.
    versions: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    progress: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # step, steps, finished

    @property
    def all_warnings(self) -> list[str]:
        return [*self.data_warnings, *self.warnings.values()]

    def write(self, folder: Path) -> None:
        fsio.write_json(folder / RUN, {"format": FORMAT, **dataclasses.asdict(self)})


def start(folder: Path, config_toml: str, split: str, run: RunFile, opening: Sequence[str]) -> None:
    """A new run folder with what is known before the first step: there whole, or not at all. `opening` begins the log."""
    files = {SPLIT: split, CONFIG: config_toml}
    run.sha256 = {name: _hash(text) for name, text in files.items()} | {"runs": _hash(json.dumps(run.runs))}
    with fsio.new_folder(folder, manifest=False) as new:
        new.write_json(ENVIRONMENT, {"command": run.command, **run.versions, **describe_machine()})
        new.write_json(RUN, {"format": FORMAT, **dataclasses.asdict(run)})
        new.write(LOG, "".join(f"{printable(line)}\n" for line in opening))
        for name, text in files.items():
            new.write(name, text)


def next_free(verb: str) -> Path:
    """The first of `runs/VERB-1`, `runs/VERB-2`, ... that is not taken."""
    names = (Path("runs") / f"{verb}-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, also of one that has lost its config."""
    return (folder / CONFIG).exists() or ((folder / RUN).exists() and (folder / SPLIT).exists())


def read_run(folder: Path) -> RunFile:
    """What the run in `folder` knows of itself; an error where that cannot be read, or is of another format."""
    path = folder / RUN
    try:
        table = reading.read_json(path)
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {RUN}: it is damaged, or not a run", hint=_without_run(folder)) from None
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    if not isinstance(table, dict):
        raise FileProblem(f"{path} is damaged: it is not a table of keys")
    table = cast(dict[str, Any], table)
    found = table.pop("format", None)
    if type(found) is int and found != FORMAT:
        what = f"{path} has run format {found}; this version reads {FORMAT}"
        raise UsageError(what, hint=_without_run(folder))
    usual = dataclasses.asdict(RunFile("", ""))
    if (
        found != FORMAT
        or table.keys() != usual.keys()
        or any(type(value) is not type(usual[key]) for key, value in table.items())
    ):
        raise FileProblem(f"{path} is damaged: it has missing, unknown or mistyped keys")
    if not all(type(count) is int for count in table["counts"].values()):
        raise FileProblem(f"{path} is damaged: 'counts' holds something other than whole numbers")
    for key in ("warnings", "data", "sha256"):
        if not all(isinstance(value, str) for value in table[key].values()):
            raise FileProblem(f"{path} is damaged: '{key}' holds something other than text")
    if not all(isinstance(keys, list) and all(isinstance(key, str) for key in keys) for keys in table["copies"]):
        raise FileProblem(f"{path} is damaged: 'copies' holds something other than lists of names")
    if table["sha256"].get("runs") != _hash(json.dumps(table["runs"])):
        raise FileProblem(f"{path} is damaged: it does not say which runs there are")
    for key in ("notes", "data_warnings"):
        table[key] = [str(line) for line in table[key]]
    return RunFile(**table)


def _without_run(folder: Path) -> str:
    """What remains where `run.json` cannot be used: a model, of which nobody knows which images it has learnt."""
    bundle = folder / BUNDLE
    return f"Start a new run{f'. Its model works from another folder: copy {bundle}' if bundle.is_dir() else ''}."


def began_in(folder: Path) -> str:
    """The folder that the run's command was given in; empty where that is not known."""
    try:
        cwd = read_run(folder).cwd
    except (FileProblem, UsageError):
        return ""
    return cwd if cwd.isprintable() else ""


def resume_command(folder: Path, override: str | None = None) -> str:
    """For whoever has stopped a run: a line that can be pasted. One of several is resumed with the others."""
    outer = outermost(folder)
    verb = "noisy-student" if (outer / NOISY_STUDENT).is_file() else "train"
    return "Resume with:  " + command_line(verb, options={"resume": outer, "set": override})


def outermost(folder: Path) -> Path:
    """The folder of several runs that `folder` is one of; else itself."""
    if (folder.parent / NOISY_STUDENT).is_file():
        return folder.parent
    try:
        return folder.parent if read_run(folder.parent).runs else folder
    except (UsageError, FileProblem):
        return folder


def read_sealed(folder: Path, name: str) -> str:
    """The text of a file that never changes, after it agreed with its hash in `run.json`."""
    path = folder / name
    try:
        text = reading.read_bytes(path).decode()
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FileProblem(f"{path} is damaged: byte {error.start} is not UTF-8 text") from None
    if read_run(folder).sha256.get(name) != _hash(text):
        rewrite = f"or let `{command_line('train', options={'resume': folder})}` write it anew"
        other = "or start a new run with it: `vitlab train --recipe FILE`"
        hint = f"Put it back as it was, {rewrite if name == SPLIT else other}."
        raise UsageError(f"{path} was changed after the run started", hint=hint)
    return text


def read_config(folder: Path) -> config.Table:
    """The recipe that the run began with."""
    return config.parse_toml(read_sealed(folder, CONFIG), str(folder / CONFIG))


def check_resume(folder: Path, old_config: str, config_toml: str, now: RunFile, split: str) -> list[str]:
    """An error with the difference where config or data are not those of the run; a note where the machine is not.

    `old_config` is the stored one with the keys of today: one that was added since has its default.
    """
    begun = read_run(folder)
    changed = {} if old_config == config_toml else _differences(old_config, config_toml)
    free = _DIVISION_KEYS | RESUME_SAFE_KEYS
    if lines := [f"{key}: {was} in the run, {is_now} now" for key, (was, is_now) in changed.items() if key not in free]:
        raise UsageError(
            f"the config differs from that of {folder}:\n" + "\n".join(lines), hint="Start a new run for it."
        )
    if other := sorted(name for name in {*begun.data, *now.data} if begun.data.get(name) != now.data.get(name)):
        names = ", ".join(_PART_WORDS.get(name, name.replace("also-", "data.also ")) for name in other)
        raise UsageError(
            f"the {names} images or labels changed since {folder} started{_difference(folder, split)}",
            hint="Put them back, or start a new run for them.",
        )
    if now.teacher and begun.teacher != now.teacher:
        raise UsageError(f"the teacher is not the one that {folder} started with", hint="Start a new run for it.")
    was_on, is_on = begun.versions, now.versions
    changed |= {name: (was_on.get(name), value) for name, value in is_on.items() if was_on.get(name) != value}
    model = config.parse_toml(config_toml, CONFIG)["model"]
    dropping = any(model.get(field) for family in FAMILIES.values() for field in family.dropout_fields)
    notes: list[str] = []
    for name, (was, is_now) in changed.items():
        effect = "dropout draws others" if dropping and name in _CHANGES_DROPOUT else "the last bits may differ"
        notes.append(f"{name} is {is_now} now and was {was}" + ("" if name in RESUME_SAFE_KEYS else f": {effect}"))
    return notes


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(folder: Path, split: str) -> str:
    """Which lines of `split.csv` would be others now; nothing where that cannot be found out."""
    try:
        was = set(reading.read_text(folder / SPLIT).splitlines())
    except (OSError, FileProblem):
        return ""
    now = set(split.splitlines())
    rows = {"no longer there": sorted(was - now), "new": sorted(now - was)}
    return "".join(f"\n{what}: {some_of(lines, _SHOWN, '; ')}" for what, lines in rows.items() if lines)


def _differences(old_toml: str, new_toml: str) -> dict[str, tuple[Any, Any]]:
    """`key.path`, and the value on each side; None where there is no such key."""
    old, new = (config.flat(config.parse_toml(text, CONFIG)) for text in (old_toml, new_toml))
    keys = list(dict.fromkeys([*old, *new]))
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def repair_split(folder: Path, split: str) -> list[str]:
    """Puts `split.csv` back where it was changed: it follows from the data, which was compared. Says so."""
    try:
        if reading.read_bytes(folder / SPLIT) == split.encode():
            return []
    except (OSError, FileProblem):
        pass
    fsio.write_file(folder / SPLIT, split)
    return [f"{SPLIT} was changed after the run started: written again"]


# --- what a run has measured and logged ------------------------------------------------------------------------------


def cut_metrics(folder: Path, step: int) -> list[StepRecord]:
    """The records up to `step`; later ones were of updates that a crash undid, and are taken out, as damaged ones are."""
    try:
        found = read_metrics(folder)
    except FileNotFoundError:
        return []
    kept = [record for record in found if 0 < record.step <= step]
    fsio.write_file(folder / METRICS, _lines([dataclasses.asdict(record) for record in kept]))
    return kept


def read_metrics(folder: Path) -> list[StepRecord]:
    """The records of all steps, without damaged ones. A linear probe has none."""
    path = folder / METRICS
    try:
        lines = reading.read_bytes(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileProblem(f"{path} cannot be read: {error.strerror or error}") from None
    return [record for line in lines if (record := _record(line)) is not None]


def _record(line: str) -> StepRecord | None:
    """None for a line that a crash cut short, or damaged."""
    try:
        record = config.from_dict(StepRecord, json.loads(line))
        finite = all(math.isfinite(value) for value in dataclasses.astuple(record) if value is not None)
    except (ValueError, RecursionError, OverflowError):  # UsageError is of the first; the last: a step beyond any float
        return None
    return record if finite and record.images_per_second > _SLOWEST else None


def curve_line(record: StepRecord) -> bytes:
    """What a record adds to the hash in the checkpoint: all but what the clock decides, which no two runs have in common."""
    return f"{record.step} {record.loss!r} {record.lr!r} {record.grad_norm!r}\n".encode()


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All that a run without steps has measured, at once."""
    fsio.write_file(folder / METRICS, _lines(rows))
    fsio.write_file(folder / TABLE, as_csv(rows))


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_notes(
    folder: Path, run: RunFile, records: Sequence[StepRecord], lines: Sequence[str], *, every_record: bool
) -> list[str]:
    """What a run has measured and logged, also one that was stopped. Returns what could not be written: it costs no weights.

    `every_record` writes the records again that had found no room. A run without steps has none, and its rows on the disk.
    """
    rows = [dataclasses.asdict(record) for record in records]
    files = ({TABLE: as_csv(rows)} if rows else {}) | ({METRICS: _lines(rows)} if every_record else {})
    writes = [lambda name=name, text=text: fsio.write_file(folder / name, text) for name, text in files.items()]
    failed: list[str] = []
    for write in (*writes, lambda: run.write(folder), lambda: fsio.append_line(folder / LOG, "\n".join(lines))):
        try:
            write()
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
