"""`vitlab study run`: start workers, show how far they are, and report what came out.

The runs are done by workers in processes of their own, so that one that dies takes no other with it. Stopped anywhere, the same
command resumes: what has a record is not done again.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import config, fsio, reading
from vitlab.core.command import command_line
from vitlab.core.console import Console, seconds_left
from vitlab.core.environment import usable_cores
from vitlab.core.errors import FileProblem, UsageError, VitlabError, require
from vitlab.core.planned import stop_if_dry_run
from vitlab.core.signals import Stopped
from vitlab.options.option import command_of, takes
from vitlab.options.study_options import StudyRunOptions
from vitlab.studies.cell_records import CellRecord, record_path
from vitlab.studies.conditions import number_of
from vitlab.studies.grid import StudyRun, list_cells, list_runs
from vitlab.studies.leases import LEASES, MOST_BEGINNINGS, Leases
from vitlab.studies.live import LiveTable
from vitlab.studies.outcome import Outcome, find_outcome, lacks_measure
from vitlab.studies.study import Scale, SpeedRule, Study, count_cells, first_seeds
from vitlab.studies.study_file import read_study
from vitlab.studies.study_report import outcome_lines, outcome_to_dict, write_study
from vitlab.studies.units import is_share, measure_label, percent_unit
from vitlab.studies.worker import FAILURES, finished
from vitlab.training.recipe import merged, read_recipe, recipe_from_dict, with_changes

_GPU_WORKERS = 4  # small runs leave a GPU half idle, and each spends seconds on loading and compiling beside it
_LOOK_S = 0.5  # between looks at what has been finished
_STOP_S = 60.0  # for a worker to save its step before it is killed
_CLASSES = 2  # any number of them: what is checked before the data are open depends on none


@dataclasses.dataclass(frozen=True)
class StudyRunResult:
    """What `vitlab study run --json` prints."""

    folder: Path
    reports: dict[str, Path]  # by study
    outcomes: list[Outcome] = dataclasses.field(repr=False)
    runs: int
    done_before: int
    failed: dict[str, str]  # why, by what the run is for: `positions: none, stem, seed 0`
    seconds: float

    @property
    def exit_code(self) -> int:
        """Of `vitlab study run`."""
        return 1 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "reports": {name: str(path) for name, path in self.reports.items()},
            "studies": [outcome_to_dict(outcome) for outcome in self.outcomes],
            "runs": self.runs,
            "done_before": self.done_before,
            "failed": self.failed,
            "seconds": self.seconds,
        }

    def sentences(self) -> list[str]:
        lines = [line for outcome in self.outcomes for line in (*outcome_lines(outcome), "")]
        lines += [f"Failed: {name}: {why}" for name, why in self.failed.items()]
        before = f", {self.done_before} done before" if self.done_before else ""
        lines.append(f"{self.runs} runs{before}; took {self.seconds:.0f} s.")
        return [*lines, *(f"Report: {path}" for path in self.reports.values())]


@takes(StudyRunOptions)
def run_study(options: StudyRunOptions) -> StudyRunResult:
    """Run a study: every cell of its grid that has no record yet, several at a time; then its report.

    Several calls may work in one folder at once, on one machine or on several that share it: no run counts twice.
    """
    started, folder = time.monotonic(), Path(options.out)
    names = [options.name] if isinstance(options.name, str) else list(options.name)
    if not names:
        raise UsageError("give the name of a study", hint="See `vitlab study list`.")
    if options.workers is not None and options.workers < 1:
        raise UsageError(f"--workers must be at least 1, not {options.workers}")
    studies = [(study := read_study(name), first_seeds(study.at(options.scale), options.seeds)) for name in names]
    alike = [study.name for study, _ in studies if [one.name for one, _ in studies].count(study.name) > 1]
    require(
        not alike,
        f"two studies are called {alike[0] if alike else ''}, and each needs a folder of its own",
        "Rename a file.",
    )
    runs = list_runs(studies)
    before = finished(folder, runs)
    title = _names(studies)
    for run in runs:
        _require_runnable(run, title[run.key])
    stop_if_dry_run(options.dry_run, _describe(studies, runs, before, folder))
    fsio.make_folder(folder)
    console = Console(quiet=options.quiet)
    for study, scale in studies:
        console.say(
            " ".join(filter(None, (f"{study.title}, {scale.name}: {scale.about}", _duration_note(scale, options))))
        )
    workers = _Workers(folder, names, options)
    try:
        if len(before) < len(runs):
            workers.start([run for run in runs if run.key not in before])
        _watch(workers, studies, runs, title, console)
    except Stopped as stopped:
        done = f"{sum(record_path(folder, run.key).exists() for run in runs)} of {len(runs)} runs are done."
        stopped.advice = f"{done} Resume with:  {command_of('study run', options)}"
        raise
    finally:
        workers.stop()
    records = finished(folder, runs)
    failed = _failures(folder, [run for run in runs if run.key not in records], title)
    outcomes = [find_outcome(study, scale, records) for study, scale in studies]
    reports = {
        outcome.study.name: write_study(outcome, folder, _repeat(name, options))
        for name, outcome in zip(names, outcomes, strict=True)
    }
    if not records and failed:
        name, why = next(iter(failed.items()))
        raise VitlabError(f"every run failed; the first is {name}: {why}")
    return StudyRunResult(
        folder, reports, outcomes, len(runs), len(before), failed, round(time.monotonic() - started, 1)
    )


def _repeat(name: str, options: StudyRunOptions) -> str:
    """The command of one study, without what changes no number: the same records give the same report."""
    elsewhere = None if options.out == StudyRunOptions.out else options.out
    return command_line("study run", name, options={"scale": options.scale, "out": elsewhere, "seeds": options.seeds})


def _require_runnable(run: StudyRun, name: str) -> None:
    """Raise for a run that a worker would refuse, before the first one."""
    stage = run.stage
    try:
        if run.start is not None:
            require(run.start.stage.verb == "train", f"{run.start.stage.verb} leaves no weights to start from")
        match stage.verb:
            case "train" | "noisy-student":
                require(stage.verb == "train" or run.start is None, "noisy-student starts from no run before it")
                require(bool(stage.recipe or stage.data), f"a stage {stage.verb} needs a recipe, or data")
                _require_recipe(run)
            case "few-shot" | "inspect":
                require(bool(run.start or stage.init), f"{stage.verb} is of the run before it, or of what init names")
                require(not stage.set, f"{stage.verb} has no settings")
            case "speed":
                require(run.start is None, "speed starts from no run before it")
                config.from_dict(SpeedRule, stage.set)
    except UsageError as error:
        raise UsageError(f"{name}: {error.what}", hint=error.hint) from error


def _require_recipe(run: StudyRun) -> None:
    """Raise for a key or value that is wrong whatever the data are."""
    if not run.stage.recipe:
        return
    table = with_changes(read_recipe(run.stage.recipe), config.override_texts(run.stage.set))
    init = run.stage.init or ("the run before" if run.start else "")
    model = table.get("model")
    classes = model.get("num_classes", _CLASSES) if isinstance(model, Mapping) else _CLASSES
    recipe_from_dict(merged({"init": init, "data": {"source": run.stage.data}}, table), classes)


def _duration_note(scale: Scale, options: StudyRunOptions) -> str:
    """How long the whole grid takes, as a sentence."""
    return f"It takes {scale.takes}." if scale.takes and options.seeds is None else ""


def _describe(
    studies: Sequence[tuple[Study, Scale]], runs: Sequence[StudyRun], done: Mapping[str, CellRecord], folder: Path
) -> dict[str, object]:
    cells = {f"{study.name}": f"{count_cells(scale)} cells. {scale.about}" for study, scale in studies}
    return {"out": folder, **cells, "runs": f"{len(runs)}, of which {len(done)} are done"}


def _failure_files(folder: Path) -> list[tuple[str, int]]:
    """Those that there are, each with when it was written."""
    found: list[tuple[str, int]] = []
    for path in (folder / FAILURES).glob("*.txt"):
        with contextlib.suppress(OSError):  # removed meanwhile by a worker whose second try went well
            found.append((path.name, path.stat().st_mtime_ns))
    return found


def _failures(folder: Path, missing: Sequence[StudyRun], names: Mapping[str, str]) -> dict[str, str]:
    """Why runs have no record, by their names."""
    found: dict[str, str] = {}
    for run in missing:
        before = next((names[one.key] for one in run.chain()[:-1] if names[one.key] in found), None)
        why = "its worker died without an error message" if before is None else f"begins with {before}, which failed"
        with contextlib.suppress(OSError):
            why = reading.read_text(folder / FAILURES / f"{run.key}.txt").partition("\n")[0]
        found[names[run.key]] = why
    return found


def _names(studies: Sequence[tuple[Study, Scale]]) -> dict[str, str]:
    """What each run is for, by its key: the first cell that counts it, or begins with it."""
    cells = [(study, cell) for study, scale in studies for cell in list_cells(scale)]
    names = {cell.run.key: f"{study.name}: {cell.name}, seed {cell.seed}" for study, cell in reversed(cells)}
    for study, cell in cells:
        for run in cell.run.chain()[:-1]:
            names.setdefault(run.key, f"{study.name}: start of {cell.name}, seed {cell.seed}")
    return names


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Workers:
    """The worker processes of this call."""

    folder: Path
    names: Sequence[str]
    options: StudyRunOptions
    processes: list[tuple["subprocess.Popen[bytes]", list[str], dict[str, str]]] = dataclasses.field(
        default_factory=list[Any]
    )
    restarts: int = 0
    call: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))

    def start(self, runs: Sequence[StudyRun]) -> None:
        devices = _devices(self.options.device)
        on_gpu, cores = any(device.startswith("cuda") for device, _ in devices), usable_cores()
        usual = _GPU_WORKERS if on_gpu else cores
        if any(run.stage.verb == "speed" for run in runs):
            usual = 1  # what is timed has its device to itself
        places = [place for _ in range(self.options.workers or usual) for place in devices][: len(runs)]
        # Beside a GPU they share the cores: a dozen would each take all. Without one a run has a single thread, however many
        # run beside it: more would change its numbers, and those of two calls would wait for each other. What is timed has all.
        shared = max(1, cores // len(places))
        threads = self.options.threads or (shared if on_gpu else 1)
        # As many in a call that finds a single run left: with other threads it would be another machine.
        timed = max(1, cores // (len(devices) * (self.options.workers or 1)))
        for device, environment in places:
            beside = places.count((device, environment))
            argv = [sys.executable, "-m", "vitlab.studies.worker", str(self.folder), "--device", device]
            argv += [word for name in self.names for word in ("--study", f"{name}:{self.options.scale}")]
            argv += ["--workers", str(beside), "--threads", str(threads)]
            argv += ["--timed-threads", str(self.options.threads or timed)]
            argv += ["--seeds", str(self.options.seeds)] if self.options.seeds else []
            argv += ["--parent", str(os.getpid()), "--call", self.call]
            env = {**os.environ, **environment, "OMP_NUM_THREADS": str(threads)}
            self.processes.append((self._popen(argv, env), argv, env))

    def _popen(self, argv: list[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        # In a group of its own: Ctrl-C in a terminal must reach it once, from here.
        return subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None,
            start_new_session=True,
        )

    def at_work(self, ended: int) -> bool:
        """Whether any is; one that a signal killed, for want of memory say, is started again.

        Not without end: a run that kills its worker fails after some beginnings; `ended` is how many runs of this call have.
        """
        most = MOST_BEGINNINGS * (len(self.processes) + ended)
        for i, (process, argv, env) in enumerate(self.processes):
            code = process.poll()
            if code is not None and code < 0 and self.restarts < most:
                self.restarts += 1
                self.processes[i] = (self._popen(argv, env), argv, env)
        return any(process.poll() is None for process, _, _ in self.processes)

    def stop(self) -> None:
        """Ask them to save and end, and wait for it."""
        running = [process for process, _, _ in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + _STOP_S
        for process in running:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _devices(wanted: str) -> list[tuple[str, dict[str, str]]]:
    """The devices to work on, each with the variables that show it alone. Found without loading torch here."""
    if wanted not in ("auto", "cuda"):
        return [(wanted, {})]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [one for one in visible.split(",") if one] if visible is not None else _gpus()
    return [("cuda", {"CUDA_VISIBLE_DEVICES": one}) for one in ids] or [(wanted, {})]


def _gpus() -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        return [str(i) for i in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]
    return []


def _watch(
    workers: _Workers,
    studies: Sequence[tuple[Study, Scale]],
    runs: Sequence[StudyRun],
    names: Mapping[str, str],
    console: Console,
) -> None:
    """Until the workers have ended: a live table on a terminal, else a line for each run that is finished."""
    leases, started = Leases(workers.folder / LEASES), time.perf_counter()
    known = finished(workers.folder, runs)
    at_first, left, failed_before = len(known), "?", set(_failure_files(workers.folder))
    with _table(studies, console) as table:
        while True:
            failures = set(_failure_files(workers.folder)) - failed_before
            at_work = workers.at_work(len(known) - at_first + len(failures))
            new = [run for run in runs if run.key not in known and record_path(workers.folder, run.key).exists()]
            left = seconds_left(started, len(known) + len(new) - at_first, len(runs) - at_first) if new else left
            for run in new:
                known |= finished(workers.folder, [run])
                line = _finished_line(run, known[run.key], names, studies)
                table.say(f"{len(known)}/{len(runs)}  {line}  left {left}")
            held = {run.key for run in runs if run.key not in known and leases.holder(run.key) is not None}
            table.update(known, held, f"{len(known)} of {len(runs)} runs done, {len(held)} running, left {left}")
            if not at_work or len(known) == len(runs):
                return
            time.sleep(_LOOK_S)


def _finished_line(
    run: StudyRun, record: CellRecord, names: Mapping[str, str], studies: Sequence[tuple[Study, Scale]]
) -> str:
    """With the number that its study is about, where it has one."""
    name = names[run.key]
    measure = next((scale.measure for study, scale in studies if name.startswith(f"{study.name}: ")), "")
    if ": start of " in name:
        return name
    value = number_of(record, measure)
    return (
        f"{name}: {lacks_measure(record, measure)}"
        if value is None
        else f"{name}: {measure_label(measure)} {_as_shown(value, measure)}"
    )


def _as_shown(value: float, measure: str) -> str:
    return f"{100 * value:.1f} {percent_unit(measure)}" if is_share(measure) else f"{value:.4g}"


@contextlib.contextmanager
def _table(studies: Sequence[tuple[Study, Scale]], console: Console) -> Generator[LiveTable]:
    try:
        with LiveTable(studies, console) as table:
            yield table
    except BrokenPipeError as error:
        raise FileProblem("the terminal is gone") from error
