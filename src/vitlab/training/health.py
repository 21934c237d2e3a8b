"""What goes wrong without an error: each looked for where it can be seen, and reported once, with what to do about it.

Owns the thresholds and the sentences; a function here looks, and gives a sentence or None. Letters: K classes.
"""

import contextlib
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vitlab.core.environment import usable_cores
from vitlab.core.errors import VitlabError
from vitlab.data.augmentation.augment import augment
from vitlab.data.augmentation.crops import crop_and_resize
from vitlab.data.dataset import Dataset
from vitlab.models.names import format_name
from vitlab.models.spec import ModelSpec
from vitlab.training.loop import StepRecord, TrainState
from vitlab.training.objective import Objective, weights_of
from vitlab.training.recipe import DataConfig, Recipe
from vitlab.training.sharding import to_local

CHECKS = 10  # during a run: often enough to act upon, seldom enough to cost nothing
EARLY = 0.3  # of the run, in which a model may know nothing yet: a schedule's warm-up is over by then
_FEWEST_PATCHES = 16  # a 4x4 grid is the least that has a middle and an edge
_SAMPLED = 64  # numbers of each tensor: one that moves moves in many places
_STILL = 1e-6  # of its size; ten times what float32 can tell apart
_FEWEST_STEPS = 20  # before which no loss means much
_LIKE_CHANCE = 0.99  # of the loss at chance
_OVERFITTING = 3  # evaluations in a row: one alone may be noise
_WORSE = 1.05  # times the loss of the first of them
_WAITING = 0.5  # of the time
_WORTH_TELLING = 10.0  # seconds that a run loses by waiting
_USUAL = 20  # steps whose median loss is the usual one
_WARMING = 0.5  # of the steps; that of the published recipes is a fifth of their runs at most
_UNSETTLED = 0.1  # of the start left in the statistics: images are then normalised a tenth too wide or too narrow
_AUGMENTED = 64  # images that are looked at, evenly spaced: sets are often sorted by class
_BLANK = 0.05  # of them; the strongest published augmentation blanks 0.5 % at the size it was made for
_FLAT = 8  # grey levels between the darkest and the brightest pixel of a channel
_SPIKE = 100.0  # times the usual loss; what noise and a hard batch do is far below


def coarse_grid(spec: ModelSpec) -> str | None:
    """Before training: patches so large that an image is hardly cut up."""
    (rows, cols), size = spec.grid, spec.image_size
    if rows * cols >= _FEWEST_PATCHES or spec.num_tokens is None:
        return None
    return (
        f"{format_name(spec)} cuts images of {size[0]}x{size[1]} pixels into only {rows}x{cols} patches; a smaller patch "
        f"(as in --model ViT-S/4) or --set data.image_size=[224,224] shows it more"
    )


def repeated_images(batch_size: int, train_images: int) -> str | None:
    """Before training: updates that see every image more than once."""
    if batch_size <= train_images:
        return None
    return (
        f"a batch of {batch_size:,} is larger than the {train_images:,} training images, so every update sees some of them "
        f"more than once; a smaller train.batch_size learns more from the same time"
    )


def long_warmup(warmup: int, steps: int) -> str | None:
    """Before training: a rate that has hardly reached its peak when the run is over, as where a long recipe is cut short."""
    if warmup <= _WARMING * steps:
        return None
    what = "never reaches its peak" if warmup > steps else "rises for most of it"
    return (
        f"the warm-up takes {warmup:,} steps and the run has {steps:,}: the learning rate {what}; "
        f"--set 'schedule.warmup=10 %' fits any length"
    )


def slow_statistics(spec: ModelSpec, steps: int) -> str | None:
    """Before training from scratch: running statistics that a short run hardly moves, though evaluation rests on them."""
    momentum: float | None = getattr(spec, "bn_momentum", None)
    if momentum is None or (left := (1 - momentum) ** steps) <= _UNSETTLED:
        return None
    return (
        f"batch norm keeps {left:.0%} of the statistics it starts with over {steps:,} steps, and evaluation normalises by "
        f"them; --set model.bn_momentum=0.1 follows faster than {momentum:g}"
    )


def blanking_augmentation(train: Dataset, data: DataConfig, seed: int) -> str | None:
    """Before training: augmentation that leaves images one flat colour, looked at in what the first epoch will see."""
    count = min(_AUGMENTED, len(train))
    crops: dict[int, Tensor] = {}
    for i in (torch.arange(count) * len(train) // count).tolist():
        with contextlib.suppress(VitlabError, OSError):  # the loader reports bad images
            crops[i] = crop_and_resize(train.read(i), data.preprocess(), data.crop, seed=seed, epoch=0, sample=i)
    if not crops:
        return None
    before_BCYX = torch.stack(list(crops.values()))
    after_BCYX = augment(before_BCYX, torch.tensor(list(crops)), data.augment, seed=seed, epoch=0)
    blank = int((_is_flat(after_BCYX) & ~_is_flat(before_BCYX)).sum())
    if blank <= _BLANK * len(crops):
        return None
    rows, cols = data.image_size
    remedy = "a weaker data.augment keeps them"
    if data.augment.randaugment == "augreg":
        remedy = (
            f"augreg shifts by pixels, as for images of 224x224; at {rows}x{cols}, a smaller data.augment.magnitude or "
            f"--set data.augment.randaugment=torchvision, which goes by the size, keeps them"
        )
    return f"augmentation leaves {blank} of {len(crops)} sampled training images one flat colour: {remedy}"


def _is_flat(x_BCYX: Tensor) -> Tensor:
    return (x_BCYX.amax(dim=(2, 3)) - x_BCYX.amin(dim=(2, 3)) <= _FLAT).all(dim=1)


def sample_weights(model: nn.Module) -> dict[str, Tensor]:
    """A few numbers of every tensor that is trained, on the CPU."""
    samples: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            samples[name] = to_local(parameter).detach().flatten()[:_SAMPLED].float().cpu().clone()
    return samples


def unapplied_rate(state: TrainState, before: Mapping[str, Tensor], lr: float) -> str | None:
    """After some steps: an optimiser that has another rate than the schedule, lacks weights, or moves none."""
    groups = state.optimizer.param_groups
    for group in groups:
        if not math.isclose(group["lr"], lr * group["lr_scale"], rel_tol=1e-6, abs_tol=0.0):
            return f"the learning rate is not applied: the optimiser has {group['lr']:.2e}, the schedule says {lr:.2e}"
    in_optimizer = {id(parameter) for group in groups for parameter in group["params"]}
    lacking = [name for name, p in state.model.named_parameters() if p.requires_grad and id(p) not in in_optimizer]
    if lacking:
        return f"{len(lacking)} tensors are to be trained but the optimiser does not have them, {lacking[0]} for one"
    now = sample_weights(state.model)
    # What began at zero, as a new head does, has no size to compare with: its inputs are about 1, so its numbers are as they
    # are. It has to count: at the first step it is all that moves, because no gradient gets through zeros.
    sizes = {name: float(old.norm()) or math.sqrt(old.numel()) for name, old in before.items() if old.numel()}
    moves = [float((now[name] - before[name]).norm()) / size for name, size in sizes.items()]
    if not moves or max(moves) > _STILL:
        return None
    return f"no weight has moved: a learning rate of {lr:.1e} is too small to change them; raise optim.lr"


def chance_loss(objective: Objective, train: Dataset) -> float | None:
    """The loss of who knows how often each class occurs and nothing else; None where no such number is known."""
    if objective.kind != "softmax" or objective.distillation is not None:
        return None
    counts_K = train.labels.counts(len(train.classes)).double()
    if objective.class_weights == "auto":
        return math.log(int((counts_K > 0).sum()))
    weights_K = weights_of(objective, train.classes, counts_K)
    # A constant answer is best at the shares of the weighed classes; the bias of a head makes up for adjusted logits.
    weighed_K = counts_K if weights_K is None else counts_K * weights_K
    shares_K = weighed_K[weighed_K > 0] / weighed_K.sum()
    return float(-(shares_K * shares_K.log()).sum() * weighed_K.sum() / counts_K.sum())


def loss_at_chance(records: Sequence[StepRecord], steps: int, chance: float | None) -> str | None:
    """A loss that is still at chance when a good part of the run is over."""
    if chance is None or not records or records[-1].step < max(_FEWEST_STEPS, EARLY * steps):
        return None
    recent = records[-max(1, steps // CHECKS) :]
    loss = sum(record.loss for record in recent) / len(recent)
    if loss < _LIKE_CHANCE * chance:
        return None
    return (
        f"after {records[-1].step} steps the loss is {loss:.3f}, and {chance:.3f} is chance: nothing is being learnt; "
        f"try another optim.lr, and look at images and labels with `vitlab data check`"
    )


def spike(records: Sequence[StepRecord]) -> str | None:
    """After a step: a loss far above those before it."""
    usual = [record.loss for record in records[-_USUAL - 1 : -1]]
    if not usual or records[-1].loss <= _SPIKE * statistics.median(usual):
        return None
    last = records[-1]
    return (
        f"the loss jumped from {statistics.median(usual):.3g} to {last.loss:.3g} at step {last.step}: if it does not come "
        f"back, start again with a lower optim.lr, a longer warm-up or a smaller optim.max_grad_norm"
    )


def waiting(records: Sequence[StepRecord], steps: int, batch_size: int, data: DataConfig) -> str | None:
    """Steps that wait for images most of the time, where that costs more than a moment."""
    recent = records[1:][-max(1, steps // CHECKS) :]  # the first one fills the queue
    if not recent:
        return None
    wait = sum(record.data_wait_frac for record in recent) / len(recent)
    seconds = sum(batch_size / record.images_per_second for record in recent) / len(recent)
    lost = wait * seconds * steps
    if wait < _WAITING or lost < _WORTH_TELLING:
        return None
    waited = f"{wait:.0%} of the time goes by waiting for images, {lost:.0f} s of this run: "
    if data.cache == "device":  # which no worker serves
        return f"{waited}data.augment has the device do much; --set data.cache=file has workers do it"
    cores = f"now {data.workers}; {usable_cores()} cores here"
    return f"{waited}raise data.workers ({cores}), or --set data.cache=memory where they fit"


def one_answer(logits_BK: Tensor, targets: Tensor, classes: Sequence[str], recipe: Recipe) -> str | None:
    """At an evaluation: the same class for every image."""
    answers_B = logits_BK.argmax(dim=1)
    several = targets.ndim == 2 or len(torch.unique(targets)) > 1
    if len(answers_B) < 2 or not several or len(torch.unique(answers_B)) > 1:
        return None
    # A linear probe has neither rate nor steps.
    ways = (
        ["more images", "other start weights"] if recipe.train.method == "probe" else ["another optim.lr", "more steps"]
    )
    if recipe.objective.class_weights != "auto":
        ways.append("objective.class_weights=auto where that class is the largest")
    advice = f"{', '.join(ways[:-1])}{',' if len(ways) > 2 else ''} or {ways[-1]}"
    return f"all {len(answers_B)} images get the same answer, {classes[int(answers_B[0])]}: {advice}"


def overfitting(records: Sequence[StepRecord], evaluations: Sequence[Mapping[str, float]]) -> str | None:
    """The loss falls on the training images and rises on the validation ones, several evaluations in a row."""
    last = evaluations[-_OVERFITTING:]
    if len(last) < _OVERFITTING:
        return None
    steps = [int(row["step"]) for row in last]
    span = steps[1] - steps[0]
    means = [_mean_loss(records, step - span, step) for step in steps]
    tuned = [row["loss"] for row in last]
    falls = all(later < earlier for earlier, later in itertools.pairwise(means))
    rises = all(later > earlier for earlier, later in itertools.pairwise(tuned))
    if not (falls and rises and tuned[-1] > _WORSE * tuned[0]):
        return None
    return (
        f"overfitting: since step {steps[0]} the loss fell from {means[0]:.3f} to {means[-1]:.3f} on the images "
        f"it learns and rose from {tuned[0]:.3f} to {tuned[-1]:.3f} on the others; more augmentation, fewer epochs or "
        f"train.patience={_OVERFITTING} helps"
    )


def _mean_loss(records: Sequence[StepRecord], after: int, upto: int) -> float:
    losses = [record.loss for record in records if after < record.step <= upto]
    return sum(losses) / len(losses) if losses else math.nan
