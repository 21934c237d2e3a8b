"""The steps of a run: batches in, updates, and what happens between them: notes, evaluations, checkpoints, wishes to stop."""

import dataclasses
import json
import time
from collections.abc import Generator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core import fsio
from vitlab.core.console import Advance, seconds_left
from vitlab.core.errors import UsageError
from vitlab.core.signals import Stopped, wishes
from vitlab.data.augment import augment
from vitlab.data.batches import Order
from vitlab.data.cache import in_file, in_memory
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch, train_batches
from vitlab.data.mixing import mix
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.engines.classifier import load
from vitlab.runs import run_folder
from vitlab.runs.live_run import LiveRun, score_part
from vitlab.training import checkpoint
from vitlab.training.loop import NotFinite, StepRecord, StepRule, fit
from vitlab.training.objective import class_weights, losses
from vitlab.training.optim import optimizer_state
from vitlab.training.schedule import rate_at

_SHOWN = 3  # bad images named at the end; the report has all


def train_steps(run: LiveRun) -> None:
    recipe, state, world = run.recipe, run.state, run.world
    saver = checkpoint.Saver(run.folder / run_folder.CHECKPOINTS, keep=recipe.train.keep) if world.leads else None
    save_every = max(1, round(recipe.train.save_every * run.steps))
    eval_every = max(1, round(recipe.train.eval_every * run.steps))
    started, first = time.perf_counter(), state.step
    with wishes() as wish, run.console.progress("training", run.steps) as advance:
        try:
            for record in fit(state, _batches(run), _step_rule(run), world):
                _note(run, record, advance, started, first)
                last = state.step == run.steps
                better = False
                if run.parts.val is not None and (state.step % eval_every == 0 or last):
                    better = _evaluate(run)
                enough, stop = _waited_enough(run), world.largest(wish.number)
                if last or enough or stop or better or state.step % save_every == 0:
                    run.bad.share(world)
                    if saver is not None:
                        saver.submit(_snapshot(run), run.best_step)
                if stop and not last:
                    if saver is not None:
                        saver.close()
                    raise Stopped(stop, f"Saved at step {state.step}. Go on with:  vitlab train --resume {run.folder}")
                if enough and not last:
                    run.console.say(f"no better result for {recipe.train.patience} evaluations: stopped")
                    break
        except NotFinite as error:
            if world.leads:
                keys = [run.parts.train.keys[i] for i in error.ids]
                fsio.write_json(run.folder / "bad_batch.json", {"step": error.step, "images": keys})
            raise
        finally:
            if saver is not None:
                saver.close()
    for name, reason in list(run.bad.found.items())[:_SHOWN]:
        run.console.say(f"left out: {name}: {reason}")
    if len(run.bad.found) > _SHOWN:
        run.console.say(f"and {len(run.bad.found) - _SHOWN} more images; the report lists them")


def _waited_enough(run: LiveRun) -> bool:
    """Whether the best evaluation lies `patience` of them back."""
    patience = run.recipe.train.patience
    return bool(patience) and run.best is not None and run.evaluations.index(run.best) < len(run.evaluations) - patience


def _batches(run: LiveRun) -> Generator[Batch]:
    data, train, world = run.recipe.data, run.recipe.train, run.world
    if _waited_enough(run):  # a run that had stopped for that stays so when it is resumed
        return
    dataset = _cached(run, run.parts.train)
    labels = dataset.labels.single() if data.balanced else None
    order = Order(len(dataset), train.batch_size, run.recipe.seed, data.repeats, data.balanced, labels)
    yield from train_batches(
        dataset,
        data.preprocess(),
        data.crop,
        order,
        first_step=run.state.step,
        last_step=run.steps,
        bad=run.bad,
        augmentation=data.augment if data.augment_in == "workers" else None,
        rank=world.rank,
        world=world.size,
        workers=data.workers,
        pin=world.device.type == "cuda",
    )


def _cached(run: LiveRun, dataset: Dataset) -> Dataset:
    data, console, world = run.recipe.data, run.console, run.world
    if data.cache == "memory":
        return in_memory(dataset, data.mode, most_gb=data.cache_gb, console=console)
    if data.cache == "none":
        return dataset
    if not world.leads:
        world.meet()  # the first writes the file, the others find it there
    made = in_file(dataset, data.mode, run.folder / "cache", most_gb=data.cache_gb, console=console)
    if world.leads:
        world.meet()
    return made


def _step_rule(run: LiveRun) -> StepRule:
    recipe, world = run.recipe, run.world
    data, rule, seed = recipe.data, recipe.data.preprocess(), recipe.seed
    num_classes = len(run.parts.train.classes)
    weights_K = None
    if recipe.objective.class_weights == "auto":
        weights_K = class_weights(run.parts.train.labels.counts(num_classes)).to(world.device)
    teacher = _teacher(run)

    def prepare(batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        images_BCYX = batch.images.to(world.device, non_blocking=True)
        if data.augment_in == "device":
            images_BCYX = augment(
                images_BCYX, batch.ids, data.augment, seed=seed, epoch=batch.epochs, copy=batch.copies
            )
        x_BCYX, targets = normalise(rule, images_BCYX), batch.targets.to(world.device)
        if data.mix.mixup or data.mix.cutmix:
            soft_BK = targets if targets.ndim == 2 else F.one_hot(targets, num_classes).float()
            total, valid_B = recipe.train.batch_size, batch.valid
            x_BCYX, targets = mix(
                x_BCYX, soft_BK, batch.positions, data.mix, seed=seed, step=step, total=total, valid_B=valid_B
            )
        return x_BCYX, targets

    def loss(x_BCYX: Tensor, logits_BK: Tensor, targets: Tensor) -> Tensor:
        told_BK = None if teacher is None else teacher(x_BCYX)
        return losses(recipe.objective, logits_BK, targets, class_weights_K=weights_K, teacher_BK=told_BK)

    return StepRule(
        prepare=prepare,
        losses=loss,
        lr_at=lambda step: rate_at(recipe.schedule, step, base=recipe.optim.lr, total_steps=run.steps),
        seed=seed,
        max_grad_norm=recipe.optim.max_grad_norm,
        precision=recipe.train.precision,
        micro_batch=recipe.train.micro_batch,
        average_decay=recipe.train.average,
    )


def _teacher(run: LiveRun) -> nn.Module | None:
    if not run.recipe.teacher:
        return None
    teacher = load(run.recipe.teacher, device=str(run.world.device), quiet=run.console.quiet)
    if teacher.labels != run.parts.train.classes:
        raise UsageError(f"the teacher {run.recipe.teacher} knows other classes than the data")
    if _seen(teacher.preprocess) != _seen(run.recipe.data.preprocess()):
        raise UsageError(
            f"the teacher {run.recipe.teacher} wants its images prepared in another way",
            hint="Give data.mode, image_size, mean and std as in its preprocess.json.",
        )
    return teacher.model.requires_grad_(False)


def _seen(rule: Preprocess) -> tuple[Any, ...]:
    """What decides the numbers that a model is given; how the picture is cut out of its file is another matter."""
    return rule.mode, rule.image_size, rule.mean, rule.std


def _note(run: LiveRun, record: StepRecord, advance: Advance, started: float, first: int) -> None:
    if not run.world.leads:
        return
    run.records.append(record)
    fsio.append_line(run.folder / run_folder.METRICS, json.dumps(dataclasses.asdict(record)))
    left = seconds_left(started, record.step - first, run.steps - first)
    advance(
        record.step,
        f"loss {record.loss:.3f}  lr {record.lr:.1e}  {record.images_per_second:.0f} img/s  "
        f"data {record.data_wait_frac:.0%}  {record.memory_gb:.1f} GB  left {left}",
    )


def _evaluate(run: LiveRun) -> bool:
    """Scores what training has reached on the tuning part; whether it is the best so far."""
    assert run.parts.val is not None
    scores = score_part(run.state, run.parts.val, run.recipe, run.world, run.bad)
    row = {"step": run.state.step, **scores.summary()}
    run.evaluations.append(row)
    run.console.say(f"step {run.state.step}: {scores.top1:.1%} of {scores.n} tuning images right")
    run.state.forward.train()
    if run.best is None or row["top1"] > run.best["top1"]:
        run.best = row
        return True
    return False


def _snapshot(run: LiveRun) -> checkpoint.Snapshot:
    state = run.state
    return checkpoint.Snapshot(
        step=state.step,
        model=checkpoint.copied(state.model.state_dict()),
        optimizer=checkpoint.copied(optimizer_state(state.optimizer, state.model)),
        average=None if state.average is None else checkpoint.copied(state.average),
        progress={
            "best": run.best,
            "evaluations": list(run.evaluations),
            "bad": dict(run.bad.found),
            "scaler": {} if state.scaler is None else state.scaler.state_dict(),
        },
    )
