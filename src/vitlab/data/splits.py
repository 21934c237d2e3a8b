"""Deterministic, stratified splits: the same data and seed give the same split, whatever else runs."""

import csv
import io
from collections.abc import Mapping

import torch
from torch import Tensor

from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator
from vitlab.data.samples import Samples


def stratified_split(labels: Tensor, test_frac: float, seed: int) -> tuple[Tensor, Tensor]:
    """(train, test) indices in rising order; each class gives `test_frac` of its images, at least one, and keeps one."""
    if not 0 < test_frac < 1:
        raise UsageError(f"data.test_frac must lie between 0 and 1, not {test_frac}")
    train: list[Tensor] = []
    test: list[Tensor] = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero()[:, 0]
        if len(members) < 2:
            raise UsageError(f"class {label} has a single image, so it cannot be both trained on and tested")
        shuffled = members[torch.randperm(len(members), generator=generator(seed, label))]
        held_out = min(len(members) - 1, max(1, round(test_frac * len(members))))
        test.append(shuffled[:held_out])
        train.append(shuffled[held_out:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values


def split_csv(samples: Samples, parts: Mapping[str, Tensor]) -> str:
    """The split as `path,label,split` rows, so that it can be read, compared and used again."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "label", "split"])
    for name, index in parts.items():
        rows.writerows([samples.ids[i], samples.classes[int(samples.labels[i])], name] for i in index.tolist())
    return text.getvalue()
