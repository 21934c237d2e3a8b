"""Run as a program under torchrun: the first process waits for the second in a group of short and in one of long patience."""

import datetime
import sys
import time

import torch

from vitlab.core.dist import join

PAUSE_S = 3.0


def main() -> None:
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
            except RuntimeError:
                print("the short one ended")
        else:
            time.sleep(PAUSE_S)
        world.barrier()


if __name__ == "__main__":
    sys.exit(main())
