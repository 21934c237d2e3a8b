"""`vitlab plan` on a GPU: the memory formula against the allocator, and a micro-batch that turns out too large."""

import pytest
import torch

from vitlab.runs.training.planning import plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["ViT-S/16", "ViT-B/32", "R26+ViT-S/32", "BiT-R50x1"])
def test_memory_of_a_step_is_near_the_estimate(model: str, precision: str) -> None:
    found = plan(model=model, steps=1, batch_size=64, device="cuda", overrides=[f"train.precision={precision}"])
    assert (found.measured_batch, found.micro_batch) == (64, 64)
    print(model, precision, found.measured_memory_gb, found.estimated_memory_gb, found.measured_images_per_second)
    assert found.estimated_memory_gb == pytest.approx(found.measured_memory_gb, rel=0.2)


def test_micro_batch_that_does_not_fit_is_halved() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total)
    try:
        found = plan(model="ViT-S/16", steps=1, batch_size=512, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 <= found.micro_batch < 512
