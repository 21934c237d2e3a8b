"""The recipe of a training call, before the images have decided the rest: start weights, the named recipe or a chosen one."""

import contextlib
import dataclasses
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitlab.core import config
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.memory import free_memory
from vitlab.data.auditing.preflight import measured_bands, median_side
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.parts import train_part
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import load, require_weights
from vitlab.models.names import parse_name
from vitlab.models.spec import ModelSpec
from vitlab.training.call import TrainCall
from vitlab.training.choice import Started, choose, gather_facts, requested_mode, start_from
from vitlab.training.recipe import (
    MODEL_NAME,
    SCRATCH,
    DataConfig,
    merged,
    read_data_config,
    read_recipe,
    with_changes,
)
from vitlab.training.start import AUTO, AutoStart, auto_start
from vitlab.weights.catalogue import find, is_name


class Start(NamedTuple):
    """What start weights are."""

    spec: ModelSpec
    preprocess: Preprocess


class Draft(NamedTuple):
    """A recipe's table before the data has decided the rest, and why it is this one."""

    table: dict[str, Any]
    because: str | None  # None where the caller named the recipe
    advice: str
    started: Started
    start: Start | None


def with_start(call: TrainCall, opened: Opened, world: World, console: Console) -> tuple[TrainCall, str]:
    """The call with start weights named, and what is to be said of them. A recipe, or a model, has its own start."""
    given = config.overridden(call.changes)
    if call.recipe is not None or call.model is not None or MODEL_NAME in given:
        return dataclasses.replace(call, init=None) if call.start == AUTO else call, ""
    if call.start not in (None, AUTO):
        return call, ""
    if measured_bands(opened.parts[train_part(opened.parts)]) is not None:
        return dataclasses.replace(call, init=SCRATCH), ""  # published weights know grey and RGB images
    side, fetch = given.get("data.image_size"), not call.dry_run
    size = None if side is None else read_data_config({"data": {"source": "", "image_size": side}}).image_size
    found = world.run_or_fail_everywhere(
        lambda: auto_start(call.data_words(), console, fetch=fetch, size=size)._asdict() if world.is_main else {}
    )
    start = AutoStart(**world.gather_dict(found))
    return dataclasses.replace(call, init=start.init), start.note


def unscaled_rate(chosen: Mapping[str, Any], table: Mapping[str, Any], call: TrainCall) -> str:
    """That the learning rate stayed where only the batch was changed: most rules would scale it too."""
    given = config.overridden(call.changes)
    batch, rate = given.get("train.batch_size"), table["optim"].get("lr")
    if "optim.lr" in given or not isinstance(batch, int) or not isinstance(rate, float):
        return ""
    before = config.flat(chosen).get("train.batch_size")
    if not isinstance(before, int) or batch == before or table["train"].get("method") == "probe":
        return ""
    return (
        f"the batch is {batch} instead of {before}, and the learning rate stays {rate:g}; in proportion it would be "
        f"--lr {rate * batch / before:.2g}"
    )


def draft_recipe(call: TrainCall, data: str, train: Dataset, world: World, console: Console) -> Draft:
    """The recipe that was named, else the one that suits data, start weights and machine; with what the caller gave."""
    given: dict[str, Any] = {"seed": call.seed, "data": {"source": data}}
    given |= {} if call.start is None else {"init": call.start}
    given |= {} if call.model is None else {"model": {"name": call.model}}
    table = {} if call.recipe is None else read_recipe(call.recipe)
    start = None
    if call.start is not None and call.start != SCRATCH:  # after what costs less: it may have to be downloaded
        start = look_at(call.start, console, fetch=call.recipe is None and not call.dry_run)
    if call.recipe is not None:
        started = Started(table) if start is None else start_from(table, *start)
        return Draft(with_changes(merged(started.table, given), call.changes), None, "", started, start)
    memory = free_memory(torch.device("cpu"))
    facts = gather_facts(train, median_side(train), world.device, memory, world.size)
    table, because, advice = choose(facts, start, requested_mode(call.changes))
    table["title"] = Path(data).name
    if call.model is not None:  # of another family than the one that was chosen, perhaps
        fields = {field.name for field in dataclasses.fields(parse_name(call.model))}
        table["model"] = {key: value for key, value in table["model"].items() if key in fields}
    return Draft(with_changes(merged(table, given), call.changes), because, advice, Started(table), start)


_COLOUR_ONLY = {"randaugment": "none", "brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}


def for_bands(table: dict[str, Any], opened: Opened) -> tuple[dict[str, Any], str]:
    """The table for images that are neither grey nor RGB, unless it has `mode = "array"` itself, and a note."""
    data = table["data"]
    bands = measured_bands(opened.parts[train_part(opened.parts)], data.get("bits"))
    if bands is None or data.get("mode") == "array":
        return table, ""
    augment = data.get("augment", {})
    off = {key: value for key, value in _COLOUR_ONLY.items() if augment.get(key, value) != value}
    settings = {"mode": "array", "mean": list(bands.mean), "std": list(bands.std), "augment": {**augment, **off}}
    settings |= {} if bands.bits is None else {"bits": bands.bits}
    note = f"images of {len(bands.mean)} channels: data.mode=array, with the mean and std of the training images"
    note += "" if bands.bits is None else f", and data.bits={bands.bits}"
    note += f"; off, for they are for colours: {', '.join(off)}" if off else ""
    return {**table, "data": {**data, **settings}}, note


def split_settings(data: str, requested: Any) -> DataConfig:
    """What decides, before there is a recipe, which images are kept for the test; `requested` are the keys of `data`."""
    if not isinstance(requested, Mapping):
        raise UsageError("data is a table of keys; write --set data.KEY=VALUE")
    kept = {key: requested[key] for key in ("test_frac", "split_seed", "min_images") if key in requested}
    return config.from_dict(DataConfig, {"source": data, "image_size": [1, 1], **kept}, "data.")


@contextlib.contextmanager
def as_usage_error(named_here: bool) -> Generator[None]:
    """Files that the caller named and that cannot be trained on are a wrong call; a download that fails is not."""
    try:
        yield
    except FileProblem as problem:
        if not named_here:
            raise
        raise UsageError(problem.what, hint=problem.hint) from problem


def look_at(init: str, console: Console, *, fetch: bool = False) -> Start:
    """What start weights are. Of published ones that are not here the catalogue knows it, unless they are to be fetched."""
    if not fetch and not Path(init).exists() and is_name(init) and not (entry := find(init)).path.is_file():
        return Start(entry.spec, config.from_dict(Preprocess, entry.preprocess, "preprocess."))
    with as_usage_error("@" not in init):
        weights = load(init, device="cpu", quiet=console.quiet or not console.verbose)
        require_weights(weights)
    return Start(weights.model.spec, weights.preprocess)
