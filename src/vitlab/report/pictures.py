"""Images as a model saw them, alone or with attention rollout, and which of many are shown. Letters: B images."""

import dataclasses
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.data.decode import read
from vitlab.data.preprocess import normalise
from vitlab.engines.classifier import Classifier
from vitlab.engines.exported import ExportedModel
from vitlab.inspection.meanings import MEANINGS
from vitlab.inspection.overlays import legend, overlay, to_picture
from vitlab.inspection.rollout import rollout_heat
from vitlab.inspection.scales import Scale, measured
from vitlab.report.figures import jpeg, png
from vitlab.report.page import Gallery, Tile

_SIDE_PX = 224  # twice what a phone shows of a tile
_LEGEND_PX = 300  # less than the width of a phone
_GAP_PX = 4  # between the pictures of a strip
_AT_ONCE = 4  # images whose attention is in memory at a time
_FEW_PX = 96  # the side of images whose pixels one can count: stored as they are, and enlarged by the browser


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The images of the rows, as the model saw them."""

    classifier: Classifier
    dataset: Dataset
    ids_B: Tensor

    @property
    def has_rollout(self) -> bool:
        model = self.classifier.model
        return model.spec.has_attention_maps and not isinstance(model, ExportedModel)

    @property
    def are_photos(self) -> bool:
        """Whether images are shown as photos, and not as pixels that one can count."""
        return max(self.classifier.preprocess.image_size) > _FEW_PX

    def tile(self, row: int, caption: str, *, good: bool) -> Tile:
        picture = to_picture(self._seen(row))
        return Tile(jpeg(picture, _SIDE_PX) if self.are_photos else png(picture), caption, good)

    def rollout_gallery(self, title: str, caption: str, rows: Sequence[tuple[int, str, bool]]) -> Gallery:
        """Images, each beside its attention rollout, in one scale for all; the images alone where a model has none.

        `rows` are those of the images, what stands below each, and whether that is good.
        """
        if not self.has_rollout:
            tiles = [self.tile(row, below, good=good) for row, below, good in rows]
            return Gallery(title, caption, tiles, self.are_photos)
        seen_BCYX = torch.stack([self._seen(row) for row, _, _ in rows])
        values_BYX, scale = measured(self._rollout(seen_BCYX))
        tiles = [
            Tile(_pair(seen_CYX, values_YX, scale), below, good)
            for seen_CYX, values_YX, (_, below, good) in zip(seen_BCYX, values_BYX, rows, strict=True)
        ]
        drawn = Tile(legend(scale, width=_LEGEND_PX).svg(), f"Colours: {scale.sentence}")
        full_caption = f"{caption} Beside each picture, where attention went. {MEANINGS['rollout'].caption}".strip()
        return Gallery(title, full_caption, tiles, photos=True, double=True, legend=drawn)

    @torch.inference_mode()
    def _rollout(self, seen_BCYX: Tensor) -> Tensor:
        x_BCYX = normalise(self.classifier.preprocess, seen_BCYX).to(self.classifier.device)
        return rollout_heat(self.classifier.model, x_BCYX, chunk=_AT_ONCE).cpu()

    def _seen(self, row: int) -> Tensor:
        return read(self.dataset.read(int(self.ids_B[row])), self.classifier.preprocess)


def _pair(seen_CYX: Tensor, values_YX: Tensor, scale: Scale) -> bytes:
    """An image and its overlay, side by side."""
    zoom = max(1, _SIDE_PX // max(seen_CYX.shape[1:]))
    plain = to_picture(seen_CYX, scale=zoom).convert("RGB")
    both = Image.new("RGB", (2 * plain.width, plain.height))
    both.paste(plain, (0, 0))
    both.paste(overlay(seen_CYX, values_YX, scale, zoom=zoom), (plain.width, 0))
    return jpeg(both, 2 * _SIDE_PX)


def strip(images_SCYX: Tensor) -> bytes:
    """Pictures of one size, uint8 [S, C, Y, X], side by side."""
    pictures = [to_picture(image_CYX, scale=max(1, _SIDE_PX // max(image_CYX.shape[1:]))) for image_CYX in images_SCYX]
    width, height = pictures[0].size
    whole = Image.new("RGB", (len(pictures) * (width + _GAP_PX) - _GAP_PX, height), "white")
    for number, picture in enumerate(pictures):
        whole.paste(picture.convert("RGB"), (number * (width + _GAP_PX), 0))
    return jpeg(whole, max(whole.size))


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
