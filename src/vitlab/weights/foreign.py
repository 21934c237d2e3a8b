"""Read anybody's weights: recognise the format, account for every array.

Owns the meeting of container, format and preprocessing. The formats know names, the containers know bytes; nothing is guessed
from a file's name, and every assumption is a note that the caller shows. The way out is in `targets.py`.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError, with_article
from vitlab.data.dataset import some_of
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import allocate
from vitlab.models.cost import count_stored
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec, changed
from vitlab.weights import conventions
from vitlab.weights.bundle import (
    Bundle,
    Description,
    load_state,
    read_description,
    read_table,
    require_consistent,
    require_finite,
)
from vitlab.weights.card import convert_command, write_card
from vitlab.weights.containers import ArrayFile, read_arrays
from vitlab.weights.formats import hf_settings
from vitlab.weights.formats.format import Format
from vitlab.weights.formats.readings import as_file_problem, is_whole
from vitlab.weights.formats.table import FORMATS, assumed_preprocess
from vitlab.weights.rules import bring_in, link

DESCRIPTION = "vitlab"  # the key in a safetensors header under which a file of ours says what it is
_WHOLE = ("model.safetensors", "pytorch_model.bin")
WEIGHT_FILES = (*_WHOLE, hf_settings.INDEX)  # what a transformers folder is known by
WEIGHT_SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
_MOST_NAMED = 5  # names of a list that a sentence can bear

Gelu = Literal["tanh", "exact"]
AnyFormat = Format[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a person says about a file because it does not say it itself.

    `drop` names arrays to leave out, as shell patterns; a leftover that nobody named is an error, and so is a name that
    nothing has. `part` picks one of several models in a torch file, such as its moving average. `preprocess` is a rule, a
    `preprocess.json`, or one of PREPROCESSINGS. `heads`, `gelu`, `norm_eps` and `grid`, the rows and columns of the positions,
    are what no array shows. `trust_pickle` lets a torch file run its code.
    """

    drop: tuple[str, ...] = ()
    part: str | None = None
    preprocess: str | Preprocess | None = None
    heads: int | None = None
    gelu: Gelu | None = None
    norm_eps: float | None = None
    grid: Sequence[int] | None = None
    trust_pickle: bool = False

    def __post_init__(self) -> None:
        grid: Any = self.grid
        if grid is not None and not (isinstance(grid, list | tuple) and len(grid) == 2 and all(map(is_whole, grid))):
            raise UsageError(f"grid must be rows and columns, two whole numbers, not {grid!r}")

    @property
    def stated(self) -> dict[str, Any]:
        """The fields of the spec that are stated."""
        fields: dict[str, Any] = {"heads": self.heads, "gelu": self.gelu, "norm_eps": self.norm_eps}
        fields["grid"] = self.grid and tuple(self.grid)
        return {name: value for name, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class ConvertReport:
    """What happened to the arrays, in the words of `vitlab convert --json`."""

    source: str  # format of what was read
    target: str  # format of what was written
    model: str
    matched: int  # arrays that found their place
    missing: tuple[str, ...]  # arrays that the model has and the file does not have
    unexpected: tuple[str, ...]  # arrays that were dropped on request
    reshaped: tuple[str, ...]  # arrays of another shape than before
    notes: tuple[str, ...]  # what was assumed or changed
    out: str | None = None

    def sentences(self) -> list[str]:
        total = self.matched + len(self.unexpected)
        lines = [f"{self.source}: {self.model}, {self.matched} of {total} arrays matched, none missing"]
        if self.unexpected:
            lines.append(f"left out: {', '.join(self.unexpected)}")
        lines += self.notes
        return [*lines, f"{self.target} -> {self.out}"] if self.out else lines


def read_foreign(path: Path, how: Reading | None = None) -> tuple[Bundle, ConvertReport]:
    """Read any supported file or folder as a bundle, with a report on its arrays."""
    how = how or Reading()
    weights, folder = _find_parts(path)
    settings = None if folder is None else read_table(folder / "config.json")
    found, origin = _read_all(weights, how), str(path)
    arrays = _without_dropped(found.arrays, how.drop, origin)
    chosen = _recognise(arrays, origin, settings)
    left = {*chosen.leftovers(arrays), *(found.arrays.keys() - arrays.keys())}
    arrays = {name: array for name, array in arrays.items() if name not in left}
    notes = [f"Beside the weights, not read: {some_of(found.ignored, _MOST_NAMED)}"] if found.ignored else []
    described = _read_own(found, chosen, arrays, origin) if settings is None else None
    spec = described.spec if described else _read_spec(chosen, arrays, origin, settings, how)
    _require_stated(spec, how, origin)
    provenance, matched = _origin(chosen, found, arrays), len(arrays)
    with as_file_problem(origin):
        links = link(chosen.rules(spec, chosen.read_dialect(arrays)), spec, chosen.name)
    del found  # it would keep the arrays that `bring_in` lets go
    state = bring_in(links, arrays, spec, origin)
    require_finite(state)
    if described:
        rule, labels = described.preprocess, described.labels
    else:
        labels, note = chosen.read_labels(settings or {}, spec.num_classes)
        stated = {key: how.stated[name] for name, key in chosen.stated_by.items() if name in how.stated}
        notes += [*([note] if note else []), *chosen.assumptions(spec, {**stated, **(settings or {})})]
        rule = None if how.preprocess else _read_preprocess(chosen, folder)
    if how.preprocess is not None:
        rule = conventions.named(how.preprocess, spec) if isinstance(how.preprocess, str) else how.preprocess
    elif rule is None:
        rule = assumed_preprocess(provenance["format"], spec)
        words = conventions.describe(rule)
        notes.append(f"The file brings no preprocessing; the {provenance['format']} convention is assumed: {words}")
    require_consistent(spec, rule, labels, origin)
    model = load_state(allocate(spec), state, origin).eval()
    bundle = Bundle(model, rule, labels, _card(path, spec, provenance["format"]), provenance)
    report = ConvertReport(
        provenance["format"], "vitlab", format_name(spec), matched, (), tuple(sorted(left)), (), tuple(notes)
    )
    return bundle, report


def _without_dropped(arrays: dict[str, Tensor], drop: Sequence[str], origin: str) -> dict[str, Tensor]:
    for pattern in drop:
        if not any(_is_dropped(name, [pattern]) for name in arrays):
            raise UsageError(f"{origin} has nothing called '{pattern}' to leave out")
    return {name: array for name, array in arrays.items() if not _is_dropped(name, drop)}


def _read_own(found: ArrayFile, chosen: AnyFormat, arrays: Mapping[str, Tensor], origin: str) -> Description | None:
    """The description in a file that vitlab wrote, checked against its arrays."""
    if DESCRIPTION not in found.metadata:
        return None
    described = read_description(found.metadata[DESCRIPTION], origin)
    if not isinstance(described.spec, chosen.spec):
        raise FileProblem(
            f"{origin} describes itself as {with_article(format_name(described.spec))}, which {chosen.name} does not have"
        )
    held, claimed = sum(array.numel() for array in arrays.values()), count_stored(described.spec)
    if held != claimed:  # before a model is built, because a hostile description must not cost memory
        raise FileProblem(f"{origin} holds {held:,} numbers, but describes itself as a model of {claimed:,}")
    return described


def _read_spec(
    chosen: AnyFormat, arrays: Mapping[str, Tensor], origin: str, settings: dict[str, Any] | None, how: Reading
) -> ModelSpec:
    """The spec of these arrays, with what is stated where the settings are silent."""
    options = chosen.options(settings or {})
    stated = {name: value for name, value in how.stated.items() if chosen.stated_by.get(name) not in options}
    if "heads" in stated and "heads" in chosen.stated_by:  # before a guess that no model could have is refused
        settings = {**(settings or {}), chosen.stated_by["heads"]: stated.pop("heads")}
    spec = chosen.read_spec(arrays, origin, settings or {}, stated.pop("grid", None))
    return changed(spec, {name: value for name, value in stated.items() if hasattr(spec, name)})


def _require_stated(spec: ModelSpec, how: Reading, origin: str) -> None:
    for name, value in how.stated.items():
        if not hasattr(spec, name) or (name == "grid" and spec.num_tokens is None):
            raise UsageError(f"{origin} is {with_article(format_name(spec))}, which has no {name}")
        if (held := getattr(spec, name)) != value:
            raise UsageError(f"{origin} states that {name} is {held}, not {value}")


def _recognise(arrays: Mapping[str, Tensor], origin: str, settings: Mapping[str, Any] | None) -> AnyFormat:
    for candidate in FORMATS:
        if candidate.recognises(arrays, settings or {}):
            return candidate
    some = ", ".join(list(arrays)[:3])
    known = ", ".join(dict.fromkeys(candidate.name for candidate in FORMATS))
    raise FileProblem(f"{origin} holds {len(arrays)} arrays of no known layout: {some} …", hint=f"Known: {known}.")


def _is_dropped(name: str, drop: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) or name.startswith((f"{pattern}/", f"{pattern}.")) for pattern in drop
    )


def _find_parts(path: Path) -> tuple[list[Path], Path | None]:
    """The weight files, and the folder whose settings are theirs."""
    if not path.is_dir():  # settings lie beside these names; another file there is none of theirs
        return [path], path.parent if path.name in _WHOLE else None
    index = read_table(path / hf_settings.INDEX)
    shards = () if index is None else hf_settings.read_index(index, str(path / hf_settings.INDEX))
    for names in (*([name] for name in _WHOLE), shards):
        if names and all((path / name).is_file() for name in names):
            return [path / name for name in names], path
    raise FileProblem(f"{path} holds no weights", hint="Looked for a bundle, model.safetensors and pytorch_model.bin.")


def _read_all(paths: Sequence[Path], how: Reading) -> ArrayFile:
    first, *others = (read_arrays(path, trust_pickle=how.trust_pickle, part=how.part) for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        if twice := first.arrays.keys() & other.arrays.keys():
            raise FileProblem(f"{path} holds {min(twice)}, as does another file of the model")
        if first.prefix != other.prefix:
            raise FileProblem(f"{path} begins its names otherwise than the other files of the model")
        first.arrays.update(other.arrays)
    return first


def _read_preprocess(chosen: AnyFormat, folder: Path | None) -> Preprocess | None:
    """What the settings in the folder say; None where they are silent."""
    if folder is None or (table := read_table(folder / chosen.preprocess_file)) is None:
        return None
    try:
        return chosen.read_preprocess(table)
    except UsageError as error:
        raise FileProblem(
            f"{folder / chosen.preprocess_file}: {error.what}",
            hint="Say what it should be with vitlab convert --preprocess (in Python: preprocess=).",
        ) from error


def _origin(chosen: AnyFormat, found: ArrayFile, arrays: Mapping[str, Tensor]) -> dict[str, Any]:
    fields = dataclasses.asdict(chosen.read_dialect(arrays))
    name = "big-vision" if fields.get("big_vision") else chosen.name  # as `--to` calls it, so that it is found again
    # `params/` is a part of Google's layout; `module.` and the like only show how somebody trained.
    prefix = found.prefix if found.prefix.endswith("/") else ""
    return {"format": name, "dialect": fields, "prefix": prefix, "container": found.container}


def _card(path: Path, spec: ModelSpec, name: str) -> str:
    return write_card(
        title=path.name,
        spec=spec,
        data="not stated by the file",
        command=convert_command(path),
        metrics={"converted from": name},
    )
