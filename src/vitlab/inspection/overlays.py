"""Heat maps drawn on the image the model saw, as in the paper's Figure 6."""

import numpy as np
from PIL import Image
from torch import Tensor

_DIMMEST = 0.15  # so that unattended parts stay recognisable


def overlay(image_CYX: Tensor, heat_YX: Tensor, *, scale: int = 1) -> Image.Image:
    """The uint8 image, dark where the heat is low; `scale` enlarges tiny images with crisp pixels."""
    light_1YX = heat_YX.clamp(0, 1)[None] * (1 - _DIMMEST) + _DIMMEST
    lit_CYX = (image_CYX.float() * light_1YX).round().byte()
    return to_picture(lit_CYX, scale=scale)


def to_picture(image_CYX: Tensor, *, scale: int = 1) -> Image.Image:
    """uint8 [1 or 3, Y, X] as a PIL image."""
    pixels = np.ascontiguousarray(image_CYX.permute(1, 2, 0).numpy())
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
