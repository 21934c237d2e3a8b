"""A run while it is going on: what it trains, on what, and what it has found so far."""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.duration import RunLength
from vitlab.core.errors import FileProblem, VitlabError, printable
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, eval_batches
from vitlab.data.parts import Parts
from vitlab.evaluation.classify import Scores, run_model, score
from vitlab.runs.training import run_folder
from vitlab.training.ema import ema_applied
from vitlab.training.loop import StepRecord, TrainState
from vitlab.training.precision import autocast
from vitlab.training.recipe import Recipe

EVAL_BATCH = 256
_STEPS = 10**9  # as many as the name of a checkpoint has digits for
WARNING = "warning: "  # before what seems amiss, in the log too, where the report finds it


@dataclasses.dataclass
class LiveRun:
    """One object instead of ten arguments; only `state` and what is found change."""

    recipe: Recipe
    parts: Parts
    folder: Path
    world: World
    console: Console
    state: TrainState
    steps: int
    bad: BadImages
    init_error: VitlabError | None = None  # why the start weights cannot be read, where a run goes on without them
    records: list[StepRecord] = dataclasses.field(default_factory=list[StepRecord])
    curve: "hashlib._Hash" = dataclasses.field(default_factory=hashlib.sha256)  # of all records, by `curve_line`
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list[dict[str, float]])
    best: dict[str, float] | None = None  # the best evaluation so far, by `rank_key`
    temperature: float = 1.0  # of the bundle
    features_per_second: float = 0.0  # where a linear probe is fitted, and there are no steps to be timed
    unwritten: bool = False  # whether a record did not reach its file
    micro_batch: int = 0  # images per forward pass that were found to fit; 0 where the recipe's number counts
    warned: set[str] = dataclasses.field(default_factory=set[str])
    spent: float = 0.0  # seconds of the steps that were done before the run was resumed; known to the first process

    @property
    def length(self) -> RunLength:
        return RunLength(self.steps, len(self.parts.train) * self.recipe.data.repeats, self.recipe.train.batch_size)

    def warn(self, kind: str, sentence: str | None) -> None:
        """Says what seems amiss, once for each kind. It goes into the log at once, which else is written at the end."""
        if sentence is None or kind in self.warned:
            return
        self.warned.add(kind)
        sentence = WARNING + printable(sentence)
        self.console.say(sentence)
        if self.world.is_main:
            with contextlib.suppress(FileProblem):  # training is worth more than its log
                fsio.append_line(self.folder / run_folder.LOG, sentence)

    def take_progress(self, stored: Mapping[str, Any]) -> None:
        """Puts back what a checkpoint has besides tensors. What is not as `_snapshot` stored it is an error of Python's."""
        self.evaluations = [_checked(row) for row in stored["evaluations"]]
        self.best = None if stored["best"] is None else _checked(stored["best"])
        self.bad.found.update({str(name): str(reason) for name, reason in stored["bad"].items()})
        self.micro_batch = max(0, min(int(stored.get("micro_batch", 0)), self.recipe.train.batch_size))
        self.warned = {str(kind) for kind in stored.get("warned", [])}

    @property
    def spread(self) -> bool:
        """Whether each process has only some rows of the weights."""
        return self.recipe.train.sharded and self.world.size > 1

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
    """What an evaluation goes by: right answers or, where images have several labels, the mean average precision."""
    value = row.get("mean_ap", row["top1"])
    return 0.0 if math.isnan(value) else value  # of a part whose images have no label at all


def rank_key(row: Mapping[str, float]) -> tuple[float, float]:
    """What one evaluation is worth beside another. Few images often give equally many right answers: the lower loss decides."""
    return primary_metric(row), -row["loss"]


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The evaluation that counts: the one that a linear probe has chosen, else the best."""
    return next((row for row in rows if row.get("chosen")), None) or max(rows, key=rank_key)


def describe_validation(row: Mapping[str, float]) -> str:
    if "mean_ap" in row:
        return f"mean average precision {row['mean_ap']:.3f} on {int(row['n'])} validation images"
    return f"{row['top1']:.1%} of {int(row['n'])} validation images right"


def score_part(state: TrainState, dataset: Dataset, recipe: Recipe, world: World, bad: BadImages) -> Scores:
    """The scores of the weights that are kept: the moving average where there is one."""
    batches = eval_batches(
        dataset,
        recipe.data.preprocess(),
        batch_size=EVAL_BATCH,
        bad=bad,
        rank=world.rank,
        world=world.size,
        workers=recipe.data.workers,
        pin=world.device.type == "cuda",
    )
    kept = ema_applied(state.model, state.ema) if state.ema is not None else contextlib.nullcontext()
    with kept:
        precision = autocast(recipe.train.precision, world.device)
        return score(*run_model(state.model, batches, recipe.data.preprocess(), world, precision))
