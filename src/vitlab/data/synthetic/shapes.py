"""Scenes of simple shapes with exact labels: count, location, orientation, kind.

A stand-in for the structured tasks of VTAB. Every scene follows from (seed, index). The drawing only adds, multiplies and takes
roots, each operation by itself, so that a GPU draws the bytes of a CPU; it does not divide by numbers, which a GPU does by
multiplying with the inverse. Letters: B images, S places for shapes, W shapes of all images, Y X rows and columns.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from vitlab.core.draws import uniform
from vitlab.core.errors import UsageError, require_choice
from vitlab.data.synthetic.settings import (
    BINS,
    MOST_SHAPES,
    SHAPE_KINDS,
    TASK_CLASSES,
    ShapeSettings,
    Task,
    require_indices,
    require_scene_size,
)

_DIRECTED = SHAPE_KINDS[5:]  # no turn but a full one brings them back to themselves
_GRID = 4  # scenes of several shapes have at most one in each of 4x4 cells, so that none hides another
_RADIUS = (0.12, 0.20)  # of the shorter side, for one shape
_SMALL_RADIUS = (0.07, 0.10)  # for several: the cell they must stay in is 0.25 wide
_GAP = 0.01  # from the edge of a cell, so that neighbours never touch

_SCENE, _SHAPE = range(2)  # keep the uses of one seed apart


@dataclasses.dataclass(frozen=True)
class Scenes:
    """The factors of B scenes with up to S shapes, of which `count_B` are drawn.

    Places go from 0 to 1, left to right and top to bottom; a radius is a share of the shorter side; an angle is in turns,
    clockwise from a shape that points to the right.
    """

    count_B: Tensor
    kind_BS: Tensor
    x_BS: Tensor
    y_BS: Tensor
    radius_BS: Tensor
    angle_BS: Tensor
    colour_BS3: Tensor
    ground_B3: Tensor
    stripes_B4: Tensor  # waves per side along x and y, phase, strength

    def labels(self, task: Task) -> Tensor:
        """The class of every scene, int64 [B]; of the first shape but for `count`."""
        require_choice("task", task, tuple(TASK_CLASSES))
        low, high = _RADIUS[1], 1 - _RADIUS[1]
        match task:
            case "count":
                return self.count_B - 1
            case "kind":
                return self.kind_BS[:, 0]
            case "orientation":
                return (self.angle_BS[:, 0] * BINS).long()
            case "location-x":
                return ((self.x_BS[:, 0] - low) / (high - low) * BINS).long()
            case "location-y":
                return ((self.y_BS[:, 0] - low) / (high - low) * BINS).long()


@dataclasses.dataclass(frozen=True)
class Shapes(ShapeSettings):
    """The scenes of a set, and their labels."""

    @functools.cached_property
    def labels(self) -> Tensor:
        parts = torch.arange(self.count).split(2**14)  # the factors of all scenes at once could fill the memory
        return torch.cat([make_scenes(self.seed, part, self.task).labels(self.task) for part in parts])

    def render(self, indices_B: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The images at `indices_B`, uint8 [B, 3, Y, X]."""
        require_indices(indices_B.tolist(), len(self))
        return draw_shapes(self.seed, indices_B, self.image_size, self.task, device)[0]


def make_scenes(seed: int, indices_B: Tensor, task: Task) -> Scenes:
    """The factors of scenes; the task decides the number of shapes and the kinds."""
    require_choice("task", task, tuple(TASK_CLASSES))
    indices_B = indices_B.cpu()
    u_BD = uniform(seed, _SCENE, indices_B, count=_GRID**2 + 8)
    u_BS8 = uniform(seed, _SHAPE, indices_B[:, None], torch.arange(MOST_SHAPES), count=8)
    several = task == "count"
    kinds = torch.tensor([i for i, kind in enumerate(SHAPE_KINDS) if task != "orientation" or kind in _DIRECTED])
    low, high = _SMALL_RADIUS if several else _RADIUS
    if several:
        cell_BS = u_BD[:, : _GRID**2].argsort(dim=1, stable=True)[:, :MOST_SHAPES]
        slack = 0.5 / _GRID - high - _GAP  # how far a shape may lie from the middle of its cell
        x_BS, y_BS = (
            (cell + 0.5) / _GRID + slack * (2 * u_BS8[..., i] - 1)
            for i, cell in enumerate((cell_BS % _GRID, cell_BS // _GRID))
        )
    else:
        x_BS, y_BS = (_RADIUS[1] + (1 - 2 * _RADIUS[1]) * _mid_bin(u_BS8[..., i]) for i in (0, 1))
    tint_BS3 = u_BS8[..., 5:]
    return Scenes(
        count_B=1 + (u_BD[:, -8] * MOST_SHAPES).long() if several else torch.ones_like(indices_B),
        kind_BS=kinds[(u_BS8[..., 2] * len(kinds)).long()],
        x_BS=x_BS,
        y_BS=y_BS,
        radius_BS=low + (high - low) * u_BS8[..., 3],
        angle_BS=_mid_bin(u_BS8[..., 4]),
        colour_BS3=tint_BS3 / tint_BS3.amax(dim=2, keepdim=True).clamp_min(0.01),  # the strongest channel is full
        ground_B3=u_BD[:, -7:-4] * 0.3,  # dark, so that every shape is seen
        stripes_B4=torch.stack(
            # Up to 8 waves either way and 0.15 strong; in half of the scenes the strength is 0.
            [*((u_BD[:, -4:-2] * 16 - 8).unbind(dim=1)), u_BD[:, -2], (0.3 * u_BD[:, -1] - 0.15).clamp_min(0)],
            dim=1,
        ),
    )


def _mid_bin(u: Tensor) -> Tensor:
    """Move a number into the middle half of its bin: labels must be decidable."""
    scaled = u * BINS
    return (scaled.floor() + 0.25 + 0.5 * (scaled - scaled.floor())) / BINS


def draw_shapes(
    seed: int, indices_B: Tensor, image_size: tuple[int, int], task: Task, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Images uint8 [B, 3, Y, X] and their labels int64 [B], both on `device`."""
    require_scene_size(image_size)
    if indices_B.dim() != 1:
        raise UsageError(f"indices must be a row of numbers, not of shape {list(indices_B.shape)}")
    scenes = make_scenes(seed, indices_B, task)
    return draw_scenes(scenes, image_size, device), scenes.labels(task).to(device)


def draw_scenes(scenes: Scenes, image_size: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    """Images uint8 [B, 3, Y, X], with edges antialiased by distance."""
    height, width = image_size
    x_X, y_Y1 = (torch.arange(side, device=device) + 0.5 for side in (width, height))
    y_Y1 = y_Y1[:, None]
    wave_x, wave_y, phase, strength = (part[:, None, None] for part in scenes.stripes_B4.to(device).unbind(dim=1))
    wave_BYX = wave_x * (x_X * (1 / width)) + wave_y * (y_Y1 * (1 / height)) + phase
    stripes_BYX = strength * (2 * (wave_BYX - wave_BYX.floor()) - 1).abs()
    image_B3YX = scenes.ground_B3.to(device)[:, :, None, None] + stripes_BYX[:, None]
    radius_BS, turn_BS = scenes.radius_BS * min(image_size), scenes.angle_BS.double() * 2 * math.pi
    cos_BS, sin_BS = (turn_BS.cos() / radius_BS).float(), (turn_BS.sin() / radius_BS).float()
    factors = torch.stack([scenes.x_BS * width, scenes.y_BS * height, radius_BS, cos_BS, sin_BS], dim=2)
    factors_BS8 = torch.cat([factors, scenes.colour_BS3], dim=2).to(device)
    for place in range(int(scenes.count_B.max()) if len(scenes.count_B) else 0):
        kind_B = torch.where(scenes.count_B > place, scenes.kind_BS[:, place], -1)
        for number in kind_B[kind_B >= 0].unique().tolist():
            rows_W = (kind_B == number).nonzero()[:, 0].to(device)
            x, y, radius, cos, sin, *colour = factors_BS8[rows_W, place][..., None, None].unbind(dim=1)
            ahead, aside = (x_X - x) * cos + (y_Y1 - y) * sin, (y_Y1 - y) * cos - (x_X - x) * sin
            cover = (0.5 - _distance(SHAPE_KINDS[number], ahead, aside) * radius).clamp(0, 1)[:, None]
            under = image_B3YX[rows_W]
            image_B3YX[rows_W] = under + (torch.stack(colour, dim=1) - under) * cover
    return (image_B3YX * 255 + 0.5).clamp(0, 255).to(torch.uint8)


def _distance(kind: str, u: Tensor, v: Tensor) -> Tensor:
    """How far (u, v) is outside a shape that points along u; negative inside.

    Each shape fits into the unit circle and has its centre of mass at the origin or close to it.
    """
    match kind:
        case "disc":
            return (u * u + v * v).sqrt() - 1
        case "ring":
            return ((u * u + v * v).sqrt() - 0.7).abs() - 0.3
        case "square":
            return torch.maximum(u.abs(), v.abs()) - 0.7
        case "cross":
            return torch.minimum(_box(u, v, 0.95, 0.3), _box(u, v, 0.3, 0.95))
        case "star":
            # A pentagram is what at least four of five half-planes share; their edges are cos 72 degrees from the middle.
            angles = [math.radians(36 + 72 * tip) for tip in range(5)]
            sides = torch.stack([u * math.cos(angle) + v * math.sin(angle) for angle in angles])
            return sides.sort(dim=0).values[3] - math.cos(math.radians(72))
        case "triangle":  # from (1, 0) to (-0.5, ±0.5): long, because an equilateral one would point three ways
            return torch.maximum(-0.5 - u, _slope(u, v, 1.5, 0.5))
        case "half-disc":
            shifted = u + 0.38
            return torch.maximum((shifted * shifted + v * v).sqrt() - 0.9, -shifted)
        case _:  # an arrow: a head from (1, 0) to (0.1, ±0.6), and a shaft
            head = torch.maximum(0.1 - u, _slope(u, v, 0.9, 0.6))
            return torch.minimum(head, _box(u + 0.42, v, 0.53, 0.2))


def _box(u: Tensor, v: Tensor, half_length: float, half_width: float) -> Tensor:
    return torch.maximum(u.abs() - half_length, v.abs() - half_width)


def _slope(u: Tensor, v: Tensor, length: float, half_width: float) -> Tensor:
    """Distance from the two flanks of an arrowhead with its tip at (1, 0)."""
    return ((u - 1.0) * half_width + v.abs() * length) * (1 / math.hypot(half_width, length))
