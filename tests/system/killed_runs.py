"""Small training runs, each killed before another one of its disk operations or at a random moment.

A whole run tells which operations there are, in each of its processes. `how_many` of those, evenly spread over all processes
(0: all), are then each the last of one process of a new run; the others are ended, as torchrun does it, and the run goes on
where it was, or begins anew where nothing of it is left. The variant `random` is killed at random moments instead. Returns
how each ended and what it left. All are forked from the process that asks, which saves importing torch.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from forked_runs import MASKED, RANDOM, Crash, ended, forked, left, train, world_of
from kill_points import killed_at, spread

from vitlab.core import fsio
from vitlab.training import checkpoint

# The number of processes, and whether a checkpoint is written beside training or waited for.
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone-beside": (1, ("train.save_async=true",)),
    "alone-waiting": (1, ("train.save_async=false",)),
    "two-beside": (2, ("train.save_async=true",)),
    "two-waiting": (2, ("train.save_async=false",)),
    "two-sharded": (2, ("train.sharded=true",)),
    "two-sharded-waiting": (2, ("train.sharded=true", "train.save_async=false")),
    "masked": (2, MASKED),
    "resumed": (1, ()),
}


def start(folder: Path, size: int, overrides: tuple[str, ...], rank: int, point: str | None, resume: bool) -> list[int]:
    """The processes of a run, of which `rank` dies at `point`."""

    def task(own: int) -> int:
        with killed_at(folder.parent, point if own == rank else None) as seen:
            code = train(folder, *overrides, resume=resume)
        (folder.parent / f"operations-{own}.json").write_text(json.dumps(seen))
        return code

    return [forked(lambda: task(0))] if size == 1 else world_of(size, task)


def go_on(folder: Path, size: int, overrides: tuple[str, ...]) -> list[int]:
    """Resumed, or started where the kill came before there was a run."""
    resume = folder.exists()
    return [ended(child) for child in start(folder, size, overrides, -1, None, resume)]


def begun(folder: Path, overrides: tuple[str, ...]) -> None:
    """A run that crashed after its fifth step, and whose newest checkpoint was damaged afterwards."""
    seen = 0

    def listener(_operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and seen == 6:
            raise Crash

    try:
        with fsio.intercept(listener):
            train(folder, *overrides)
    except Crash:
        file = checkpoint.list_checkpoints(folder / "checkpoints")[-1] / checkpoint.MODEL
        file.write_bytes(file.read_bytes()[:-1])
        return
    raise AssertionError("the run was not stopped")


def operations(root: Path, variant: str, how_many: int) -> dict[str, Any]:
    size, overrides = VARIANTS[variant]
    resume = variant == "resumed"

    def place(name: str) -> Path:
        folder = root / name / "run"
        folder.parent.mkdir()
        if resume:
            shutil.copytree(root / "begun", folder)
        return folder

    if resume:
        begun(root / "begun", overrides)
    whole = place("whole")
    codes = [ended(child) for child in start(whole, size, overrides, -1, None, resume)]
    points = {rank: json.loads((whole.parent / f"operations-{rank}.json").read_text()) for rank in range(size)}
    chosen = spread([(rank, point) for rank, names in points.items() for point in names], how_many)
    found: dict[str, Any] = {}
    for number, (rank, point) in enumerate(chosen):
        folder = place(str(number))
        children = start(folder, size, overrides, rank, point, resume)
        died = ended(children[rank])
        for other in children[:rank] + children[rank + 1 :]:
            os.kill(other, signal.SIGKILL)
            ended(other)
        again = go_on(folder, size, overrides)
        found[f"{rank}: {point}"] = {"died": died, "again": again, "left": left(folder)}
        shutil.rmtree(folder.parent)
    return {"whole": codes, "total": sum(map(len, points.values())), "left": left(whole), "kills": found}


def moments(root: Path, _variant: str, how_many: int) -> dict[str, Any]:
    """SIGKILL from outside, at times that nothing in the run has to do with."""
    overrides = (*RANDOM, "train.steps=12", "train.save_every=10%")
    whole = root / "whole" / "run"
    whole.parent.mkdir()
    started = time.perf_counter()
    codes = [ended(child) for child in start(whole, 1, overrides, -1, None, False)]
    seconds = time.perf_counter() - started
    draw = random.Random(0)
    found: dict[str, Any] = {}
    while sum(end["died"] == -9 for end in found.values()) < how_many:  # one may be faster than its killer
        number = len(found)
        folder = root / str(number) / "run"
        folder.parent.mkdir()
        (child,) = start(folder, 1, overrides, -1, None, False)
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        died = ended(child)
        steps = [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
        again = go_on(folder, 1, overrides)
        found[str(number)] = {"died": died, "had": steps, "again": again, "left": left(folder)}
        shutil.rmtree(folder.parent)
    return {"whole": codes, "total": how_many, "left": left(whole), "kills": found}


def do_work(place: Path, variant: str, how_many: int) -> dict[str, Any]:
    train(place / "first")  # what torch prepares at its first use, the children inherit
    (place / variant).mkdir()
    return (moments if variant == "random" else operations)(place / variant, variant, how_many)
