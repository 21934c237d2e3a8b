"""Run as a program, alone or under torchrun: `predict` or `embed` in chunks of 8 images.

Ends itself as `kill -9` would when process RANK is about to finish its chunk number WRITES + 1; -1 for WRITES: never.
"""

import json
import os
import signal
import sys
from pathlib import Path

import vitlab
from vitlab.core import fsio
from vitlab.evaluation import row_store

row_store.CHUNK_ROWS = 8  # a test needs many chunks of few images


def main(verb: str, model: str, data: str, out: str, rank: str, writes: str) -> None:
    finished = 0

    def count(operation: fsio.Operation, path: Path) -> None:
        nonlocal finished
        if operation != "rename" or path.suffix != ".npy" or os.environ.get("RANK", "0") != rank:
            return
        if finished == int(writes):
            os.kill(os.getpid(), signal.SIGKILL)
        finished += 1

    options = {"device": "cpu", "threads": 1, "workers": 0, "batch_size": 4, "quiet": True, "cache": "cache"}
    with fsio.intercept(count):
        done = getattr(vitlab, verb)(model, data, out=out, **options)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"computed": done.computed, "bad": dict(done.bad)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
