"""ImageNet-ReaL: the validation images with every label that people found right (Beyer et al. 2020).

The rule: an answer counts as right if it is among an image's labels, and images without any label are not counted.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.reading import load_json
from vitlab.evaluation.metrics import wilson_interval

_IMAGES, _CLASSES = 50_000, 1_000  # of ImageNet's validation part, which the published file is about
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")


@dataclasses.dataclass(frozen=True)
class RealScore:
    top1: float
    n: int
    excluded: int
    interval: tuple[float, float]


def read_real(path: Path, keys: Sequence[str], classes: int) -> list[frozenset[int]]:
    """The labels of each image. The published file is a list by the number in the name of the validation image; a table of
    image names and lists is taken as well."""
    table = load_json(path)
    if isinstance(table, list):
        if len(table) == _IMAGES and classes != _CLASSES:
            raise UsageError(
                f"{path} has the numbers of ImageNet's 1,000 classes, and the model has {classes:,} classes"
            )
        rows = [_numbered(path, table, key) for key in keys]
    elif isinstance(table, dict):
        rows = [_named(path, table, key) for key in keys]
    else:
        raise FileProblem(f"{path} must hold a list or a table of labels")
    return [_labels(path, key, row, classes) for key, row in zip(keys, rows, strict=True)]


def score_real(answers_B: Tensor, labels: Sequence[frozenset[int]]) -> RealScore:
    """`answers_B` are classes of the model, of which ImageNet's are numbered as the file numbers them."""
    judged = [answer in row for answer, row in zip(answers_B.tolist(), labels, strict=True) if row]
    if not judged:
        raise UsageError("no image has a ReaL label, so there is nothing to count")
    right = sum(judged)
    return RealScore(right / len(judged), len(judged), len(labels) - len(judged), wilson_interval(right, len(judged)))


def _numbered(path: Path, table: list[Any], key: str) -> Any:
    found = _NUMBER.search(key)
    if found is None:
        raise UsageError(
            f"{path} is ordered by the number of ImageNet's validation images, and {key} has none in its name",
            hint="Give the validation images by their own names, ILSVRC2012_val_00000001.JPEG, or a table by name.",
        )
    number = int(found[1])
    if not 1 <= number <= len(table):
        raise UsageError(f"{path} has labels of {len(table):,} images, and {key} is number {number:,}")
    return table[number - 1]


def _named(path: Path, table: dict[str, Any], key: str) -> Any:
    for name in (key, Path(key).name):
        if name in table:
            return table[name]
    raise UsageError(f"{path} has no labels of {key}")


def _labels(path: Path, key: str, row: Any, classes: int) -> frozenset[int]:
    if not isinstance(row, list) or not all(isinstance(label, int) and 0 <= label < classes for label in row):
        raise FileProblem(f"{path}: the labels of {key} must be a list of numbers from 0 to {classes - 1}, not {row!r}")
    return frozenset(row)
