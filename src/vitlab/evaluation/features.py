"""One vector per image, for every image of a set, computed once and kept: what the measures of a representation work on.

Owns the cache. A set is cut into chunks of a fixed number of images; each chunk is one file that carries its own SHA-256 in its
name and appears whole or not at all, so that whoever is killed goes on with the first chunk that is missing. Whoever is stopped
by a signal leaves what there is of the next chunk as well. Chunks are mapped into memory, never loaded together.
Letters: N images, B batch, D features, C channels, Y X rows and columns.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, VitlabError, require_choice
from vitlab.core.reading import load_json
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions, ModelFunction, infer, inference_progress, unpadded_batches
from vitlab.models.build import Model
from vitlab.models.families import family_of
from vitlab.models.names import format_name
from vitlab.models.spec import TokenKind, spec_to_dict
from vitlab.weights.hashing import hash_weights

CHUNK_ROWS = 1024  # images: 1.5 MB of ViT-S features, and what a kill can cost; a GPU would wait for smaller files
ABOUT = "about.json"
_BEGUN = "begun-"  # before the name of a chunk that is not whole
_FORMAT = 2  # of the folder; another number is another folder
_IMAGES = "images.bin"  # 16 bytes for each row: which image it is, so that parts of the set find theirs
_KEY_LETTERS = 32  # of a SHA-256 in names: 128 bits, more than chance can meet

Array = np.ndarray[Any, Any]


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


@dataclasses.dataclass(frozen=True)
class FeatureSet:
    """`chunks` together are float32 [N, D], in the order of the data set; an image that could not be read is a row of NaN."""

    chunks: Sequence[Tensor]
    bad: Mapping[str, str]  # the reason, by the name of the image
    computed: int  # images that the model was run on; the others were in the cache
    seconds: float

    @property
    def width(self) -> int:
        return self.chunks[0].shape[1]

    def readable(self) -> Tensor:
        """bool [N]."""
        return torch.cat([~chunk[:, 0].isnan() for chunk in self.chunks])

    def rows(self, index: Tensor) -> list[Tensor]:
        """The vectors of chosen images, in that order, again in chunks."""
        if len(index) == sum(map(len, self.chunks)) and torch.equal(index, torch.arange(len(index))):
            return list(self.chunks)  # all of them: nothing is copied
        return [pick_rows(self.chunks, part) for part in index.split(CHUNK_ROWS)]


def pick_rows(chunks: Sequence[Tensor], index: Tensor) -> Tensor:
    """Chosen rows of what the chunks are together."""
    ends = torch.tensor([len(chunk) for chunk in chunks]).cumsum(0)
    number = torch.bucketize(index, ends, right=True)
    rows = torch.empty(len(index), chunks[0].shape[1], dtype=chunks[0].dtype)
    for i in number.unique().tolist():
        here = number == i
        rows[here] = chunks[i][index[here] - (ends[i] - len(chunks[i]))]
    return rows


def features_of(
    classifier: Classifier,
    dataset: Dataset,
    rule: FeatureRule,
    *,
    cache: Path,
    console: Console,
    options: InferenceOptions | None = None,
    label: str = "features",
) -> FeatureSet:
    """The features of `dataset`, from the cache as far as they are there."""
    model = classifier.model
    key = feature_key(model, classifier.preprocess, rule, classifier.device) | {"data": dataset.content_fingerprint()}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_KEY_LETTERS]
    found = extract(
        rule.describe(model.eval()),
        dataset,
        classifier.preprocess,
        options or InferenceOptions(),
        store=FeatureStore(cache / name, key | {"name": dataset.name, "images": len(dataset)}),
        device=classifier.device,
        console=console,
        label=label,
    )
    if not (cache / name / _IMAGES).is_file():
        fsio.write_file(cache / name / _IMAGES, b"".join(dataset.image_fingerprints()))
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


def cached_features(cache: Path, key: Mapping[str, Any], dataset: Dataset) -> FeatureSet | None:
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
        paths = _whole_chunks(folder, -(-len(listed) // 16 // CHUNK_ROWS))
        if paths and all(paths) and all(image in rows for image in images):
            chunks = [_mapped(path) for path in paths if path is not None]
            picked = pick_rows(chunks, torch.tensor([rows[image] for image in images]))
            found = FeatureSet([picked], {}, 0, time.perf_counter() - started)
            why = "could not be read when its features were computed"
            unread = (~found.readable()).nonzero()[:, 0].tolist()
            return dataclasses.replace(found, bad={str(dataset.keys[i]): why for i in unread})
    return None


def _has_key(about: Path, wanted: Mapping[str, Any]) -> bool:
    try:
        stored = load_json(about)
    except (OSError, VitlabError):
        return False
    return isinstance(stored, dict) and all(name in stored and stored[name] == wanted[name] for name in wanted)


class FeatureStore(NamedTuple):
    """The folder of one set of features, and what its about.json says of them."""

    folder: Path
    about: Mapping[str, Any]


def extract(
    describe: ModelFunction,
    dataset: Dataset,
    preprocess: Preprocess,
    options: InferenceOptions,
    *,
    store: FeatureStore,
    device: torch.device,
    console: Console,
    label: str = "features",
) -> FeatureSet:
    """Compute `describe` of every image that is not in the store yet, and return all of them."""
    started = time.perf_counter()
    folder = store.folder
    if not len(dataset):
        raise FileProblem(f"{dataset.name} holds no images")
    sizes = [min(CHUNK_ROWS, len(dataset) - first) for first in range(0, len(dataset), CHUNK_ROWS)]
    paths, bad, computed = _whole_chunks(folder, len(sizes)), dict[str, str](), 0
    if all(paths):
        console.say(f"{label}: all {len(dataset):,} are in the cache")
    else:
        fsio.make_folder(folder)
        with fsio.locked(folder):
            paths = _whole_chunks(folder, len(sizes))  # another process may have been at work until now
            missing = [number for number, path in enumerate(paths) if path is None]
            left_off = {number: path for number, path in _begun_chunks(folder).items() if number in missing}
            _clear_others(folder, [*paths, *left_off.values()])
            fsio.write_json(folder / ABOUT, dict(store.about))
            begun = {number: np.load(path, allow_pickle=False) for number, path in left_off.items()}
            ahead = [torch.arange(len(begun.get(i, ())), sizes[i]) + i * CHUNK_ROWS for i in missing]
            computed = sum(map(len, ahead))
            if computed < len(dataset):
                console.say(f"{label}: {len(dataset) - computed:,} of {len(dataset):,} are in the cache")
            if missing:
                part = dataset if computed == len(dataset) else dataset.subset(torch.cat(ahead))
                found = BadImages(most=len(dataset))
                rows = _rows(describe, part, preprocess, options, device, found, console, label)
                for number, path in _write_chunks(folder, rows, {i: sizes[i] for i in missing}, begun):
                    paths[number] = path
                _clear_others(folder, paths)
                bad |= found.found
    chunks = [_mapped(path) for path in paths if path is not None]
    features = FeatureSet(chunks, {}, computed, time.perf_counter() - started)
    for i in (~features.readable()).nonzero()[:, 0].tolist():
        bad.setdefault(str(dataset.keys[i]), "could not be read when its features were computed")
    if len(bad) == len(dataset):
        first, why = next(iter(bad.items()))
        raise VitlabError(f"none of the {len(dataset):,} images could be read, the first is {first}: {why}")
    return dataclasses.replace(features, bad=bad)


# --- from images to rows ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def _rows(
    describe: ModelFunction,
    dataset: Dataset,
    preprocess: Preprocess,
    options: InferenceOptions,
    device: torch.device,
    bad: BadImages,
    console: Console,
    label: str,
) -> Generator[Array]:
    """Vectors float32 [B, D], batch after batch."""
    batches = unpadded_batches(dataset, preprocess, options, device, bad)
    done = 0
    with inference_progress(console, label, len(dataset), options) as advance, _exact_convolutions():
        for output_BD, batch in infer(describe, batches, preprocess, device):
            rows_BD = output_BD.cpu()
            broken_B = batch.valid & ~rows_BD.isfinite().all(dim=1)
            if broken_B.any():
                name = dataset.keys[int(batch.ids[broken_B][0])]
                raise VitlabError(f"the features of {name} are not finite", hint="Are the weights complete?")
            rows_BD[~batch.valid] = torch.nan
            done += len(rows_BD)
            advance(done)
            yield rows_BD.numpy()


@contextlib.contextmanager
def _exact_convolutions() -> Generator[None]:
    """A GPU rounds the inputs of convolutions to 10 bits unless told otherwise, and the patch embedding is one."""
    rule: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    before = rule.fp32_precision
    rule.fp32_precision = "ieee"
    try:
        yield
    finally:
        rule.fp32_precision = before


# --- chunks on the disk -----------------------------------------------------------------------------------------------


def _write_chunks(
    folder: Path, rows: Iterator[Array], sizes: Mapping[int, int], begun: Mapping[int, Array]
) -> Generator[tuple[int, Path]]:
    """The chunks of these sizes, by their numbers, each from what was begun of it and the next rows."""
    left: list[Array] = []
    for number, size in sizes.items():
        left = [begun[number], *left] if number in begun else left
        try:
            while sum(map(len, left)) < size:
                left.append(next(rows))
            path = _write_chunk(folder, number, left, size)
        except (Stopped, KeyboardInterrupt):
            if any(map(len, left)):
                with contextlib.suppress(FileProblem):  # a full disk keeps nobody who wants to leave
                    _write_chunk(folder, number, left, size)
            raise
        yield number, path
        left = [np.concatenate(left)[size:]]


def _write_chunk(folder: Path, number: int, rows: Sequence[Array], size: int) -> Path:
    """Called begun where there are too few rows for a whole one."""
    rows_ND = np.concatenate(rows)[:size]
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(rows_ND, np.float32))
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()[:_KEY_LETTERS]
    path = folder / f"{'' if len(rows_ND) == size else _BEGUN}{number:06d}-{digest}.npy"
    fsio.write_file(path, data)
    return path


def _clear_others(folder: Path, kept: Sequence[Path | None]) -> None:
    """Takes away what is damaged, and what was begun of a chunk that is whole by now."""
    for path in folder.glob("*.npy"):
        if path not in kept:
            fsio.remove_file(path)


def _whole_chunks(folder: Path, count: int) -> list[Path | None]:
    """The file of every chunk, or None where there is none whose content is what its name says."""
    found: list[Path | None] = [None] * count
    for path in sorted(folder.glob("*-*.npy")):
        number = path.stem.partition("-")[0]
        if number.isdecimal() and int(number) < count and _is_intact(path):
            found[int(number)] = path
    return found


def _begun_chunks(folder: Path) -> dict[int, Path]:
    """The longest file of every chunk that was begun, by its number."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"{_BEGUN}*-*.npy"), key=lambda path: path.stat().st_size):
        number = path.stem.removeprefix(_BEGUN).partition("-")[0]
        if number.isdecimal() and _is_intact(path):
            found[int(number)] = path
    return found


def _is_intact(path: Path) -> bool:
    """Whether its content is what its name says."""
    return fsio.hash_file(path)[:_KEY_LETTERS] == path.stem.rpartition("-")[2]


def _mapped(path: Path) -> Tensor:
    # "c": private to this process, so that torch may have a tensor of it; the file stays as it is.
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
