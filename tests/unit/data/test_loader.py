"""The same batches whoever computes them: any number of workers, any world size, any step to resume at."""

import dataclasses
import hashlib
import io
import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.errors import FileProblem, VitlabError, amount
from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset, from_arrays, several_labels, single_labels
from vitlab.data.loader import BadImages, Batch, TrainInputs, eval_batches, train_batches
from vitlab.data.preprocess import Preprocess

RULE = Preprocess(image_size=(8, 8))
SOAK = os.environ.get("VITLAB_SOAK") == "1"
WORLDS, WORKERS = (1, 2, 4), (0, 1, 2, 4)
# Several ranks that load by themselves, one rank with several workers, and several of both come first.
RANKS_AND_WORKERS = list(dict.fromkeys([(2, 0), (1, 2), (2, 1), *itertools.product(WORLDS, WORKERS)]))
SEED, BATCH, STEPS = 7, 8, 17  # steps: 3 world sizes x 4 numbers of workers x 17 = 204 combinations


class Encoded:
    """PNG bytes, some of them broken; a class at the top of the file, because workers may be spawned."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        self.files: list[bytes] = []
        noise = np.random.default_rng(0)
        for i in range(count):
            buffer = io.BytesIO()
            Image.fromarray(noise.integers(0, 256, (10 + i % 3, 12, 3), dtype=np.uint8)).save(buffer, "PNG")
            self.files.append(b"no image" if i in broken else buffer.getvalue())

    def __call__(self, i: int) -> bytes:
        return self.files[i]


def data(count: int = 21, broken: tuple[int, ...] = ()) -> Dataset:
    labels = single_labels([i % 3 for i in range(count)])
    return Dataset("test", ("a", "b", "c"), [f"{i}.png" for i in range(count)], labels, Encoded(count, broken))


def train(first: int = 0, last: int = STEPS, source: Dataset | None = None, most: int = 0, **kw: Any) -> list[Batch]:
    source = source or data()
    order = kw.pop("order", Order(len(source), BATCH, SEED))
    bad = kw.pop("bad", BadImages(most))
    shared = {key: kw.pop(key) for key in ("augmentation", "rank", "world") if key in kw}
    inputs = TrainInputs(source, RULE, CropRule(), order, **shared)
    return list(train_batches(inputs, range(first, last), bad=bad, **kw))


def digest(batches: list[Batch]) -> list[str]:
    """One hash per example over its augmented bytes, label and place: what must not move."""
    printed: list[str] = []
    for batch in batches:
        seen = augment(
            batch.images, batch.ids, AugmentRule(randaugment="augreg"), seed=SEED, epoch=batch.epochs, copy=batch.copies
        )
        for i in range(len(batch.ids)):
            reported = (
                f"{int(batch.ids[i])} {int(batch.epochs[i])} {int(batch.positions[i])} {batch.targets[i].tolist()}"
            )
            printed.append(hashlib.sha256(seen[i].contiguous().numpy().tobytes() + reported.encode()).hexdigest())
    return printed


@pytest.fixture(scope="module")
def whole() -> list[str]:
    return digest(train())


@pytest.mark.parametrize(("world", "workers"), slow_after(2, RANKS_AND_WORKERS))
def test_order_and_bytes_do_not_depend_on_workers_ranks_or_where_one_resumes(
    whole: list[str], world: int, workers: int
) -> None:
    # Starting processes takes time: by default one process without workers resumes at every place, several at every
    # third, and the nine combinations with workers at one each; `make soak` resumes every combination at every place.
    number = len(WORLDS) * WORLDS.index(world) + WORKERS.index(workers) - 1
    some = range(0, STEPS, 1 if world == 1 else 3) if workers == 0 else [2 * number]
    for first in range(STEPS) if SOAK else some:
        ranks = [train(first, rank=rank, world=world, workers=workers) for rank in range(world)]
        together = [digest([ranks[rank][step]]) for step in range(STEPS - first) for rank in range(world)]
        assert [one for part in together for one in part] == whole[first * BATCH :]


def test_every_image_is_evaluated_once_and_padding_is_marked() -> None:
    for world in (1, 2, 3):
        seen: list[int] = []
        for rank in range(world):
            batches = list(eval_batches(data(), RULE, batch_size=4, bad=BadImages(0), rank=rank, world=world))
            assert len(batches) == -(-21 // (4 * world)), "every rank has the same number of batches"
            assert all(len(batch.images) == 4 for batch in batches)
            seen += [int(i) for batch in batches for i in batch.ids[batch.valid]]
        assert sorted(seen) == list(range(21))


def test_evaluation_sees_the_same_pixels_for_any_batch_size() -> None:
    def pixels(size: int) -> torch.Tensor:
        return torch.cat([b.images[b.valid] for b in eval_batches(data(), RULE, batch_size=size, bad=BadImages(0))])

    assert torch.equal(pixels(4), pixels(21))
    assert torch.equal(pixels(1), pixels(32))


def test_bad_images_keep_their_place_are_named_and_move_nothing() -> None:
    clean, bad = train(), BadImages(3)
    damaged = train(source=data(broken=(2, 5, 20)), bad=bad)
    assert set(bad.found) == {"2.png", "5.png", "20.png"}
    assert all("is not a readable image" in reason for reason in bad.found.values())
    for one, other in zip(clean, damaged, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.targets, other.targets)
        assert [int(i) for i in other.ids[~other.valid]] == [int(i) for i in one.ids if int(i) in (2, 5, 20)]
        assert torch.equal(one.images[other.valid], other.images[other.valid])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_place_of_a_bad_image_is_black(workers: int) -> None:
    first, *_ = train(source=data(broken=tuple(range(0, 21, 2))), most=21, workers=workers)
    assert 0 < int(first.valid.sum()) < BATCH
    assert [bool(image.any()) for image in first.images] == first.valid.tolist()


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("how", ["inception", "torchvision", "squash", "shorter-side", "whole"])
def test_arrays_of_other_channels_than_the_model_s_are_bad_images(how: Any, given: int) -> None:
    """One channel would fit into four without an error, and three would end the work with a riddle."""
    noise = np.random.default_rng(0).integers(0, 256, (4, given, 9, 9), dtype=np.uint8)
    rule, order = Preprocess(mode="array", image_size=(8, 8), mean=(0.5,) * 4, std=(0.5,) * 4), Order(4, 4, seed=0)
    source, bad = from_arrays(noise, [0] * 4, ("a",)), BadImages(4)
    (batch,) = train_batches(TrainInputs(source, rule, CropRule(how=how), order), range(1), bad=bad)
    assert not batch.valid.any()
    assert set(bad.found.values()) == {
        f"cannot be read: an image of {amount(given, 'channel')} was given where 4 are needed"
    }


def test_several_labels_come_from_workers_as_they_are() -> None:
    source = dataclasses.replace(data(), labels=several_labels([[i % 3] * (i % 2) for i in range(21)]))
    here, there = train(last=2, source=source), train(last=2, source=source, workers=1)
    for one, other in zip(here, there, strict=True):
        assert one.targets.shape == (BATCH, 3)
        for mine, sent in zip(one, other, strict=True):
            assert torch.equal(mine, sent) and mine.dtype == sent.dtype and mine.stride() == sent.stride()


def test_only_images_take_the_way_through_shared_memory_where_one_number_gives_the_rest() -> None:
    """Each piece of it is a socket, two handshakes and a mapping: for seven, more work than the message."""
    first, *_ = train(last=1, workers=1)
    assert [part.is_shared() for part in first] == [True] + [False] * 6


def test_too_many_bad_images_stop_the_work_with_the_first_by_name() -> None:
    with pytest.raises(VitlabError, match=r"3 images.*\d+\.png") as stopped:
        train(source=data(broken=(2, 5, 20)), most=2)
    assert "data.max_bad" in str(stopped.value)


def test_nothing_to_load() -> None:
    empty = from_arrays(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), [], ["a"])
    with pytest.raises(FileProblem, match="holds no images"):
        list(eval_batches(empty, RULE, batch_size=4, bad=BadImages(0)))


def test_balanced_classes_come_equally_often() -> None:
    labels = torch.tensor([0] * 90 + [1] * 9 + [2])
    order = Order(100, 50, SEED, balanced=True, labels=labels)
    ids = torch.cat([order.batch(step).ids for step in range(200)])
    share = torch.bincount(labels[ids]).double() / len(ids)
    assert float((share - 1 / 3).abs().max()) < 0.02
    assert len(ids.unique()) == 100
    assert torch.equal(order.batch(7).ids, Order(100, 50, SEED, balanced=True, labels=labels).batch(7).ids)


def test_repeats_show_an_image_several_times_each_time_cropped_anew() -> None:
    batches = train(order=Order(21, BATCH, SEED, repeats=4))
    ids = torch.cat([batch.ids for batch in batches])
    assert all(len(set(group.tolist())) == 1 for group in ids.split(4))
    first = batches[0]
    assert first.copies.tolist() == [0, 1, 2, 3] * 2
    assert len({first.images[i].numpy().tobytes() for i in range(4)}) == 4


def test_every_epoch_is_cropped_anew() -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    for batch in train(last=42 // 2, order=Order(21, 2, SEED)):
        for sample, image in zip(batch.ids.tolist(), batch.images, strict=True):
            seen.setdefault(sample, []).append(image)
    assert [len(images) for images in seen.values()] == [2] * 21
    assert sum(torch.equal(*images) for images in seen.values()) <= 2, "by chance at most"
