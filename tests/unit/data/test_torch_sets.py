"""Data sets of torch's, opened as ours; and ours, in torch's `DataLoader`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened, from_arrays, several_labels
from vitlab.data.decode import read
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
LABELS = [1, 0, 2, 2, 0, 1]


class Own(TorchDataset[Any]):
    """As people write them; counts how often an item was asked for."""

    def __init__(self, form: str = "PIL", **attributes: Any) -> None:
        self.form, self.asked = form, 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, i: int) -> Any:
        self.asked += 1
        pixels = PIXELS[i]
        forms = {
            "PIL": Image.fromarray(pixels),
            "array": pixels,
            "grey": pixels[:, :, 0],
            "tensor": torch.from_numpy(pixels).permute(2, 0, 1),
            "float": torch.from_numpy(pixels).permute(2, 0, 1) / 255,
        }
        transform = getattr(self, "target_transform", None)
        return forms[self.form], LABELS[i] if transform is None else transform(LABELS[i])


@pytest.mark.parametrize("form", ["PIL", "array", "tensor", "grey"])
def test_own_data_set_gives_the_same_pixels_in_every_form(form: str) -> None:
    data = open_data(Own(form, classes=["ant", "bee", "cat"])).parts["all"]
    assert data.classes == ("ant", "bee", "cat")
    assert data.labels.single().tolist() == LABELS
    for i in range(6):
        assert np.array_equal(data.read(i), PIXELS[i][:, :, :1] if form == "grey" else PIXELS[i])
    assert read(data.read(0), Preprocess(image_size=(5, 4))).shape == (3, 5, 4)


def test_targets_spare_reading_every_image_unless_they_are_not_the_labels() -> None:
    known = Own(targets=torch.tensor(LABELS))
    assert open_data(known).parts["all"].labels.single().tolist() == LABELS
    assert known.asked == 3
    other = Own(targets=[0] * 6)
    assert open_data(other).parts["all"].labels.single().tolist() == LABELS


def test_targets_are_not_the_labels_where_items_transform_them() -> None:
    """Only class 0 changes, and none of the three items that are checked has it."""
    own = Own(targets=LABELS, target_transform=lambda label: label or 3)
    assert open_data(own).parts["all"].labels.single().tolist() == [1, 3, 2, 2, 3, 1]
    nested = Subset(Subset(own, [0, 1, 2, 3, 5]), [0, 1, 2, 3, 4])
    assert open_data(nested).parts["all"].labels.single().tolist() == [1, 3, 2, 2, 1]
    plain = Own(targets=LABELS, target_transform=None)
    assert open_data(plain).parts["all"].labels.single().tolist() == LABELS
    assert plain.asked == 3, "torchvision's sets have the attribute whether it is used or not"


@pytest.mark.parametrize("names", [np.array(["ant", "bee", "cat"]), ("ant", "bee", "cat")], ids=["array", "tuple"])
def test_classes_are_any_sequence(names: Any) -> None:
    assert open_data(Own(classes=names)).parts["all"].classes == ("ant", "bee", "cat")
    assert open_data(Own(classes=names[:0])).parts["all"].classes == ("0", "1", "2"), "an empty list names no class"


def test_names_of_synonyms_are_joined_and_equal_ones_told_apart() -> None:
    """As in torchvision's ImageNet, where the crane is a bird and a machine."""
    data = open_data(Own(classes=[("crane",), ("maillot", "tank suit"), ("crane",)])).parts["all"]
    assert data.classes == ("crane (0)", "maillot, tank suit", "crane (2)")


def test_subset_keeps_classes_and_labels() -> None:
    data = open_data(Subset(Own(targets=LABELS, classes=["ant", "bee", "cat"]), [5, 1])).parts["all"]
    assert (data.classes, data.labels.single().tolist()) == (("ant", "bee", "cat"), [1, 0])
    assert np.array_equal(data.read(0), PIXELS[5])


def test_tensors_of_torch_are_opened() -> None:
    images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    data = open_data(TensorDataset(images, torch.tensor(LABELS))).parts["all"]
    assert (data.classes, data.labels.single().tolist()) == (("0", "1", "2"), LABELS)


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ([], "list holds no images"),
        ([3, 4], "item 0 is not an image with the number of its class, but int"),
        ([(PIXELS[0], "cat")], "item 0 is not an image with the number"),
        ([(PIXELS[0], -1)], "labels range from -1 to -1"),
        (3, "not int"),
        ({"train": 1}, "not dict"),
    ],
)
def test_what_is_not_a_data_set_is_refused(given: Any, printed: str) -> None:
    with pytest.raises(UsageError, match=printed):
        open_data(given)


def test_floats_are_refused_with_what_to_leave_out() -> None:
    data = open_data(Own("float")).parts["all"]
    with pytest.raises(UsageError, match=r"float32 \[5, 4, 3\].*\n.*ToTensor"):
        data.read(0)


# --- ours, given to torch ---------------------------------------------------------------------------------------------


def photos(folder: Path) -> Path:
    for i, name in enumerate(["ant/1.png", "bee/1.png", "bee/2.png"]):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(PIXELS[i]).save(folder / name)
    return folder


def scaled(image_CYX: torch.Tensor) -> torch.Tensor:
    return image_CYX[:, :4] / 255


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loader_gives_batches(tmp_path: Path, workers: int) -> None:
    data = open_data(photos(tmp_path)).parts["all"]
    (images_BCYX, labels_B), *_ = DataLoader(data, batch_size=3, num_workers=workers)
    assert torch.equal(images_BCYX, torch.from_numpy(PIXELS[:3]).permute(0, 3, 1, 2))
    assert labels_B.tolist() == [0, 1, 1]
    (images_BCYX, _), *_ = DataLoader(data.with_transform(scaled), batch_size=3, num_workers=workers)
    assert images_BCYX.shape == (3, 3, 4, 4) and images_BCYX.dtype == torch.float32


def test_items_are_those_of_the_training_part_and_end(tmp_path: Path) -> None:
    data = from_arrays(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), LABELS, "abc")
    opened = Opened({"train": data.subset(torch.tensor([4, 5])), "test": data})
    assert len(opened) == 2 and opened["test"] is data
    assert torch.equal(opened[0][0], data[4][0]) and opened[-1][1] == 1
    assert [label for _, label in data] == LABELS, "iteration ends"
    with pytest.raises(IndexError):
        data[6]
    assert open_data(opened) is opened and open_data(data).parts["all"] is data


def test_several_labels_are_a_row(tmp_path: Path) -> None:
    data = from_arrays(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), [0, 0], "abc")
    several = Dataset("some", data.classes, data.keys, several_labels([(0, 2), ()]), data.read)
    _, rows_BK = next(iter(DataLoader(several, batch_size=2)))
    assert rows_BK.tolist() == [[1, 0, 1], [0, 0, 0]]


def test_repr_is_one_line_however_many_images(tmp_path: Path) -> None:
    data = open_data("fractals:categories=1000,instances=5")
    assert repr(data.parts["train"]) == (
        "<Dataset fractals:categories=1000,instances=5 train: 5,000 images, 1,000 classes>"
    )
    assert repr(data) == "<Opened train 5,000, test 1,000 images, 1,000 classes>"
