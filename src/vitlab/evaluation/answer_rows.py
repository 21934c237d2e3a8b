"""What a model answers, as rows of numbers for `row_store`, and as answers again. Letters: B batch, N all, K classes."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from vitlab.engines.classifier import Prediction, rank_labels
from vitlab.evaluation.row_store import ImageRows, pick_rows
from vitlab.weights.bundle import Bundle

_PIECE = 4096  # answers made at a time


@dataclasses.dataclass(frozen=True)
class ImageAnswer:
    """The most probable labels of one image, best first."""

    path: str
    top: list[Prediction]


@dataclasses.dataclass(frozen=True)
class AnswerCode:
    """A row has the numbers of the `top` classes and their probabilities; all scores where an image can have several labels.

    A row of ImageNet-21k thus has 40 bytes instead of 87,000.
    """

    bundle: Bundle
    top: int

    def rows(self, logits_BK: Tensor) -> Tensor:
        if self.bundle.thresholds:
            return logits_BK
        ranked = rank_labels(self.bundle, logits_BK, self.top)
        numbers = [[*(each.index for each in row), *(each.p for each in row)] for row in ranked]
        rows_BD = torch.tensor(numbers, dtype=torch.float32)  # exact: numbers below 2^24, and what was float32
        rows_BD[~logits_BK.isfinite().all(dim=1)] = torch.nan
        return rows_BD

    def answers(self, rows_BD: Tensor) -> list[list[Prediction]]:
        if self.bundle.thresholds:
            return rank_labels(self.bundle, rows_BD, self.top)
        labels = self.bundle.labels
        return [
            [Prediction(labels[int(i)], int(i), p) for i, p in zip(row[: self.top], row[self.top :], strict=True)]
            for row in rows_BD.tolist()
        ]


class StoredAnswers(Sequence[ImageAnswer]):
    """The answers for all images that could be read, made when they are looked at: millions need no memory."""

    def __init__(self, keys: Sequence[str], found: ImageRows, coded: AnswerCode) -> None:
        self._keys, self._chunks, self._coded = keys, found.chunks, coded
        self._index_N = found.readable().nonzero()[:, 0]

    def __len__(self) -> int:
        return len(self._index_N)

    @overload
    def __getitem__(self, at: int) -> ImageAnswer: ...
    @overload
    def __getitem__(self, at: slice) -> list[ImageAnswer]: ...
    def __getitem__(self, at: int | slice) -> ImageAnswer | list[ImageAnswer]:
        places = range(len(self))[at]
        if isinstance(places, range):
            return self._answers(self._index_N[list(places)])
        return self._answers(self._index_N[[places]])[0]

    def __iter__(self) -> Iterator[ImageAnswer]:
        for piece in self.pieces():
            yield from piece

    def pieces(self) -> Iterator[list[ImageAnswer]]:
        """Some thousand at a time, all in their order."""
        return (self._answers(index) for index in self._index_N.split(_PIECE))

    def _answers(self, index_B: Tensor) -> list[ImageAnswer]:
        answers = self._coded.answers(pick_rows(self._chunks, index_B))
        return [ImageAnswer(str(self._keys[i]), top) for i, top in zip(index_B.tolist(), answers, strict=True)]
