"""`vitlab demo`: the paper's story in minutes, on real images, with no download.

Pre-train on fractals; transfer to handwritten digits at a higher resolution; do the same from scratch, with the same budget,
to see what the pre-training was worth; test, explain, report.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.command import command_line
from vitlab.core.config import override_texts
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UnknownName, UsageError
from vitlab.core.planned import stop_if_dry_run
from vitlab.core.runtime import pick_device, prepare, require_threads, restored_torch_globals
from vitlab.core.session import Session
from vitlab.data.parts import Parts
from vitlab.models.names import format_name
from vitlab.options.option import takes
from vitlab.options.training_options import DemoOptions
from vitlab.report.page import render
from vitlab.runs.training.execute import execute
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.resolve import Job
from vitlab.runs.training.run_folder import REPORT
from vitlab.runs.training.run_report import build_report, write_report
from vitlab.training.recipe import SCRATCH, Recipe, read_recipe, recipe_to_dict, with_changes
from vitlab.training.recipe_book import written_length
from vitlab.training.recipe_data import open_recipe
from vitlab.weights.surgery import require_same_body

PARTS = {"pretrain": "demo-fractals", "transfer": "demo-digits"}


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What `vitlab demo --json` prints. Each test has top1, top5, loss and n."""

    run: Path  # the folder of the transfer
    bundle: Path  # in it, what `vitlab.load` reads
    report: Path
    test: dict[str, Any]  # of the transfer
    scratch_test: dict[str, Any]  # of the same model without pre-training
    pretrain_test: dict[str, Any]  # of the pre-training, on fractals
    expected_top1: float | None  # None for another seed or with overrides
    as_expected: bool  # whether the accuracy is what it should be
    seconds: float
    images_per_second: float

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        top1, n = self.test["top1"], self.test["n"]
        lines = [
            f"Test accuracy {top1:.1%}: {round(top1 * n)} of {n} held-out digits right.",
            f"From scratch, with the same budget: {self.scratch_test['top1']:.1%}.",
        ]
        if self.expected_top1 is not None:
            verdict = "as it is" if self.as_expected else "which this is not: please report it"
            lines.append(f"You should see {self.expected_top1:.1%} or close to it, {verdict}.")
        lines.append(f"Took {self.seconds:.0f} s. Report: {self.report}")
        return [*lines, f"Use it:   vitlab.load({str(self.run)!r})('picture.png')"]


@takes(DemoOptions)
def demo(options: DemoOptions) -> DemoResult:
    """Run the demo into `out`: pre-train on fractals, transfer to digits, the same from scratch; test, explain, report.

    One thread is the default: a model this small gains little from more, and the bits then do not depend on the cores.
    """
    jobs, folder = _check(options)
    stop_if_dry_run(options.dry_run, _plan(jobs, folder, options.device))
    with restored_torch_globals():
        runtime = prepare(options.device, options.seed, options.threads)
        session = Session(runtime, World(0, 1, runtime.device), Console(quiet=options.quiet))
        return _run(jobs, folder, list(override_texts(options.overrides)), session)


Opened = tuple[Recipe, Parts]


def _run(jobs: dict[str, Opened], folder: Path, overrides: list[str], session: Session) -> DemoResult:
    started, seed = time.perf_counter(), session.runtime.seed
    command = command_line("demo", options={"seed": seed, "set": overrides})

    def run(name: str, part: str, init: str) -> RunResult:
        recipe, parts = jobs[part]
        recipe = dataclasses.replace(recipe, init=init)
        return execute(Job(recipe=recipe, parts=parts, folder=folder / name, command=command, repeat=command), session)

    fsio.make_folder(folder)
    pretraining = run("pretrain", "pretrain", SCRATCH)
    transfer = run("transfer", "transfer", str(pretraining.folder / "bundle"))
    scratch = run("scratch", "transfer", SCRATCH)
    assert pretraining.scores and transfer.scores and scratch.scores
    for result in (pretraining, scratch):
        write_report(result, build_report(result))
    write_report(transfer, build_report(transfer, pretraining, scratch))  # the whole story is that of the transfer
    fsio.write_file(folder / REPORT, render(build_report(transfer, pretraining, scratch, folder=folder)))
    # The recipe's number was measured for the whole story as it ships; any change makes it another story.
    expect = transfer.recipe.expect if not overrides and not seed else None
    return DemoResult(
        run=transfer.folder,
        bundle=transfer.folder / "bundle",
        report=folder / REPORT,
        test=transfer.scores.summary(),
        scratch_test=scratch.scores.summary(),
        pretrain_test=pretraining.scores.summary(),
        expected_top1=None if expect is None else expect.test_top1,
        as_expected=expect is None or abs(transfer.scores.top1 - expect.test_top1) <= expect.tolerance,
        seconds=round(time.perf_counter() - started, 1),
        images_per_second=round(transfer.images_per_second, 1),
    )


def demo_jobs(overrides: Iterable[str] = (), seed: int = 0) -> dict[str, Opened]:
    """Both recipes with their data; an override names its part first: `transfer.optim.lr=3e-4`."""
    by_part: dict[str, list[str]] = {part: [f"seed={seed}", f"data.split_seed={seed}"] for part in PARTS}
    for override in overrides:
        part, dot, rest = override.partition(".")
        if not dot or part not in PARTS:
            hint = "Write --set transfer.optim.lr=3e-4, or pretrain.… likewise."
            raise UnknownName("demo part", part.partition("=")[0], PARTS, hint=hint)
        by_part[part].append(rest)
    return {part: open_recipe(with_changes(read_recipe(name), by_part[part])) for part, name in PARTS.items()}


@takes(DemoOptions)
def demo_config(options: DemoOptions) -> dict[str, Any]:
    """Both resolved recipes as one document, for `--print-config`."""
    jobs = demo_jobs(override_texts(options.overrides), options.seed)
    return {part: recipe_to_dict(recipe) for part, (recipe, _) in jobs.items()}


def _check(options: DemoOptions) -> tuple[dict[str, Opened], Path]:
    """Everything that can be wrong is found here, before any work: config, start weights, folder, missing extra."""
    out = options.out
    require_threads(options.threads)
    jobs = demo_jobs(override_texts(options.overrides), options.seed)
    require_same_body(jobs["pretrain"][0].model, jobs["transfer"][0].model)
    for part, (_, parts) in jobs.items():
        if parts.test is None:
            raise UsageError(f"the demo tests what it trains, but {part} has nothing to test on")
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    folder = next(path for name in names if not (path := Path("runs") / name).exists()) if out is None else Path(out)
    return jobs, fsio.require_free(folder)


def _plan(jobs: dict[str, Opened], folder: Path, device: str) -> dict[str, str]:
    """What `demo` does, after every check that can be made without doing it."""
    planned = {"device": str(pick_device(device)), "out": str(folder)}
    for part, (recipe, parts) in jobs.items():
        (rows, cols), images = recipe.data.image_size, f"{len(parts.train):,} images"
        planned[part] = f"{format_name(recipe.model)}, {written_length(recipe)} on {images} of {rows}x{cols} pixels"
    return planned
