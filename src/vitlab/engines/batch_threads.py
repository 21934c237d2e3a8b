"""A batch on a CPU, its images shared out among threads.

torch would let all threads work on one operator, where they wait for each other at its end, hundreds of times in a batch, and
longest when one of them is interrupted. Images need nothing of each other: here each thread computes its own, from the same
weights. docs/results/serving-cpu.md has the times of both. Letters: B images of a batch, C Y X channels and pixels, K outputs.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_TOGETHER = 8  # images of one thread at once: more gain nothing, and what is computed of them leaves the cache


def split_over_threads(function: Callable[[Tensor], Tensor], images_BCYX: Tensor) -> Tensor:
    """The outputs [B, K] of `function`, in inference mode, by as many threads as torch has; raises what it raises in any.

    What is left when each thread has as many images as the others is computed by all threads together, one operator at a time.
    """
    threads = torch.get_num_threads()
    each = len(images_BCYX) // threads
    if threads == 1 or each == 0:
        return function(images_BCYX)
    shared, rest = images_BCYX.tensor_split([each * threads])
    outputs = list(_pool(threads).map(functools.partial(_alone, function), shared.split(min(each, _TOGETHER))))
    if len(rest):
        outputs.append(function(rest))
    return torch.cat(outputs)


@torch.inference_mode()  # which torch knows of each thread, as it does how many threads it may use
def _alone(function: Callable[[Tensor], Tensor], images_BCYX: Tensor) -> Tensor:
    return function(images_BCYX)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """So many threads, each with one of torch's."""
    pool = ThreadPoolExecutor(threads, "images", _take_one_thread)
    all_there = threading.Barrier(threads)
    list(pool.map(lambda _: all_there.wait(), range(threads)))
    torch.set_num_threads(threads)  # theirs would also be the number of all threads that are started from now on
    return pool


def _take_one_thread() -> None:
    torch.get_num_threads()  # a thread takes over the number of the process when it first needs one: not after the next line
    torch.set_num_threads(1)
