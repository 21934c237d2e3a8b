"""Batches of decoded, cropped images from worker processes, in seeded order.

A batch is a pure function of (data, rules, seed, step, rank, world): workers, prefetching and resuming never change it. A bad
image keeps its place with `valid` false. Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, Unreachable, VitlabError
from vitlab.core.launch import NoMainGuard, require_main_guard, spawns_processes
from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.crops import CropRule, crop_array
from vitlab.data.batches import Order, Places, rank_part
from vitlab.data.dataset import Dataset
from vitlab.data.decode import hush_process, read, why_unreadable
from vitlab.data.preprocess import Array, Preprocess, as_array

_PREFETCH = 3  # batches that each worker prepares ahead
_TOGETHER = 64  # synthetic images at once: more is no faster, and heartbeats would become rare
_PATIENCE_S = 20.0  # without one image from any worker; torch gives a hanging one 5 more to exit: half a minute in all
_LOOK_S = 1.0  # between looks for a heartbeat


class Batch(NamedTuple):
    """One rank's share of a step."""

    images: Tensor  # uint8 [B, C, Y, X]
    targets: Tensor  # int64 [B], or float [B, K] where images have several labels
    valid: Tensor  # bool [B]; false where an image was bad or a place is padding: no loss, no metric
    ids: Tensor  # int64 [B], of the image in the data set
    epochs: Tensor  # int64 [B]; with ids, copies and the seed, all that augmentation depends on
    copies: Tensor  # int64 [B]
    positions: Tensor  # int64 [B], in the whole batch of all ranks


@dataclasses.dataclass
class BadImages:
    """Images that could not be read, with the reason; more than `most` is an error."""

    most: int
    found: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def add(self, key: str, reason: str) -> None:
        self.found[key] = reason
        self.check()

    def share(self, world: World) -> None:
        """Merge the bad images of all processes. All must call it at the same time."""
        self.found = world.gather_dict(self.found)
        self.check()

    def check(self) -> None:
        if len(self.found) > self.most:
            first, why = next(iter(self.found.items()))
            raise VitlabError(
                f"{len(self.found)} images could not be read, the first is {first}: {why}",
                hint="`vitlab data check` lists them all; data.max_bad allows more.",
            )


def train_batches(
    inputs: "TrainInputs", steps: range, *, bad: BadImages, workers: int = 0, pin: bool = False
) -> Generator[Batch]:
    """The batches of these steps; to resume, begin the range at the next step."""
    yield from _run(inputs, steps, inputs.dataset, bad, workers, pin)


def eval_batches(
    dataset: Dataset,
    rule: Preprocess,
    *,
    batch_size: int,
    bad: BadImages,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    pin: bool = False,
) -> Generator[Batch]:
    """Every image once, in order, over all ranks; padding is marked as not valid.

    Every rank gets the same number of batches, so that a barrier can follow each.
    """
    rounds = -(-len(dataset) // (batch_size * world))
    firsts = range(rank * batch_size, rounds * batch_size * world, batch_size * world)
    spans = [range(first, first + batch_size) for first in firsts]
    yield from span_batches(dataset, rule, spans, bad=bad, workers=workers, pin=pin)


def span_batches(
    dataset: Dataset, rule: Preprocess, spans: Sequence[range], *, bad: BadImages, workers: int = 0, pin: bool = False
) -> Generator[Batch]:
    """A batch of each of these runs of images; places behind the last image are padding, marked as not valid."""
    yield from _run(_Eval(dataset, rule, spans), range(len(spans)), dataset, bad, workers, pin)


# --- what a worker does -----------------------------------------------------------------------------------------------

_Made = tuple[Batch, list[tuple[int, str]]]
Beat = Callable[[], None]  # a heartbeat
Job = Callable[[int, Beat], _Made]


@dataclasses.dataclass(frozen=True)
class TrainInputs:
    """What training batches follow from; called with a step, it makes that one."""

    dataset: Dataset
    rule: Preprocess
    crop: CropRule
    order: Order
    augmentation: AugmentRule | None = None  # done by the workers; None: left to the caller, on its device
    rank: int = 0
    world: int = 1

    def __call__(self, step: int, beat: Beat) -> _Made:
        places = rank_part(self.order.batch(step), self.rank, self.world)
        first = self.rank * len(places.ids)
        seed = self.order.seed
        images = _read_many(self.dataset, places.ids, beat)
        keys = list(zip(*(part.tolist() for part in places), strict=True))

        def picture(i: int) -> Array:
            sample, epoch, copy = keys[i]
            source = images[i] if images else self.dataset.read(sample)
            return crop_array(source, self.rule, self.crop, seed=seed, epoch=epoch, sample=sample, copy=copy)

        position_B = torch.arange(first, first + len(places.ids))
        made, errors = _batch(self.dataset, self.rule, places, position_B, picture, beat)
        if (rule := self.augmentation) is not None:
            ids, epochs, copies = places
            made.images.copy_(augment(made.images, ids, rule, seed=seed, epoch=epochs, copy=copies))
        return made, errors


@dataclasses.dataclass(frozen=True)
class _Eval:
    dataset: Dataset
    rule: Preprocess
    spans: Sequence[range]

    def __call__(self, number: int, beat: Beat) -> _Made:
        first = self.spans[number].start
        position_B = torch.arange(first, self.spans[number].stop)
        inside_B = position_B < len(self.dataset)
        ids_B = position_B.where(inside_B, torch.zeros_like(position_B))
        zeros_B = torch.zeros_like(ids_B)
        images = _read_many(self.dataset, ids_B, beat)

        def picture(i: int) -> Array | None:
            if first + i >= len(self.dataset):
                return None
            return as_array(read(images[i] if images else self.dataset.read(first + i), self.rule)[None])

        return _batch(self.dataset, self.rule, Places(ids_B, zeros_B, zeros_B), position_B, picture, beat)


def _read_many(dataset: Dataset, ids_B: Tensor, beat: Beat) -> list[Array]:
    """All images in one call, where the source supports that; else an empty list."""
    images: list[Array] = []
    for part in ids_B.split(_TOGETHER):
        images += dataset.read_many(part.tolist()) or []
        beat()
    return images


def _batch(
    dataset: Dataset,
    rule: Preprocess,
    places: Places,
    position_B: Tensor,
    picture: Callable[[int], Array | None],
    beat: Beat,
) -> _Made:
    size = len(places.ids)
    images_BYXC = _room(size, rule)
    room_BYXC = images_BYXC.numpy()
    valid = [False] * size
    errors: list[tuple[int, str]] = []
    for i in range(size):
        beat()
        try:
            pixels = picture(i)
        except Unreachable:  # a resumed run will read the image
            raise
        except (VitlabError, OSError) as error:
            errors.append((int(places.ids[i]), why_unreadable(error)))
            pixels = None
        room_BYXC[i], valid[i] = 0 if pixels is None else pixels, pixels is not None
    targets = dataset.labels.targets(places.ids, len(dataset.classes))
    # Channels last in memory: as decoders write, and fastest for the resize and the first convolution.
    images_BCYX = images_BYXC.permute(0, 3, 1, 2)
    return Batch(images_BCYX, targets, torch.tensor(valid), *places, position_B), errors


def _room(size: int, rule: Preprocess) -> Tensor:
    """uint8 [B, Y, X, C] for a batch; in a worker, in shared memory at once.

    By the function of torch's `default_collate`: with `share_memory_`, every byte would be written twice.
    """
    shape = (size, *rule.image_size, rule.channels)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # pyright: ignore[reportPrivateUsage]
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


# --- who does it ------------------------------------------------------------------------------------------------------


# A batch on its way between processes. A tensor travels as a piece of shared memory, for which the two must shake hands each
# time; what is one number per image is quicker as an array, in the message itself.
_Sent = tuple[list[Tensor | Array], list[tuple[int, str]]]


class _Steps(TorchDataset[_Sent]):
    """A torch data set whose items are batches: the workers stack, the order is ours."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.last_beat: Any = multiprocessing.RawValue("d", 0.0)  # of any worker, by a clock that all processes share

    def __getitem__(self, index: int) -> _Sent:
        batch, errors = self.job(index, self._beat)
        parts = [part if part.ndim > 1 else part.numpy() for part in batch]
        for part in parts:
            if isinstance(part, Tensor) and get_worker_info() is not None:
                part.share_memory_()  # torch would do it in a thread whose failure goes unreported
        return parts, errors

    def _beat(self) -> None:
        self.last_beat.value = time.monotonic()


def _run(job: Job, steps: range, dataset: Dataset, bad: BadImages, workers: int, pin: bool) -> Generator[Batch]:
    if not len(dataset):
        raise FileProblem(f"{dataset.name} holds no images")
    for parts, errors in _reached(_sent(_Steps(job), steps, workers, pin)):
        batch = Batch(*(part if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts))
        for index, reason in errors:
            bad.add(str(dataset.keys[index]), reason)
        yield Batch(*(part.pin_memory() for part in batch)) if pin else batch


def _reached(sent: Iterator[_Sent]) -> Generator[_Sent]:
    """Errors of a worker, without the stack trace that torch adds to their text."""
    try:
        yield from sent
    except Unreachable as error:
        what, _, hint = error.what.rpartition(f"{Unreachable.__name__}: ")[2].strip().partition("\n")
        raise Unreachable(what, hint=hint or error.hint) from error


def _sent(job: _Steps, steps: range, workers: int, pin: bool) -> Generator[_Sent]:
    if not workers or not steps:
        yield from map(job.__getitem__, steps)
        return
    require_main_guard()
    with warnings.catch_warnings():  # torch warns of more workers than cores, which the user has chosen
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            job,
            sampler=steps,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=min(workers, len(steps)),
            pin_memory=pin,
            prefetch_factor=_PREFETCH,
            timeout=_LOOK_S,
            worker_init_fn=hush_process,
        )
        batches = _started(loader)
    while (sent := _next(batches, job)) is not None:
        yield sent


def _started(loader: "DataLoader[_Sent]") -> Iterator[_Sent]:
    try:
        return iter(loader)
    except (BrokenPipeError, EOFError):
        if not spawns_processes():
            raise
        raise NoMainGuard from None  # a worker died before it received its job


def _as_it_is(sent: Any) -> Any:
    """Or torch would make tensors of the arrays."""
    return sent


def _next(batches: Iterator[_Sent], job: _Steps) -> _Sent | None:
    """The next batch, however long it takes, while any worker makes progress.

    Looks are counted, not seconds: a run that was suspended for an hour has not waited for one.
    """
    looks, beat = 0, job.last_beat.value
    while True:
        try:
            return next(batches, None)
        except (RuntimeError, EOFError, OSError) as error:
            if "DataLoader timed out" not in str(error):
                raise _explained(error, started=job.last_beat.value > 0) from error
            looks, beat = (looks + 1 if job.last_beat.value == beat else 0), job.last_beat.value
            if looks * _LOOK_S >= _PATIENCE_S:
                _kill(batches)
                raise VitlabError(
                    f"no image was loaded in {_PATIENCE_S:.0f} seconds: a process that loads images hangs",
                    hint="Check that the disk or the server with the data responds.",
                ) from error


def _kill(batches: Iterator[_Sent]) -> None:
    """Kill the workers: a hanging one would be waited for at the end of the program."""
    for process in getattr(batches, "_workers", ()):
        with contextlib.suppress(RuntimeError):  # torch's own report of the death while we wait for it
            process.kill()
            process.join()


def _explained(error: Exception, *, started: bool) -> Exception:
    """What torch says of a worker, and where, depends on the moment of its death.

    Memory is not short before the first image of any worker: one that died so early has failed to start.
    """
    text = str(error)
    if "shared memory" in text or "Bus error" in text:
        return VitlabError(
            "the shared memory (/dev/shm), through which images come from the processes that load them, is full",
            hint="Use fewer data.workers or smaller batches, or give it more room (docker run --shm-size=2g).",
        )
    if "can't allocate memory" in text:
        return VitlabError("there is not enough memory to load images", hint="Use fewer data.workers.")
    if "DataLoader worker (pid" in text or isinstance(error, EOFError | OSError):
        if not started and spawns_processes():
            return NoMainGuard()
        return VitlabError(
            "a process that loads images was killed, probably out of memory", hint="Use fewer data.workers."
        )
    return error
