"""A set on the device gives the batches of the loader, bit for bit."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.data.augmentation.augment import AugmentRule, augment
from vitlab.data.augmentation.batched_crops import HeldImages
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.augmentation.mixing import MixRule, mix
from vitlab.data.batches import Order
from vitlab.data.cache import in_memory
from vitlab.data.dataset import Dataset, from_arrays, single_labels
from vitlab.data.decode import read
from vitlab.data.loader import BadImages, Batch, TrainInputs, train_batches
from vitlab.data.preprocess import Filter, Preprocess, normalise
from vitlab.data.resident import Resident, on_device, resident_batches
from vitlab.data.sources.opening import open_data

SIZE, SEED = 24, 3
RULE = Preprocess(mode="RGB", image_size=(8, 10))
WHOLE = CropRule(how="whole")
STRONG = AugmentRule(shift_px=2, randaugment="torchvision", layers=2, magnitude=9.0, erase=0.5)
CPU = torch.device("cpu")
RANDOM = ("inception", "torchvision")
PETS = Path(os.environ.get("VITLAB_DATA", Path(__file__).parents[4] / "shared/data")) / "oxford_pets/pets_trainval.npz"


def pictures(rows: int = 8, cols: int = 10) -> Dataset:
    noise = torch.randint(0, 256, (SIZE, 3, rows, cols), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return from_arrays(noise, [i % 3 for i in range(SIZE)], ("a", "b", "c"), name="noise")


def of_many_sizes(channels: int = 3) -> Dataset:
    """From a single pixel to the fourfold of the model's size, and one that cannot be read."""
    noise = np.random.default_rng(1)
    images = [noise.integers(0, 256, (*noise.integers(1, 40, 2), channels), dtype=np.uint8) for _ in range(SIZE)]

    def read(i: int) -> np.ndarray[Any, Any]:
        if i == 4:
            raise VitlabError("torn")
        return images[i]

    keys = [str(i) for i in range(SIZE)]
    return Dataset(name="many", classes=("a",), keys=keys, labels=single_labels([0] * SIZE), read=read)


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
    made = train_batches(TrainInputs(dataset, RULE, WHOLE, order, rank=rank, world=world), range(first, last), bad=bad)
    found: list[Batch] = []
    for step, batch in enumerate(made, first):
        images, targets = strongly(batch, step)
        found.append(batch._replace(images=images, targets=targets))
    return found


@pytest.mark.parametrize("size", [(8, 10), (13, 9)], ids=str)
@pytest.mark.parametrize(("rank", "world"), slow_after(1, [(1, 2), (0, 1), (0, 2)]))
@pytest.mark.parametrize("first", [0, 5])
def test_batches_are_those_of_the_loader(size: tuple[int, int], rank: int, world: int, first: int) -> None:
    dataset, order = pictures(*size), Order(SIZE, 12, seed=SEED, repeats=2)
    made = resident_batches(resident(dataset), order, strongly, range(first, 9), rank=rank, world=world)
    wanted = expected(dataset, order, first, 9, rank, world)
    found = list(made)
    assert len(found) == len(wanted) == 9 - first
    for one, other in zip(found, wanted, strict=True):
        for name, a, b in zip(Batch._fields, one, other, strict=True):
            assert isinstance(a, Tensor) and torch.equal(a, b), name


@pytest.mark.parametrize(
    "name", ["fractals:categories=5,instances=3,image_size=16,mode=colour", "shapes:image_size=16"]
)
@pytest.mark.parametrize(
    "size", [(24, 20), *(pytest.param(size, marks=pytest.mark.slow) for size in ((16, 16), (9, 12)))]
)
def test_synthetic_set_is_held_as_the_loader_would_read_it(name: str, size: tuple[int, int]) -> None:
    drawn = open_data(name).parts["train"]
    drawn = drawn.subset(torch.arange(min(15, len(drawn))))
    rule = Preprocess(mode="RGB", image_size=size)
    whole = on_device(drawn, rule, WHOLE, CPU, most_gb=1, bad=BadImages(0), console=Console(quiet=True))
    wanted = torch.stack([read(drawn.read(i), rule) for i in range(len(drawn))])
    assert torch.equal(whole.held.flat[: wanted.numel()].view(wanted.shape), wanted)
    assert whole.valid_N.all()


def test_image_that_cannot_be_read_is_named_and_not_valid() -> None:
    good = pictures()

    def read(i: int):
        if i == 4:
            raise VitlabError("torn")
        return good.read(i)

    dataset = Dataset(name="torn", classes=good.classes, labels=single_labels([0] * SIZE), keys=good.keys, read=read)
    bad = BadImages(1)
    made = on_device(dataset, RULE, WHOLE, CPU, most_gb=1, bad=bad, console=Console(quiet=True))
    assert list(bad.found.values()) == ["torn"]
    assert made.valid_N.sum() == SIZE - 1
    assert not made.valid_N[4]


@pytest.mark.parametrize("how", [*RANDOM, "squash", "shorter-side", "whole"])
def test_arrays_of_other_channels_than_the_model_s_are_not_held(how: Any) -> None:
    """Three channels among fours would move the place of every image behind them."""
    rule, bad = Preprocess(mode="array", image_size=(8, 10), mean=(0.5,) * 4, std=(0.5,) * 4), BadImages(SIZE)
    on = on_device(pictures(), rule, CropRule(how=how), CPU, most_gb=1, bad=bad, console=Console(quiet=True))
    assert not on.valid_N.any()
    assert set(bad.found.values()) == {"cannot be read: an image of 3 channels was given where 4 are needed"}


def test_set_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="cache_gb"):
        resident(pictures(), most_gb=1e-9)


def loaded(dataset: Dataset, rule: Preprocess, crop: CropRule, order: Order, steps: int) -> list[Batch]:
    return list(train_batches(TrainInputs(dataset, rule, crop, order), range(steps), bad=BadImages(SIZE)))


def held(dataset: Dataset, rule: Preprocess, crop: CropRule, order: Order, steps: int) -> list[Batch]:
    on = on_device(dataset, rule, crop, CPU, most_gb=1, bad=BadImages(SIZE), console=Console(quiet=True))
    as_it_is = lambda batch, _step: (batch.images, batch.targets)  # noqa: E731
    return list(resident_batches(on, order, as_it_is, range(steps)))


@pytest.fixture(params=["one_by_one", "at_once"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to the same crops: the CPU's, and the one that GPUs take."""
    monkeypatch.setattr(HeldImages, "one_by_one", getattr(HeldImages, request.param))


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for name, a, b in zip(Batch._fields, one, other, strict=True):
            assert isinstance(a, Tensor) and torch.equal(a, b), name


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("how", "filter"),
    [
        *((how, filter) for how in RANDOM for filter in ("bilinear", "bicubic")),
        *((how, filter) for how in ("squash", "shorter-side", "whole") for filter in ("bilinear", "bicubic", "area")),
    ],
)
def test_random_crops_are_those_of_the_loader(how: Any, filter: Filter) -> None:
    order, crop = Order(SIZE, 8, seed=2**62 + 5, repeats=2), CropRule(how=how, area=(0.1, 0.9), crop_frac=0.6)
    rule = Preprocess(image_size=(8, 10), filter=filter)
    assert_same(*(made(of_many_sizes(), rule, crop, order, 14) for made in (held, loaded)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("how", [*RANDOM, "shorter-side"])
def test_other_channels_are_cropped_too(how: Any, channels: int) -> None:
    mode, values = "L" if channels == 1 else "array", (0.5,) * channels
    rule = Preprocess(mode=mode, image_size=(8, 10), mean=values, std=values)  # type: ignore[arg-type]
    order, dataset = Order(SIZE, 12, seed=SEED), of_many_sizes(channels)
    assert_same(*(made(dataset, rule, CropRule(how=how), order, 6) for made in (held, loaded)))


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(not PETS.exists(), reason="needs the data folder")
@pytest.mark.parametrize(("how", "filter"), [("inception", "bilinear"), ("torchvision", "bicubic")])
def test_photographs_are_cropped_as_the_loader_does(how: Any, filter: Filter) -> None:
    photos = open_data(str(PETS)).part("all", "train").subset(torch.arange(8))
    rule, order = Preprocess(image_size=(160, 160), filter=filter), Order(8, 8, seed=SEED)
    assert_same(*(made(photos, rule, CropRule(how=how), order, 2) for made in (held, loaded)))


def test_large_jpegs_are_those_of_the_cache_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a cache, their decoder would shrink them for the larger crops."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((400, 300)).save(buffer, "JPEG")
    dataset = Dataset("jpeg", ("a",), ["one"], single_labels([0]), lambda _i: buffer.getvalue())
    order, crop, rule = Order(1, 8, seed=SEED), CropRule(area=(0.5, 1.0)), Preprocess(image_size=(24, 24))
    quiet = Console(quiet=True)
    cached = in_memory(dataset, rule, most_gb=1, console=quiet)
    found, wanted = held(dataset, rule, crop, order, 1), loaded(cached, rule, crop, order, 1)
    assert torch.equal(found[0].images, wanted[0].images)
    assert not torch.equal(found[0].images, loaded(dataset, rule, crop, order, 1)[0].images)
    on_device(dataset, rule, crop, CPU, most_gb=1, bad=BadImages(0), console=Console())
    assert "1 large JPEG" in capsys.readouterr().err


def test_set_of_many_sizes_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="cache_gb"):
        resident(pictures(), crop=CropRule(), most_gb=8 * 10 * 3 * (SIZE - 1) / 2**30, most_bad=SIZE)
    resident(pictures(), crop=CropRule(), most_gb=8 * 10 * 3 * SIZE / 2**30)


@pytest.mark.parametrize("how", RANDOM)
@pytest.mark.parametrize("fields", [{"filter": "area"}, {"antialias": False}], ids=str)
def test_resizing_that_has_no_batched_form_is_refused(how: Any, fields: dict[str, Any]) -> None:
    for rule, crop in ((fields, {}), ({}, fields)):
        with pytest.raises(UsageError, match="antialias"):
            whole = Preprocess(image_size=(8, 10), **rule)
            held(pictures(), whole, CropRule(how=how, **crop), Order(SIZE, 8, seed=0), 1)


def test_images_of_a_hundred_times_the_size_are_refused() -> None:
    with pytest.raises(UsageError, match="hundred times"):
        held(pictures(1, 600), Preprocess(image_size=(8, 2)), CropRule(), Order(SIZE, 8, seed=0), 1)


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
