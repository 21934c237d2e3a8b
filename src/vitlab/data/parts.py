"""Which images train, validate and test: one rule, for training, evaluation and the facts printed about a recipe.

A test part is never used for validation. `val` without `test` is the test set, and validation images are held out of `train`.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.opening import require_trainable
from vitlab.data.splits import copies_in, split_shares, split_table


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


@dataclasses.dataclass(frozen=True)
class Parts:
    """The images of a run by what they are for, and sentences about where they come from."""

    train: Dataset
    val: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...]
    copies: Sequence[Sequence[str]] = ()  # keys of images that show the same picture and stay in one part

    def used(self) -> dict[str, Dataset]:
        """The parts that there are, by name."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    def num_fitted(self, method: str) -> int:
        """How many images the weights are fitted to: a linear probe is refitted with its validation images."""
        return len(self.train) + (len(self.val) if method == "probe" and self.val is not None else 0)

    def table(self) -> str:
        """`path,label,split` rows of every image."""
        rows = [
            (part.keys[i], ";".join(part.classes[label] for label in part.labels[i]), name)
            for name, part in self.used().items()
            for i in range(len(part))
        ]
        paths, labels, split = ([row[k] for row in rows] for k in range(3))
        return split_table(paths, labels, split, None)


def train_part(parts: Collection[str]) -> str:
    """The name of the part that is learnt from."""
    for name in ("train", "all"):
        if name in parts:
            return name
    raise UsageError(f"the data has {', '.join(parts)}, but nothing to train on")


def test_part(parts: Collection[str]) -> str | None:
    """The name of the part that is tested on: `val` where there is no `test`, as everywhere with ImageNet."""
    return next((name for name in ("test", "val") if name in parts), None)


def validation_part(parts: Collection[str], val_from: str = "part", val_frac: float = 0.0) -> str | None:
    """The name of the part to validate on; None where that is tested on, or a share of `train` is asked for instead."""
    held_out = val_from == "train" and val_frac > 0
    return "val" if "val" in parts and "test" in parts and not held_out else None


def arrange(opened: Opened, rule: SplitRule, *, needs_val: bool = False) -> Parts:
    """The parts that the data has; what is missing is held out, the same for the same data and `split_seed`.

    `needs_val` says that there is no going without validation images, as in a sweep.
    """
    notes, parts = list(opened.notes), opened.parts
    train = parts[train_part(parts)]
    test_name, val_name = test_part(parts), validation_part(parts, rule.val_from, rule.val_frac)
    test, val = (None if name is None else parts[name] for name in (test_name, val_name))
    if not opened.sparse:
        require_trainable(train, *(parts[name] for name in ("val", "test") if name in parts))
    if test_name == "val":
        notes.append("val/ is the test set, since there is no test/; it is not used for validation")
    elif "val" in parts and val is None:
        notes.append(
            "the data's own validation part is not used: the recipe validates on a share of the training images"
        )
    if test is None and rule.test_frac:
        train, test = hold_out(train, "test", rule.test_frac, rule.split_seed, opened.copies)
        notes.append(f"{len(test)} images held out to test on")
    if val is None and rule.val_frac:
        train, val = hold_out(train, "val", rule.val_frac, rule.split_seed, opened.copies, needed=needs_val)
        notes.append(f"{len(val)} images held out for validation")
    return Parts(train, val, test, tuple(notes), opened.copies)


def hold_out(
    dataset: Dataset, name: str, share: float, seed: int, copies: Sequence[Sequence[str]] = (), *, needed: bool = False
) -> tuple[Dataset, Dataset]:
    """A stratified split in two: what is left to train on, and the part `name`."""
    try:
        held_N = held_out_images(dataset, name, share, seed, copies)
    except UsageError as problem:
        # The test images are held out first and counted no more: a class of two has one left for validation.
        parts = "train and test" if name == "test" else "train and val, beside what is kept to test on"
        remedy = "A sweep has to choose on some." if needed else f"--set data.{name}_frac=0 holds none out."
        hint = " ".join(filter(None, (problem.hint, remedy)))
        raise UsageError(f"{problem.what} ({parts})", hint=hint) from problem
    return dataset.subset((~held_N).nonzero()[:, 0]), dataset.subset(held_N.nonzero()[:, 0])


def held_out_images(
    dataset: Dataset, name: str, share: float, seed: int, copies: Sequence[Sequence[str]] = ()
) -> Tensor:
    """bool [N]: which images a stratified split holds out. Groups and copies of a picture stay together."""
    shares = {"train": 1 - share, name: share}
    split = split_shares(dataset, shares, seed, dataset.groups, copies_in(dataset, copies))
    return torch.tensor([part == name for part in split], dtype=torch.bool)
