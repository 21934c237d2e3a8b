"""A plan's exact numbers are exact, its estimates are near what is counted or run, and its hours follow from them."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.models.facts import model_info
from vitlab.runs.training import planning
from vitlab.runs.training.planning import RunPlan, plan
from vitlab.training.memory import MemoryEstimate, estimate_memory
from vitlab.training.recipe_book import show_recipe

GB = 2**30


def on_paper(**settings: Any) -> RunPlan:
    return plan(**{"model": "ViT-B/16", "steps": 10, "device": "cpu", "measure": False, **settings})


# --- counted ----------------------------------------------------------------------------------------------------------


def test_exact_numbers_of_a_model() -> None:
    found = on_paper(batch_size=64)
    assert (found.params, found.images_seen, found.steps) == (86_567_656, 640, 10)
    assert found.exaflops == pytest.approx(6 * found.macs * 640 / 1e18)


def test_exact_numbers_of_a_recipe() -> None:
    found = plan(recipe="paper-vit-h14-jft", device="cpu", measure=False)
    assert found.exaflops == pytest.approx(4262, rel=2e-3), "Table 6"
    assert found.steps == show_recipe("paper-vit-h14-jft").steps
    assert (found.hours, found.measured_images_per_second) == (None, None)


def test_start_weights_are_named() -> None:
    assert on_paper().start == "scratch"
    found = plan("digits", init="ViT-S/14@dinov2", device="cpu", measure=False)
    assert (found.start, ("start", "ViT-S/14@dinov2") in found.lines()) == ("ViT-S/14@dinov2", True)


def test_override_counts() -> None:
    assert plan(recipe="laptop-digits", overrides=["train.steps=7"], device="cpu", measure=False).steps == 7


def test_batch_norm_that_lacks_a_second_image_is_the_reason_for_no_measurement() -> None:
    settings = ("data.image_size=[32,32]",)
    found = plan(model="EfficientNet-B0", steps=1, batch_size=1, device="cpu", overrides=settings, quiet=True)
    assert found.measured_images_per_second is None
    assert found.notes == ("nothing was measured: batch norm needs two images at once, and the batch has one",)


# --- estimated --------------------------------------------------------------------------------------------------------


def test_narrow_momentum_needs_less() -> None:
    kinds = ("optim.name=adamw", "optim.name=sgd-paper", "optim.momentum_dtype=bfloat16")
    found = [on_paper(overrides=kinds[: i + 1]).memory_gb["optimizer"] for i in range(3)]
    assert found == pytest.approx([count * 86_567_656 / GB for count in (8, 4, 2)])


def test_largest_micro_batch_fits_and_twice_as_many_do_not() -> None:
    memory = estimate_memory(show_recipe("paper-vit-b16-imagenet").recipe)
    for room in (4 * GB, 24 * GB, 80 * GB):
        most = memory.largest_micro_batch(room)
        assert memory.peak(most, accumulates=True) <= room < memory.peak(2 * most, accumulates=True)
    assert memory.largest_micro_batch(GB) == 0


def test_peak_is_the_larger_of_the_two_passes() -> None:
    memory = MemoryEstimate(weights=4, gradients=4, optimizer=8, ema=0, per_image=10, fixed=1, update=3)
    assert memory.peak(0, accumulates=False) == 4 + 8 + 4 + 3
    assert memory.peak(2, accumulates=False) == 4 + 8 + 1 + 20
    assert memory.peak(2, accumulates=True) == 4 + 8 + 1 + 20 + 4
    memory = dataclasses.replace(memory, last_per_image=9, traffic=5)
    assert memory.peak(2, accumulates=False) == 4 + 8 + 5 + 1 + 18 + 4


def described(found: RunPlan, label: str) -> list[str]:
    return [text for name, text in found.lines() if name == label]


def test_several_devices_like_this_one_share_the_batch() -> None:
    found = on_paper(gpus=8, overrides=["train.sharded=true"])
    assert (found.batch_size, found.images_each) == (256, 32)
    assert found.memory_gb["weights"] == pytest.approx(on_paper().memory_gb["weights"] / 8, rel=0.02)


def test_what_fits_only_when_it_is_spread_is_not_measured_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_memory", lambda _: GB)
    found = on_paper(measure=True, gpus=8, batch_size=16, overrides=["train.sharded=true"])
    assert (found.micro_batch, found.measured_batch) == (2, None)
    assert found.notes == ("nothing was measured: all weights in one process do not fit here",)


# --- measured ---------------------------------------------------------------------------------------------------------


def test_measured_steps_give_hours_and_cost() -> None:
    found = plan(recipe="laptop-digits", device="cpu", threads=1, gpus=2, price_per_hour=3.0)
    speed = found.measured_images_per_second
    assert speed is not None and found.hours is not None and found.measured_batch is not None
    assert 1 < speed < 1e6
    assert found.measured_batch <= found.micro_batch == found.images_each == found.batch_size // 2
    assert found.hours == pytest.approx(found.images_seen / speed / 2 / 3600)
    assert found.cost == pytest.approx(found.hours * 2 * 3.0)
    assert {label for label, _ in found.lines()} == {
        "model",
        "start",
        "length",
        "compute",
        "share",
        "micro-batch",
        "memory",
        "speed",
        "time",
    }


def test_planning_leaves_no_marks() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    plan(model="ViT-mu/16", steps=1, device="cpu", threads=1, image_size=32)
    after = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])


# --- calls that cannot work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model": None}, "a recipe or a model"),
        ({"recipe": "laptop-digits"}, "a recipe or a model"),
        ({"gpus": 0}, "--gpus"),
        ({"price_per_hour": -1.0}, "--price-per-hour"),
        ({"price_per_hour": 2.0}, "a cost needs hours"),
        ({"model": None, "recipe": "laptop-digits"}, "own steps"),
        ({"model": None, "recipe": "laptop-digits", "steps": None, "batch_size": 8}, "own batch_size"),
        ({"gpus": 3}, "256 .*3 processes"),
        ({"steps": None, "epochs": 1}, "how many images"),
        ({"batch_size": 0}, "batch_size"),
        ({"images": 0, "steps": None, "epochs": 1}, "--images"),
    ],
    ids=str,
)
def test_bad_call_is_refused_before_any_work(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        on_paper(**settings)


def test_macs_are_those_of_the_model() -> None:
    assert on_paper(image_size=(64, 32)).macs == model_info("ViT-B/16", image_size=(64, 32)).macs


def test_measuring_is_announced_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"model": "ViT-mu/16", "image_size": 32, "steps": 2, "device": "cpu"}
    plan(**given)
    printed = capsys.readouterr()
    assert (
        printed.out,
        printed.err.count("measuring a few steps of ViT-mu/16 on cpu; --no-measure leaves that out"),
    ) == (
        "",
        1,
    )
    plan(**given, quiet=True)
    plan(**given, measure=False)
    assert capsys.readouterr() == ("", "")


def planned_with(gb: float, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunPlan:
    monkeypatch.setattr("vitlab.runs.training.planning.free_memory", lambda _device: int(0.9 * gb * 2**30))
    return plan(recipe="paper-vit-h14-jft", device="cpu", gpus=8, measure=False, overrides=overrides)


def test_given_micro_batch_is_kept_and_one_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large, none = (
        planned_with(gb, monkeypatch, *overrides)
        for gb, overrides in ((80, ["train.micro_batch=32"]), (80, ["train.micro_batch=256"]), (10, []))
    )
    assert small.micro_batch == 32 and not any("fit" in note for note in small.notes)
    assert any("train.micro_batch 256 does not fit: 128 does" in note for note in large.notes)
    assert none.micro_batch == 0 and any("one image does not fit" in note for note in none.notes)


def test_recomputing_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planned_with(80, monkeypatch)
    recomputed = planned_with(80, monkeypatch, "train.recompute=true")
    assert recomputed.micro_batch > plain.micro_batch
