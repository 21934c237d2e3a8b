"""What a model answered, image by image, and what is counted from that: all that measures and pages are made of.

Letters: B images, K classes of the data, A answers (those classes, and one for anything else), M classes of the model, W as in
`label_match`.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.evaluation.calibration import Reliability, reliability, yes_or_no_confidence
from vitlab.evaluation.label_match import ROWS, Match
from vitlab.evaluation.metrics import ClassScores, average_precision, class_scores, label_scores
from vitlab.evaluation.selective import RiskCoverage, risk_coverage

OTHER = "something else"  # the answer that is none of the data's classes


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
        for part_bM, truth_b in zip(logits_BM.split(ROWS), truth_B.split(ROWS), strict=True)
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


# --- what is counted from them ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneLabel:
    """What is counted on images with one label each. `logits_BM` are scores before the temperature."""

    logits_BM: Tensor
    match: Match
    temperature: float
    answers: Answers
    losses_B: Tensor
    confusion_KA: Tensor  # rows are the truth, columns the answer
    classes: ClassScores
    reliability: Reliability
    risk: RiskCoverage

    @property
    def num_images(self) -> int:
        return len(self.losses_B)

    @classmethod
    def of(cls, logits_BM: Tensor, truth_B: Tensor, match: Match, temperature: float = 1.0) -> "OneLabel":
        answers = judge(logits_BM, truth_B, match, temperature)
        num_classes = len(match.members)
        flat_B = answers.truth_B * (num_classes + 1) + answers.answer_B
        confusion_KA = torch.bincount(flat_B, minlength=num_classes * (num_classes + 1)).reshape(num_classes, -1)
        return cls(
            logits_BM=logits_BM,
            match=match,
            temperature=temperature,
            answers=answers,
            losses_B=answers.loss_B,
            confusion_KA=confusion_KA,
            classes=class_scores(confusion_KA),
            reliability=reliability(answers.confidence_B, answers.right),
            risk=risk_coverage(answers.confidence_B, answers.right),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralLabels:
    """What is counted on images that may have several labels. `logits_BK` are float64, after the temperature."""

    logits_BK: Tensor
    targets_BK: Tensor
    thresholds_K: Tensor  # scores: a class is predicted above its own
    predicted_BK: Tensor
    losses_B: Tensor
    confidence_BK: Tensor  # in every yes and no
    right_BK: Tensor
    average_precision_K: Tensor
    classes: ClassScores
    reliability: Reliability

    @property
    def num_images(self) -> int:
        return len(self.losses_B)

    @classmethod
    def of(cls, logits_BK: Tensor, targets_BK: Tensor, thresholds_K: Tensor | None = None) -> "SeveralLabels":
        """Without thresholds, a class is predicted from an even chance on."""
        logits_BK = logits_BK.double()
        even_K = torch.zeros(logits_BK.shape[1], dtype=torch.float64)
        thresholds_K = even_K if thresholds_K is None else thresholds_K
        predicted_BK = logits_BK > thresholds_K
        losses_BK = F.binary_cross_entropy_with_logits(logits_BK, targets_BK.double(), reduction="none")
        confidence_BK, right_BK = yes_or_no_confidence(logits_BK, targets_BK)
        return cls(
            logits_BK=logits_BK,
            targets_BK=targets_BK,
            thresholds_K=thresholds_K,
            predicted_BK=predicted_BK,
            losses_B=losses_BK.sum(dim=1),
            confidence_BK=confidence_BK,
            right_BK=right_BK,
            average_precision_K=average_precision(logits_BK, targets_BK),
            classes=label_scores(predicted_BK, targets_BK),
            reliability=reliability(confidence_BK.flatten(), right_BK.flatten()),
        )

    def is_among(self, k: int) -> Tensor:
        """bool [B]: whether a label of the image is among its `k` highest scores."""
        order_Bk = self.logits_BK.argsort(dim=1, descending=True, stable=True)[:, :k]
        return (self.targets_BK.gather(1, order_Bk) > 0).any(dim=1)
