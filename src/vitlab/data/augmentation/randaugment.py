"""RandAugment on batches, in two dialects: AugReg (big_vision) and torchvision.

Both draw `layers` operations per image with replacement, all of one magnitude; each is applied to all of its images at once.
Letters: B batch, C channels, Y X rows and columns.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.augmentation import pixel_ops as ops

Dialect = Literal["augreg", "torchvision"]

OPERATIONS: dict[Dialect, tuple[str, ...]] = {
    "augreg": (
        *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "color", "contrast", "brightness"),
        *("sharpness", "shear-x", "shear-y", "translate-x", "translate-y", "cutout", "solarize-add"),
    ),
    "torchvision": (
        *("identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness", "color", "contrast"),
        *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
    ),
}
_ENHANCEMENTS = ("brightness", "color", "contrast", "sharpness")
DRAWS = 4  # numbers that one layer takes: operation, sign, and the place of a cutout


def randaugment(x_BCYX: Tensor, dialect: Dialect, magnitude: float, draws_BL4: Tensor) -> Tensor:
    """uint8 in and out. `draws` in [0, 1) on the CPU: no GPU is waited for."""
    if x_BCYX.shape[1] not in (1, 3):
        raise UsageError(f"RandAugment is for grey or colour images, not for {x_BCYX.shape[1]} channels")
    names = OPERATIONS[dialect]
    for draws_B4 in draws_BL4.unbind(dim=1):
        chosen_B, order_B = (draws_B4[:, 0] * len(names)).long().sort()
        numbers, counts = chosen_B.unique_consecutive(return_counts=True)
        groups = x_BCYX[order_B.to(x_BCYX.device, non_blocking=True)].split(counts.tolist())
        draws = draws_B4[order_B, 1:].split(counts.tolist())
        changed = [
            operate(group, names[number], dialect, magnitude, draws_B3)
            for number, group, draws_B3 in zip(numbers.tolist(), groups, draws, strict=True)
        ]
        x_BCYX = torch.cat([x_BCYX[:0], *changed])[order_B.argsort().to(x_BCYX.device, non_blocking=True)]
    return x_BCYX


def operate(x_BCYX: Tensor, name: str, dialect: Dialect, magnitude: float, draws_B3: Tensor) -> Tensor:
    """One operation on all images, each with its own sign and place."""
    sign_B = torch.where(draws_B3[:, 0] < 0.5, -1.0, 1.0).double()
    height, width = x_BCYX.shape[2:]
    strength = _strength(name, dialect, magnitude, height, width)
    match name:
        case "identity":
            return x_BCYX
        case "invert" | "autocontrast" | "equalize":
            return getattr(ops, name)(x_BCYX)
        case "posterize":
            return ops.posterize(x_BCYX, int(strength))
        case "solarize":
            return ops.solarize(x_BCYX, strength)
        case "solarize-add":
            return ops.solarize_add(x_BCYX, int(strength))
        case "cutout":
            boxes_B4 = _cutout_boxes(draws_B3[:, 1:], int(strength), height, width)
            mask = ops.box_mask(boxes_B4.to(x_BCYX.device, non_blocking=True), height, width)
            return x_BCYX.masked_fill(mask, _FILL[dialect])
        case _ if name in _ENHANCEMENTS:
            weight_B = torch.full_like(sign_B, strength) if dialect == "augreg" else 1 + sign_B * strength
            return ops.blend(x_BCYX, _plain_side(x_BCYX, name, dialect), weight_B)
        case _:
            return ops.move(x_BCYX, _matrices(name, sign_B * strength, dialect, height, width), _FILL[dialect])


_FILL: dict[Dialect, int] = {"augreg": 128, "torchvision": 0}


def _strength(name: str, dialect: Dialect, magnitude: float, height: int, width: int) -> float:
    """The argument of an operation at this magnitude.

    10 is the strongest of the original policy for augreg, whose 0 is not "no change", and 30 the last of torchvision's bins.
    """
    level = magnitude / (10 if dialect == "augreg" else 30)
    if name == "rotate":
        return 30 * level
    if name.startswith("shear"):
        return 0.3 * level
    if dialect == "torchvision":
        side = width if name == "translate-x" else height
        table = {"posterize": round(8 - 4 * level), "solarize": 255 * (1 - level)}
        return int(150 / 331 * side * level) if name.startswith("translate") else table.get(name, 0.9 * level)
    table = {
        **dict.fromkeys(("translate-x", "translate-y"), 100 * level),
        "posterize": min(max(int(4 * level), 1), 8),  # TensorFlow clamps its shift to 0...7 bits: one bit always stays
        "solarize": int(256 * level) % 256,  # TensorFlow compares bytes: 256 is 0, and magnitude 10 inverts everything
        "solarize-add": int(110 * level),
        "cutout": int(40 * level),
    }
    return table.get(name, 1.8 * level + 0.1)


def _plain_side(x_BCYX: Tensor, name: str, dialect: Dialect) -> Tensor:
    """What the image is blended with: black, grey, one grey level or smooth."""
    match name:
        case "brightness":
            return torch.zeros((), device=x_BCYX.device)
        case "color":
            return ops.grey(x_BCYX, 255.5 / 255 if dialect == "augreg" else 1.0)  # how TensorFlow rounds a grey level
        case "contrast" if dialect == "augreg":
            # big_vision's code means the mean level but adds up the counts of its histogram: pixels / 256, 196 at 224x224,
            # whatever the picture. The published models were trained with it; the code was mended years later.
            return torch.full((), min(x_BCYX.shape[2] * x_BCYX.shape[3] // 256, 255), device=x_BCYX.device)
        case "contrast":
            return ops.mean_grey(x_BCYX)
        case _:
            smooth = ops.smooth(x_BCYX)
            return smooth.floor() if dialect == "augreg" else smooth.round()


def _matrices(name: str, strength_B: Tensor, dialect: Dialect, height: int, width: int) -> Tensor:
    """[B, 2, 3], double: where a pixel comes from, from the upper left."""
    matrix_B23 = torch.eye(2, 3, dtype=torch.float64).repeat(len(strength_B), 1, 1)
    if name == "rotate":
        cos, sin = (strength_B * math.pi / 180).cos(), (strength_B * math.pi / 180).sin()
        matrix_B23[:, :, :2] = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
        centre = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
        matrix_B23[:, :, 2] = centre - matrix_B23[:, :, :2] @ centre
        return matrix_B23
    axis = 0 if name.endswith("x") else 1
    if name.startswith("shear"):
        matrix_B23[:, axis, 1 - axis] = strength_B
        matrix_B23[:, axis, 2] = strength_B * (0.0 if dialect == "augreg" else 0.5)  # torchvision's corner is half off
    else:
        matrix_B23[:, axis, 2] = strength_B
    return matrix_B23


def _cutout_boxes(place_B2: Tensor, half: int, height: int, width: int) -> Tensor:
    """A square around a random pixel, cut off at the edges."""
    centre_B2 = (place_B2.double() * torch.tensor([height, width])).long()
    return torch.stack([centre_B2 - half, centre_B2 + half], dim=2).flatten(1)
