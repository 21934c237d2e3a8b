"""Fractals: each a pure function of its keys, full enough, and recognisably of its category."""

import hashlib

import pytest
import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.synthetic.fractals import Fractals, Mode, draw_fractals, find_systems

CATEGORIES, INSTANCES = torch.arange(24) % 12, torch.arange(24) // 12
SIZE = (32, 48)


def digest(images: Tensor) -> str:
    return hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16]


def chaos_game(maps_23M: Tensor, side: int) -> Tensor:
    """The published way to draw, in double: which pixels of a square are touched by chains of random maps."""
    maps = maps_23M.double()
    shares = (maps[0, 0] * maps[1, 1] - maps[0, 1] * maps[1, 0]).abs()
    noise = torch.Generator().manual_seed(0)
    x, y = torch.zeros(2, 4000, dtype=torch.float64)
    points: list[Tensor] = []
    for step in range(60):
        chosen = maps[..., torch.multinomial(shares, len(x), replacement=True, generator=noise)]
        x, y = (row[0] * x + row[1] * y + row[2] for row in chosen)
        points += [torch.stack([y, x])] if step >= 30 else []
    yx_2P = torch.cat(points, dim=1)
    low, high = yx_2P.amin(dim=1, keepdim=True), yx_2P.amax(dim=1, keepdim=True)
    rows, columns = ((yx_2P - low) / (high - low) * (side - 1e-6)).long()
    touched = torch.zeros(side, side, dtype=torch.bool)
    touched[rows, columns] = True
    return touched


@pytest.mark.parametrize("mode", ["grey", "colour"])
def test_an_image_is_the_same_in_any_order_and_any_batch(mode: Mode) -> None:
    together = draw_fractals(3, CATEGORIES, INSTANCES, SIZE, mode)
    assert together.dtype == torch.uint8
    assert list(together.shape) == [24, 1 if mode == "grey" else 3, *SIZE]
    backwards = draw_fractals(3, CATEGORIES.flip(0), INSTANCES.flip(0), SIZE, mode).flip(0)
    torch.rand(3)  # the global generator has no say
    alone = torch.cat([draw_fractals(3, CATEGORIES[i : i + 1], INSTANCES[i : i + 1], SIZE, mode) for i in range(24)])
    assert torch.equal(together, backwards) and torch.equal(together, alone)
    assert not torch.equal(together, draw_fractals(4, CATEGORIES, INSTANCES, SIZE, mode))


def test_bytes_are_the_ones_of_the_first_day() -> None:
    """Only operations that IEEE 754 fixes are used, so these hold on every machine; a change is a new data set."""
    keys = torch.tensor([0, 1, 20_999]), torch.tensor([0, 1, 7])
    assert digest(draw_fractals(0, *keys, (64, 64))) == "4ba54b3ded3d5251"
    assert digest(draw_fractals(0, *keys, (64, 64), "colour")) == "d6699ebdfdd6012f"


def test_a_category_does_not_need_the_others() -> None:
    """Found alone or among many, and whatever was found before."""
    alone = find_systems(11, torch.tensor([40]))
    assert torch.equal(find_systems(11, torch.arange(30, 50))[:, :, 10:11], alone)
    assert not torch.equal(find_systems(12, torch.tensor([40])), alone)


def test_all_maps_contract_even_when_stretched_and_are_two_to_seven() -> None:
    maps = find_systems(0, torch.arange(60)).permute(2, 3, 0, 1)
    assert float(torch.linalg.svdvals(maps[..., :2]).max()) <= 5 / 6 + 1e-5
    counts = (maps.flatten(2) != 0).any(dim=2).sum(dim=1)
    assert set(counts.tolist()) == {2, 3, 4, 5, 6, 7}


def test_no_image_is_empty_or_full_and_every_side_is_reached() -> None:
    images = draw_fractals(0, torch.arange(60), torch.zeros(60, dtype=torch.int64), (64, 64))[:, 0]
    fill = (images > 0).double().mean(dim=(1, 2))
    assert float(fill.min()) > 0.2  # the threshold, and a dot only adds
    assert float(fill.max()) < 0.8
    rows, columns = (images > 0).any(dim=2), (images > 0).any(dim=1)
    for edges in (rows, columns):
        assert bool(edges[:, :4].any(dim=1).all()) and bool(edges[:, -4:].any(dim=1).all())


def test_the_tree_of_words_draws_what_the_chaos_game_draws() -> None:
    categories = torch.arange(6)
    images = draw_fractals(0, categories, torch.zeros_like(categories), (128, 128))[:, 0]
    inner = images[:, 1:-1, 1:-1] > 0  # about the margin less
    for image, maps in zip(inner, find_systems(0, categories).unbind(dim=2), strict=True):
        game = chaos_game(maps, side=126)
        grown = torch.nn.functional.max_pool2d(game[None].float(), 5, stride=1, padding=2)[0] > 0
        assert float(grown[image].float().mean()) > 0.99  # nothing where the game has nothing
        near = torch.nn.functional.max_pool2d(image[None].float(), 5, stride=1, padding=2)[0] > 0
        assert float(near[game].float().mean()) > 0.97  # and little is missing: the game also reaches the rarest points


def test_instances_differ_and_the_first_is_the_category() -> None:
    one = torch.zeros(16, dtype=torch.int64)
    images = draw_fractals(0, one, torch.arange(16), (64, 64))
    assert len({digest(image) for image in images}) == 16
    # Instance 0 of the set with one instance and of the one with many are the same image.
    few, many = Fractals(12, 1, (32, 32)), Fractals(12, 5, (32, 32))
    index = torch.arange(12)
    assert torch.equal(few.render(index), many.render(index))


def test_colours_show_the_grey_image() -> None:
    grey = draw_fractals(0, CATEGORIES, INSTANCES, SIZE)
    colour = draw_fractals(0, CATEGORIES, INSTANCES, SIZE, "colour")
    full = grey == 255
    assert bool((colour.amin(dim=1, keepdim=True)[full] >= 64).all())
    assert not bool(colour.amax(dim=1, keepdim=True)[grey == 0].any())
    assert all(len(image.flatten(1).unique(dim=1).T) > 3 for image in colour)


@pytest.mark.slow
def test_categories_can_be_distinguished() -> None:
    """Nearest centroid on blurred pixels: 20 categories, 8 instances to learn from and 8 to test with."""
    data = Fractals(categories=20, instances=17, image_size=(32, 32), seed=5)
    pixels = torch.nn.functional.avg_pool2d(data.render(torch.arange(20, len(data))).float(), 4)
    # Mirrored and turned copies fall together when each image is averaged over the eight symmetries of the square.
    turned = [torch.rot90(flip, turn, (2, 3)) for flip in (pixels, pixels.flip(3)) for turn in range(4)]
    features = torch.stack(turned).mean(dim=0).flatten(1).view(16, 20, -1)
    centroids = features[:8].mean(dim=0)
    guesses = torch.cdist(features[8:], centroids[None].expand(8, -1, -1)).argmin(dim=2)
    accuracy = float((guesses == torch.arange(20)).double().mean())
    assert accuracy > 0.5  # by chance: 0.05


def test_a_set_is_balanced_and_names_its_classes() -> None:
    data = Fractals(categories=7, instances=3, image_size=(16, 16), mode="colour")
    assert len(data) == 21 and len(data.classes) == 7
    assert data.labels.tolist() == list(range(7)) * 3
    assert list(data.render(torch.tensor([20, 0])).shape) == [2, 3, 16, 16]
    assert list(data.render(torch.empty(0, dtype=torch.int64)).shape) == [0, 3, 16, 16]


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Fractals(categories=0),
        lambda: Fractals(instances=-1),
        lambda: Fractals(image_size=(8, 64)),
        lambda: Fractals(image_size=(64, 5000)),
        lambda: Fractals(mode="color"),  # type: ignore[arg-type]
        lambda: Fractals(categories=3, image_size=(16, 16)).render(torch.tensor([3])),
        lambda: Fractals(categories=3, image_size=(16, 16)).render(torch.tensor([-1])),
        lambda: draw_fractals(0, CATEGORIES, INSTANCES[:3], SIZE),
        lambda: draw_fractals(0, torch.tensor([-1]), torch.tensor([0]), SIZE),
    ],
)
def test_what_cannot_be_drawn_is_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        bad()  # type: ignore[operator]


def test_too_many_categories_are_refused_before_they_are_named() -> None:
    with pytest.raises(UsageError, match="at most 1,000,000 categories"):
        Fractals(categories=10**12)
