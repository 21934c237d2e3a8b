"""What training images look like in numbers, so that images of another kind are noticed: inverted, or scaled otherwise.

Counted as the model sees them, after normalisation, so that another preprocessing is noticed too. Letters: B images, N all.
"""

import dataclasses
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from vitlab.core.errors import VitlabError
from vitlab.data.dataset import Dataset
from vitlab.data.decode import read
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess, normalise

_LOOKED_AT = 128  # training images: their mean is then known to a tenth of their spread
_ENOUGH = 32  # images to judge by: fewer may well be all of one odd kind
_FAR = 3.0  # spreads of single images; a class of its own, such as night among day, is one or two away
_LEAST_SPREAD = 0.05  # of normalised values: sets whose images are nearly alike would warn of a change of light
_SIDE = 64  # pixels to a side that are looked at


@dataclasses.dataclass(frozen=True)
class PixelStats:
    """Mean and contrast (standard deviation) of the values in an image: of all images, and how far these lie apart."""

    mean: float
    mean_spread: float
    contrast: float
    contrast_spread: float


def training_stats(dataset: Dataset, rule: Preprocess) -> PixelStats | None:
    """Of images evenly taken from the training set; None where too few can be read."""
    watch = InputWatch(None)
    for i in range(0, len(dataset), -(-len(dataset) // _LOOKED_AT)):
        try:
            pixels_CYX = read(dataset.read(i), rule)
        except (VitlabError, OSError):
            continue
        watch.rows.append(_rows(pixels_CYX[None], rule))
    return watch.stats()


class InputWatch:
    """Looks at the batches of a data set, and reports in the end whether they are far from the training images."""

    def __init__(self, trained: PixelStats | None) -> None:
        self.trained = trained
        self.rows: list[Tensor] = []

    def watching(self, batches: Iterable[Batch], rule: Preprocess) -> Generator[Batch]:
        for batch in batches:
            if self.trained is not None and bool(batch.valid.any()):
                self.rows.append(_rows(batch.images, rule)[batch.valid])
            yield batch

    def stats(self) -> PixelStats | None:
        found_N2 = torch.cat(self.rows) if self.rows else torch.empty(0, 2)
        if len(found_N2) < _ENOUGH:
            return None
        (mean, contrast), (mean_spread, contrast_spread) = found_N2.mean(dim=0).tolist(), found_N2.std(dim=0).tolist()
        return PixelStats(mean, mean_spread, contrast, contrast_spread)

    def sentence(self) -> str | None:
        """What to warn of; None where the images are alike, or too few to say."""
        trained, now = self.trained, self.stats()
        if trained is None or now is None or not _is_far(trained, now):
            return None
        return (
            f"the images are unlike those of training: as the model sees them their mean is {now.mean:.2f} and their "
            f"contrast {now.contrast:.2f}, and in training {trained.mean:.2f} and {trained.contrast:.2f}; are they inverted, "
            "scaled or preprocessed differently?"
        )


def _is_far(trained: PixelStats, now: PixelStats) -> bool:
    shifts = (
        (now.mean - trained.mean, trained.mean_spread),
        (now.contrast - trained.contrast, trained.contrast_spread),
    )
    return any(abs(shift) > _FAR * max(spread, _LEAST_SPREAD) for shift, spread in shifts)


def _rows(images_BCYX: Tensor, rule: Preprocess) -> Tensor:
    """Mean and contrast of each image, [B, 2], by a grid of its pixels."""
    step = max(1, min(images_BCYX.shape[2:]) // _SIDE)
    x_BCYX = normalise(rule, images_BCYX[:, :, ::step, ::step].contiguous())
    std_B, mean_B = torch.std_mean(x_BCYX.flatten(1), dim=1)
    return torch.stack([mean_B, std_B], dim=1)
