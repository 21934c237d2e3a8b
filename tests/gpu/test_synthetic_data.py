"""Drawn data sets on a GPU: the bytes of the CPU, in deterministic mode too. Skipped without one."""

from collections.abc import Iterator

import pytest
import torch

from vitlab.data.synthetic.fractals import Mode, draw_fractals
from vitlab.data.synthetic.shapes import Task, draw_shapes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True, params=[False, True], ids=["free", "deterministic"])
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mode", ["grey", "colour"])
@pytest.mark.parametrize("size", [(64, 64), (224, 160)])
def test_gpu_draws_the_fractals_of_the_cpu(mode: Mode, size: tuple[int, int]) -> None:
    keys = torch.arange(96) % 32, torch.arange(96) // 32
    assert torch.equal(draw_fractals(0, *keys, size, mode, "cuda").cpu(), draw_fractals(0, *keys, size, mode))


@pytest.mark.parametrize("task", ["count", "orientation", "kind"])
def test_gpu_draws_the_shapes_of_the_cpu(task: Task) -> None:
    found, labels = draw_shapes(0, torch.arange(64), (64, 80), task, "cuda")
    expected, expected_labels = draw_shapes(0, torch.arange(64), (64, 80), task)
    assert torch.equal(found.cpu(), expected) and torch.equal(labels.cpu(), expected_labels)
