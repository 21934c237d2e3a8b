"""scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels (UCI, 1998)."""

import torch

from vitlab.core.errors import MissingExtra
from vitlab.data.dataset import Dataset, from_arrays

_FULL_SCALE = 16  # the archive counts ink in 4x4 blocks, 0 to 16


def load_digits() -> Dataset:
    """All 1,797 images, scaled to 0-255."""
    try:
        from sklearn import datasets
    except ImportError:
        raise MissingExtra("scikit-learn", "demo", "the handwritten digits") from None
    pixels, targets = datasets.load_digits(return_X_y=True)
    ink = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)
    images = (ink * (255 / _FULL_SCALE)).round().to(torch.uint8)
    return from_arrays(images, torch.from_numpy(targets), tuple("0123456789"), "digits")
