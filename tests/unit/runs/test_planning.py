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
    memory = MemoryEstimate(weights=4, gradients=4, optimizer=8, ema=0, per_image=10, fixed=1, update=3)
    assert memory.peak(0, accumulates=False) == 4 + 8 + 4 + 3
    assert memory.peak(2, accumulates=False) == 4 + 8 + 1 + 20
    assert memory.peak(2, accumulates=True) == 4 + 8 + 1 + 20 + 4
    memory = dataclasses.replace(memory, last_per_image=9, traffic=5)
    assert memory.peak(2, accumulates=False) == 4 + 8 + 5 + 1 + 18 + 4


def test_hours_on_paper_are_flops_over_speed() -> None:
    found = on_paper(chips=4, chip_tflops=100, utilisation=0.5, price_per_hour=2.0)
    assert found.paper_hours == pytest.approx(found.exaflops * 1e18 / (4 * 100e12 * 0.5) / 3600)
    assert found.paper_cost == pytest.approx(4 * 2.0 * found.paper_hours)
    assert on_paper(chips=4, chip_tflops=100, utilisation=0.5).paper_cost is None


def test_machine_on_paper_is_not_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = on_paper(measure=True, chips=4, chip_tflops=100, utilisation=0.5)
    assert (found.measured_images_per_second, found.hours, capsys.readouterr().err) == (None, None, "")


def described(found: RunPlan, label: str) -> list[str]:
    return [text for name, text in found.lines() if name == label]


HUGE: dict[str, Any] = {"chip_tflops": 989, "utilisation": 0.4}


def test_nothing_of_this_machine_is_told_of_a_machine_on_paper() -> None:
    found = plan("paper-vit-h14-jft", device="cuda:9", chips=512, **HUGE)
    assert (found.device, found.device_memory_gb, found.micro_batch, found.images_each) == ("chip", None, None, 8)
    assert not described(found, "micro-batch") and not found.notes
    assert described(found, "share") == ["8 images of a step for each of 512 processes"]
    (memory,) = described(found, "memory")
    assert memory.startswith("estimated for 8 images at once, in GB: ")


def test_network_is_left_out_and_said_to_be_where_it_is_not_described() -> None:
    found = plan("paper-vit-h14-jft", chips=512, **HUGE)
    assert (found.paper_network_s, found.paper_hours) == (None, pytest.approx(5.84, abs=0.01))
    (update,) = described(found, "update")
    assert "5.24 GB to send, left out of the hours without --chip-gbps" in update


@pytest.mark.parametrize(("chips", "hours", "slower"), [(32, 93.4, "computing"), (512, 30.1, "the network")])
def test_the_slower_of_computing_and_sending_decides(chips: int, hours: float, slower: str) -> None:
    found = plan("paper-vit-h14-jft", chips=chips, chip_gbps=50, **HUGE)
    assert found.paper_compute_s is not None and found.paper_network_s is not None
    assert found.paper_network_s == pytest.approx(8 * found.params * (chips - 1) / chips / 50e9)
    assert found.paper_hours == pytest.approx(hours, abs=0.1)
    assert found.paper_hours == pytest.approx(found.steps * max(found.paper_compute_s, found.paper_network_s) / 3600)
    (update,) = described(found, "update")
    assert update.endswith(f": {slower} decides")


def test_chips_with_stated_memory_cut_their_share_up() -> None:
    settings: dict[str, Any] = {"chips": 8, "chip_gb": 80, "chip_gbps": 450, **HUGE}
    found = plan("paper-vit-h14-jft", **settings)
    assert (found.images_each, found.micro_batch, found.device_memory_gb) == (512, 128, 80)
    assert 40 < found.memory_gb["peak"] < 72, "a tenth is left free"
    assert found.notes == ("the 512 images of a process do not fit at once: micro-batches of 128 do",)
    (fits,) = described(found, "micro-batch")
    assert fits == "128 images fit into 80.0 GB of a chip, bf16"
    sharded = plan("paper-vit-h14-jft", overrides=["train.sharded=true"], **settings)
    assert sharded.paper_sent_gb is not None and found.paper_sent_gb is not None
    assert sharded.paper_sent_gb > 4 * found.paper_sent_gb, "each of four parts gathers and sends for itself"
    assert "set train.micro_batch=128" in sharded.notes[0]
    assert sharded.memory_gb["weights"] == pytest.approx(found.memory_gb["weights"] / 8, rel=0.01)


def test_recomputing_takes_less_memory_and_a_third_more_time() -> None:
    settings: dict[str, Any] = {"chips": 8, "chip_gb": 80, **HUGE}
    plain = plan("paper-vit-h14-jft", **settings)
    again = plan("paper-vit-h14-jft", overrides=["train.recompute=true"], **settings)
    assert plain.micro_batch == 128 and again.micro_batch == 512
    assert plain.paper_hours is not None
    assert again.paper_hours == pytest.approx(4 / 3 * plain.paper_hours)
    assert again.exaflops == plain.exaflops


def test_asked_micro_batch_is_kept_and_one_that_does_not_fit_is_told() -> None:
    settings: dict[str, Any] = {"chips": 8, "chip_gb": 80, **HUGE}
    small = plan("paper-vit-h14-jft", overrides=["train.micro_batch=32"], **settings)
    assert (small.micro_batch, small.notes) == (32, ())
    large = plan("paper-vit-h14-jft", overrides=["train.micro_batch=256"], **settings)
    assert large.notes == ("train.micro_batch 256 does not fit: 128 does",)
    tiny = plan("paper-vit-h14-jft", **{**settings, "chip_gb": 10})
    assert (tiny.micro_batch, tiny.notes) == (0, ("one image does not fit into that memory",))


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
    found = plan("laptop-digits", device="cpu", threads=1, gpus=2, price_per_hour=3.0)
    speed = found.measured_images_per_second
    assert speed is not None and found.hours is not None and found.measured_batch is not None
    assert 1 < speed < 1e6
    assert found.measured_batch <= found.micro_batch == found.images_each == found.batch_size // 2
    assert found.hours == pytest.approx(found.images_seen / speed / 2 / 3600)
    assert found.cost == pytest.approx(found.hours * 2 * 3.0)
    assert {label for label, _ in found.lines()} == {
        "model",
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
        ({"chips": 4}, "--chip-tflops"),
        ({"price_per_hour": 2.0}, "a cost needs hours"),
        ({"model": None, "recipe": "laptop-digits"}, "a recipe has its own steps"),
        ({"model": None, "recipe": "laptop-digits", "steps": None, "batch_size": 8}, "has its own batch_size"),
        ({"chips": 4, "chip_tflops": 1.0, "utilisation": 2.0}, "at most 1"),
        ({"chips": 4, "chip_tflops": 1.0, "utilisation": 0.5, "gpus": 2}, "leave one of them out"),
        ({"chip_gb": 80.0}, "--chip-tflops"),
        ({"chips": 4, "chip_tflops": 1.0, "utilisation": 0.5, "chip_gb": 0.0}, "all positive"),
        ({"chips": 4, "chip_tflops": 1.0, "utilisation": 0.5, "chip_gbps": -1.0}, "all positive"),
        ({"chips": 3, "chip_tflops": 1.0, "utilisation": 0.5}, "256 cannot be shared evenly by 3 processes"),
        ({"gpus": 3}, "256 cannot be shared evenly by 3 processes"),
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
    ("chips", "said"), [(1, "hours on the chips"), (16, "minutes on the chips"), (256, "seconds on the chips")]
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
