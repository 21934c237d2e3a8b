"""The one interface of all sources: numbers in, bytes and labels out."""

import pickle

import numpy as np
import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened, class_order, from_arrays, several_labels, single_labels

PIXELS = torch.arange(5 * 3 * 2 * 4, dtype=torch.uint8).reshape(5, 3, 2, 4)


def small() -> Dataset:
    return from_arrays(PIXELS, [0, 1, 2, 0, 1], ["a", "b", "c"])


def test_arrays_are_read_as_rows_columns_channels() -> None:
    data = small()
    assert len(data) == 5
    assert np.array_equal(data.read(3), PIXELS[3].permute(1, 2, 0).numpy())


def test_subset_of_a_subset_reads_the_right_images() -> None:
    data = small().subset(torch.tensor([4, 2, 0])).subset(torch.tensor([2, 0]))
    assert data.keys == ["arrays/0", "arrays/4"]
    assert data.labels.single().tolist() == [0, 1]
    assert np.array_equal(data.read(1), PIXELS[4].permute(1, 2, 0).numpy())
    assert np.array_equal(pickle.loads(pickle.dumps(data)).read(1), data.read(1)), "workers get it by pickle"


def test_several_labels_become_rows_of_zeros_and_ones() -> None:
    labels = several_labels([[2, 0], [], [1]])
    assert [labels[i] for i in range(3)] == [(2, 0), (), (1,)]
    assert labels.targets(torch.tensor([0, 1, 2]), 3).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    chosen = labels.subset(torch.tensor([2, 0, 2]))
    assert [chosen[i] for i in range(3)] == [(1,), (2, 0), (1,)]
    assert labels.counts(4).tolist() == [1, 1, 1, 0]
    with pytest.raises(UsageError, match="several labels"):
        labels.single()


def test_one_label_each_is_a_number_each() -> None:
    labels = single_labels([3, 1, 2])
    assert labels.targets(torch.tensor([2, 0]), 4).tolist() == [2, 3]
    assert labels.single().tolist() == [3, 1, 2]


def test_fingerprint_distinguishes_names_labels_and_classes() -> None:
    data = small()
    others = [
        from_arrays(PIXELS, [0, 1, 2, 0, 2], ["a", "b", "c"]),
        from_arrays(PIXELS, [0, 1, 2, 0, 1], ["a", "b", "d"]),
        from_arrays(PIXELS, [0, 1, 2, 0, 1], ["a", "b", "c"], name="other"),
        data.subset(torch.arange(4)),
    ]
    assert data.fingerprint() == small().fingerprint()
    assert len({data.fingerprint(), *(other.fingerprint() for other in others)}) == 5


@pytest.mark.parametrize(
    ("labels", "what"), [([0, 1, 2], "names do not fit"), ([0, 1, 2, 0, 3], "outside"), ([0, 1, 2, 0, -1], "outside")]
)
def test_labels_that_do_not_fit_are_refused(labels: list[int], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        from_arrays(PIXELS, labels, ["a", "b", "c"])


def test_floats_are_not_images() -> None:
    with pytest.raises(UsageError, match="must be uint8"):
        from_arrays(PIXELS.float(), [0] * 5, ["a"])


def test_a_part_is_found_by_the_first_name_there_is() -> None:
    opened = Opened({"train": small()})
    assert opened.part("all", "train") is opened.parts["train"]
    with pytest.raises(UsageError, match="There is: train"):
        opened.part("test")


def test_classes_are_numbered_by_value_only_where_all_are_numbers() -> None:
    assert class_order(["10", "9", "007", "7", "0"]) == ["0", "007", "7", "9", "10"]
    assert class_order(["10", "9", "cat"]) == ["10", "9", "cat"]
    assert class_order(["1" * 5000, "2"]) == ["2", "1" * 5000]


def test_two_classes_of_one_name_are_refused() -> None:
    """Everything that goes by names, as counts and confusions do, would take them for one."""
    pixels = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"arrays: two classes have the name 'a'\nGive each"):
        from_arrays(pixels, [0, 1, 2], ["a", "b", "a"])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_arrays_with_channels_last_are_refused_with_what_to_do(channels: int) -> None:
    pixels = torch.zeros(2, 28, 20, channels, dtype=torch.uint8)
    for images in (pixels, pixels.numpy()):
        with pytest.raises(UsageError, match=r"looks like \[N, Y, X, C\]\n.*transpose\(0, 3, 1, 2\)"):
            from_arrays(images, [0, 1], ["a", "b"])
    assert from_arrays(pixels.permute(0, 3, 1, 2), [0, 1], ["a", "b"]).read(0).shape == (28, 20, channels)


@pytest.mark.parametrize("shape", [(2, 13, 64, 64), (2, 13, 4, 4), (2, 1, 28, 4), (2, 3, 3, 3), (2, 28, 2, 3)])
def test_many_channels_and_tiny_images_are_channels_first(shape: tuple[int, ...]) -> None:
    read = from_arrays(torch.zeros(shape, dtype=torch.uint8), [0, 1], ["a", "b"]).read(0)
    assert read.shape == (*shape[2:], shape[1])
