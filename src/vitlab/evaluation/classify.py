"""Accuracy of a model over a labelled set: every example once, none dropped from the last batch."""

import dataclasses
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.errors import UsageError
from vitlab.evaluation.metrics import confusion_matrix, count_correct, wilson_interval


@dataclasses.dataclass(frozen=True)
class Scores:
    """Accuracies are fractions; `interval` is the 95 % interval of top-1."""

    top1: float
    top5: float
    loss: float
    n: int
    interval: tuple[float, float]
    confusion_KK: Tensor
    probabilities_BK: Tensor

    def summary(self) -> dict[str, float]:
        """The numbers alone, as JSON has them."""
        return {"top1": self.top1, "top5": self.top5, "loss": self.loss, "n": self.n}


@torch.inference_mode()
def score(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Scores:
    """Runs the model in eval mode over `batches` of (images, labels)."""
    model.eval()
    pairs = [(model(images).float().cpu(), labels.cpu()) for images, labels in batches]
    if not pairs:
        raise UsageError("there are no examples to evaluate on")
    logits_BK, labels_B = (torch.cat(part) for part in zip(*pairs, strict=True))
    total = len(labels_B)
    top1 = count_correct(logits_BK, labels_B, 1)
    return Scores(
        top1=top1 / total,
        top5=count_correct(logits_BK, labels_B, 5) / total,
        loss=F.cross_entropy(logits_BK, labels_B).item(),
        n=total,
        interval=wilson_interval(top1, total),
        confusion_KK=confusion_matrix(logits_BK.argmax(dim=1), labels_B, logits_BK.shape[1]),
        probabilities_BK=logits_BK.softmax(dim=1),
    )
