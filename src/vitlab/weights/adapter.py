"""A LoRA adapter as files: what fine-tuning added to weights others have already.

`adapter.safetensors` (A and B of every matrix, and the head), `adapter.json` (which weights it belongs to, and all that the
model it makes of them has beside weights), and `manifest.json`. As in a bundle, reading one never runs anything that is in it.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import Model
from vitlab.models.families import spec_from_dict
from vitlab.models.lora import LoraRule, add_lora, load_lora_state, merge_lora
from vitlab.models.spec import ModelSpec, spec_to_dict
from vitlab.weights.bundle import Bundle, read_json, require_consistent, require_finite, require_thresholds
from vitlab.weights.containers import read_arrays, safetensors_chunks
from vitlab.weights.hashing import hash_weights
from vitlab.weights.surgery import for_transfer

FORMAT_VERSION = 1
TENSORS, ABOUT = "adapter.safetensors", "adapter.json"


@dataclasses.dataclass(frozen=True)
class Adapter:
    rule: LoraRule
    tensors: dict[str, Tensor]  # as `lora_state` gives them
    base: str  # what the start weights were called where it was trained
    base_hash: str  # of those weights in float32
    spec: ModelSpec  # of the model that comes of it: classes and image size may be others than those of the base
    preprocess: Preprocess
    labels: tuple[str, ...]
    card: str
    thresholds: tuple[float, ...] = ()  # as in a bundle: with some, every label is a yes or no of its own


def save_adapter(path: Path, adapter: Adapter) -> None:
    """Write the folder atomically. `path` must not exist."""
    require_finite(adapter.tensors)
    require_thresholds(list(adapter.thresholds), adapter.labels, "the adapter to be saved")
    about = {
        "format_version": FORMAT_VERSION,
        "base": {"name": adapter.base, "sha256": adapter.base_hash},
        "rule": config.to_dict(adapter.rule),
        "spec": spec_to_dict(adapter.spec),
        "preprocess": config.to_dict(adapter.preprocess),
        "labels": list(adapter.labels),
        "card": adapter.card,
        "thresholds": list(adapter.thresholds),
    }
    with fsio.new_folder(path) as folder:
        folder.write(TENSORS, safetensors_chunks(adapter.tensors))
        folder.write_json(ABOUT, about)


def read_adapter(path: Path) -> Adapter:
    """Read the adapter in `path`, or in the run there, and verify its hashes."""
    if (path / "adapter" / ABOUT).is_file():
        path = path / "adapter"
    if not (path / ABOUT).is_file():
        raise FileProblem(f"{path} is not an adapter: it has no {ABOUT}")
    with fsio.verifying(path, required=(TENSORS, ABOUT)):
        about: Any = read_json(path / ABOUT)
        try:
            if about["format_version"] != FORMAT_VERSION:
                raise FileProblem(
                    f"{path} has adapter format {about['format_version']!r}; this vitlab reads {FORMAT_VERSION}"
                )
            require_thresholds(about["thresholds"], about["labels"], str(path / ABOUT))
            found = Adapter(
                rule=config.from_dict(LoraRule, about["rule"], "rule."),
                tensors=read_arrays(path / TENSORS).arrays,
                base=str(about["base"]["name"]),
                base_hash=str(about["base"]["sha256"]),
                spec=spec_from_dict(about["spec"]),
                preprocess=config.from_dict(Preprocess, about["preprocess"], "preprocess."),
                labels=tuple(map(str, about["labels"])),
                card=str(about["card"]),
                thresholds=tuple(map(float, about["thresholds"])),
            )
        except (ValueError, LookupError, TypeError, RecursionError) as error:  # a UsageError is a ValueError
            raise FileProblem(f"{path / ABOUT} does not describe an adapter: {error}") from None
        require_consistent(found.spec, found.preprocess, found.labels, str(path))
        # Before memory is taken for a size or a rank that the file only claims. How large images can be is bounded.
        if found.spec.image_size != found.preprocess.image_size:
            raise FileProblem(
                f"{path / ABOUT} is for images of {found.spec.image_size} but prepares {found.preprocess.image_size}"
            )
        ranks = {tensor.shape[:1] for name, tensor in found.tensors.items() if ".lora_a." in name}
        if ranks != {(found.rule.rank,)}:
            raise FileProblem(f"{path / TENSORS} does not hold adapters of rank {found.rule.rank}")
    return found


def adapted(base: Bundle, adapter: Adapter, name: str) -> Bundle:
    """Merge the adapter into `base`, which is called `name`, and replace its head."""
    start = in_float32(base.model)
    if hash_weights(start) != adapter.base_hash:
        raise UsageError(f"the adapter was trained on other weights than those of {name}: on {adapter.base}")
    model, _ = for_transfer(start, adapter.spec)
    add_lora(model, adapter.rule, seed=0)  # what is drawn is replaced by the next line
    load_lora_state(model, adapter.tensors)
    merged = merge_lora(model).eval()
    rule, labels, card, origin = adapter.preprocess, adapter.labels, adapter.card, {"format": "vitlab"}
    return Bundle(merged, rule, labels, card, origin, thresholds=adapter.thresholds)


def in_float32(model: Model) -> Model:
    """The model, or a copy of it in float32, which training starts from."""
    same = all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return model if same else copy.deepcopy(model).float()
