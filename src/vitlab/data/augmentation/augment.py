"""Random augmentation of training images, batched, on whatever device they are.

`augment` is a pure function of (seed, epoch, sample, copy): neither the batch nor the worker matters.
Letters: B batch, C channels, Y X rows and columns.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.core import draws
from vitlab.core.errors import UsageError
from vitlab.data.augmentation import pixel_ops as ops
from vitlab.data.augmentation import randaugment
from vitlab.data.rules import AugmentRule
from vitlab.data.tags import AFFINE, ERASE, JITTER, MIRROR, RANDAUGMENT, SHIFT

_GREY = 128  # the middle, where most models have their zero
_TRIES = 10  # for a box that fits; torchvision's and timm's number


def augment(
    images_BCYX: Tensor,
    ids_B: Tensor,
    rule: AugmentRule,
    *,
    seed: int,
    epoch: int | Tensor,
    copy: int | Tensor = 0,
) -> Tensor:
    """Augment a batch, uint8 in and out. `epoch` and `copy` may be int64 [B].

    Random numbers are drawn on the CPU, a few per image: no step waits for the GPU to know its groups.
    """

    def draw(tag: int, count: int) -> Tensor:
        return draws.uniform(seed, tag, epoch, ids_B.cpu(), copy, count=count)

    if rule.mirror or rule.upside_down:
        u_B2 = draw(MIRROR, 2)
        images_BCYX = _flip(images_BCYX, u_B2[:, 0] < rule.mirror, 3)
        images_BCYX = _flip(images_BCYX, u_B2[:, 1] < rule.upside_down, 2)
    if rule.turn_deg or rule.zoom or rule.shift_frac:
        images_BCYX = _affine(images_BCYX, rule, draw(AFFINE, 4))
    if rule.shift_px:
        images_BCYX = _shift(images_BCYX, rule, draw(SHIFT, 2))
    if rule.randaugment != "none" and rule.layers:
        u_BL4 = draw(RANDAUGMENT, rule.layers * randaugment.DRAWS).unflatten(1, (rule.layers, randaugment.DRAWS))
        images_BCYX = randaugment.randaugment(images_BCYX, rule.randaugment, rule.magnitude, u_BL4)
    if rule.brightness or rule.contrast or rule.saturation or rule.hue:
        images_BCYX = _jitter(images_BCYX, rule, draw(JITTER, 8))
    if rule.erase:
        images_BCYX = _erase(images_BCYX, rule, draw(ERASE, 1 + 4 * _TRIES))
    return images_BCYX


def _flip(images_BCYX: Tensor, which_B: Tensor, axis: int) -> Tensor:
    """Chosen by masks of bits: `where` and indexing are ten times slower on bytes."""
    if not which_B.any():
        return images_BCYX
    mask_B = which_B.to(torch.uint8) * 255
    mask = mask_B.to(images_BCYX.device, non_blocking=True).view(-1, 1, 1, 1)  # a GPU may be busy: nobody waits for it
    return images_BCYX.flip(axis).bitwise_xor_(images_BCYX).bitwise_and_(mask).bitwise_xor_(images_BCYX)


def _jitter(images_BCYX: Tensor, rule: AugmentRule, u_B8: Tensor) -> Tensor:
    """The first four draws say how much, the others in which order."""
    if images_BCYX.shape[1] not in (1, 3):
        raise UsageError(f"colour jitter is for grey or colour images, not for {images_BCYX.shape[1]} channels")
    spans = torch.tensor([rule.brightness, rule.contrast, rule.saturation, rule.hue])
    shift_B4 = (2 * u_B8[:, :4] - 1) * spans
    order_B4 = u_B8[:, 4:].argsort(dim=1)
    images_BCYX = images_BCYX.clone()
    for turn in range(4):
        for kind in spans.nonzero()[:, 0].tolist():
            group = (order_B4[:, turn] == kind).nonzero()[:, 0]
            if len(group):
                place = group.to(images_BCYX.device, non_blocking=True)
                changed = _jitter_one(images_BCYX[place], kind, shift_B4[group, kind])
                images_BCYX.index_copy_(0, place, changed)
    return images_BCYX


def _jitter_one(x_BCYX: Tensor, kind: int, shift_B: Tensor) -> Tensor:
    factor_B = (1 + shift_B).clamp_min(0)
    match kind:
        case 0:
            return ops.blend(x_BCYX, torch.zeros((), device=x_BCYX.device), factor_B)
        case 1:
            return ops.blend(x_BCYX, ops.mean_grey(x_BCYX), factor_B)
        case 2:
            return ops.blend(x_BCYX, ops.grey(x_BCYX), factor_B)
        case _:
            return ops.shift_hue(x_BCYX, shift_B)


def _erase(images_BCYX: Tensor, rule: AugmentRule, u_Bn: Tensor) -> Tensor:
    """A grey box where one of some tries fits inside the image."""
    height, width = images_BCYX.shape[2:]
    area_BT, shape_BT, down_BT, across_BT = u_Bn[:, 1:].double().chunk(4, dim=1)
    low, high = rule.erase_area
    area_BT = (low + area_BT * (high - low)) * height * width
    low, high = math.log(rule.erase_aspect[0]), math.log(rule.erase_aspect[1])
    aspect_BT = (low + shape_BT * (high - low)).exp()
    rows_BT, cols_BT = (area_BT * aspect_BT).sqrt().round(), (area_BT / aspect_BT).sqrt().round()
    top_BT = (down_BT * (height - rows_BT + 1)).floor()
    left_BT = (across_BT * (width - cols_BT + 1)).floor()
    fits_BT = (rows_BT < height) & (cols_BT < width)
    first_B1 = fits_BT.int().argmax(dim=1, keepdim=True)
    corners = (top_BT, top_BT + rows_BT, left_BT, left_BT + cols_BT)
    boxes_B4 = torch.cat([corner.gather(1, first_B1) for corner in corners], dim=1).long()
    wanted_B = (u_Bn[:, 0] < rule.erase) & fits_BT.any(dim=1)
    mask = ops.box_mask(boxes_B4, height, width) & wanted_B.view(-1, 1, 1, 1)
    return images_BCYX.masked_fill(mask.to(images_BCYX.device, non_blocking=True), _GREY)


def _shift(images_BCYX: Tensor, rule: AugmentRule, u_B2: Tensor) -> Tensor:
    matrix_B23 = torch.eye(2, 3, dtype=torch.float64).repeat(len(u_B2), 1, 1)
    matrix_B23[:, :, 2] = (u_B2.double() * (2 * rule.shift_px + 1)).floor() - rule.shift_px
    return ops.move(images_BCYX, matrix_B23, rule.fill)


def _affine(images_BCYX: Tensor, rule: AugmentRule, u_B4: Tensor) -> Tensor:
    """Rotate, zoom and shift each image, bilinear; `fill` comes from outside."""
    u_B4 = (u_B4 * 2 - 1).to(images_BCYX.device, non_blocking=True)
    angle, scale = u_B4[:, 0] * math.radians(rule.turn_deg), 1 + u_B4[:, 1] * rule.zoom
    cos, sin = angle.cos() * scale, angle.sin() * scale
    shift_x, shift_y = u_B4[:, 2] * 2 * rule.shift_frac, u_B4[:, 3] * 2 * rule.shift_frac  # the grid spans -1 to 1
    rows = torch.stack([torch.stack([cos, -sin, shift_x], 1), torch.stack([sin, cos, shift_y], 1)], 1)
    grid = F.affine_grid(rows, list(images_BCYX.shape), align_corners=False)
    moved = F.grid_sample(images_BCYX.float() - rule.fill, grid, mode="bilinear", align_corners=False) + rule.fill
    return moved.round().clamp(0, 255).to(torch.uint8)
