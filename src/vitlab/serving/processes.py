"""How the processes of a server are started."""

import multiprocessing
from typing import Any


def process_context() -> Any:
    """Processes forked from a clean one that has imported torch: they start at once, and share its memory.

    Where nothing can be forked, each imports torch itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitlab.serving.preloaded"])
    return context
