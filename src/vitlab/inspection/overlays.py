"""Heat maps drawn on the image the model saw, after the paper's Figure 6."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_DIMMEST = 0.45  # so that unattended parts stay recognisable
_GLOW_RGB = (255.0, 140.0, 0.0)  # dark backgrounds have no light to keep, so heat adds some of its own
_GLOW = 0.55


def overlay(image_CYX: Tensor, heat_YX: Tensor, *, scale: int = 1) -> Image.Image:
    """The uint8 image in colour, dimmed where heat is low, glowing where it is high.

    The heat is stretched to its full range: rollout maps are flat. `scale` enlarges tiny images with crisp pixels.
    """
    low, high = heat_YX.min(), heat_YX.max()
    heat_1YX = ((heat_YX - low) / (high - low).clamp(min=1e-6))[None]
    glow_3YX = torch.tensor(_GLOW_RGB).view(3, 1, 1) * heat_1YX * _GLOW
    dimmed_3YX = (
        _shown(image_CYX).float().expand(3, -1, -1) * (_DIMMEST + (1 - _DIMMEST) * heat_1YX) * (1 - _GLOW * heat_1YX)
    )
    return to_picture((dimmed_3YX + glow_3YX).round().clamp(0, 255).byte(), scale=scale)


def _shown(image_CYX: Tensor) -> Tensor:
    return image_CYX if len(image_CYX) in (1, 3) else image_CYX[:1]


def to_picture(image_CYX: Tensor, *, scale: int = 1) -> Image.Image:
    """uint8 [C, Y, X] as a PIL image; where the channels are not colours, the first one."""
    pixels = np.ascontiguousarray(_shown(image_CYX).permute(1, 2, 0).numpy())
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
