"""Makes timm and transformers importable beside a CPU build of torch, and the helpers of this folder by its tests."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# pytest's importlib mode leaves sys.path alone, so the tests here would not find `peers` and `parity`.
sys.path.insert(0, str(Path(__file__).parent))

_nms_schemas: torch.library.Library | None = None  # an operator lives as long as its library object


def _repair_torchvision() -> None:
    """Declares the operators that a torchvision without its compiled part misses.

    Both peers import torchvision. PyPI's build of it is linked against a CUDA torch: beside a CPU torch its operators
    do not load, and the import fails at the first one it looks up. No test calls them: their schemas are enough.
    """
    global _nms_schemas
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _nms_schemas = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _nms_schemas.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if importlib.util.find_spec("torchvision"):
    _repair_torchvision()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keeps the time steady: two threads that shared their cores with another process ran ten times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
