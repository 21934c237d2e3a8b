"""Measures of a representation on a GPU: the answers of the CPU. Skipped without one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlab.core.console import Console
from vitlab.data.dataset import Opened, from_arrays
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.features import FeatureRule, features_of
from vitlab.evaluation.few_shot import fit_ridge
from vitlab.evaluation.knn import knn_votes
from vitlab.evaluation.linear_probe import fit, pose
from vitlab.models.build import create_model
from vitlab.runs.evaluation.features import RepresentationRule, measure
from vitlab.weights.bundle import Bundle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
RULE = Preprocess(image_size=(32, 32))


@pytest.fixture(autouse=True, params=[False, True], ids=["free", "deterministic"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


def clouds(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(9))
    return centres[labels] + 2.0 * torch.randn(count, 64, generator=draw), labels


def test_fits_are_those_of_the_cpu() -> None:
    x, y = clouds(500, 0)
    here, there = fit_ridge(x, y, 10), fit_ridge(x.cuda(), y.cuda(), 10)
    torch.testing.assert_close(there.weight_EK.cpu(), here.weight_EK, rtol=0, atol=1e-9)
    on_cpu, on_gpu = (fit(pose(x.split(128), y, 10, torch.device(name)), 1e-2) for name in ("cpu", "cuda"))
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0, atol=1e-6)


def test_votes_are_those_of_the_cpu() -> None:
    (x, y), (query, truth) = clouds(3000, 1), clouds(700, 2)
    here, there = (
        knn_votes(x.split(1024), y, query.split(300), truth, 10, ks=(1, 20, 200), device=torch.device(name))
        for name in ("cpu", "cuda")
    )
    for k in (1, 20, 200):
        assert abs(here.plain[k] - there.plain[k]) <= 1  # of 700: two neighbours as near as rounding
        assert abs(here.weighted[k] - there.weighted[k]) <= 1


def test_features_and_measures_are_those_of_the_cpu(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (600, 3, 32, 32), dtype=np.uint8), np.arange(600) % 5
    images[:, 0] = np.minimum(255, images[:, 0] // 2 + 25 * labels[:, None, None])  # a class is a shade of red
    whole = from_arrays(images, torch.from_numpy(labels), tuple("abcde"))
    opened = Opened({"train": whole.subset(torch.arange(400)), "test": whole.subset(torch.arange(400, 600))})
    rule = RepresentationRule(shots=(1, 5), knn=20, probe=True)
    vectors, found = {}, {}
    for device in ("cpu", "cuda"):
        model = create_model("ViT-Ti/8", num_classes=0, image_size=32, seed=0)
        clf = Classifier(Bundle(model, RULE, (), "card", {}), device)
        kept = features_of(
            clf, whole, FeatureRule(), cache=tmp_path, console=Console(quiet=True), options=InferenceOptions(workers=0)
        )
        vectors[device] = torch.cat(list(kept.chunks))
        found[device] = measure(
            clf, opened, rule, console=Console(quiet=True), options=InferenceOptions(workers=0), cache=tmp_path
        )
    # TF32 would leave 1e-3.
    torch.testing.assert_close(vectors["cuda"], vectors["cpu"], rtol=0, atol=2e-5 * float(vectors["cpu"].abs().max()))
    for shots in ("1", "5"):
        assert abs(found["cpu"]["few_shot"][shots] - found["cuda"]["few_shot"][shots]) <= 0.005
    for name in ("knn", "probe"):
        assert abs(found["cpu"][name]["top1"] - found["cuda"][name]["top1"]) <= 0.005
