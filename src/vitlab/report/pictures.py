"""Images as a model saw them, alone or with attention rollout, and which of many are shown. Letters: B images."""

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
from vitlab.report.figures import jpeg, png
from vitlab.report.page import Tile

_SIDE_PX = 224  # twice what a phone shows of a tile
_FEW_PX = 96  # the side of images whose pixels one can count: stored as they are, and enlarged by the browser


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The images of the rows, as the model saw them."""

    classifier: Classifier
    dataset: Dataset
    ids_B: Tensor

    @property
    def has_rollout(self) -> bool:
        return self.classifier.model.spec.has_attention_maps

    @property
    def are_photos(self) -> bool:
        """Whether images are shown as photos, and not as pixels that one can count."""
        return max(self.classifier.preprocess.image_size) > _FEW_PX

    def tile(self, row: int, caption: str, *, good: bool) -> Tile:
        picture = to_picture(self._seen(row))
        return Tile(jpeg(picture, _SIDE_PX) if self.are_photos else png(picture), caption, good)

    @torch.inference_mode()
    def tile_with_rollout(self, row: int, caption: str, *, good: bool) -> Tile:
        """The image, and beside it the parts that fed the answer."""
        model, rule = self.classifier.model, self.classifier.preprocess
        if not self.has_rollout:
            return self.tile(row, caption, good=good)
        seen_CYX = self._seen(row)
        heat_BYX = rollout_heat(model, normalise(rule, seen_CYX[None]).to(self.classifier.device)).cpu()
        zoom = max(1, _SIDE_PX // max(rule.image_size))
        coloured = overlay(seen_CYX, upsample_heat(heat_BYX, rule.image_size)[0], scale=zoom)
        plain = to_picture(seen_CYX, scale=zoom).convert("RGB")
        both = Image.new("RGB", (2 * plain.width, plain.height))
        both.paste(plain, (0, 0))
        both.paste(coloured, (plain.width, 0))
        return Tile(jpeg(both, 2 * _SIDE_PX), caption, good)

    def _seen(self, row: int) -> Tensor:
        return read(self.dataset.read(int(self.ids_B[row])), self.classifier.preprocess)


def spread_over_classes(truth_B: Tensor, doubt_B: Tensor, count: int) -> list[int]:
    """At most `count` images, as evenly over the classes as there are some; the most doubtful first.

    In turn, each class gives its next one. `doubt_B` is largest for what should be seen first: wrong answers, say.
    """
    order = doubt_B.argsort(descending=True, stable=True).tolist()
    turns = dict[int, int]()  # how many images of a class came before
    ranked: list[tuple[int, int]] = []
    for place, row in enumerate(order):
        turn = turns[int(truth_B[row])] = turns.get(int(truth_B[row]), -1) + 1
        ranked.append((turn, place))
    return [order[place] for place in sorted(place for _, place in sorted(ranked)[:count])]
