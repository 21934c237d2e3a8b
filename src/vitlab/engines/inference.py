"""The inference loop: batches of images in, the outputs of a model out.

The only one: `predict`, `embed`, `evaluate`, `compare`, the validation of a training run and `Classifier` go through `infer`.
Letters: B images of a batch, N images in all, C Y X channels and pixels, K outputs.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from vitlab.core.console import Console, seconds_left
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageInput, read
from vitlab.data.loader import BadImages, Batch, eval_batches, span_batches
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.processes import num_loaders
from vitlab.models.model import Model

_SHOWN_EVERY_S = 0.5  # nobody reads progress that is faster
BATCH = 64  # images; the last bits of a float depend on it, so that whoever repeats a measurement takes the same
_TOGETHER = 8  # images of one thread at once: more gain nothing, and what is computed of them leaves the cache

ModelFunction = Callable[[Tensor], Tensor]  # normalised images [B, C, Y, X] -> outputs [B, K]
Autocast = contextlib.AbstractContextManager[object]


@dataclasses.dataclass(frozen=True)
class InferenceOptions:
    """How images are fed to a model. Neither changes a number beyond the last bits of a float."""

    batch_size: int = BATCH
    workers: int | None = None  # None: one per core, where the images are many

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.workers is not None and self.workers < 0):
            raise UsageError("--batch-size must be at least 1, and --workers at least 0")


@torch.inference_mode()
def infer(
    function: ModelFunction,
    batches: Iterable[Batch],
    rule: Preprocess,
    device: torch.device,
    autocast: Autocast | None = None,
) -> Generator[tuple[Tensor, Batch]]:
    """Yield the float32 outputs of each batch, on `device`, with the batch.

    On a GPU they come one batch late: whoever copies them to the CPU waits, and meanwhile the next batch is computed.
    """

    def compute(images_BCYX: Tensor) -> Tensor:
        return function(normalise(rule, images_BCYX.to(device, non_blocking=True))).float()

    splits = device.type == "cpu" and autocast is None and _can_be_split(function)
    late = 0 if device.type == "cpu" else 1
    waiting: collections.deque[tuple[Tensor, Batch]] = collections.deque()
    for batch in batches:
        with autocast or contextlib.nullcontext():
            output_BK = split_over_threads(compute, batch.images) if splits else compute(batch.images)
        waiting.append((output_BK, batch))
        if len(waiting) > late:
            yield waiting.popleft()
    yield from waiting


def _can_be_split(function: ModelFunction) -> bool:
    """Whether parts of a batch may be computed side by side: by our own modules, not by runtimes with threads of their own."""
    module = getattr(function, "__self__", function)
    return isinstance(module, Model) and any(True for _ in module.parameters())


# --- a batch on a CPU, its images shared out among threads ------------------------------------------------------------

# torch would let all threads work on one operator, where they wait for each other at its end, hundreds of times in a batch, and
# longest when one of them is interrupted. Images need nothing of each other: each thread computes its own, from shared weights.


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


# --- batches ----------------------------------------------------------------------------------------------------------


def dataset_batches(
    dataset: Dataset, rule: Preprocess, options: InferenceOptions, world: World, bad: BadImages
) -> Generator[Batch]:
    """Yield this process's batches of every image once; the last one is filled up, so that processes can gather."""
    return eval_batches(
        dataset,
        rule,
        batch_size=min(options.batch_size, max(1, len(dataset))),
        bad=bad,
        rank=world.rank,
        world=world.size,
        workers=num_loaders(len(dataset), options.workers),
        pin=world.device.type == "cuda",
    )


def unpadded_batches(
    dataset: Dataset,
    rule: Preprocess,
    options: InferenceOptions,
    device: torch.device,
    bad: BadImages,
    runs: Sequence[range] | None = None,
) -> Generator[Batch]:
    """The batches of one process, none of them filled up: of every image, or of these runs of images.

    Each run begins a batch of its own, so that its numbers are the same whoever computes it.
    A bad image stays in as black, so that the images beside it are summed as they would be without it.
    """
    runs = [range(len(dataset))] if runs is None else runs
    size = options.batch_size
    spans = [run[first : first + size] for run in runs for first in range(0, len(run), size)]
    workers = num_loaders(sum(map(len, runs)), options.workers)
    yield from span_batches(dataset, rule, spans, bad=bad, workers=workers, pin=device.type == "cuda")


def loose_batches(images: Sequence[ImageInput], rule: Preprocess) -> Generator[Batch]:
    """Yield batches of images that are in no data set, and have no labels; a bad one is an error."""
    for start in range(0, len(images), BATCH):
        yield _loose_batch(torch.stack([read(image, rule) for image in images[start : start + BATCH]]), start)


def infer_pixels(
    function: ModelFunction, pixels_BCYX: Tensor, rule: Preprocess, device: torch.device, batch_size: int = BATCH
) -> Tensor:
    """The outputs of images that are decoded and resized, uint8, on the CPU."""
    batches = map(_loose_batch, pixels_BCYX.split(batch_size))
    return torch.cat([output_BK.cpu() for output_BK, _ in infer(function, batches, rule, device)])


def _loose_batch(pixels_BCYX: Tensor, start: int = 0) -> Batch:
    """Images without labels, numbered from `start`."""
    ids_B = torch.arange(start, start + len(pixels_BCYX))
    zeros_B = torch.zeros_like(ids_B)
    return Batch(pixels_BCYX, zeros_B, torch.ones_like(ids_B, dtype=torch.bool), ids_B, zeros_B, zeros_B, ids_B)


@contextlib.contextmanager
def inference_progress(
    console: Console, label: str, total: int, options: InferenceOptions
) -> Generator[Callable[[int], None]]:
    """Show a progress bar with the speed; the function it yields takes the number of images done."""
    started = shown = time.perf_counter()
    with console.progress(label, total) as advance:
        advance(0, f"{min(options.batch_size, total)} at a time")  # the first may take a minute

        def note(done: int) -> None:
            nonlocal shown
            done, now = min(done, total), time.perf_counter()
            if done < total and now - shown < _SHOWN_EVERY_S:
                return
            shown, speed = now, done / (now - started)
            advance(done, f"{speed:,.0f} img/s, {seconds_left(started, done, total)} left")

        yield note


# --- logits of a whole data set ---------------------------------------------------------------------------------------


@torch.inference_mode()
def run_model(
    model: ModelFunction,
    batches: Iterable[Batch],
    rule: Preprocess,
    world: World,
    autocast: Autocast | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [N, K], targets, ids) of every valid image, in the order of their ids, on the CPU of every process.

    A module is put into eval mode. `advance` is called with the number of images that are done.
    """
    if isinstance(model, nn.Module):
        model.eval()
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    done = 0
    for logits_BK, batch in infer(model, batches, rule, world.device, autocast):
        rows.append(_valid_rows(logits_BK, batch, world))
        done += int(batch.valid.sum()) * world.size
        if advance is not None:
            advance(done)
    if not rows or not sum(len(ids_B) for _, _, ids_B in rows):
        raise UsageError("there are no examples to evaluate on")
    logits_NK, targets, ids_N = (torch.cat(part) for part in zip(*rows, strict=True))
    order_N = ids_N.argsort()
    return logits_NK[order_N], targets[order_N], ids_N[order_N]


def _valid_rows(logits_BK: Tensor, batch: Batch, world: World) -> tuple[Tensor, Tensor, Tensor]:
    parts = (logits_BK, batch.targets.to(world.device), batch.ids.to(world.device), batch.valid.to(world.device))
    logits_BK, targets, ids_B, valid_B = (world.all_gather(part).cpu() for part in parts)
    return logits_BK[valid_B], targets[valid_B], ids_B[valid_B]


def predict_logits(
    model: ModelFunction,
    dataset: Dataset,
    rule: Preprocess,
    options: InferenceOptions,
    world: World,
    bad: BadImages,
    *,
    advance: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`run_model` over a data set: the same images and options give the same bits, whoever measures."""
    return run_model(model, dataset_batches(dataset, rule, options, world, bad), rule, world, advance=advance)
