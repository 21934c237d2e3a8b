"""The adapter of a LoRA run: applied to the weights it was trained on, it is the run's bundle; to others, it is refused."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitlab
from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.data.parts import Parts
from vitlab.models.build import build
from vitlab.runs.training.finish import RunResult
from vitlab.training.recipe import Recipe
from vitlab.weights.adapter import ABOUT, TENSORS, read_adapter
from vitlab.weights.bundle import save_bundle

Call = Callable[..., Any]
LORA = ("optim.train=lora", "optim.lr=0.1", "lora.rank=2", 'lora.parts=["q","v","fc1"]', "train.ema=0.9")
PICTURES = [Image.effect_noise((16, 16), 80) for _ in range(3)]


def load(path: Path, **more: Any) -> Any:
    return vitlab.load(path, device="cpu", quiet=True, **more)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Recipe], run: Call) -> Path:
    """Weights to start from, with a head of other classes and, at 8 pixels, learned positions."""
    return run(tiny(), tmp_path_factory.mktemp("adapter") / "start").folder


@pytest.fixture(scope="module")
def tuned_once(start: Path, tiny: Callable[..., Recipe], run: Call) -> RunResult:
    """Fine-tuned at twice the pixels, so that the positions are not those of the start either."""
    return run(tiny(f"init={start}", "data.image_size=[16,16]", *LORA), start.with_name("tuned"))


@pytest.fixture
def tuned(tuned_once: RunResult, tmp_path: Path) -> RunResult:
    """The run in a folder that a test may damage."""
    return dataclasses.replace(tuned_once, folder=shutil.copytree(tuned_once.folder, tmp_path / "tuned"))


def test_start_and_adapter_are_the_bundle_of_the_run_bit_by_bit(start: Path, tuned: RunResult, tmp_path: Path) -> None:
    whole = load(tuned.folder)
    for given in (tuned.folder, tuned.folder / "adapter"):
        made = load(start, adapter=given)
        assert (made.labels, made.preprocess, made.model.spec) == (whole.labels, whole.preprocess, whole.model.spec)
        assert all(map(torch.equal, made.model.state_dict().values(), whole.model.state_dict().values()))
        assert torch.equal(made.logits(PICTURES), whole.logits(PICTURES))
    assert not torch.equal(load(start).logits(PICTURES), whole.logits(PICTURES)), "without it, the start is what it was"
    made.save(tmp_path / "merged")
    files = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "merged", tuned.folder / "bundle")]
    assert files[0] == files[1]


def test_adapter_holds_what_was_trained_and_names_its_base(start: Path, tuned: RunResult) -> None:
    found = read_adapter(tuned.folder)
    assert sum("lora_a" in name for name in found.tensors) == 2 * 3, "blocks times parts"
    assert {name for name in found.tensors if "lora" not in name} == {"head.weight", "head.bias"}
    assert (found.base, found.rule.rank, found.labels) == (str(start), 2, ("a", "b", "c", "d"))
    assert fsio.verify_folder(tuned.folder / "adapter") == [ABOUT, TENSORS]


def test_half_precision_of_the_same_weights_is_distinguished(start: Path, tuned: RunResult, tmp_path: Path) -> None:
    narrow = load(start).bundle
    narrow.model.half()
    save_bundle(tmp_path / "narrow", narrow)
    with pytest.raises(UsageError, match="other weights"):
        load(tmp_path / "narrow", adapter=tuned.folder)


def test_other_weights_are_refused_in_one_sentence(start: Path, tuned: RunResult, tmp_path: Path) -> None:
    for name, seed in (("other", 1), ("same", 0)):
        other = load(start).bundle
        if seed:
            other.model.load_state_dict(build(other.model.spec, seed=seed).state_dict())
        save_bundle(tmp_path / name, other)
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "other", adapter=tuned.folder)
    reported = f"the adapter was trained on other weights than those of {tmp_path / 'other'}: on {start}"
    assert str(caught.value) == reported
    with pytest.raises(UsageError, match="other weights"):
        load(tuned.folder, adapter=tuned.folder)  # twice
    load(tmp_path / "same", adapter=tuned.folder)  # the numbers count, not the place


@pytest.mark.parametrize("name", [ABOUT, TENSORS, fsio.MANIFEST])
def test_damaged_adapter_is_refused(start: Path, tuned: RunResult, name: str) -> None:
    file = tuned.folder / "adapter" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(FileProblem, match=str(tuned.folder / "adapter")):
        load(start, adapter=tuned.folder)


def changed(adapter: Path, **more: Any) -> None:
    """As somebody would who knows about the manifest."""
    about = json.loads((adapter / ABOUT).read_text())
    shutil.move(adapter, adapter.with_name("old"))
    with fsio.new_folder(adapter) as new:
        new.write_json(ABOUT, {**about, **more})
        new.write(TENSORS, (adapter.with_name("old") / TENSORS).read_bytes())


@pytest.mark.parametrize(
    ("more", "printed"),
    [
        ({"format_version": 2}, "format 2"),
        ({"rule": {"rank": 10**9}}, "rank 1000000000"),
        ({"rule": {"rank": 0}}, r"lora\.rank"),
        ({"rule": 3}, "not describe an adapter"),
        ({"labels": ["a"]}, "1 labels for 4"),
        ({"base": None}, "not describe an adapter"),
        ({"spec": {}}, "not describe an adapter"),
        ({"thresholds": [0.0]}, "1 thresholds for 4"),
        ({"thresholds": ["x"] * 4}, "list of numbers"),
    ],
)
def test_adapter_that_contradicts_itself_is_refused(
    start: Path, tuned: RunResult, more: dict[str, Any], printed: str
) -> None:
    changed(tuned.folder / "adapter", **more)
    with pytest.raises(FileProblem, match=printed):
        load(start, adapter=tuned.folder)


def test_model_for_larger_images_than_it_prepares_is_refused(start: Path, tuned: RunResult) -> None:
    adapter = tuned.folder / "adapter"
    spec = json.loads((adapter / ABOUT).read_text())["spec"]
    changed(adapter, spec={**spec, "image_size": [60_000, 60_000]})
    with pytest.raises(FileProblem, match=r"60000, 60000.*16, 16"):
        load(start, adapter=adapter)


def test_other_parts_than_the_rule_names_are_refused(start: Path, tuned: RunResult) -> None:
    changed(tuned.folder / "adapter", rule={"rank": 2, "alpha": 8.0, "parts": ["q"]})
    with pytest.raises(UsageError, match="not fit"):
        load(start, adapter=tuned.folder)


def test_adapter_alone_says_what_it_needs(start: Path, tuned: RunResult, tmp_path: Path) -> None:
    adapter = tuned.folder / "adapter"
    with pytest.raises(FileProblem) as caught:
        load(adapter)
    assert str(start) in caught.value.what and str(adapter) in str(caught.value.hint)
    with pytest.raises(FileProblem, match=r"adapter\.json"):
        load(start, adapter=start)
    with pytest.raises(UsageError, match="preprocess"):
        load(start, adapter=adapter, preprocess="imagenet")


@pytest.mark.slow
def test_labels_of_an_adapter_are_answered_as_those_of_the_bundle_where_images_have_several(
    start: Path, tmp_path: Path, tiny: Callable[..., Recipe], run: Call, parts: Callable[..., Parts]
) -> None:
    plain = parts()
    labels = dataclasses.replace(plain.train.labels, multi=True)  # each has one, and might have more
    data = Parts(dataclasses.replace(plain.train, labels=labels), None, None, ())
    folder = run(tiny(f"init={start}", "objective.kind=sigmoid", *LORA), tmp_path / "several", data).folder
    whole, made = load(folder), load(start, adapter=folder)
    assert whole(PICTURES[0])[0].has is not None and made(PICTURES) == whole(PICTURES)


@pytest.mark.slow
def test_only_runs_that_others_can_build_upon_leave_one(
    tmp_path: Path, tiny: Callable[..., Recipe], run: Call, start: Path
) -> None:
    assert not (run(tiny(*LORA), tmp_path / "scratch").folder / "adapter").exists()
    assert not (run(tiny(f"init={start}"), tmp_path / "full").folder / "adapter").exists()


@pytest.mark.slow
def test_start_that_has_changed_meanwhile_costs_the_adapter_and_no_more(
    tmp_path: Path, tiny: Callable[..., Recipe], run: Call, start: Path
) -> None:
    start = shutil.copytree(start, tmp_path / "start")
    other, console = run(tiny("seed=5"), tmp_path / "other").folder, Console(quiet=True)

    def exchange(operation: fsio.Operation, path: Path) -> None:
        if (operation, path.name) == ("rename", "bundle"):
            shutil.rmtree(start)
            shutil.copytree(other, start)

    with fsio.intercept(exchange):
        result = run(tiny(f"init={start}", *LORA), tmp_path / "run", console=console)
    assert f"no adapter was written: {start} was changed after the run started" in console.lines
    assert (result.folder / "bundle").exists() and not (result.folder / "adapter").exists()


@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 16])
def test_half_precision_start_gives_an_adapter(
    start: Path, tmp_path: Path, tiny: Callable[..., Recipe], run: Call, side: int
) -> None:
    """Small negative weights are -0.0 in float16; a moving average that touched frozen weights would make them 0.0."""
    narrow = load(start).bundle
    with torch.no_grad():
        narrow.model.blocks[0].norm1.bias.fill_(-1e-9)
    narrow.model.half()
    save_bundle(tmp_path / "narrow", narrow)
    early = "train.ema_warmup=false"  # the average of a short run moves as that of a long one
    recipe = tiny(f"init={tmp_path / 'narrow'}", f"data.image_size=[{side},{side}]", *LORA, early)
    folder = run(recipe, tmp_path / "run").folder
    made, whole = load(tmp_path / "narrow", adapter=folder).model.state_dict(), load(folder).model.state_dict()
    assert all(torch.equal(made[name].view(torch.int32), whole[name].view(torch.int32)) for name in whole)
    assert bool(torch.signbit(whole["blocks.0.norm1.bias"]).all()), "the sign of zero too"
