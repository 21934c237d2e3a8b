"""A run while it is going on: what it trains, on what, and what it has found so far."""

import contextlib
import dataclasses
from pathlib import Path

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, eval_batches
from vitlab.evaluation.classify import Scores, run_model, score
from vitlab.runs.parts import Parts
from vitlab.runs.recipe import Recipe
from vitlab.training.averaging import averaged
from vitlab.training.loop import StepRecord, TrainState
from vitlab.training.precision import autocast

EVAL_BATCH = 256


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
    records: list[StepRecord] = dataclasses.field(default_factory=list[StepRecord])
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list[dict[str, float]])
    best: dict[str, float] | None = None  # the evaluation with the best top-1 so far

    @property
    def best_step(self) -> int | None:
        return None if self.best is None else int(self.best["step"])


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
    kept = averaged(state.model, state.average) if state.average is not None else contextlib.nullcontext()
    with kept:
        precision = autocast(recipe.train.precision, world.device)
        return score(*run_model(state.model, batches, recipe.data.preprocess(), world, precision))
