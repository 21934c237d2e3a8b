"""Run as a program: short demos in forked children, each killed before another one of its disk operations.

    python killed_demo.py PLACE HOW_MANY RANDOM_KILLS

The first child finishes and tells how many operations a demo has; HOW_MANY of those, evenly spread (0: all), are then
each the last moment of one child, working in PLACE/at-K. RANDOM_KILLS more die at a random time, in PLACE/random-I.
Prints JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vitlab.core import fsio
from vitlab.runs.digits_demo import demo

FRACTALS = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
BODIES = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
TINY = ["pretrain.train.steps=2", FRACTALS, *BODIES, "transfer.train.steps=2"]


def work(place: Path, die_at: int | None) -> int:
    """Runs a short demo, or as much of it as comes before operation `die_at`. Returns the number of operations."""
    count = 0

    def listener(_operation: fsio.Operation, _path: Path) -> None:
        nonlocal count
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    with fsio.intercept(listener):
        demo(place, overrides=TINY, device="cpu", threads=1, quiet=True)
    return count


def in_child(task: Callable[[], None], kill_after: float | None = None) -> int:
    child = os.fork()
    if child == 0:
        task()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(root: Path, how_many: int, random_kills: int) -> None:
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    note = root / "count"
    started = time.perf_counter()
    whole = in_child(lambda: note.write_text(str(work(root / "whole", None))) and None)
    seconds = time.perf_counter() - started
    total = int(note.read_text())
    points = range(total) if how_many == 0 else [round(i * (total - 1) / (how_many - 1)) for i in range(how_many)]
    ends = {f"at-{k}": in_child(lambda k=k: work(root / f"at-{k}", k) and None) for k in points}
    for i in range(random_kills):
        place = root / f"random-{i}"
        ends[place.name] = in_child(lambda place=place: work(place, None) and None, random.uniform(0, 0.95 * seconds))
    print(json.dumps({"whole": whole, "total": total, "ends": ends}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
