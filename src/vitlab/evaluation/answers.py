"""What a model answered, image by image, and whether that was right; everything that is counted later is counted from this.

Letters: B images, K classes of the data, M classes of the model, W as in `label_match`.
"""

import dataclasses

import torch
from torch import Tensor

from vitlab.evaluation.label_match import Match

_ROWS = 4096  # judged at a time, so that 21,843 classes need no second copy of all scores


@dataclasses.dataclass(frozen=True)
class Answers:
    """One row per image. `answer_B` is a class of the data, or K where the model named something that is none of them."""

    truth_B: Tensor  # int64
    answer_B: Tensor  # int64
    confidence_B: Tensor  # float64, of the answer
    rank_B: Tensor  # int64, of the best right class among all of the model's: 0 is right, below 5 is right in top-5
    loss_B: Tensor  # float64, minus the logarithm of the probability of what is right

    @property
    def right(self) -> Tensor:
        return self.rank_B == 0

    def __len__(self) -> int:
        return len(self.truth_B)

    def chosen(self, rows_B: Tensor) -> "Answers":
        """Those of some images, by number or by yes and no."""
        return Answers(*(getattr(self, field.name)[rows_B] for field in dataclasses.fields(self)))


def judge(logits_BM: Tensor, truth_B: Tensor, match: Match, temperature: float = 1.0) -> Answers:
    """The answers behind the scores; of equal scores the lower index wins."""
    members_KW, owners_M = match.table, match.owners(logits_BM.shape[1])
    parts = [
        _judge(part_bM.double() / temperature, truth_b, members_KW, owners_M)
        for part_bM, truth_b in zip(logits_BM.split(_ROWS), truth_B.split(_ROWS), strict=True)
    ]
    answer_B, confidence_B, rank_B, loss_B = (torch.cat(column) for column in zip(*parts, strict=True))
    return Answers(truth_B, answer_B, confidence_B, rank_B, loss_B)


def first_answers(logits_BM: Tensor) -> Tensor:
    """int64 [B]: the class of the greatest score. torch's argmax does not promise which of equal ones it takes."""
    classes_M = torch.arange(logits_BM.shape[1])
    return classes_M.where(logits_BM == logits_BM.amax(dim=1, keepdim=True), len(classes_M)).amin(dim=1)


def _judge(logits_BM: Tensor, truth_B: Tensor, members_KW: Tensor, owners_M: Tensor) -> tuple[Tensor, ...]:
    classes_M = torch.arange(logits_BM.shape[1])
    beyond = len(classes_M)
    top_B1 = logits_BM.amax(dim=1, keepdim=True)
    given_B = first_answers(logits_BM)
    members_BW = members_KW[truth_B]
    right_BW = logits_BM.gather(1, members_BW.clamp(min=0)).masked_fill(members_BW < 0, -torch.inf)
    best_B1 = right_BW.amax(dim=1, keepdim=True)
    best_id_B1 = members_BW.where((right_BW == best_B1) & (members_BW >= 0), beyond).amin(dim=1, keepdim=True)
    ahead_BM = (logits_BM > best_B1) | ((logits_BM == best_B1) & (classes_M < best_id_B1))
    total_B = logits_BM.logsumexp(dim=1)
    return (
        owners_M[given_B],
        (top_B1[:, 0] - total_B).exp(),
        ahead_BM.sum(dim=1),
        total_B - right_BW.logsumexp(dim=1),
    )
