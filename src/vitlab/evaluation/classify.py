"""The scores that training reports of a labelled set: accuracy, loss, mean average precision. Letters: B images, K classes."""

import dataclasses
from typing import Any

from torch import Tensor

from vitlab.evaluation.answers import Case, OneLabel, case_of
from vitlab.evaluation.measures import values_of
from vitlab.evaluation.metrics import wilson_interval


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
    case: Case
    logits_BK: Tensor
    targets: Tensor
    ids: Tensor  # of the images in their data set, in the order of the rows

    @property
    def confusion_KK(self) -> Tensor | None:
        return self.case.confusion_KA[:, :-1] if isinstance(self.case, OneLabel) else None

    def summary(self) -> dict[str, float]:
        """The numbers alone, as JSON has them."""
        numbers = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "n": self.n}
        return numbers if self.mean_ap is None else {**numbers, "mean_ap": self.mean_ap}

    def test_summary(self) -> dict[str, Any]:
        """The numbers of a finished model, whose probabilities count as well. The interval is Wilson's, of 95 %."""
        return {**self.summary(), "top1_interval": list(self.interval), "ece": self.case.reliability.ece}


def score(logits_BK: Tensor, targets: Tensor, ids_B: Tensor) -> Scores:
    """The numbers of answers that are in memory."""
    case, n = case_of(logits_BK, targets), len(ids_B)
    found = values_of(case, "top1", "top5", "loss", "mean_ap")
    interval = wilson_interval(round(found["top1"] * n), n)
    values = (found["top1"], found["top5"], found["loss"], n, interval, found.get("mean_ap"))
    return Scores(*values, case, logits_BK, targets, ids_B)
