"""Which images a model is evaluated on, and which a temperature is fitted on: never the same, never its training images.

A run remembers its split (`split.csv`); where its data is given again, that is used, so that a folder without parts is not
evaluated on training images. Which part is the test set is the rule of `data.parts`.
"""

import csv
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path

import torch

from vitlab.core import config
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import PARTS, Dataset, Opened
from vitlab.data.parts import drop_small_classes, test_part, train_part, validation_part
from vitlab.runs.training import run_folder
from vitlab.training.call import IN_PYTHON


@dataclasses.dataclass(frozen=True)
class EvalParts:
    """The part to measure on, by its name in the data, and the one to fit on, where there is one."""

    part: str
    dataset: Dataset
    fit_part: str
    fit: Dataset | None
    notes: tuple[str, ...]


def choose_parts(opened: Opened, part: str | None, fit_on: str | None) -> EvalParts:
    """Test, else validation, else all images; a temperature is fitted on the validation part, where that is not tested on."""
    name = part or test_part(opened.parts) or train_part(opened.parts)
    dataset = opened.part(name)
    notes = list(opened.notes)
    if name == "train":
        notes.append("measured on the training part: what a model memorised counts as known")
    if fit_on is not None and fit_on == name:
        raise UsageError(f"a temperature fitted on the {name} part cannot be measured on it", hint="Name another part.")
    val = validation_part(opened.parts)
    fit_name = fit_on or (val if val is not None and val != name else "")
    if fit_on == "train":
        notes.append("fitted on the training part: where the model has learnt these images, the temperature is too low")
    return EvalParts(name, dataset, fit_name, opened.part(fit_name) if fit_name else None, tuple(notes))


def _run_of(model: str | Path) -> Path | None:
    """The folder of the run, also where its bundle was named; None where this is not a run."""
    path = Path(model)
    folders = (path, path.parent) if path.name == run_folder.BUNDLE else (path,)
    return next(filter(run_folder.is_run, folders), None)


def _config_of(model: str | Path) -> config.Table:
    run = _run_of(model)
    return {} if run is None else run_folder.read_config(run)


def data_of_run(model: str | Path) -> str | None:
    """The data that a run was trained on, wherever we are now; None where this is not a run."""
    run, source = _run_of(model), _config_of(model).get("data", {}).get("source")
    if run is None or not isinstance(source, str) or source.startswith(IN_PYTHON):
        return None
    started_in = run_folder.began_in(run)
    path = Path(started_in) / source
    return str(path) if started_in and Path(started_in) != Path.cwd() and _exists(path) else source


def columns_of_run(model: str | Path, data: str | Path) -> Mapping[str, str]:
    """What the table of the run's own data calls its columns."""
    columns = _config_of(model).get("data", {}).get("columns", {})
    return columns if isinstance(columns, dict) and _is_data_of_run(model, data) else {}


def _exists(path: Path) -> bool:
    """False too for what is too long to be a path: the file that names it may be damaged."""
    try:
        return path.exists()
    except OSError:
        return False


def start_of(model: str | Path) -> str:
    """The weights that a run began with; where this is not a run, the model itself."""
    start = _config_of(model).get("init", model)
    return str(start)


def as_in_the_run(model: str | Path, data: str | Path, opened: Opened) -> Opened:
    """The data in the parts that the run made of it, where it is the run's data; else as it is.

    Names alone do not show it: folders of other images have a 001.jpg too.
    """
    run = _run_of(model)
    name = "train" if "train" in opened.parts else "all"
    if run is None or not _is_data_of_run(model, data) or name not in opened.parts:
        return opened
    min_images = _config_of(model).get("data", {}).get("min_images", 0)
    opened, _ = drop_small_classes(opened, min_images if isinstance(min_images, int) else 0)
    owner = _read_split(run, held_out=name == "all")
    dataset = opened.parts[name]
    if not all(key in owner for key in dataset.keys):
        return opened
    opened = without_learnt(model, data, opened)
    if _is_probe(model):  # its head is refitted with the validation images, once they have chosen l2
        owner = {key: "train" if part == "val" else part for key, part in owner.items()}
    parts = {part: found for part, found in opened.parts.items() if part != name}
    if test_part(parts) == "val":
        parts["test"] = parts.pop("val")
    for part in PARTS:
        index = [i for i, key in enumerate(dataset.keys) if owner[key] == part]
        if index and part not in parts:
            parts[part] = dataset.subset(torch.tensor(index))
    return Opened(parts, (*opened.notes, "the parts are those of the run's split.csv"))


def without_learnt(model: str | Path, data: str | Path, opened: Opened, part: str | None = None) -> Opened:
    """The data without its own validation part where the run fitted its head to those images too: no temperature can be
    fitted on them. Where that is the `part` to measure on, it stays, and a note says so."""
    settings = _config_of(model).get("data", {})
    val = validation_part(opened.parts, settings.get("val_from", "part"), settings.get("val_frac", 0.0))
    if val is None or not (_is_probe(model) and _is_data_of_run(model, data)):
        return opened
    if part == "val":
        note = "measured on the validation part, to which the head was fitted too: what it memorised counts as known"
        return dataclasses.replace(opened, notes=(*opened.notes, note))
    parts = {name: found for name, found in opened.parts.items() if name != "val"}
    note = "the head was fitted to the validation part too, so no temperature is fitted on it"
    return dataclasses.replace(opened, parts=parts, notes=(*opened.notes, note))


def _is_data_of_run(model: str | Path, data: str | Path) -> bool:
    source = data_of_run(model)
    return source is not None and (str(data) == source or Path(data).resolve() == Path(source).resolve())


def _is_probe(model: str | Path) -> bool:
    return _config_of(model).get("train", {}).get("method") == "probe"


def _read_split(run: Path, *, held_out: bool) -> dict[str, str]:
    """The part of every image by name. Those of parts that the data has itself may have the names of others."""
    try:
        rows = [
            (row["path"], row["split"])
            for row in csv.DictReader(io.StringIO(run_folder.read_sealed(run, run_folder.SPLIT)))
        ]
    except (KeyError, csv.Error) as error:
        raise FileProblem(f"{run / run_folder.SPLIT} cannot be read: {error}") from error
    return {path: part for path, part in rows if held_out or part != "test"}
