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
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, Batch, eval_batches
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.processes import loaders_for
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.answers import judge
from vitlab.evaluation.calibration import reliability, yes_or_no_confidence
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.metrics import confusion_matrix, count_correct, mean_average_precision, wilson_interval

BATCH = 64  # images; the last bits of a float depend on it, so that whoever repeats a measurement takes the same
_ROWS = 4096  # of answers in float64 at a time


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
    logits_BK, targets, ids_B, valid_B = (world.all_gather(part).cpu() for part in parts)
    return logits_BK[valid_B], targets[valid_B], ids_B[valid_B]


def predict_logits(
    classifier: Classifier,
    dataset: Dataset,
    world: World,
    bad: BadImages,
    *,
    batch_size: int = BATCH,
    workers: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`run_model` of a finished model in float32, by whoever measures it: the same images give the same bits."""
    batches = eval_batches(
        dataset,
        classifier.preprocess,
        batch_size=min(batch_size, max(1, len(dataset))),
        bad=bad,
        rank=world.rank,
        world=world.size,
        workers=loaders_for(len(dataset), workers),
        pin=world.device.type == "cuda",
    )
    return run_model(classifier.model, batches, classifier.preprocess, world, advance=advance)


def score(logits_BK: Tensor, targets: Tensor, ids_B: Tensor) -> Scores:
    """The numbers of answers that are in memory."""
    total = len(ids_B)
    several = targets.ndim == 2
    hits = {k: count_correct(logits_BK, targets, k) for k in (1, 5)}
    pairs = zip(logits_BK.split(_ROWS), targets.split(_ROWS), strict=True)
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
