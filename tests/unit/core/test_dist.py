"""One process alone is a world of one; what several do is tested with real ones in tests/system."""

import pytest
import torch

from vitlab.core.dist import World, join

CPU = torch.device("cpu")


def test_alone_every_number_is_its_own_total() -> None:
    alone = World(0, 1, CPU)
    assert (alone.leads, alone.total(2.5), alone.largest(7)) == (True, 2.5, 7)
    assert torch.equal(alone.gathered(torch.arange(3)), torch.arange(3))
    alone.meet()
    assert not World(1, 2, CPU).leads


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join(CPU) as world:
        assert world == World(0, 1, CPU)
        assert not torch.distributed.is_initialized()
