"""One process alone is a world of one; what several do is tested with real ones in tests/system."""

import pytest
import torch

from vitlab.core.dist import World, join

CPU = torch.device("cpu")


def test_alone_every_number_is_its_own_total() -> None:
    alone = World(0, 1, CPU)
    assert (alone.is_main, alone.all_reduce_sum(2.5), alone.all_reduce_max(7)) == (True, 2.5, 7)
    assert torch.equal(alone.all_gather(torch.arange(3)), torch.arange(3))
    alone.barrier()
    assert not World(1, 2, CPU).is_main


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join(CPU) as world:
        assert world == World(0, 1, CPU)
        assert not torch.distributed.is_initialized()
