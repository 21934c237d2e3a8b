"""Published checkpoints: downloaded once, verified and read by the catalogue.

Owns the weights' part of the cache folder and the comparison of what a file holds with what the catalogue says of it.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.download import fetch, shown
from vitlab.core.environment import OFFLINE_VARIABLE, is_offline
from vitlab.core.errors import FileProblem
from vitlab.core.reading import read_text
from vitlab.data.preprocess import Preprocess
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec
from vitlab.weights.bundle import Bundle
from vitlab.weights.card import convert_command, write_card
from vitlab.weights.catalogue import Checkpoint, find
from vitlab.weights.foreign import ConvertReport, Reading, read_foreign


def read_published(
    name: str, *, drop: Sequence[str] = (), console: Console | None = None
) -> tuple[Bundle, ConvertReport]:
    """Read a checkpoint by name, downloading it first if needed."""
    entry = find(name)
    path = entry.path
    if not path.is_file():
        download(entry, console or Console())
    found = _require_intact(entry)
    rule = config.from_dict(Preprocess, entry.preprocess, "preprocess.")
    bundle, report = read_foreign(path, Reading(drop=tuple(drop), preprocess=rule))
    _require_described(entry, bundle.model.spec, str(bundle.origin["format"]))
    if not _record(path).is_file():  # now, because a file that is not a model must not be what later ones are held to
        with contextlib.suppress(FileProblem):  # a cache that others share may be read-only
            fsio.write_file(_record(path), f"{found}\n")
    return dataclasses.replace(bundle, card=_card(entry, bundle.model.spec)), report


def _record(path: Path) -> Path:
    """Where the hash of the first good download is kept."""
    return path.with_name(f"{path.name}.sha256")


def _require_intact(entry: Checkpoint) -> str:
    """The file's hash; must be the catalogue's, else that of the first download."""
    path, record = entry.path, _record(entry.path)
    found = fsio.hash_file(path)
    first = read_text(record, 1000).strip() if record.is_file() else found
    if found != (expected := entry.sha256 or first):
        raise FileProblem(
            f"{path} is damaged: its SHA-256 is {found}, and {expected} was expected",
            hint=f"Delete it and {record.name} beside it, and load it again.",
        )
    return found


def download(entry: Checkpoint, console: Console) -> None:
    """Fetch the file of a checkpoint into the cache."""
    if is_offline():
        hint = f"Unset it, or save {shown(entry.address) if entry.address else entry.file} as {entry.path}"
        raise FileProblem(f"{entry.name} is not on this machine, and {OFFLINE_VARIABLE} is set", hint=hint)
    if not entry.address:
        raise FileProblem(
            f"{entry.name} is not on this machine, and its address is not known",
            hint=f"Save {entry.file} as {entry.path}",
        )
    fsio.remove_file(_record(entry.path))  # of a file that somebody took away
    console.say(f"{entry.name}: {shown(entry.address)} -> {entry.path}")
    try:
        fetch(entry.address, entry.path, size=entry.size, sha256=entry.sha256, console=console)
    except FileProblem as error:
        raise FileProblem(
            f"{entry.name} is not on this machine: {error.what}",
            hint=f"Run it again, or download {shown(entry.address)} elsewhere and save it as {entry.path}",
        ) from error


def _require_described(entry: Checkpoint, found: ModelSpec, form: str) -> None:
    """Raise where the arrays contradict the catalogue."""
    facts = {"format": (entry.format, form), "model": (format_name(entry.spec), format_name(found))}
    facts |= {key: (getattr(entry.spec, key), getattr(found, key)) for key in entry.stated}
    for key, (expected, held) in facts.items():
        if expected != held:
            raise FileProblem(
                f"{entry.path} is not what the catalogue calls {entry.name}: {key} is {held}, and {expected} was expected",
                hint="Load the file by its path to use it as it is.",
            )


def _card(entry: Checkpoint, spec: ModelSpec) -> str:
    expected = entry.expected
    accuracy = (
        {} if expected is None else {"expected top-1": f"{expected.top1} % ({expected.settings}; {expected.source})"}
    )
    return write_card(
        title=entry.name,
        spec=spec,
        data=entry.title,
        command=convert_command(entry.name),
        metrics={"address": shown(entry.address) if entry.address else "not known", **accuracy},
        licence=entry.licence,
    )
