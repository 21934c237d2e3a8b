"""The evaluation loop around somebody else's model and runtime: two tiny CIFAR-10 ViTs, run by onnxruntime."""

import io
import itertools
import os
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor

from vitlab.core.dist import World
from vitlab.data.loader import BadImages, eval_batches
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.packed import open_packed
from vitlab.engines.inference import run_model
from vitlab.evaluation.classify import score

DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[4] / "shared" / "data")
TEST = DATA / "cifar10" / "cifar10_test.npz"
SOAK = os.environ.get("VITLAB_SOAK") == "1"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # as their makers trained them
CLAIMED = {"vit_pgd_2_3_16.onnx": 0.5978, "vit_ibp_3_3_8.onnx": 0.6221}  # by their makers, of the same 10,000 images

pytestmark = pytest.mark.skipif(
    not (DATA / "tiny_cifar_vit").is_dir(), reason="needs tiny_cifar_vit and cifar10 in VITLAB_DATA"
)


@pytest.fixture(scope="module")
def images() -> tuple[np.ndarray, np.ndarray]:
    """Pixels as floats [N, 3, 32, 32] and labels, without any part of vitlab."""
    with np.load(TEST) as archive:
        data, offsets, labels = archive["data"].tobytes(), archive["offsets"], archive["labels"]
    pixels = [np.asarray(Image.open(io.BytesIO(data[a:b])).convert("RGB")) for a, b in itertools.pairwise(offsets)]
    x = np.stack(pixels).astype(np.float32) / 255
    return ((x - np.float32(MEAN)) / np.float32(STD)).transpose(0, 3, 1, 2).copy(), labels


@pytest.mark.parametrize("name", list(CLAIMED)[: 2 if SOAK else 1])
@pytest.mark.slow
def test_loop_around_a_foreign_function_counts_as_a_bare_loop_does(
    name: str, images: tuple[np.ndarray, np.ndarray]
) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = str(DATA / "tiny_cifar_vit" / name)
    peer = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    key = peer.get_inputs()[0].name

    def function(x_BCYX: Tensor) -> Tensor:
        return torch.from_numpy(peer.run(None, {key: x_BCYX.numpy()})[0])

    rule = Preprocess(image_size=(32, 32), mean=MEAN, std=STD)
    part = open_packed({"test": TEST}).part("test")
    batches = eval_batches(part, rule, batch_size=192, bad=BadImages(0))  # leaves a last batch of 16
    found = score(*run_model(function, batches, rule, World(0, 1, torch.device("cpu"))))

    x, labels = images
    right = sum(
        int((peer.run(None, {key: x[i : i + 100]})[0].argmax(1) == labels[i : i + 100]).sum())
        for i in range(0, 10_000, 100)
    )
    assert found.n == len(labels) == 10_000
    assert round(found.top1 * 10_000) == right
    assert found.top1 == CLAIMED[name]
