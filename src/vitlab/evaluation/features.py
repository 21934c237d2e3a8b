"""One vector per image, for every image of a set, computed once and kept: what the measures of a representation work on.

Owns which vector it is, and under which name it is kept; `row_store` computes and keeps them.
Letters: B batch, C channels, Y X rows and columns.
"""

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import VitlabError, require_choice
from vitlab.core.reading import load_json
from vitlab.data.dataset import Dataset
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions, ModelFunction
from vitlab.evaluation import row_store
from vitlab.evaluation.row_store import (
    ABOUT,
    ImageRows,
    RowWork,
    compute_rows,
    mapped,
    named_store,
    pick_rows,
    stored_reasons,
    unread,
    whole_chunks,
)
from vitlab.models.build import Model
from vitlab.models.families import family_of
from vitlab.models.names import format_name
from vitlab.models.spec import TokenKind, spec_to_dict
from vitlab.weights.hashing import hash_weights

_FORMAT = 2  # of the folder; another number is another folder
_IMAGES = "images.bin"  # 16 bytes for each row: which image it is, so that parts of the set find theirs


@dataclasses.dataclass(frozen=True)
class FeatureRule:
    """Which vector of an image: what the head sees, or the tokens of chosen layers, concatenated."""

    layers: tuple[int, ...] = ()
    tokens: TokenKind | None = None  # None: those of the model; `patches` are concatenated

    def __post_init__(self) -> None:
        if self.tokens is not None:
            require_choice("tokens", self.tokens, ("cls", "patches", "mean"))

    def describe(self, model: Model) -> ModelFunction:
        if not self.layers and self.tokens is None:
            return model.represent
        layers, tokens = self.layers or (-1,), self.tokens

        def vectors(x_BCYX: Tensor) -> Tensor:
            found = (
                model.features(x_BCYX, layers=layers)
                if tokens is None
                else model.features(x_BCYX, tokens=tokens, layers=layers)
            )
            return torch.cat([found.layers[i].flatten(1) for i in sorted(found.layers)], dim=1)

        return vectors


def features_of(
    classifier: Classifier,
    dataset: Dataset,
    rule: FeatureRule,
    *,
    cache: Path,
    console: Console,
    options: InferenceOptions | None = None,
    world: World | None = None,
    label: str = "features",
) -> ImageRows:
    """The features of `dataset`, from the cache as far as they are there; the processes of a `world` share the others."""
    model = classifier.model
    key = feature_key(model, classifier.preprocess, rule, classifier.device) | {"data": dataset.content_fingerprint()}
    store = named_store(cache, key, dataset)
    found = compute_rows(
        RowWork(rule.describe(model.eval()), classifier.preprocess),
        dataset,
        options or InferenceOptions(),
        store=store,
        world=world or World(0, 1, classifier.device),
        console=console,
        label=label,
    )
    if (world is None or world.is_main) and not (store.folder / _IMAGES).is_file():
        fsio.write_file(store.folder / _IMAGES, b"".join(dataset.image_fingerprints()))
    return found


def feature_key(
    model: Model, preprocess: Preprocess, rule: FeatureRule, device: torch.device, precision: str = "fp32"
) -> dict[str, Any]:
    """What decides the vector of an image: neither the head nor rates that act in training alone."""
    spec = spec_to_dict(model.spec)
    for name in ("num_classes", *family_of(model.spec).dropout_fields):
        spec.pop(name, None)
    return {
        "format": _FORMAT,
        "model": format_name(model.spec),
        "weights": hash_weights(model, without="head."),
        "spec": spec,
        "preprocess": config.to_dict(preprocess),
        "layers": list(rule.layers),
        "tokens": rule.tokens,
        "device": device.type,  # another kind of device rounds in other places
        "precision": precision,
    }


def cached_features(cache: Path, key: Mapping[str, Any], dataset: Dataset) -> ImageRows | None:
    """The features of all images of `dataset`, where sets in the cache have them, whatever else is in those sets."""
    started, wanted = time.perf_counter(), json.loads(json.dumps(key))
    folders = [about.parent for about in sorted(cache.glob(f"*/{ABOUT}")) if _has_key(about, wanted)]
    if not folders:
        return None  # before any image is read
    images = dataset.image_fingerprints()
    for folder in folders:
        try:
            listed = (folder / _IMAGES).read_bytes()
        except OSError:
            continue
        rows = {listed[16 * i : 16 * i + 16]: i for i in range(len(listed) // 16)}
        paths = whole_chunks(folder, -(-len(listed) // 16 // row_store.CHUNK_ROWS))
        if paths and all(paths) and all(image in rows for image in images):
            chunks = [mapped(path) for path in paths if path is not None]
            picked = pick_rows(chunks, torch.tensor([rows[image] for image in images]))
            found = ImageRows([picked], {}, 0, time.perf_counter() - started)
            return dataclasses.replace(found, bad=unread(found, dataset, stored_reasons(folder)))
    return None


def _has_key(about: Path, wanted: Mapping[str, Any]) -> bool:
    try:
        stored = load_json(about)
    except (OSError, VitlabError):
        return False
    return isinstance(stored, dict) and all(name in stored and stored[name] == wanted[name] for name in wanted)
