"""A handful of examples on every run, the same each time; with VITLAB_SOAK=1 a hundred times as many, freshly drawn."""

import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, settings

SOAK = os.environ.get("VITLAB_SOAK") == "1"
EXAMPLES = 40

settings.register_profile(
    "vitlab",
    max_examples=EXAMPLES * (100 if SOAK else 1),
    derandomize=not SOAK,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("vitlab")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
