"""BiT-HyperRule: how BiT is fine-tuned, chosen from the size of the data set and of its images, and from nothing else.

Source: BiT, section 3.3, and `bit_hyperrule.py` of its released code. The text puts the drops at 30, 60 and 90 % of the run;
the code has them at 40, 60 and 80 % for small sets, and so have we.
"""

import dataclasses

from vitlab.core.errors import UsageError
from vitlab.training.schedule import Schedule

_SMALL, _MEDIUM = 20_000, 500_000  # images below which a set is small, or medium
_SMALL_AREA = 96 * 96  # pixels below which an image is small
_LATE = (0.3, 0.6, 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperRule:
    """What the rule decides. Images are resized to a square of `resize`, then cropped to `crop`, at random in training."""

    steps: int
    schedule: Schedule
    mixup: float
    resize: int
    crop: int
    lr: float = 0.003
    batch_size: int = 512
    momentum: float = 0.9
    weight_decay: float = 0.0


def bit_hyperrule(num_images: int, image_size: tuple[int, int], *, largest_model: bool = False) -> HyperRule:
    """The rule for `num_images` training images of a typical `image_size`. BiT's largest model, R152x4, sees 480 pixels."""
    if num_images < 1 or min(image_size) < 1:
        raise UsageError(f"the rule needs images: {num_images} of {image_size[0]}x{image_size[1]} are none")
    if image_size[0] * image_size[1] < _SMALL_AREA:
        resize, crop = 160, 128
    else:
        resize, crop = (512, 480) if largest_model else (448, 384)
    mixup = 0.0 if num_images < _SMALL else 0.1  # small sets are learned too quickly to profit
    if num_images < _SMALL:
        steps, warmup, milestones = 500, 100, (0.4, 0.6, 0.8)
    else:
        steps, warmup, milestones = (10_000 if num_images < _MEDIUM else 20_000), 500, _LATE
    schedule = Schedule(decay="staircase", warmup=warmup, milestones=milestones)
    return HyperRule(steps=steps, schedule=schedule, mixup=mixup, resize=resize, crop=crop)
