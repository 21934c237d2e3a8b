"""The scores of a classifier for every image of a data set, beside what is right.

Letters: B images, K classes of the data, M classes of the model.
"""

import dataclasses
import time
from pathlib import Path

from torch import Tensor

from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.session import Session
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.engines.classifier import Classifier, tell_zero_head
from vitlab.engines.inference import InferenceOptions, inference_progress, predict_logits
from vitlab.evaluation.label_match import Match, match_by_file, match_by_name

MAX_BAD = 100  # images that may be unreadable, as in training


@dataclasses.dataclass(frozen=True)
class Scored:
    """`logits_BM` and `targets` (int64 [B], or [B, K] of zeros and ones) of the images that could be read."""

    dataset: Dataset
    match: Match
    logits_BM: Tensor
    targets: Tensor
    ids_B: Tensor
    bad: dict[str, str]
    seconds: float

    @property
    def several(self) -> bool:
        return self.targets.ndim == 2

    def in_data_classes(self) -> Tensor:
        """The scores of the data's classes, [B, K]: for images of several labels, where each class stands for one."""
        table_KW = self.match.table
        if table_KW.shape[1] > 1:
            raise UsageError(
                "where images have several labels, a label map can name one label of the model for each class"
            )
        return self.logits_BM[:, table_KW[:, 0]]

    def restricted(self) -> "Scored":
        """The same as if the model had no other classes than those of the data."""
        match, kept_m = self.match.restricted(self.logits_BM.shape[1])
        return dataclasses.replace(self, match=match, logits_BM=self.logits_BM[:, kept_m])


def require_answers(classifier: Classifier, *, force: bool) -> None:
    """Raise an error where a head cannot answer, before an image is read."""
    if not classifier.labels:
        raise UsageError(
            "this model has no classes, so it has no accuracy",
            hint="Measure its features: --knn, --few-shot 5 or --probe. Or train a head: vitlab train DATA --init MODEL.",
        )
    if tell_zero_head(classifier.bundle) and not force:
        raise UsageError(
            "the head is all zeros: every class would get the same score, and the first would always be the answer",
            hint="Train it first (vitlab train DATA --init MODEL), or measure the features with --knn; --force goes on.",
        )


def match_classes(classifier: Classifier, dataset: Dataset, label_map: Path | None, *, data: str) -> Match:
    """Which classes of the model are meant by those of the data."""
    if label_map is not None:
        return match_by_file(label_map, dataset.classes, classifier.labels)
    occurring = {*dataset.labels.values.tolist()}
    empty = [name for k, name in enumerate(dataset.classes) if k not in occurring]  # such as an empty folder
    # Where images have several labels, each class is a question of its own, and must be one that the model answers.
    return match_by_name(dataset.classes, classifier.labels, data, () if dataset.labels.multi else empty)


def known_images(dataset: Dataset, match: Match) -> Dataset:
    """The images of the classes that the model knows."""
    if bool(match.known.all()):
        return dataset
    if dataset.labels.multi:
        raise UsageError("where images have several labels, a label map must name all classes")
    kept = match.known[dataset.labels.single()].nonzero()[:, 0]
    if not len(kept):
        raise UsageError(f"{dataset.name} has no image of a class that is in the label map")
    return dataset.subset(kept)


def score_images(
    classifier: Classifier,
    dataset: Dataset,
    match: Match,
    options: InferenceOptions,
    session: Session,
    label: str,
) -> Scored:
    """Score every image of `dataset` that can be read, in its order."""
    bad = BadImages(MAX_BAD)
    started = time.perf_counter()
    with inference_progress(session.console, label, len(dataset), options) as advance:
        logits_BM, targets, ids_B = predict_logits(
            classifier.model, dataset, classifier.preprocess, options, session.world, bad, advance=advance
        )
    bad.share(session.world)
    _require_finite(logits_BM, ids_B, dataset)
    return Scored(dataset, match, logits_BM, targets, ids_B, bad.found, time.perf_counter() - started)


def _require_finite(logits_BM: Tensor, ids_B: Tensor, dataset: Dataset) -> None:
    odd_B = ~logits_BM.isfinite().all(dim=1)
    if bool(odd_B.any()):
        first = dataset.keys[int(ids_B[odd_B][0])]
        raise VitlabError(
            f"the model answers NaN or infinity for {int(odd_B.sum()):,} of {len(ids_B):,} images, the first is {first}",
            hint="Its weights or its preprocessing are wrong; no number would mean anything.",
        )
