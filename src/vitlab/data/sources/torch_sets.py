"""Map-style torch data sets, whose items are an image and the number of its class."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, single_labels
from vitlab.data.decode import decode
from vitlab.data.preprocess import Array
from vitlab.data.sources.numbering import distinct_names

_TRANSFORM = "Remove transforms that make floats, such as ToTensor and Normalize: vitlab does that itself."


@dataclasses.dataclass(frozen=True)
class ItemReader:
    """The image of an item: a PIL image, uint8 [rows, columns(, channels)], or a tensor uint8 [channels, rows, columns]."""

    items: Any

    def __call__(self, i: int) -> Array:
        image = self.items[i][0]
        if isinstance(image, Image.Image):
            return decode(image, "L" if image.mode == "L" else "RGB").permute(1, 2, 0).numpy()
        pixels = image.movedim(0, -1).numpy() if isinstance(image, Tensor) and image.ndim == 3 else np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise UsageError(f"item {i} is {pixels.dtype} {list(pixels.shape)}, not a uint8 image", hint=_TRANSFORM)
        return pixels if pixels.ndim == 3 else pixels[:, :, None]


def from_torch(items: Any) -> Dataset:
    """The images of a map-style data set, with its `classes`, if it has any, else the numbers that occur."""
    name = type(items).__name__
    if not len(items):
        raise UsageError(f"{name} holds no images")
    labels = _known_labels(items) or [_label(items, i) for i in range(len(items))]
    known = _attribute(items, "classes")  # maybe an array, which has no truth value
    classes = distinct_names(range(max(labels) + 1) if known is None or len(known) == 0 else known)
    if not 0 <= min(labels) <= max(labels) < len(classes):
        raise UsageError(
            f"{name}: the labels range from {min(labels)} to {max(labels)}, but it has {len(classes)} classes"
        )
    return Dataset(name, classes, [f"{name}/{i}" for i in range(len(items))], single_labels(labels), ItemReader(items))


def _label(items: Any, i: int) -> int:
    item = items[i]
    label = item[1] if isinstance(item, tuple | list) and len(item) == 2 else None
    label = label.item() if isinstance(label, Tensor | np.generic) else label
    if not isinstance(label, int):
        raise UsageError(f"item {i} is not an image with the number of its class, but {type(item).__name__}")
    return int(label)


def _known_labels(items: Any) -> list[int] | None:
    """`targets`, as torchvision's sets have them, which avoids reading all images; checked on three of them."""
    targets = _attribute(items, "targets")
    if targets is None or len(targets) != len(items) or _transforms_targets(items):
        return None
    labels = targets.tolist() if isinstance(targets, Tensor | np.ndarray) else list(targets)
    checked = {0, len(labels) // 2, len(labels) - 1}
    return labels if all(labels[i] == _label(items, i) for i in checked) else None


def _transforms_targets(items: Any) -> bool:
    """Whether items have other labels than `targets` says, of which the three that are checked need not show any."""
    if getattr(items, "target_transform", None) is not None:
        return True
    return isinstance(items, Subset) and _transforms_targets(items.dataset)


def _attribute(items: Any, name: str) -> Sequence[Any] | None:
    """Of the set, or of the one that it is a `Subset` of."""
    if not isinstance(items, Subset):
        return getattr(items, name, None)
    whole = _attribute(items.dataset, name)
    return whole if whole is None or name == "classes" else [whole[i] for i in items.indices]
