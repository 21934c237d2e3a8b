"""The published checkpoints by name: address, preprocessing, expected accuracy.

    ViT-B/16@augreg-i21k     vit-b-16@augreg-i21k     BiT-R50x1@bit-m

Owns `catalogue.toml` and the names; loads no torch, so that the list comes at once. A second file of the same form, named by
VITLAB_CATALOGUE, adds to the first and wins where both know a name.
"""

import dataclasses
import fnmatch
import functools
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from vitlab.core import config
from vitlab.core.environment import cache_folder
from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.names import alias, parse_name
from vitlab.models.spec import ModelSpec, changed
from vitlab.weights import other_names

CATALOGUE_VARIABLE = "VITLAB_CATALOGUE"
_NAME = re.compile(r"[A-Za-z0-9+/-]+@[A-Za-z0-9-]+")
_TAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """A published ImageNet accuracy in per cent, how and where it was measured."""

    top1: float
    settings: str
    source: str
    measure: Literal["top1", "knn"] = "top1"
    preprocess: Mapping[str, Any] | None = None  # of the measurement, where it is not that of the checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One published file. What is not known is None, or an empty address."""

    name: str
    title: str
    address: str
    file: str
    format: str
    model: str
    spec: ModelSpec  # as far as it is stated; the file may say more, such as which GELU its format implies
    stated: Mapping[str, Any]  # the fields that the arrays must confirm
    preprocess: Mapping[str, Any]  # as in preprocess.json; its type lives beside torch
    expected: Expected | None
    sha256: str | None
    size: int | None  # bytes
    mib: int | None  # as published, rounded
    licence: str
    sources: tuple[str, ...]
    shipped: bool = False  # a bundle inside the package: nothing to download

    @property
    def alias(self) -> str:
        model, _, tag = self.name.partition("@")
        return f"{alias(model)}@{tag}"

    @property
    def path(self) -> Path:
        """Where it lies on this machine, once it was downloaded."""
        if self.shipped:
            return Path(str(resources.files("vitlab.weights") / "shipped" / self.alias / self.file))
        return cache_folder() / "weights" / self.alias / self.file


def list_pretrained(pattern: str = "*") -> list[str]:
    """List the published checkpoints that match a pattern, as `ViT-B*@augreg*`; `load`, `train` and `convert` take each.

    Args:
        pattern: As in a shell: * for any text, ? for one character.
    """
    return [name for name in _all() if fnmatch.fnmatchcase(name.casefold(), pattern.casefold())]


def find(name: str) -> Checkpoint:
    """The checkpoint of that name or alias, or of the name that timm, transformers or torch.hub have for it."""
    known = _all()
    by_alias = {entry.alias: entry for entry in known.values()}
    ours = other_names.translate(name) or name
    if (entry := known.get(ours) or by_alias.get(ours)) is None:
        near = [each for each in known if each.startswith(f"{other_names.model_of(name)}@")] or list(known)
        raise UnknownName("checkpoint", name, near, hint="See `vitlab models list --pretrained`.")
    return entry


def is_name(text: str) -> bool:
    """Whether this is meant as the name of a checkpoint, right or wrong."""
    return _NAME.fullmatch(text) is not None or other_names.is_meant(text)


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    model: str
    file: str
    top1: float | None = None
    mib: int | None = None
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise UsageError(f"'{self.sha256}' is not a SHA-256: 64 digits of 0-9 and a-f")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
    """Keys that the checkpoints of one table share; see the top of `catalogue.toml`."""

    tag: str
    title: str
    format: str
    sources: tuple[str, ...]
    checkpoints: tuple[_Row, ...]
    preprocess: Mapping[str, Any]  # has a strict type of its own, which loads torch
    spec: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    measured_with: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    folder: str = ""
    licence: str = "not known"
    settings: str = ""
    measured: str = ""
    measure: Literal["top1", "knn"] = "top1"
    shipped: bool = False

    def __post_init__(self) -> None:
        if not _TAG.fullmatch(self.tag):
            raise UsageError(f"'{self.tag}' is not a tag: small letters, digits and single dashes")
        if "image_size" not in self.preprocess:
            raise UsageError(f"the preprocess table of '{self.tag}' needs at least image_size")
        if any(row.top1 is not None for row in self.checkpoints) and not (self.settings and self.measured):
            raise UsageError(f"the accuracies of '{self.tag}' need the keys settings and measured")


def _all() -> dict[str, Checkpoint]:
    path = os.environ.get(CATALOGUE_VARIABLE)
    return {**_published(), **(_read(config.load_toml(Path(path)), path) if path else {})}


@functools.cache
def _published() -> dict[str, Checkpoint]:
    text = (resources.files("vitlab.weights") / "catalogue.toml").read_text(encoding="utf-8")
    return _read(config.parse_toml(text, "catalogue.toml"), "catalogue.toml")


def _read(tables: config.Table, origin: str) -> dict[str, Checkpoint]:
    found: dict[str, Checkpoint] = {}
    families: list[config.Table] = tables.get("family", [])
    if tables.keys() != {"family"} or not all(isinstance(table, dict) for table in families):
        raise UsageError(f"{origin} must hold tables called [[family]] and nothing else")
    for table in families:
        family = config.from_dict(_Family, table, "family.")
        for row in family.checkpoints:
            entry = _checkpoint(family, row)
            if entry.name in found:
                raise UsageError(f"{origin} has {entry.name} twice")
            found[entry.name] = entry
    return found


def _checkpoint(family: _Family, row: _Row) -> Checkpoint:
    return Checkpoint(
        name=f"{row.model}@{family.tag}",
        title=family.title,
        address=family.folder + row.file if family.folder else "",
        file=unquote(urlsplit(row.file).path).rpartition("/")[2],
        format=family.format,
        model=row.model,
        spec=changed(parse_name(row.model), family.spec),
        stated=family.spec,
        preprocess=family.preprocess,
        expected=None
        if row.top1 is None
        else Expected(
            top1=row.top1,
            settings=family.settings,
            source=family.measured,
            measure=family.measure,
            preprocess=family.measured_with or None,
        ),
        sha256=row.sha256,
        size=row.size,
        mib=row.mib,
        licence=family.licence,
        sources=family.sources,
        shipped=family.shipped,
    )
