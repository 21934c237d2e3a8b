"""Scenes of shapes: pure functions of (seed, index), whose labels can be measured in the pixels."""

import dataclasses
import hashlib
import math
from typing import get_args

import pytest
import torch
from scipy import ndimage
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.synthetic.settings import SHAPE_KINDS
from vitlab.data.synthetic.shapes import Scenes, Shapes, Task, draw_scenes, draw_shapes, make_scenes

TASKS: tuple[Task, ...] = get_args(Task)
SIZE = (64, 80)


def plain(scenes: Scenes) -> Scenes:
    """The same shapes, white on black."""
    return dataclasses.replace(
        scenes,
        colour_BS3=torch.ones_like(scenes.colour_BS3),
        ground_B3=torch.zeros_like(scenes.ground_B3),
        stripes_B4=torch.zeros_like(scenes.stripes_B4),
    )


def ink(scenes: Scenes, size: tuple[int, int] = SIZE) -> Tensor:
    """How much of each pixel is covered, in double [B, Y, X]."""
    return draw_scenes(plain(scenes), size)[:, 0].double() / 255


def centroids(ink_BYX: Tensor) -> tuple[Tensor, Tensor]:
    """(x, y) as shares of the sides."""
    total = ink_BYX.sum(dim=(1, 2))
    across, down = ((torch.arange(side) + 0.5).double() / side for side in (ink_BYX.shape[2], ink_BYX.shape[1]))
    return ink_BYX.sum(dim=1) @ across / total, ink_BYX.sum(dim=2) @ down / total


@pytest.mark.parametrize("task", TASKS)
def test_a_scene_is_the_same_in_any_order_and_any_batch(task: Task) -> None:
    index = torch.arange(40)
    images, labels = draw_shapes(1, index, SIZE, task)
    assert images.dtype == torch.uint8 and list(images.shape) == [40, 3, *SIZE]
    backwards, labels_backwards = draw_shapes(1, index.flip(0), SIZE, task)
    torch.rand(3)  # the global generator has no say
    alone = torch.cat([draw_shapes(1, index[i : i + 1], SIZE, task)[0] for i in range(0, 40, 8)])
    assert torch.equal(backwards.flip(0), images) and torch.equal(labels_backwards.flip(0), labels)
    assert torch.equal(alone, images[::8])
    assert not torch.equal(draw_shapes(2, index, SIZE, task)[0], images)
    assert len({hashlib.sha256(image.numpy().tobytes()).digest() for image in images}) == 40


@pytest.mark.parametrize("task", TASKS)
def test_labels_use_every_class_and_none_too_often(task: Task) -> None:
    data = Shapes(task, count=4000)
    counts = torch.bincount(data.labels, minlength=len(data.classes))
    expected = 4000 / len(data.classes)
    assert len(counts) == len(data.classes)
    assert float((counts - expected).abs().max()) < 5 * math.sqrt(expected)


def test_count_is_the_number_of_separate_shapes() -> None:
    scenes = make_scenes(0, torch.arange(150), "count")
    around = torch.ones(3, 3)  # corners connect
    found = [ndimage.label(image.numpy() > 0, around)[1] for image in ink(scenes, (128, 128))]
    assert (torch.tensor(found) - 1).tolist() == scenes.labels("count").tolist()


@pytest.mark.parametrize(("task", "axis"), [("location-x", 0), ("location-y", 1)])
def test_location_is_where_the_ink_is(task: Task, axis: int) -> None:
    scenes = make_scenes(0, torch.arange(200), task)
    place = centroids(ink(scenes, (96, 96)))[axis]
    bins = ((place - 0.2) / 0.6 * 16).floor().long()  # centres lie from 0.2 to 0.8
    balanced = scenes.kind_BS[:, 0] < SHAPE_KINDS.index("half-disc")  # the centre of mass of the others is a little off
    assert (bins - scenes.labels(task))[balanced].tolist() == [0] * int(balanced.sum())
    assert int((bins - scenes.labels(task)).abs().max()) <= 1


def test_orientation_is_where_the_shape_points() -> None:
    scenes = make_scenes(0, torch.arange(200), "orientation")
    covered = ink(scenes, (128, 128))
    across, down = (torch.arange(128) + 0.5).double()[None, None, :], (torch.arange(128) + 0.5).double()[None, :, None]
    dx, dy = (across - scenes.x_BS[:, :1, None] * 128), (down - scenes.y_BS[:, :1, None] * 128)
    angle = scenes.angle_BS[:, :1, None].double() * 2 * math.pi
    ahead, aside = dx * angle.cos() + dy * angle.sin(), dy * angle.cos() - dx * angle.sin()
    total = covered.sum(dim=(1, 2))
    left_minus_right = (covered * aside.sign()).sum(dim=(1, 2)) / total
    assert float(left_minus_right.abs().max()) < 0.03  # every shape here is its own mirror image about its direction
    kinds, inside = scenes.kind_BS[:, 0], covered > 0.5
    assert set(kinds.tolist()) == {SHAPE_KINDS.index(name) for name in ("triangle", "half-disc", "arrow")}
    farthest, nearest = (ahead * inside).amax(dim=(1, 2)), -(ahead * inside).amin(dim=(1, 2))
    ends = kinds != SHAPE_KINDS.index("arrow")
    assert bool((farthest > 1.2 * nearest)[ends].all())  # a tip or a round side in front, the flat side behind
    width = (covered * aside.abs() * ahead.sign()).sum(dim=(1, 2))
    assert bool((width > 0)[~ends].all())  # the head in front, the shaft behind
    assert torch.equal(scenes.labels("orientation"), (scenes.angle_BS[:, 0] * 16).long())


@pytest.mark.slow
def test_kinds_have_their_areas() -> None:
    """In units of the radius squared; of the star, that of a pentagram in the unit circle."""
    pentagram = 5 * math.sin(math.radians(36)) * math.sin(math.radians(18)) / math.sin(math.radians(126))
    arrow = 0.6 * 0.9 + 0.4 * (0.1 + 0.95)
    cross = 2 * (1.9 * 0.6) - 0.6**2
    areas = [math.pi, math.pi * (1 - 0.4**2), 1.4**2, cross, pentagram, 0.75, math.pi * 0.9**2 / 2, arrow]
    scenes = make_scenes(0, torch.arange(400), "kind")
    radius = (scenes.radius_BS[:, 0] * 128).double()
    found = ink(scenes, (128, 128)).sum(dim=(1, 2)) / radius**2
    kinds = scenes.labels("kind")
    for number, area in enumerate(areas):
        mean = float(found[kinds == number].mean())
        assert mean == pytest.approx(area, rel=0.03), SHAPE_KINDS[number]


def test_shapes_keep_their_form_in_a_wide_image_and_stay_inside() -> None:
    scenes = make_scenes(0, torch.arange(100), "kind")
    wide, square = ink(scenes, (64, 128)), ink(scenes, (64, 64))
    ratio = wide.sum(dim=(1, 2)) / square.sum(dim=(1, 2))
    assert float((ratio - 1).abs().max()) < 0.05
    assert not bool(wide[:, 0].any() or wide[:, -1].any() or wide[:, :, 0].any() or wide[:, :, -1].any())


def test_every_shape_stands_out_from_its_ground() -> None:
    scenes = make_scenes(0, torch.arange(200), "kind")
    images, inside = draw_scenes(scenes, (64, 64)), ink(scenes, (64, 64)) == 1
    ground = images.amax(dim=1)[ink(scenes, (64, 64)) == 0]
    assert int(ground.max()) < 0.46 * 255  # 0.3, and stripes of 0.15
    assert int(images.amax(dim=1)[inside].min()) >= 254


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Shapes("colour"),  # type: ignore[arg-type]
        lambda: Shapes(count=0),
        lambda: Shapes(image_size=(8, 64)),
        lambda: Shapes(count=3).render(torch.tensor([3])),
        lambda: Shapes(count=3).render(torch.tensor([-1])),
        lambda: draw_shapes(0, torch.zeros(2, 2, dtype=torch.int64), SIZE, "kind"),
        lambda: make_scenes(0, torch.arange(3), "kind").labels("size"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_drawn_is_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        bad()  # type: ignore[operator]
