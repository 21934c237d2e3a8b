"""One training run: recipe in, run folder out; stopped anywhere, it goes on at the exact step.

Owns the order of the work. The rooms below do the work and know nothing of folders; the caller adds the report.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.environment import code_fingerprint, describe_machine
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.runtime import Runtime, out_of_memory
from vitlab.core.signals import Stopped
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages
from vitlab.data.parts import Parts
from vitlab.engines.classifier import Classifier, load
from vitlab.evaluation.classify import Scores, predict_logits, score
from vitlab.models.build import Model, allocate, build
from vitlab.models.lora import add_lora, is_kept, merge_lora
from vitlab.models.names import format_name
from vitlab.models.resnet import PostActUnit, PreActUnit
from vitlab.models.vit import Block
from vitlab.runs.training import health, run_folder
from vitlab.runs.training.live_run import LiveRun, rank_key
from vitlab.runs.training.probing import train_head
from vitlab.runs.training.run_steps import train_steps
from vitlab.training import checkpoint
from vitlab.training.ema import start_ema
from vitlab.training.loop import StepRecord, TrainState
from vitlab.training.optim import load_optimizer_state, make_optimizer
from vitlab.training.precision import grad_scaler
from vitlab.training.recipe import SCRATCH, Recipe, recipe_to_dict, recipe_to_toml, spelled_out
from vitlab.training.sharding import load_rows, shard, whole_state
from vitlab.weights.adapter import Adapter, adapted, in_float32, save_adapter
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.card import write_card
from vitlab.weights.hashing import hash_weights
from vitlab.weights.surgery import for_transfer, require_same_body


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run leaves in memory for the report; everything else is in the folder."""

    folder: Path
    recipe: Recipe
    classifier: Classifier
    test: Dataset | None
    scores: Scores | None
    records: list[StepRecord]
    evaluations: list[dict[str, float]]
    bad: dict[str, str]
    seconds: float
    images_per_second: float
    fitted: int  # images that the weights were fitted to


def run_recipe(
    recipe: Recipe,
    parts: Parts,
    folder: Path,
    *,
    runtime: Runtime,
    world: World,
    console: Console,
    command: str,
    resume: bool = False,
    said: Sequence[str] = (),
) -> RunResult:
    """Trains, tests, saves and loads back. `folder` must not exist, unless a run in it is to be resumed.

    `said` is what was found and decided before; it opens the log.
    """
    started, first_line = time.perf_counter(), len(console.lines)
    environment = describe(recipe, parts, runtime, world, command)
    run = _prepare(recipe, parts, folder, world, console, resume=resume)
    with held(folder, recipe, parts, environment, world, resume=resume, said=said) as notes:
        before = ""
        if resume:
            for note in notes:
                console.say(note)
            before = run_folder.read_log(folder)
            _go_on(run)
        for sentence in said:
            console.say(sentence)
        kind = "on" if world.size == 1 else f"on {world.size} processes,"
        console.say(
            f"{recipe.title}: {format_name(recipe.model)} {kind} {len(parts.train):,} images, "
            f"{len(parts.train.classes)} classes"
        )
        run.warn("grid", health.coarse_grid(recipe.model))
        try:
            (train_head if recipe.train.method == "probe" else train_steps)(run)
            return _finish(run, command, started)
        except Stopped as stopped:
            stopped.advice = f"{stopped.advice} {run_folder.resume_command(folder)}".lstrip()
            raise
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            hint = f"Take smaller images (data.image_size) or a smaller model. {run_folder.resume_command(folder)}"
            raise VitlabError("out of memory beside the steps: in preparing them, or in testing", hint=hint) from error
        finally:  # a run that was stopped keeps what it has said and measured
            if world.is_main:
                log = before + "\n".join(console.lines[first_line:]) + "\n"
                for failed in run_folder.write_notes(folder, run.records, log, every_record=run.unwritten):
                    console.say(failed)


@contextlib.contextmanager
def held(
    folder: Path,
    recipe: Recipe,
    parts: Parts,
    environment: Mapping[str, Any],
    world: World,
    *,
    resume: bool,
    said: Sequence[str],
    runs: Mapping[str, Any] | None = None,
) -> Generator[list[str]]:
    """The folder of a run or, with `runs`, of several, for this process alone: new, or begun with the same config and data.

    Yields what should be told of a machine that is not the same.
    """
    now, num_classes = recipe_to_toml(recipe), len(parts.train.classes)
    if not resume:
        fsio.require_free(folder)
        world.barrier()  # all have looked before one makes it
        if world.is_main:
            run_folder.start(folder, now, environment, parts.table(), said, runs)
    with fsio.locked(folder) if world.is_main else contextlib.nullcontext():
        notes: list[str] = []
        if resume:
            split = parts.table()
            notes = run_folder.check_resume(folder, now, environment, split, lambda old: spelled_out(old, num_classes))
            notes += run_folder.mend_split(folder, split) if world.is_main else []
        yield notes


def describe(recipe: Recipe, parts: Parts, runtime: Runtime, world: World, command: str) -> dict[str, Any]:
    """What the bits of a run depend on besides the recipe."""
    data = {name: part.fingerprint() for name in ("train", "val", "test") if (part := getattr(parts, name)) is not None}
    run = {"command": command, "device": world.device.type, "threads": runtime.threads, "world": world.size}
    run |= {"torch": torch.__version__, "code": code_fingerprint(), "folder": str(Path.cwd())}
    if recipe.teacher:
        with contextlib.suppress(VitlabError):  # who learns from it will miss it; a run whose steps are done does not
            run["teacher"] = hash_weights(load(recipe.teacher, device="cpu", quiet=True).model)
    return {
        **run,
        "config": config.fingerprint(recipe_to_dict(recipe)),
        "data": data,
        "copies": parts.copies,
        **describe_machine(),
    }


# --- before the first step --------------------------------------------------------------------------------------------


def _prepare(
    recipe: Recipe, parts: Parts, folder: Path, world: World, console: Console, *, resume: bool = False
) -> LiveRun:
    train = recipe.train
    require_possible(recipe, parts, world.size)
    spread = train.sharded and world.size > 1
    init_error: VitlabError | None = None
    try:
        model = start_model(recipe, console)
    except VitlabError as error:
        if not resume:
            raise
        init_error, model = error, build(recipe.model, seed=recipe.seed)  # a checkpoint has all that was made of them
    if recipe.optim.train == "lora":
        add_lora(model, recipe.lora, seed=recipe.seed)
    if train.recompute:
        recompute_blocks(model)
    if spread:  # layer by layer, so that the whole model need not fit on the device
        shard(model, world, train.precision)
    model.to(world.device)
    optimizer = make_optimizer(model, recipe.optim)
    forward: nn.Module = model
    if world.size > 1 and not spread:
        own = [world.device] if world.device.type == "cuda" else None
        forward = DistributedDataParallel(model, device_ids=own)
    if train.compiled:
        torch.use_deterministic_algorithms(True)  # tells the compiler too
        # A step that is always the same can be recorded and replayed (CUDA graphs), which spares small models the launches.
        alike = world.device.type == "cuda" and world.size == 1 and not train.micro_batch
        # What was compiled before would make sizes unknowns of the code: slower, with other bits, and some torch cannot do it.
        torch.compiler.reset()
        mode = "reduce-overhead" if alike else None
        forward = torch.compile(forward, mode=mode, dynamic=False)  # pyright: ignore[reportAssignmentType]
    state = TrainState(model, forward, optimizer, start_ema(model) if train.ema else None)
    steps = train.in_steps(len(parts.train) * recipe.data.repeats, train.batch_size)
    return LiveRun(recipe, parts, folder, world, console, state, steps, BadImages(recipe.data.max_bad), init_error)


def require_possible(recipe: Recipe, parts: Parts, processes: int) -> None:
    """An error where the recipe cannot be carried out on this data by that many processes."""
    train = recipe.train
    if train.batch_size % processes:
        raise UsageError(f"train.batch_size {train.batch_size} cannot be shared evenly by {processes} processes")
    if recipe.data.mix.mixup or recipe.data.mix.cutmix:
        _require_pairs(train.batch_size // processes, train.micro_batch, processes)
    if recipe.objective.kind == "softmax" and parts.train.labels.multi:
        raise UsageError("images with several labels need objective.kind = sigmoid")


def _require_pairs(own: int, micro_batch: int, processes: int) -> None:
    """MixUp and CutMix mix neighbours, and a pair must not be torn apart."""
    cut = 0 < micro_batch < own and micro_batch % 2
    if cut or (processes > 1 and own % 2):
        what = f"train.micro_batch {micro_batch}" if cut else f"{own} images in each of {processes} processes"
        raise UsageError(f"MixUp and CutMix mix neighbours, so {what} must be an even number")


def recompute_blocks(model: nn.Module) -> None:
    """Makes blocks forget what they computed until the backward pass. A wrapper around them would change their names."""
    for module in model.modules():
        if isinstance(module, Block | PreActUnit | PostActUnit):
            module.forward = functools.partial(recomputed, module.forward, use_reentrant=False)


def start_model(recipe: Recipe, console: Console) -> Model:
    """Fresh weights, or those of another run, file or name with a new head."""
    model = _first_weights(recipe, console)
    if recipe.head_bias and model.head is not None:
        nn.init.constant_(model.head.bias, recipe.head_bias)
    return model


def _first_weights(recipe: Recipe, console: Console) -> Model:
    if recipe.init == SCRATCH:
        return build(recipe.model, seed=recipe.seed)
    start = load(recipe.init, device="cpu", quiet=True).model
    require_same_body(start.spec, recipe.model)
    model, report = for_transfer(start, recipe.model)
    console.say(f"Start from {recipe.init}: {report}")
    return model


def _go_on(run: LiveRun) -> None:
    """Puts the newest whole checkpoint back, in every process. Those that cannot be used make room for what comes."""
    folder = run.folder / run_folder.CHECKPOINTS
    found, said = checkpoint.newest_valid(folder, run.world, _share(run))
    for sentence in said:
        run.console.say(sentence)
    if run.init_error is not None:
        if found is None:
            raise run.init_error
        run.console.say(f"{run.init_error.what}; the checkpoint has what was made of it")
    run.world.barrier()  # all have read before anything goes
    if run.world.is_main:
        checkpoint.remove_after(folder, -1 if found is None else found.step)
    if found is None and run.recipe.train.method == "steps":
        run.console.say("no checkpoint yet: starting at the first step")
    elif found is not None:
        state = run.state
        _put_back(state, found)
        load_optimizer_state(state.optimizer, state.model, found.optimizer)
        state.step = found.step
        state.scaler = grad_scaler(run.recipe.train.precision, run.world.device)
        try:
            run.take_progress(found.progress)
            state.scaler.load_state_dict(found.progress["scaler"])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            where = folder / f"step-{found.step:09d}" / checkpoint.PROGRESS
            raise FileProblem(f"{where} is not one of a run: {error}", hint="Remove that checkpoint.") from None
        run.console.say(f"resuming at step {state.step} of {run.steps}")
    if run.world.is_main:
        checkpoint.prune(folder, keep=run.recipe.train.keep, best=run.best_step)  # where a crash came before it
        run.records = run_folder.cut_metrics(run.folder, run.state.step)
        for record in run.records:
            run.curve.update(run_folder.curve_line(record))
        if found is not None and found.progress.get("curve") not in (None, run.curve.hexdigest()):
            run.warn(
                "curve", f"{run_folder.METRICS} is not what the run wrote: its curves up to here cannot be trusted"
            )
        run.spent = sum(run.recipe.train.batch_size / record.images_per_second for record in run.records)


def _share(run: LiveRun) -> tuple[int, int]:
    return (run.world.rank, run.world.size) if run.spread else checkpoint.ALL


def _put_back(state: TrainState, found: checkpoint.Snapshot) -> None:
    load_rows(state.model.state_dict(), found.model)
    if state.ema is not None and found.ema is not None:
        load_rows(state.ema, found.ema)


# --- after the last step ----------------------------------------------------------------------------------------------


def _finish(run: LiveRun, command: str, started: float) -> RunResult:
    """Tests the bundle as `vitlab evaluate` would, saves it with what was found, and loads it back."""
    recipe, world = run.recipe, run.world
    _take_best(run)
    if run.state.ema is not None:
        load_rows(run.state.model.state_dict(), run.state.ema)
    state = whole_state(run.state.model, keep=True)
    folder = run.folder / run_folder.BUNDLE
    saved = folder.exists()  # by a run that was stopped behind it
    world.barrier()  # all have looked before one makes it
    device = str(world.device)
    classifier = load(folder, device=device) if saved else Classifier(_bundle(run, state), device)
    scores = None if run.parts.test is None else _test(run, classifier, run.parts.test)
    if scores is not None:
        run.warn("answer", health.one_answer(scores, run.parts.train.classes, recipe.train.method))
    if not saved:
        if world.is_main:
            card = _card(recipe, scores, run.parts.num_fitted(recipe.train.method), command)
            save_bundle(folder, dataclasses.replace(classifier.bundle, card=card))
        del classifier  # a device need not have room for both
        world.barrier()
        classifier = load(folder, device=device)
    if world.is_main and recipe.optim.train == "lora" and recipe.init != SCRATCH:
        _write_adapter(run, state, classifier.bundle)
    seconds = run.spent + time.perf_counter() - started
    speed = run.features_per_second or sum(r.images_per_second for r in run.records) / max(1, len(run.records))
    return RunResult(
        run.folder,
        recipe,
        classifier,
        run.parts.test,
        scores,
        run.records,
        run.evaluations,
        run.bad.found,
        seconds,
        speed,
        run.parts.num_fitted(recipe.train.method),
    )


def _bundle(run: LiveRun, state: dict[str, Tensor]) -> Bundle:
    """What was trained, without its card."""
    train = run.parts.train
    even = (0.0,) * len(train.classes) if train.labels.multi else ()  # several labels: each has it or not
    return Bundle(
        _plain_model(run.recipe, state),
        run.recipe.data.preprocess(),
        train.classes,
        "",
        {"format": "vitlab"},
        temperature=run.temperature,
        thresholds=even,
    )


def _test(run: LiveRun, classifier: Classifier, test: Dataset) -> Scores:
    logits_BK, targets, ids_B = predict_logits(classifier, test, run.world, run.bad, workers=run.recipe.data.workers)
    temperature = classifier.bundle.temperature
    return score(logits_BK if temperature == 1 else logits_BK.double() / temperature, targets, ids_B)


def _plain_model(recipe: Recipe, state: dict[str, Tensor]) -> Model:
    """The model as it is stored and used: on the CPU, in one piece, without adapters."""
    model = allocate(recipe.model)
    if recipe.optim.train == "lora":
        add_lora(model, recipe.lora, seed=recipe.seed)
    model.load_state_dict(state, assign=True)
    return merge_lora(model) if recipe.optim.train == "lora" else model


def _write_adapter(run: LiveRun, state: dict[str, Tensor], bundle: Bundle) -> None:
    """What was trained, for those who have the start weights: written if it makes the bundle of them, bit by bit."""
    path, start = run.folder / run_folder.ADAPTER, run.recipe.init
    if path.exists():
        return
    try:
        base = load(start, device="cpu", quiet=True).bundle
    except VitlabError as error:  # the bundle is there, and worth more
        run.console.say(f"no adapter was written: {error.what}")
        return
    adapter = Adapter(
        rule=run.recipe.lora,
        tensors={name: tensor for name, tensor in state.items() if is_kept(name)},
        base=start,
        base_hash=hash_weights(in_float32(base.model)),
        spec=bundle.model.spec,
        preprocess=bundle.preprocess,
        labels=bundle.labels,
        card=bundle.card,
        thresholds=bundle.thresholds,
    )
    if hash_weights(adapted(base, adapter, start).model) != hash_weights(bundle.model):
        run.console.say(f"no adapter was written: {start} is no longer what the run began with")
        return
    save_adapter(path, adapter)


def _take_best(run: LiveRun) -> None:
    """The weights of the best evaluation that can be read; those of the last step where there is none or it is the best."""
    run.world.barrier()  # what the first process saves is there for all
    ranked = sorted(
        run.evaluations, key=rank_key, reverse=True
    )  # most are gone; those behind the best are for bad times
    for step in (int(row["step"]) for row in ranked):
        path = run.folder / run_folder.CHECKPOINTS / f"step-{step:09d}"
        if step == run.state.step:
            break
        if step != run.best_step and not path.is_dir():
            continue
        try:
            found = run.world.run_or_fail_everywhere(functools.partial(checkpoint.restore, path, _share(run)))
        except VitlabError as error:
            if checkpoint.is_transient_read_error(error, run.world):
                raise
            run.console.say(f"{error.what}: the next best are taken")
            continue
        _put_back(run.state, found)
        run.console.say(f"kept: the weights of step {step}, the best on the validation images")
        return
    if run.best_step not in (None, run.state.step):
        run.console.say(f"kept: the weights of the last step, {run.state.step}")


def _card(recipe: Recipe, scores: Scores | None, num_train: int, command: str) -> str:
    metrics = {"test": "none: the data has no part for it"}
    if scores is not None:
        low, high = scores.interval
        metrics = {"test top-1": f"{scores.top1:.4f} (95 % interval {low:.4f} to {high:.4f}, n = {scores.n})"}
        if scores.mean_ap is not None:
            metrics = {"test mean average precision": f"{scores.mean_ap:.4f}", **metrics}
    return write_card(
        title=recipe.title,
        spec=recipe.model,
        data=f"{recipe.data.source}: {num_train} training images",
        command=command,
        seed=recipe.seed,
        metrics=metrics,
        licence="that of the data and of the start weights; vitlab adds none",
    )
