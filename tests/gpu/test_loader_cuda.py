"""Batches on their way to a GPU: from worker processes, through memory that it can read itself, with nothing lost."""

import dataclasses

import numpy as np
import pytest
import torch

from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset, from_arrays, several_labels
from vitlab.data.loader import BadImages, Batch, TrainInputs, eval_batches, train_batches
from vitlab.data.preprocess import Preprocess

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # Newer Pythons warn of every fork beside threads, of which CUDA has some; the workers do not use it.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
SIZE, BATCH, STEPS = 40, 16, 12
NOISE = np.random.default_rng(0).integers(0, 256, (SIZE, 3, 30, 40), dtype=np.uint8)
ONE = from_arrays(NOISE, [i % 3 for i in range(SIZE)], ("a", "b", "c"))
SEVERAL = dataclasses.replace(ONE, labels=several_labels([[i % 3] * (i % 2) for i in range(SIZE)]))
RULE = Preprocess(image_size=(64, 64))


@pytest.mark.parametrize("source", [ONE, SEVERAL], ids=["one label", "several labels"])
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_arrive_as_they_were_made(source: Dataset, workers: int) -> None:
    order, steps = Order(SIZE, BATCH, seed=1), range(STEPS)
    wanted = train_batches(TrainInputs(source, RULE, CropRule(), order), steps, bad=BadImages(0))
    made = train_batches(
        TrainInputs(source, RULE, CropRule(), order), steps, bad=BadImages(0), workers=workers, pin=True
    )
    arrived: list[Batch] = []
    for batch in made:  # each is let go while its copy may still be under way, as in training
        assert all(part.is_pinned() for part in batch)
        arrived.append(Batch(*(part.to("cuda", non_blocking=True) for part in batch)))
    for there, here in zip(arrived, wanted, strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(there, here, strict=True))


def test_pinned_batches_of_an_evaluation_are_every_image_once() -> None:
    made = eval_batches(ONE, RULE, batch_size=BATCH, bad=BadImages(0), workers=2, pin=True)
    seen = torch.cat([batch.ids[batch.valid] for batch in made])
    assert seen.tolist() == list(range(SIZE))
