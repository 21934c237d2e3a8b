"""Data sets known by name, opened: found here, or fetched first. Facts are in `named`, layouts in `packed` and `raw`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from vitlab.core import download as net
from vitlab.core.console import Console
from vitlab.core.environment import DATA_VARIABLE, OFFLINE_VARIABLE, data_folder, is_offline
from vitlab.core.errors import FileProblem, UnknownName, UsageError, VitlabError
from vitlab.data.dataset import Opened
from vitlab.data.sources.digits import load_digits
from vitlab.data.sources.named import (
    BUILT_IN,
    NamedSet,
    cache_of,
    find_named,
    folders_of,
    lacking,
    packed_files,
    places,
)
from vitlab.data.sources.packed import open_packed
from vitlab.data.sources.raw import images as raw_images
from vitlab.data.sources.raw import pixels as raw_pixels
from vitlab.data.sources.raw import scenes as raw_scenes
from vitlab.data.sources.raw.files import RawFiles, scan

_GB = 10**9
_EXPANDED = ".expanded"  # hidden, so that looking through the set's folder does not find things twice


def open_named(name: str, *, download: bool = True, console: Console | None = None) -> Opened:
    """The parts of a named set, downloaded first if it is not here and may be.

    `imagenet-c:fog/3` is one corruption at one severity, `imagenet-c:fog` at all five; `imagenet-c` is the fifteen of its mean.
    """
    name, colon, inside = name.partition(":")
    known = find_named(name)
    if colon and known.layout != "imagenet_c":
        raise UnknownName("data set", f"{name}:{inside}", [name], hint="Only imagenet-c takes a part after the colon.")
    if known.name == BUILT_IN:
        return Opened({"all": load_digits()})
    if not places(known):
        _bring(known, download, console or Console())
    folders = places(known)
    opened = _open(known, folders)
    if known.layout == "imagenet_c":
        opened = _corruption(opened, inside)
    return _check(known, folders[0], opened, whole=not inside)


def _corruption(opened: Opened, wanted: str) -> Opened:
    """The images of one corruption, at one severity or all, or of all that count."""
    test = opened.part("test")
    if wanted:
        rows = [i for i, key in enumerate(test.keys) if f"{key}/".startswith(f"{wanted}/")]
    else:
        rows = [i for i, key in enumerate(test.keys) if key.partition("/")[0] not in raw_images.EXTRA_CORRUPTIONS]
    if not rows:
        kinds = sorted({key.partition("/")[0] for key in test.keys})
        raise UsageError(
            f"there are no images of {wanted or 'the fifteen corruptions'}", hint=f"Available: {', '.join(kinds)}."
        )
    chosen = test.subset(torch.tensor(rows), f"{test.name} {wanted}".rstrip())
    return dataclasses.replace(opened, parts={"test": chosen})


def _open(known: NamedSet, folders: Sequence[Path]) -> Opened:
    if paths := packed_files(known, folders[0]):
        return open_packed(paths)
    scans = [scan(folder, cache_of(known) / _EXPANDED) for folder in folders]
    places = {name: place for files in reversed(scans) for name, place in files.places.items()}
    return LAYOUTS[known.layout](dataclasses.replace(scans[0], places=places))


def _check(known: NamedSet, where: Path, opened: Opened, *, whole: bool) -> Opened:
    """An error for other classes, a note for other numbers of images."""
    if len(opened.classes) != known.classes:
        raise FileProblem(f"{where} has {len(opened.classes):,} classes, and {known.title} has {known.classes:,}")
    notes = [
        f"{known.name}: {part} has {len(dataset):,} of the official {known.parts[part]:,} images"
        for part, dataset in opened.parts.items()
        if whole and part in known.parts and len(dataset) != known.parts[part]
    ]
    return dataclasses.replace(opened, notes=(*opened.notes, *notes))


# --- bringing ---------------------------------------------------------------------------------------------------------


def _bring(known: NamedSet, download: bool, console: Console) -> None:
    """Fetch what is missing into the cache, or raise with what to put where."""
    data, folder, wanted = data_folder(), cache_of(known), lacking(known, folders_of(known))
    if not download or not wanted or any(file.url is None for file in wanted):
        raise _missing(known, f"{known.title} is not here, neither in {DATA_VARIABLE} nor in {folder.parent}")
    if data is not None and not data.is_dir():  # a typo, or a disk that is not mounted: no reason to download it again
        hint = f"Correct it, or unset it to download {known.title} to {folder}."
        raise FileProblem(f"{DATA_VARIABLE} points to {data}, which is not a folder", hint=hint)
    if is_offline():
        raise _missing(known, f"{known.title} is not here, and {OFFLINE_VARIABLE} is set")
    size = sum(file.size or 0 for file in wanted)
    console.say(f"Downloading {known.title} ({size / _GB:.2f} GB) from {known.page} to {folder}; terms: {known.terms}.")
    for file in wanted:
        try:
            net.fetch(file.url or "", folder / file.name, size=file.size, sha256=file.sha256, console=console)
        except VitlabError as error:
            raise _missing(known, f"{known.title} could not be fetched: {error.what}") from error


def _missing(known: NamedSet, what: str) -> FileProblem:
    """What to put where, file by file."""
    folder = cache_of(known)
    if not known.files:
        return FileProblem(what, hint=f"Put {', '.join(known.packed.values())} into {folder}.")
    lines = [f"Put these into {folder} (from {known.page}; terms: {known.terms}), packed or not:"]
    for file in known.files:
        if any(file.is_in(place) for place in folders_of(known)):
            continue
        names = " or ".join((file.name, *file.unpacked)) + (" (optional)" if file.optional else "")
        size = f"{file.size:,} bytes" if file.size else ""
        lines.append("  " + "  ".join(filter(None, (names, size, file.url or file.note))))
    return FileProblem(what, hint="\n".join(lines))


LAYOUTS: Mapping[str, Callable[[RawFiles], Opened]] = {
    name: function for module in (raw_images, raw_pixels, raw_scenes) for name, function in module.LAYOUTS.items()
}
