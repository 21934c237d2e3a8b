"""Random crop boxes of a whole batch in a few array operations.

The boxes are those of `crops.draw_box`, to the pixel: the same keys and the same arithmetic in doubles. Python needs ten
microseconds for one box, which is more than a GPU needs for the image.
Letters: B batch, W those of the batch that still need a box, T turns.
"""

import math

import numpy as np
import torch

from vitlab.core import draws
from vitlab.data.augmentation.crops import INCEPTION_TRIES, TORCHVISION_TRIES, CropRule
from vitlab.data.batches import Places
from vitlab.data.preprocess import Array
from vitlab.data.tags import CROP

_BITS = 53  # that a double holds
_TURNS = 8  # four are the least that a crop needs, and few need more than eight


def draw_boxes(
    rule: CropRule, final: tuple[int, int], heights_B: Array, widths_B: Array, places: Places, seed: int
) -> Array:
    """int64 [B, 4]: top, left, rows and columns within images of these sizes.

    For `squash` and `shorter-side` the images are the resized ones, and every box has the size `final`.
    """
    numbers = _Numbers(seed, places)
    height_B, width_B = heights_B.astype(np.float64), widths_B.astype(np.float64)
    if rule.how == "inception":
        rows_B, cols_B = _inception_sizes(rule, height_B, width_B, numbers)
    elif rule.how == "torchvision":
        return _torchvision_boxes(rule, height_B, width_B, numbers)
    else:
        rows_B, cols_B = np.full_like(height_B, final[0]), np.full_like(width_B, final[1])
    top_B, left_B = _random_places(rows_B, cols_B, height_B, width_B, numbers, np.arange(len(rows_B)))
    return _whole_numbers(top_B, left_B, rows_B, cols_B)


class _Numbers:
    """The next number in [0, 1) of each image; several turns are drawn at once."""

    def __init__(self, seed: int, places: Places) -> None:
        state_B = draws.keyed(seed, CROP, places.epochs, places.ids, places.copies)
        self.key_B1 = draws.shifted(state_B, 1)[:, None]  # `runtime.mix` keeps 63 bits
        self.turn_B = np.zeros(len(state_B), np.int64)
        self.drawn_BT = self._drawn(range(_TURNS))

    def next(self, which_W: Array) -> Array:
        turn_W = self.turn_B[which_W]
        while turn_W.max(initial=0) >= (turns := self.drawn_BT.shape[1]):
            self.drawn_BT = np.concatenate([self.drawn_BT, self._drawn(range(turns, 2 * turns))], axis=1)
        self.turn_B[which_W] += 1
        return self.drawn_BT[which_W, turn_W]

    def _drawn(self, turns: range) -> Array:
        state_BT = draws.keyed(self.key_B1, torch.tensor(turns))
        return (draws.shifted(state_BT, 64 - _BITS).double() * 2**-_BITS).numpy()


def _inception_sizes(rule: CropRule, height_B: Array, width_B: Array, numbers: _Numbers) -> tuple[Array, Array]:
    """Rows and columns, whole numbers as floats; the whole image without a good try."""
    rows_B, cols_B, left = height_B.copy(), width_B.copy(), np.arange(len(height_B))
    least_B, most_B = (share * height_B * width_B for share in rule.area)
    for _ in range(INCEPTION_TRIES):
        height_W, width_W, least_W, most_W = (values[left] for values in (height_B, width_B, least_B, most_B))
        aspect_W = _between(rule.aspect, numbers.next(left))
        low_W = np.rint(np.sqrt(least_W / aspect_W))
        high_W = np.minimum(np.rint(np.sqrt(most_W / aspect_W)), np.floor((width_W + 0.5) / aspect_W))
        high_W = np.minimum(high_W, height_W)
        rows_W, free_W = high_W.copy(), low_W < high_W
        span_W = high_W[free_W] - low_W[free_W] + 1
        rows_W[free_W] = low_W[free_W] + np.floor(numbers.next(left[free_W]) * span_W)
        near_W = rows_W * np.rint(rows_W * aspect_W)
        rows_W += (near_W < least_W).astype(np.float64) - (near_W > most_W)
        cols_W = np.rint(rows_W * aspect_W)
        area_W = rows_W * cols_W
        good_W = (least_W <= area_W) & (area_W <= most_W) & _inside(rows_W, cols_W, height_W, width_W)
        rows_B[left[good_W]], cols_B[left[good_W]] = rows_W[good_W], cols_W[good_W]
        left = left[~good_W]
        if not len(left):
            break
    return rows_B, cols_B


def _torchvision_boxes(rule: CropRule, height_B: Array, width_B: Array, numbers: _Numbers) -> Array:
    """The middle where no try was good."""
    rows_B = np.minimum(height_B, np.maximum(1, np.rint(width_B / rule.aspect[0])))
    cols_B = np.minimum(width_B, np.maximum(1, np.rint(height_B * rule.aspect[1])))
    left, ends = np.arange(len(height_B)), (math.log(rule.aspect[0]), math.log(rule.aspect[1]))
    for _ in range(TORCHVISION_TRIES):
        height_W, width_W = height_B[left], width_B[left]
        area_W = _between(rule.area, numbers.next(left)) * height_W * width_W
        # One by one: numpy's exponential may differ from Python's in the last bit.
        aspect_W = np.array([math.exp(power) for power in _between(ends, numbers.next(left)).tolist()])
        rows_W, cols_W = np.rint(np.sqrt(area_W / aspect_W)), np.rint(np.sqrt(area_W * aspect_W))
        good_W = _inside(rows_W, cols_W, height_W, width_W)
        rows_B[left[good_W]], cols_B[left[good_W]] = rows_W[good_W], cols_W[good_W]
        left = left[~good_W]
        if not len(left):
            break
    top_B, left_B = (height_B - rows_B) // 2, (width_B - cols_B) // 2
    placed = np.setdiff1d(np.arange(len(height_B)), left, assume_unique=True)
    rows_W, cols_W = rows_B[placed], cols_B[placed]
    top_B[placed], left_B[placed] = _random_places(rows_W, cols_W, height_B[placed], width_B[placed], numbers, placed)
    return _whole_numbers(top_B, left_B, rows_B, cols_B)


def _inside(rows_W: Array, cols_W: Array, height_W: Array, width_W: Array) -> Array:
    return (rows_W > 0) & (rows_W <= height_W) & (cols_W > 0) & (cols_W <= width_W)


def _random_places(
    rows_W: Array, cols_W: Array, height_W: Array, width_W: Array, numbers: _Numbers, which_W: Array
) -> tuple[Array, Array]:
    top_W = np.floor(numbers.next(which_W) * (height_W - rows_W + 1))
    return top_W, np.floor(numbers.next(which_W) * (width_W - cols_W + 1))


def _between(ends: tuple[float, float], u_W: Array) -> Array:
    return ends[0] + u_W * (ends[1] - ends[0])


def _whole_numbers(*columns_B: Array) -> Array:
    return np.stack(columns_B, axis=1).astype(np.int64)
