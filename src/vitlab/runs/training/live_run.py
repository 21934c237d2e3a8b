"""A run in progress: what it trains, on what, and what it has found so far."""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.duration import RunLength
from vitlab.core.errors import FileProblem, VitlabError, printable
from vitlab.core.runtime import mix, seed_noise
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, eval_batches
from vitlab.data.parts import Parts
from vitlab.engines.inference import run_model
from vitlab.evaluation.classify import Scores, score
from vitlab.runs.training.run_folder import RunFile
from vitlab.training.assemble import is_sharded
from vitlab.training.ema import ema_applied
from vitlab.training.loop import StepRecord, TrainState
from vitlab.training.precision import autocast
from vitlab.training.recipe import Recipe

EVAL_BATCH = 256
_HIDDEN = 12  # keeps the noise of validation apart from other uses of the same seed
_STEPS = 10**9  # as many as the name of a checkpoint has digits for


@dataclasses.dataclass
class LiveRun:
    """One object instead of ten arguments; only `state` and what is found change."""

    recipe: Recipe
    parts: Parts
    folder: Path
    world: World
    console: Console
    state: TrainState
    file: RunFile  # what is stored as `run.json`
    init_error: VitlabError | None = None  # why the start weights cannot be read, where a run is resumed without them
    records: list[StepRecord] = dataclasses.field(default_factory=list[StepRecord])
    metrics_hash: "hashlib._Hash" = dataclasses.field(default_factory=hashlib.sha256)  # of all records, by `curve_line`
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list[dict[str, float]])
    best: dict[str, float] | None = None  # the best evaluation so far, by `rank_key`
    temperature: float = 1.0  # of the bundle
    features_per_second: float = 0.0  # of a linear probe, which has no steps to be timed
    unwritten: bool = False  # whether a record did not reach its file
    micro_batch: int = 0  # images per forward pass that were found to fit; 0 where the recipe's number counts
    spent: float = 0.0  # seconds of the steps that were done before the run was resumed; known to the first process

    def __post_init__(self) -> None:
        images = len(self.parts.learnt) * self.recipe.data.repeats
        self.steps = self.recipe.train.in_steps(images, self.recipe.train.batch_size)
        self.length = RunLength(self.steps, images, self.recipe.train.batch_size)
        self.bad = BadImages(self.recipe.data.max_bad)

    def warn(self, kind: str, sentence: str | None) -> None:
        """Warn once for each kind. It goes into `run.json` at once."""
        if sentence is None or kind in self.file.warnings:
            return
        self.file.warnings[kind] = printable(sentence)
        self.console.say(f"warning: {sentence}")
        self.write_file()

    def write_file(self, *, finished: bool = False) -> None:
        self.file.progress = {"step": self.state.step, "steps": self.steps, "finished": finished}
        if self.world.is_main:
            with contextlib.suppress(FileProblem):  # training is worth more than its record
                self.file.write(self.folder)

    def take_progress(self, stored: Mapping[str, Any]) -> None:
        """Puts back what a checkpoint has besides tensors. What is not as it was stored is an error of Python's."""
        self.evaluations = [_checked(row) for row in stored["evaluations"]]
        self.best = None if stored["best"] is None else _checked(stored["best"])
        self.bad.found.update({str(name): str(reason) for name, reason in stored["bad"].items()})
        self.micro_batch = max(0, min(int(stored["micro_batch"]), self.recipe.train.batch_size))

    @property
    def sharded(self) -> bool:
        return is_sharded(self.recipe, self.world)

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else int(self.best["step"])


def _checked(row: dict[str, float]) -> dict[str, float]:
    """`row` if it is one of `Scores.summary`, at a step that can be."""
    if not all(type(value) in (int, float) for value in row.values()) or not 0 <= row["step"] < _STEPS or row["n"] < 0:
        raise ValueError("an evaluation is not one")
    rank_key(row)
    return row


def primary_metric(row: Mapping[str, float]) -> float:
    """What an evaluation goes by: accuracy; the mean average precision of several labels; minus the loss without labels."""
    if "top1" not in row:
        return -row["loss"]
    value = row.get("mean_ap", row["top1"])
    return 0.0 if math.isnan(value) else value  # of a part whose images have no label at all


def rank_key(row: Mapping[str, float]) -> tuple[float, float]:
    """What one evaluation is worth beside another. Few images often give equal accuracies: the lower loss decides."""
    return primary_metric(row), -row["loss"]


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The evaluation that counts: the one that a linear probe has chosen, else the best."""
    return next((row for row in rows if row.get("chosen")), None) or max(rows, key=rank_key)


def brief_metric(row: Mapping[str, float]) -> str:
    """For a line of progress."""
    return f"{primary_metric(row):.1%}" if "top1" in row else f"loss {row['loss']:.3f}"


def describe_validation(row: Mapping[str, float]) -> str:
    if "top1" not in row:
        return f"loss {row['loss']:.4f} on {int(row['n'])} validation images"
    if "mean_ap" in row:
        return f"mean average precision {row['mean_ap']:.3f} on {int(row['n'])} validation images"
    return f"{row['top1']:.1%} of {int(row['n'])} validation images right"


def score_part(run: LiveRun, dataset: Dataset) -> Scores:
    """The scores of the weights that are kept: the EMA where there is one."""
    return score(*_outputs(run, dataset))


def task_loss(run: LiveRun, dataset: Dataset) -> dict[str, float]:
    """The loss of a task without labels on images that it does not train on; each time the same patches are hidden."""
    seed_noise(mix(run.recipe.seed, _HIDDEN) + run.world.rank, run.world.device)
    losses_N, _, _ = _outputs(run, dataset)
    return {"loss": float(losses_N.double().mean()), "n": len(losses_N)}


def _outputs(run: LiveRun, dataset: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """What the model, or the task, gives for every image, with targets and ids."""
    recipe, world, state = run.recipe, run.world, run.state
    batches = eval_batches(
        dataset,
        recipe.data.preprocess(),
        batch_size=EVAL_BATCH,
        bad=run.bad,
        rank=world.rank,
        world=world.size,
        workers=recipe.data.workers,
        pin=world.device.type == "cuda",
    )
    with ema_applied(state.model, state.ema) if state.ema is not None else contextlib.nullcontext():
        precision = autocast(recipe.train.precision, world.device)
        return run_model(state.model, batches, recipe.data.preprocess(), world, precision)
