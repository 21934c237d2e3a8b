"""Crops of a whole batch, resized on the device to the bits of `preprocess.scale`.

torch's resize of bytes on a CPU goes over the columns and then over the rows. Each time it sums neighbours with whole-number
weights and rounds to grey levels, so a matrix product gives the same bits on any device while its sums stay below 2^24, where
float32 is exact. Weights have up to 16 bits; multiplied in two halves of 8, they are exact in TF32 and bfloat16 too.
Letters: B batch, C channels, Y X rows and columns of an image, O rows or columns of the result, R L rows and columns of the
largest box, T neighbours that make a pixel, H the two halves of a weight.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitlab.data.preprocess import Array, scale

Smooth = Literal["bilinear", "bicubic"]

REACH = {"bilinear": 1.0, "bicubic": 2.0}  # of a filter to either side, in pixels of the coarser image
_HALF = 256  # between the halves of a weight
_WHITE = 255
MOST_NEIGHBOURS = 512  # 512 products of 128 and 255 stay below 2^24
_MOST_BITS = 22  # of a weight behind the point; torch looks no further
_WEIGHT_LIMIT = 2**15  # weights are signed numbers of 16 bits
_TOGETHER = 2**25  # numbers of the largest tensor made in one go: 128 MB, and some fifty photographs
_SENT_TOGETHER = 1024  # images copied to the device in one go


@dataclasses.dataclass(frozen=True)
class HeldImages:
    """Images of any size, uint8 [C, Y, X], concatenated without padding."""

    flat: Tensor  # uint8, wherever the images lie, with a row to spare at its end
    starts_N: Array  # int64
    heights_N: Array  # int64
    widths_N: Array  # int64
    channels: int

    def cut(self, ids_B: Array, boxes_B4: Array, size: tuple[int, int]) -> Tensor:
        """Boxes that all have one size, uint8 [B, C, rows, columns]."""
        return self._lines(ids_B, boxes_B4, *size).transpose(1, 2)

    def crops(self, ids_B: Array, boxes_B4: Array, size: tuple[int, int], how: Smooth) -> Tensor:
        """Boxes of any size, resized to `size`, antialiased: uint8 [B, C, rows, columns]."""
        on_cpu = self.flat.device.type == "cpu"  # whose own kernel is much faster there, with the same bits
        return (self.one_by_one if on_cpu else self.at_once)(ids_B, boxes_B4, size, how)

    def one_by_one(self, ids_B: Array, boxes_B4: Array, size: tuple[int, int], how: Smooth) -> Tensor:
        made: list[Tensor] = []
        for i, (top, left, rows, cols) in zip(ids_B.tolist(), boxes_B4.tolist(), strict=True):
            height, width, start = int(self.heights_N[i]), int(self.widths_N[i]), int(self.starts_N[i])
            image_CYX = self.flat[start : start + self.channels * height * width].view(self.channels, height, width)
            box_1CYX = image_CYX[None, :, top : top + rows, left : left + cols]
            made.append(scale(box_1CYX, size, how, antialias=True))
        return torch.cat(made)

    def at_once(self, ids_B: Array, boxes_B4: Array, size: tuple[int, int], how: Smooth) -> Tensor:
        """In pieces of boxes that are alike in size, as each costs what the largest does."""
        order_B = boxes_B4[:, 2:].prod(axis=1).argsort(kind="stable")[::-1]
        pieces = list(self._pieces(order_B, boxes_B4, size))
        made = torch.cat([self._crops(ids_B[some], boxes_B4[some], size, how) for some in pieces])
        return made[_sent(order_B.argsort(), made.device)]

    def _crops(self, ids_B: Array, boxes_B4: Array, size: tuple[int, int], how: Smooth) -> Tensor:
        most_rows, most_cols = boxes_B4[:, 2:].max(axis=0).tolist()
        lines_BRCL = self._lines(ids_B, boxes_B4, most_rows, most_cols)
        count, device = len(ids_B), self.flat.device
        rows_BRHO, row_bits_B = _weights(boxes_B4[:, 2], size[0], most_rows, how, device)
        cols_BLHO, col_bits_B = _weights(boxes_B4[:, 3], size[1], most_cols, how, device)
        sums = torch.bmm(lines_BRCL.float().flatten(1, 2), cols_BLHO.flatten(2))
        across_BRCO = _grey_levels(sums.view(count, most_rows, self.channels, 2, size[1]), col_bits_B, halves=3)
        sums = torch.bmm(rows_BRHO.flatten(2).transpose(1, 2), across_BRCO.float().flatten(2))
        down_BOCO = _grey_levels(sums.view(count, 2, size[0], self.channels, size[1]), row_bits_B, halves=1)
        return down_BOCO.to(torch.uint8).transpose(1, 2)

    def _lines(self, ids_B: Array, boxes_B4: Array, rows: int, cols: int) -> Tensor:
        """uint8 [B, rows, C, cols] from each box's corner on; beyond a box, any pixels."""
        height_B, width_B, (top_B, left_B, inside_B, _) = self.heights_N[ids_B], self.widths_N[ids_B], boxes_B4.T
        corner_B = self.starts_N[ids_B] + top_B * width_B + left_B
        sizes_4B = np.stack([corner_B, width_B, height_B * width_B, inside_B - 1])
        corner, width, plane, last = _sent(sizes_4B, self.flat.device).view(4, -1, 1, 1)
        row_R1 = torch.arange(rows, device=self.flat.device)[:, None]
        channel_C = torch.arange(self.channels, device=self.flat.device)
        start_BRC = corner + torch.minimum(row_R1, last) * width + channel_C * plane
        # All pieces of `cols` bytes, overlapping, as the rows of a matrix that takes no memory: each line is one of them.
        pieces = self.flat.as_strided((len(self.flat) - cols + 1, cols), (1, 1))
        return pieces[start_BRC]

    def _pieces(self, order_B: Array, boxes_B4: Array, size: tuple[int, int]) -> Iterator[Array]:
        """Parts of a batch that memory has room for."""
        while len(order_B):
            rows, cols = boxes_B4[order_B, 2:].max(axis=0).tolist()
            lines, across, down = rows * cols, 2 * rows * size[1], 2 * size[0] * size[1]
            weights = 2 * max(rows * size[0], cols * size[1])  # more than the pixels of a box that is long and thin
            most = max(1, _TOGETHER // max(self.channels * max(lines, across, down), weights))
            yield order_B[:most]
            order_B = order_B[most:]


def hold(images: list[Tensor], channels: int, device: torch.device) -> HeldImages:
    """The images on `device`; the list is emptied on the way, to save memory."""
    sizes_N2 = np.array([image.shape[1:] for image in images], np.int64).reshape(-1, 2)
    bytes_N = channels * sizes_N2.prod(axis=1)
    starts_N, total = bytes_N.cumsum() - bytes_N, int(bytes_N.sum())
    flat = torch.zeros(total + int(sizes_N2.max(initial=0)), dtype=torch.uint8, device=device)
    images.reverse()
    done = 0
    while images:
        some = [images.pop().flatten() for _ in range(min(_SENT_TOGETHER, len(images)))]
        piece = torch.cat(some)
        flat[done : done + len(piece)] = piece.to(device)
        done += len(piece)
    return HeldImages(flat, starts_N, sizes_N2[:, 0].copy(), sizes_N2[:, 1].copy(), channels)


def hold_equal(count: int, size: torch.Size, device: torch.device) -> tuple[HeldImages, Tensor]:
    """Room for so many images of one size [C, Y, X] on `device`, and the same as [N, C, Y, X], to be filled."""
    (channels, rows, cols), each = size, size.numel()
    flat = torch.zeros(count * each + max(rows, cols), dtype=torch.uint8, device=device)
    heights_N, widths_N = np.full(count, rows, np.int64), np.full(count, cols, np.int64)
    held = HeldImages(flat, np.arange(count, dtype=np.int64) * each, heights_N, widths_N, channels)
    return held, flat[: count * each].view(count, *size)


def neighbours(old: int, new: int, how: Smooth) -> int:
    """The most old pixels that make one new pixel."""
    return int(2 * REACH[how] * max(old / new, 1.0)) + 1


def _weights(old_B: Array, new: int, most: int, how: Smooth, device: torch.device) -> tuple[Tensor, Tensor]:
    """float32 [B, most, H, O], whole numbers, and their bits behind the point [B].

    In doubles and in torch's order of operations, because a last bit may decide how a weight is rounded.
    """
    where = torch.device("cpu") if device.type == "mps" else device  # which has no doubles
    old_B1, scale_B1 = _sent(old_B, where)[:, None], _sent(old_B / new, where)[:, None]  # a GPU divides less exactly
    reach_B1 = REACH[how] * scale_B1.clamp_min(1)
    middle_BO = scale_B1 * (torch.arange(new, dtype=torch.float64, device=where) + 0.5)
    first_BO = (middle_BO - reach_B1 + 0.5).long().clamp_min(0)
    end_BO = torch.minimum((middle_BO + reach_B1 + 0.5).long(), old_B1)
    place_T = torch.arange(neighbours(int(old_B.max()), new, how), device=where)[:, None]
    place_BTO = first_BO[:, None] + place_T
    weight_BTO = _filter(((place_BTO - middle_BO[:, None] + 0.5) * (1 / scale_B1.clamp_min(1))[:, None]).abs(), how)
    weight_BTO = torch.where(place_BTO < end_BO[:, None], weight_BTO, 0.0)
    total_BO = torch.zeros_like(middle_BO)
    for t in range(len(place_T)):  # one after the other: a sum in another order may end in another bit
        total_BO = total_BO + weight_BTO[:, t]
    weight_BTO = weight_BTO / total_BO[:, None]
    powers = 1 << torch.arange(1, _MOST_BITS + 1, device=where)  # shifted, because a GPU's powers are not exact
    too_large = weight_BTO.amax(dim=(1, 2))[:, None] * powers + 0.5 >= _WEIGHT_LIMIT
    bits_B = _MOST_BITS - too_large.sum(dim=1)
    weight_BTO = weight_BTO * (1 << bits_B)[:, None, None]
    weight_BTO = torch.where(weight_BTO < 0, weight_BTO - 0.5, weight_BTO + 0.5).trunc().to(device, torch.float32)
    return _spread(weight_BTO, first_BO.to(device), most), bits_B.to(device)


def _filter(x: Tensor, how: Smooth) -> Tensor:
    """Weight by distance; the cubic with the -0.5 of Pillow and TensorFlow."""
    if how == "bilinear":
        return torch.where(x < 1, 1 - x, 0.0)
    a = -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _spread(weight_BTO: Tensor, first_BO: Tensor, most: int) -> Tensor:
    """The weights of T neighbours as those of all pixels, in halves: [B, most, H, O]."""
    high_BTO = (weight_BTO / _HALF).round()
    halves_BTHO = torch.stack([high_BTO, weight_BTO - _HALF * high_BTO], dim=2)
    # A zero before the first neighbour and behind the last stands for all pixels that are not neighbours.
    framed = torch.nn.functional.pad(halves_BTHO, (0, 0, 0, 0, 1, 1))
    turn_BLO = torch.arange(1, most + 1, device=first_BO.device)[:, None] - first_BO[:, None]
    turn_BLO = turn_BLO.clamp_(0, weight_BTO.shape[1] + 1)
    return framed.gather(1, turn_BLO[:, :, None].expand(-1, -1, 2, -1))


def _grey_levels(sums: Tensor, bits_B: Tensor, *, halves: int) -> Tensor:
    """Sums of both halves to 0...255, rounded half up as torch does it. int32."""
    high, low = sums.unbind(halves)
    bits = bits_B.int().view(-1, 1, 1, 1)
    total = low.int().add_(high.int(), alpha=_HALF).add_(1 << (bits - 1))
    return total.bitwise_right_shift_(bits).clamp_(0, _WHITE)


def _sent(values: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)  # a GPU may be busy: nobody has to wait for it
