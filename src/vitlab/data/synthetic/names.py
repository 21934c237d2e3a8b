"""Synthetic sets by name, such as `fractals:categories=1000,image_size=64`.

Owns the names and the split into parts; `fractals` and `shapes` generate the images.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened, single_labels
from vitlab.data.synthetic.fractals import Fractals
from vitlab.data.synthetic.settings import ALONE, read_name
from vitlab.data.synthetic.shapes import Shapes

_KINDS: dict[str, type[Fractals] | type[Shapes]] = {"fractals": Fractals, "shapes": Shapes}


@dataclasses.dataclass(frozen=True)
class SyntheticReader:
    """Draws many at once, which costs far less than one after the other."""

    source: Fractals | Shapes
    first: int

    def __call__(self, i: int) -> "np.ndarray[Any, Any]":
        return self.many([i])[0]

    def version(self, i: int) -> str:
        """A picture's name has all its settings, and nothing else can change it."""
        return f"synthetic {self.first + i}"

    def many(self, index: Sequence[int], device: torch.device | str = "cpu") -> "list[np.ndarray[Any, Any]]":
        images_BCYX = self.source.render(torch.tensor(index) + self.first, device)
        return list(images_BCYX.permute(0, 2, 3, 1).cpu().numpy())


def open_synthetic(name: str) -> Opened:
    """The set of that name; test images are further instances or scenes.

    Instances of a fractal differ by one coefficient, so its test images are near relatives of the training ones: they measure
    whether a model learns the categories, not how it does on what it has never met.
    """
    train, full_name = read_name(name, _KINDS), ALONE.get(name, name)
    parts = {"train": _dataset(f"{full_name} train", train, 0, len(train))}
    if more := train.test_images:
        if isinstance(train, Shapes):
            longer = dataclasses.replace(train, count=train.count + more)
        else:
            longer = dataclasses.replace(train, instances=train.instances + more // train.categories)
        parts["test"] = _dataset(f"{full_name} test", longer, len(train), more)
    return Opened(parts, () if name == full_name else (f"{name} alone is {full_name}",), synthetic=True)


def _dataset(name: str, source: Fractals | Shapes, first: int, count: int) -> Dataset:
    if count < 1:
        raise UsageError(f"{name} has no images")
    kind = next(kind for kind, schema in _KINDS.items() if isinstance(source, schema))
    keys = _Keys(f"{kind}/{_settings(source)}", first, count)
    return Dataset(
        name, source.classes, keys, single_labels(source.labels[first : first + count]), SyntheticReader(source, first)
    )


def _settings(source: Fractals | Shapes) -> str:
    """All that an image follows from, besides its number: not the length of the set."""
    rows, cols = source.image_size
    settings = f"{source.categories}-{source.mode}" if isinstance(source, Fractals) else source.task
    return f"{settings}-{rows}x{cols}-{source.seed}"


@dataclasses.dataclass(frozen=True)
class _Keys(Sequence[str]):
    """Names that are made when asked for: a million of them need no memory."""

    stem: str
    first: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return f"{self.stem}/{self.first + index % self.length}"
