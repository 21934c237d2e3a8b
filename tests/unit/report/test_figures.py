"""Pictures are lossless where they should be."""

import io

import numpy as np
from PIL import Image

from vitlab.report import figures


def test_png_is_lossless() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(figures.png(picture)))), np.asarray(picture))
