"""Where a verb works: set up as asked, alone where it must be, and left as it was found."""

import pytest
import torch

from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.session import open_session, require_single_process


def marks() -> tuple[int, bool, bytes]:
    noise = torch.get_rng_state().numpy().tobytes()
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), noise


def test_process_is_set_up_as_asked_and_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = marks()
    with open_session("cpu", seed=5, threads=before[0] + 1) as (runtime, world, console):
        assert (runtime.seed, runtime.threads, torch.initial_seed()) == (5, before[0] + 1, 5)
        assert marks()[:2] == (before[0] + 1, True) and (world.rank, world.size) == (0, 1)
        console.say("at work")
    with open_session("cpu", quiet=True) as session:
        session.console.say("not heard")
    assert marks() == before
    assert capsys.readouterr().err == "at work\n"


def test_process_is_left_as_it_was_by_work_that_fails() -> None:
    before = marks()
    with pytest.raises(UsageError, match="on purpose"), open_session("cpu", threads=torch.get_num_threads() + 1):
        assert marks() != before
        raise UsageError("on purpose")
    assert marks() == before


def test_work_of_one_process_is_refused_among_several() -> None:
    require_single_process(World(0, 1, torch.device("cpu")), "names are given")
    with pytest.raises(UsageError, match=r"names.*one process.*2"):
        require_single_process(World(1, 2, torch.device("cpu")), "names are given")
