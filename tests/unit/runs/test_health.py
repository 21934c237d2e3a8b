"""What goes wrong in silence is reported once, in a sentence, in the log and in the report; what goes well is not mentioned."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_jobs import batches_of, live_run, rule_of

from vitlab.core.console import Console
from vitlab.data.dataset import from_arrays, several_labels
from vitlab.report.page import render
from vitlab.runs.training.live_run import describe_validation, rank_key
from vitlab.runs.training.run_report import build_report
from vitlab.training import health
from vitlab.training.loop import fit
from vitlab.training.objective import Objective
from vitlab.training.recipe import DataConfig, Recipe
from vitlab.training.rules import Distillation

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]


def bars(name: str, count: int) -> Any:
    """Four kinds of image that anybody can distinguish: a bright bar in one of four places."""
    images = torch.zeros(count, 1, 16, 16, dtype=torch.uint8)
    for i in range(count):
        images[i, :, 4 * (i % 4) : 4 * (i % 4) + 4] = 200 + i
    return from_arrays(images, torch.arange(count) % 4, ("a", "b", "c", "d"), name)


def easy(parts: Any, train: int = 24, val: int = 8) -> Any:
    return dataclasses.replace(parts, train=bars("train", train), val=bars("val", val), test=bars("test", 8))


def lopsided(parts: Any) -> Any:
    """Nearly all training images are of one class, and there is nothing to recognise it by."""
    images = torch.full((24, 1, 16, 16), 128, dtype=torch.uint8)
    labels = torch.tensor([0] * 21 + [1, 2, 3])
    return dataclasses.replace(parts, train=from_arrays(images, labels, parts.train.classes, "train"))


@dataclasses.dataclass(frozen=True)
class Heard:
    lines: list[str]
    folder: Path
    page: str

    def once(self, words: str) -> str:
        """The one warning with these words, which log and report have as well."""
        (line,) = (line for line in self.lines if words in line)
        assert line.startswith("warning: ")
        assert line in (self.folder / "log.txt").read_text().splitlines()
        assert line.removeprefix("warning: ").split("'")[0].split("`")[0] in self.page
        return line


@pytest.fixture
def hear(tmp_path: Path, tiny: Tiny, run: Call) -> Callable[..., Heard]:
    def call(*overrides: str, parts: Any = None) -> Heard:
        console = Console(quiet=True)
        result = run(tiny(*overrides), tmp_path / "run", parts, console=console)
        return Heard(console.lines, result.folder, render(build_report(result)))

    return call


def test_run_that_goes_well_is_warned_of_nothing(hear: Call, parts: Call) -> None:
    small = ("train.steps=40", "train.eval_every=25%", "model.patch=2", "data.crop.how=squash")
    heard = hear(*small, parts=easy(parts(val=True)))
    assert [line for line in heard.lines if line.startswith("warning: ")] == []
    assert 'class="warning"' not in heard.page


# --- each of them -----------------------------------------------------------------------------------------------------


def test_rate_that_moves_nothing_is_reported(hear: Call) -> None:
    line = hear("optim.lr=1e-12", "train.steps=10", "optim.weight_decay=0").once("no weight has moved")
    assert "raise optim.lr" in line


@pytest.mark.slow
def test_head_that_alone_moves_at_the_first_step_is_movement_enough(hear: Call) -> None:
    """A head of zeros lets no gradient through, so that nothing else can move."""
    heard = hear("train.steps=4", "optim.lr=1e-3", "optim.weight_decay=0")
    assert not any("moved" in line for line in heard.lines)


def test_optimiser_with_another_rate_or_without_a_weight_is_reported(tmp_path: Path, tiny: Tiny, parts: Call) -> None:
    live = live_run(tiny(), parts(), tmp_path)
    state, before = live.state, health.sample_weights(live.state.model)
    for group in state.optimizer.param_groups:
        group["lr"] = 0.01 * group["lr_scale"]
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.mul_(1.01)
    assert health.unapplied_rate(state, before, 0.01) is None
    reported = health.unapplied_rate(state, before, 0.02)
    assert reported is not None and "has 1.00e-02, the schedule says 2.00e-02" in reported
    del state.optimizer.param_groups[0]["params"][0]
    reported = health.unapplied_rate(state, before, 0.01)
    assert reported is not None and reported.startswith("1 tensors are to be trained")


@pytest.mark.slow
def test_frozen_tensors_are_not_expected_to_move(hear: Call) -> None:
    heard = hear("optim.train=head", "train.steps=10")
    assert not any("moved" in line or "optimiser" in line for line in heard.lines)


def test_one_answer_for_all_is_reported_at_validation(hear: Call, parts: Call) -> None:
    line = hear(parts=lopsided(parts(val=True))).once("all 8 images get the same answer")
    assert ", a: " in line


@pytest.mark.slow
def test_one_answer_for_all_is_reported_at_the_test_without_validation_images(hear: Call, parts: Call) -> None:
    line = hear(parts=lopsided(parts())).once("all 8 images get the same answer")
    assert "another optim.lr, more steps, or objective.class_weights=auto" in line


@pytest.mark.slow
def test_class_weights_are_not_advised_where_they_are_auto_already(hear: Call, parts: Call) -> None:
    """Here the loss no longer drowns the rare class, so the answer is one by a rate too small to learn anything."""
    line = hear("objective.class_weights=auto", "optim.lr=1e-9", parts=lopsided(parts())).once("get the same answer")
    assert line.endswith(": another optim.lr or more steps")


def test_one_answer_of_a_linear_probe_is_not_blamed_on_its_steps(hear: Call, parts: Call) -> None:
    line = hear("train.method=probe", parts=lopsided(parts())).once("all 8 images get the same answer")
    assert "more images, other start weights, or objective.class_weights=auto" in line
    assert "optim.lr" not in line and "steps" not in line


def test_patch_of_16_on_images_of_32_is_reported_before_training(hear: Call) -> None:
    heard = hear("data.image_size=[32,32]", "model.name=ViT-w16d2m32h2/16", "train.steps=1")
    line = heard.once("into only 2x2 patches")
    assert heard.lines.index(line) < next(i for i, text in enumerate(heard.lines) if text.startswith("training"))


def test_batch_larger_than_the_data_is_reported(hear: Call) -> None:
    heard = hear("train.batch_size=32", "train.steps=1")
    assert "the 24 training images" in heard.once("a batch of 32 is larger")


@pytest.mark.slow
def test_warm_up_that_outlasts_the_run_is_reported(hear: Call) -> None:
    line = hear("train.steps=4", "schedule.warmup=10_000").once("the warm-up takes 10,000 steps and the run has 4")
    assert "never reaches its peak" in line and "schedule.warmup=10 %" in line


def test_warm_up_of_half_the_run_is_the_longest_that_is_fine() -> None:
    assert health.long_warmup(50, steps=100) is None
    assert "rises for most of it" in (health.long_warmup(51, steps=100) or "")


@pytest.mark.slow
def test_patch_of_4_on_images_of_32_is_fine(hear: Call) -> None:
    heard = hear("data.image_size=[32,32]", "model.name=ViT-w16d2m32h2/4", "train.steps=1")
    assert not any("patches" in line for line in heard.lines)


def test_augmentation_that_blanks_images_is_reported_before_training(hear: Call) -> None:
    """Shifts of 100 pixels in images of 8."""
    heard = hear("data.augment.randaugment=augreg", "data.augment.magnitude=10", "train.steps=1")
    line = heard.once("of 24 sampled training images one flat colour")
    assert "8x8" in line and "data.augment.randaugment=torchvision" in line
    assert heard.lines.index(line) < next(i for i, text in enumerate(heard.lines) if text.startswith("training"))


@pytest.mark.slow
def test_augmentation_that_blanks_images_without_randaugment_is_reported(hear: Call) -> None:
    line = hear("data.augment.shift_px=1000", "train.steps=1").once("24 of 24 sampled training images one flat colour")
    assert "torchvision" not in line


def test_augmentation_that_suits_the_size_is_fine(hear: Call) -> None:
    heard = hear("data.augment.randaugment=torchvision", "data.augment.magnitude=9", "train.steps=1")
    assert not any("flat colour" in line for line in heard.lines)


def test_images_that_were_flat_before_are_not_blamed_on_augmentation(hear: Call, parts: Call) -> None:
    heard = hear("data.augment.randaugment=torchvision", "train.steps=1", parts=lopsided(parts()))
    assert not any("flat colour" in line for line in heard.lines)


@pytest.mark.slow
def test_overfitting_is_reported(hear: Call, parts: Call) -> None:
    """Labels of noise can be remembered and not learnt."""
    still = ("data.crop.how=squash", "data.augment.mirror=0", "model.patch=2")
    heard = hear(*still, "train.steps=60", "train.eval_every=12.5%", parts=parts(val=True))
    line = heard.once("overfitting: since")
    assert "train.patience=3" in line


@pytest.mark.slow
def test_loss_at_chance_is_reported(hear: Call, parts: Call) -> None:
    line = hear("optim.lr=1e-6", "train.steps=40", parts=easy(parts())).once("1.386 is chance")
    assert "another optim.lr" in line


@dataclasses.dataclass(frozen=True)
class Slow:
    read: Any

    def __call__(self, i: int) -> Any:
        time.sleep(0.012)  # eight of them: far longer than a step of this model takes, also on a busy machine
        return self.read(i)


@pytest.mark.slow
def test_waiting_for_images_is_reported_where_it_costs_more_than_a_moment(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    given = parts()
    slow = dataclasses.replace(given, train=dataclasses.replace(given.train, read=Slow(given.train.read)))
    records = run(tiny("train.steps=12"), tmp_path / "run", slow).records
    data = DataConfig(source="", image_size=(8, 8), workers=3)
    assert health.waiting(records, steps=12, batch_size=8, data=data) is None, "a second is not worth a word"
    reported = health.waiting(records, steps=5_000, batch_size=8, data=data)
    assert reported is not None and "raise data.workers (now 3" in reported
    reported = health.waiting(records, steps=5_000, batch_size=8, data=dataclasses.replace(data, cache="device"))
    assert reported is not None and "data.augment" in reported and "raise" not in reported


# --- the loss at chance ------------------------------------------------------------------------------------------------


def test_loss_at_chance_depends_on_how_often_a_class_occurs() -> None:
    images = torch.zeros(10, 1, 2, 2, dtype=torch.uint8)
    lopsided = from_arrays(images, torch.tensor([0] * 9 + [1]), ("a", "b", "c"), "train")
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert health.chance_loss(Objective(), lopsided) == pytest.approx(entropy)
    assert health.chance_loss(Objective(class_weights="auto"), lopsided) == pytest.approx(math.log(2))
    assert health.chance_loss(Objective(kind="sigmoid"), lopsided) is None
    assert health.chance_loss(Objective(distillation=Distillation()), lopsided) is None


@pytest.mark.slow
def test_several_labels_have_a_best_answer_too(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    def several(part: Any) -> Any:
        return dataclasses.replace(part, labels=several_labels([[0, 1 + i % 3] for i in range(len(part))]))

    given = parts()
    given = dataclasses.replace(given, train=several(given.train), test=several(given.test))
    console = Console(quiet=True)
    run(tiny("objective.kind=sigmoid"), tmp_path / "run", given, console=console)
    assert sum("the same answer" in line for line in console.lines) == 1


def test_tuning_with_several_labels_goes_by_their_precision() -> None:
    likely = {"step": 1, "top1": 0.9, "loss": 0.1, "n": 10, "mean_ap": 0.4}
    precise = {"step": 2, "top1": 0.5, "loss": 0.2, "n": 10, "mean_ap": 0.6}
    unlabelled = {"step": 3, "top1": 0.0, "loss": 0.1, "n": 10, "mean_ap": math.nan}
    assert max([unlabelled, likely, precise, unlabelled], key=rank_key) is precise
    assert describe_validation(precise) == "mean average precision 0.600 on 10 validation images"


@pytest.mark.slow
def test_warnings_of_before_a_stop_are_in_the_report(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    recipe = tiny("optim.lr=1e-12", "train.steps=10", "data.image_size=[16,16]", "model.patch=8")
    run(recipe, tmp_path / "run")
    again = run(recipe, tmp_path / "run", resume=True)
    report = build_report(again)
    assert [line[:15] for line in report.warnings].count("no weight has m") == 1
    assert sum("2x2 patches" in line for line in report.warnings) == 1


def test_looking_changes_no_bit(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    """The loop alone, with nobody looking, ends in the same weights."""
    recipe = tiny("model.dropout=0.1")
    watched = run(recipe, tmp_path / "run")
    live = live_run(recipe, parts(), tmp_path)

    for _ in fit(live.state, batches_of(live), rule_of(live), live.world):
        pass
    for name, value in watched.classifier.model.state_dict().items():
        assert torch.equal(value, live.state.model.state_dict()[name]), name
