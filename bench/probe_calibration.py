"""The linear probe's accuracy, loss and calibration by its rule before and after, beside scikit-learn's, on DINOv2 features.

    python bench/probe_calibration.py CACHE [SET ...]

Features are computed once and kept in the folder CACHE, in bfloat16 as `vitlab train` does it on a CPU; the fits take minutes.
Prints a Markdown table: means over three draws of the training images, or of the validation split where all are taken.
Before: of the six l2 with the best validation accuracy the largest, no temperature. scikit-learn: LogisticRegression with its
default C = 1 on standardised features of training and validation images.
"""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.environment import data_folder
from vitlab.data.dataset import Dataset, from_arrays
from vitlab.data.sources.opening import open_data
from vitlab.data.splits import split_shares
from vitlab.engines.classifier import load
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.classify import Scores, score
from vitlab.evaluation.linear_probe import fit, plain_head, pose
from vitlab.evaluation.row_store import RowStore, RowWork, compute_rows
from vitlab.runs.training.probing import cross_validate, enough_folds, fold_numbers
from vitlab.training.precision import autocast

CPU = torch.device("cpu")
SEEDS = (0, 1, 2)
BEFORE = tuple(2 * 10.0**e for e in (-1, -2, -3, -4, -5, -6))  # the penalty was l2·|W|², now it is l2/2·|W|²


class Set(NamedTuple):
    side: int  # pixels: small images are enlarged less than to 224, to save time
    train: int  # images of a class; 0 for all
    test: int
    shots: tuple[int, ...]
    tested: str = "val"  # "train": a part of its own is held out of the training images


SETS = {
    "hymenoptera": Set(224, 0, 0, (5, 15, 0)),
    "oxford_pets": Set(224, 0, 0, (5, 15, 0), "train"),
    "cifar10": Set(112, 100, 150, (5, 15, 0), "test"),
    "tiny_imagenet": Set(112, 15, 10, (5, 0)),
}


def features(cache: Path, name: str, part: str, per_class: int, side: int) -> tuple[Tensor, Tensor]:
    classifier = _start()
    dataset = open_data(name, console=Console(quiet=True)).parts[part]
    labels = dataset.labels.single()
    if per_class:
        index = [(labels == k).nonzero()[:per_class, 0] for k in range(len(dataset.classes))]
        dataset = dataset.subset(torch.cat(index).sort().values)
    rule = dataclasses.replace(classifier.preprocess, image_size=(side, side))

    def describe(x_BCYX: Tensor) -> Tensor:
        with autocast("bf16", CPU):
            return classifier.model.represent(x_BCYX)

    folder = cache / f"{name}-{'train' if part == 'train' else 'test'}-{side}-{per_class}"
    work, options, alone = RowWork(describe, rule), InferenceOptions(32, 0), World(0, 1, CPU)
    store = RowStore(folder, {})
    found = compute_rows(work, dataset, options, store=store, world=alone, console=Console(quiet=True))
    return torch.cat(list(found.chunks)), dataset.labels.single()


@functools.cache
def _start():
    path = data_folder()
    assert path is not None, "set VITLAB_DATA"
    return load(path / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors", device="cpu", quiet=True)


def drawn(labels: Tensor, shots: int, seed: int) -> Tensor:
    """So many images of each class; all of them for 0."""
    order = sorted(range(len(labels)), key=lambda i: hashlib.sha256(f"{seed} {i}".encode()).digest())
    index = torch.tensor(order)
    parts = [index[labels[index] == k] for k in labels.unique().tolist()]
    return torch.cat([part[: shots or len(part)] for part in parts]).sort().values


def named(labels: Tensor) -> Dataset:
    """Only labels and names, to be split."""
    images = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    return from_arrays(images, labels, [str(k) for k in range(int(labels.max()) + 1)], "features")


def held_out(labels: Tensor, share: float, seed: int) -> Tensor:
    split = split_shares(named(labels), {"train": 1 - share, "val": share}, seed, None)
    return torch.tensor([part == "val" for part in split])


def probes(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int) -> dict[str, tuple[Scores, float]]:
    """The scores and the temperature by each rule."""
    classes, val = int(y.max()) + 1, held_out(y, 0.2, seed)

    def scored(logits: Tensor, temperature: float = 1.0) -> tuple[Scores, float]:
        return score(logits.double() / temperature, test_y, torch.arange(len(test_y))), temperature

    def problem_of(x: Tensor, y: Tensor):
        return pose([x], y, classes)

    def head(index: Tensor, l2: float) -> Callable[[Tensor], Tensor]:
        problem = problem_of(x[index], y[index])
        return plain_head(problem, fit(problem, l2, None, 1e-5)).scores

    everything = torch.ones(len(y), dtype=torch.bool)
    rights = {l2: int((head(~val, l2)(x[val]).argmax(dim=1) == y[val]).sum()) for l2 in BEFORE}
    before = max(BEFORE, key=lambda l2: (rights[l2], l2))

    numbers = torch.zeros(len(y), dtype=torch.int64)
    numbers[~val] = fold_numbers(named(y[~val]), seed)
    rows = cross_validate(problem_of, x, y, enough_folds(numbers))
    best = next(row for row in rows if row["chosen"])
    logits = head(everything, best["l2"])(test_x)

    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    peer = LogisticRegression(max_iter=2000).fit(((x - mean) / std).numpy(), y.numpy())
    log_p = torch.from_numpy(peer.predict_log_proba(((test_x - mean) / std).numpy()))
    return {
        "before": scored(head(everything, before)(test_x)),
        "after": scored(logits, best["temperature"]),
        "after, T = 1": scored(logits),
        "scikit-learn": scored(log_p),
    }


def main(cache: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    print("| set | images | rule | accuracy | loss | ECE | temperature |\n|---|---|---|---|---|---|---|")
    for name in names:
        rule = SETS[name]
        x, y = features(cache, name, "train", rule.train, rule.side)
        if rule.tested == "train":
            test = held_out(y, 0.5, 0)
            test_x, test_y, x, y = x[test], y[test], x[~test], y[~test]
        else:
            test_x, test_y = features(cache, name, rule.tested, rule.test, rule.side)
        for shots in rule.shots:
            found: dict[str, list[tuple[Scores, float]]] = {}
            for seed in SEEDS:
                index = drawn(y, shots, seed)
                for kind, row in probes(x[index], y[index], test_x, test_y, seed).items():
                    found.setdefault(kind, []).append(row)
            for kind, rows in found.items():
                scores = [row for row, _ in rows]
                top1, loss, ece = (np.mean([getattr(row, key) for row in scores]) for key in ("top1", "loss", "ece"))
                warm = ", ".join(f"{temperature:.2f}" for _, temperature in rows)
                many = f"{len(index):,}" + (f" ({shots} a class)" if shots else "")
                print(f"| {name} | {many} | {kind} | {top1:.2%} | {loss:.3f} | {ece:.3f} | {warm} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(SETS))
