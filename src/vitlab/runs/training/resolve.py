"""Resolve a training call to a `Job`: everything that is decided before the first step. Writes nothing but caches.

Whatever can be wrong with a call is found here. A resumed run has decided it all before, and reads it from its folder.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.data.auditing.audit import Scanned
from vitlab.data.auditing.preflight import Preflight, audit_used, sampled_bits, scan_used
from vitlab.data.dataset import Opened
from vitlab.data.parts import Parts, arrange, drop_small_classes, train_part
from vitlab.data.sources.opening import NoSuchData, open_data, open_images
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ModelSpec
from vitlab.options.data_options import CheckOptions
from vitlab.options.option import command_of
from vitlab.runs.training import run_folder
from vitlab.training.assemble import require_possible, require_teacher
from vitlab.training.call import TrainCall
from vitlab.training.choice import describe_choice
from vitlab.training.draft import (
    Draft,
    Start,
    as_usage_error,
    draft_recipe,
    for_bands,
    look_at,
    split_settings,
    unscaled_rate,
    with_start,
)
from vitlab.training.health import coarse_grid
from vitlab.training.memory import require_room
from vitlab.training.microbatch import estimate_microbatch
from vitlab.training.recipe import (
    MODEL_NAME,
    SCRATCH,
    Recipe,
    for_other_data,
    is_pretext,
    list_recipes,
    positions_note,
    probe_ignores,
    read_data_config,
    read_recipe,
    recipe_from_dict,
    require_probe_alone,
    with_changes,
)
from vitlab.training.recipe_data import open_also, open_recipe
from vitlab.training.start import AUTO
from vitlab.training.sweep import Grid, Sweep, read_grid, settle_sweep, with_dev_split
from vitlab.training.trackers import require_trackers
from vitlab.weights.catalogue import is_name
from vitlab.weights.surgery import require_positions, require_same_body


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run, or several by seeds or a sweep, with everything decided: recipe, data, split, reasons."""

    recipe: Recipe
    parts: Parts
    folder: Path
    command: str
    repeat: str = ""  # the command without a folder, for whoever wants another such run
    inner: bool = False  # one of several, whose opening says what was chosen
    recipe_name: str = ""  # as it was asked for; empty where it was chosen
    reason: str = ""
    model_note: str = ""  # where the start weights have another model than the recipe says
    notes: tuple[str, ...] = ()  # where the parts come from, what the audit found, what would do better
    warnings: tuple[str, ...] = ()
    seeds: int = 1
    sweep: Sweep | None = None
    resume: bool = False

    @property
    def runs(self) -> dict[str, Any]:
        """What runs there will be, for `run.json`; empty where there is one."""
        if self.sweep is not None:
            return {"sweep": {self.sweep.grid.key: list(self.sweep.grid.values)}}
        return {"seeds": self.seeds} if self.seeds > 1 else {}

    @property
    def opening(self) -> tuple[str, ...]:
        """All of it in sentences, for the log."""
        found = (*self.notes, *(f"warning: {warning}" for warning in self.warnings))
        if self.inner or not self.reason:
            return found
        model = (f"model: {self.model_note}",) if self.model_note else ()
        return (describe_counts(self.counts), f"Chosen: {self.reason}.", *model, *found)

    @property
    def counts(self) -> dict[str, int]:
        """Classes, where labels are used, and the images of each part that there is."""
        return count_images(self.parts, labelled=not self.recipe.objective.is_pretext)

    def describe(self) -> dict[str, str | list[str]]:
        """For --dry-run."""
        recipe = self.recipe
        rows: dict[str, str | list[str]] = {"out": str(self.folder), "model": format_name(recipe.model)}
        start = "; ".join(part for part in (recipe.init, positions_note(recipe)) if part)
        rows |= {"start": start, "images": describe_counts(self.counts), "chosen": self.reason}
        grid = coarse_grid(recipe.model)
        several = f"{self.seeds} runs, of seeds {recipe.seed} to {recipe.seed + self.seeds - 1}"
        more: dict[str, str | list[str]] = {
            "started": self.model_note,
            "notes": list(self.notes),
            "sweep": "" if self.sweep is None else self.sweep.sentence(),
            "seeds": several if self.seeds > 1 else "",
            "warnings": [*self.warnings, *([] if grid is None else [grid])],
        }
        return rows | {name: value for name, value in more.items() if value}


def resolve(call: TrainCall, world: World, console: Console) -> Job:
    """Open the data, settle the recipe and audit. Writes nothing but caches, such as of a compressed `.npz`."""
    if call.resume is not None:
        return _resolve_resume(call, Path(call.resume), console)
    return _resolve_new(call, free_folder(call), world, console)


def free_folder(call: TrainCall) -> Path:
    """Where the run goes: a folder that is free, and not inside the data."""
    data = call.source
    folder = run_folder.next_free("train") if call.out is None else Path(call.out)
    if data and Path(data).is_dir() and folder.resolve().is_relative_to(Path(data).resolve()):
        raise UsageError(
            f"the run would go to {folder}, inside the data folder {data}, which would then hold more than data",
            hint="Give --out a folder elsewhere.",
        )
    return fsio.require_free(folder)


# --- a new run --------------------------------------------------------------------------------------------------------


class _Settled(NamedTuple):
    """What is decided before the images are decoded; copies or deep pixels among them may change it."""

    recipe: Recipe
    parts: Parts
    sweep: Sweep | None
    opened: Opened
    grid: Grid | None
    arrange: Callable[[Opened], Parts]


def _resolve_new(call: TrainCall, folder: Path, world: World, console: Console) -> Job:
    data = call.source
    assert data is not None
    given = _recipe_with_changes(call)
    labelled = not is_pretext(given)
    opened = _open_checked(call, given, console, labelled=labelled)
    _require_model(call, given)
    given_start = call.start
    own = config.with_overrides({"data": {}}, call.changes)
    with as_usage_error(True):
        train = arrange(opened, split_settings(data, own["data"]), labelled=labelled).train
    call, started = with_start(call, opened, world, console)  # may download: what is wrong with the data is said before
    draft = draft_recipe(call, data, train, world, console)
    table, grid, bands = _settle_table(call, draft, opened)
    settings = read_data_config(table)
    if settings.source != data:
        raise UsageError(f"the data were named twice: {data}, and data.source={settings.source}")
    if draft.start is not None:
        _require_patches(draft.start.spec, settings.image_size)
    opened, dropped = drop_small_classes(opened, settings.min_images)  # before the images are looked at
    with as_usage_error(any(Path(source).exists() for source in settings.also)):
        also = open_also(settings, console)
    place = functools.partial(arrange, rule=settings, needs_val=grid is not None, labelled=labelled, also=also)
    parts = place(opened)
    recipe = recipe_from_dict(table, len(parts.train.classes))
    require_trackers(recipe.train.log)
    recipe, sweep, smaller = _settle(recipe, grid, opened, world)
    trained = (recipe,) if sweep is None else sweep.recipes
    _require_trainable(call, trained, parts, draft.start, world.size, explicit="train" in table["optim"])
    _require_recipe_start(call, recipe, console)
    for one in {(one.teacher, one.data.preprocess()): one for one in trained}.values():  # each teacher once
        with as_usage_error("@" not in one.teacher):
            require_teacher(one, parts.train.classes, quiet=console.quiet)
    # Last, for it takes longest: a wrong call is reported before.
    settled, preflight, deep = _audit_images(
        call, _Settled(recipe, parts, sweep, opened, grid, place), world, console, bits_given="bits" in table["data"]
    )
    recipe, parts = settled.recipe, settled.parts
    changed = (_ignored_overrides(recipe, call.changes), unscaled_rate(draft.started.table, draft.table, call))
    advice = "" if started or given_start == SCRATCH else draft.advice  # who asks for scratch knows
    rare_notes = (bands, draft.started.pixels, deep, advice, smaller, *changed)
    return Job(
        recipe=recipe,
        parts=parts,
        folder=folder,
        command=call.command(folder),
        repeat=call.command(None),
        recipe_name=call.recipe or "",
        reason=f"the recipe {call.recipe}, as asked"
        if draft.because is None
        else describe_choice(recipe, len(parts.train), draft.because),
        model_note=draft.started.model,
        notes=(*started.splitlines(), *parts.notes, *preflight.notes, *filter(None, rare_notes)),
        warnings=(*dropped, *parts.warnings, *preflight.warnings),
        seeds=call.seeds,
        sweep=settled.sweep,
    )


def _open_checked(call: TrainCall, given: Mapping[str, Any], console: Console, *, labelled: bool) -> Opened:
    """The data, after what the call alone says to be wrong."""
    if not labelled and call.recipe is None:
        raise UsageError(
            "an objective without labels needs --recipe: none is chosen", hint="See `vitlab recipes list`."
        )
    if not labelled and call.sweep is not None:
        raise UsageError("--sweep chooses by accuracy, which an objective without labels does not have")
    data, opener = call.source, open_data if labelled else open_images
    assert data is not None
    with as_usage_error(Path(data).exists()):
        return opener(data if call.in_python is None else call.in_python, columns=_columns(given), console=console)


def _require_model(call: TrainCall, given: Mapping[str, Any]) -> None:
    """Raise for a model that is a checkpoint, or that start weights or the recipe contradict."""
    if call.model is not None and is_name(call.model):
        raise UsageError(f"{call.model} is a checkpoint, not a model", hint=f"Start from it with --init {call.model}.")
    if call.model is not None and call.start not in (None, AUTO, SCRATCH):
        raise UsageError("the start weights decide the model: give --model or --init, not both")
    table, changes = given.get("model"), config.overridden(call.changes)
    name = call.model or changes.get(MODEL_NAME)
    if call.recipe is None or not isinstance(table, Mapping) or not isinstance(name, str) or "kind" in table:
        return  # a recipe with a kind has every field, and is refused for that where a name is given beside it
    fields = {field.name for field in dataclasses.fields(parse_name(name))}
    callers = {key.split(".")[1] for key in changes if key.startswith("model.")}
    if foreign := [f"model.{key}" for key in table if key not in fields | callers | {"name"}]:
        raise UsageError(
            f"recipe {call.recipe} sets {', '.join(foreign)}, which {name} does not have",
            hint="Name a model of the recipe's family, or leave --recipe out: one is then chosen.",
        )


def _settle_table(call: TrainCall, draft: Draft, opened: Opened) -> tuple[dict[str, Any], Grid | None, str]:
    """The recipe's table for these images, the values of a sweep, and a note about channels."""
    table, bands = for_bands(draft.table, opened)
    if call.sweep is None:
        return table, None, bands
    grid = read_grid(call.sweep, table)
    table = with_dev_split(table)
    # The caller's share before the recipe's, but not none.
    overridden = with_changes(table, call.changes)
    return overridden if overridden["data"]["val_frac"] else table, grid, bands


def _audit_images(
    call: TrainCall, settled: _Settled, world: World, console: Console, *, bits_given: bool
) -> tuple[_Settled, Preflight, str]:
    """What stays settled once the images were seen, what the audit found, and a note about the bits of pixels."""
    recipe, parts, sweep, opened, grid, place = settled
    used = list(parts.used().values())
    scanned = world.run_or_fail_everywhere(lambda: scan_used(opened, used, console) if world.is_main else None)
    opened, bits = _seen_in_images(opened, scanned, world)
    deep = ""
    if bits is not None and not bits_given:
        deep = f"data.bits={bits}: the grey images of more than 8 bits make use of {bits} (--set data.bits=16 for all)"
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, bits=bits))
    if opened.copies or deep:
        parts = place(opened)
        sweep = None if grid is None else settle_sweep(grid, recipe, opened)
    preflight = world.run_or_fail_everywhere(
        lambda: _audit(call, opened, parts, scanned, recipe) if world.is_main else Preflight([], [])
    )
    return settled._replace(recipe=recipe, parts=parts, sweep=sweep), preflight, deep


def _recipe_with_changes(call: TrainCall) -> dict[str, Any]:
    """The recipe that was named, with what the caller changed: what is known before the data is open."""
    return config.with_overrides(
        {"data": {}, **({} if call.recipe is None else read_recipe(call.recipe))}, call.changes
    )


def columns_of(call: TrainCall) -> Mapping[str, str]:
    """What the data's table calls its columns, by the call or else by the recipe."""
    return _columns(_recipe_with_changes(call))


def _columns(table: Mapping[str, Any]) -> Mapping[str, str]:
    """What the data's table calls its columns, by the call or else by the recipe."""
    data = table["data"]
    columns = data.get("columns", {}) if isinstance(data, Mapping) else {}  # anything else is refused with the recipe
    return read_data_config({"data": {"source": "", "image_size": 1, "columns": columns}}).columns


def _settle(recipe: Recipe, grid: Grid | None, opened: Opened, world: World) -> tuple[Recipe, Sweep | None, str | None]:
    """The recipe, and all of a sweep, with a micro-batch that fits: one for all, that of the one which needs most memory."""
    sweep = None if grid is None else settle_sweep(grid, recipe, opened)
    trained = (recipe,) if sweep is None else sweep.recipes
    for one in trained:
        require_room(one, world.device, world.size)
    fitting = [estimate_microbatch(one, world.device, world.size) for one in trained]
    tightest, sentence = min(fitting, key=lambda found: found[0].train.micro_batch or math.inf)
    if sentence is None:
        return recipe, sweep, None
    train = dataclasses.replace(recipe.train, micro_batch=tightest.train.micro_batch)
    recipe = dataclasses.replace(recipe, train=train)
    return recipe, None if grid is None else settle_sweep(grid, recipe, opened), sentence


def count_images(parts: Parts, *, labelled: bool) -> dict[str, int]:
    """Classes, where labels are used, and the images of each part that there is."""
    classes = {"classes": len(parts.train.classes)} if labelled else {}
    return classes | {name: len(part) for name, part in parts.used().items()} | {"train": len(parts.learnt)}


def describe_counts(counts: Mapping[str, int]) -> str:
    """`10 classes: 1,438 to train on, 359 to test on`."""
    purposes = {"train": "to train on", "val": "for validation", "test": "to test on"}
    images = ", ".join(f"{counts[name]:,} {purpose}" for name, purpose in purposes.items() if name in counts)
    labels = f"{counts['classes']} classes" if "classes" in counts else "no labels used"
    return f"{labels}: {images}"


def _require_patches(spec: ModelSpec, image_size: tuple[int, int]) -> None:
    try:
        spec.grid_for(image_size)
    except UsageError as error:
        what = f"the images do not fit the start weights, {format_name(spec)}: {error.what}"
        raise UsageError(what, hint=f"{error.hint} Give it with --set data.image_size.") from error


def _require_trainable(
    call: TrainCall, trained: Sequence[Recipe], parts: Parts, start: Start | None, processes: int, *, explicit: bool
) -> None:
    for recipe in trained:
        first = Path(recipe.init).name
        if first in list_recipes() and not Path(recipe.init).exists():
            raise UsageError(
                f"the recipe starts from {recipe.init}, which is not here",
                hint=f"Train it first: `vitlab train --recipe {first} --out {recipe.init}`. Or give --init.",
            )
        require_possible(recipe, parts, processes)
        require_positions(recipe.model, recipe.init_positions)
        require_probe_alone(recipe, explicit=explicit)
        if start is not None and recipe.init == call.start:
            _require_body(
                start.spec, recipe.model, "The start weights decide the model: leave out what says otherwise."
            )


def _require_recipe_start(call: TrainCall, recipe: Recipe, console: Console) -> None:
    """The recipe's own start weights must fit its model; what is here costs little to look at."""
    if call.init is None and recipe.init != SCRATCH and Path(recipe.init).exists():
        hint = f"With --init {recipe.init} the start weights decide the model, and the recipe all else."
        _require_body(look_at(recipe.init, console).spec, recipe.model, hint)


def _require_body(old: ModelSpec, new: ModelSpec, hint: str) -> None:
    try:
        require_same_body(old, new)
    except UsageError as error:
        raise UsageError(error.what, hint=hint) from error
    if new != new.with_linear_head():
        raise UsageError("start weights get a linear head, so model.head must be linear", hint=hint)


def _seen_in_images(opened: Opened, scanned: Scanned | None, world: World) -> tuple[Opened, int | None]:
    """The data with its copies, and the bits of deep images: as the first process has seen them, in all."""
    train = train_part(opened.parts)
    facts: dict[str, str] = {}
    if world.is_main:
        bits = sampled_bits(opened.parts[train]) if scanned is None else scanned.bits
        facts = {"copies": json.dumps([] if scanned is None else scanned.copies(train)), "bits": json.dumps(bits)}
    facts = world.gather_dict(facts)
    return dataclasses.replace(opened, copies=json.loads(facts["copies"])), json.loads(facts["bits"])


def _audit(call: TrainCall, opened: Opened, parts: Parts, scanned: Scanned | None, recipe: Recipe) -> Preflight:
    fitted = {"train", "val"} if recipe.train.method == "probe" else {"train"}  # a linear probe is refitted with both
    data = "DATA" if call.in_python is not None or call.source is None else call.source
    check = command_of("data check", CheckOptions(data, columns=call.columns))
    return audit_used(opened, parts.used(), scanned, max_bad=recipe.data.max_bad, fitted=fitted, check=check)


def _ignored_overrides(recipe: Recipe, overrides: Sequence[str]) -> str:
    """What the caller has set without effect, in a sentence."""
    ignored = [key for key in config.overridden(overrides) if probe_ignores(key) and key != "optim.train"]
    if recipe.train.method != "probe" or not ignored:
        return ""
    return f"{', '.join(ignored)}: of no effect on a linear probe; --set train.method=steps trains it in steps"


# --- a run that is resumed --------------------------------------------------------------------------------------------


def _resolve_resume(call: TrainCall, folder: Path, console: Console) -> Job:
    """The job of a stopped run, or of several, from its own folder. What may not change is compared when it is executed."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist, so there is no run to resume")
    if (folder / run_folder.NOISY_STUDENT).is_file():
        raise UsageError(f"{folder} was made by `vitlab noisy-student`", hint=run_folder.resume_command(folder))
    if not (folder / run_folder.CONFIG).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{run_folder.CONFIG}"))
        hint = f"It has several, each of which can be resumed: {', '.join(inside)}." if inside else None
        raise UsageError(f"{folder} is not a run: it has no {run_folder.CONFIG}", hint=hint)
    stored = run_folder.read_run(folder)
    _require_outermost(folder)
    table = with_changes(for_other_data(run_folder.read_config(folder)), call.changes)
    seeds, grid = _runs_of(stored, folder)
    _require_same_runs(call, folder, seeds, grid, table)
    with as_data_gone(folder, stored.cwd):
        given = call.in_python
        recipe, parts = open_recipe(table, console, stored.copies, given)
        opened = None
        if grid is not None:
            again = open_data(recipe.data.source if given is None else given, columns=recipe.data.columns)
            opened = dataclasses.replace(again, copies=stored.copies)
    _require_same_data(folder, recipe.data.source, call.source)
    require_trackers(recipe.train.log)
    return Job(
        recipe=recipe,
        parts=parts,
        folder=folder,
        command=stored.command,
        repeat=stored.repeat,
        recipe_name=stored.recipe,
        reason=stored.reason or "the run's own recipe",
        notes=tuple(stored.notes),
        warnings=tuple(stored.data_warnings),
        seeds=seeds,
        sweep=None if grid is None or opened is None else settle_sweep(grid, recipe, opened),
        resume=True,
    )


def _runs_of(stored: run_folder.RunFile, folder: Path) -> tuple[int, Grid | None]:
    """How many seeds, and the grid of a sweep, that a folder was started with."""
    try:
        if "sweep" in stored.runs:
            ((key, values),) = stored.runs["sweep"].items()
            return 1, Grid(str(key), tuple(map(str, values)))
        return int(stored.runs.get("seeds", 1)), None
    except (ValueError, TypeError, AttributeError) as error:
        raise FileProblem(f"{folder / run_folder.RUN} does not say which runs there are: {error}") from None


def _require_same_runs(call: TrainCall, folder: Path, seeds: int, grid: Grid | None, table: Mapping[str, Any]) -> None:
    """An error where a resumed call asks for other runs than it was started with. It need not ask again."""
    if call.seeds == 1 and call.sweep is None:
        return
    asked = f"--seeds {call.seeds}" if call.sweep is None else str(read_grid(call.sweep, table))
    if seeds == 1 and grid is None:
        raise UsageError(f"{folder} is one run; {asked} cannot be added on resume")
    stored = f"--seeds {seeds}" if grid is None else str(grid)
    if asked != stored:
        raise UsageError(f"{folder} was started with {stored}, not with {asked}", hint="Leave it out, or start anew.")


def _require_outermost(folder: Path) -> None:
    """An error for one run of a sweep: the others decide what it is for, and a trial must not see the test images."""
    place = folder.absolute()  # the parent of `.` would be `.`
    outer = run_folder.outermost(place)
    if (outer / run_folder.NOISY_STUDENT).is_file():
        what = f"{folder} is one run of `vitlab noisy-student`, which is resumed as a whole"
        raise UsageError(what, hint=run_folder.resume_command(place))
    if outer != place and "sweep" in run_folder.read_run(outer).runs:
        what = f"{folder} is one run of a sweep, which is resumed as a whole"
        raise UsageError(what, hint=run_folder.resume_command(place))


def _require_same_data(folder: Path, source: str, data: str | None) -> None:
    """An error where the caller names other data than the run in `folder` has. Its own may be named again."""
    if data is not None and data != source and Path(data).resolve() != Path(source).resolve():
        raise UsageError(
            f"the run in {folder} was started with {source}, not with {data}",
            hint=f"Leave {data} out to resume the run, or --resume to start a new one.",
        )


@contextlib.contextmanager
def as_data_gone(folder: Path, began: str) -> Generator[None]:
    """Data that a run started with was there once: an unknown name would be a strange thing to hear."""
    try:
        yield
    except VitlabError as error:
        elsewhere = bool(began) and Path(began) != Path.cwd()
        hint = f"The run was started in {began}, where its names of files count from: resume it there."
        if isinstance(error, NoSuchData):
            back = "Put it back where it was: a run resumes with the images it started with."
            what = f"the data of {folder} is not here any more: {error.given}"
            raise UsageError(what, hint=hint if elsewhere else back) from error
        if not elsewhere:
            raise
        raise UsageError(error.what, hint=hint) from error
