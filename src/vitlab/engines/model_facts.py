"""Facts of a model by name, or of weights: a bundle, a run, a file, a published checkpoint.

Names and published checkpoints are answered without torch, which only a file needs.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core.errors import FileProblem, UnknownName, UsageError
from vitlab.models.facts import ModelInfo, info_of
from vitlab.models.facts import model_info as named_model
from vitlab.weights import catalogue
from vitlab.weights.card import LICENCE, START, card_row

_WEIGHT_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsInfo(ModelInfo):
    """What weights say of themselves beside the facts of their model. `licence` and `start` are empty where nothing does."""

    source: str  # the path, or the address of a checkpoint that is not here
    format: str
    labels: int
    preprocess: Mapping[str, Any]  # as in preprocess.json
    licence: str
    start: str  # the weights that they were trained from


def model_info(name: str, *, image_size: int | Sequence[int] | None = None, classes: int | None = None) -> ModelInfo:
    """Parameters, FLOPs, tokens and grid of a model at a chosen image size.

    `name` may be weights too: a bundle, a run, a file or a published checkpoint. These have an image size and classes of their
    own, and the result a `WeightsInfo`.

    Args:
        name: A name such as ViT-B/16 or BiT-R50x1 (see `list_models`), or weights.
        image_size: Of a model: pixels, one number or rows and columns; default: the usual size of that model.
        classes: Of a model: outputs of the head; default 1000.
    """
    here = os.path.exists(name)  # noqa: PTH110 (pathlib's raises for a name that is too long to be one of a file)
    published = catalogue.is_name(name)
    try:  # first: a name means the same in every folder, and ./vit-b-16 is not a name
        return named_model(name, image_size=image_size, classes=classes)
    except UnknownName:
        if not here and not published:
            if Path(name).suffix in _WEIGHT_SUFFIXES:
                raise FileProblem(f"{name} does not exist") from None
            raise
    if image_size is not None or classes is not None:
        raise UsageError(
            f"{name} is weights, with an image size and classes of their own",
            hint="Leave --image-size and --classes out.",
        )
    return _opened(Path(name)) if here else _published(catalogue.find(name))


def _published(entry: catalogue.Checkpoint) -> WeightsInfo:
    """By the catalogue, whether or not the file is here."""
    from vitlab.core.download import shown  # which brings what speaks HTTP, and `vitlab --help` should not wait for it

    return WeightsInfo(
        **vars(info_of(entry.spec)),
        source=str(entry.path) if entry.path.is_file() else shown(entry.address) if entry.address else "",
        format=entry.format,
        labels=entry.spec.num_classes,
        preprocess=entry.preprocess,
        licence=entry.licence,
        start="",
    )


def _opened(path: Path) -> WeightsInfo:
    from vitlab.core import config
    from vitlab.engines.classifier import open_weights
    from vitlab.weights.foreign import Reading

    bundle, report = open_weights(path, Reading())
    origin = str(bundle.origin.get("format", report.source))
    return WeightsInfo(
        **vars(info_of(bundle.model.spec)),
        source=str(path),
        format=report.source if origin == report.source else f"{report.source}, from {origin}",
        labels=len(bundle.labels),
        preprocess=config.to_dict(bundle.preprocess),
        licence=card_row(bundle.card, LICENCE) or "",
        start=card_row(bundle.card, START) or "",
    )
