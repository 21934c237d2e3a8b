"""The answers of a model over a labelled set, and its accuracy: every example once, none dropped from the last batch.

Letters: B batch, K classes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.data.loader import Batch
from vitlab.data.preprocess import Preprocess, normalise
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

    def summary(self) -> dict[str, float]:
        """The numbers alone, as JSON has them."""
        numbers = {"top1": self.top1, "top5": self.top5, "loss": self.loss, "n": self.n}
        return numbers if self.mean_ap is None else {**numbers, "mean_ap": self.mean_ap}


@torch.inference_mode()
def run_model(
    model: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    rule: Preprocess,
    world: World,
    autocast: contextlib.AbstractContextManager[object] | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [B, K], targets, ids) of every valid image, in the order of their ids, on the CPU of every process.

    `model` is any function from prepared images to scores; a module is put into eval mode. `advance` hears how many images
    were seen. Fetching a batch of answers waits for the device, so it is done when the next one has been asked for.
    """
    if isinstance(model, nn.Module):
        model.eval()
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    waiting: tuple[Tensor, Batch] | None = None
    seen = 0
    for batch in batches:
        with autocast or contextlib.nullcontext():
            logits_BK = model(normalise(rule, batch.images.to(world.device, non_blocking=True))).float()
        if waiting is not None:
            rows.append(_valid_rows(*waiting, world))
        waiting = logits_BK, batch
        seen += int(batch.valid.sum()) * world.size
        if advance is not None:
            advance(seen)
    if waiting is not None:
        rows.append(_valid_rows(*waiting, world))
    if not rows or not sum(len(ids_B) for _, _, ids_B in rows):
        raise UsageError("there are no examples to evaluate on")
    logits_BK, targets, ids_B = (torch.cat(part) for part in zip(*rows, strict=True))
    order_B = ids_B.argsort()
    return logits_BK[order_B], targets[order_B], ids_B[order_B]


def _valid_rows(logits_BK: Tensor, batch: Batch, world: World) -> tuple[Tensor, Tensor, Tensor]:
    parts = (logits_BK, batch.targets.to(world.device), batch.ids.to(world.device), batch.valid.to(world.device))
    logits_BK, targets, ids_B, valid_B = (world.gathered(part).cpu() for part in parts)
    return logits_BK[valid_B], targets[valid_B], ids_B[valid_B]


def score(logits_BK: Tensor, targets: Tensor, ids_B: Tensor) -> Scores:
    """The numbers of answers that are in memory."""
    total = len(ids_B)
    several = targets.ndim == 2
    hits = {k: count_correct(logits_BK, targets, k) for k in (1, 5)}
    if several:
        loss = F.binary_cross_entropy_with_logits(logits_BK, targets, reduction="sum") / total
    else:
        loss = F.cross_entropy(logits_BK, targets)
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
