"""What the name of a synthetic set says, such as `fractals:categories=1000,image_size=64`: its classes and sizes.

Owns the settings and their limits; `fractals` and `shapes` generate the images. Loads no torch: sets are listed at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from vitlab.core import config
from vitlab.core.errors import UsageError, require_choice

Mode = Literal["grey", "colour"]
Task = Literal["count", "location-x", "location-y", "orientation", "kind"]
CHANNELS: dict[Mode, int] = {"grey": 1, "colour": 3}
_SMALLEST, _LARGEST = 16, 2048  # pixels: smaller ones show nothing, and float32 cannot count those of a larger grid
_MOST_CATEGORIES = 1_000_000  # 50 times the published sets; their names alone take a hundred megabytes
SHAPE_KINDS = ("disc", "ring", "square", "cross", "star", "triangle", "half-disc", "arrow")
MOST_SHAPES = 8  # in a scene
BINS = 16  # of location and of orientation, as in VTAB's dSprites tasks
TASK_CLASSES: dict[Task, tuple[str, ...]] = {
    "count": tuple(str(count + 1) for count in range(MOST_SHAPES)),
    "location-x": tuple(f"column {place}" for place in range(BINS)),
    "location-y": tuple(f"row {place}" for place in range(BINS)),
    "orientation": tuple(f"{360 * place // BINS} degrees" for place in range(BINS)),
    "kind": SHAPE_KINDS,
}
TITLES = {"fractals": "Fractals, generated on demand", "shapes": "Scenes of shapes, generated on demand"}
# The name alone is a set with a test part, which a CPU draws in seconds.
ALONE = {"fractals": "fractals:categories=100,instances=100,image_size=32", "shapes": "shapes"}
_TEST_SHARE = 5  # one image is drawn to test for every five to train on,
_MOST_TESTED = 10_000  # up to this many: to draw them takes time, and an interval of a point is narrow enough


@dataclasses.dataclass(frozen=True)
class FractalSettings:
    """A set of `categories * instances` images; image i shows category i % categories.

    With one instance, the category itself is its only image (arXiv 2307.14710).
    """

    categories: int = 1000
    instances: int = 1
    image_size: tuple[int, int] = (224, 224)
    mode: Mode = "grey"
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, tuple(CHANNELS))
        require_fractal_size(self.image_size)
        if self.categories < 1 or self.instances < 1:
            raise UsageError(f"{self.categories} categories of {self.instances} instances give no image at all")
        if self.categories > _MOST_CATEGORIES:
            raise UsageError(f"fractals have at most {_MOST_CATEGORIES:,} categories, not {self.categories:,}")

    def __len__(self) -> int:
        return self.categories * self.instances

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(f"fractal-{category:05d}" for category in range(self.categories))

    @property
    def test_images(self) -> int:
        """Further instances of each category; none where a category is its only image."""
        each = min(self.instances // _TEST_SHARE, _MOST_TESTED // self.categories)
        return max(1, each) * self.categories if self.instances > 1 else 0


@dataclasses.dataclass(frozen=True)
class ShapeSettings:
    """A set of `count` labelled scenes for one task."""

    task: Task = "count"
    count: int = 10_000
    image_size: tuple[int, int] = (64, 64)
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("task", self.task, tuple(TASK_CLASSES))
        require_scene_size(self.image_size)
        if self.count < 1:
            raise UsageError(f"a set of {self.count} scenes is not a set")

    def __len__(self) -> int:
        return self.count

    @property
    def classes(self) -> tuple[str, ...]:
        return TASK_CLASSES[self.task]

    @property
    def test_images(self) -> int:
        return min(max(1, self.count // _TEST_SHARE), _MOST_TESTED)


Settings = FractalSettings | ShapeSettings
KINDS: Mapping[str, type[FractalSettings] | type[ShapeSettings]] = {
    "fractals": FractalSettings,
    "shapes": ShapeSettings,
}


_T = TypeVar("_T")


def is_synthetic(name: str) -> bool:
    return name.partition(":")[0] in KINDS


def read_name(name: str, kinds: Mapping[str, type[_T]]) -> _T:
    """The settings in a name, as the class that `kinds` has for it."""
    kind, _, text = ALONE.get(name, name).partition(":")
    settings = config.with_overrides({}, [part for part in text.split(",") if part]) if text else {}
    if isinstance(side := settings.get("image_size"), int):
        settings["image_size"] = [side, side]
    return config.from_dict(kinds[kind], settings, f"{kind}:")


def part_sizes(settings: Settings) -> dict[str, int]:
    """Images of each part, before any is drawn."""
    sizes = {"train": len(settings), "test": settings.test_images}
    return {part: count for part, count in sizes.items() if count}


def require_indices(indices: Sequence[int], count: int) -> None:
    if indices and not 0 <= min(indices) <= max(indices) < count:
        raise UsageError(f"indices of this set go from 0 to {count - 1}, not {min(indices)} to {max(indices)}")


def require_fractal_size(image_size: tuple[int, int]) -> None:
    if min(image_size) < _SMALLEST or max(image_size) > _LARGEST:
        raise UsageError(
            f"a fractal has sides from {_SMALLEST} to {_LARGEST} pixels, not {image_size[0]}x{image_size[1]}"
        )


def require_scene_size(image_size: tuple[int, int]) -> None:
    if min(image_size) < _SMALLEST:  # below, the kinds cannot be told apart
        raise UsageError(f"a scene needs sides of {_SMALLEST} pixels at least, not {image_size[0]}x{image_size[1]}")
