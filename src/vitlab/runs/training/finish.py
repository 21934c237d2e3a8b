"""The end of a run: the best weights, their test, the bundle with its card, and the adapter of a LoRA run."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.core import config
from vitlab.core.errors import VitlabError
from vitlab.core.runtime import seed_noise
from vitlab.data.dataset import Dataset
from vitlab.data.decode import read
from vitlab.data.pixel_stats import training_stats
from vitlab.data.preprocess import normalise
from vitlab.engines.classifier import Classifier, load
from vitlab.engines.inference import InferenceOptions, inference_progress, predict_logits
from vitlab.engines.provenance import Provenance, provenance_of
from vitlab.evaluation.classify import Scores, score
from vitlab.evaluation.records import (
    RECORDS,
    Subject,
    new_record,
    part_to_test,
    pretraining_of,
    read_records,
    write_record,
)
from vitlab.evaluation.representation import knn_of_model
from vitlab.models.build import Model, allocate
from vitlab.models.lora import add_lora, is_kept, merge_lora
from vitlab.runs.training import run_folder
from vitlab.runs.training.live_run import LiveRun, rank_key
from vitlab.training import checkpoint, health
from vitlab.training.loop import StepRecord, TrainState
from vitlab.training.pretext.task import Pretext, encoder_state
from vitlab.training.recipe import SCRATCH, Recipe, positions_note, recipe_to_dict, recipe_to_toml
from vitlab.training.sharding import full_state, load_rows
from vitlab.weights.adapter import Adapter, adapted, in_float32, save_adapter
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.card import write_card
from vitlab.weights.hashing import hash_weights

_PAINTED = 6  # images of a task that hides patches


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run leaves in memory for the report; everything else is in the folder."""

    folder: Path
    recipe: Recipe
    classifier: Classifier
    test: Dataset | None
    scores: Scores | None
    knn: dict[str, Any] | None  # of a task without labels: what the neighbours of test images say, `knn_of_model`
    painted: Tensor | None  # of a task that hides patches: uint8 [B, 3, C, Y, X], seen, painted, and the image
    records: list[StepRecord]
    evaluations: list[dict[str, float]]
    bad: dict[str, str]
    reason: str
    warnings: list[str]
    seconds: float
    images_per_second: float
    num_fitted: int  # images that the weights were fitted to


class Finished(NamedTuple):
    classifier: Classifier
    scores: Scores | None
    knn: dict[str, Any] | None
    painted: Tensor | None


def finish(run: LiveRun) -> Finished:
    """Test the bundle as `vitlab evaluate` would, save it with its scores, and load it back."""
    recipe, world = run.recipe, run.world
    _take_best(run)
    if run.state.ema is not None:
        load_rows(run.state.model.state_dict(), run.state.ema)
    painted = _paint(run)
    state, pretext = full_state(run.state.model), recipe.objective.is_pretext
    state = encoder_state(state) if pretext else state
    folder = run.folder / run_folder.BUNDLE
    saved = folder.exists()  # by this run, which was stopped after it had saved and is resumed now
    world.barrier()  # all have looked before one makes it
    device = str(world.device)
    classifier = load(folder, device=device) if saved else Classifier(_bundle(run, state), device)
    scores = knn = None
    if run.parts.test is not None and pretext:
        workers = InferenceOptions(workers=recipe.data.workers)
        knn = knn_of_model(classifier, run.parts.train, run.parts.test, workers, world, run.bad)
    elif run.parts.test is not None:
        scores = _test(run, classifier, run.parts.test)
    if scores is not None:
        classes = run.parts.train.classes
        run.warn("answer", health.one_answer(scores.logits_BK, scores.targets, classes, recipe))
    if not saved:
        if world.is_main:
            card = _card(recipe, scores or knn, run.parts.num_fitted(recipe.train.method), run.file)
            pixels = training_stats(run.parts.learnt, classifier.preprocess)
            known = {"card": card, "recipe": recipe_to_toml(recipe), "pixels": pixels}
            save_bundle(folder, dataclasses.replace(classifier.bundle, **known))
        del classifier  # a device need not have room for both
        world.barrier()
        classifier = load(folder, device=device)
    if world.is_main and recipe.optim.train == "lora" and recipe.init != SCRATCH:
        _write_adapter(run, state, classifier.bundle)
    return Finished(classifier, scores, knn, painted)


@torch.no_grad()
def _paint(run: LiveRun) -> Tensor | None:
    """A few held-out images, or else training images, as a task that hides patches sees and paints them."""
    task, rule = run.state.model, run.recipe.data.preprocess()
    if not isinstance(task, Pretext) or rule.mode == "array" or not run.world.is_main or run.sharded:
        return None
    images, seen = run.parts.test or run.parts.learnt, list[Tensor]()
    for i in range(len(images)):
        with contextlib.suppress(VitlabError, OSError):  # reported already
            seen.append(read(images.read(i), rule))
        if len(seen) == _PAINTED:
            break
    if not seen:
        return None
    images_BCYX = torch.stack(seen)
    seed_noise(run.recipe.seed, run.world.device)  # which patches are hidden
    found = task.eval().paint(normalise(rule, images_BCYX.to(run.world.device)))
    if found is None:
        return None
    mean, std = (torch.tensor(value)[:, None, None] for value in (rule.mean, rule.std))
    drawn = [((x_BCYX.float().cpu() * std + mean) * 255).clamp(0, 255).round().byte() for x_BCYX in found]
    return torch.stack([*drawn, images_BCYX.byte()], dim=1)


def _take_best(run: LiveRun) -> None:
    """The weights of the best evaluation that can be read; those of the last step where there is none or it is the best."""
    run.world.barrier()  # what the first process saves is there for all
    for row in sorted(run.evaluations, key=rank_key, reverse=True):  # the next best serves where the best is damaged
        step = int(row["step"])
        path = run.folder / run_folder.CHECKPOINTS / f"step-{step:09d}"
        if step == run.state.step:
            break
        if step != run.best_step and not path.is_dir():
            continue
        try:
            found = run.world.run_or_fail_everywhere(functools.partial(checkpoint.restore, path, rows_share(run)))
        except VitlabError as error:
            if checkpoint.is_transient_read_error(error, run.world):
                raise
            run.console.say(f"{error.what}: the next best are taken")
            continue
        load_snapshot(run.state, found)
        run.console.say(f"kept: the weights of step {step}, the best on the validation images")
        return
    if run.best_step not in (None, run.state.step):
        run.console.say(f"kept: the weights of the last step, {run.state.step}")


def rows_share(run: LiveRun) -> tuple[int, int]:
    """Which rows of the weights this process has: (rank, size), or all of them."""
    return (run.world.rank, run.world.size) if run.sharded else checkpoint.ALL


def load_snapshot(state: TrainState, snapshot: checkpoint.Snapshot) -> None:
    """Put the weights and the EMA of a checkpoint into the state."""
    load_rows(state.model.state_dict(), snapshot.model)
    if state.ema is not None and snapshot.ema is not None:
        load_rows(state.ema, snapshot.ema)


def _bundle(run: LiveRun, state: dict[str, Tensor]) -> Bundle:
    """What was trained, without its card."""
    train = run.parts.train
    labels = () if run.recipe.objective.is_pretext else train.classes
    even = (0.0,) * len(labels) if train.labels.multi else ()  # several labels: each has it or not
    return Bundle(
        _plain_model(run.recipe, state),
        run.recipe.data.preprocess(),
        labels,
        "",
        {"format": "vitlab"},
        temperature=run.temperature,
        thresholds=even,
    )


def _test(run: LiveRun, classifier: Classifier, test: Dataset) -> Scores:
    options = InferenceOptions(workers=run.recipe.data.workers)
    with inference_progress(run.console, "testing", len(test), options) as advance:
        logits_BK, targets, ids_B = predict_logits(
            classifier.model, test, classifier.preprocess, options, run.world, run.bad, advance=advance
        )
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
        run.console.say(f"no adapter was written: {start} was changed after the run started")
        return
    save_adapter(path, adapter)


def _card(recipe: Recipe, scores: Scores | dict[str, Any] | None, num_train: int, file: run_folder.RunFile) -> str:
    metrics = {"test": "none: the data has no part for it"}
    if isinstance(scores, dict):
        low, high = scores["interval"]
        metrics = {f"{scores['k']}-NN test top-1": f"{scores['top1']:.4f} (95 % interval {low:.4f} to {high:.4f})"}
    elif scores is not None:
        low, high = scores.interval
        metrics = {"test top-1": f"{scores.top1:.4f} (95 % interval {low:.4f} to {high:.4f}, n = {scores.n})"}
        if scores.mean_ap is not None:
            metrics = {"test mean average precision": f"{scores.mean_ap:.4f}", **metrics}
    metrics |= {"teacher": recipe.teacher} if recipe.teacher else {}
    # As they were when the run began: they may be gone since.
    init, changed = None if recipe.init == SCRATCH else recipe.init, positions_note(recipe)
    start = Provenance(**file.start) if file.start else provenance_of(init, changed)
    return write_card(
        title=recipe.title,
        spec=recipe.model,
        data=f"{recipe.data.source}: {num_train} training images",
        command=file.command,
        seed=recipe.seed,
        metrics=metrics,
        start=start.start,
        licence=start.licence,
    )


# --- the record of finished runs ---------------------------------------------------------------------------------------


def record_runs(results: Sequence[RunResult], folder: Path, *, recipe: str, command: str) -> Path | None:
    """One record for runs that differ by their seed alone, in `records/` of `folder`; None where nothing was tested.

    A run that is resumed after its end was measured before, and gets no second one.
    """
    first = results[0]
    scores = [result.scores for result in results if result.scores is not None]
    if first.test is None or len(scores) < len(results):
        return None
    whole = first.recipe
    precisions = [score.mean_ap for score in scores if score.mean_ap is not None] or None  # of several labels
    settings = {
        "start": whole.init,
        "train_images": first.num_fitted,
        "image_size": list(whole.data.image_size),
        "train": whole.train.method,
        "batch_size": whole.train.batch_size,
        "lr": whole.optim.lr,
        "precision": whole.train.precision,
        "average": whole.train.ema,  # as the stored records of published tables have it
        "dropout": getattr(whole.model, "dropout", 0.0),  # what tells the columns of the authors' replication apart
        "config": config.fingerprint(recipe_to_dict(whole)),
    }
    subject = Subject(
        model=first.classifier.model,
        dataset=first.test,
        data=whole.data.source,
        part=part_to_test(whole.data.source),
        settings=settings,
        pretrained_on=pretraining_of(whole.init),
        recipe=recipe,
        device=first.classifier.device,
        seconds=sum(result.seconds for result in results),
        command=command,
    )
    record = new_record(
        subject,
        "top1" if precisions is None else "mean_ap",
        [score.top1 for score in scores] if precisions is None else precisions,
        seeds=[result.recipe.seed for result in results],
        interval=scores[0].interval if len(scores) == 1 and precisions is None else None,
        n=scores[0].n,
    )
    known = read_records(folder / RECORDS) if (folder / RECORDS).is_dir() else []
    if any(dataclasses.replace(one, date=record.date, seconds=record.seconds) == record for one in known):
        return None
    return write_record(folder / RECORDS, record)
