"""Pseudo-labels: a teacher's answers for unlabelled images, which of them are kept, and the training set they make.

Filtering and balancing are those of Noisy Student (Xie et al. 2020): images below a confidence are left out; each class has the
same number, the most confident ones where it has more, copies where it has fewer. Letters: N images, K classes, M rows.
"""

import dataclasses
import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.reading import open_regular
from vitlab.core.runtime import generator
from vitlab.data.dataset import Dataset, join, soft_labels
from vitlab.training.rules import NoisyStudentRule

_HALF_FROM = 2**26  # probabilities from which on they are stored in half precision: a quarter of a gigabyte
_REPEATED = 6  # keeps the choice of repeated images apart from other uses of the same seed
_AGAIN = "Remove it: the teacher then labels the images again."
PREFIX = "unlabelled/"  # of the names of images from another source, which may have names of the data


@dataclasses.dataclass(frozen=True)
class PseudoLabels:
    """A teacher's probabilities for unlabelled images, as stored: everything that follows is made from these numbers."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities_NK: Tensor  # float32; of those stored in half precision, the nearest
    teacher: str  # the hash of its weights

    @property
    def confidence_N(self) -> Tensor:
        return self.probabilities_NK.amax(dim=1)

    @property
    def answer_N(self) -> Tensor:
        """int64: the likeliest class; of equal ones, the lower."""
        return (self.probabilities_NK == self.probabilities_NK.amax(dim=1, keepdim=True)).int().argmax(dim=1)

    @property
    def shares_NK(self) -> Tensor:
        """Rows that sum to 1, as half precision does not keep them."""
        return self.probabilities_NK / self.probabilities_NK.sum(dim=1, keepdim=True)


def write_pseudo_labels(path: Path, labels: PseudoLabels) -> PseudoLabels:
    """Stores them whole or not at all, without a pickle; returns what a reader of the file gets."""
    stored_NK = labels.probabilities_NK.numpy()
    stored_NK = stored_NK.astype(np.float16) if stored_NK.size > _HALF_FROM else stored_NK.astype(np.float32)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        names=np.array(labels.names, dtype=np.str_),
        classes=np.array(labels.classes, dtype=np.str_),
        probabilities=stored_NK,
        teacher=np.array(labels.teacher),
    )
    fsio.write_file(path, buffer.getvalue())
    return dataclasses.replace(labels, probabilities_NK=torch.from_numpy(stored_NK.astype(np.float32)))


def read_pseudo_labels(path: Path) -> PseudoLabels:
    """What was stored; an error for a file that is damaged or not of this kind."""
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as table:
            names, classes, stored_NK = (table[name] for name in ("names", "classes", "probabilities"))
            teacher = str(table["teacher"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise FileProblem(f"{path} cannot be read as pseudo-labels: {error}", hint=_AGAIN) from None
    sound = stored_NK.dtype in (np.float16, np.float32) and stored_NK.shape == (len(names), len(classes))
    if not sound or not np.isfinite(stored_NK).all():
        raise FileProblem(f"{path} is damaged: it has no probability for each image and class", hint=_AGAIN)
    probabilities_NK = torch.from_numpy(stored_NK.astype(np.float32))
    return PseudoLabels(tuple(names.tolist()), tuple(classes.tolist()), probabilities_NK, teacher)


# --- which are kept -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which images a student learns, by number; copies stand as often as they are learnt."""

    rows: Tensor  # int64 [sum of kept], class by class, the most confident first
    per_class: int
    confident_K: Tensor  # int64: images at the threshold or above
    kept_K: Tensor  # int64: with copies

    @property
    def different_K(self) -> Tensor:
        return torch.minimum(self.confident_K, self.kept_K)

    @property
    def duplicated_K(self) -> Tensor:
        return (self.kept_K - self.confident_K).clamp(min=0)

    @property
    def dropped_K(self) -> Tensor:
        """Confident ones beyond what a class needs."""
        return (self.confident_K - self.kept_K).clamp(min=0)

    @property
    def empty_classes(self) -> list[int]:
        return (self.confident_K == 0).nonzero()[:, 0].tolist()


def select(labels: PseudoLabels, rule: NoisyStudentRule, teacher: str = "RUN") -> Selection:
    """Filter and balance. A class without a confident image has nothing to copy, and stays empty.

    `teacher` is how a command names who gave the labels: in its folder, the threshold can change no more.
    """
    confidence_N, answer_N = labels.confidence_N, labels.answer_N
    confident_N = confidence_N >= rule.threshold
    if not confident_N.any():
        raise UsageError(
            f"no unlabelled image has a confidence of {rule.threshold:g} or more: the highest is "
            f"{math.floor(1000 * float(confidence_N.max())) / 1000:.3f}",
            hint=f"Start anew with --teacher {teacher} and a lower --threshold, or train the teacher longer.",
        )
    confident_K = torch.bincount(answer_N[confident_N], minlength=len(labels.classes))
    per_class = rule.per_class or max(1, round(int(confident_K.sum()) / int((confident_K > 0).sum())))
    rows: list[Tensor] = []
    order_N = confidence_N.argsort(descending=True, stable=True)  # of equal ones, the earlier image first
    order_N = order_N[confident_N[order_N]]
    for k in range(len(labels.classes)):
        own = order_N[answer_N[order_N] == k]
        if len(own):
            rows.append(own[torch.arange(per_class) % len(own)])  # the most confident may be copied once more
    return Selection(torch.cat(rows), per_class, confident_K, (confident_K > 0) * per_class)


# --- what the student learns from ---------------------------------------------------------------------------------------


def student_set(
    labelled: Dataset,
    unlabelled: Dataset,
    labels: PseudoLabels,
    selection: Selection,
    rule: NoisyStudentRule,
    *,
    seed: int,
    foreign: bool,
) -> Dataset:
    """Labelled and pseudo-labelled images under shares of the classes; row i of `labels` is image i of `unlabelled`.

    The labelled ones are repeated to make up their share of an epoch, and smoothed here, because the loss cannot tell which
    is which. `foreign`: the unlabelled images come from another source, and get names of their own.
    """
    num_classes = len(labelled.classes)
    times = repeats_of(len(labelled), len(selection.rows), rule.labelled_share, seed)
    eye_KK = torch.eye(num_classes)
    smooth_KK = (1 - rule.label_smoothing) * eye_KK + rule.label_smoothing / num_classes
    chosen, row = selection.rows.unique(return_inverse=True)  # each image once, however often it is copied
    shares = labels.shares_NK[chosen] if rule.targets == "soft" else eye_KK[labels.answer_N[chosen]]
    rows = torch.cat([labelled.labels.single()[times], num_classes + row])
    soft = soft_labels(torch.cat([smooth_KK, shares]), rows)
    pseudo = unlabelled.subset(selection.rows)
    if foreign:
        pseudo = dataclasses.replace(pseudo, keys=[f"{PREFIX}{key}" for key in pseudo.keys])
    return join((labelled.subset(times), pseudo), soft, labelled.classes, f"{labelled.name} with pseudo-labels")


def repeats_of(labelled: int, pseudo: int, share: float, seed: int) -> Tensor:
    """int64: the labelled images of an epoch, each at least once, so many that they are `share` of it together with `pseudo`.

    What a whole number of repetitions leaves is a random choice of them.
    """
    wanted = max(labelled, round(share / (1 - share) * pseudo))
    whole, rest = divmod(wanted, labelled)
    some = torch.randperm(labelled, generator=generator(seed, _REPEATED))[:rest].sort().values
    return torch.cat([torch.arange(labelled).repeat(whole), some])


def summary(labels: PseudoLabels, selection: Selection, rule: NoisyStudentRule) -> dict[str, Any]:
    """The counts of a generation, as JSON has them."""
    columns = {
        "confident": selection.confident_K,
        "kept": selection.kept_K,
        "different": selection.different_K,
        "duplicated": selection.duplicated_K,
        "dropped": selection.dropped_K,
    }
    rows = [
        {"label": name, **{what: int(column[k]) for what, column in columns.items()}}
        for k, name in enumerate(labels.classes)
    ]
    below = len(labels.names) - int(selection.confident_K.sum())
    return {
        "images": len(labels.names),
        "threshold": rule.threshold,
        "below_threshold": below,
        "per_class": selection.per_class,
        **{what: int(column.sum()) for what, column in columns.items()},
        "classes": rows,
    }


def sentence(found: dict[str, Any], rule: NoisyStudentRule) -> str:
    """What was kept, and why so many, for the log."""
    number = f"{found['per_class']:,} of each class"
    why = "as asked" if rule.per_class else "the mean over the classes that have some"
    return (
        f"pseudo-labels: {found['confident']:,} of {found['images']:,} images at a confidence of {rule.threshold:g} or more; "
        f"{number} ({why}), of which {found['duplicated']:,} are copies; {found['dropped']:,} confident ones left out"
    )
