"""Unlabelled images from files, folders and patterns, in the order given.

A file that is missing or not an image keeps its place, and is an error when it is read.
"""

import dataclasses
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.reading import file_version
from vitlab.data.dataset import Dataset, several_labels
from vitlab.data.sources.addresses import list_files, read_address
from vitlab.data.sources.folders import ARRAY, SUFFIXES, read_image


@dataclasses.dataclass(frozen=True)
class LooseReader:
    """Reads the file of that number, if it is a regular one and not a pipe."""

    paths: Sequence[str]

    def __call__(self, i: int) -> "bytes | np.ndarray[Any, Any]":
        path = Path(self.paths[i])
        if not path.exists():
            raise FileProblem("does not exist")
        if not path.is_file():
            raise FileProblem("is not a file")
        return read_image(path)

    def version(self, i: int) -> str:
        known = file_version(self.paths[i])
        return f"{Path(self.paths[i]).absolute()} {known}" if known else ""


@dataclasses.dataclass(frozen=True)
class AddressReader:
    """Reads the file at an address of an object store or a server."""

    addresses: Sequence[str]
    versions: Sequence[str]

    def __call__(self, i: int) -> bytes:
        return read_address(self.addresses[i])

    def version(self, i: int) -> str:
        """What the store reports of the file when it is listed; empty where that would not change with it."""
        return f"{self.addresses[i]} {self.versions[i]}" if self.versions[i] else ""


def open_addresses(address: str) -> Dataset:
    """The images below an address, one image, or those of a pattern such as `s3://bucket/photos/*.jpg`."""
    found = list_files(address, SUFFIXES)
    if not found:
        raise FileProblem(f"{address} holds no images and no .tar shards", hint=f"Looked for: {', '.join(SUFFIXES)}.")
    reader = AddressReader(list(found), list(found.values()))
    return Dataset(address, (), list(found), several_labels([()] * len(found)), reader)


def open_loose(sources: Sequence[str | Path]) -> Dataset:
    """The images of files, folders (all below) and patterns such as `photos/*.jpg`."""
    if isinstance(sources, str | Path):
        sources = [sources]
    paths = [path for source in sources for path in _expand(str(source))]
    if not paths:
        raise UsageError("no images were given", hint="Give files, folders or patterns such as 'photos/*.jpg'.")
    name = str(sources[0]) if len(sources) == 1 else f"{len(paths):,} images"
    return Dataset(name, (), paths, several_labels([()] * len(paths)), LooseReader(paths))


def _expand(source: str) -> list[str]:
    path = Path(source)
    if path.is_dir():
        # Hidden files are skipped: systems keep thumbnails there.
        inside = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
        files = sorted(str(file) for file in inside if file.suffix.lower() in (*SUFFIXES, ARRAY) and file.is_file())
        # Arrays are images where there are no others: next to photos they are results of a computation.
        paths = [name for name in files if not name.lower().endswith(ARRAY)] or files
        if not paths:
            raise FileProblem(f"{source} holds no images", hint=f"Looked for: {', '.join(SUFFIXES)}.")
        return paths
    if path.exists() or not glob.has_magic(source):
        return [source]
    paths = sorted(name for name in glob.glob(source, recursive=True) if Path(name).is_file())  # noqa: PTH207 (any root)
    if not paths:
        raise FileProblem(f"no file matches {source}")
    return paths
