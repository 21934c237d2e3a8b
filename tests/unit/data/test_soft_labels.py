"""Soft labels, shares of the classes by image: the same wherever labels go, from the data set to the batch on the device."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, from_arrays, join, keep_classes, soft_labels
from vitlab.data.loader import BadImages
from vitlab.data.parts import Parts
from vitlab.training.assemble import Feed, Preparation, require_possible
from vitlab.training.objective import class_weights, loss_for
from vitlab.training.recipe import Recipe, recipe_from_dict, with_changes
from vitlab.training.rules import Objective

CLASSES = ("a", "b", "c")
TABLE_MK = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.4, 0.4], [0.0, 0.0, 1.0]])
ROW_N = torch.tensor([0, 1, 1, 2, 0, 2, 2, 1])
RECIPE: dict[str, Any] = {
    "title": "Soft",
    "data": {"source": "soft", "image_size": [8, 8], "mode": "L", "crop": {"how": "whole"}},
    "model": {"name": "ViT-w16d1m32h2/4"},
    "train": {"steps": 2, "batch_size": 4},
    "optim": {"lr": 1e-2},
}


@pytest.fixture
def soft() -> Dataset:
    images = torch.arange(8 * 64, dtype=torch.uint8).reshape(8, 1, 8, 8)
    hard = from_arrays(images, [0] * 8, CLASSES, "soft")
    return dataclasses.replace(hard, labels=soft_labels(TABLE_MK, ROW_N))


def recipe(*overrides: str) -> Recipe:
    return recipe_from_dict(with_changes(RECIPE, overrides), len(CLASSES))


def batches(dataset: Dataset, settings: Recipe) -> list[Any]:
    world = World(0, 1, torch.device("cpu"))
    feed = Feed(settings, dataset, world, BadImages(0), Console(quiet=True), None)  # type: ignore[arg-type]
    return list(feed.batches(range(2)))


def test_targets_are_the_rows_of_each_image(soft: Dataset) -> None:
    wanted = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.0, 1.0], [0.2, 0.4, 0.4]])
    assert torch.equal(soft.labels.targets(torch.tensor([4, 3, 7]), 3), wanted)
    assert torch.equal(soft.subset(torch.tensor([4, 3, 7])).labels.targets(torch.arange(3), 3), wanted)


def test_the_class_of_an_image_is_the_lowest_of_its_largest_shares(soft: Dataset) -> None:
    assert soft.labels.single().tolist() == [0, 1, 1, 2, 0, 2, 2, 1]
    assert soft.labels[1] == (1,)
    assert len(soft.labels) == 8


def test_an_item_has_its_shares_as_label(soft: Dataset) -> None:
    assert soft[3][1].tolist() == [0.0, 0.0, 1.0]


def test_counts_are_sums_of_shares_and_so_are_class_weights(soft: Dataset) -> None:
    wanted = sum(TABLE_MK[row].double() for row in ROW_N)
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(soft.labels.counts(3), wanted)
    loss = loss_for(Objective(class_weights="auto"), soft, torch.device("cpu"))
    torch.testing.assert_close(loss.class_weights_K, class_weights(wanted))


def test_fingerprint_changes_with_a_share_and_with_who_has_it(soft: Dataset) -> None:
    other_table = TABLE_MK.clone()
    other_table[1] = torch.tensor([0.1, 0.5, 0.4])
    other_rows = ROW_N.clone()
    other_rows[0], other_rows[4] = 1, 0
    marks = {soft.fingerprint()}
    for table, rows in ((other_table, ROW_N), (TABLE_MK, other_rows)):
        marks.add(dataclasses.replace(soft, labels=soft_labels(table, rows)).fingerprint())
    assert len(marks) == 3


@pytest.mark.parametrize("cache", ["none", "device"])
def test_batches_carry_the_shares_of_their_images(soft: Dataset, cache: str) -> None:
    for batch in batches(soft, recipe(f"data.cache={cache}")):
        assert torch.equal(batch.targets, TABLE_MK[ROW_N[batch.ids]])


def test_mixup_mixes_shares(soft: Dataset) -> None:
    settings = recipe("data.mix.mixup=1.0")
    batch = batches(soft, settings)[0]
    images, mixed = Preparation(settings, torch.device("cpu"))(batch, 0)
    plain = TABLE_MK[ROW_N[batch.ids]]
    torch.testing.assert_close(mixed.sum(dim=1), torch.ones(4))
    # One weight for the batch, and neighbours are partners: it follows from the first pair in which the shares differ.
    pair = next(i for i in (0, 2) if not torch.equal(plain[i], plain[i + 1]))
    k = int((plain[pair] - plain[pair + 1]).abs().argmax())
    weight = (mixed[pair, k] - plain[pair + 1, k]) / (plain[pair, k] - plain[pair + 1, k])
    swapped = plain[torch.tensor([1, 0, 3, 2])]
    torch.testing.assert_close(mixed, weight * plain + (1 - weight) * swapped)
    assert images.shape == (4, 1, 8, 8)


def test_a_softmax_may_be_trained_on_them(soft: Dataset) -> None:
    require_possible(recipe(), Parts(soft, None, None, ()), 1)


def test_the_loss_is_the_cross_entropy_by_hand(soft: Dataset) -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, -0.7]])
    targets = soft.labels.targets(torch.tensor([0, 1]), 3)
    loss = loss_for(Objective(), soft, torch.device("cpu"))(torch.zeros(2, 1, 8, 8), logits, targets)
    for i in range(2):
        total = sum(float(value.exp()) for value in logits[i])
        by_hand = -sum(
            float(targets[i, k]) * (float(logits[i, k]) - float(torch.tensor(total).log())) for k in range(3)
        )
        assert float(loss[i]) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize(
    "table", [[[0.5, 0.4, 0.0]], [[1.5, -0.5, 0.0]], [0.5, 0.5]], ids=["sum", "negative", "no table"]
)
def test_what_is_not_a_share_is_refused(table: Any) -> None:
    with pytest.raises(UsageError, match="shares"):
        soft_labels(torch.tensor(table), torch.tensor([0]))


def test_a_row_outside_of_the_table_is_refused() -> None:
    with pytest.raises((UsageError, IndexError)):
        soft_labels(TABLE_MK, torch.tensor([3]))


def test_no_class_can_be_left_out(soft: Dataset) -> None:
    with pytest.raises(UsageError, match="soft labels"):
        keep_classes(soft, torch.tensor([True, False, True]))


def test_joined_sets_read_and_name_the_images_of_both() -> None:
    first, second = (
        from_arrays(torch.full((n, 1, 2, 2), n, dtype=torch.uint8), [0] * n, CLASSES, f"set{n}") for n in (2, 3)
    )
    both = join((first, second), soft_labels(TABLE_MK, torch.tensor([0, 1, 2, 2, 1])), first.classes, "both")
    assert [int(both.read(i)[0, 0, 0]) for i in range(5)] == [2, 2, 3, 3, 3]  # type: ignore[call-overload]
    assert both.keys == ["set2/0", "set2/1", "set3/0", "set3/1", "set3/2"]
    assert both[4][1].tolist() == TABLE_MK[1].tolist()
