"""Which images train, validate and test: one rule, for training, evaluation and the facts printed about a recipe.

A test part is never used for validation. `val` without `test` is the test set, and validation images are held out of `train`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.data.dataset import Dataset, Opened, join_without_labels, keep_classes, some_of, train_part
from vitlab.data.part_names import test_part, validation_part
from vitlab.data.sources.opening import require_trainable
from vitlab.data.splits import copies_in, split_shares, split_table, splittable

_SHOWN = 5  # classes in a warning; the number of the others follows
_LABELLED = 5  # keeps the choice of labelled images apart from other uses of the same seed


class SplitRule(Protocol):
    """What a recipe's `[data]` says about parts that the data lacks."""

    @property
    def test_frac(self) -> float: ...
    @property
    def val_frac(self) -> float: ...
    @property
    def val_from(self) -> Literal["part", "train"]: ...
    @property
    def split_seed(self) -> int: ...
    @property
    def min_images(self) -> int: ...
    @property
    def train_images(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Parts:
    """The images of a run by what they are for, and sentences about where they come from."""

    train: Dataset
    val: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...]
    copies: Sequence[Sequence[str]] = ()  # keys of images that show the same picture and stay in one part
    warnings: tuple[str, ...] = ()  # classes that are dropped, or trained and not tested
    also: tuple[Dataset, ...] = ()  # further images to train on, for objectives without labels
    unlabelled: Dataset | None = None  # images of the data that are in no part, because their labels are not to be used

    @functools.cached_property
    def learnt(self) -> Dataset:
        """What steps are taken on: `train`, and with `also` all of it without labels."""
        return join_without_labels((self.train, *self.also)) if self.also else self.train

    def used(self) -> dict[str, Dataset]:
        """The parts that there are, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    def num_fitted(self, method: str) -> int:
        """How many images the weights are fitted to: a linear probe is refitted with its validation images."""
        return len(self.learnt) + (len(self.val) if method == "probe" and self.val is not None else 0)

    def table(self) -> str:
        """`path,label,split` rows of every image; those of `also`, and what is in no part, are listed without a label."""
        rows = [
            (key, ";".join(part.classes[label] for label in labels), name)
            for name, part in self.used().items()
            for key, labels in zip(part.keys, part.labels, strict=True)
        ]
        rows += [(key, "", "also") for part in self.also for key in part.keys]
        rows += [(key, "", "unlabelled") for key in (() if self.unlabelled is None else self.unlabelled.keys)]
        paths, labels, split = ([row[k] for row in rows] for k in range(3))
        return split_table(paths, labels, split, None)


def arrange(
    opened: Opened,
    rule: SplitRule,
    *,
    needs_val: bool = False,
    labelled: bool = True,
    also: Sequence[Dataset] = (),
) -> Parts:
    """The parts that the data has; what is missing is held out, the same for the same data and `split_seed`.

    Classes with fewer training images than `min_images` are dropped; those too small to hold some out of are only trained.
    `needs_val`: validation images are required, as in a sweep. Without `labelled`, images need no classes, and where they have
    none, nothing is held out to test on.
    """
    opened, warnings = drop_small_classes(opened, rule.min_images)
    notes, parts, held = list(opened.notes), opened.parts, list[str]()
    train = parts[train_part(parts)]
    test_name, val_name = test_part(parts), validation_part(parts, rule.val_from, rule.val_frac)
    test, val = (None if name is None else parts[name] for name in (test_name, val_name))
    if labelled and not opened.sparse:
        require_trainable(train, *(parts[name] for name in ("val", "test") if name in parts))
    if test_name == "val":
        notes.append("val/ is the test set, since there is no test/; it is not used for validation")
    elif "val" in parts and val is None:
        notes.append(
            "the data's own validation part is not used: the recipe validates on a share of the training images"
        )
    if test is None and rule.test_frac and train.classes:
        train, test = hold_out(train, "test", rule.test_frac, rule.split_seed, opened.copies)
        held.append("test")
        warnings += _without_images(train, test, "trained and not tested")
    if val is None and rule.val_frac:
        train, val = hold_out(train, "val", rule.val_frac, rule.split_seed, opened.copies, needed=needs_val)
        held.append("validation")
        warnings += _without_images(train, val, "trained and not used for validation")
    if held:
        notes.append(f"{' and '.join(held)} images: held out of the training images by a stratified split")
    if rule.train_images and rule.train_images != len(train):
        notes.append(f"{rule.train_images:,} of the {len(train):,} training images are used (data.train_images)")
        train = some_images(train, rule.train_images, rule.split_seed)
    return Parts(train, val, test, tuple(notes), opened.copies, tuple(warnings), tuple(also))


def drop_small_classes(opened: Opened, min_images: int) -> tuple[Opened, list[str]]:
    """The data without classes of fewer training images than `min_images`, and a warning that names them."""
    train = opened.parts[train_part(opened.parts)]
    kept_K = train.labels.counts(len(train.classes)) >= min_images
    if kept_K.all():
        return opened, []
    small = [name for name, kept in zip(train.classes, kept_K.tolist(), strict=True) if not kept]
    if kept_K.sum() < 2:
        raise UsageError(
            f"min_images={min_images} leaves {int(kept_K.sum())} of the {len(kept_K)} classes of {train.name}, not two",
            hint="Ask for fewer, or add images.",
        )
    parts = {name: keep_classes(part, kept_K) for name, part in opened.parts.items()}
    if empty := [name for name, part in parts.items() if not len(part)]:
        raise UsageError(f"min_images={min_images} leaves no image in {' and '.join(empty)}", hint="Ask for fewer.")
    warning = (
        f"{len(small)} of {len(kept_K)} classes dropped, with fewer than {min_images} images: {some_of(small, _SHOWN)}"
    )
    return dataclasses.replace(opened, parts=parts), [warning]


def _without_images(train: Dataset, held: Dataset, what: str) -> list[str]:
    """A warning where classes to train on were too small to hold some out of."""
    count_K, held_K = (part.labels.counts(len(part.classes)) for part in (train, held))
    small = [name for name, lacks in zip(train.classes, ((count_K > 0) & (held_K == 0)).tolist(), strict=True) if lacks]
    return [f"too few images to hold any out, so {what}: {some_of(small, _SHOWN)}"] if small else []


def hold_out(
    dataset: Dataset, name: str, share: float, seed: int, copies: Sequence[Sequence[str]] = (), *, needed: bool = False
) -> tuple[Dataset, Dataset]:
    """A stratified split in two: what is left to train on, and the part `name`."""
    try:
        held_N = held_out_images(dataset, name, share, seed, copies)
    except UsageError as problem:
        # The test images are held out first and counted no more: a class of two has one left for validation.
        parts = "train and test" if name == "test" else "train and val, besides the test images"
        remedy = "A sweep needs validation images." if needed else f"--set data.{name}_frac=0 holds none out."
        hint = " ".join(filter(None, (problem.hint, remedy)))
        raise UsageError(f"{problem.what} ({parts})", hint=hint) from problem
    return dataset.subset((~held_N).nonzero()[:, 0]), dataset.subset(held_N.nonzero()[:, 0])


def some_images(dataset: Dataset, count: int, seed: int) -> Dataset:
    """So many images, stratified where there are classes. Fewer of the same data and seed are among more of them."""
    if dataset.classes:
        return dataset.subset(_labelled_images(dataset, seed, count=count).nonzero()[:, 0])
    if count > len(dataset):
        raise UsageError(f"{count:,} images cannot be taken from {dataset.name}: it has {len(dataset):,}")
    order_N = torch.randperm(len(dataset), generator=generator(seed, _LABELLED))
    return dataset.subset(order_N[:count].sort().values)


def keep_labels(dataset: Dataset, seed: int, *, count: int = 0, per_class: int = 0) -> tuple[Dataset, Dataset]:
    """A split in two: images that keep their labels, and the rest. The same for the same data and seed.

    `per_class` of each class or, with `count`, so many in all, stratified: each class in proportion to its images.
    """
    labelled_N = _labelled_images(dataset, seed, count=count, per_class=per_class)
    return dataset.subset(labelled_N.nonzero()[:, 0]), dataset.subset((~labelled_N).nonzero()[:, 0])


def _labelled_images(dataset: Dataset, seed: int, *, count: int = 0, per_class: int = 0) -> Tensor:
    """bool [N]: the first images of each class in a random order, as many as `keep_labels` says."""
    values_N = dataset.labels.single()
    counts_K = torch.bincount(values_N, minlength=len(dataset.classes))
    kept_K = counts_K.clamp(max=per_class) if per_class else _stratified(counts_K, count, dataset.name)
    if int(kept_K.sum()) == len(dataset):
        raise UsageError(
            f"all {len(dataset):,} images of {dataset.name} would keep their labels: nothing remains unlabelled",
            hint="Keep fewer labels.",
        )
    order_N = torch.randperm(len(dataset), generator=generator(seed, _LABELLED))
    # One stable sort by class, not a pass over all images for each: a million images may have a thousand classes.
    order_N = order_N[values_N[order_N].argsort(stable=True)]
    rank_N = torch.arange(len(dataset)) - (counts_K.cumsum(0) - counts_K).repeat_interleave(counts_K)
    labelled_N = torch.zeros(len(dataset), dtype=torch.bool)
    labelled_N[order_N[rank_N < kept_K.repeat_interleave(counts_K)]] = True
    return labelled_N


def _stratified(counts_K: Tensor, count: int, name: str) -> Tensor:
    """How many of each class: shares rounded so that they sum up to `count`, and one at least of each that has some."""
    total, present = int(counts_K.sum()), int((counts_K > 0).sum())
    if not present <= count <= total:
        raise UsageError(
            f"{count:,} labelled images cannot be taken from {name}: it has {total:,}, and one of each of its "
            f"{present:,} classes is needed"
        )
    exact_K = counts_K.double() * (count / total)
    kept_K = torch.minimum(exact_K.floor().long().clamp(min=1), counts_K)
    while (missing := count - int(kept_K.sum())) != 0:  # the largest remainder first; of equal ones, the lower class
        up = missing > 0
        able_K = (kept_K < counts_K) if up else (kept_K > 1)
        behind_K = (exact_K - kept_K) if up else (kept_K - exact_K)
        kept_K[int(behind_K.masked_fill(~able_K, -torch.inf).argmax())] += 1 if up else -1
    return kept_K


def held_out_images(
    dataset: Dataset, name: str, share: float, seed: int, copies: Sequence[Sequence[str]] = ()
) -> Tensor:
    """bool [N]: which images a stratified split holds out. Groups and copies of a picture stay together.

    None of classes that are too small for that, unless fewer than two others remain: then it is an error.
    """
    shares = {"train": 1 - share, name: share}
    able_N = splittable(dataset, len(shares), dataset.groups, copies_in(dataset, copies))
    if able_N.all() or len(dataset.labels.subset(able_N.nonzero()[:, 0]).values.unique()) < 2:
        able_N, rest = torch.ones_like(able_N), dataset
    else:
        rest = dataset.subset(able_N.nonzero()[:, 0])
    split = split_shares(rest, shares, seed, rest.groups, copies_in(rest, copies))
    held_N = torch.zeros_like(able_N)
    held_N[able_N] = torch.tensor([part == name for part in split], dtype=torch.bool)
    return held_N
