"""A model as a stage of somebody's pipeline: a batch of columns in, the same batch with vectors or labels out.

    ds = ray.data.read_binary_files("s3://photos")
    ds.map_batches(vitlab.Embedder("runs/mine"), batch_size=64).write_parquet("vectors")

Made for `ray.data.Dataset.map_batches`, and nothing here imports Ray: a batch is a dict of NumPy arrays, a pandas DataFrame
or a pyarrow Table, and what comes out is of the same kind. A stage is pickled as its settings alone. Each process loads the
model when its first batch comes, and once. An image that cannot be read keeps its row, with the reason in `error`.
Letters: B batch, D width, C channels, Y X rows and columns.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.core.errors import MissingExtra, Unreachable, UsageError, VitlabError
from vitlab.data.decode import read, why_unreadable
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.addresses import is_remote, read_address
from vitlab.engines.classifier import Classifier, load, rank_labels
from vitlab.engines.inference import ModelFunction, infer_pixels
from vitlab.options.option import StrPath
from vitlab.weights.bundle import Bundle

COLUMNS = ("bytes", "image", "path")  # where images are looked for, in this order

Array = np.ndarray[Any, Any]
Columns = Mapping[str, Any]


@functools.lru_cache(maxsize=4)
def _loaded(model: str, device: str) -> Classifier:
    """One of each per process, however many copies of a stage are unpickled there."""
    return load(model, device=device, quiet=True)


@dataclasses.dataclass(frozen=True)
class _Stage(abc.ABC):
    model: StrPath
    _: dataclasses.KW_ONLY
    column: str | None = None  # None: the first of `COLUMNS` that a batch has
    device: str = "auto"

    def __call__(self, batch: Any) -> Any:
        """The batch with the columns of this stage beside its own."""
        given = _as_columns(batch)
        images = _images(given, self.column)
        classifier = _loaded(str(self.model), self.device)
        pixels_BCYX, errors = _decoded(images, classifier.preprocess)
        outputs_BK = infer_pixels(self.function(classifier), pixels_BCYX, classifier.preprocess, classifier.device)
        outputs_BK = outputs_BK.clone()  # outside of inference mode, so that rows can be set
        found = self.columns(classifier.bundle, outputs_BK, [error is None for error in errors])
        return _like(batch, found | {"error": np.array(errors, dtype=object)})

    @abc.abstractmethod
    def function(self, classifier: Classifier) -> ModelFunction:
        """What is computed of the images."""

    @abc.abstractmethod
    def columns(self, bundle: Bundle, outputs_BK: Tensor, good: Sequence[bool]) -> dict[str, Array]:
        """The columns to be added, of images that are `good`, and empty of others."""


@dataclasses.dataclass(frozen=True)
class Embedder(_Stage):
    """Adds `vector`, float32 [B, D]: what the head of the model sees; NaN, with the reason in `error`, for a bad image.

    Args:
        model: A bundle, a run, a file of weights or a published name, which every worker must see.
        column: The column with the images: encoded bytes, pixels [rows, columns, channels] in uint8, or paths and addresses.
            Default: `bytes`, `image` or `path`, whichever there is.
        device: auto, cpu, cuda or mps.
        output: What the new column is called.
    """

    output: str = "vector"

    def function(self, classifier: Classifier) -> ModelFunction:
        return classifier.model.represent

    def columns(self, bundle: Bundle, outputs_BK: Tensor, good: Sequence[bool]) -> dict[str, Array]:  # noqa: ARG002
        outputs_BK[~torch.tensor(good, dtype=torch.bool)] = torch.nan
        return {self.output: outputs_BK.numpy()}


@dataclasses.dataclass(frozen=True)
class Predictor(_Stage):
    """Adds `label` and its probability `p`; with `top` above 1, lists of the likeliest, best first.

    Where images can have several labels, `labels` has those that an image has. For a bad image, `label` is empty and `p` is
    NaN, with the reason in `error`.

    Args:
        model: A bundle, a run, a file of weights or a published name, which every worker must see.
        column: The column with the images: encoded bytes, pixels [rows, columns, channels] in uint8, or paths and addresses.
            Default: `bytes`, `image` or `path`, whichever there is.
        device: auto, cpu, cuda or mps.
        top: How many labels for each image.
    """

    top: int = 1

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"top must be at least 1, not {self.top}")

    def function(self, classifier: Classifier) -> ModelFunction:
        if not classifier.labels:
            raise UsageError(f"{self.model} has no classes, so it cannot name anything", hint="Use Embedder instead.")
        return classifier.model

    def columns(self, bundle: Bundle, outputs_BK: Tensor, good: Sequence[bool]) -> dict[str, Array]:
        top = min(self.top, len(bundle.labels))
        ranked = rank_labels(bundle, outputs_BK, top)
        label = [[each.label if ok else "" for each in row[:top]] for row, ok in zip(ranked, good, strict=True)]
        p = [[each.p if ok else np.nan for each in row[:top]] for row, ok in zip(ranked, good, strict=True)]
        single = self.top == 1
        found: dict[str, Array] = {
            "label": np.array([row[0] for row in label], dtype=object) if single else _lists(label),
            "p": np.array([row[0] for row in p] if single else p, dtype=np.float32),
        }
        if bundle.thresholds:
            held = [[e.label for e in row if ok and e.has] for row, ok in zip(ranked, good, strict=True)]
            found["labels"] = _lists(held)
        return found


# --- images to outputs ------------------------------------------------------------------------------------------------


def _decoded(images: Sequence[Any], rule: Preprocess) -> tuple[Tensor, list[str | None]]:
    """uint8 [B, C, Y, X], black where an image is bad, and what is wrong with each."""
    pixels_BCYX = torch.zeros(len(images), rule.channels, *rule.image_size, dtype=torch.uint8)
    errors: list[str | None] = []
    for i, image in enumerate(images):
        try:
            pixels_BCYX[i] = read(_source(image), rule)
            errors.append(None)
        except (Unreachable, MissingExtra):  # no fault of the image: whoever runs the stage tries again, or stops
            raise
        except (VitlabError, OSError) as error:
            errors.append(why_unreadable(error))
        except (ValueError, TypeError, OverflowError):
            errors.append("has pixels that are not rows of equally many whole numbers")
    return pixels_BCYX, errors


def _source(image: Any) -> Any:
    """An image as `read` takes it."""
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str) and is_remote(image):
        return read_address(image)
    if isinstance(image, np.ndarray) and image.dtype == object:  # rows in a list, as pandas and pyarrow give them
        return np.array(image.tolist(), dtype=np.uint8)
    if image is None:
        raise UsageError("is missing")
    if not isinstance(image, bytes | str | np.ndarray):
        raise UsageError(f"is neither bytes, pixels nor a path, but {type(image).__name__}")
    return image


# --- columns of NumPy, pandas and pyarrow -----------------------------------------------------------------------------


def _as_columns(batch: Any) -> Columns:
    if isinstance(batch, Mapping):
        return batch
    if hasattr(batch, "column_names") and hasattr(batch, "column"):  # a pyarrow Table
        return {name: batch.column(name) for name in batch.column_names}
    if hasattr(batch, "columns") and hasattr(batch, "assign"):  # a pandas DataFrame
        return {name: batch[name] for name in batch.columns}
    raise UsageError(f"a batch is a dict of arrays, a DataFrame or a Table, not {type(batch).__name__}")


def _images(columns: Columns, name: str | None) -> Sequence[Any]:
    name = name or next((each for each in COLUMNS if each in columns), None)
    if name is None or name not in columns:
        wanted = f"no column {name}" if name else f"none of the columns {', '.join(COLUMNS)}"
        raise UsageError(
            f"the batch has {wanted}", hint=f"It has: {', '.join(map(str, columns))}. Name one as column=."
        )
    column = columns[name]
    if hasattr(column, "combine_chunks"):  # pyarrow's; tensors of Ray's have a way of their own to become arrays
        whole = column.combine_chunks()
        is_tensor = "tensor" in str(whole.type).lower()
        return list(whole.to_numpy(zero_copy_only=False)) if is_tensor else whole.to_pylist()
    return list(column)


def _lists(rows: Sequence[Sequence[Any]]) -> Array:
    """A column of lists, which need not be of one length."""
    column = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        column[i] = list(row)  # not an array, which Arrow would not take for a list
    return column


def _like(batch: Any, new: Mapping[str, Array]) -> Any:
    """The batch with these columns, as what it was."""
    if isinstance(batch, Mapping):
        return {**batch, **new}
    if hasattr(batch, "assign"):
        return batch.assign(**{name: column if column.ndim == 1 else list(column) for name, column in new.items()})
    import pyarrow

    for name, column in new.items():
        if column.ndim == 1:
            kind = pyarrow.string() if name == "error" else None
            array = pyarrow.array(list(column), kind)
        else:
            array = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(column.reshape(-1)), column.shape[1])
        batch = batch.append_column(name, array)
    return batch
