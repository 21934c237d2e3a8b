"""Small classes: dropped below `min_images`, or trained and not tested, always with their names."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened, from_arrays, several_labels
from vitlab.data.parts import arrange
from vitlab.training.recipe import DataConfig

RULE = DataConfig(source="x", image_size=(2, 2), test_frac=0.25)


def dataset(labels: Sequence[int], classes: Sequence[str] = ("ant", "bee", "cat", "dog"), name: str = "set") -> Dataset:
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return from_arrays(images, labels, classes, name)


def test_class_of_one_image_is_trained_and_not_tested_with_a_warning() -> None:
    parts = arrange(Opened({"all": dataset([0] * 8 + [1] * 8 + [2])}), dataclasses.replace(RULE, min_images=1))
    assert parts.test is not None
    assert parts.train.labels.counts(3).tolist() == [6, 6, 1]
    assert parts.test.labels.counts(3).tolist() == [2, 2, 0]
    dropped, small = parts.warnings
    assert dropped == "1 of 4 classes dropped, with fewer than 1 images: dog"
    assert small == "too few images to hold any out, so trained and not tested: cat"


def test_images_of_other_classes_are_split_as_without_the_small_one() -> None:
    with_small = arrange(Opened({"all": dataset([0] * 8 + [1] * 8 + [2], ("ant", "bee", "cat"))}), RULE)
    without = arrange(Opened({"all": dataset([0] * 8 + [1] * 8, ("ant", "bee"))}), RULE)
    assert with_small.test is not None and without.test is not None
    assert list(with_small.test.keys) == list(without.test.keys)


def test_class_of_two_is_tested_but_not_validated_on() -> None:
    data = dataset([0] * 12 + [1] * 12 + [2, 2], ("ant", "bee", "cat"))
    parts = arrange(Opened({"all": data}), dataclasses.replace(RULE, val_frac=0.25))
    assert parts.test is not None and parts.val is not None
    counts = [part.labels.counts(3)[2].item() for part in (parts.train, parts.val, parts.test)]
    assert counts == [1, 0, 1]
    assert parts.warnings == ("too few images to hold any out, so trained and not used for validation: cat",)


def test_group_of_a_small_class_stays_whole_in_training() -> None:
    """A patient with the only image of a class has others as well, and none of them may be tested on."""
    labels, groups = [0, 1] * 8 + [2, 0, 1], [f"p{i // 2}" for i in range(16)] + ["rare"] * 3
    data = dataclasses.replace(dataset(labels, ("ant", "bee", "cat")), groups=groups)
    parts = arrange(Opened({"all": data}), RULE)
    assert parts.test is not None and parts.test.groups is not None and parts.train.groups is not None
    assert len(parts.test) and "rare" not in parts.test.groups
    assert not set(parts.test.groups) & set(parts.train.groups)


def test_copy_of_a_small_class_stays_with_it() -> None:
    data = dataset([0] * 8 + [1] * 8 + [2], ("ant", "bee", "cat"))
    for twin in range(16):
        copies = [[data.keys[16], data.keys[twin]]]
        parts = arrange(Opened({"all": data}, copies=copies), RULE)
        assert data.keys[16] in parts.train.keys and data.keys[twin] in parts.train.keys


def test_min_images_drops_classes_of_every_part_and_numbers_the_others_anew() -> None:
    train, test = dataset([0, 0, 1, 2, 2, 3, 3, 3]), dataset([0, 1, 2, 3, 3], name="own")
    parts = arrange(Opened({"train": train, "test": test}), dataclasses.replace(RULE, min_images=2))
    assert parts.test is not None
    assert parts.train.classes == parts.test.classes == ("ant", "cat", "dog")
    assert parts.train.labels.single().tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert parts.test.labels.single().tolist() == [0, 1, 2, 2]
    assert [int(parts.test.read(i)[0, 0, 0]) for i in range(4)] == [0, 2, 3, 4], "each with its own image"
    assert parts.warnings == ("1 of 4 classes dropped, with fewer than 2 images: bee",)


def test_min_images_takes_a_rare_label_off_images_that_have_several() -> None:
    rows = [(0, 1), (0,), (1, 2), (), (0, 1)]
    data = dataclasses.replace(dataset([0] * 5, ("ant", "bee", "cat")), labels=several_labels(rows))
    parts = arrange(Opened({"all": data}), dataclasses.replace(RULE, min_images=2, test_frac=0.0))
    assert parts.train.classes == ("ant", "bee")
    assert [parts.train.labels[i] for i in range(5)] == [(0, 1), (0,), (1,), (), (0, 1)]


@pytest.mark.parametrize(("fewest", "printed"), [(9, "leaves 0 of the 2 classes"), (5, "leaves 1 of the 2 classes")])
def test_min_images_that_leaves_fewer_than_two_classes_is_an_error(fewest: int, printed: str) -> None:
    data = dataset([0] * 8 + [1] * 4, ("ant", "bee"))
    with pytest.raises(UsageError, match=printed):
        arrange(Opened({"all": data}), dataclasses.replace(RULE, min_images=fewest))


def test_train_images_takes_a_stratified_part_and_fewer_are_among_more() -> None:
    data = Opened({"train": dataset([0] * 40 + [1] * 20, ("ant", "bee")), "test": dataset([0, 1], ("ant", "bee"))})
    few, more, all_of_them = (arrange(data, dataclasses.replace(RULE, train_images=n)) for n in (6, 30, 60))
    assert few.train.labels.counts(2).tolist() == [4, 2] and more.train.labels.counts(2).tolist() == [20, 10]
    assert set(few.train.keys) < set(more.train.keys) and len(all_of_them.train) == 60
    assert few.test is not None and len(few.test) == 2, "what is tested stays as it is"
    assert any("6 of the 60 training images" in note for note in few.notes) and not all_of_them.notes
    with pytest.raises(UsageError, match="has 60"):
        arrange(data, dataclasses.replace(RULE, train_images=61))
