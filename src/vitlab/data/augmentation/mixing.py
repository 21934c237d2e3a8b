"""MixUp and CutMix of neighbours: a pure function of (seed, step, position).

Partners are the pairs (0, 1), (2, 3) ... of the shuffled batch: as random as any, and never on two ranks where each holds an
even number of images, so that one process or eight give the same batch. (big_vision rolls each device's share by one, which
depends on how many there are.) Letters: B batch, C channels, Y X rows and columns, K classes.
"""

import torch
from torch import Tensor

from vitlab.core import draws
from vitlab.core.errors import UsageError
from vitlab.data.augmentation.pixel_ops import box_mask
from vitlab.data.rules import MixRule
from vitlab.data.tags import MIX


def mix(
    images_BCYX: Tensor,
    targets_BK: Tensor,
    positions_B: Tensor,
    rule: MixRule,
    *,
    seed: int,
    step: int | Tensor,
    total: int,
    valid_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mixed images (uint8 or float, as given) and mixed targets (probabilities).

    `step` may be int64 [B]: images of several steps are mixed at once. `positions_B` are places in the batch of `total` over
    all ranks. The last of an odd batch stays as it is, and so does one whose partner is not `valid_B`.
    """
    if not (rule.mixup or rule.cutmix):
        return images_BCYX, targets_BK
    partner_B = partners(positions_B.cpu(), total, step)
    if valid_B is not None:
        partner_B = torch.where(valid_B.cpu()[partner_B], partner_B, torch.arange(len(partner_B)))
    partner_B = partner_B.to(images_BCYX.device, non_blocking=True)
    keys_B = positions_B.cpu() if rule.per == "sample" else torch.zeros_like(positions_B, device="cpu")
    cut_B = torch.full(keys_B.shape, rule.cutmix > 0)
    if rule.mixup and rule.cutmix:
        cut_B = draws.uniform(seed, MIX, step, keys_B, 0, count=1)[:, 0] < 0.5
    height, width = images_BCYX.shape[2:]
    boxes_B4 = _cutmix_boxes(rule, seed, step, keys_B, height, width).where(cut_B[:, None], 0)
    covered_B = (boxes_B4[:, 1] - boxes_B4[:, 0]) * (boxes_B4[:, 3] - boxes_B4[:, 2]) / (height * width)
    weight_B = torch.where(cut_B, 1, _mixup_weights(rule, seed, step, keys_B)).float()
    weight_B = weight_B.to(images_BCYX.device, non_blocking=True)
    mixed = _blend(images_BCYX, images_BCYX[partner_B], weight_B.view(-1, 1, 1, 1))
    inside = box_mask(boxes_B4.to(images_BCYX.device, non_blocking=True), height, width)
    mixed = torch.where(inside, images_BCYX[partner_B], mixed)
    share_BK = (weight_B - covered_B.to(weight_B)).view(-1, 1)
    return mixed, share_BK * targets_BK + (1 - share_BK) * targets_BK[partner_B]


def partners(positions_B: Tensor, total: int, step: int | Tensor = 0) -> Tensor:
    """Where the partner of each image is; an error if not among these images."""
    wanted_B = torch.where(positions_B ^ 1 < total, positions_B ^ 1, positions_B)
    found_B = torch.arange(len(positions_B)) + wanted_B - positions_B
    inside_B = found_B.clamp(0, len(positions_B) - 1)
    step_B = torch.as_tensor(step).expand(len(positions_B))
    if not (torch.equal(positions_B[inside_B], wanted_B) and torch.equal(step_B[inside_B], step_B)):
        raise UsageError(
            "MixUp and CutMix pair neighbours: each process needs an even number of images in a row",
            hint="Choose a batch size that is an even multiple of the number of processes and of accumulation steps.",
        )
    return found_B


def _mixup_weights(rule: MixRule, seed: int, step: int | Tensor, keys_B: Tensor) -> Tensor:
    """Of the image itself: the larger part, as in AugReg."""
    if not rule.mixup:
        return torch.ones(len(keys_B), dtype=torch.float64)
    weight_B = draws.beta(rule.mixup, seed, MIX, step, keys_B, 1)
    return torch.maximum(weight_B, 1 - weight_B)


def _cutmix_boxes(rule: MixRule, seed: int, step: int | Tensor, keys_B: Tensor, height: int, width: int) -> Tensor:
    """A box of the image's shape around a random pixel, as in the CutMix paper."""
    if not rule.cutmix:
        return torch.zeros(len(keys_B), 4, dtype=torch.int64)
    side_B = (1 - draws.beta(rule.cutmix, seed, MIX, step, keys_B, 2)).sqrt()
    place_B2 = draws.uniform(seed, MIX, step, keys_B, 3, count=2).double()
    ends: list[Tensor] = []
    for axis, length in ((0, height), (1, width)):
        centre_B, half_B = (place_B2[:, axis] * length).long(), (side_B * length / 2).long()
        ends += [(centre_B - half_B).clamp_min(0), (centre_B + half_B).clamp_max(length)]
    return torch.stack(ends, dim=1)


def _blend(images: Tensor, partners: Tensor, weight: Tensor) -> Tensor:
    mixed = images * weight + partners * (1 - weight)
    return mixed.round().to(torch.uint8) if images.dtype == torch.uint8 else mixed.to(images.dtype)
