"""Random changes to training images, as batched tensor operations keyed by a generator.

Letters: B batch, C channels, Y X rows and columns.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def random_affine(
    x_BCYX: Tensor, generator: Generator, *, turn_deg: float, zoom: float, shift_frac: float, fill: float = 0.0
) -> Tensor:
    """Turns by up to ±`turn_deg`, zooms by up to ±`zoom` and shifts by up to ±`shift_frac` of the side, each image its own.

    Takes and returns floats; what comes from outside the image is `fill`.
    """
    batch = len(x_BCYX)
    u_B4 = torch.rand(batch, 4, generator=generator) * 2 - 1
    angle, scale = u_B4[:, 0] * math.radians(turn_deg), 1 + u_B4[:, 1] * zoom
    cos, sin = angle.cos() * scale, angle.sin() * scale
    shift_x, shift_y = u_B4[:, 2] * 2 * shift_frac, u_B4[:, 3] * 2 * shift_frac  # the grid spans -1 to 1
    rows = torch.stack([torch.stack([cos, -sin, shift_x], 1), torch.stack([sin, cos, shift_y], 1)], 1)
    grid = F.affine_grid(rows.to(x_BCYX), list(x_BCYX.shape), align_corners=False)
    return F.grid_sample(x_BCYX - fill, grid, mode="bilinear", align_corners=False) + fill
