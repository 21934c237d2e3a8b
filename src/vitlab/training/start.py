"""Which weights a run starts from where the caller names none: the cache's, else downloaded ones, else the package's own.

A Vision Transformer that has seen millions of images beats one that has seen yours alone, so `--init auto` is the default.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vitlab.core.command import command_line
from vitlab.core.console import Console
from vitlab.core.environment import is_offline
from vitlab.core.errors import FileProblem, UsageError
from vitlab.models.cost import count_params
from vitlab.models.names import with_size
from vitlab.models.spec import Pair
from vitlab.training.health import coarse_grid
from vitlab.training.recipe import SCRATCH
from vitlab.weights.catalogue import Checkpoint, find
from vitlab.weights.published import download

AUTO = "auto"
# The first is downloaded where none of them is in the cache: small, without a head, and strong as it is on photos of any kind.
PREFERRED = ("ViT-S/14@dinov2", "ViT-B/14@dinov2", "ViT-S/16@augreg-i21k", "ViT-B/16@augreg-i21k")
SHIPPED = "ViT-Ti/16@dinov2-distilled"  # in the package, for whoever is offline


class AutoStart(NamedTuple):
    init: str  # a name of the catalogue, or SCRATCH
    note: str  # one line or several


def auto_start(data: Sequence[str], console: Console, *, fetch: bool, size: Pair | None = None) -> AutoStart:
    """The weights to start from, and lines about them. With `fetch`, they lie in the cache afterwards.

    `data` are the words of the command that name the data, for the command that does better; none where no command can name it.
    Weights that cannot see images of `size` well, where the caller wants one, are passed over.
    """
    usable = [entry for entry in map(find, PREFERRED) if not misfit(entry, size)]
    if here := [entry for entry in usable if entry.path.is_file()]:
        return AutoStart(here[0].name, f"start weights: {describe(here[0])}, from the cache; --init scratch for none")
    if not usable:
        why = misfit(find(SHIPPED), size)
        note = f"start weights: none, for {why}" if why else _shipped(None, data, "")
        return AutoStart(SCRATCH if why else SHIPPED, note)
    entry = usable[0]
    if is_offline():
        return _without(entry, data, size, "VITLAB_OFFLINE is set")
    if not fetch:
        return AutoStart(entry.name, f"start weights: {describe(entry)}, to be downloaded; --init scratch for none")
    console.say(f"Start weights: {describe(entry)}, downloaded once. Use --init scratch to train from scratch.")
    try:
        download(entry, console)
    except FileProblem as problem:
        return _without(entry, data, size, problem.what.partition(": ")[2] or problem.what)
    return AutoStart(entry.name, f"start weights: {entry.name}")


def misfit(entry: Checkpoint, size: Pair | None) -> str:
    """Why these weights do not suit images of this size; empty where they do."""
    if size is None:
        return ""
    try:
        return coarse_grid(with_size(entry.spec, image_size=size)) or ""
    except UsageError as error:
        return error.what


def describe(entry: Checkpoint) -> str:
    """`ViT-S/14@dinov2 (88 MB, Apache-2.0)`."""
    size = entry.size or (entry.mib or 0) * 2**20 or count_params(entry.spec) * 4  # all of these files are float32
    return f"{entry.name} ({size / 1e6:.0f} MB, {entry.licence})"


def _without(better: Checkpoint, data: Sequence[str], size: Pair | None, why: str) -> AutoStart:
    """What is left where `better` could not be downloaded."""
    if unfit := misfit(find(SHIPPED), size):
        return AutoStart(SCRATCH, f"start weights: none, for {unfit}\n{_later(better, data, why)}")
    return AutoStart(SHIPPED, _shipped(better, data, why))


def _shipped(better: Checkpoint | None, data: Sequence[str], why: str) -> str:
    note = f"start weights: {describe(find(SHIPPED))}, which come with vitlab; --init scratch for none"
    return note if better is None else f"{note}\n{_later(better, data, why)}"


def _later(better: Checkpoint, data: Sequence[str], why: str) -> str:
    command = command_line("train", *data, options={"init": better.name}) if data else f"give --init {better.name}"
    return (
        f"{better.name} is stronger and could not be downloaded ({why}); once you are online:  {command}\n"
        f"or save {better.address} as {better.path}"
    )
