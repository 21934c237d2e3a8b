"""A run without steps: features of every image once, a linear head fitted to them, and the head put on the model."""

import torch
from torch import Tensor

from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.dataset import Dataset
from vitlab.evaluation.classify import score
from vitlab.evaluation.features import extract
from vitlab.models.build import Model
from vitlab.runs.recipe import Recipe
from vitlab.runs.training import run_folder
from vitlab.runs.training.live_run import EVAL_BATCH, LiveRun, merit, told_tuning
from vitlab.runs.training.trackers import tracking
from vitlab.training.objective import class_weights
from vitlab.training.precision import autocast
from vitlab.training.probe import L2_GRID, Head, fit_head

# Keys that mean nothing where there are no steps, or begin like this.
_OF_STEPS = ("optim.", "schedule.", "train.steps", "train.epochs", "train.examples", "train.average", "train.patience")
_OF_TRAINING_IMAGES = ("data.crop.", "data.augment", "data.mix.", "data.balanced", "data.repeats")
Features = tuple[Tensor, Tensor]  # [N, D] and the targets


def changes_nothing(key: str) -> bool:
    """Whether a head that is fitted at once takes no notice of this key."""
    return key.startswith(_OF_STEPS + _OF_TRAINING_IMAGES)


def require_head_alone(recipe: Recipe, *, said: bool) -> None:
    """An error where the recipe asks a head that is fitted at once for more than a head. Not of a run that goes on: earlier
    versions took no notice. `said` is whether somebody has said what to train: a recipe has it either way."""
    if recipe.train.method != "probe":
        return
    if recipe.teacher:
        raise UsageError("a teacher needs train.method=steps: a head that is fitted at once has none")
    what = recipe.optim.train
    if said and what != "head":
        raise UsageError(
            f"optim.train={what} needs train.method=steps: train.method=probe fits a head alone",
            hint=f"For {what}, drop train.method=probe or write steps; for a head, drop optim.train={what} or write head.",
        )


def train_head(run: LiveRun) -> None:
    """Fits the head on the training part; its strength of regularisation is the one that scores best on the tuning part."""
    recipe, parts = run.recipe, run.parts
    if run.world.size > 1:
        raise UsageError("a linear head on frozen features is fitted in one process")
    train = features_of(run, parts.train, "train", "features")
    val = None if parts.val is None else features_of(run, parts.val, "val", "tuning")
    counts_K = parts.train.labels.counts(len(parts.train.classes))
    weights_K = class_weights(counts_K) if recipe.objective.class_weights == "auto" else None

    def fitted(data: Features, l2: float) -> Head:
        return fit_head(*data, len(parts.train.classes), recipe.objective, l2=l2, class_weights_K=weights_K)

    best: dict[str, float] = {"step": 0, "l2": L2_GRID[len(L2_GRID) // 2]}
    if val is not None:
        run.evaluations = []
        for value in L2_GRID:
            found = score(fitted(train, value).logits(val[0]), val[1], torch.arange(len(val[0])))
            run.evaluations.append({"step": 0, "l2": value, **found.summary()})
        best = max(run.evaluations, key=merit)
        run.console.say(f"l2 {best['l2']:g}: {told_tuning(best)}; fitted again on all")
        with tracking(run) as track:
            track(0, {f"val/{name}": value for name, value in best.items() if name not in ("step", "l2")})
        train = torch.cat([train[0], val[0]]), torch.cat([train[1], val[1]])
    try:
        run_folder.write_metrics(run.folder, [{**row, "chosen": row is best} for row in run.evaluations or [best]])
    except FileProblem as problem:  # the head is worth more than what is told of it
        run.console.say(f"{problem.what}; training goes on without")
    head = fitted(train, best["l2"])
    model = run.state.model
    assert isinstance(model, Model) and model.head is not None
    with torch.no_grad():
        model.head.weight.copy_(head.weight_KD.view_as(model.head.weight))
        assert model.head.bias is not None
        model.head.bias.copy_(head.bias_K)
    run.state.step = run.steps


def features_of(run: LiveRun, dataset: Dataset, part: str, label: str) -> Features:
    """What the head sees, of every image that can be read, as the model sees it when it is tested; float32 on the CPU.

    They are kept in the run's folder, so that a run which was stopped computes only those that are missing.
    """
    model, recipe, device = run.state.model, run.recipe, run.world.device
    assert isinstance(model, Model)
    represent = model.eval().represent

    def describe(x_BCYX: Tensor) -> Tensor:
        with autocast(recipe.train.precision, device):
            return represent(x_BCYX)

    at_once = min(EVAL_BATCH, recipe.train.batch_size)
    found = extract(
        describe,
        dataset,
        recipe.data.preprocess(),
        folder=run.folder / run_folder.FEATURES / part,
        about={"images": len(dataset), "data": dataset.fingerprint()},
        device=device,
        batch_size=2 ** (at_once.bit_length() - 1),  # a chunk holds whole batches: what comes later is computed alike
        workers=recipe.data.workers,
        console=run.console,
        label=label,
    )
    run.features_per_second = found.computed / found.seconds
    run.bad.found.update(found.bad)
    run.bad.check()
    valid_N, targets = found.readable(), dataset.labels.targets(torch.arange(len(dataset)), len(dataset.classes))
    return torch.cat(list(found.chunks))[valid_N], targets[valid_N]
