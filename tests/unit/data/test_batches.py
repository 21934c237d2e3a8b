"""A batch is a pure function of (seed, step); epochs follow each other without a gap."""

import pytest
import torch

from vitlab.data.batches import Order


def batch_indices(size: int, batch_size: int, step: int, seed: int) -> torch.Tensor:
    return Order(size, batch_size, seed).batch(step).ids


@pytest.mark.parametrize(("size", "batch"), [(10, 3), (12, 4), (7, 7), (5, 8), (3, 10), (1, 4)])
def test_every_example_is_seen_once_per_epoch(size: int, batch: int) -> None:
    stream = torch.cat([batch_indices(size, batch, step, seed=0) for step in range(4 * size)])
    assert len(stream) == 4 * size * batch
    for epoch in stream.split(size):
        if len(epoch) == size:
            assert sorted(epoch.tolist()) == list(range(size))


def test_batches_can_be_asked_for_in_any_order() -> None:
    forward = [batch_indices(100, 7, step, seed=5) for step in range(40)]
    backward = [batch_indices(100, 7, step, seed=5) for step in reversed(range(40))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    first, second = batch_indices(50, 50, 0, seed=0), batch_indices(50, 50, 1, seed=0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, batch_indices(50, 50, 0, seed=1))


def test_global_generator_is_neither_used_nor_moved() -> None:
    state = torch.get_rng_state()
    batch_indices(50, 8, 3, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_balanced_draws_of_one_image_are_distinguished() -> None:
    labels = torch.tensor([0] * 200 + [1] * 4)
    order = Order(204, 204, 0, balanced=True, labels=labels, repeats=2)
    places = order.batch(0)
    rare = [place for place in zip(*(part.tolist() for part in places), strict=True) if place[0] >= 200]
    assert len(rare) > 50
    assert len(set(rare)) == len(rare), "each is augmented anew"
    assert all(torch.equal(a, b) for a, b in zip(order.batch(0), places, strict=True))
