"""One training run: recipe in, run folder out.

Owns the order of the work and the layout of the folder. The rooms below do the work and know nothing of folders:
`config.toml env.json split.csv metrics.jsonl metrics.csv bundle/ log.txt`; the caller adds the report.
"""

import csv
import dataclasses
import io
import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.core import fsio
from vitlab.core.console import Console, seconds_left
from vitlab.core.environment import describe_machine
from vitlab.core.runtime import Runtime, generator
from vitlab.data.augment import random_affine
from vitlab.data.batches import batch_indices
from vitlab.data.digits import load_digits
from vitlab.data.letters import draw_letters
from vitlab.data.preprocess import Preprocess, normalise, resize
from vitlab.data.samples import Samples
from vitlab.data.splits import split_csv, stratified_split
from vitlab.engines.classifier import Classifier, load
from vitlab.evaluation.classify import Scores, score
from vitlab.models.build import Model, build
from vitlab.models.names import format_name
from vitlab.runs.recipe import SCRATCH, DataConfig, Recipe, recipe_to_toml
from vitlab.training.loop import Batch, StepRecord, fit
from vitlab.training.objective import softmax_cross_entropy
from vitlab.training.optim import adamw
from vitlab.training.schedule import learning_rate
from vitlab.weights.bundle import Bundle, save_bundle
from vitlab.weights.card import write_card
from vitlab.weights.surgery import for_transfer, require_same_body

_AUGMENT = 3  # keeps augmentation's random numbers apart from other uses of the same seed
_EVAL_BATCH = 256


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run leaves in memory for the report; everything else is in the folder."""

    folder: Path
    recipe: Recipe
    classifier: Classifier
    test: Samples
    scores: Scores
    records: list[StepRecord]
    seconds: float
    images_per_second: float


def run_recipe(recipe: Recipe, folder: Path, *, runtime: Runtime, console: Console, command: str) -> RunResult:
    """Trains, tests, saves and loads back. `folder` must not exist."""
    started, first_line = time.perf_counter(), len(console.lines)
    fsio.require_free(folder)
    samples = _load_data(recipe)
    train_index, test_index = stratified_split(samples.labels, recipe.data.test_frac, recipe.seed)
    train, test = samples.subset(train_index), samples.subset(test_index)
    model = _make_model(recipe, console).to(runtime.device)

    fsio.make_folder(folder)
    fsio.write_file(folder / "config.toml", recipe_to_toml(recipe))
    fsio.write_json(folder / "env.json", environment(runtime, command))
    fsio.write_file(folder / "split.csv", split_csv(samples, {"train": train_index, "test": test_index}))

    console.say(f"{recipe.title}: {format_name(recipe.model)} on {len(train)} images, {len(samples.classes)} classes")
    records: list[StepRecord] = []
    try:
        records.extend(_train(recipe, model, train, runtime, console, folder))
    finally:  # a run that was stopped keeps what it has said and measured
        fsio.write_file(folder / "metrics.csv", _as_csv(records))
        fsio.write_file(folder / "log.txt", "\n".join(console.lines[first_line:]) + "\n")
    rule = preprocess_rule(recipe.data)
    scores = score(model, eval_batches(test, rule, runtime.device))
    bundle = Bundle(model, rule, samples.classes, _card(recipe, scores, len(train), command), {"format": "vitlab"})
    save_bundle(folder / "bundle", bundle)
    classifier = load(folder / "bundle", device=str(runtime.device))
    _require_same(model, classifier, eval_batches(test, rule, runtime.device))

    seconds = time.perf_counter() - started
    speed = sum(record.images_per_second for record in records) / len(records)
    return RunResult(folder, recipe, classifier, test, scores, records, seconds, speed)


def preprocess_rule(data: DataConfig) -> Preprocess:
    """Grey images on the paper's -1...1 scale."""
    return Preprocess(mode="L", image_size=data.image_size, mean=(0.5,), std=(0.5,))


def eval_batches(samples: Samples, rule: Preprocess, device: torch.device) -> Generator[Batch]:
    for images, labels in zip(samples.images.split(_EVAL_BATCH), samples.labels.split(_EVAL_BATCH), strict=True):
        yield normalise(rule, resize(rule, images)).to(device), labels.to(device)


def environment(runtime: Runtime, command: str) -> dict[str, Any]:
    """What the bits of a run depend on besides the recipe."""
    run = {"command": command, "device": str(runtime.device), "threads": runtime.threads, "seed": runtime.seed}
    return {**run, **describe_machine()}


def _load_data(recipe: Recipe) -> Samples:
    data = recipe.data
    return draw_letters(data.count, data.image_size, recipe.seed) if data.name == "letters" else load_digits()


def _make_model(recipe: Recipe, console: Console) -> Model:
    if recipe.init == SCRATCH:
        return build(recipe.model, seed=recipe.seed)
    start = load(recipe.init, device="cpu").model
    require_same_body(start.spec, recipe.model)
    model, report = for_transfer(start, recipe.model)
    console.say(f"Start from {recipe.init}: {report}")
    return model


def _train(
    recipe: Recipe, model: Model, train: Samples, runtime: Runtime, console: Console, folder: Path
) -> Generator[StepRecord]:
    data, optim = recipe.data, recipe.optim
    rule = preprocess_rule(data)
    images = resize(rule, train.images)
    steps = recipe.train.in_steps(len(train), recipe.train.batch_size)
    warmup_steps = round(optim.warmup_frac * steps)

    def batch_at(step: int) -> Batch:
        index = batch_indices(len(train), recipe.train.batch_size, step, recipe.seed)
        x_BCYX = normalise(rule, images[index])
        noise = generator(recipe.seed, _AUGMENT, step)
        x_BCYX = random_affine(
            x_BCYX, noise, turn_deg=data.turn_deg, zoom=data.zoom, shift_frac=data.shift_frac, fill=-1.0
        )
        return x_BCYX.to(runtime.device), train.labels[index].to(runtime.device)

    def objective(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        return softmax_cross_entropy(logits_BK, labels_B, optim.label_smoothing)

    def lr_at(step: int) -> float:
        return learning_rate(step, base=optim.lr, total_steps=steps, warmup_steps=warmup_steps, decay=optim.decay)

    optimizer = adamw(model, lr=optim.lr, weight_decay=optim.weight_decay, betas=optim.betas)
    started = time.perf_counter()
    with console.progress("training", steps) as advance:
        for record in fit(
            model,
            optimizer,
            batch_at,
            objective,
            lr_at,
            steps=steps,
            seed=recipe.seed,
            max_grad_norm=optim.max_grad_norm,
        ):
            fsio.append_line(folder / "metrics.jsonl", json.dumps(dataclasses.asdict(record)))
            advance(
                record.step,
                f"loss {record.loss:.3f}  lr {record.lr:.1e}  {record.images_per_second:.0f} img/s  "
                f"data {record.data_wait_frac:.0%}  left {seconds_left(started, record.step, steps)}",
            )
            yield record


def _require_same(model: Model, classifier: Classifier, batches: Generator[Batch]) -> None:
    """What was saved and loaded back must answer exactly as the model in memory; anything else is our fault."""
    images, _ = next(batches)
    with torch.inference_mode():
        if not torch.equal(model(images), classifier.model(images)):
            raise AssertionError("the bundle does not answer like the model it was made from")


def _card(recipe: Recipe, scores: Scores, num_train: int, command: str) -> str:
    low, high = scores.interval
    return write_card(
        title=recipe.title,
        spec=recipe.model,
        data=f"{recipe.data.name}: {num_train} training images, {scores.n} held-out test images",
        command=command,
        seed=recipe.seed,
        metrics={"test top-1": f"{scores.top1:.4f} (95 % interval {low:.4f} to {high:.4f}, n = {scores.n})"},
        licence="Apache-2.0, as vitlab itself",
    )


def _as_csv(records: list[StepRecord]) -> str:
    text = io.StringIO()
    rows = csv.DictWriter(text, [field.name for field in dataclasses.fields(StepRecord)], lineterminator="\n")
    rows.writeheader()
    rows.writerows(dataclasses.asdict(record) for record in records)
    return text.getvalue()
