"""A plan's exact numbers are exact, its estimates are near what is counted or run, and its hours follow from them."""

from typing import Any

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.models.facts import model_info
from vitlab.runs.recipe_book import show_recipe
from vitlab.runs.training.memory import MemoryEstimate, estimate_memory
from vitlab.runs.training.planning import RunPlan, plan

GB = 2**30


def on_paper(**settings: Any) -> RunPlan:
    return plan(**{"model": "ViT-B/16", "steps": 10, "device": "cpu", "measure": False, **settings})


# --- counted ----------------------------------------------------------------------------------------------------------


def test_exact_numbers_of_a_model() -> None:
    found = on_paper(batch_size=64)
    assert (found.params, found.images_seen, found.steps) == (86_567_656, 640, 10)
    assert found.exaflops == pytest.approx(6 * found.macs * 640 / 1e18)


def test_exact_numbers_of_a_recipe() -> None:
    found = plan("paper-vit-h14-jft", device="cpu", measure=False)
    assert found.exaflops == pytest.approx(4262, rel=2e-3), "Table 6"
    assert found.steps == show_recipe("paper-vit-h14-jft").steps
    assert (found.hours, found.measured_images_per_second) == (None, None)


def test_override_counts() -> None:
    assert plan("laptop-digits", overrides=["train.steps=7"], device="cpu", measure=False).steps == 7


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
    memory = MemoryEstimate(weights=4, gradients=4, optimizer=8, average=0, per_image=10, fixed=1, update=3)
    assert memory.peak(0, accumulates=False) == 4 + 8 + 4 + 3
    assert memory.peak(2, accumulates=False) == 4 + 8 + 1 + 20
    assert memory.peak(2, accumulates=True) == 4 + 8 + 1 + 20 + 4


def test_hours_on_paper_are_flops_over_speed() -> None:
    found = on_paper(chips=4, chip_tflops=100, utilisation=0.5, price_per_hour=2.0)
    assert found.paper_hours == pytest.approx(found.exaflops * 1e18 / (4 * 100e12 * 0.5) / 3600)
    assert found.paper_cost == pytest.approx(4 * 2.0 * found.paper_hours)
    assert on_paper(chips=4, chip_tflops=100, utilisation=0.5).paper_cost is None


def test_machine_on_paper_is_not_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = on_paper(measure=True, chips=4, chip_tflops=100, utilisation=0.5)
    assert (found.measured_images_per_second, found.hours, capsys.readouterr().err) == (None, None, "")


# --- measured ---------------------------------------------------------------------------------------------------------


def test_measured_steps_give_hours_and_cost() -> None:
    found = plan("laptop-digits", device="cpu", threads=1, gpus=2, price_per_hour=3.0)
    speed = found.measured_images_per_second
    assert speed is not None and found.hours is not None and found.measured_batch is not None
    assert 1 < speed < 1e6
    assert found.measured_batch <= found.micro_batch == found.batch_size
    assert found.hours == pytest.approx(found.images_seen / speed / 2 / 3600)
    assert found.cost == pytest.approx(found.hours * 2 * 3.0)
    assert {label for label, _ in found.lines()} == {
        "model",
        "length",
        "compute",
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
        ({"chips": 4}, "--chip-tflops"),
        ({"price_per_hour": 2.0}, "a cost needs hours"),
        ({"model": None, "recipe": "laptop-digits"}, "a recipe has its own steps"),
        ({"model": None, "recipe": "laptop-digits", "steps": None, "batch_size": 8}, "has its own batch_size"),
        ({"chips": 4, "chip_tflops": 1.0, "utilisation": 2.0}, "at most 1"),
        ({"chips": 4, "chip_tflops": 1.0, "utilisation": 0.5, "gpus": 2}, "leave one of them out"),
        ({"steps": None, "epochs": 1}, "how many images"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"images": 0, "steps": None, "epochs": 1}, "--images must be at least 1"),
    ],
    ids=str,
)
def test_bad_call_is_refused_before_any_work(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        on_paper(**settings)


@pytest.mark.parametrize(
    ("chips", "said"), [(1, "hours on the chips"), (20, "minutes on the chips"), (1000, "seconds on the chips")]
)
def test_time_is_told_in_the_unit_that_people_would_say_it_in(chips: int, said: str) -> None:
    found = on_paper(model="ViT-B/16", steps=1000, chips=chips, chip_tflops=10.0, utilisation=0.5, measure=True)
    (told,) = (text for label, text in found.lines() if label == "on paper")
    number, rest = told.removeprefix("estimated: ").split(" ", 1)
    assert rest.startswith(said) and 1 <= float(number) < 100, told


def test_macs_are_those_of_the_model() -> None:
    assert on_paper(image_size=(64, 32)).macs == model_info("ViT-B/16", image_size=(64, 32)).macs


def test_measuring_is_said_beforehand_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"model": "ViT-mu/16", "image_size": 32, "steps": 2, "device": "cpu"}
    plan(**given)
    said = capsys.readouterr()
    assert (said.out, said.err.count("measuring a few steps of ViT-mu/16 on cpu; --no-measure leaves that out")) == (
        "",
        1,
    )
    plan(**given, quiet=True)
    plan(**given, measure=False)
    assert capsys.readouterr() == ("", "")
