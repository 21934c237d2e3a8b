"""`vitlab train`: a folder of photos in, a trained, tested and explained classifier out.

Resolves the call to a `Job` (data, split, recipe and why), executes it, and writes report and records.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.core import fsio, launch
from vitlab.core.command import command_line
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.planned import stop_if_dry_run
from vitlab.core.runtime import pick_device
from vitlab.core.session import Session, open_session
from vitlab.core.signals import Stopped
from vitlab.engines.classifier import Classifier, load
from vitlab.options.option import takes
from vitlab.report.history import encode, plot_history
from vitlab.runs.training import run_folder
from vitlab.runs.training.execute import execute
from vitlab.runs.training.finish import RunResult, record_runs
from vitlab.runs.training.multirun import MultiRun, execute_several, mean_and_range
from vitlab.runs.training.resolve import Job, free_folder, resolve
from vitlab.runs.training.run_report import build_report, write_report
from vitlab.training.call import TrainCall
from vitlab.training.recipe import recipe_to_dict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SOME_PHOTO = "photo.jpg"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `vitlab train --json` prints. With several seeds, `test` is that of the first, and `seeds` has all.

    `sweep` has a row for each value that was tried, `left_out` why an image could not be read, `warnings` what seemed amiss.
    """

    run: Path  # the folder of the run
    bundle: Path  # in it: weights, preprocessing and labels, which `vitlab.load` reads
    report: Path  # the page to open in a browser
    reason: str  # why this recipe was chosen
    # top1, its interval, top5, loss, n, ece; mean_ap where images have several labels; empty without test images
    test: dict[str, Any]
    seeds: list[dict[str, Any]]  # seed, run and test of each
    sweep: list[dict[str, Any]]  # value, step, top1, loss and n of each, and failed: why others are None
    left_out: dict[str, str]  # the reason, by image
    warnings: list[str]
    seconds: float
    images_per_second: float
    photo: str = _SOME_PHOTO  # for the commands to type next; this and the next are not part of the JSON
    encoder: bool = False  # without a head: trained without labels

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each step, as in `metrics.jsonl`: step, loss, lr, grad_norm and more. A linear probe has no steps."""
        try:
            return [dataclasses.asdict(record) for record in run_folder.read_metrics(self.run)]
        except FileNotFoundError:
            raise FileProblem(f"{self.run} holds no {run_folder.METRICS}") from None

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw loss and learning rate by step, as a matplotlib figure; with `path`, also write it to a .png, .svg or .pdf.

        Needs `pip install 'vitlab[plot]'`.
        """
        figure = plot_history(self.history)
        if path is not None:
            fsio.write_file(Path(path), encode(figure, Path(path).suffix))
        return figure

    def load(self) -> Classifier:
        """The trained classifier, as `vitlab.load(result.run)` gives it."""
        return load(self.run, quiet=True)

    def to_json(self) -> dict[str, Any]:
        done = dataclasses.asdict(self)
        del done["photo"], done["encoder"]
        return done

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        test, lines = self.test, list[str]()
        if "mean_ap" in test:  # images with several labels
            lines.append(f"Mean average precision {test['mean_ap']:.3f} on {test['n']:,} held-out images.")
            lines.append(f"The likeliest label is right for {test['top1']:.1%} of them.")
        elif "knn" in test:
            low, high = test["knn"]["interval"]
            lines.append(
                f"{test['knn']['k']} nearest neighbours name {test['knn']['top1']:.1%} of {test['n']:,} held-out images "
                f"correctly (95 % interval {low:.1%} to {high:.1%})."
            )
        elif test:
            low, high = test["top1_interval"]
            lines.append(
                f"Test accuracy {test['top1']:.1%} of {test['n']:,} held-out images (95 % interval {low:.1%} to {high:.1%})."
            )
        else:
            evaluate = command_line("evaluate", self.run, "DATA")
            lines.append(f"Not tested, for no images were kept to test on; `{evaluate}` does it with others.")
        if len(self.seeds) > 1 and test:
            several = "mean_ap" in test
            metric, what, shown = ("mean_ap", "precision in the mean", ".3f") if several else ("top1", "mean", ".1%")
            values = [row["test"].get("knn", row["test"])[metric] for row in self.seeds]
            lines.append(f"{len(values)} seeds: {what} {mean_and_range(values, shown)}.")
        failed = [row for row in self.sweep if row["failed"] is not None]
        lines += [f"Trial {row['key']}={row['value']} failed: {row['failed']}." for row in failed]
        if self.left_out:
            lines.append(
                f"Images that could not be read and were left out: {len(self.left_out):,}; the report names them."
            )
        lines.append(f"Took {self.seconds:.0f} s. Report: {self.report}")
        return [*lines, "Next:", *(f"  {command}" for command in self.next_commands())]

    def next_commands(self) -> list[str]:
        """What most people type next: use it, see where it fails, show it to others, use it from Python."""
        judged = self.run.with_name(f"{self.run.name}-eval")
        if self.encoder:
            return [
                command_line("train", "DATA", options={"init": self.run}),
                command_line("evaluate", self.run, "DATA", options={"knn": True, "probe": True, "out": judged}),
                command_line("embed", self.run, self.photo),
            ]
        code = f"import vitlab; print(vitlab.load({str(self.run)!r})({self.photo!r}))"
        plain = not set(code) & set('"$`\\!')  # else a shell would read more into it; cmd.exe knows double quotes alone
        return [
            command_line("predict", self.run, self.photo),
            command_line("evaluate", self.run, options={"out": judged}),
            command_line("serve", self.run),
            f'python -c "{code}"' if plain else shlex.join(["python", "-c", code]),
        ]


@takes(TrainCall)
def train(call: TrainCall) -> TrainResult:
    """Train a classifier on a folder of class folders, a table, shards, or a named set; test it, explain it, store it.

    Without `data`, what `recipe` names. Without `recipe`, one is chosen from the data, the start weights and the machine, and
    the reason is reported. `sweep`, as `optim.lr=0.003,0.01`, tries each value, chooses on held-out training images, trains
    on all of them and tests once. `resume` resumes the run in that folder, or all runs of seeds or a sweep there, at the exact
    step.
    """
    if call.dry_run:
        stop_if_dry_run(True, _resolve_only(call).describe())
    call = _resumed_by_launcher(call)
    with open_session(call.device, call.seed, call.threads, quiet=call.quiet, verbose=call.verbose) as session:
        job = resolve(call, session.world, session.console)
        while True:
            try:
                return _run(job, session)
            except fsio.Taken as taken:  # by a run that was started at the same time
                if call.out is not None or job.resume or taken.path != job.folder or session.world.size > 1:
                    raise
                folder = free_folder(call)
                job = dataclasses.replace(job, folder=folder, command=call.command(folder))


@takes(TrainCall)
def resolved_config(call: TrainCall) -> dict[str, Any]:
    """The recipe of a call with every key written out, for `--print-config`."""
    return recipe_to_dict(_resolve_only(call).recipe)


def _resolve_only(call: TrainCall) -> Job:
    """All checks and decisions, and nothing else."""
    if call.resume is not None:
        raise UsageError("--dry-run and --print-config cannot be combined with --resume")
    return resolve(call, World(0, 1, pick_device(call.device)), Console(quiet=True))


def _resumed_by_launcher(call: TrainCall) -> TrainCall:
    """The same call, which resumes its run where the launcher has started it before."""
    if call.resume is not None or not launch.may_restart():
        return call
    if call.out is None:
        raise UsageError("a run that may be started again needs --out")
    if not (Path(call.out) / run_folder.CONFIG).is_file():
        return call
    data = call.source if call.in_python is None else call.in_python
    theirs = dataclasses.replace(call, data=data, recipe=None, init=None, model=None, seed=0, out=None)
    return dataclasses.replace(theirs, resume=call.out)


def _run(job: Job, session: Session) -> TrainResult:
    """All runs of a job, their reports and their records."""
    folder, world = job.folder, session.world
    if job.seeds > 1 and job.recipe.train.method == "probe":
        session.console.say("a linear probe draws nothing at random, so every seed gives the same")
    try:
        done = execute_several(job, session) if job.runs else MultiRun([execute(job, session)])
        if world.is_main:
            for result in done.results:
                write_report(result, build_report(result, tables=() if done.sweep is None else (done.sweep.table(),)))
            tested = folder if done.sweep is None else done.results[0].folder
            record_runs(done.results, tested, recipe=job.recipe_name, command=job.command)
        world.barrier()
    except Stopped as stopped:  # beside its steps: between two runs, or while the report is written
        if not stopped.advice and (folder / run_folder.CONFIG).is_file():
            stopped.advice = run_folder.resume_command(folder)
        raise
    except FileProblem as problem:
        refused = isinstance(problem.__cause__, OSError)  # by the system, for want of room say: what was saved is whole
        if not refused or str(folder) not in problem.what or not (folder / run_folder.CONFIG).is_file():
            raise
        hint = f"Free some space, or repair what is wrong there. {run_folder.resume_command(folder)}"
        raise FileProblem(problem.what, hint=hint) from problem
    return _result(done, job.reason)


def _result(done: MultiRun, reason: str) -> TrainResult:
    first, sweep = done.results[0], done.sweep
    return TrainResult(
        run=first.folder,
        bundle=first.folder / run_folder.BUNDLE,
        report=first.folder / run_folder.REPORT,
        reason=reason,
        test=_test_summary(first),
        seeds=[{"seed": one.recipe.seed, "run": str(one.folder), "test": _test_summary(one)} for one in done.results],
        sweep=[] if sweep is None else sweep.rows,
        left_out={name: why for result in done.results for name, why in result.bad.items()},
        warnings=_all_warnings(done.results),
        seconds=round(sum(result.seconds for result in done.results) + (0.0 if sweep is None else sweep.seconds), 1),
        images_per_second=round(first.images_per_second, 1),
        photo=_test_photo(first),
        encoder=first.recipe.objective.is_pretext,
    )


def _all_warnings(results: Sequence[RunResult]) -> list[str]:
    """Those of the first run, and what the runs of other seeds have beside them."""
    first, *others = results
    more = (f"seed {one.recipe.seed}: {line}" for one in others for line in one.warnings if line not in first.warnings)
    return [*first.warnings, *more]


def _test_photo(result: RunResult) -> str:
    """A test image that is a file, so that what is printed can be typed as it is; else any name."""
    if result.test is None:
        return _SOME_PHOTO
    source = Path(result.recipe.data.source)
    keys = [key for key in result.test.keys if key not in result.bad][:1]
    files = [place / key for key in keys for place in (source, source.parent) if (place / key).is_file()]
    return str(files[0]) if files else _SOME_PHOTO


def _test_summary(result: RunResult) -> dict[str, Any]:
    if result.knn is not None:
        return {"knn": result.knn, "n": result.knn["n"]}
    return result.scores.test_summary() if result.scores else {}
