"""Which weights a run starts from where the caller names none: the cache's, else downloaded ones, else the package's own.

A Vision Transformer that has seen millions of images beats one that has seen yours alone, so `--init auto` is the default.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vitlab.core.command import command_line
from vitlab.core.console import Console
from vitlab.core.environment import is_offline
from vitlab.core.errors import FileProblem
from vitlab.models.cost import count_params
from vitlab.weights.catalogue import Checkpoint, find
from vitlab.weights.published import download

AUTO = "auto"
# The first is downloaded where none of them is in the cache: small, without a head, and strong as it is on photos of any kind.
PREFERRED = ("ViT-S/14@dinov2", "ViT-B/14@dinov2", "ViT-S/16@augreg-i21k", "ViT-B/16@augreg-i21k")
SHIPPED = "ViT-Ti/16@dinov2-distilled"  # in the package, for whoever is offline


class AutoStart(NamedTuple):
    init: str  # a name of the catalogue
    note: str  # one line or several


def auto_start(data: Sequence[str], console: Console, *, fetch: bool) -> AutoStart:
    """The weights to start from, and lines about them. With `fetch`, they lie in the cache afterwards.

    `data` are the words of the command that name the data, for the command that does better.
    """
    entries = [find(name) for name in PREFERRED]
    if here := [entry for entry in entries if entry.path.is_file()]:
        return AutoStart(here[0].name, f"start weights: {describe(here[0])}, from the cache; --init scratch for none")
    entry = entries[0]
    if is_offline():
        return AutoStart(SHIPPED, _shipped(entry, data, "VITLAB_OFFLINE is set"))
    if not fetch:
        return AutoStart(entry.name, f"start weights: {describe(entry)}, to be downloaded; --init scratch for none")
    console.say(f"Start weights: {describe(entry)}, downloaded once. Use --init scratch to train from scratch.")
    try:
        download(entry, console)
    except FileProblem as problem:
        return AutoStart(SHIPPED, _shipped(entry, data, problem.what.partition(": ")[2] or problem.what))
    return AutoStart(entry.name, f"start weights: {entry.name}")


def describe(entry: Checkpoint) -> str:
    """`ViT-S/14@dinov2 (88 MB, Apache-2.0)`."""
    size = entry.size or (entry.mib or 0) * 2**20 or count_params(entry.spec) * 4  # all of these files are float32
    return f"{entry.name} ({size / 1e6:.0f} MB, {entry.licence})"


def _shipped(better: Checkpoint, data: Sequence[str], why: str) -> str:
    command = command_line("train", *data, options={"init": better.name})
    return (
        f"start weights: {describe(find(SHIPPED))}, which come with vitlab; --init scratch for none\n"
        f"{better.name} is stronger and could not be downloaded ({why}); once you are online:  {command}\n"
        f"or save {better.address} as {better.path}"
    )
