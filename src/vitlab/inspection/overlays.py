"""Heat maps drawn on the image the model saw, after the paper's Figure 6."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

# From the least heat to the greatest, in equal steps: blue is told from red and yellow by all common kinds of colour blindness.
_COLOURS_RGB = ((40, 60, 190), (120, 40, 170), (220, 50, 90), (250, 130, 30), (255, 235, 90))
_MOST_OPAQUE = 0.75  # so that what is looked at stays recognisable
_RISE = 0.6  # below 1, some heat is soon as dense as much of it
_COLD = 0.5  # of all pixels, the share that stays as it is
_LEAST = 1e-3  # of the greatest heat: what is below is none


def overlay(image_CYX: Tensor, heat_YX: Tensor, *, scale: int = 1) -> Image.Image:
    """The uint8 image at its own brightness, with the heat over it in colours that are the denser, the more there is.

    Colours go by the logarithm of the heat. A single patch often has ten times the heat of all others (large trained models
    keep notes of their own in background patches), and would be the only one to be seen. `scale` enlarges tiny images with
    crisp pixels, and the heat smoothly.
    """
    image_CYX = _shown(image_CYX)
    size = (scale * image_CYX.shape[1], scale * image_CYX.shape[2])
    heat_YX = F.interpolate(heat_YX[None, None].float(), size=size, mode="bilinear")[0, 0] if scale > 1 else heat_YX
    most = heat_YX.max().clamp(min=1e-12)
    low = torch.maximum(heat_YX.quantile(_COLD), _LEAST * most)
    heat_YX = (heat_YX.clamp(min=low) / low).log() / (most / low).log().clamp(min=1e-6)
    alpha_1YX = _MOST_OPAQUE * heat_YX[None] ** _RISE
    image_CYX = image_CYX.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    mixed_3YX = image_CYX.float().expand(3, -1, -1) * (1 - alpha_1YX) + _coloured(heat_YX) * alpha_1YX
    return to_picture(mixed_3YX.round().clamp(0, 255).byte())


def to_picture(image_CYX: Tensor, *, scale: int = 1) -> Image.Image:
    """uint8 [C, Y, X] as a PIL image; where the channels are not colours, the first one."""
    pixels = np.ascontiguousarray(_shown(image_CYX).permute(1, 2, 0).numpy())
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def _shown(image_CYX: Tensor) -> Tensor:
    return image_CYX if len(image_CYX) in (1, 3) else image_CYX[:1]


def _coloured(heat_YX: Tensor) -> Tensor:
    """float [3, Y, X]: the colour of each heat, 0 to 1, between those of the table."""
    table_N3 = torch.tensor(_COLOURS_RGB, dtype=torch.float32)
    place_YX = heat_YX * (len(table_N3) - 1)
    below_YX = place_YX.floor().clamp(max=len(table_N3) - 2)
    part_YX1 = (place_YX - below_YX)[..., None]
    first_YX3, next_YX3 = table_N3[below_YX.long()], table_N3[below_YX.long() + 1]
    return (first_YX3 + part_YX1 * (next_YX3 - first_YX3)).permute(2, 0, 1)
