"""Damage to the files of a run is noticed: those that decide who is tested are refused or rebuilt, changed curves reported."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.runtime import Runtime, generator
from vitlab.data.sources.opening import open_data
from vitlab.runs.evaluation.parts import as_in_the_run
from vitlab.runs.training.training_run import train
from vitlab.training.recipe import Recipe

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]
UNTRUSTED = "warning: metrics.jsonl was edited; curves before this step are unreliable"


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def photos(folder: Path) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=generator(number, ord(name)))
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    return folder


SET = ["train.steps=2", "train.batch_size=4", "data.image_size=8", "data.workers=0", "train.method=steps"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("ended")
    data = photos(place / "photos")
    train(data, out=place / "run", model="ViT-w8d1m8h2/4", overrides=SET, threads=1, quiet=True)
    return place / "run", data


@pytest.fixture
def restored(ended: tuple[Path, Path]) -> Any:
    """Puts the files of the run back afterwards."""
    before = {path: path.read_bytes() for path in ended[0].iterdir() if path.is_file()}
    yield
    for path, data in before.items():
        path.write_bytes(data)


def test_whole_run_is_tested_on_the_images_it_held_out(ended: tuple[Path, Path]) -> None:
    run, data = ended
    found = as_in_the_run(run, data, open_data(data)).parts
    assert {part: len(images) for part, images in found.items()} == {"train": 14, "val": 2, "test": 4}


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("split.csv", ",test\n", ",tesu\n"),  # one image less to test on
        ("split.csv", "a/1.png", "a/0.png"),  # names that the data has not: everything would be tested on
        ("split.csv", "\n", "\r"),
        ("config.toml", "photos", "phouos"),  # not the run's data any more: everything would be tested on
        ("config.toml", 'method = "steps"', 'method = "probe"'),  # the validation part would count as learnt
    ],
)
def test_changed_file_that_decides_who_is_tested_is_refused(
    ended: tuple[Path, Path], name: str, old: str, new: str
) -> None:
    run, data = ended
    change(run / name, old, new)
    with pytest.raises(UsageError, match=rf"{name} was changed"):
        as_in_the_run(run, data, open_data(data))


@pytest.mark.usefixtures("restored")
def test_lost_split_does_not_turn_everything_into_a_test(ended: tuple[Path, Path]) -> None:
    run, data = ended
    (run / "split.csv").unlink()
    with pytest.raises(FileProblem, match=r"split\.csv.*No such file"):
        as_in_the_run(run, data, open_data(data))


@pytest.mark.usefixtures("restored")
def test_resumed_run_writes_a_changed_split_anew(ended: tuple[Path, Path]) -> None:
    run, data = ended
    before = (run / "split.csv").read_bytes()
    change(run / "split.csv", ",test\n", ",tesu\n")
    train(resume=run, threads=1, quiet=True)
    assert (run / "split.csv").read_bytes() == before
    assert "split.csv was changed after the run started" in (run / "log.txt").read_text()
    assert len(as_in_the_run(run, data, open_data(data)).parts["test"]) == 4


# --- the curve --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight_steps_once(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, run: Call) -> Path:
    return run(tiny(), tmp_path_factory.mktemp("eight") / "run").folder


@pytest.fixture
def eight_steps(eight_steps_once: Path, tmp_path: Path) -> Path:
    """The run in a folder that a test may damage."""
    return shutil.copytree(eight_steps_once, tmp_path / "run")


def resumed(folder: Path, tiny: Tiny, run: Call) -> tuple[list[int], bool]:
    """The steps that have a record, and whether damage was reported, on the console and in the log."""
    console = Console(quiet=True)
    steps = [record.step for record in run(tiny(), folder, resume=True, console=console).records]
    assert (UNTRUSTED in console.lines) == (UNTRUSTED in (folder / "log.txt").read_text())
    return steps, UNTRUSTED in console.lines


def test_whole_curve_is_resumed_without_a_word(eight_steps: Path, tiny: Tiny, run: Call) -> None:
    assert resumed(eight_steps, tiny, run) == ([*range(1, 9)], False)


@pytest.mark.parametrize("name", slow_after(1, ["loss", "lr", "grad_norm"]))
def test_changed_number_of_the_curve_is_reported(eight_steps: Path, tiny: Tiny, run: Call, name: str) -> None:
    metrics = eight_steps / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[3][name] *= 1.0000001
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert resumed(eight_steps, tiny, run) == ([*range(1, 9)], True)


GOOD = {"step": 4, "loss": 1, "lr": 1, "grad_norm": 1, "images_per_second": 1, "data_wait_frac": 0, "memory_gb": 0}
BROKEN = {
    "no JSON": "{",
    "no table": "[3]",
    "a number": "7",
    "nested": "[" * 100_000,
    "a key too many": json.dumps({**GOOD, "x": 1}),
    "step as text": json.dumps({**GOOD, "step": "4"}),
    "step beyond floats": json.dumps({**GOOD, "step": 10**400}),
    "no speed": json.dumps({**GOOD, "images_per_second": 0}),
    "no number": json.dumps({**GOOD, "loss": float("nan")}),
    "many digits": '{"step": 4, "loss": 1' + "0" * 5000 + "}",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_line_is_left_out_and_reported(eight_steps: Path, tiny: Tiny, run: Call, kind: str) -> None:
    metrics = eight_steps / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:3], BROKEN[kind], *lines[4:]]) + "\n")
    assert resumed(eight_steps, tiny, run) == ([1, 2, 3, 5, 6, 7, 8], True)


def test_bytes_that_are_not_text_do_not_stop_a_resume(eight_steps: Path, tiny: Tiny, run: Call) -> None:
    data = bytearray((eight_steps / "metrics.jsonl").read_bytes())
    data[5] = 0xFF
    (eight_steps / "metrics.jsonl").write_bytes(data)
    assert resumed(eight_steps, tiny, run) == ([*range(2, 9)], True)


def test_log_is_never_read_back(ended: tuple[Path, Path]) -> None:
    run, _ = ended
    with (run / "log.txt").open("ab") as log:
        log.write(b"warning: the moon is made of cheese\nChosen: cheese.\n\xff\n")
    result = train(resume=run, threads=1, quiet=True)
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "log.txt"]
    assert "cheese" not in json.dumps(dataclasses.asdict(result), default=str)
    assert not [path.name for path in files if b"cheese" in path.read_bytes()]


# --- tables of several runs, and what the machine was -----------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"data": [1]}', '{"data": 3}', "[]", "{}", "\x00", "[" * 100_000, '{"data": "x"}'])
def test_run_file_that_is_damaged_is_one_error(eight_steps: Path, tiny: Tiny, run: Call, text: str) -> None:
    (eight_steps / "run.json").write_text(text)
    with pytest.raises((FileProblem, UsageError), match=r"run\.json"):
        run(tiny(), eight_steps, resume=True)
