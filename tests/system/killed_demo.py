"""Short demos in forked children, each killed before another one of its disk operations.

The first child finishes and tells how many operations a demo has; `how_many` of those, evenly spread (0: all), are then
each the last moment of one child, working in `at-K`. `random_kills` more die at a random time, in `random-I`.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kill_points import killed_at, spread

from vitlab.pipelines.digits_demo import demo

FRACTALS = "pretrain.data.source=fractals:categories=4,instances=8,image_size=16"
BODIES = [f"{part}.model.name=ViT-w16d2m32h2/2" for part in ("pretrain", "transfer")]
TINY = ["pretrain.train.steps=2", FRACTALS, *BODIES, "transfer.train.steps=2"]


def work(place: Path, point: str | None) -> list[str]:
    """Runs a short demo, or as much of it as comes before the operation `point`. Returns the names of all operations."""
    with killed_at(place, point) as seen:
        demo(place, overrides=TINY, device="cpu", threads=1, quiet=True)
    return seen


def in_child(task: Callable[[], None], kill_after: float | None = None) -> int:
    child = os.fork()
    if child == 0:
        task()
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(root: Path, how_many: int, random_kills: int) -> dict[str, Any]:
    note = root / "operations"
    started = time.perf_counter()
    whole = in_child(lambda: note.write_text(json.dumps(work(root / "whole", None))) and None)
    seconds = time.perf_counter() - started
    points = json.loads(note.read_text())
    ends: dict[str, int] = {}
    for k, point in enumerate(spread(points, how_many)):
        ends[f"at-{k}"] = in_child(lambda k=k, point=point: work(root / f"at-{k}", point) and None)
    for i in range(random_kills):
        place = root / f"random-{i}"
        ends[place.name] = in_child(lambda place=place: work(place, None) and None, random.uniform(0, 0.95 * seconds))
    return {"whole": whole, "total": len(points), "ends": ends}
