"""The native form of a trained model: a folder with all that is needed to use it.

`model.safetensors`, `config.json` (spec, format version, origin), `preprocess.json`, `labels.json`, `card.md`,
`recipe.toml` where a run made it (its resolved config), and `manifest.json` with the SHA-256 of each. Text and safetensors
only: reading one never runs anything that is in it.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.core import config, fsio, reading
from vitlab.core.console import Advance
from vitlab.core.errors import FileProblem, UsageError, VitlabError, amount
from vitlab.data.dataset import some_of
from vitlab.data.pixel_stats import PixelStats
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import Model, allocate
from vitlab.models.cost import count_stored
from vitlab.models.families import spec_from_dict
from vitlab.models.spec import ModelSpec, spec_to_dict
from vitlab.weights.containers import find_nonfinite, read_arrays, safetensors_chunks

FORMAT_VERSION = 1
_SHOWN = 3  # names of weights in a message; the number of the others follows
_TEXT_BYTES = (
    2**23
)  # of a settings file: 21,000 labels take a tenth of it; parsed, JSON takes up to twenty times as much
WEIGHTS, CONFIG, PREPROCESS = "model.safetensors", "config.json", "preprocess.json"
LABELS, CARD = "labels.json", "card.md"
RECIPE = "recipe.toml"  # not config.toml, which is what a run is known by


@dataclasses.dataclass(frozen=True)
class Bundle:
    model: Model  # in the precision it was stored in; whoever computes with it casts it
    preprocess: Preprocess
    labels: tuple[str, ...]
    card: str
    origin: dict[str, Any]
    temperature: float = 1.0  # scores are divided by it before they become probabilities; their order stays
    # One score for each label, before the temperature: above it, an image has the label. Empty where an image has one label.
    thresholds: tuple[float, ...] = ()
    pixels: PixelStats | None = None  # of the training images, where a run made it
    recipe: str = ""  # the resolved config of that run, as TOML


def save_bundle(path: Path, bundle: Bundle, advance: Advance | None = None) -> None:
    """Write the folder atomically; `advance` counts the weights written."""
    tensors = bundle.model.state_dict()
    require_finite(tensors)
    require_consistent(bundle.model.spec, bundle.preprocess, bundle.labels, "the bundle to be saved")
    require_thresholds(list(bundle.thresholds), bundle.labels, "the bundle to be saved")
    with fsio.new_folder(path) as folder:
        folder.write(WEIGHTS, safetensors_chunks(tensors, advance=advance))
        spec = spec_to_dict(bundle.model.spec)
        header = {"format_version": FORMAT_VERSION, "spec": spec, "origin": bundle.origin}
        # Left out where they say nothing. A reader that does not know the keys ranks the labels alike, less well calibrated.
        fitted: dict[str, Any] = {} if bundle.temperature == 1 else {"temperature": bundle.temperature}
        fitted |= {"thresholds": list(bundle.thresholds)} if bundle.thresholds else {}
        fitted |= {} if bundle.pixels is None else {"pixels": config.to_dict(bundle.pixels)}
        folder.write_json(CONFIG, {**header, **fitted})
        folder.write_json(PREPROCESS, config.to_dict(bundle.preprocess))
        folder.write_json(LABELS, list(bundle.labels))
        folder.write(CARD, bundle.card)
        if bundle.recipe:
            folder.write(RECIPE, bundle.recipe)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle and verify its hashes; the model is on the CPU, in eval mode."""
    if not path.is_dir():
        raise FileProblem(
            f"{path} is not a folder", hint="Give the folder that holds model.safetensors and config.json."
        )
    with fsio.verifying(path, required=(WEIGHTS, CONFIG, PREPROCESS, LABELS, CARD)):
        return _read_bundle(path)


def _read_bundle(path: Path) -> Bundle:
    header = read_json(path / CONFIG)
    if not isinstance(header, dict):
        raise FileProblem(f"{path / CONFIG} must hold a table of keys")
    version, origin = header.get("format_version"), header.get("origin", {})
    if version != FORMAT_VERSION:
        raise FileProblem(f"{path} has bundle format {version!r}; this vitlab reads {FORMAT_VERSION}")
    if not isinstance(origin, dict):
        raise FileProblem(f"{path / CONFIG} must state its origin as a table of keys")
    temperature = header.get("temperature", 1.0)
    if not _is_number(temperature) or temperature <= 0:
        raise FileProblem(f"{path / CONFIG}: the temperature must be a number above 0, not {temperature!r}")
    labels = read_json(path / LABELS)
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise FileProblem(f"{path / LABELS} must hold a list of names")
    thresholds = header.get("thresholds", [])
    require_thresholds(thresholds, labels, str(path / CONFIG))
    try:
        spec = spec_from_dict(header.get("spec", {}))
        preprocess = config.from_dict(Preprocess, read_json(path / PREPROCESS), "preprocess.")
        card = reading.read_text(path / CARD, _TEXT_BYTES)
        recipe = reading.read_text(path / RECIPE, _TEXT_BYTES) if (path / RECIPE).is_file() else ""
        pixels = config.from_dict(PixelStats, header["pixels"], "pixels.") if "pixels" in header else None
    except OSError as error:
        raise FileProblem(f"{path} cannot be read as a bundle: {error}") from error
    require_consistent(spec, preprocess, labels, str(path))
    tensors = _read_weights(path / WEIGHTS, count_stored(spec))
    model = load_state(allocate(spec), tensors, str(path)).eval()
    fitted = float(temperature), tuple(map(float, thresholds))
    return Bundle(model, preprocess, tuple(labels), card, origin, *fitted, pixels, recipe)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # which a whole number can exceed


def require_thresholds(thresholds: Any, labels: Sequence[str], origin: str) -> None:
    """One number for each label, or none at all."""
    if not isinstance(thresholds, list) or not all(map(_is_number, thresholds)):
        raise FileProblem(f"{origin}: the thresholds must be a list of numbers, one for each label")
    if thresholds and len(thresholds) != len(labels):
        raise FileProblem(f"{origin} has {len(thresholds)} thresholds for {len(labels)} labels")


def load_state(model: Model, tensors: dict[str, Tensor], origin: str) -> Model:
    """Load exactly these tensors: none missing, none left over, every shape right."""
    expected = model.state_dict()
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    pairs = [(name, expected[name], tensors[name]) for name in sorted(expected.keys() & tensors.keys())]
    reshaped = [name for name, wanted, given in pairs if given.shape != wanted.shape]
    # A counter of batch norm is a whole number; all else is not.
    unfit = [name for name, wanted, given in pairs if given.is_floating_point() != wanted.is_floating_point()]
    faults = {"lacks": missing, "has unknown": unexpected, "has misshapen": reshaped, "has non-float": unfit}
    for what, names in faults.items():
        if names:
            raise FileProblem(f"{origin} {what} weights: {some_of(names, _SHOWN)}")
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True)


def require_consistent(spec: ModelSpec, preprocess: Preprocess, labels: Sequence[str], origin: str) -> None:
    """Raise unless spec, preprocessing and labels belong together."""
    if spec.num_classes and len(labels) != spec.num_classes:
        raise FileProblem(f"{origin} has {len(labels)} labels for {spec.num_classes} classes")
    if preprocess.channels != spec.in_channels:
        raise FileProblem(
            f"{origin} prepares {amount(preprocess.channels, 'channel')} for a model of {spec.in_channels}"
        )
    try:
        spec.grid_for(preprocess.image_size)
    except UsageError as error:
        raise FileProblem(f"{origin} prepares images that do not fit: {error.what}", hint=error.hint) from None


@dataclasses.dataclass(frozen=True)
class Description:
    """Spec, preprocessing and labels, for the header of a safetensors file."""

    spec: ModelSpec
    preprocess: Preprocess
    labels: tuple[str, ...]

    def to_json(self) -> str:
        spec, preprocess = spec_to_dict(self.spec), config.to_dict(self.preprocess)
        return json.dumps({"spec": spec, "preprocess": preprocess, "labels": list(self.labels)}, ensure_ascii=False)


def read_description(text: str, origin: str) -> Description:
    try:
        table = reading.parse_json(text, origin)
        labels = table["labels"]
        if not isinstance(labels, list) or not all(isinstance(label, str) and label.isprintable() for label in labels):
            raise TypeError
        preprocess = config.from_dict(Preprocess, table["preprocess"], "preprocess.")
        return Description(spec_from_dict(table["spec"]), preprocess, tuple(labels))
    except (ValueError, LookupError, TypeError, RecursionError) as error:  # a UsageError is a ValueError
        raise FileProblem(f"{origin} describes itself in its header, but not as vitlab does") from error


def _read_weights(path: Path, wanted: int) -> dict[str, Tensor]:
    """Read the weights; compare their number before a model is built."""
    found = read_arrays(path)
    if found.container != "safetensors" or found.prefix:
        raise FileProblem(f"{path} holds no weights by vitlab's names", hint="Convert it with `vitlab convert`.")
    if (count := sum(tensor.numel() for tensor in found.arrays.values())) != wanted:
        raise FileProblem(f"{path} holds {count:,} numbers, but the spec beside it needs {wanted:,}")
    return found.arrays


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """NaN or infinity never reaches a saved weight."""
    if names := find_nonfinite(tensors):
        raise VitlabError(f"the weight '{names[0]}' holds NaN or infinity, so nothing was saved")


def tell_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Warn of weights that hold NaN or infinity, with the number of such values."""
    bad = [f"{name} ({int((~tensors[name].float().isfinite()).sum()):,})" for name in find_nonfinite(tensors)]
    return [f"warning: NaN or infinity among the values of {some_of(bad, _SHOWN)}"] if bad else []


def read_json(path: Path) -> Any:
    return reading.load_json(path, _TEXT_BYTES)


def read_table(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None where there is no such file."""
    if not path.is_file():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise FileProblem(f"{path} must hold a table of keys")
    return value
