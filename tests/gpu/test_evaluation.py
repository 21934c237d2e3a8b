"""Evaluation on a GPU gives the numbers of the CPU. Skipped without one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_are_those_of_the_cpu(tmp_path: Path, workers: int) -> None:
    noise = np.random.default_rng(0)
    for part in ("val", "test"):
        for name in ("a", "b", "c"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for i in range(30):
                picture = Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8))
                picture.save(tmp_path / "data" / part / name / f"{i}.png")
    model = create_model("ViT-w32d2m64h2/8", num_classes=3, image_size=32, seed=0).eval()
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.copy_(torch.randn(3, 32, generator=torch.Generator().manual_seed(0)))
    save_bundle(tmp_path / "model", Bundle(model, Preprocess(image_size=(32, 32)), ("a", "b", "c"), "card", {}))
    given = {"batch_size": 16, "workers": workers, "resamples": 10, "quiet": True}
    cpu, gpu = (
        vitlab.evaluate(tmp_path / "model", tmp_path / "data", device=name, **given) for name in ("cpu", "cuda")
    )
    assert (gpu.n, gpu.top1, gpu.macro) == (90, cpu.top1, cpu.macro)
    assert gpu.loss == pytest.approx(cpu.loss, abs=1e-4)
    assert gpu.calibration is not None and cpu.calibration is not None
    assert gpu.calibration["temperature"] == pytest.approx(cpu.calibration["temperature"], rel=1e-2)
