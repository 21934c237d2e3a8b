"""Work of a test in a forked child of its process: whatever it starts, kills and changes, without importing torch once more."""

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FAILED = 99


def start_child(task: Callable[[], int], place: Path, printed: int | None = None) -> int:
    """The id of a child that does `task` in the folder `place` and exits with its code; what it says goes to a file."""
    with warnings.catch_warnings():  # from 3.12 on: of a fork beside other threads, which a test worker has
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    gc.freeze()  # what an earlier test left is not for the child to destroy: an ONNX session would wait for its lost threads
    code = FAILED
    try:
        output = os.open(os.devnull, os.O_WRONLY) if printed is None else printed
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Those of pytest write into its own files, and its rules make errors of what a program is only warned of.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        warnings.resetwarnings()
        torch.set_num_threads(1)  # a pool of threads does not survive the fork
        os.chdir(place)
        code = task()
    except BaseException:
        traceback.print_exc()
    os._exit(code if isinstance(code, int) else FAILED)


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(task: Callable[[], Any], place: Path) -> Any:
    """What `task` returns in a child, as JSON keeps it. It has to come to a good end."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as printed:

        def work() -> int:
            answer.write(json.dumps(task()))
            answer.flush()
            return 0

        child = start_child(work, place, printed.fileno())
        try:
            code = end_of(child)
        except BaseException:  # the test is interrupted: no child stays
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            raise
        printed.seek(0)
        assert code == 0, printed.read()
        answer.seek(0)
        return json.load(answer)
