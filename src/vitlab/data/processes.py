"""Worker processes for many files, none of which outlives its parent."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Generator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from vitlab.core.environment import usable_cores
from vitlab.core.launch import NoMainGuard, require_main_guard
from vitlab.data.rules import require_workers

_FEW_IMAGES = 128  # a process starts in about the time in which it decodes so many
MOST = 8  # each takes some 30 MB, and the disk is the limit before that
_GRACE_S = 1.0  # to end the message at hand, once nobody wants results

_state: list[Any] = []  # in a worker process, set once when it starts: what `process_pool` was given


def num_workers(wanted: int | None = None) -> int:
    """As many as asked for, else one per core, eight at most."""
    require_workers(wanted or 0)
    return wanted or min(MOST, usable_cores())


def num_loaders(images: int, wanted: int | None) -> int:
    """Processes to load so many images; none where starting them takes longer."""
    require_workers(wanted or 0)
    return wanted if wanted is not None else num_workers() if images > _FEW_IMAGES else 0


@contextlib.contextmanager
def process_pool(workers: int, state: Any) -> Generator[concurrent.futures.ProcessPoolExecutor]:
    """Processes whose tasks find `state` in `worker_state()`: it is sent once, not with every task.

    Left by an error or a signal, it ends its workers in the middle of their tasks.
    """
    require_main_guard()
    # Forked where that is possible, as torch's own loader does: nothing is imported again, and memory is shared.
    usual = "fork" if os.name == "posix" and "fork" in multiprocessing.get_all_start_methods() else "spawn"
    how = multiprocessing.get_start_method(allow_none=True) or usual  # what the script itself has set comes first
    context = multiprocessing.get_context(how)
    cancelled = context.RawValue("b", 0)
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, context, initializer=_start_worker, initargs=(state, cancelled)
    )
    try:
        if how != "fork":
            _require_started(pool)
        yield pool
    except BaseException:
        cancelled.value = 1
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _require_started(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Raise if a worker cannot even run an empty task: later deaths have other reasons, and are the caller's to explain."""
    try:
        pool.submit(int).result()
    except (BrokenProcessPool, OSError, EOFError):  # of these, a pipe that breaks while the task is sent
        raise NoMainGuard from None


def worker_state() -> Any:
    return _state[0]


def _start_worker(state: Any, cancelled: Any) -> None:
    _state[:] = [state]
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait for them
    warnings.simplefilter("ignore")  # Pillow warns of what we report ourselves
    for number in (signal.SIGINT, signal.SIGTERM):  # what the parent does about them is not for its workers to do
        signal.signal(number, signal.SIG_DFL)
    if hasattr(os, "setpgid"):
        # Ctrl-C, `timeout` and schedulers signal a whole process group. A worker killed in the middle of a message would leave
        # its parent waiting for the rest; out of the group, it ends when the parent says so, or is gone.
        os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(cancelled,), daemon=True).start()


def _end_with_parent(cancelled: Any) -> None:
    """End a worker whose parent was killed or wants no more results: its task may take long, or hang on a slow disk."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive() and not cancelled.value:
        parent.join(0.2)
    if parent.is_alive():
        time.sleep(_GRACE_S)
    signal.raise_signal(signal.SIGTERM)
