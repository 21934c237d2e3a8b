"""The same models on a GPU: same answers as the CPU, compiled or not, and the demo's determinism. Skipped without one."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.inspection.attention import attention_statistics
from vitlab.inspection.faithfulness import curves, random_order, randomised_weights, verdict
from vitlab.inspection.saliency import METHODS, Target, saliency
from vitlab.models.build import create_model
from vitlab.models.vit import ViT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NAMES = ["ViT-Ti/16", "R26+ViT-S/32", "BiT-R26x1", "Axial-ViT-B/32", "EfficientNet-B0"]


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """TF32 would round products to 10 bits, which is speed, not parity. These are the switches that the compiler reads too."""
    rules: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch would have it set otherwise
        before = [rule.allow_tf32 for rule in rules]
        for rule in rules:
            rule.allow_tf32 = False
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rule, allowed in zip(rules, before, strict=True):
            rule.allow_tf32 = allowed


def shaken(name: str) -> torch.nn.Module:
    model = create_model(name, num_classes=10, image_size=(64, 96), seed=0).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_gpu_and_cpu_agree(name: str) -> None:
    model, x = shaken(name), torch.randn(4, 3, 64, 96)
    with torch.inference_mode():
        expected = model(x)
        found = model.cuda()(x.cuda()).cpu()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.filterwarnings("default")  # the compiler warns about its own past
@pytest.mark.parametrize("name", NAMES)
def test_compiled_equals_eager(name: str) -> None:
    model, x = shaken(name).cuda(), torch.randn(4, 3, 64, 96, device="cuda")
    with torch.inference_mode():
        expected = model(x)
        found = torch.compile(model, fullgraph=True)(x)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_bfloat16_stays_close() -> None:
    model, x = shaken("ViT-Ti/16").cuda(), torch.randn(16, 3, 64, 96, device="cuda")
    with torch.inference_mode():
        expected = model(x)
        found = model.bfloat16()(x.bfloat16()).float()
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999


def test_attention_weights_on_the_gpu() -> None:
    model, x = shaken("ViT-Ti/16"), torch.randn(2, 3, 64, 96)
    assert isinstance(model, ViT)
    expected = model.attention(x, layers=[0, -1])
    found = model.cuda().attention(x.cuda(), layers=[0, -1])
    for layer, weights in expected.layers.items():
        torch.testing.assert_close(found.layers[layer].cpu(), weights, rtol=1e-3, atol=1e-5)


def test_attention_statistics_and_saliency_on_the_gpu() -> None:
    model, x = create_model("ViT-Ti/16", num_classes=10, image_size=(64, 96), seed=0).eval(), torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    target = Target.classes([1, 4, 7])
    heats = {method: saliency(model, x, method, target, steps=4) for method in METHODS}
    expected = attention_statistics(model, x.split(2))
    scores = curves(model, x, heats["rollout"], target)
    model.cuda()
    found = attention_statistics(model, x.split(2))  # batches may come from the host
    torch.testing.assert_close(found.distance_LH, expected.distance_LH, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.entropy_LH, expected.entropy_LH, rtol=1e-3, atol=1e-3)
    for method, heat in heats.items():
        on_gpu = saliency(model, x.cuda(), method, target, steps=4)
        assert on_gpu.is_cuda
        torch.testing.assert_close(on_gpu.cpu(), heat, rtol=1e-2, atol=1e-3 * heat.max().item())
        assert randomised_weights(model, x.cuda(), on_gpu, method, target).shape == (3,)
    again = curves(model, x.cuda(), heats["rollout"], target, half=True)
    torch.testing.assert_close(again.deletion_BF.cpu(), scores.deletion_BF, rtol=0, atol=0.02)
    chance = random_order(model, x.cuda(), target)
    assert verdict(again, chance).beats_random is None  # of three images


def test_demo_on_the_gpu_repeats_bit_for_bit(tmp_path: Path) -> None:
    import vitlab

    short = ["pretrain.train.steps=40", "transfer.train.steps=40"]
    runs = [vitlab.demo(tmp_path / name, overrides=short, device="cuda", quiet=True) for name in ("a", "b")]
    first, second = ((run.bundle / "model.safetensors").read_bytes() for run in runs)
    assert first == second
