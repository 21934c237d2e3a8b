"""Everything about a training run that is decided before its first step: data, parts, recipe, and the reasons in sentences.

Whatever can be wrong with a call is found here. A run that goes on has decided it all before, and reads it from its folder.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from vitlab.core import config
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.memory import free_memory
from vitlab.data.auditing.audit import SERIOUS, TITLES, Item, Scanned, audit, scan_parts
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.decode import bits_for, largest_value
from vitlab.data.decode import opened as opened_image
from vitlab.data.parts import Parts, arrange
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import load
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec, ViTSpec
from vitlab.runs.training import run_folder
from vitlab.runs.training.choice import Started, choose, gather_facts, requested_mode, start_from, tell
from vitlab.runs.training.health import coarse_grid
from vitlab.runs.training.live_run import WARNING
from vitlab.runs.training.micro_batch import by_estimate
from vitlab.runs.training.probing import changes_nothing, require_head_alone
from vitlab.runs.training.run import require_possible
from vitlab.runs.training.run_report import CHOSEN
from vitlab.runs.training.run_steps import load_teacher
from vitlab.runs.training.several import Several, read_several, require_same, require_whole
from vitlab.runs.training.sweep import (
    Sweep,
    read_sweep,
    require_effect,
    settle_sweep,
    with_dev_split,
)
from vitlab.runs.training.trackers import require_trackers
from vitlab.training.memory import require_room
from vitlab.training.recipe import (
    SCRATCH,
    DataConfig,
    Recipe,
    for_other_data,
    list_recipes,
    merged,
    open_recipe,
    read_data_config,
    read_recipe,
    recipe_from_dict,
    recipe_to_dict,
    with_changes,
)
from vitlab.weights.catalogue import find, is_name
from vitlab.weights.surgery import require_same_body

_AUDITED = 50_000  # images; larger sets are audited by `vitlab data check`, when one has the time
_SAMPLED = 200  # images of a larger set whose size is looked at
_USUAL_SIDE = 224  # where none could be


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first step."""

    recipe: Recipe
    parts: Parts
    reason: str
    counts: str = ""  # who trains, tunes and tests; with `notes`, empty where a run goes on that has told it before
    started: str = ""  # the model, where the start weights have another than the recipe says
    notes: tuple[str, ...] = ()  # where the parts come from, what the audit found, what would do better
    seeds: int = 1
    sweep: Sweep | None = None

    @property
    def several(self) -> Several | None:
        """None where there is one run."""
        if self.sweep is not None:
            return Several(1, self.sweep.key, self.sweep.values)
        return Several(self.seeds) if self.seeds > 1 else None

    @property
    def said(self) -> tuple[str, ...]:
        """All of it in sentences, for the log."""
        started = (f"model: {self.started}",) if self.started else ()
        return (self.counts, f"{CHOSEN}{self.reason}.", *started, *self.notes) if self.counts else ()


def plan_train(
    data: str | Path,
    recipe: str | None,
    init: str | None,
    model: str | None,
    overrides: Sequence[str],
    seed: int,
    world: World,
    console: Console,
    *,
    sweep: str | None = None,
) -> Plan:
    """Opens the data, settles the recipe and audits; whatever can be wrong is found here.

    Of several processes, the first audits for all, and shares what decides something: copies, which a split keeps together,
    and the range of deep images.
    """
    device, processes = world.device, world.size
    with _told_as_a_wrong_call(Path(data).exists()):
        opened = open_data(data, console=console)
    if model is not None and init not in (None, SCRATCH):
        raise UsageError("the start weights decide the model; leave --model or --init out")
    given: dict[str, Any] = {"seed": seed, "data": {"source": str(data)}}
    given |= {} if init is None else {"init": init}
    given |= {} if model is None else {"model": {"name": model}}
    with _told_as_a_wrong_call(True):
        learnt = arrange(opened, _held_out(given, overrides)).train
    table, because, advice = {} if recipe is None else read_recipe(recipe), None, ""
    start = None if init is None or init == SCRATCH else _look_at(init, console, fetch=recipe is None)
    instead = Started(table) if recipe is None or start is None else start_from(table, *start)
    table = instead.table
    if recipe is None:
        memory = free_memory(torch.device("cpu"))
        facts = gather_facts(learnt, _median_side(learnt), device, memory, processes)
        table, because, advice = choose(facts, start, requested_mode(overrides))
        table["title"] = f"{Path(data).name}"
    table = with_changes(merged(table, given), overrides)
    tried = None if sweep is None else read_sweep(sweep, table)
    if tried is not None:
        table = with_dev_split(table)
        asked = with_changes(table, overrides)
        table = asked if asked["data"]["val_frac"] else table  # the caller's share before the recipe's, but not none
    settings = read_data_config(table)
    if settings.source != str(data):
        raise UsageError(f"the data were named twice: {data}, and data.source={settings.source}")
    if start is not None:
        _require_patches(start[0], settings.image_size)
    parts = arrange(opened, settings, needs_val=tried is not None)
    whole = recipe_from_dict(table, len(parts.train.classes))
    require_trackers(whole.train.log)
    whole, settled, smaller = _settled(whole, tried, opened, device, processes)
    each = (whole,) if settled is None else settled.recipes
    for one in each:
        _require_start(one)
        require_possible(one, parts, processes)
        require_head_alone(one, said="train" in table["optim"])
        if start is not None and one.init == init:
            _require_body(start[0], one.model, "The start weights decide the model: leave out what says otherwise.")
    # The recipe's own must fit it; what is here costs little to look at.
    if init is None and whole.init != SCRATCH and Path(whole.init).exists():
        hint = f"With --init {whole.init} the start weights decide the model, and the recipe all else."
        _require_body(_look_at(whole.init, console)[0], whole.model, hint)
    for one in {(one.teacher, one.data.preprocess()): one for one in each}.values():  # each teacher once
        with _told_as_a_wrong_call("@" not in one.teacher):
            load_teacher(one, parts.train.classes, torch.device("cpu"), quiet=console.quiet)
    # Last, for it takes longest: a wrong call is told before.
    scanned = world.run_or_fail_everywhere(lambda: _scanned(opened, parts, console) if world.is_main else None)
    opened, bits = _learnt_from_images(opened, scanned, world)
    deep = ""
    if bits is not None and "bits" not in table["data"]:
        deep = f"data.bits={bits}: the grey images of more than 8 bits make use of {bits} (--set data.bits=16 for all)"
        whole = dataclasses.replace(whole, data=dataclasses.replace(whole.data, bits=bits))
    if opened.copies or deep:
        parts = arrange(opened, settings, needs_val=tried is not None)
        settled = None if tried is None else settle_sweep(tried, whole, opened)
    found = world.run_or_fail_everywhere(lambda: _audited(opened, parts, scanned, whole) if world.is_main else [])
    reason = f"the recipe {recipe}, as asked" if because is None else tell(whole, len(parts.train), because)
    counts = f"{len(parts.train):,} to train on"
    counts += "" if parts.val is None else f", {len(parts.val):,} for validation"
    counts += "" if parts.test is None else f", {len(parts.test):,} to test on"
    idle = _idle_overrides(whole, overrides)
    notes = [
        *parts.notes,
        *found,
        *(sentence for sentence in (instead.pixels, deep, advice, smaller, idle) if sentence),
    ]
    counts = f"{len(parts.train.classes)} classes: {counts}"
    return Plan(whole, parts, reason, counts, instead.model, tuple(notes), sweep=settled)


def _settled(
    whole: Recipe, tried: tuple[str, tuple[str, ...]] | None, opened: Opened, device: torch.device, processes: int
) -> tuple[Recipe, Sweep | None, str | None]:
    """The recipe, and all of a sweep, with a micro-batch that fits: one for all, that of the one which needs most memory."""
    if tried is not None:
        require_effect(tried[0], whole)
    settled = None if tried is None else settle_sweep(tried, whole, opened)
    each = (whole,) if settled is None else settled.recipes
    for one in each:
        require_room(one, device, processes)
    fitting = [by_estimate(one, device, processes) for one in each]
    tightest, smaller = min(fitting, key=lambda found: found[0].train.micro_batch or math.inf)
    if smaller is None:
        return whole, settled, None
    whole = dataclasses.replace(whole, train=dataclasses.replace(whole.train, micro_batch=tightest.train.micro_batch))
    return whole, None if tried is None else settle_sweep(tried, whole, opened), smaller


@contextlib.contextmanager
def _told_as_a_wrong_call(named_here: bool) -> Generator[None]:
    """Files that the caller named and that cannot be trained on are a wrong call; a download that fails is not."""
    try:
        yield
    except FileProblem as problem:
        if not named_here:
            raise
        raise UsageError(problem.what, hint=problem.hint) from problem


def _look_at(init: str, console: Console, *, fetch: bool = False) -> tuple[ModelSpec, Preprocess]:
    """What start weights are. Of published ones that are not here the catalogue tells it, unless they are to be fetched."""
    if not fetch and not Path(init).exists() and is_name(init) and not (entry := find(init)).path.is_file():
        return entry.spec, config.from_dict(Preprocess, entry.preprocess, "preprocess.")
    with _told_as_a_wrong_call("@" not in init):
        weights = load(init, device="cpu", quiet=console.quiet)
    return weights.model.spec, weights.preprocess


def _require_patches(spec: ModelSpec, image_size: tuple[int, int]) -> None:
    if not isinstance(spec, ViTSpec):
        return
    try:
        spec.grid_for(image_size)
    except UsageError as error:
        what = f"the images do not fit the start weights, {format_name(spec)}: {error.what}"
        raise UsageError(what, hint=f"{error.hint} Give it with --set data.image_size.") from error


def _require_body(old: ModelSpec, new: ModelSpec, hint: str) -> None:
    try:
        require_same_body(old, new)
    except UsageError as error:
        raise UsageError(error.what, hint=hint) from error
    if isinstance(new, ViTSpec) and new.head != "linear":
        raise UsageError(f"start weights get a linear head, so model.head={new.head} is not available", hint=hint)


def _require_start(recipe: Recipe) -> None:
    """A recipe that goes on from another one needs its run."""
    first = Path(recipe.init).name
    if first in list_recipes() and not Path(recipe.init).exists():
        raise UsageError(
            f"the recipe starts from {recipe.init}, which is not here",
            hint=f"Train it first: `vitlab train --recipe {first} --out {recipe.init}`. Or give --init.",
        )


def _held_out(given: Mapping[str, Any], overrides: Sequence[str]) -> DataConfig:
    """What decides, before there is a recipe, which images are kept for the test."""
    asked = with_changes({"data": {}}, overrides)["data"]
    if not isinstance(asked, Mapping):
        raise UsageError("data is a table of keys; write --set data.KEY=VALUE")
    kept = {key: asked[key] for key in ("test_frac", "split_seed") if key in asked}
    return config.from_dict(DataConfig, {**given["data"], "image_size": [1, 1], **kept}, "data.")


def plan_resume(
    folder: Path, overrides: Sequence[str], console: Console, *, seeds: int = 1, sweep: str | None = None
) -> Plan:
    """The recipe of a run that was stopped, or of several, from its own folder. What may not change is told when compared."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist, so there is no run to resume")
    if not (folder / run_folder.CONFIG).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{run_folder.CONFIG}"))
        hint = f"It has several, each of which can be resumed: {', '.join(inside)}." if inside else None
        raise UsageError(f"{folder} is not a run: it has no {run_folder.CONFIG}", hint=hint)
    require_whole(folder)
    table = with_changes(for_other_data(run_folder.read_config(folder)), overrides)
    asked = Several(seeds) if sweep is None else Several(1, *read_sweep(sweep, table))
    several = read_several(folder)
    require_same(folder, several, asked)
    try:
        copies = run_folder.copies_at_start(folder)
        recipe, parts = open_recipe(table, console, copies)
    except VitlabError as error:
        began = run_folder.recorded_at_start(folder, "folder")
        if not began or Path(began) == Path.cwd():
            raise
        hint = f"The run was begun in {began}, where its names of files count from: resume it there."
        raise UsageError(error.what, hint=hint) from error
    require_trackers(recipe.train.log)
    told = run_folder.read_log(folder).splitlines()
    chosen = [line.removeprefix(CHOSEN).removesuffix(".") for line in told if line.startswith(CHOSEN)]
    plan = Plan(recipe, parts, chosen[0] if chosen else "the run's own recipe")
    if several is None:
        return plan
    if chosen:  # of several, the log has what opens that of each
        plan = dataclasses.replace(plan, counts=told[0], notes=tuple(told[2:]))
    if not several.key:
        return dataclasses.replace(plan, seeds=several.seeds)
    opened = dataclasses.replace(open_data(recipe.data.source), copies=copies)
    return dataclasses.replace(plan, sweep=settle_sweep((several.key, several.values), recipe, opened, folder))


def describe_plan(plan: Plan, folder: Path) -> dict[str, str | list[str]]:
    """For --dry-run."""
    recipe = plan.recipe
    told: dict[str, str | list[str]] = {
        "out": str(folder),
        "model": format_name(recipe.model),
        "start": recipe.init,
        "images": plan.counts,
        "chosen": plan.reason,
    }
    if plan.started:
        told["started"] = plan.started
    if plan.notes:
        told["notes"] = list(plan.notes)
    if plan.sweep is not None:
        told["sweep"] = plan.sweep.sentence()
    if plan.seeds > 1:
        told["seeds"] = f"{plan.seeds} runs, of seeds {recipe.seed} to {recipe.seed + plan.seeds - 1}"
    careful = coarse_grid(recipe.model)
    return told if careful is None else {**told, "warning": careful}


def recipe_table(plan: Plan) -> Mapping[str, Any]:
    """For --print-config."""
    return recipe_to_dict(plan.recipe)


def _scanned(opened: Opened, parts: Parts, console: Console) -> Scanned | None:
    """Every image looked at once; None where they are too many for that."""
    used = (part for part in (parts.train, parts.val, parts.test) if part is not None)
    if sum(map(len, used)) > _AUDITED:
        return None
    return scan_parts(opened.parts, workers=max(1, (os.cpu_count() or 1)), console=console)


def _learnt_from_images(opened: Opened, scanned: Scanned | None, world: World) -> tuple[Opened, int | None]:
    """The data with its copies, and the bits of deep images: as the first process has seen them, in all."""
    train = next(name for name in ("train", "all") if name in opened.parts)
    facts: dict[str, str] = {}
    if world.is_main:
        bits = _sampled_bits(opened.parts[train]) if scanned is None else scanned.bits
        facts = {"copies": json.dumps([] if scanned is None else scanned.copies(train)), "bits": json.dumps(bits)}
    facts = world.gather_dict(facts)
    return dataclasses.replace(opened, copies=json.loads(facts["copies"])), json.loads(facts["bits"])


def _audited(opened: Opened, parts: Parts, scanned: Scanned | None, recipe: Recipe) -> list[str]:
    """What the audit of the parts that are used finds, in a line for each kind: a copy may have come into two of them."""
    if scanned is None:
        return ["a large set: not audited; `vitlab data check` does it"]
    used = {name: part for name in ("train", "val", "test") if (part := getattr(parts, name)) is not None}
    found = audit(dataclasses.replace(opened, parts=used), scanned=scanned.of(used))
    bad, max_bad = found.counts.get("unreadable", 0), recipe.data.max_bad
    if bad > max_bad:
        raise UsageError(
            f"{bad:,} files cannot be used, and data.max_bad allows {max_bad}",
            hint=f"`vitlab data check DATA --out DIR` shows them. Take them away, or --set data.max_bad={bad}.",
        )
    said = [f"{WARNING if kind in SERIOUS else '-- '}{TITLES[kind]}: {count:,}" for kind, count in found.counts.items()]
    fitted = {"train", "val"} if recipe.train.method == "probe" else {"train"}  # a linear probe is refitted with both
    if learned := sum(_leaked(one.items, fitted) for one in found.findings if one.kind == "leak"):
        said.append(f"{WARNING}{learned:,} of what is tested or tuned on are trained on, too: scores may be too good")
    return [*said, "`vitlab data check DATA --out DIR` shows them"] if said else []


def _leaked(items: Sequence[Item], fitted: Set[str]) -> int:
    """How many of these images, which show the same thing, test or tune what was fitted to one of another part."""
    parts = {item.part for item in items} & fitted
    return sum(item.part != "train" and bool(parts - {item.part}) for item in items)


def _idle_overrides(recipe: Recipe, overrides: Sequence[str]) -> str:
    """What the caller has set in vain, in a sentence."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    idle = [key for key in keys if changes_nothing(key) and key != "optim.train"]
    if recipe.train.method != "probe" or not idle:
        return ""
    return f"{', '.join(idle)}: of no effect on a linear probe; --set train.method=steps trains it in steps"


def _sample(dataset: Dataset) -> list[int]:
    return torch.linspace(0, len(dataset) - 1, min(_SAMPLED, len(dataset))).long().tolist()


def _median_side(dataset: Dataset) -> int:
    """Of a sample, by the files' headers."""
    sides: list[int] = []
    for i in _sample(dataset):
        # What cannot be read is met again in training, and counted there.
        with contextlib.suppress(VitlabError, OSError), opened_image(dataset.read(i)) as image:
            sides.append(min(image.size))
    return sorted(sides)[len(sides) // 2] if sides else _USUAL_SIDE


def _sampled_bits(dataset: Dataset) -> int | None:
    """What the deep grey images of a sample make use of; None where the first is not one, and no further shard is fetched."""
    largest = 0
    for i in _sample(dataset):
        with contextlib.suppress(VitlabError, OSError):
            largest = max(largest, largest_value(dataset.read(i)))
        if not largest:
            break
    return bits_for(largest) if largest else None
