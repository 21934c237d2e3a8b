"""Carry out a `Job`: one training run in its folder, resumed at the exact step wherever it was stopped.

Owns the order of a run and what happens between its steps: validation, checkpoints, warnings, early stopping, signals.
"""

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.console import Advance, seconds_left
from vitlab.core.duration import interval_in_steps
from vitlab.core.environment import code_fingerprint
from vitlab.core.errors import FileProblem, VitlabError
from vitlab.core.runtime import out_of_memory
from vitlab.core.session import Session
from vitlab.core.signals import Stopped, defer_signals
from vitlab.engines.classifier import load
from vitlab.engines.provenance import provenance_of
from vitlab.models.build import build
from vitlab.models.names import format_name
from vitlab.runs.training import run_folder
from vitlab.runs.training.finish import RunResult, finish, load_snapshot, rows_share
from vitlab.runs.training.live_run import (
    LiveRun,
    brief_metric,
    describe_validation,
    primary_metric,
    rank_key,
    score_part,
    task_loss,
)
from vitlab.runs.training.probing import train_probe
from vitlab.runs.training.resolve import Job
from vitlab.runs.training.run_folder import RunFile
from vitlab.training import checkpoint, health
from vitlab.training.assemble import Feed, assemble, require_possible, start_model, step_rule
from vitlab.training.loop import NonFinite, StepRecord, fit
from vitlab.training.microbatch import autotune_microbatch, describe_update
from vitlab.training.optim import load_optimizer_state, optimizer_state
from vitlab.training.precision import grad_scaler
from vitlab.training.recipe import SCRATCH, positions_note, recipe_from_dict, recipe_to_toml
from vitlab.training.trackers import Track, tracking
from vitlab.weights.hashing import hash_weights

_SHOWN = 3  # bad images named at the end; the report has all
_RECENT = 50  # steps that a line of the log sums up; metrics.jsonl has each


def execute(job: Job, session: Session) -> RunResult:
    """Train, test, save and load back. The job's folder must not exist, unless the run in it is resumed."""
    started, first_line = time.perf_counter(), len(session.console.lines)
    world, console, recipe, folder = session.world, session.console, job.recipe, job.folder
    require_possible(recipe, job.parts, world.size)
    run = _open_run(job, session)
    with open_run_dir(job, run.file, session, [*console.lines[first_line:], *job.opening]):
        if not job.resume:
            for line in job.opening:
                console.say(line)
            first_line = len(console.lines)  # what comes before is in the log already
        try:
            if job.resume:
                _restore(run)
            kind = "on" if world.size == 1 else f"on {world.size} processes,"
            classes = "no labels" if recipe.objective.is_pretext else f"{len(job.parts.train.classes)} classes"
            images = f"{len(job.parts.learnt):,} images, {classes}"
            console.say(f"{recipe.title}: {format_name(recipe.model)} {kind} {images}")
            run.warn("grid", health.coarse_grid(recipe.model))
            if recipe.train.method == "probe":
                train_probe(run)
            else:
                _train_steps(run)
            done = finish(run)
            run.write_file(finished=True)
        except Stopped as stopped:
            stopped.advice = f"{stopped.advice} {run_folder.resume_command(folder)}".lstrip()
            raise
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            hint = f"Take smaller images (data.image_size) or a smaller model. {run_folder.resume_command(folder)}"
            raise VitlabError("out of memory before or after the training steps", hint=hint) from error
        finally:  # a run that was stopped keeps what it has said and measured
            if world.is_main:
                lines = console.lines[first_line:]
                for failed in run_folder.write_notes(folder, run.file, run.records, lines, every_record=run.unwritten):
                    console.say(failed)
    return RunResult(
        folder=folder,
        recipe=recipe,
        classifier=done.classifier,
        test=job.parts.test,
        scores=done.scores,
        knn=done.knn,
        painted=done.painted,
        records=run.records,
        evaluations=run.evaluations,
        bad=run.bad.found,
        reason=run.file.reason,
        warnings=run.file.all_warnings,
        seconds=run.spent + time.perf_counter() - started,
        images_per_second=run.features_per_second or _mean_speed(run.records),
        num_fitted=job.parts.num_fitted(recipe.train.method),
    )


def _mean_speed(records: Sequence[StepRecord]) -> float:
    return sum(record.images_per_second for record in records) / max(1, len(records))


@contextlib.contextmanager
def open_run_dir(job: Job, file: RunFile, session: Session, opening: Sequence[str]) -> Generator[None]:
    """Make the folder of a run, or of several, or check the one to resume in; locked for this process until it is left.

    `opening` begins the log of a new one.
    """
    world = session.world
    if not job.resume:
        fsio.require_free(job.folder)
        world.barrier()  # all have looked before one makes it
        if world.is_main:
            run_folder.start(job.folder, recipe_to_toml(job.recipe), job.parts.table(), file, opening)
    with fsio.locked(job.folder) if world.is_main else contextlib.nullcontext():
        if job.resume:
            _check_resumed(job, session)
        yield


def _check_resumed(job: Job, session: Session) -> None:
    """An error where config or data are not those that the run started with; a changed `split.csv` is written again."""
    folder, split = job.folder, job.parts.table()
    stored = recipe_to_toml(recipe_from_dict(run_folder.read_config(folder), len(job.parts.train.classes)))
    notes = run_folder.check_resume(folder, stored, recipe_to_toml(job.recipe), describe(job, session), split)
    notes += run_folder.repair_split(folder, split) if session.world.is_main else []
    for note in notes if not job.runs else ():  # each of several says it itself
        session.console.say(note)


def describe(job: Job, session: Session) -> RunFile:
    """What the run knows of itself before its first step."""
    recipe, runtime, world = job.recipe, session.runtime, session.world
    teacher = ""
    if recipe.teacher:
        with contextlib.suppress(VitlabError):  # who learns from it will miss it; a run whose steps are done does not
            teacher = hash_weights(load(recipe.teacher, device="cpu", quiet=True).model)
    return RunFile(
        command=job.command,
        cwd=str(Path.cwd()),
        recipe=job.recipe_name,
        reason=job.reason,
        repeat=job.repeat,
        counts=job.counts,
        notes=[*([f"model: {job.model_note}"] if job.model_note else []), *job.notes],
        data_warnings=list(job.warnings),
        data={name: part.fingerprint() for name, part in job.parts.used().items()}
        | {f"also-{number}": part.fingerprint() for number, part in enumerate(job.parts.also, start=1)},
        copies=[list(keys) for keys in job.parts.copies],
        teacher=teacher,
        start=provenance_of(None if recipe.init == SCRATCH else recipe.init, positions_note(recipe))._asdict(),
        runs=job.runs,
        versions={
            "code": code_fingerprint(),
            "torch": torch.__version__,
            "threads": runtime.threads,
            "device": world.device.type,
            "world": world.size,
        },
    )


# --- before the first step --------------------------------------------------------------------------------------------


def _open_run(job: Job, session: Session) -> LiveRun:
    recipe, init_error = job.recipe, None
    try:
        model = start_model(recipe, session.console, job.parts.train.classes)
    except VitlabError as error:
        if not job.resume:
            raise
        init_error, model = error, build(recipe.model, seed=recipe.seed)  # a checkpoint has all that was made of them
    state = assemble(recipe, model, session.world)
    file = run_folder.read_run(job.folder) if job.resume else describe(job, session)
    return LiveRun(recipe, job.parts, job.folder, session.world, session.console, state, file, init_error)


def _restore(run: LiveRun) -> None:
    """Restore the newest valid checkpoint everywhere; delete unusable ones."""
    folder, state = run.folder / run_folder.CHECKPOINTS, run.state
    found, problems = checkpoint.newest_valid(folder, run.world, rows_share(run))
    for sentence in problems:
        run.console.say(sentence)
    if run.init_error is not None:
        if found is None:
            raise run.init_error
        run.console.say(f"{run.init_error.what}; continuing from the checkpoint instead")
    run.world.barrier()  # all have read before anything goes
    if run.world.is_main:
        checkpoint.remove_after(folder, -1 if found is None else found.step)
    if found is None and run.recipe.train.method == "steps":
        run.console.say("no checkpoint yet: starting at the first step")
    elif found is not None:
        load_snapshot(state, found)
        load_optimizer_state(state.optimizer, state.model, found.optimizer)
        state.step = found.step
        state.scaler = grad_scaler(run.recipe.train.precision, run.world.device)
        try:
            run.take_progress(found.progress)
            state.scaler.load_state_dict(found.progress["scaler"])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            where = folder / f"step-{found.step:09d}" / checkpoint.PROGRESS
            raise FileProblem(f"{where} is damaged: {error}", hint="Remove that checkpoint.") from None
        run.console.say(f"resuming at step {state.step} of {run.steps}")
    if run.world.is_main:
        checkpoint.prune(folder, keep=run.recipe.train.keep, best=run.best_step)  # where a crash came before it
        _restore_records(run, found)


def _restore_records(run: LiveRun, found: checkpoint.Snapshot | None) -> None:
    run.records = run_folder.cut_metrics(run.folder, run.state.step)
    for record in run.records:
        run.metrics_hash.update(run_folder.curve_line(record))
    if found is not None and found.progress.get("curve") != run.metrics_hash.hexdigest():
        run.warn("curve", f"{run_folder.METRICS} was edited; curves before this step are unreliable")
    run.spent = sum(run.recipe.train.batch_size / record.images_per_second for record in run.records)


# --- the steps --------------------------------------------------------------------------------------------------------


def _train_steps(run: LiveRun) -> None:
    state, world = run.state, run.world
    if state.step >= run.steps or _early_stopping_reached(run):  # before anything is read or made
        run.console.say("all steps are already done")
        return
    _warn_before(run)
    train = run.recipe.train
    save_every = interval_in_steps("train.save_every", train.save_every, run.length)
    check_every = max(1, run.steps // health.CHECKS)  # the same steps, wherever a run was resumed
    pace = _Pace(first=state.step + 1)
    before, chance = (
        health.sample_weights(state.model),
        health.chance_loss(run.recipe.objective, run.parts.train),
    )
    with (
        defer_signals() as request,
        tracking(run.recipe, run.folder, state.step, world) as track,
        run.console.progress("training", run.steps) as advance,
        _saver(run) as saver,
        _explained_failures(run),
    ):
        feed = Feed(run.recipe, run.parts.learnt, world, run.bad, run.console, run.folder / "cache")
        rule = step_rule(
            run.recipe,
            run.parts.train,
            run.length,
            world,
            validates=run.parts.val is not None,
            quiet=run.console.quiet,
        )
        batches = feed.batches(range(state.step, run.steps))
        batches, run.micro_batch = autotune_microbatch(state, batches, rule, run.recipe, world, run.micro_batch)
        if (
            world.device.type == "cuda"
            and not train.micro_batch
            and 0 < run.micro_batch < train.batch_size // world.size
        ):
            _say_microbatch(run)
        rule = dataclasses.replace(rule, micro_batch=run.micro_batch)
        for record in fit(state, batches, rule, world):
            _record_step(run, record, advance, track, pace)
            if world.is_main and record.step % check_every == 0:
                _check_health(run, before if record.step - pace.first + 1 >= check_every else None, chance)
            last, better = state.step == run.steps, False
            if run.parts.val is not None and (state.step % rule.eval_every == 0 or last):
                better = _validate(run, track)
            early_stop, stop = _early_stopping_reached(run), world.all_reduce_max(request.number)
            if last or early_stop or stop or better or state.step % save_every == 0:
                run.bad.share(world)
                if saver is not None:
                    saver.submit(_snapshot(run), run.best_step)
                run.write_file()
            if stop and not last:
                if saver is not None:
                    saver.close()
                world.barrier()  # a process that exits while another saves breaks its collective
                raise Stopped(stop, f"Saved at step {state.step}.")
            if early_stop and not last:
                run.console.say(f"early stopping: no improvement in {train.patience} evaluations")
                break
    for name, reason in list(run.bad.found.items())[:_SHOWN]:
        run.console.say(f"left out: {name}: {reason}")
    if len(run.bad.found) > _SHOWN:
        run.console.say(f"and {len(run.bad.found) - _SHOWN} more images; the report lists them")


@contextlib.contextmanager
def _saver(run: LiveRun) -> Generator[checkpoint.Saver | None]:
    """The saver of this process, or None: the first process saves, or all where the weights are sharded."""
    saver, train = None, run.recipe.train
    if run.world.is_main or run.sharded:
        saver = checkpoint.Saver(
            run.folder / run_folder.CHECKPOINTS,
            keep=train.keep,
            async_save=train.save_async,
            world=run.world if run.sharded else checkpoint.ALONE,
        )
    try:
        yield saver
    except NonFinite:  # which counts more than a save that fails beside it
        with contextlib.suppress(FileProblem):
            if saver is not None:
                saver.close()
        raise
    finally:
        if saver is not None:
            saver.close()


@contextlib.contextmanager
def _explained_failures(run: LiveRun) -> Generator[None]:
    """Name the images of a batch that was not finite, and say what to do where memory was too small."""
    try:
        yield
    except NonFinite as error:
        if run.world.is_main:
            keys = [run.parts.learnt.keys[i] for i in error.ids]
            fsio.write_json(run.folder / "bad_batch.json", {"step": error.step, "images": keys})
        raise
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        images = run.micro_batch or run.recipe.train.batch_size // run.world.size
        raise VitlabError(
            f"out of memory at step {run.state.step + 1}, with {images} images at once",
            hint=run_folder.resume_command(run.folder, f"train.micro_batch={max(2, images // 2)}"),
        ) from error


def _say_microbatch(run: LiveRun) -> None:
    images = run.recipe.train.batch_size // run.world.size
    run.console.say(
        f"micro-batches of {run.micro_batch} (gradient accumulation): {images} images at once do not fit on "
        f"{run.world.device}; {describe_update(run.recipe, run.micro_batch)}"
    )


def _early_stopping_reached(run: LiveRun) -> bool:
    """Whether the metric last improved more than `patience` evaluations ago. A loss alone may fall for ever."""
    patience, metric = run.recipe.train.patience, [primary_metric(row) for row in run.evaluations]
    return bool(patience and metric) and metric.index(max(metric)) < len(metric) - patience


def _warn_before(run: LiveRun) -> None:
    recipe = run.recipe
    run.warn("batch", health.repeated_images(recipe.train.batch_size, len(run.parts.learnt)))
    warmup = interval_in_steps("schedule.warmup", recipe.schedule.warmup, run.length)
    run.warn("warm-up", health.long_warmup(warmup, run.steps))
    if recipe.init == SCRATCH:
        run.warn("statistics", health.slow_statistics(recipe.model, run.steps))
    if run.world.is_main:
        run.warn("augmentation", health.blanking_augmentation(run.parts.learnt, recipe.data, recipe.seed))


@dataclasses.dataclass
class _Pace:
    """Seconds per step of this process, without its first one, which has start-up and compiling in it."""

    first: int
    began: float = 0.0

    def seconds_left(self, step: int, steps: int) -> float:
        if step == self.first:
            self.began = time.perf_counter()
            return 0.0
        return (time.perf_counter() - self.began) / (step - self.first) * (steps - step)


def _record_step(run: LiveRun, record: StepRecord, advance: Advance, track: Track, pace: _Pace) -> None:
    left = pace.seconds_left(record.step, run.steps)
    if not run.world.is_main:
        return
    record = dataclasses.replace(record, seconds_left=round(left, 3))
    run.records.append(record)
    run.metrics_hash.update(run_folder.curve_line(record))
    run.warn("spike", health.spike(run.records))
    try:
        fsio.append_line(run.folder / run_folder.METRICS, json.dumps(dataclasses.asdict(record)))
    except FileProblem as problem:  # training is worth more than its log, which is written again at the end
        if not run.unwritten:
            run.console.say(f"{problem.what}; training continues without")
        run.unwritten = True
    metrics = {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
    track(metrics.pop("step"), {f"train/{name}": value for name, value in metrics.items()})
    loss, speed, waiting = _recent_means(run.records[-_RECENT:])
    done = record.step - pace.first
    clock = seconds_left(pace.began, done, done + run.steps - record.step)
    batch, images = run.recipe.train.batch_size, len(run.parts.learnt) * run.recipe.data.repeats
    epochs = run.recipe.train.epochs or run.steps * batch / images
    epoch = f"epoch {min(record.step * batch / images, epochs):.1f}/{epochs:.1f}"
    val = f"val {brief_metric(run.evaluations[-1])}  " if run.evaluations else ""
    advance(
        record.step,
        f"{epoch}  loss {loss:.3f}  {val}lr {record.lr:.1e}  {speed:.0f} img/s  "
        f"data {waiting:.0%}  {record.memory_gb:.1f} GB  left {clock}",
    )


def _recent_means(records: Sequence[StepRecord]) -> tuple[float, float, float]:
    """Loss, images per second and share of waiting: those of one step would be chance, or show the save before it."""
    seconds = [1 / record.images_per_second for record in records]  # per image, and so in proportion
    waited = sum(record.data_wait_frac * took for record, took in zip(records, seconds, strict=True))
    return (
        statistics.fmean(record.loss for record in records),
        1 / statistics.median(seconds),
        waited / sum(seconds),
    )


def _check_health(run: LiveRun, before: dict[str, Tensor] | None, chance: float | None) -> None:
    """`before` are weights of some steps ago; None where a run was resumed just now."""
    recipe, record = run.recipe, run.records[-1]
    if before is not None:
        run.warn("rate", health.unapplied_rate(run.state, before, record.lr))
    run.warn("chance", health.loss_at_chance(run.records, run.steps, chance))
    run.warn("waiting", health.waiting(run.records, run.steps, recipe.train.batch_size, recipe.data))


def _validate(run: LiveRun, track: Track) -> bool:
    """Score what training has reached on the validation part; whether it is the best so far."""
    assert run.parts.val is not None
    scores = None if run.recipe.objective.is_pretext else score_part(run, run.parts.val)
    summary = task_loss(run, run.parts.val) if scores is None else scores.summary()
    row = {"step": run.state.step, **summary}
    run.evaluations.append(row)
    track(run.state.step, {f"val/{name}": value for name, value in summary.items()})
    run.console.say(f"step {run.state.step}: {describe_validation(row)}")
    if scores is not None and run.state.step >= health.EARLY * run.steps:
        classes = run.parts.train.classes
        run.warn("answer", health.one_answer(scores.logits_BK, scores.targets, classes, run.recipe))
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
            "curve": run.metrics_hash.hexdigest(),
        },
    )
