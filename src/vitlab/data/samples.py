"""A small labelled image set held in memory: what the demo trains on, and what any source can be turned into.

Letters: N images, C channels, Y X rows and columns.
"""

import dataclasses

from torch import Tensor

from vitlab.core.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Samples:
    """Images uint8 [N, C, Y, X] with labels int64 [N]; `ids` name each image for split files and mistake galleries."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.labels) == len(self.ids):
            raise UsageError(f"{len(self.images)} images, {len(self.labels)} labels, {len(self.ids)} ids do not match")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor) -> "Samples":
        ids = tuple(self.ids[i] for i in index.tolist())
        return Samples(self.images[index], self.labels[index], self.classes, ids)
