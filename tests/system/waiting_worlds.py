"""The first process of two waits for the second in a group of short and in one of long patience."""

import datetime
import time

import torch
from forked_runs import ended, world_of

from vitlab.core.dist import join

PAUSE_S = 3.0


def member() -> int:
    """1 where the short one did not end."""
    code = 0
    with join(torch.device("cpu")) as world:
        short, long = (world.new_process_group(datetime.timedelta(seconds=s)) for s in (PAUSE_S / 3, 1e6))
        world.barrier()
        if not world.is_main:
            time.sleep(PAUSE_S)
        assert long.gather_dict({str(world.rank): "here"}) == {"0": "here", "1": "here"}
        world.barrier()
        if world.is_main:
            try:
                short.gather_dict({})
                code = 1
            except RuntimeError:
                pass
        else:
            time.sleep(PAUSE_S)
        world.barrier()
    return code


def main() -> list[int]:
    return [ended(child) for child in world_of(2, lambda _: member())]
