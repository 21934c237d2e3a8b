"""A program whose workers are always in the middle of something; ends with 3 when it gets SIGTERM."""

import signal
import sys
import time
from types import FrameType

from vitlab.data.processes import process_pool


def stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(3)


def large(_: int) -> bytes:
    return bytes(2**24)  # far more than a pipe holds: sent in many parts


def long(_: int) -> bytes:
    time.sleep(60)
    return b""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    task = {"large": large, "long": long}[sys.argv[1]]
    with process_pool(2, None) as pool:
        pending = [pool.submit(task, i) for i in range(4)]
        print("begun", flush=True)
        while True:
            pending.append(pool.submit(task, 0))
            pending.pop(0).result()
