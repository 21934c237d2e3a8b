"""Small models are quicker on one thread, above all on a busy machine."""

from collections.abc import Generator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
