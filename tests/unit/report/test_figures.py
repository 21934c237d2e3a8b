"""Pictures are lossless where they should be, and the maps of positions are well-formed."""

import base64
import io
from xml.etree import ElementTree

import numpy as np
import torch
from PIL import Image

from vitlab.report import figures


def test_png_is_lossless() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(figures.png(picture)))), np.asarray(picture))


def test_map_of_a_patch_stands_at_its_place() -> None:
    similarity_YXYX = torch.full((2, 3, 2, 3), -1.0)
    similarity_YXYX[1, 2, 0, 1] = 1.0  # the last patch is like the one above and before it
    root = ElementTree.fromstring(figures.position_maps(similarity_YXYX))
    (data, _) = (node.get("href") or "" for node in root.iter() if node.tag.endswith("image"))
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data.split(",")[1]))))
    assert pixels.shape == (2 * 3 - 1, 3 * 4 - 1, 4)
    assert pixels[3 + 0, 8 + 1].tolist() == [0xFD, 0xE7, 0x25, 255]
    assert pixels[3 + 1, 8 + 1].tolist() == [0x44, 0x01, 0x54, 255]
    assert pixels[2, 0].tolist() == [0, 0, 0, 0], "between two maps nothing is drawn"
