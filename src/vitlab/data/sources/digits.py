"""scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels (UCI, 1998)."""

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlab.core.errors import MissingExtra
from vitlab.core.reading import open_regular
from vitlab.data.dataset import Dataset, from_arrays

_FULL_SCALE = 16  # the archive counts ink in 4x4 blocks, 0 to 16
_FILE = "datasets/data/digits.csv.gz"


def load_digits() -> Dataset:
    """All 1,797 images, scaled to 0-255."""
    pixels, targets = _read()
    ink = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)
    images = (ink * (255 / _FULL_SCALE)).round().to(torch.uint8)
    return from_arrays(images, torch.from_numpy(targets), tuple("0123456789"), "digits")


def _read() -> tuple[Any, Any]:
    """As scikit-learn's own function does, without its import, which takes longer than all else a short run does."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise MissingExtra("scikit-learn", "demo", "the handwritten digits")
    file = Path(found.origin).parent / _FILE
    if file.is_file():
        with open_regular(file) as packed, gzip.open(packed, "rt", encoding="ascii") as text:
            table = np.loadtxt(text, delimiter=",")
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn import datasets  # a version that keeps the file elsewhere

    digits: Any = datasets.load_digits()
    return digits.data, digits.target
