"""`predict` or `embed` in chunks of 8 images by forked children of this process, which saves each of them importing torch.

What torchrun adds is tested by the command line, in test_batch_among_several.py and in test_launchers.py.
"""

import dataclasses
import json
import os
import signal
import sys
import warnings
from pathlib import Path

from forked_runs import ended, world_of

import vitlab
from vitlab.core import fsio
from vitlab.evaluation import row_store

CHUNK_ROWS = 8  # a test needs many chunks of few images


@dataclasses.dataclass(frozen=True)
class Done:
    codes: list[int]
    out: str
    err: str


def run_world(folder: Path, size: int, verb: str, out: str, kill: tuple[int, int] = (0, -1)) -> Done:
    """`kill` is a rank and a number of chunks.

    The process of that rank ends as by `kill -9` when it is about to finish one more chunk; -1: never. The others are then
    ended, as torchrun does it.
    """
    rank, writes = kill
    with warnings.catch_warnings():  # from 3.12 on: of a fork beside other threads, which a test worker has
        warnings.simplefilter("ignore", DeprecationWarning)
        children = world_of(size, lambda own: _work(folder, own, verb, out, writes if own == rank else -1))
    codes = {rank: ended(children[rank])} if writes >= 0 else {}
    for own, child in enumerate(children):
        if own not in codes:
            if writes >= 0:
                os.kill(child, signal.SIGKILL)
            codes[own] = ended(child)
    printed = ["".join((folder / f"{stream}-{own}").read_text() for own in range(size)) for stream in ("out", "err")]
    return Done([codes[own] for own in range(size)], *printed)


def _work(folder: Path, rank: int, verb: str, out: str, writes: int) -> int:
    os.chdir(folder)
    os.environ["VITLAB_CACHE"] = "cache"
    for stream, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{stream}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
    row_store.CHUNK_ROWS = CHUNK_ROWS
    finished = 0

    def count(operation: fsio.Operation, path: Path) -> None:
        nonlocal finished
        if operation == "rename" and path.suffix == ".npy":
            if finished == writes:
                os.kill(os.getpid(), signal.SIGKILL)
            finished += 1

    options = {"device": "cpu", "threads": 1, "workers": 0, "batch_size": 4, "quiet": True, "cache": "cache"}
    with fsio.intercept(count):
        done = getattr(vitlab, verb)("model", "shards", out=out, **options)
    if rank == 0:
        print(json.dumps({"computed": done.computed, "bad": dict(done.bad)}))
    sys.stdout.flush()
    return 0
