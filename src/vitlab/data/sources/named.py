"""Data sets known by name: where they lie, how they are fetched and split.

Looks into the `VITLAB_DATA` folder, then the cache, then the net. The facts are in `named.toml`, the layouts in `packed` and
`raw`.
"""

import dataclasses
import fnmatch
import functools
import importlib.resources
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitlab.core import download as net
from vitlab.core.console import Console
from vitlab.core.environment import DATA_VARIABLE, cache_folder, data_folder, package_version
from vitlab.core.errors import FileProblem, UnknownName, VitlabError
from vitlab.data.dataset import Opened
from vitlab.data.sources.digits import load_digits
from vitlab.data.sources.packed import open_packed
from vitlab.data.sources.raw import images as raw_images
from vitlab.data.sources.raw import pixels as raw_pixels
from vitlab.data.sources.raw import scenes as raw_scenes
from vitlab.data.sources.raw.files import RawFiles, scan
from vitlab.data.synthetic import names as synthetic

_GB = 10**9
_EXPANDED = ".expanded"  # hidden, so that looking through the set's folder does not find things twice
BUILT_IN = "digits"  # the one set that comes with a package

State = Literal["present", "download", "by hand", "synthetic"]


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """One file as its makers publish it; without an address, to be put by hand."""

    name: str
    unpacked: tuple[str, ...] = ()  # what may lie there instead
    url: str | None = None
    note: str = ""
    optional: bool = False  # the set is of use without it
    size: int | None = None
    sha256: str | None = None

    def is_in(self, folder: Path) -> bool:
        return any((folder / name).exists() for name in (self.name, *self.unpacked))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedSet:
    """An entry of `named.toml`. `parts` has the official numbers of images."""

    name: str
    title: str
    classes: int
    parts: Mapping[str, int]
    page: str
    source: str
    terms: str = "see the page"
    aliases: tuple[str, ...] = ()
    folder: str
    layout: str = ""
    packed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    files: tuple[PublishedFile, ...] = ()


@dataclasses.dataclass(frozen=True)
class DataRow:
    """One line of `vitlab data list`: `where` is its folder, `files` what is missing."""

    name: str
    title: str
    classes: int
    parts: Mapping[str, int]  # the official number of images
    state: State  # present, download, by hand or synthetic
    where: str  # the folder of the set, or the one it would go to
    files: tuple[str, ...] = ()  # what is missing there


@functools.cache
def named_sets() -> Mapping[str, NamedSet]:
    text = importlib.resources.files("vitlab.data.sources").joinpath("named.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {name: _parse(name, tables) for name in tables}


def _parse(name: str, tables: Mapping[str, Mapping[str, Any]]) -> NamedSet:
    """An entry; `like` takes the rest from another set: the same files, other labels."""
    table = dict(tables[name])
    if "like" in table:
        table = {key: value for key, value in tables[table.pop("like")].items() if key != "aliases"} | table
    rows = [row | {"unpacked": tuple(row.get("unpacked", ()))} for row in table.pop("files", ())]
    files, aliases = tuple(PublishedFile(**row) for row in rows), tuple(table.pop("aliases", ()))
    folder = table.pop("folder", name.replace("-", "_"))
    return NamedSet(name=name, folder=folder, files=files, aliases=aliases, **table)


def find_named(name: str) -> NamedSet:
    """By name or alias, whatever the case; `-` and `_` are the same."""
    plain = name.casefold().replace("_", "-")
    for known in named_sets().values():
        if plain in (known.name, *known.aliases):
            return known
    raise UnknownName("data set", name, named_sets(), hint="See `vitlab data list`.")


def list_data(pattern: str = "*") -> list[DataRow]:
    """The sets whose names match a shell pattern, and whether each is here or can be fetched."""
    rows = [*(_row(known) for known in named_sets().values()), *(_synthetic_row(kind) for kind in synthetic.KINDS)]
    return [row for row in rows if fnmatch.fnmatchcase(row.name, pattern.casefold())]


def _row(known: NamedSet) -> DataRow:
    if known.name == BUILT_IN:
        here, where = package_version("scikit-learn") is not None, "scikit-learn"
    else:
        folders = _places(known)
        here, where = bool(folders), str(folders[0] if folders else _cache(known))
    lacking = _lacking(known, _folders(known))
    files = () if here else tuple(file.name for file in lacking) or tuple(known.packed.values())
    state: State = "present" if here else "download" if lacking and all(file.url for file in lacking) else "by hand"
    return DataRow(known.name, known.title, known.classes, known.parts, state, where, files)


def _synthetic_row(kind: str) -> DataRow:
    """A synthetic set as its name alone gives it."""
    usual = synthetic.open_synthetic(kind)
    sizes = {name: len(part) for name, part in usual.parts.items()}
    return DataRow(kind, synthetic.TITLES[kind], len(usual.classes), sizes, "synthetic", "no files")


def open_named(name: str, *, download: bool = True, console: Console | None = None) -> Opened:
    """The parts of a named set, downloaded first if it is not here and may be."""
    known = find_named(name)
    if known.name == BUILT_IN:
        return Opened({"all": load_digits()})
    if not _places(known):
        _bring(known, download, console or Console())
    folders = _places(known)
    return _check(known, folders[0], _open(known, folders))


def _folders(known: NamedSet) -> list[Path]:
    data = data_folder()
    return [*([data / known.folder] if data else []), _cache(known)]


def _cache(known: NamedSet) -> Path:
    return cache_folder() / "data" / known.folder


def _places(known: NamedSet) -> list[Path]:
    """The first folder that has the whole set; else both, if together they do."""
    folders = _folders(known)
    for folder in folders:
        if _packed(known, folder) or (known.files and not _lacking(known, [folder])):
            return [folder]
    return folders if known.files and not _lacking(known, folders) else []


def _lacking(known: NamedSet, folders: Sequence[Path]) -> list[PublishedFile]:
    """The files that the set needs and that are in none of the folders."""
    needed = [file for file in known.files if not file.optional]
    return [file for file in needed if not any(file.is_in(folder) for folder in folders)]


def _packed(known: NamedSet, folder: Path) -> dict[str, Path]:
    paths = {part: folder / name for part, name in known.packed.items()}
    return paths if all(path.is_file() for path in paths.values()) else {}


def _open(known: NamedSet, folders: Sequence[Path]) -> Opened:
    if paths := _packed(known, folders[0]):
        return open_packed(paths)
    scans = [scan(folder, _cache(known) / _EXPANDED) for folder in folders]
    places = {name: place for files in reversed(scans) for name, place in files.places.items()}
    return LAYOUTS[known.layout](dataclasses.replace(scans[0], places=places))


def _check(known: NamedSet, where: Path, opened: Opened) -> Opened:
    """An error for other classes, a note for other numbers of images."""
    if len(opened.classes) != known.classes:
        raise FileProblem(f"{where} has {len(opened.classes):,} classes, and {known.title} has {known.classes:,}")
    notes = [
        f"{known.name}: {part} has {len(dataset):,} of the official {known.parts[part]:,} images"
        for part, dataset in opened.parts.items()
        if part in known.parts and len(dataset) != known.parts[part]
    ]
    return dataclasses.replace(opened, notes=(*opened.notes, *notes))


# --- bringing ---------------------------------------------------------------------------------------------------------


def _bring(known: NamedSet, download: bool, console: Console) -> None:
    """Fetch what is missing into the cache, or raise with what to put where."""
    data, folder, wanted = data_folder(), _cache(known), _lacking(known, _folders(known))
    if not download or not wanted or any(file.url is None for file in wanted):
        raise _missing(known, f"{known.title} is not here, neither in {DATA_VARIABLE} nor in {folder.parent}")
    if data is not None and not data.is_dir():  # a slip, or a disk that is not there: no reason to download it again
        hint = f"Mend it, or unset it to fetch {known.title} to {folder}."
        raise FileProblem(f"{DATA_VARIABLE} points to {data}, which is not a folder", hint=hint)
    size = sum(file.size or 0 for file in wanted)
    console.say(f"Bringing {known.title} ({size / _GB:.2f} GB) from {known.page} to {folder}; terms: {known.terms}.")
    for file in wanted:
        try:
            net.fetch(file.url or "", folder / file.name, size=file.size, sha256=file.sha256, console=console)
        except VitlabError as error:
            raise _missing(known, f"{known.title} could not be fetched: {error.what}") from error


def _missing(known: NamedSet, what: str) -> FileProblem:
    """What to put where, file by file."""
    folder = _cache(known)
    if not known.files:
        return FileProblem(what, hint=f"Put {', '.join(known.packed.values())} into {folder}.")
    lines = [f"Put these into {folder} (from {known.page}; terms: {known.terms}), packed or not:"]
    for file in known.files:
        if any(file.is_in(place) for place in _folders(known)):
            continue
        names = " or ".join((file.name, *file.unpacked)) + (" (if wanted)" if file.optional else "")
        size = f"{file.size:,} bytes" if file.size else ""
        lines.append("  " + "  ".join(filter(None, (names, size, file.url or file.note))))
    return FileProblem(what, hint="\n".join(lines))


LAYOUTS: Mapping[str, Callable[[RawFiles], Opened]] = {
    name: function for module in (raw_images, raw_pixels, raw_scenes) for name, function in module.LAYOUTS.items()
}
