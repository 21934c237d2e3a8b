"""The pixel operations of RandAugment, jitter and erasing, on batches of uint8.

Owns the arithmetic, no randomness. Whole numbers wherever a rounding could fall either way, so that CPU and GPU differ by one
grey level at most. Strengths come as one number per image. Letters: B batch, C channels, Y X rows and columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_FIXED = 32  # bits behind the point of coordinates
_TIE = 2**12  # of those: closer than 1e-6 pixel to half-way is half-way, since a slope of 0.3 has no exact binary form


# --- grey levels ------------------------------------------------------------------------------------------------------


def invert(x_BCYX: Tensor) -> Tensor:
    return 255 - x_BCYX


def posterize(x_BCYX: Tensor, bits: int) -> Tensor:
    """Keeps the upper bits of each value."""
    return x_BCYX & (0xFF << (8 - bits) & 0xFF)


def solarize(x_BCYX: Tensor, threshold: float) -> Tensor:
    """Inverts what is at least as bright as the threshold."""
    return torch.where(x_BCYX >= float(threshold), 255 - x_BCYX, x_BCYX)  # as a whole number, 256 would wrap round to 0


def solarize_add(x_BCYX: Tensor, addition: int) -> Tensor:
    """Brightens the darker half."""
    return torch.where(x_BCYX < 128, (x_BCYX.int() + addition).clamp(0, 255).to(torch.uint8), x_BCYX)


def autocontrast(x_BCYX: Tensor) -> Tensor:
    """Each channel stretched to 0...255; a flat one stays."""
    low, high = x_BCYX.amin(dim=(2, 3), keepdim=True).int(), x_BCYX.amax(dim=(2, 3), keepdim=True).int()
    stretched = (x_BCYX.int() - low) * 255 // (high - low).clamp_min(1)
    return torch.where(high > low, stretched.to(torch.uint8), x_BCYX)


def equalize(x_BCYX: Tensor) -> Tensor:
    """Each channel with its levels spread evenly, by Pillow's table."""
    values = x_BCYX.flatten(2).long()
    batch, channels, count = values.shape
    planes = torch.arange(batch * channels, device=x_BCYX.device).view(batch, channels, 1)
    histogram = torch.bincount((planes * 256 + values).flatten(), minlength=batch * channels * 256)
    histogram = histogram.view(batch, channels, 256)
    brightest = histogram.gather(2, values.amax(dim=2, keepdim=True))
    step = (count - brightest) // 255
    below = histogram.cumsum(dim=2) - histogram
    table = ((below + step // 2) // step.clamp_min(1)).clamp(0, 255)
    table = torch.where(step > 0, table, torch.arange(256, device=x_BCYX.device)).to(torch.uint8)
    return table.gather(2, values).view_as(x_BCYX)


# --- blends -----------------------------------------------------------------------------------------------------------


def blend(x_BCYX: Tensor, other: Tensor, weight_B: Tensor) -> Tensor:
    """`weight` of the image and the rest of `other`, cut to whole levels as peers do."""
    weight = weight_B.to(x_BCYX.device, torch.float32, non_blocking=True).view(-1, 1, 1, 1)
    return (x_BCYX * weight + other * (1 - weight)).clamp(0, 255).to(torch.uint8)


def grey(x_BCYX: Tensor, gain: float = 1.0) -> Tensor:
    """Luminance in whole levels, as float [B, 1, Y, X]."""
    if x_BCYX.shape[1] == 1:
        return x_BCYX.float()
    red, green, blue = x_BCYX.unbind(dim=1)
    return ((red * 0.2989 + green * 0.587 + blue * 0.114) * gain).floor()[:, None]  # ITU-R 601, with the peers' digits


def mean_grey(x_BCYX: Tensor) -> Tensor:
    """The mean luminance of each image, [B, 1, 1, 1]."""
    return grey(x_BCYX).double().mean(dim=(1, 2, 3), keepdim=True).float()


def smooth(x_BCYX: Tensor) -> Tensor:
    """Pillow's SMOOTH, ones around a five, as float and unrounded; the border stays."""
    if min(x_BCYX.shape[2:]) < 3:
        return x_BCYX.float()
    x = x_BCYX.float()
    around = F.avg_pool2d(x, kernel_size=3, stride=1, divisor_override=1)
    smoothed = x.clone()
    smoothed[:, :, 1:-1, 1:-1] = (around + 4 * x[:, :, 1:-1, 1:-1]) / 13
    return smoothed


def shift_hue(x_BCYX: Tensor, turn_B: Tensor) -> Tensor:
    """Turns the colour circle by `turn` (1 is all the way round); grey images stay."""
    if x_BCYX.shape[1] != 3:
        return x_BCYX
    red, green, blue = (x_BCYX.float() / 255).unbind(dim=1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    safe = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(value == red, (green - blue) / safe % 6, (blue - red) / safe + 2)
    hue = torch.where((value == blue) & (value != red) & (value != green), (red - green) / safe + 4, hue)
    hue = hue + 6 * turn_B.to(hue, non_blocking=True).view(-1, 1, 1)
    ramps = [(n + hue) % 6 for n in (5, 3, 1)]  # the usual HSV -> RGB, one ramp per channel
    turned = [value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in ramps]
    return (torch.stack(turned, dim=1) * 255).round().clamp(0, 255).to(torch.uint8)


# --- places -----------------------------------------------------------------------------------------------------------


def move(x_BCYX: Tensor, matrix_B23: Tensor, fill: int) -> Tensor:
    """The pixel at (x, y) becomes the nearest to matrix @ (x, y, 1), or `fill`.

    In whole numbers of 2^-32 pixels: nearest pixels of float coordinates would differ between devices. Half-way is rounded away
    from zero, as TensorFlow does: with a slope of 0.3, that is every tenth row of a shear.
    """
    height, width = x_BCYX.shape[2:]
    fixed_B23 = (matrix_B23 * 2**_FIXED).round().long().to(x_BCYX.device, non_blocking=True)[..., None, None]
    rows = torch.arange(height, device=x_BCYX.device)[:, None]
    cols = torch.arange(width, device=x_BCYX.device)
    above_x, above_y = (  # by half a pixel, so that cutting off the fraction rounds
        fixed_B23[:, i, 0] * cols + fixed_B23[:, i, 1] * rows + (fixed_B23[:, i, 2] + 2 ** (_FIXED - 1) + _TIE)
        for i in (0, 1)
    )
    from_x, from_y = above_x >> _FIXED, above_y >> _FIXED
    inside = (above_x > 2 * _TIE) & (from_x < width) & (above_y > 2 * _TIE) & (from_y < height)  # -0.5 is outside
    index = (from_y * width + from_x).where(inside, 0).flatten(1)[:, None].expand(-1, x_BCYX.shape[1], -1)
    return x_BCYX.flatten(2).gather(2, index).view_as(x_BCYX).where(inside[:, None], fill)


def box_mask(boxes_B4: Tensor, height: int, width: int) -> Tensor:
    """True inside (top, bottom, left, right), ends excluded: [B, 1, Y, X]."""
    top, bottom, left, right = boxes_B4[:, :, None, None].unbind(dim=1)
    rows = torch.arange(height, device=boxes_B4.device)[:, None]
    cols = torch.arange(width, device=boxes_B4.device)
    return ((rows >= top) & (rows < bottom) & (cols >= left) & (cols < right))[:, None]
