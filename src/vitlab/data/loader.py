"""From a data set to batches of pixels, decoded and cropped by worker processes, in an order that only the seed decides.

A batch is a pure function of (data, rules, seed, step, rank, world): workers, prefetching and resuming change who computes it
and when, never what it holds. A bad image keeps its place with `valid` false and is named; nothing takes its place.
Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitlab.core.errors import FileProblem, VitlabError
from vitlab.data.batches import Order, Places, rank_part
from vitlab.data.crops import CropRule, crop_and_resize
from vitlab.data.dataset import Dataset
from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess

_AHEAD = 3  # batches that each worker prepares before they are asked for


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
    """The images that could not be read, by name, with the reason. Over `most`, the work stops."""

    most: int
    found: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def add(self, key: str, reason: str) -> None:
        self.found[key] = reason
        if len(self.found) > self.most:
            first, why = next(iter(self.found.items()))
            raise VitlabError(
                f"{len(self.found)} images could not be read, the first is {first}: {why}",
                hint="`vitlab data check` lists them all; --max-bad allows more.",
            )


def train_batches(
    dataset: Dataset,
    rule: Preprocess,
    crop: CropRule,
    order: Order,
    *,
    first_step: int,
    last_step: int,
    bad: BadImages,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    pin: bool = False,
) -> Generator[Batch]:
    """The batches of steps `first_step` to `last_step` - 1. To resume, ask for the step after the last one seen."""
    job = _Train(dataset, rule, crop, order, rank, world)
    yield from _run(job, range(first_step, last_step), dataset, bad, workers, pin)


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
    """Every image once, in order, over all ranks; the last batch is filled up with places that are not valid.

    Every rank gets the same number of batches, so that they can meet after each.
    """
    job = _Eval(dataset, rule, batch_size, rank, world)
    rounds = -(-len(dataset) // (batch_size * world))
    yield from _run(job, range(rounds), dataset, bad, workers, pin)


# --- what a worker does -----------------------------------------------------------------------------------------------

_Made = tuple[Batch, list[tuple[int, str]]]


@dataclasses.dataclass(frozen=True)
class _Train:
    dataset: Dataset
    rule: Preprocess
    crop: CropRule
    order: Order
    rank: int
    world: int

    def __call__(self, step: int) -> _Made:
        places = rank_part(self.order.batch(step), self.rank, self.world)
        first = self.rank * len(places.ids)
        seed = self.order.seed
        drawn = self.dataset.read_many(places.ids.tolist())

        def picture(i: int) -> Tensor:
            sample, epoch, copy = (int(part[i]) for part in places)
            source = drawn[i] if drawn else self.dataset.read(sample)
            return crop_and_resize(source, self.rule, self.crop, seed=seed, epoch=epoch, sample=sample, copy=copy)

        return _batch(self.dataset, self.rule, places, torch.arange(first, first + len(places.ids)), picture)


@dataclasses.dataclass(frozen=True)
class _Eval:
    dataset: Dataset
    rule: Preprocess
    batch_size: int
    rank: int
    world: int

    def __call__(self, number: int) -> _Made:
        first = (number * self.world + self.rank) * self.batch_size
        position_B = torch.arange(first, first + self.batch_size)
        inside_B = position_B < len(self.dataset)
        ids_B = position_B.where(inside_B, torch.zeros_like(position_B))
        zeros_B = torch.zeros_like(ids_B)
        drawn = self.dataset.read_many(ids_B.tolist())

        def picture(i: int) -> Tensor | None:
            if not inside_B[i]:
                return None
            return read(drawn[i] if drawn else self.dataset.read(int(ids_B[i])), self.rule)

        return _batch(self.dataset, self.rule, Places(ids_B, zeros_B, zeros_B), position_B, picture)


def _batch(
    dataset: Dataset, rule: Preprocess, places: Places, position_B: Tensor, picture: Callable[[int], Tensor | None]
) -> _Made:
    size = len(places.ids)
    # Channels last in memory: how decoders write, and how the resize and the first convolution like it best.
    images = torch.zeros(size, rule.channels, *rule.image_size, dtype=torch.uint8).contiguous(
        memory_format=torch.channels_last
    )
    valid = torch.zeros(size, dtype=torch.bool)
    errors: list[tuple[int, str]] = []
    for i in range(size):
        try:
            pixels = picture(i)
        except (VitlabError, OSError) as error:
            errors.append((int(places.ids[i]), error.what if isinstance(error, VitlabError) else str(error)))
            continue
        if pixels is not None:
            images[i], valid[i] = pixels, True
    targets = dataset.labels.targets(places.ids, len(dataset.classes))
    return Batch(images, targets, valid, places.ids, places.epochs, places.copies, position_B), errors


# --- who does it ------------------------------------------------------------------------------------------------------


class _Steps(TorchDataset[_Made]):
    """A torch data set whose items are whole batches, so that the workers stack them and the order is ours."""

    def __init__(self, job: Callable[[int], _Made]) -> None:
        self.job = job

    def __getitem__(self, index: int) -> _Made:
        return self.job(index)


def _run(
    job: Callable[[int], _Made], steps: range, dataset: Dataset, bad: BadImages, workers: int, pin: bool
) -> Generator[Batch]:
    if not len(dataset):
        raise FileProblem(f"{dataset.name} holds no images")
    made = _made(job, steps, workers, pin)
    while True:
        try:
            found = next(made, None)
        except (
            RuntimeError
        ) as error:  # torch tells of a dead worker from a signal handler, wherever the program is then
            if "DataLoader worker" not in str(error):
                raise
            raise VitlabError(
                "a process that loads images was killed, most likely for want of memory", hint="Use fewer data.workers."
            ) from error
        if found is None:
            return
        batch, errors = found
        for index, reason in errors:
            bad.add(str(dataset.keys[index]), reason)
        yield batch


def _made(job: Callable[[int], _Made], steps: range, workers: int, pin: bool) -> Generator[_Made]:
    ahead = _AHEAD if workers else None
    with warnings.catch_warnings():  # torch finds more workers than cores unwise; who asks for them may know better
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            _Steps(job), sampler=steps, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=ahead
        )
        batches: Iterator[_Made] = iter(loader)
    yield from batches
