"""A set on the device gives the batches of the loader, bit for bit."""

import pytest
import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.augmentation.mixing import MixRule, mix
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset, from_arrays, single_labels
from vitlab.data.decode import read
from vitlab.data.loader import BadImages, Batch, train_batches
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.resident import Resident, on_device, resident_batches
from vitlab.data.sources.opening import open_data

SIZE, SEED = 24, 3
RULE = Preprocess(mode="RGB", image_size=(8, 10))
WHOLE = CropRule(how="whole")
STRONG = AugmentRule(shift_px=2, randaugment="torchvision", layers=2, magnitude=9.0, erase=0.5)
CPU = torch.device("cpu")


def pictures(rows: int = 8, cols: int = 10) -> Dataset:
    noise = torch.randint(0, 256, (SIZE, 3, rows, cols), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return from_arrays(noise, [i % 3 for i in range(SIZE)], ("a", "b", "c"), name="noise")


def resident(dataset: Dataset, *, crop: CropRule = WHOLE, most_gb: float = 1.0, most_bad: int = 0) -> Resident:
    return on_device(dataset, RULE, crop, CPU, most_gb=most_gb, bad=BadImages(most_bad), console=Console(quiet=True))


MIXED = MixRule(mixup=0.8, cutmix=1.0, per="sample")


def strongly(batch: Batch, step: int | Tensor) -> tuple[Tensor, Tensor]:
    images = augment(batch.images, batch.ids, STRONG, seed=SEED, epoch=batch.epochs, copy=batch.copies)
    soft = torch.eye(3)[batch.targets]
    return mix(
        normalise(RULE, images), soft, batch.positions, MIXED, seed=SEED, step=step, total=12, valid_B=batch.valid
    )


def expected(dataset: Dataset, order: Order, first: int, last: int, rank: int, world: int) -> list[Batch]:
    bad = BadImages(0)
    made = train_batches(dataset, RULE, WHOLE, order, first_step=first, last_step=last, bad=bad, rank=rank, world=world)
    found: list[Batch] = []
    for step, batch in enumerate(made, first):
        images, targets = strongly(batch, step)
        found.append(batch._replace(images=images, targets=targets))
    return found


@pytest.mark.parametrize("size", [(8, 10), (13, 9)], ids=str)
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("first", [0, 5])
def test_batches_are_those_of_the_loader(size: tuple[int, int], rank: int, world: int, first: int) -> None:
    dataset, order = pictures(*size), Order(SIZE, 12, seed=SEED, repeats=2)
    made = resident_batches(resident(dataset), order, strongly, first_step=first, last_step=9, rank=rank, world=world)
    wanted = expected(dataset, order, first, 9, rank, world)
    found = list(made)
    assert len(found) == len(wanted) == 9 - first
    for one, other in zip(found, wanted, strict=True):
        for name, a, b in zip(Batch._fields, one, other, strict=True):
            assert isinstance(a, Tensor) and torch.equal(a, b), name


def test_drawn_set_is_held_as_it_is_drawn() -> None:
    drawn = open_data("fractals:categories=5,instances=3,image_size=16,mode=colour").parts["train"]
    rule = Preprocess(mode="RGB", image_size=(16, 16))
    held = on_device(drawn, rule, WHOLE, CPU, most_gb=1, bad=BadImages(0), console=Console(quiet=True))
    wanted = torch.stack([read(drawn.read(i), rule) for i in range(len(drawn))])
    assert torch.equal(held.images_NCYX, wanted)
    assert held.valid_N.all()


def test_image_that_cannot_be_read_is_named_and_not_valid() -> None:
    good = pictures()

    def read(i: int):
        if i == 4:
            raise VitlabError("torn")
        return good.read(i)

    dataset = Dataset(name="torn", classes=good.classes, labels=single_labels([0] * SIZE), keys=good.keys, read=read)
    bad = BadImages(1)
    held = on_device(dataset, RULE, WHOLE, CPU, most_gb=1, bad=bad, console=Console(quiet=True))
    assert list(bad.found.values()) == ["torn"]
    assert held.valid_N.sum() == SIZE - 1
    assert not held.valid_N[4]


def test_set_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="cache_gb"):
        resident(pictures(), most_gb=1e-9)


def test_random_crop_has_nothing_to_cut_from() -> None:
    with pytest.raises(UsageError, match="whole"):
        resident(pictures(), crop=CropRule())


def test_shift_moves_whole_pixels_and_fills_the_frame() -> None:
    image = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).repeat(200, 3, 1, 1)
    rule = AugmentRule(mirror=0.0, shift_px=2, fill=99)
    moved = augment(image, torch.arange(200), rule, seed=1, epoch=0)
    seen = set[tuple[int, int]]()
    framed = torch.full((3, 9, 9), 99, dtype=torch.uint8)
    framed[:, 2:7, 2:7] = image[0]
    for one in moved:
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(framed[:, y : y + 5, x : x + 5], one)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25
