"""Small models are quicker on one thread; what several tests look at is exported once."""

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from export_models import LABELS, VIT, with_scores
from PIL import Image

from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.models.build import build
from vitlab.weights.bundle import Bundle, save_bundle


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve smooth pictures of different sizes, in two class folders."""
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(12):
        small = Image.fromarray(draw.integers(0, 256, (3, 4, 3), dtype=np.uint8))
        folder = root / LABELS[i % 2]
        folder.mkdir(exist_ok=True)
        small.resize((40 + 7 * i, 90 - 4 * i), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def bundle(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    card = "# A card\n\n| what | |\n|---|---|\n| licence | CC0 |\n"
    rule = Preprocess(image_size=(32, 24), resize="shorter-side", crop_frac=0.8)
    model = with_scores(build(VIT, seed=0))
    assert model.head is not None
    with torch.inference_mode():  # without what all photos have in common, which would give all of them one label
        x_BCYX = torch.stack([read(path, rule) for path in photos.rglob("*.png")])
        model.head.bias -= model(normalise(rule, x_BCYX)).mean(dim=0)
    save_bundle(folder, Bundle(model, rule, LABELS, card, {"format": "test"}, temperature=1.5))
    return folder
