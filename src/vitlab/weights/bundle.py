"""The native form of a trained model: a folder that holds everything needed to use it rightly.

`model.safetensors`, `config.json` (spec, format version, origin), `preprocess.json`, `labels.json`, `card.md`, and
`manifest.json` with the SHA-256 of each. JSON and safetensors only: reading one never runs anything that is in it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import Model, allocate
from vitlab.models.spec import spec_from_dict, spec_to_dict

FORMAT_VERSION = 1
WEIGHTS, CONFIG, PREPROCESS, LABELS, CARD = (
    "model.safetensors",
    "config.json",
    "preprocess.json",
    "labels.json",
    "card.md",
)


@dataclasses.dataclass(frozen=True)
class Bundle:
    model: Model
    preprocess: Preprocess
    labels: tuple[str, ...]
    card: str
    origin: dict[str, Any]


def save_bundle(path: Path, bundle: Bundle) -> None:
    """Writes the folder in one step. `path` must be free."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bundle.model.state_dict().items()}
    require_finite(tensors)
    with fsio.new_folder(path) as folder:
        folder.write(WEIGHTS, safetensors.torch.save(tensors))
        spec = spec_to_dict(bundle.model.spec)
        folder.write_json(CONFIG, {"format_version": FORMAT_VERSION, "spec": spec, "origin": bundle.origin})
        folder.write_json(PREPROCESS, config.to_dict(bundle.preprocess))
        folder.write_json(LABELS, list(bundle.labels))
        folder.write(CARD, bundle.card)


def read_bundle(path: Path) -> Bundle:
    """The bundle in `path`, after every file was checked against its hash; the model is on the CPU, in eval mode."""
    if not path.is_dir():
        raise FileProblem(
            f"{path} is not a folder", hint="Give the folder that holds model.safetensors and config.json."
        )
    fsio.verify_folder(path)
    header = _read_json(path / CONFIG)
    version = header.get("format_version")
    if version != FORMAT_VERSION:
        raise FileProblem(f"{path} has bundle format {version!r}; this vitlab reads {FORMAT_VERSION}")
    labels = _read_json(path / LABELS)
    try:
        spec = spec_from_dict(header["spec"])
        preprocess = config.from_dict(Preprocess, _read_json(path / PREPROCESS), "preprocess.")
        card = (path / CARD).read_text(encoding="utf-8")
        tensors = safetensors.torch.load_file(path / WEIGHTS)
    except (KeyError, OSError, UnicodeDecodeError, safetensors.SafetensorError) as error:
        raise FileProblem(f"{path} cannot be read as a bundle: {error}") from error
    if spec.num_classes and len(labels) != spec.num_classes:
        raise FileProblem(f"{path} has {len(labels)} labels for {spec.num_classes} classes")
    model = load_state(allocate(spec), tensors, str(path)).eval()
    return Bundle(model, preprocess, tuple(map(str, labels)), card, dict(header.get("origin", {})))


def load_state(model: Model, tensors: dict[str, Tensor], origin: str) -> Model:
    """`model` with exactly these tensors: every one used, every parameter set, every shape right."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    reshaped = [name for name in wanted.keys() & tensors.keys() if tuple(tensors[name].shape) != wanted[name]]
    for what, names in (("lacks", missing), ("has unknown", unexpected), ("has misshapen", sorted(reshaped))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise FileProblem(f"{origin} {what} weights: {', '.join(names[:3])}{more}")
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True)


def require_finite(tensors: dict[str, Tensor]) -> None:
    """NaN or infinity never reaches a saved weight."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise VitlabError(f"the weight '{name}' holds NaN or infinity, so nothing was saved")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileProblem(f"{path} cannot be read: {error}") from error
