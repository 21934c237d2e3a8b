"""How good vectors are: few-shot linear, nearest neighbours, linear probe, as numbers ready for JSON. Letters: D features."""

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.engines.classifier import Classifier
from vitlab.engines.inference import InferenceOptions, predict_logits
from vitlab.evaluation import few_shot, knn, linear_probe
from vitlab.evaluation.metrics import wilson_interval
from vitlab.evaluation.row_store import CHUNK_ROWS, pick_rows


class Vectors(NamedTuple):
    """Chunks of [n, D], and a label for each row."""

    chunks: list[Tensor]
    labels: Tensor


def few_shot_numbers(
    train: Vectors, test: Vectors, classes: Sequence[str], shots: Sequence[int], seeds: int, device: torch.device
) -> dict[str, Any]:
    """`few_shot`, the mean over the draws, and `few_shot_detail` with every draw."""
    detail: dict[str, Any] = {}
    for number in shots:
        values, started = list[float](), time.perf_counter()
        for seed in range(seeds):
            index = few_shot.draw_shots(train.labels, number, seed, classes)
            fitted = few_shot.fit_ridge(
                pick_rows(train.chunks, index).to(device), train.labels[index].to(device), len(classes)
            )
            right, _ = linear_probe.judge(fitted.scores, test.chunks, test.labels)
            values.append(right / len(test.labels))
        detail[str(number)] = {
            "seeds": list(range(seeds)),
            "values": values,
            "low": min(values),
            "high": max(values),
            "l2": few_shot.L2,
            "seconds": time.perf_counter() - started,
        }
    means = {name: sum(found["values"]) / len(found["values"]) for name, found in detail.items()}
    return {"few_shot": means, "few_shot_detail": detail}


def knn_numbers(train: Vectors, test: Vectors, num_classes: int, k: int, device: torch.device) -> dict[str, Any]:
    """`k` neighbours with weighted votes are the answer; other numbers and plain votes stand beside it."""
    started = time.perf_counter()
    ks = sorted({k, *(other for other in knn.GRID if other <= len(train.labels))})
    votes = knn.knn_votes(train.chunks, train.labels, test.chunks, test.labels, num_classes, ks=ks, device=device)
    total = len(test.labels)
    return {
        "k": k,
        "top1": votes.weighted[k] / total,
        "interval": list(wilson_interval(votes.weighted[k], total)),
        "weighting": "weighted",
        "temperature": knn.TEMPERATURE,
        "seconds": time.perf_counter() - started,
        "grid": [{"k": n, "plain": votes.plain[n] / total, "weighted": votes.weighted[n] / total} for n in ks],
    }


def knn_of_model(
    classifier: Classifier, train: Dataset, test: Dataset, options: InferenceOptions, world: World, bad: BadImages
) -> dict[str, Any] | None:
    """`knn_numbers` of what the head would see, with `n` test images; None where images have no label each, or one alike."""
    if train.labels.multi or len(train.classes) < 2:
        return None
    vectors: list[Vectors] = []
    for part in (train, test):
        rows_ND, labels_N, _ = predict_logits(
            classifier.model.represent, part, classifier.preprocess, options, world, bad
        )
        vectors.append(Vectors(list(rows_ND.split(CHUNK_ROWS)), labels_N))
    neighbours = min(knn.NEIGHBOURS, len(vectors[0].labels))
    found = knn_numbers(vectors[0], vectors[1], len(train.classes), neighbours, world.device)
    return {name: found[name] for name in ("k", "top1", "interval", "weighting", "temperature")} | {
        "n": len(vectors[1].labels)
    }


def probe_numbers(
    fit: Vectors, tune: Vectors, test: Vectors, num_classes: int, device: torch.device, console: Console
) -> dict[str, Any]:
    """l2 chosen on `tune`, then fitted again on `fit` and `tune` together, and tested once."""
    started = time.perf_counter()
    problem, count = linear_probe.pose(fit.chunks, fit.labels, num_classes, device), itertools.count(1)
    with console.progress("probe", linear_probe.TRIALS) as advance:

        def trial(l2: float, heads: Sequence[linear_probe.Head]) -> linear_probe.Row:
            right, loss = linear_probe.judge(heads[0].scores, tune.chunks, tune.labels)
            row = {"l2": l2, "top1": right / len(tune.labels), "loss": loss}
            advance(next(count), f"l2 {l2:.1e}: {row['top1']:.2%}")
            return row

        rows, best = linear_probe.search([problem], trial, linear_probe.most_right, linear_probe.NEARLY_FLAT)
    everything = Vectors([*fit.chunks, *tune.chunks], torch.cat([fit.labels, tune.labels]))
    problem = linear_probe.pose(everything.chunks, everything.labels, num_classes, device)
    head = linear_probe.plain_head(problem, linear_probe.fit(problem, best["l2"]))
    right, loss = linear_probe.judge(head.scores, test.chunks, test.labels)
    learnt, _ = linear_probe.judge(head.scores, everything.chunks, everything.labels)
    return {
        "top1": right / len(test.labels),
        "interval": list(wilson_interval(right, len(test.labels))),
        "loss": loss,
        "l2": best["l2"],
        "seconds": time.perf_counter() - started,
        "train_top1": learnt / len(everything.labels),
        "val_top1": best["top1"],
        "sweep": [{"l2": row["l2"], "val_top1": row["top1"], "val_loss": row["loss"]} for row in rows],
    }
