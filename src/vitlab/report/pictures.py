"""Images as a model saw them, alone or with attention rollout. Letters: B images."""

import dataclasses

import torch
from PIL import Image
from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.data.decode import read
from vitlab.data.preprocess import normalise
from vitlab.engines.classifier import Classifier
from vitlab.inspection.attention import rollout_heat, upsample_heat
from vitlab.inspection.overlays import overlay, to_picture
from vitlab.report.figures import jpeg
from vitlab.report.page import Tile

_SIDE_PX = 224  # twice what a phone shows of a tile


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The images of the rows, as the model saw them."""

    classifier: Classifier
    dataset: Dataset
    ids_B: Tensor

    @property
    def has_rollout(self) -> bool:
        return self.classifier.model.spec.has_attention_maps

    def tile(self, row: int, caption: str, *, good: bool) -> Tile:
        return Tile(jpeg(to_picture(self._seen(row)), _SIDE_PX), caption, good)

    @torch.inference_mode()
    def tile_with_rollout(self, row: int, caption: str, *, good: bool) -> Tile:
        """The image, and beside it the parts that fed the answer."""
        model, rule = self.classifier.model, self.classifier.preprocess
        if not self.has_rollout:
            return self.tile(row, caption, good=good)
        seen_CYX = self._seen(row)
        heat_BYX = rollout_heat(model, normalise(rule, seen_CYX[None]).to(self.classifier.device)).cpu()
        glowing = overlay(seen_CYX, upsample_heat(heat_BYX, rule.image_size)[0])
        plain = to_picture(seen_CYX).convert("RGB")
        both = Image.new("RGB", (2 * plain.width, plain.height))
        both.paste(plain, (0, 0))
        both.paste(glowing, (plain.width, 0))
        return Tile(jpeg(both, 2 * _SIDE_PX), caption, good)

    def _seen(self, row: int) -> Tensor:
        return shown_channels(read(self.dataset.read(int(self.ids_B[row])), self.classifier.preprocess))


def shown_channels(image_CYX: Tensor) -> Tensor:
    """The image, or its first channel where it has neither one nor three."""
    return image_CYX if len(image_CYX) in (1, 3) else image_CYX[:1]
