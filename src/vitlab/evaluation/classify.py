"""The scores that training reports of a labelled set: accuracy, loss, mean average precision. Letters: B images, K classes."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.evaluation.answers import judge
from vitlab.evaluation.calibration import reliability, yes_or_no_confidence
from vitlab.evaluation.label_match import ROWS, Match
from vitlab.evaluation.metrics import confusion_matrix, count_correct, mean_average_precision, wilson_interval


@dataclasses.dataclass(frozen=True)
class Scores:
    """Accuracies are fractions; `interval` is the 95 % interval of top-1.

    Where images have several labels, `top1` counts those whose best answer is one of them, and `mean_ap` is the mean over
    classes of the average precision.
    """

    top1: float
    top5: float
    loss: float
    n: int
    interval: tuple[float, float]
    mean_ap: float | None
    confusion_KK: Tensor | None
    logits_BK: Tensor
    targets: Tensor
    ids: Tensor  # of the images in their data set, in the order of the rows

    @property
    def ece(self) -> float:
        """The expected calibration error: of the likeliest label or, of several labels, of every yes and no."""
        if self.targets.ndim == 2:
            sure_BK, right_BK = yes_or_no_confidence(self.logits_BK, self.targets)
            return reliability(sure_BK.flatten(), right_BK.flatten()).ece
        answers = judge(self.logits_BK, self.targets, Match(tuple((k,) for k in range(self.logits_BK.shape[1]))))
        return reliability(answers.confidence_B, answers.right).ece

    def summary(self) -> dict[str, float]:
        """The numbers alone, as JSON has them."""
        numbers = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "n": self.n}
        return numbers if self.mean_ap is None else {**numbers, "mean_ap": self.mean_ap}

    def test_summary(self) -> dict[str, float]:
        """The numbers of a finished model, whose probabilities count as well."""
        return {**self.summary(), "ece": self.ece}


def score(logits_BK: Tensor, targets: Tensor, ids_B: Tensor) -> Scores:
    """The numbers of answers that are in memory."""
    total = len(ids_B)
    several = targets.ndim == 2
    hits = {k: count_correct(logits_BK, targets, k) for k in (1, 5)}
    pairs = zip(logits_BK.split(ROWS), targets.split(ROWS), strict=True)
    loss = torch.cat([_losses(logits_bK.double(), wanted) for logits_bK, wanted in pairs]).mean()
    return Scores(
        top1=hits[1] / total,
        top5=hits[5] / total,
        loss=float(loss),
        n=total,
        interval=wilson_interval(hits[1], total),
        mean_ap=mean_average_precision(logits_BK, targets) if several else None,
        confusion_KK=None if several else confusion_matrix(logits_BK.argmax(dim=1), targets, logits_BK.shape[1]),
        logits_BK=logits_BK,
        targets=targets,
        ids=ids_B,
    )


def _losses(logits_BK: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits_BK, targets.double(), reduction="none").sum(dim=1)
    return logits_BK.logsumexp(dim=1) - logits_BK.gather(1, targets[:, None])[:, 0]  # to the bit as in `answers`
