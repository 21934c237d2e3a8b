"""What reaches a step of a run: images changed anew in every epoch, mixed anew in every step, at the rate of the schedule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core.runtime import generator
from vitlab.data.augmentation.augment import augment
from vitlab.data.loader import Batch
from vitlab.training.assemble import Preparation
from vitlab.training.recipe import Recipe

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]
IDS = torch.arange(8)


def batch(epoch: int = 0, copy: int = 0, valid: int = 8) -> Batch:
    """The same eight images, as another epoch or repetition shows them."""
    images = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8, generator=generator(0))
    times = torch.ones_like(IDS)
    return Batch(images, IDS % 4, valid > IDS, IDS, epoch * times, copy * times, IDS)


def prepare(recipe: Recipe) -> Call:
    return Preparation(recipe, torch.device("cpu"))


def test_images_are_augmented_by_their_epoch_and_repetition(tiny: Tiny) -> None:
    recipe = tiny("data.augment.shift_px=3", "data.augment.mirror=0.5", "seed=3")
    for given in (batch(), batch(epoch=1), batch(copy=1)):
        expected = augment(given.images, IDS, recipe.data.augment, seed=3, epoch=given.epochs, copy=given.copies)
        found, targets = prepare(recipe)(given, 0)
        torch.testing.assert_close(found, expected.float() / 127.5 - 1)
        assert torch.equal(targets, IDS % 4)
    firsts = [prepare(recipe)(given, 0)[0] for given in (batch(), batch(epoch=1), batch(copy=1))]
    assert not torch.equal(firsts[0], firsts[1]) and not torch.equal(firsts[0], firsts[2])


def test_images_are_mixed_anew_at_every_step_and_never_with_a_bad_one(tiny: Tiny) -> None:
    make = prepare(tiny("data.augment.mirror=0", "data.mix.mixup=0.5"))
    shares = [make(batch(), step)[1].amax(dim=1) for step in range(3)]
    assert len({float(share[0]) for share in shares}) == 3
    assert float(make(batch(), 0)[1].sum(dim=1).sub(1).abs().max()) < 1e-6
    plain = batch().images.float() / 127.5 - 1
    torch.testing.assert_close(make(batch(valid=7), 0)[0][6], plain[6])
    assert not torch.equal(make(batch(), 0)[0][6], plain[6])


@pytest.mark.parametrize("decay", ["linear", "constant"])
def test_rate_of_each_step_is_the_schedules(tmp_path: Path, tiny: Tiny, run: Call, decay: str) -> None:
    result = run(tiny(f"schedule.decay={decay}", "schedule.warmup=2", "optim.lr=0.001"), tmp_path / "run")
    after = [1 - max(0, step - 2) / 6 if decay == "linear" else 1 for step in range(8)]
    expected = [0.001 * min(1, (step + 1) / 2) * after[step] for step in range(8)]
    assert [record.lr for record in result.records] == pytest.approx(expected)


def test_evaluating_on_the_way_changes_no_step(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    """Dropout is off while a model is evaluated, and must be on again for the next step."""
    often, once = (
        run(tiny("model.dropout=0.5", f"train.eval_every={every}"), tmp_path / every.strip("%"), parts(val=True))
        for every in ("1", "100%")
    )
    assert len(often.evaluations) == 8
    assert [record.loss for record in often.records] == [record.loss for record in once.records]
