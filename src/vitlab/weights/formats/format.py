"""The record of one publisher's files of one model family.

A module of this folder lists its records as `FORMATS`, and the family names the module; `table.py` puts them together.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from vitlab.data.preprocess import Preprocess
from vitlab.models.spec import ModelSpec, Pair
from vitlab.weights.formats import hf_settings
from vitlab.weights.rules import Rule

Arrays = Mapping[str, Tensor]
Settings = Mapping[str, Any]  # of a `config.json`; empty where there is none
S = TypeVar("S", bound=ModelSpec)
D = TypeVar("D")


@dataclasses.dataclass(frozen=True)
class NoDialect:
    """For formats whose files of one model are all alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format(Generic[S, D]):
    """One layout; its dialect is what differs between files of the same model."""

    name: str  # in reports, and a target of `vitlab convert --to`
    targets: tuple[str, ...] = ()  # other names of `--to`
    spec: type[S]
    dialect: type[D]

    recognises: Callable[[Arrays, Settings], bool]
    read_dialect: Callable[[Arrays], D]
    # From where is text for errors; the last is the grid, if the caller knows it.
    read_spec: Callable[[Arrays, str, Settings, Pair | None], S]
    leftovers: Callable[[Arrays], tuple[str, ...]] = lambda _: ()  # arrays that no answer depends on
    # The settings that tell what a caller can state.
    stated_by: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"heads": "num_heads", "gelu": "act_layer"}
    )
    options: Callable[[Settings], Settings] = lambda settings: settings  # with what the settings imply
    assumptions: Callable[[S, Settings], tuple[str, ...]] = lambda _, __: ()  # what neither arrays nor settings say

    # Names of so many classes from `config.json`, with a note where they cannot be used; the preprocessing from its own file.
    read_labels: Callable[[Settings, int], tuple[tuple[str, ...], str | None]] = hf_settings.read_labels
    preprocess_file: str = "config.json"
    read_preprocess: Callable[[Settings], Preprocess | None] = lambda _: None

    rules: Callable[[S, D], list[Rule]]
    preprocess: Callable[[S, str], Preprocess]  # the publisher's, where the file is silent; for one of the targets

    usual_dialect: Callable[[S, str], Settings] = lambda _, __: {}  # in which a target is written
    require_target: Callable[[S, str], None] = lambda _, __: None  # what the rules would let pass
    notes: Callable[[S, Preprocess, str], Sequence[str]]  # what the other side must be given, or computes otherwise
    folder: Callable[[S, Preprocess, Sequence[str]], dict[str, dict[str, Any]]] | None = None  # settings beside weights
