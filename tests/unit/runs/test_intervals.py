"""A run that states its intervals in words does what one does that states them in shares and steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after

from vitlab.core.duration import RunLength
from vitlab.training.recipe import Recipe, recipe_to_toml
from vitlab.training.schedule import Schedule, rate_at

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "words",
    slow_after(
        1,
        [
            ["train.save_every=16 examples", "train.eval_every=1.3 epochs", "schedule.warmup=0.7 epochs"],
            ["train.save_every=2 steps", "train.eval_every=4 steps", "schedule.warmup=25 %"],
            ["train.save_every=25 %", "train.eval_every=50%", "schedule.warmup=16 examples"],
        ],
    ),
)
def test_words_and_numbers_make_the_same_run(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, words: list[str]
) -> None:
    """Eight steps of eight images, three steps to an epoch."""
    numbers = ("train.save_every=2", "train.eval_every=4", "schedule.warmup=2")
    first, second = (
        run(tiny(*settings, "train.keep=9"), tmp_path / str(i), parts(val=True))
        for i, settings in enumerate((numbers, words))
    )
    assert rates(first.folder) == rates(second.folder)
    assert [row["step"] for row in first.evaluations] == [row["step"] for row in second.evaluations] == [4, 8]
    saved = [sorted(path.name for path in (each.folder / "checkpoints").iterdir()) for each in (first, second)]
    assert saved[0] == saved[1] == [f"step-{step:09d}" for step in (2, 4, 6, 8)]


def test_words_are_stored_as_they_were_given(tiny: Tiny) -> None:
    stored = recipe_to_toml(tiny("train.save_every=2 steps", "schedule.cooldown=10 %"))
    assert 'save_every = "2 steps"' in stored and 'cooldown = "10 %"' in stored


def test_cooldown_in_words_is_the_same_in_steps() -> None:
    run = RunLength(steps=200, epoch_examples=100, batch_size=10)
    words = Schedule(warmup="1 epoch", cooldown="5 %").settled(run)
    steps = Schedule(warmup=10, cooldown=10)
    assert words == steps.settled(run) == steps
    assert rate_at(words, 195, base=1.0, total_steps=200) < rate_at(Schedule(warmup=10), 195, base=1.0, total_steps=200)
