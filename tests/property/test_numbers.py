"""Splits partition, batches cover, units of length agree, and a grid that keeps its size keeps its values."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitlab.core.duration import Duration
from vitlab.core.runtime import generator
from vitlab.data.batches import Order
from vitlab.data.dataset import from_arrays
from vitlab.data.splits import split_shares
from vitlab.models.ops import resize_grid
from vitlab.models.spec import GridResize, Pair

seeds = st.integers(0, 2**63 - 1)
grids = st.tuples(st.integers(1, 6), st.integers(1, 6))
rules = st.sampled_from(["corner-bilinear", "bilinear", "bicubic", "bicubic-antialias"])


def batch_indices(size: int, batch_size: int, step: int, seed: int) -> torch.Tensor:
    return Order(size, batch_size, seed).batch(step).ids


@given(st.dictionaries(st.integers(0, 20), st.integers(2, 30), min_size=1, max_size=6), st.floats(0.01, 0.99), seeds)
def test_split_is_a_stratified_partition(sizes: dict[int, int], test_frac: float, seed: int) -> None:
    labels = torch.tensor([label for label, size in sizes.items() for _ in range(size)])
    labels = labels[torch.randperm(len(labels), generator=generator(seed))]
    images = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    dataset = from_arrays(images, labels, [str(label) for label in range(21)])
    split = split_shares(dataset, {"train": 1 - test_frac, "test": test_frac}, seed, None)
    assert set(split) == {"train", "test"} and len(split) == len(labels)
    held_out = Counter(label for label, part in zip(labels.tolist(), split, strict=True) if part == "test")
    for label, size in sizes.items():
        assert 1 <= held_out[label] <= size - 1
        assert abs(held_out[label] - test_frac * size) <= 1


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 30), seeds)
def test_any_window_of_the_stream_holds_no_example_twice_per_epoch(size: int, batch: int, step: int, seed: int) -> None:
    stream = torch.cat([batch_indices(size, batch, s, seed) for s in range(step + 1)])
    assert len(stream) == (step + 1) * batch
    counts = torch.bincount(stream, minlength=size)
    assert int(counts.max() - counts.min()) <= 1


@given(st.integers(1, 50), st.integers(1, 5000), st.integers(1, 512))
def test_units_of_length_agree(epochs: int, dataset_size: int, batch_size: int) -> None:
    steps = math.ceil(epochs * dataset_size / batch_size)
    lengths = [Duration(epochs=epochs), Duration(examples=epochs * dataset_size), Duration(steps=steps)]
    assert {length.in_steps(dataset_size, batch_size) for length in lengths} == {steps}


def table(grid: Pair, seed: int) -> torch.Tensor:
    return torch.randn(2, grid[0] * grid[1], 3, generator=generator(seed))


@given(grids, rules, seeds)
def test_same_grid_keeps_every_bit(grid: Pair, how: GridResize, seed: int) -> None:
    assert torch.equal(resize_grid(table(grid, seed), grid, grid, how), table(grid, seed))


@given(grids, grids, rules, seeds)
def test_any_grid_goes_to_any_grid_and_a_flat_one_stays_flat(old: Pair, new: Pair, how: GridResize, seed: int) -> None:
    resized = resize_grid(table(old, seed), old, new, how)
    assert resized.shape == (2, new[0] * new[1], 3)
    assert bool(resized.isfinite().all())
    flat = resize_grid(torch.full((1, old[0] * old[1], 2), 0.7), old, new, how)
    torch.testing.assert_close(flat, torch.full_like(flat, 0.7))


@given(st.tuples(st.integers(2, 6), st.integers(2, 6)), st.tuples(st.integers(2, 9), st.integers(2, 9)), seeds)
def test_authors_rule_pins_the_corners(old: Pair, new: Pair, seed: int) -> None:
    before = table(old, seed).reshape(2, *old, 3)
    after = resize_grid(table(old, seed), old, new, "corner-bilinear").reshape(2, *new, 3)
    for y, x in [(0, 0), (0, -1), (-1, 0), (-1, -1)]:
        torch.testing.assert_close(after[:, y, x], before[:, y, x])


def test_table_that_does_not_fill_its_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fill a 2x3 grid"):
        resize_grid(torch.zeros(1, 5, 2), (2, 3), (4, 4), "bilinear")
