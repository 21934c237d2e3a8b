"""Data sets known by name: what each is, and where it lies.

Looks into the `VITLAB_DATA` folder, then the cache. The facts are in `named.toml`; `named_opening` fetches and opens. Loads no
torch, so that sets are listed at once.
"""

import dataclasses
import fnmatch
import functools
import importlib.resources
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitlab.core.environment import cache_folder, data_folder, package_version
from vitlab.core.errors import UnknownName
from vitlab.data.synthetic import settings as synthetic

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
    """The sets whose names match a shell pattern, and whether each is here or can be fetched.

    Args:
        pattern: As in a shell: `cifar*`.
    """
    rows = [*(_row(known) for known in named_sets().values()), *(_synthetic_row(kind) for kind in synthetic.KINDS)]
    return [row for row in rows if fnmatch.fnmatchcase(row.name, pattern.casefold())]


def _row(known: NamedSet) -> DataRow:
    if known.name == BUILT_IN:
        here, where = package_version("scikit-learn") is not None, "scikit-learn"
    else:
        folders = places(known)
        here, where = bool(folders), str(folders[0] if folders else cache_of(known))
    missing = lacking(known, folders_of(known))
    files = () if here else tuple(file.name for file in missing) or tuple(known.packed.values())
    state: State = "present" if here else "download" if missing and all(file.url for file in missing) else "by hand"
    return DataRow(known.name, known.title, known.classes, known.parts, state, where, files)


def _synthetic_row(kind: str) -> DataRow:
    """A synthetic set as its name alone gives it."""
    usual = synthetic.read_name(kind, synthetic.KINDS)
    sizes = synthetic.part_sizes(usual)
    return DataRow(kind, synthetic.TITLES[kind], len(usual.classes), sizes, "synthetic", "no files")


def folders_of(known: NamedSet) -> list[Path]:
    data = data_folder()
    return [*([data / known.folder] if data else []), cache_of(known)]


def cache_of(known: NamedSet) -> Path:
    return cache_folder() / "data" / known.folder


def places(known: NamedSet) -> list[Path]:
    """The first folder that has the whole set; else both, if together they do."""
    folders = folders_of(known)
    for folder in folders:
        if packed_files(known, folder) or (known.files and not lacking(known, [folder])):
            return [folder]
    return folders if known.files and not lacking(known, folders) else []


def lacking(known: NamedSet, folders: Sequence[Path]) -> list[PublishedFile]:
    """The files that the set needs and that are in none of the folders."""
    needed = [file for file in known.files if not file.optional]
    return [file for file in needed if not any(file.is_in(folder) for folder in folders)]


def packed_files(known: NamedSet, folder: Path) -> dict[str, Path]:
    paths = {part: folder / name for part, name in known.packed.items()}
    return paths if all(path.is_file() for path in paths.values()) else {}
