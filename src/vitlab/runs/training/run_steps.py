"""The steps of a run: batches in, updates, and what happens between them: notes, evaluations, checkpoints, wishes to stop."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.core import fsio
from vitlab.core.console import Advance, seconds_left
from vitlab.core.duration import interval_in_steps
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.runtime import out_of_memory
from vitlab.core.signals import Stopped, defer_signals
from vitlab.data.augmentation.augment import augment
from vitlab.data.augmentation.mixing import mix
from vitlab.data.batches import Order
from vitlab.data.cache import in_file, in_memory
from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch, train_batches
from vitlab.data.preprocess import Preprocess, normalise
from vitlab.data.resident import on_device, resident_batches
from vitlab.engines.classifier import load
from vitlab.runs.training import health, run_folder
from vitlab.runs.training.live_run import LiveRun, describe_validation, primary_metric, rank_key, score_part
from vitlab.runs.training.micro_batch import fitted
from vitlab.runs.training.trackers import Track, tracking
from vitlab.training import checkpoint
from vitlab.training.loop import NonFinite, StepRecord, StepRule, fit
from vitlab.training.objective import class_weights, losses
from vitlab.training.optim import optimizer_state
from vitlab.training.recipe import Recipe
from vitlab.training.schedule import rate_at

_SHOWN = 3  # bad images named at the end; the report has all
_LATELY = 50  # steps that a line of the log sums up; metrics.jsonl has each


def train_steps(run: LiveRun) -> None:
    recipe, state, world = run.recipe, run.state, run.world
    if _is_done(run):  # before anything is read or made for steps that will not come
        run.console.say("all its steps were done before")
        return
    keep, beside = recipe.train.keep, recipe.train.save_async
    saver, spread = None, world if run.spread else None
    if world.is_main or run.spread:
        saver = checkpoint.Saver(run.folder / run_folder.CHECKPOINTS, keep=keep, beside=beside, world=spread)
    save_every = interval_in_steps("train.save_every", recipe.train.save_every, run.length)
    eval_every = interval_in_steps("train.eval_every", recipe.train.eval_every, run.length)
    look_every = max(1, run.steps // health.LOOKS)  # the same steps, wherever a run was resumed
    run.warn("batch", health.repeated_images(recipe.train.batch_size, len(run.parts.train)))
    warmup = interval_in_steps("schedule.warmup", recipe.schedule.warmup, run.length)
    run.warn("warm-up", health.long_warmup(warmup, run.steps))
    if world.is_main:
        run.warn("augmentation", health.blanking_augmentation(run.parts.train, recipe.data, recipe.seed))
    before, chance = health.sample_weights(state.model), health.chance_loss(recipe.objective, run.parts.train)
    began, first = 0.0, state.step + 1  # of this process; with start-up and compiling in it, it tells no pace
    with defer_signals() as wish, tracking(run) as track, run.console.progress("training", run.steps) as advance:
        try:
            rule = _step_rule(run)
            batches = fitted(run, _batches(run), rule)
            rule = dataclasses.replace(
                rule,
                micro_batch=run.micro_batch,
                can_overlap_next_forward=lambda step: run.parts.val is None or step % eval_every != 0,
            )
            for record in fit(state, batches, rule, world):
                began = time.perf_counter() if record.step == first else began
                _note(run, record, advance, track, began, first)
                if world.is_main and record.step % look_every == 0:
                    _look(run, before if record.step - first + 1 >= look_every else None, chance)
                last = state.step == run.steps
                better = False
                if run.parts.val is not None and (state.step % eval_every == 0 or last):
                    better = _evaluate(run, track)
                enough, stop = _early_stopping_reached(run), world.all_reduce_max(wish.number)
                if last or enough or stop or better or state.step % save_every == 0:
                    run.bad.share(world)
                    if saver is not None:
                        saver.submit(_snapshot(run), run.best_step)
                if stop and not last:
                    if saver is not None:
                        saver.close()
                    world.barrier()  # who leaves while another still saves is missed by it, and the save is lost
                    raise Stopped(stop, f"Saved at step {state.step}.")
                if enough and not last:
                    run.console.say(f"early stopping: no improvement in {recipe.train.patience} evaluations")
                    break
        except NonFinite as error:
            if world.is_main:
                keys = [run.parts.train.keys[i] for i in error.ids]
                fsio.write_json(run.folder / "bad_batch.json", {"step": error.step, "images": keys})
            raise
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            own = run.micro_batch or recipe.train.batch_size // world.size
            raise VitlabError(
                f"out of memory at step {state.step + 1}, with {own} images at once",
                hint=run_folder.resume_command(run.folder, "--set", f"train.micro_batch={max(2, own // 2)}"),
            ) from error
        finally:
            if saver is not None:
                saver.close()
    for name, reason in list(run.bad.found.items())[:_SHOWN]:
        run.console.say(f"left out: {name}: {reason}")
    if len(run.bad.found) > _SHOWN:
        run.console.say(f"and {len(run.bad.found) - _SHOWN} more images; the report lists them")


def _early_stopping_reached(run: LiveRun) -> bool:
    """Whether more right answers were last found more than `patience` evaluations ago. A loss alone may fall for ever."""
    patience, right = run.recipe.train.patience, [primary_metric(row) for row in run.evaluations]
    return bool(patience and right) and right.index(max(right)) < len(right) - patience


def _is_done(run: LiveRun) -> bool:
    """A run that had ended for want of a better result stays so when it is resumed."""
    return run.state.step >= run.steps or _early_stopping_reached(run)


def _batches(run: LiveRun) -> Generator[Batch]:
    data, train, world = run.recipe.data, run.recipe.train, run.world
    labels = run.parts.train.labels.single() if data.balanced else None
    order = Order(len(run.parts.train), train.batch_size, run.recipe.seed, data.repeats, data.balanced, labels)
    if data.cache == "device":
        yield from _device_batches(run, order)
        return
    dataset = _cached(run, run.parts.train)
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


def _device_batches(run: LiveRun, order: Order) -> Generator[Batch]:
    data, world = run.recipe.data, run.world
    resident = on_device(
        run.parts.train,
        data.preprocess(),
        data.crop,
        world.device,
        most_gb=data.cache_gb,
        bad=run.bad,
        console=run.console,
    )
    yield from resident_batches(
        resident,
        order,
        _prepare_rule(run),
        first_step=run.state.step,
        last_step=run.steps,
        rank=world.rank,
        world=world.size,
    )


def _cached(run: LiveRun, dataset: Dataset) -> Dataset:
    data, console, world = run.recipe.data, run.console, run.world
    if data.cache == "memory":
        return in_memory(dataset, data.preprocess(), most_gb=data.cache_gb, console=console)
    if data.cache == "none":
        return dataset
    if not world.is_main:
        world.barrier()  # the first writes the file, the others find it there
    made = in_file(dataset, data.preprocess(), run.folder / "cache", most_gb=data.cache_gb, console=console)
    if world.is_main:
        world.barrier()
    return made


def _prepare_rule(run: LiveRun) -> Callable[[Batch, int | Tensor], tuple[Tensor, Tensor]]:
    """What makes the images and targets of a step, on the device, out of bytes and labels. The step may differ by image."""
    recipe, world = run.recipe, run.world
    data, rule, seed = recipe.data, recipe.data.preprocess(), recipe.seed
    num_classes = len(run.parts.train.classes)

    def prepare(batch: Batch, step: int | Tensor) -> tuple[Tensor, Tensor]:
        images_BCYX = batch.images.to(world.device, non_blocking=True)
        if data.augment_in == "device" or data.cache == "device":  # which has no workers
            images_BCYX = augment(
                images_BCYX, batch.ids, data.augment, seed=seed, epoch=batch.epochs, copy=batch.copies
            )
        x_BCYX, targets = normalise(rule, images_BCYX), batch.targets.to(world.device, non_blocking=True)
        if data.mix.mixup or data.mix.cutmix:
            soft_BK = targets if targets.ndim == 2 else F.one_hot(targets, num_classes).float()
            total, valid_B = recipe.train.batch_size, batch.valid
            x_BCYX, targets = mix(
                x_BCYX, soft_BK, batch.positions, data.mix, seed=seed, step=step, total=total, valid_B=valid_B
            )
        return x_BCYX, targets

    return prepare


def _step_rule(run: LiveRun) -> StepRule:
    recipe, world = run.recipe, run.world
    weights_K = None
    if recipe.objective.class_weights == "auto":
        weights_K = class_weights(run.parts.train.labels.counts(len(run.parts.train.classes))).to(world.device)
    teacher = load_teacher(recipe, run.parts.train.classes, world.device, quiet=run.console.quiet)
    schedule = recipe.schedule.settled(run.length)

    def loss(x_BCYX: Tensor, logits_BK: Tensor, targets: Tensor) -> Tensor:
        told_BK = None if teacher is None else teacher(x_BCYX)
        return losses(recipe.objective, logits_BK, targets, class_weights_K=weights_K, teacher_BK=told_BK)

    prepared = recipe.data.cache == "device"  # many steps at once, by `_device_batches`
    return StepRule(
        prepare=(lambda batch, _step: (batch.images, batch.targets)) if prepared else _prepare_rule(run),
        losses=loss,
        lr_at=lambda step: rate_at(schedule, step, base=recipe.optim.lr, total_steps=run.steps),
        seed=recipe.seed,
        max_grad_norm=recipe.optim.max_grad_norm,
        precision=recipe.train.precision,
        micro_batch=recipe.train.micro_batch,
        ema_decay=recipe.train.ema,
        ema_warmup=recipe.train.ema_warmup,
    )


def load_teacher(recipe: Recipe, classes: Sequence[str], device: torch.device, *, quiet: bool) -> nn.Module | None:
    """None where the recipe has none; an error where it cannot teach these classes."""
    if not recipe.teacher:
        return None
    teacher = load(recipe.teacher, device=str(device), quiet=quiet)
    if teacher.labels != tuple(classes):
        raise UsageError(f"the teacher {recipe.teacher} knows other classes than the data")
    if _seen(teacher.preprocess) != _seen(recipe.data.preprocess()):
        raise UsageError(
            f"the teacher {recipe.teacher} wants its images prepared in another way",
            hint="Give data.mode, image_size, mean and std as in its preprocess.json.",
        )
    return teacher.model.requires_grad_(False)


def _seen(rule: Preprocess) -> tuple[Any, ...]:
    """What decides the numbers that a model is given; how the picture is cut out of its file is another matter."""
    return rule.mode, rule.image_size, rule.mean, rule.std


def _note(run: LiveRun, record: StepRecord, advance: Advance, track: Track, began: float, first: int) -> None:
    """`began` is when the step `first` had ended, from which the pace is taken."""
    if not run.world.is_main:
        return
    done, rest = record.step - first, run.steps - record.step
    pace = (time.perf_counter() - began) / done if done else 0.0
    record = dataclasses.replace(record, seconds_left=round(pace * rest, 3))
    run.records.append(record)
    run.curve.update(run_folder.curve_line(record))
    run.warn("spike", health.spike(run.records))
    try:
        fsio.append_line(run.folder / run_folder.METRICS, json.dumps(dataclasses.asdict(record)))
    except FileProblem as problem:  # training is worth more than its log, which is written again at the end
        if not run.unwritten:
            run.console.say(f"{problem.what}; training goes on without")
        run.unwritten = True
    numbers = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
    track(numbers.pop("step"), {f"train/{name}": value for name, value in numbers.items()})
    loss, speed, waiting = _lately(run.records[-_LATELY:])
    left = seconds_left(began, done, done + rest)
    advance(
        record.step,
        f"loss {loss:.3f}  lr {record.lr:.1e}  {speed:.0f} img/s  "
        f"data {waiting:.0%}  {record.memory_gb:.1f} GB  left {left}",
    )


def _lately(records: Sequence[StepRecord]) -> tuple[float, float, float]:
    """Loss, images per second and share of waiting: those of one step would be chance, or tell of the save before it."""
    seconds = [1 / record.images_per_second for record in records]  # per image, and so in proportion
    waited = sum(record.data_wait_frac * took for record, took in zip(records, seconds, strict=True))
    return (
        statistics.fmean(record.loss for record in records),
        1 / statistics.median(seconds),
        waited / sum(seconds),
    )


def _look(run: LiveRun, before: dict[str, Tensor] | None, chance: float | None) -> None:
    """`before` are weights of some steps ago; None where a run was resumed just now."""
    recipe, record = run.recipe, run.records[-1]
    if before is not None:
        run.warn("rate", health.unapplied_rate(run.state, before, record.lr))
    run.warn("chance", health.loss_at_chance(run.records, run.steps, chance))
    run.warn("waiting", health.waiting(run.records, run.steps, recipe.train.batch_size, recipe.data))


def _evaluate(run: LiveRun, track: Track) -> bool:
    """Scores what training has reached on the validation part; whether it is the best so far."""
    assert run.parts.val is not None
    scores = score_part(run.state, run.parts.val, run.recipe, run.world, run.bad)
    row = {"step": run.state.step, **scores.summary()}
    run.evaluations.append(row)
    track(run.state.step, {f"val/{name}": value for name, value in scores.summary().items()})
    run.console.say(f"step {run.state.step}: {describe_validation(row)}")
    if run.state.step >= health.EARLY * run.steps:
        run.warn("answer", health.one_answer(scores, run.parts.train.classes, run.recipe.train.method))
    run.warn("overfitting", health.overfitting(run.records, run.evaluations))
    run.state.forward.train()
    if run.best is None or rank_key(row) > rank_key(run.best):
        run.best = row
        return True
    return False


def _snapshot(run: LiveRun) -> checkpoint.Snapshot:
    state = run.state
    return checkpoint.Snapshot(
        step=state.step,
        model=checkpoint.copied(state.model.state_dict()),
        optimizer=checkpoint.copied(optimizer_state(state.optimizer, state.model)),
        ema=None if state.ema is None else checkpoint.copied(state.ema),
        progress={
            "best": run.best,
            "evaluations": list(run.evaluations),
            "bad": dict(run.bad.found),
            "scaler": {} if state.scaler is None else state.scaler.state_dict(),
            "micro_batch": run.micro_batch,
            "warned": sorted(run.warned),
            "curve": run.curve.hexdigest(),
        },
    )
