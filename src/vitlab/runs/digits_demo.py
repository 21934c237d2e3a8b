"""`vitlab demo`: the paper's story in two minutes, on real images, with no download.

Pre-train on printed letters, transfer to handwritten digits at twice the resolution, test, explain, report.
"""

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.duration import UNITS
from vitlab.core.errors import UnknownName, UsageError
from vitlab.core.runtime import Runtime, pick_device, prepare, require_threads, unchanged
from vitlab.data.digits import load_digits
from vitlab.models.names import format_name
from vitlab.report.page import render
from vitlab.runs.recipe import SCRATCH, Recipe, load_recipe, recipe_to_dict
from vitlab.runs.run import RunResult, run_recipe
from vitlab.runs.run_report import build_report, write_plots
from vitlab.weights.surgery import require_same_body

PARTS = {"pretrain": "demo-letters", "transfer": "demo-digits"}


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What `vitlab demo --json` prints. `test` and `pretrain_test` hold top1, top5, loss and n."""

    run: Path
    bundle: Path
    report: Path
    test: dict[str, Any]
    pretrain_test: dict[str, Any] | None
    expected_top1: float | None
    as_expected: bool
    seconds: float
    images_per_second: float

    def sentences(self) -> list[str]:
        """The outcome in words, for people."""
        top1, n = self.test["top1"], self.test["n"]
        said = [f"Test accuracy {top1:.1%}: {round(top1 * n)} of {n} held-out digits right."]
        if self.expected_top1 is not None:
            verdict = "as it is" if self.as_expected else "which this is not: please report it"
            said.append(f"You should see {self.expected_top1:.1%} or close to it, {verdict}.")
        said.append(f"Took {self.seconds:.0f} s. Look at {self.report}")
        return [*said, f"Use it:   vitlab.load({str(self.run)!r})('picture.png')"]


def demo(
    out: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    from_scratch: bool = False,
    device: str = "auto",
    seed: int = 0,
    threads: int | None = 1,
    quiet: bool = False,
) -> DemoResult:
    """Runs the whole story into `out` (default `runs/demo`, or the next free name) and returns what it found.

    `from_scratch` leaves the pre-training out, to see what it was worth. One thread is the default, because a model this
    small gains little from more, a busy machine would make it wait, and the bits then do not depend on the cores.
    """
    overrides = list(overrides)
    recipes, folder = _check(out, overrides, from_scratch, seed, threads)
    with unchanged():
        return _tell(recipes, folder, overrides, from_scratch, prepare(device, seed, threads), Console(quiet=quiet))


def _tell(
    recipes: dict[str, Recipe],
    folder: Path,
    overrides: list[str],
    from_scratch: bool,
    runtime: Runtime,
    console: Console,
) -> DemoResult:
    started, seed = time.perf_counter(), runtime.seed
    words = ["vitlab demo", f"--seed {seed}", *(f"--set {override}" for override in overrides)]
    command = " ".join([*words, *["--from-scratch"] * from_scratch])

    def run(part: str, init: str) -> RunResult:
        recipe = dataclasses.replace(recipes[part], init=init)
        return run_recipe(recipe, folder / part, runtime=runtime, console=console, command=command)

    fsio.make_folder(folder)
    pretraining = None if from_scratch else run("pretrain", SCRATCH)
    transfer = run("transfer", str(pretraining.folder / "bundle") if pretraining else SCRATCH)
    report = build_report(transfer, pretraining)
    write_plots(transfer.folder / "plots", report)
    fsio.write_file(folder / "report.html", render(report))
    # The recipe's number was measured for the whole story as it ships; any change makes it another story.
    expect = transfer.recipe.expect if pretraining and not overrides and not seed else None
    return DemoResult(
        run=transfer.folder,
        bundle=transfer.folder / "bundle",
        report=folder / "report.html",
        test=transfer.scores.summary(),
        pretrain_test=pretraining.scores.summary() if pretraining else None,
        expected_top1=None if expect is None else expect.test_top1,
        as_expected=expect is None or abs(transfer.scores.top1 - expect.test_top1) <= expect.tolerance,
        seconds=round(time.perf_counter() - started, 1),
        images_per_second=round(transfer.images_per_second, 1),
    )


def demo_recipes(overrides: Iterable[str] = (), seed: int = 0) -> dict[str, Recipe]:
    """Both recipes; an override names its part first: `transfer.optim.lr=3e-4`."""
    by_part: dict[str, list[str]] = {part: [f"seed={seed}"] for part in PARTS}
    for override in overrides:
        part, dot, rest = override.partition(".")
        if not dot or part not in PARTS:
            raise UnknownName(
                "demo part", part, PARTS, hint="Write --set transfer.optim.lr=3e-4, or pretrain.… likewise."
            )
        by_part[part].append(rest)
    return {part: load_recipe(name, by_part[part]) for part, name in PARTS.items()}


def demo_config(overrides: Iterable[str] = (), seed: int = 0) -> dict[str, Any]:
    """Both resolved recipes as one document, for `--print-config`; its paths are those of `--set`."""
    return {part: recipe_to_dict(recipe) for part, recipe in demo_recipes(overrides, seed).items()}


def _check(
    out: str | Path | None, overrides: list[str], from_scratch: bool, seed: int, threads: int | None
) -> tuple[dict[str, Recipe], Path]:
    """Everything that can be wrong is found here, before any work: config, start weights, folder, missing extra."""
    require_threads(threads)
    recipes = demo_recipes(overrides, seed)
    if from_scratch and any(override.startswith("pretrain.") for override in overrides):
        raise UsageError("pretrain.… settings have no use with --from-scratch, which leaves the pre-training out")
    if not from_scratch:
        require_same_body(recipes["pretrain"].model, recipes["transfer"].model)
    folder = fsio.require_free(Path(out)) if out is not None else _free_folder(Path("runs/demo"))
    load_digits()
    return recipes, folder


def _free_folder(wanted: Path) -> Path:
    """`wanted`, or `wanted-2`, `wanted-3` ...: whichever does not exist yet."""
    number, path = 1, wanted
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return fsio.require_free(path)


def plan_demo(
    out: str | Path | None = None,
    *,
    overrides: Iterable[str] = (),
    from_scratch: bool = False,
    device: str = "auto",
    seed: int = 0,
    threads: int | None = 1,
) -> dict[str, str]:
    """What `demo` would do, after every check that can be made without doing it."""
    recipes, folder = _check(out, list(overrides), from_scratch, seed, threads)
    plan = {"device": str(pick_device(device)), "out": str(folder), "digits": f"{len(load_digits())} images"}
    for part in ["transfer"] if from_scratch else PARTS:
        recipe = recipes[part]
        length = next(f"{getattr(recipe.train, unit)} {unit}" for unit in UNITS if getattr(recipe.train, unit))
        plan[part] = f"{format_name(recipe.model)}, {length} of {recipe.data.name} at {recipe.data.image_size}"
    return plan
