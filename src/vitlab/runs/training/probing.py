"""A run without steps: features of every image once, a linear probe fitted to them, and its head put on the model.

Letters: N images, D features, K classes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitlab.core.dist import World
from vitlab.core.environment import cache_folder
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import Dataset
from vitlab.data.parts import held_out_images
from vitlab.data.splits import copies_in
from vitlab.engines.inference import InferenceOptions
from vitlab.evaluation.calibration import fit_sigmoid_temperature, fit_temperature
from vitlab.evaluation.classify import score
from vitlab.evaluation.features import FeatureRule, cached_features, feature_key
from vitlab.evaluation.label_match import Match
from vitlab.evaluation.linear_probe import NEARLY_FLAT, Head, Problem, fit, plain_head, pose, search
from vitlab.evaluation.row_store import RowStore, RowWork, compute_rows
from vitlab.models.build import Model
from vitlab.runs.training import run_folder
from vitlab.runs.training.live_run import EVAL_BATCH, LiveRun, describe_validation, primary_metric
from vitlab.training.objective import log_prior_of, losses, weights_of
from vitlab.training.precision import autocast
from vitlab.training.trackers import tracking

_UNTUNED_L2 = 2e-3  # without validation images
_FOLDS = 4  # of the training part; with the validation part five, the usual number
_ENOUGH = 1000  # images: the standard error of their accuracy is at most 1.6 %
# Few images say little, so l2 and temperature begin at what suits most features: a weight's spread of 1 on standardised
# features, which is l2 = 1/N and scikit-learn's C = 1, give or take a decade; and scores that are probabilities already.
_L2_PRIOR = 1.0
_TEMPERATURE_PRIOR = 10.0
_TEST_FLAT = 1e-5  # slope left in a fit that is only compared with others


class Features(NamedTuple):
    """Of the images that can be read."""

    x_ND: Tensor
    targets: Tensor
    images_N: Tensor  # their numbers in the data set


def train_probe(run: LiveRun) -> None:
    """Fits the head on the training and the validation part; l2 and temperature are those that do best for images which the
    head has not seen."""
    parts = run.parts
    if run.world.size > 1:
        raise UsageError("a linear head on frozen features is fitted in one process")
    train = features_of(run, parts.train, "train", "features")
    x_ND, targets, best = train.x_ND, train.targets, {"step": 0, "l2": _UNTUNED_L2, "chosen": True}
    if parts.val is not None:
        val = features_of(run, parts.val, "val", "validation")
        x_ND, targets = torch.cat([x_ND, val.x_ND]), torch.cat([targets, val.targets])
        own_N = fold_numbers(parts.train, run.recipe.data.split_seed, parts.copies)[train.images_N]
        folds = enough_folds(torch.cat([own_N, own_N.new_zeros(len(val.x_ND))]))
        run.evaluations = cross_validate(functools.partial(_pose, run), x_ND, targets, folds)
        best = next(row for row in run.evaluations if row["chosen"])
        run.temperature = best["temperature"]
        found = describe_validation(best)
        run.console.say(f"cross-validation: {found} with l2 {best['l2']:.2g}; fitted again on all")
        with tracking(run.recipe, run.folder, 0, run.world) as track:
            settings = ("step", "l2", "temperature", "chosen")
            track(0, {f"val/{name}": value for name, value in best.items() if name not in settings})
    try:
        run_folder.write_metrics(run.folder, run.evaluations or [best])
    except FileProblem as problem:  # the head is worth more than its metrics
        run.console.say(f"{problem.what}; training continues without")
    problem = _pose(run, x_ND, targets)
    head = plain_head(problem, fit(problem, best["l2"], flat=NEARLY_FLAT))
    model = run.state.model
    assert isinstance(model, Model) and model.head is not None
    with torch.no_grad():
        model.head.weight.copy_(head.weight_KD.view_as(model.head.weight))
        assert model.head.bias is not None
        model.head.bias.copy_(head.bias_K)
    run.state.step = run.steps


def _pose(run: LiveRun, x_ND: Tensor, targets: Tensor) -> Problem:
    train, rule = run.parts.train, run.recipe.objective
    counts_K = train.labels.counts(len(train.classes))
    weights_K, prior_K = weights_of(rule, train.classes, counts_K), log_prior_of(rule, counts_K)

    def each(scores_NK: Tensor, wanted: Tensor) -> Tensor:
        own_K, log_prior_K = (None if value_K is None else value_K.to(scores_NK) for value_K in (weights_K, prior_K))
        return losses(rule, scores_NK, wanted, class_weights_K=own_K, log_prior_K=log_prior_K)

    return pose([x_ND], targets, len(train.classes), run.world.device, each)


def fold_numbers(train: Dataset, seed: int, copies: Sequence[Sequence[str]] = ()) -> Tensor:
    """[N]: 1 to `_FOLDS`, stratified; -1 for all where a class has too few images for it. Fold 0 is the validation part.

    Copies of a picture, by name, are in one fold: a head that has learnt one knows the others.
    """
    number_N, rest = torch.full((len(train),), -1), torch.arange(len(train))
    for fold in range(1, _FOLDS):
        share, left = 1 / (_FOLDS + 1 - fold), train.subset(rest)
        pictures, held_out = copies_in(left, copies), torch.zeros(len(left), dtype=torch.bool)
        with contextlib.suppress(UsageError):
            held_out = held_out_images(left, "val", share, seed, copies)
        for images in pictures if left.groups is None else ():  # a split tears those of a class with too few pictures
            held_out[images] = held_out[images].all()
        if not held_out.any():
            return number_N.where(number_N > 0, fold if fold > 1 else -1)
        number_N[rest[held_out]], rest = fold, rest[~held_out]
    return number_N.where(number_N > 0, _FOLDS)


def enough_folds(folds_N: Tensor) -> list[Tensor]:
    """The images of each fold that is left out once: the validation part, and others until there are images enough."""
    found = [folds_N == 0]
    while sum(int(fold_N.sum()) for fold_N in found) < _ENOUGH and (folds_N == len(found)).any():
        found.append(folds_N == len(found))
    return found


def cross_validate(
    problem_of: Callable[[Tensor, Tensor], Problem], x_ND: Tensor, targets: Tensor, folds: Sequence[Tensor]
) -> list[dict[str, float]]:
    """A row for every l2 that was tried: what heads say of each fold that were fitted without it; one row is `chosen`."""
    problems = [problem_of(x_ND[~fold_N], targets[~fold_N]) for fold_N in folds]
    wanted = torch.cat([targets[fold_N] for fold_N in folds])

    def trial(l2: float, heads: Sequence[Head]) -> dict[str, float]:
        logits_NK = torch.cat([h.scores(x_ND[fold_N]).cpu() for h, fold_N in zip(heads, folds, strict=True)])
        temperature = _temperature(logits_NK, wanted)
        found = score(logits_NK / temperature, wanted, torch.arange(len(wanted))).summary()
        return {"step": 0, "l2": l2, "temperature": temperature, **found}

    rows, best = search(problems, trial, lambda rows: within_standard_error(rows, len(x_ND)), _TEST_FLAT)
    return [{**row, "chosen": row is best} for row in rows]


def _temperature(logits_NK: Tensor, targets: Tensor) -> float:
    if targets.ndim == 2:
        return fit_sigmoid_temperature(logits_NK, targets, _TEMPERATURE_PRIOR)
    return fit_temperature(logits_NK, targets, Match.identity(logits_NK.shape[1]), _TEMPERATURE_PRIOR)


def within_standard_error(rows: Sequence[dict[str, float]], images: int) -> dict[str, float]:
    """Of all that are within a standard error of the best accuracy, the row with the least loss, priors included."""
    most, n = max(map(primary_metric, rows)), rows[0]["n"]
    error = math.sqrt(most * (1 - most) / n)

    def cost(row: dict[str, float]) -> float:
        decades, odd = math.log10(row["l2"] * images), 1 / row["temperature"] - 1
        return n * row["loss"] + (_L2_PRIOR * decades**2 + _TEMPERATURE_PRIOR * odd**2) / 2

    return min((row for row in rows if primary_metric(row) >= most - error), key=cost)


def features_of(run: LiveRun, dataset: Dataset, part: str, label: str) -> Features:
    """What the head sees, of every image that can be read, as the model sees it when it is tested; float32 on the CPU.

    What `vitlab embed` or an evaluation has computed in the same way is taken from the cache. Others are kept in the run's
    folder, so that a run which was stopped computes only those that are missing.
    """
    model, recipe, device = run.state.model, run.recipe, run.world.device
    assert isinstance(model, Model)
    represent = model.eval().represent

    def describe(x_BCYX: Tensor) -> Tensor:
        with autocast(recipe.train.precision, device):
            return represent(x_BCYX)

    at_once = min(EVAL_BATCH, recipe.train.batch_size)
    key = feature_key(model, recipe.data.preprocess(), FeatureRule(), device, recipe.train.precision)
    found = cached_features(cache_folder() / "features", key, dataset)
    if found is not None:
        run.console.say(f"{label}: all {len(dataset):,} are in the cache")
    found = found or compute_rows(
        RowWork(describe, recipe.data.preprocess()),
        dataset,
        # A chunk holds whole batches: what comes later is computed alike.
        InferenceOptions(2 ** (at_once.bit_length() - 1), recipe.data.workers),
        store=RowStore(
            run.folder / run_folder.FEATURES / part, {"images": len(dataset), "data": dataset.fingerprint()}
        ),
        world=World(0, 1, device),
        console=run.console,
        label=label,
    )
    run.features_per_second = found.computed / found.seconds
    run.bad.found.update(found.bad)
    run.bad.check()
    images_N = found.readable().nonzero()[:, 0]
    targets = dataset.labels.targets(images_N, len(dataset.classes))
    return Features(torch.cat(list(found.chunks))[images_N], targets, images_N)
