"""What a model answered, image by image, and what is counted from that: all that measures and pages are made of.

Letters: B images, K classes of the data, A answers (those classes, and one for anything else), M classes of the model, W as in
`label_match`.
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.evaluation.calibration import ROWS, Reliability, reliability, yes_or_no_confidence
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import ClassScores, average_precision, class_scores, confusion_matrix, label_scores
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
    # A model that diverged answers NaN: as good as the lowest score, so that it is judged, and its loss stays NaN.
    logits_BM = logits_BM.where(~logits_BM.isnan(), -torch.inf)
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


@dataclasses.dataclass(frozen=True)
class OneLabel:
    """What is counted on images with one label each, as far as it is asked for. `logits_BM` are before the temperature."""

    logits_BM: Tensor
    truth_B: Tensor
    match: Match
    temperature: float = 1.0

    @functools.cached_property
    def answers(self) -> Answers:
        return judge(self.logits_BM, self.truth_B, self.match, self.temperature)

    @property
    def num_images(self) -> int:
        return len(self.truth_B)

    @property
    def losses_B(self) -> Tensor:
        return self.answers.loss_B

    @functools.cached_property
    def confusion_KA(self) -> Tensor:
        """Rows are the truth, columns the answer."""
        classes = len(self.match.members)
        return confusion_matrix(self.answers.answer_B, self.truth_B, (classes, classes + 1))

    @functools.cached_property
    def classes(self) -> ClassScores:
        return class_scores(self.confusion_KA)

    @functools.cached_property
    def reliability(self) -> Reliability:
        return reliability(self.answers.confidence_B, self.answers.right)

    @functools.cached_property
    def risk(self) -> RiskCoverage:
        return risk_coverage(self.answers.confidence_B, self.answers.right)


@dataclasses.dataclass(frozen=True)
class SeveralLabels:
    """What is counted on images that may have several labels. `logits_BK` are float64, after the temperature."""

    logits_BK: Tensor
    targets_BK: Tensor
    thresholds_K: Tensor  # scores: a class is predicted above its own

    @classmethod
    def of(cls, logits_BK: Tensor, targets_BK: Tensor, thresholds_K: Tensor | None = None) -> "SeveralLabels":
        """Without thresholds, a class is predicted from an even chance on."""
        even_K = torch.zeros(logits_BK.shape[1], dtype=torch.float64)
        return cls(logits_BK.double(), targets_BK, even_K if thresholds_K is None else thresholds_K)

    @property
    def num_images(self) -> int:
        return len(self.targets_BK)

    @property
    def predicted_BK(self) -> Tensor:
        return self.logits_BK > self.thresholds_K

    @functools.cached_property
    def losses_B(self) -> Tensor:
        losses_BK = F.binary_cross_entropy_with_logits(self.logits_BK, self.targets_BK.double(), reduction="none")
        return losses_BK.sum(dim=1)

    @functools.cached_property
    def average_precision_K(self) -> Tensor:
        return average_precision(self.logits_BK, self.targets_BK)

    @functools.cached_property
    def classes(self) -> ClassScores:
        return label_scores(self.predicted_BK, self.targets_BK)

    @functools.cached_property
    def reliability(self) -> Reliability:
        """Of every yes and no."""
        confidence_BK, right_BK = yes_or_no_confidence(self.logits_BK, self.targets_BK)
        return reliability(confidence_BK.flatten(), right_BK.flatten())


Case = OneLabel | SeveralLabels


def case_of(logits_BK: Tensor, targets: Tensor) -> Case:
    """The case of a model whose classes are those of the data; targets [B, K] where an image may have several labels."""
    if targets.ndim == 2:
        return SeveralLabels.of(logits_BK, targets)
    return OneLabel(logits_BK, targets, Match.identity(logits_BK.shape[1]))
