"""A split is a stratified partition that depends on labels and seed alone."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, several_labels, single_labels
from vitlab.data.sources.folders import FileReader
from vitlab.data.splits import _cuts, split_shares

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}


def dataset(labels: Sequence[int], names: Sequence[str] | None = None) -> Dataset:
    keys = names or [f"{label}/{i}.jpg" for i, label in enumerate(labels)]
    classes = tuple(f"class{label}" for label in range(max(labels) + 1))
    return Dataset("some", classes, keys, single_labels(labels), FileReader(Path(), keys))


def spread(labels: Sequence[int], split: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Images per part, for each class."""
    return {
        label: tuple(sum(s == part for s, own in zip(split, labels, strict=True) if own == label) for part in SHARES)
        for label in sorted(set(labels))
    }


def test_every_class_is_shared_out_alike_and_is_in_every_part() -> None:
    labels = [0] * 1000 + [1] * 37 + [2] * 10 + [3] * 3
    split = split_shares(dataset(labels), SHARES, 0, None)
    assert spread(labels, split) == {0: (800, 100, 100), 1: (30, 3, 4), 2: (8, 1, 1), 3: (1, 1, 1)}


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 400), st.lists(st.floats(0.01, 1), min_size=2, max_size=3))
def test_quotas_add_up_are_never_empty_and_stay_within_one_of_the_share(count: int, weights: list[float]) -> None:
    shares = {name: weight / sum(weights) for name, weight in zip(SHARES, weights, strict=False)}
    assume(count >= len(shares))
    cuts = _cuts([1] * count, shares, 0)
    quotas = {name: stop - start for name, (start, stop) in zip(shares, itertools.pairwise(cuts), strict=True)}
    assert sum(quotas.values()) == count
    assert min(quotas.values()) >= 1
    if min(shares.values()) * count >= 1:
        assert all(abs(quotas[name] - shares[name] * count) <= 1.001 for name in shares)


def test_split_depends_on_names_and_seed_and_not_on_the_order() -> None:
    labels = [0] * 40 + [1] * 30
    whole = dataset(labels)
    first, other = split_shares(whole, SHARES, 1, None), split_shares(whole, SHARES, 2, None)
    back = torch.arange(len(labels)).flip(0)
    assert split_shares(whole.subset(back), SHARES, 1, None) == first[::-1]
    assert first != other


def test_one_more_image_moves_at_most_one_other_across_each_border() -> None:
    splits = [split_shares(dataset([0] * count), SHARES, 0, None) for count in range(3, 120)]
    moved = [sum(a != b for a, b in zip(old, new, strict=False)) for old, new in itertools.pairwise(splits)]
    assert max(moved) <= 2


def test_split_without_copies_is_the_one_that_published_numbers_rest_on() -> None:
    labels = [0] * 1000 + [1] * 37 + [2] * 10 + [3] * 3
    digest = hashlib.sha256("".join(split_shares(dataset(labels), SHARES, 0, None)).encode()).hexdigest()
    assert digest.startswith("01d8166aa0687063")


def test_copies_stay_together_and_the_shares_stay_exact() -> None:
    labels = [0] * 200 + [1] * 100
    copies = [(3 * i, 3 * i + 1, 3 * i + 2) for i in range(20)] + [(200 + 2 * i, 201 + 2 * i) for i in range(20)]
    for seed in range(5):
        alone, kept = (split_shares(dataset(labels), SHARES, seed, None, known) for known in ((), copies))
        assert any(len({alone[i] for i in found}) > 1 for found in copies), "the premise: chance tears some apart"
        assert all(len({kept[i] for i in found}) == 1 for found in copies)
        assert spread(labels, kept) == spread(labels, alone) == {0: (160, 20, 20), 1: (80, 10, 10)}


def test_all_images_in_copies_still_fill_every_part() -> None:
    threes = [(3 * i, 3 * i + 1, 3 * i + 2) for i in range(3)]
    split = split_shares(dataset([0] * 9), SHARES, 0, None, threes)
    assert spread([0] * 9, split) == {0: (3, 3, 3)}
    assert all(len({split[i] for i in found}) == 1 for found in threes)


def test_a_class_of_fewer_pictures_than_parts_is_split_all_the_same() -> None:
    labels = [0] * 4 + [1] * 10
    split = split_shares(dataset(labels), SHARES, 0, None, [(0, 1, 2, 3), (4, 5)])
    assert spread(labels, split) == {0: (2, 1, 1), 1: (8, 1, 1)}
    assert split[4] == split[5]


def test_a_picture_under_two_labels_trains() -> None:
    labels = [0] * 10 + [1] * 10
    for seed in range(10):
        split = split_shares(dataset(labels), SHARES, seed, None, [(0, 10), (1, 2, 11)])
        assert {split[i] for i in (0, 1, 2, 10, 11)} == {"train"}
        assert spread(labels, split) == {0: (8, 1, 1), 1: (8, 1, 1)}


def test_copies_join_the_groups_that_they_are_in() -> None:
    groups = [f"patient{i // 4}" for i in range(80)]
    copies = [(0, 4), (5, 8), (70, 79)]
    split = split_shares(dataset([0] * 80), SHARES, 0, groups, copies)
    assert len(set(split[:12])) == 1 and split[70] == split[79]
    assert all(len(set(split[i : i + 4])) == 1 for i in range(0, 80, 4))
    everywhere = [tuple(range(0, 80, 4))]  # the same title card in every video: groups alone can be kept
    assert split_shares(dataset([0] * 80), SHARES, 0, groups, everywhere) == split_shares(
        dataset([0] * 80), SHARES, 0, groups
    )


def test_copies_of_images_with_several_labels_stay_together() -> None:
    plain = dataset([0, 1, 2] * 20)
    several = Dataset("some", plain.classes, plain.keys, several_labels([[0], [0, 1], [1, 2]] * 20), plain.read)
    copies = [(i, i + 3, i + 6) for i in range(0, 54, 9)]
    split = split_shares(several, SHARES, 0, None, copies)
    assert all(len({split[i] for i in found}) == 1 for found in copies)


def test_one_class_of_too_few_pictures_does_not_part_the_copies_of_others() -> None:
    plain = dataset([0, 1, 2] * 14 + [2])
    labels = several_labels([[i % 2] for i in range(20) for _ in range(2)] + [[2]] * 3)
    several = Dataset("some", plain.classes, plain.keys, labels, plain.read)
    copies = [(2 * i, 2 * i + 1) for i in range(20)] + [(40, 41, 42)]
    split = split_shares(several, SHARES, 0, None, copies)
    assert [found for found in copies if len({split[i] for i in found}) > 1] == [(40, 41, 42)]
    assert sorted(split[40:]) == ["test", "train", "val"]
    groups = [f"place{i // 4}" for i in range(40)] + ["", "", ""]
    split = split_shares(several, SHARES, 0, groups, copies)
    assert all(len(set(split[i : i + 4])) == 1 for i in range(0, 40, 4))


def test_groups_stay_whole_and_classes_stay_balanced() -> None:
    labels = [i % 2 for i in range(600)]
    groups = [f"patient{i // 6}" for i in range(600)]
    split = split_shares(dataset(labels), SHARES, 0, groups)
    assert all(len({part for part, own in zip(split, groups, strict=True) if own == g}) == 1 for g in set(groups))
    assert spread(labels, split) == {0: (240, 30, 30), 1: (240, 30, 30)}


def test_large_groups_go_where_there_is_room() -> None:
    groups = ["a"] * 50 + ["b"] * 40 + [f"g{i}" for i in range(110)]
    split = split_shares(dataset([0] * 200), SHARES, 0, groups)
    assert (split[0], split[50]) == ("train", "train")
    assert spread([0] * 200, split) == {0: (160, 20, 20)}


def test_an_image_without_a_group_is_its_own() -> None:
    split = split_shares(dataset([0] * 100), SHARES, 0, ["x"] * 10 + [""] * 90)
    assert len(set(split[:10])) == 1
    assert len(set(split[10:])) == 3


def test_several_labels_are_balanced_one_by_one() -> None:
    rows = [[0], [0, 1], [], [1, 2], [0, 1, 2]] * 60
    plain = dataset([0, 1, 2] * 100)
    several = Dataset("some", plain.classes, plain.keys, several_labels(rows), plain.read)
    split = split_shares(several, SHARES, 0, None)
    for label, total in enumerate((180, 180, 120)):
        own = [part for part, labels in zip(split, rows, strict=True) if label in labels]
        assert abs(own.count("train") - 0.8 * total) <= 3
        assert abs(own.count("test") - 0.1 * total) <= 3


IMPOSSIBLE = [
    ([0, 0, 0, 1], None, SHARES, "class1 has 1 image"),
    ([0] * 9, ["a", "b", "b"] * 3, SHARES, r"class0 has 2 groups"),
    ([0] * 12, ["a"] * 10 + ["b", "c"], {"train": 0.5, "val": 0.3, "test": 0.2}, "the group a has 10 images"),
    (
        [0, 1, 1, 2, 0, 2],
        list("aabbcc"),
        {"train": 0.5, "test": 0.5},
        r"no group with class\d could go to (train|test)",
    ),
    ([0] * 9, None, {"train": 0.8, "val": 0.8}, "must add up to 1, not 1.6"),
    ([0] * 9, None, {"train": 1.0}, "two parts or three"),
    ([0] * 9, None, {"train": 1.5, "val": -0.5}, "two parts or three"),
    ([0] * 9, None, {"train": 0.5, "dev": 0.5}, "'dev' is not a part"),
]


@pytest.mark.parametrize(("labels", "groups", "shares", "printed"), IMPOSSIBLE)
def test_impossible_split_is_refused(labels: list[int], groups: list[str] | None, shares: Any, printed: str) -> None:
    with pytest.raises(UsageError, match=printed):
        split_shares(dataset(labels), shares, 0, groups)


def test_all_classes_that_are_too_small_are_named_at_once() -> None:
    two = [0, 1] + [2] * 9
    for groups in (None, [f"p{i}" for i in range(len(two))]):
        with pytest.raises(UsageError, match=r"class0 \w+ 1 \w+, class1 \w+ 1 \w+.*too few.* 3 parts"):
            split_shares(dataset(two), SHARES, 0, groups)
    with pytest.raises(UsageError, match=r"class4 \w+ 1 image.* 2 more, too few") as caught:
        split_shares(dataset(range(7)), SHARES, 0, None)
    assert "class5" not in caught.value.what and "leave the classes out" in str(caught.value)
