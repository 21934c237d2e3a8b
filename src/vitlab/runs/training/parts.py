"""Who trains, who tunes, who tests: the parts of the data that a run uses, and the sentence that says where they come from.

The rule: a test part is never tuned on. `val/` without `test/` is the test set, and validation data is held out of `train/`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.data.dataset import Dataset, Opened
from vitlab.data.sources.opening import open_data, require_trainable
from vitlab.data.splits import split_shares, split_table
from vitlab.runs.recipe import DataConfig, Recipe, read_data_config, recipe_from_dict


@dataclasses.dataclass(frozen=True)
class Parts:
    train: Dataset
    val: Dataset | None
    test: Dataset | None
    said: tuple[str, ...]
    copies: Sequence[Sequence[str]] = ()  # images that are kept together: to split the same data again, it takes these

    def fitted(self, method: str) -> int:
        """Images that the weights are fitted to: a linear probe is fitted again with its validation images."""
        return len(self.train) + (len(self.val) if method == "probe" and self.val is not None else 0)

    def table(self) -> str:
        """`path,label,split` rows of every image."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        rows = [
            (part.keys[i], ";".join(part.classes[label] for label in part.labels[i]), name)
            for name, part in named.items()
            if part is not None
            for i in range(len(part))
        ]
        paths, labels, split = ([row[k] for row in rows] for k in range(3))
        return split_table(paths, labels, split, None)


def assemble(
    table: Mapping[str, Any], console: Console | None = None, copies: Sequence[Sequence[str]] = ()
) -> tuple[Recipe, Parts]:
    """A recipe's table with its data opened: the recipe is whole only when the classes are known."""
    data = read_data_config(table)
    opened = dataclasses.replace(open_data(data.source, console=console), copies=copies)
    parts = arrange(opened, data)
    return recipe_from_dict(table, len(parts.train.classes)), parts


def arrange(opened: Opened, data: DataConfig, *, must_tune: bool = False) -> Parts:
    """The parts as the data has them; what is missing is held out, the same for the same data and `split_seed`.

    `must_tune` says that nobody can do without images for validation, as a sweep cannot.
    """
    said = list(opened.notes)
    parts = dict(opened.parts)
    if "train" not in parts and "all" not in parts:
        raise UsageError(f"the data has {', '.join(parts)}, but nothing to train on")
    train = parts.get("train", parts.get("all"))
    val, test = parts.get("val"), parts.get("test")
    assert train is not None
    if not opened.sparse:
        require_trainable(train, *(part for part in (val, test) if part is not None))
    if test is None and val is not None:
        val, test = None, val
        said.append("val/ is the test set, since there is no test/; it is not tuned on")
    if val is not None and data.val_frac and data.val_from == "train":
        val = None
        said.append("the data's own validation part is not used: the recipe chooses on a share of the training images")
    if test is None and data.test_frac:
        train, test = _hold_out(train, "test", data.test_frac, data.split_seed, opened.copies)
        said.append(f"{len(test)} images held out to test on")
    if val is None and data.val_frac:
        train, val = _hold_out(train, "val", data.val_frac, data.split_seed, opened.copies, needed=must_tune)
        said.append(f"{len(val)} images held out for validation")
    return Parts(train, val, test, tuple(said), opened.copies)


def _hold_out(
    dataset: Dataset, name: str, share: float, seed: int, copies: Sequence[Sequence[str]], *, needed: bool = False
) -> tuple[Dataset, Dataset]:
    try:
        split = split_shares(
            dataset, {"train": 1 - share, name: share}, seed, dataset.groups, copies_in(dataset, copies)
        )
    except UsageError as problem:
        # The first images that are held out, those to test on, are counted no more: a class of two has one left for validation.
        said = f"{problem.what} ({'train and test' if name == 'test' else 'train and val, beside what is kept to test on'})"
        way = "A sweep has to choose on some." if needed else f"--set data.{name}_frac=0 holds none out."
        raise UsageError(said, hint=" ".join(filter(None, (problem.hint, way)))) from problem
    index = {part: torch.tensor([i for i, own in enumerate(split) if own == part]) for part in ("train", name)}
    return dataset.subset(index["train"]), dataset.subset(index[name])


def copies_in(dataset: Dataset, copies: Sequence[Sequence[str]]) -> list[list[int]]:
    """The copies by number, of those that are in `dataset`."""
    group_of = {key: number for number, keys in enumerate(copies) for key in keys}
    found: dict[int, list[int]] = {}
    for i, key in enumerate(dataset.keys if copies else ()):
        if key in group_of:
            found.setdefault(group_of[key], []).append(i)
    return list(found.values())
