"""A split is a stratified partition that depends on labels and seed alone."""

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.data.samples import Samples
from vitlab.data.splits import split_csv, stratified_split

LABELS = torch.tensor([0] * 100 + [1] * 10 + [2] * 2 + [5] * 33)[torch.randperm(145)]


@pytest.mark.parametrize("test_frac", [0.01, 0.2, 0.5, 0.99])
def test_split_is_a_partition_in_rising_order(test_frac: float) -> None:
    train, test = stratified_split(LABELS, test_frac, seed=0)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(len(LABELS)))
    assert torch.equal(train, train.sort().values)
    assert torch.equal(test, test.sort().values)


def test_each_class_gives_its_share_at_least_one_and_keeps_one() -> None:
    train, test = stratified_split(LABELS, 0.2, seed=0)
    assert torch.bincount(LABELS[test]).tolist() == [20, 2, 1, 0, 0, 7]
    assert torch.bincount(LABELS[train]).tolist() == [80, 8, 1, 0, 0, 26]


def test_same_seed_gives_the_same_split_whatever_was_drawn_before() -> None:
    first = stratified_split(LABELS, 0.2, seed=3)
    torch.rand(7)
    again, other = stratified_split(LABELS, 0.2, seed=3), stratified_split(LABELS, 0.2, seed=4)
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_a_further_class_does_not_move_the_split_of_the_others() -> None:
    _, before = stratified_split(LABELS, 0.2, seed=0)
    _, after = stratified_split(torch.cat([LABELS, torch.tensor([3, 3, 3])]), 0.2, seed=0)
    assert torch.equal(after[after < len(LABELS)], before)


def test_class_with_a_single_image_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="class 7 has a single image"):
        stratified_split(torch.tensor([0, 0, 7]), 0.5, seed=0)


@pytest.mark.parametrize("test_frac", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_share_outside_0_to_1_is_refused(test_frac: float) -> None:
    with pytest.raises(UsageError, match=r"data\.test_frac"):
        stratified_split(LABELS, test_frac, seed=0)


def test_split_is_written_as_path_label_split() -> None:
    samples = Samples(torch.zeros(3, 1, 2, 2), torch.tensor([1, 0, 1]), ("cat", "a,b"), ("p/0", "p/1", "p/2"))
    parts = {"train": torch.tensor([0, 2]), "test": torch.tensor([1])}
    assert split_csv(samples, parts) == 'path,label,split\np/0,"a,b",train\np/2,"a,b",train\np/1,cat,test\n'


def test_samples_that_do_not_match_are_refused() -> None:
    with pytest.raises(UsageError, match="2 images, 1 labels, 2 ids"):
        Samples(torch.zeros(2, 1, 1, 1), torch.zeros(1).long(), ("a",), ("x", "y"))


def test_subset_keeps_image_label_and_id_together() -> None:
    whole = Samples(torch.arange(4).view(4, 1, 1, 1), torch.tensor([3, 2, 1, 0]), tuple("abcd"), tuple("wxyz"))
    part = whole.subset(torch.tensor([2, 0]))
    assert (part.images.flatten().tolist(), part.labels.tolist(), part.ids) == ([2, 0], [1, 3], ("y", "w"))
    assert (len(part), part.classes) == (2, whole.classes)
