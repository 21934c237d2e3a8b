"""The faults of training, T1 to T14 of the catalogue: what must hold when it goes wrong, one named test or more for each."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_command import Command
from forked_runs import CLASSES, TABLE, Crash, left, noise
from forked_work import in_child
from PIL import Image
from reliability_runs import do_work
from run_jobs import run_recipe
from slow_cases import slow_after

import vitlab
from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.core.runtime import generator, prepare, restored_torch_globals
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.loader import BadImages, TrainInputs, train_batches
from vitlab.data.parts import Parts
from vitlab.data.preprocess import Preprocess
from vitlab.training import checkpoint
from vitlab.training.loop import NonFinite
from vitlab.training.recipe import recipe_from_dict, with_changes
from vitlab.weights.containers import find_nonfinite

HERE = Path(__file__).parent
SOAK = os.environ.get("VITLAB_SOAK") == "1"
VITLAB = str(Path(sys.executable).with_name("vitlab"))
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _as_it_was() -> Generator[None]:
    with restored_torch_globals():
        yield


def work(folder: Path, *overrides: str, resume: bool = False, threads: int = 1) -> list[str]:
    """A run of six steps on noise, in this process; what it said."""
    console = Console(quiet=True)
    runtime = prepare("cpu", seed=0, threads=threads)
    run_recipe(
        recipe_from_dict(with_changes(TABLE, overrides), len(CLASSES)),
        Parts(noise("train", 24, 0), None, noise("test", 10, 1), ()),
        folder,
        runtime=runtime,
        world=World(0, 1, runtime.device),
        console=console,
        command="a test",
        resume=resume,
    )
    return console.lines


def crashed(folder: Path, after: int, *overrides: str) -> Path:
    """The folder of a run that came to a bad end after that many steps."""
    seen = 0

    def listener(_operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and seen == after + 1:
            raise Crash

    with pytest.raises(Crash), fsio.intercept(listener):
        work(folder, *overrides)
    return folder


def printed(kind: str, place: Path, how_many: int = 0) -> Any:
    return in_child(lambda: do_work(kind, place / kind, how_many), place)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[Path]:
    return checkpoint.list_checkpoints(folder / "checkpoints")


# --- numbers that are none --------------------------------------------------------------------------------------------


def test_T01_non_finite_loss_changes_no_weight_and_every_checkpoint_stays_finite(tmp_path: Path) -> None:
    """A rate this high gives a non-finite loss after a few steps; each step before is saved."""
    with pytest.raises(NonFinite, match=r"non-finite loss or gradient at step \d+") as caught:
        work(
            tmp_path / "run",
            "optim.lr=1e19",
            "optim.name=sgd",
            "train.save_every=10%",
            "train.keep=9",
            "train.steps=10",
        )
    bad = caught.value.step
    assert bad > 1, "the premise of this test"
    assert [path.name for path in checkpoints(tmp_path / "run")] == [f"step-{step:09d}" for step in range(1, bad)]
    for path in checkpoints(tmp_path / "run"):
        found = checkpoint.restore(path)
        assert [find_nonfinite(part) for part in (found.model, found.optimizer, found.ema or {})] == [[], [], []]
    assert not (tmp_path / "run" / "bundle").exists()


def test_T01_first_bad_batch_is_kept_for_inspection(tmp_path: Path) -> None:
    with pytest.raises(NonFinite) as caught:
        work(tmp_path / "run", "optim.lr=1e19", "optim.name=sgd")
    noted = json.loads((tmp_path / "run" / "bad_batch.json").read_text())
    assert noted["step"] == caught.value.step == len(losses(tmp_path / "run")) + 1
    assert len(noted["images"]) == 8 and set(noted["images"]) <= {f"train/{i}" for i in range(24)}


def test_T02_bad_number_in_one_process_stops_all_at_the_same_step_and_leaves_their_weights(
    tmp_path: Path,
) -> None:
    for kind, found in printed("poison", tmp_path).items():
        assert found["codes"] == [1, 1], kind
        first, second = found["ranks"]
        assert first == second, kind
        assert first["step"] == 3 and first["untouched"], kind
        assert sorted(first["ids"]) == list(range(8)), "the images of both are named"


def test_T03_loss_that_jumps_is_reported_and_going_back_gives_the_bits_of_a_fresh_resume(tmp_path: Path) -> None:
    often = ("train.save_every=10%", "train.keep=10", "train.steps=10", "optim.lr=1e4", "optim.name=sgd")
    lines = work(tmp_path / "run", *often)
    curve = losses(tmp_path / "run")
    assert max(curve) > 100 * curve[0], "the premise of this test"
    (reported,) = (line for line in lines if "the loss jumped from" in line)
    step = int(re.search(r"at step (\d+)", reported)[1])  # pyright: ignore[reportOptionalSubscript]
    assert curve[step - 1] > 100 * curve[step - 2]
    assert reported in (tmp_path / "run" / "log.txt").read_text()
    whole = left(tmp_path / "run")
    # Back to before the jump: what comes after is taken away, and the run resumed.
    checkpoint.remove_after(tmp_path / "run" / "checkpoints", step - 1)
    fsio.remove_folder(tmp_path / "run" / "bundle")
    assert f"resuming at step {step - 1} of 10" in work(tmp_path / "run", *often, resume=True)
    assert left(tmp_path / "run") == whole


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two classes."""
    root = tmp_path_factory.mktemp("photos") / "data"
    draw = generator(0)
    for name in ("ants", "bees"):
        (root / name).mkdir(parents=True)
        for i in range(10):
            pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=draw).numpy()
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


SMALL = ("--model", "ViT-w16d2m32h2/4", "--device", "cpu", "--threads", "1")
SETTINGS = ("data.image_size=[16,16]", "train.batch_size=4", "data.workers=0")


def command(data: Path | str, out: Path, *settings: str) -> list[str]:
    pairs = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    return [VITLAB, "train", str(data), "--out", str(out), *SMALL, *pairs]


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    metrics, until = folder / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None and time.monotonic() < until, "it never came so far"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code", "times"), slow_after(1, [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 2)])
)
def test_T04_signal_saves_and_leaves_within_ten_seconds_and_a_second_one_at_once(
    tmp_path: Path, photos: Path, number: int, code: int, times: int
) -> None:
    long = ("train.steps=5000", "train.save_every=100%", "train.method=steps")
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(photos, folder, *long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        wait_for_steps(process, folder, 5)
        sent = time.monotonic()
        for _ in range(times):
            process.send_signal(number)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - sent < 10
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err
    steps = [checkpoint.restore(path).step for path in checkpoints(folder)]
    if times == 1:
        assert steps == [len(losses(folder))], "nothing that was computed is lost"
        assert err.splitlines()[-1].endswith(f"Resume with:  vitlab train --resume {folder}")
    else:  # it may leave before it has saved, but then without anything half done
        assert len(steps) <= 1
    assert list(folder.rglob("*.tmp")) == []


def test_T05_sigkill_at_any_step_costs_no_bit(tmp_path: Path) -> None:
    how_many = 6 if SOAK else 3
    found = printed("steps", tmp_path, how_many)
    assert (found["whole"], len(found["kills"])) == (0, how_many)
    for step, end in found["kills"].items():
        assert (end["died"], end["resumed"], end["left"]) == (-9, 0, found["left"]), step


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return printed("lost", tmp_path_factory.mktemp("lost"))


@pytest.mark.parametrize("phase", ["forward", "backward", "save", "barrier"])
def test_T06_process_that_dies_ends_the_others_within_a_minute(lost: dict[str, Any], phase: str) -> None:
    end, dead = lost[phase], 0 if phase == "save" else 1
    assert (end["codes"][dead], end["codes"][1 - dead]) == (-9, 1)
    assert end["seconds"] < 60
    assert end["printed"].startswith("another process of the run is gone")
    assert "--resume" in end["printed"]


def test_T06_what_is_left_resumes(lost: dict[str, Any]) -> None:
    assert lost["resumed"] == 0


def test_T07_process_that_hangs_ends_the_one_that_waits_for_it(tmp_path: Path) -> None:
    found = printed("hung", tmp_path)
    assert (found["code"], found["died"]) == (1, -9), "and the launcher ends the one that hangs"
    assert found["seconds"] < 60
    assert "does not answer" in found["printed"]
    assert "Timed out" in found["printed"]


@pytest.mark.slow
def test_T08_no_memory_left_is_reported_with_the_batch_that_was_tried_and_what_to_do(tmp_path: Path) -> None:
    found = printed("memory", tmp_path)
    assert (found["died"], found["failed"]) == (-9, 1)
    assert "out of memory at step 3, with 256 images at once" in found["printed"]
    assert "--set train.micro_batch=128" in found["printed"]
    assert found["kept"], "no checkpoint was touched"
    assert found["smaller"] == 0, "under the same limit, smaller pieces go on"


# --- resuming under other conditions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_T09_order_of_images_is_the_same_for_any_number_of_processes_and_workers_from_any_step(
    world: int, workers: int
) -> None:
    data, rule = noise("train", 24, 0), Preprocess(mode="L", image_size=(8, 8), mean=(0.5,), std=(0.5,))
    order = Order(24, 8, 0, 2, False, None)

    def seen(rank: int, size: int, first: int, loaders: int) -> list[list[int]]:
        batches = train_batches(
            TrainInputs(data, rule, CropRule(), order, rank=rank, world=size),
            range(first, 6),
            bad=BadImages(0),
            workers=loaders,
            pin=False,
        )
        return [batch.ids.tolist() for batch in batches]

    whole = seen(0, 1, 0, 0)
    assert len(whole) == 6 and len({tuple(step) for step in whole}) == 6
    for first in (0, 4):  # the second in the midst of an epoch
        shares = [seen(rank, world, first, workers) for rank in range(world)]
        together = [[i for share in shares for i in share[step]] for step in range(6 - first)]
        assert together == whole[first:], (first, world, workers)


def test_T09_run_resumes_with_other_workers_and_pieces(tmp_path: Path) -> None:
    plain = ("optim.name=sgd", "optim.lr=0.1")
    work(tmp_path / "whole", *plain)
    folder = crashed(tmp_path / "run", 4, *plain)
    lines = work(folder, *plain, "data.workers=1", "train.micro_batch=2", resume=True)
    assert "train.micro_batch is 2 now and was 0: the last bits may differ" in lines
    assert "data.workers is 1 now and was 0" in lines, "which changes no bit"
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("optim.lr=0.5", "optim.lr: 0.01 in the run, 0.5 now"),
        ("optim.weight_decay=0.3", "optim.weight_decay: 0.0 in the run, 0.3 now"),
        ("train.batch_size=4", "train.batch_size: 8 in the run, 4 now"),
        ("train.steps=7", "train.steps: 6 in the run, 7 now"),
        ("train.ema=0.5", "train.ema: 0.9 in the run, 0.5 now"),
        ("seed=3", "seed: 0 in the run, 3 now"),
        ("model.dropout=0.5", "model.dropout: 0.0 in the run, 0.5 now"),
        ("data.mix.mixup=0.2", "data.mix.mixup: 0.0 in the run, 0.2 now"),
        ("objective.label_smoothing=0.1", "objective.label_smoothing: 0.0 in the run, 0.1 now"),
    ],
)
def test_T10_changed_config_is_refused_with_the_field_and_both_values(stopped: Path, change: str, line: str) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="config differs") as caught:
        work(stopped, change, resume=True)
    assert str(caught.value).splitlines()[1:-1] == [line]
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crashed(tmp_path_factory.mktemp("stopped") / "run", 3)


def test_T10_settings_of_a_resume_are_held_to_it_too(tmp_path: Path, photos: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
    settings = [*SETTINGS, "train.steps=2", "train.method=steps"]
    folder = vitlab.train(photos, out=tmp_path / "run", model="ViT-w16d2m32h2/4", overrides=settings, **given).run
    with pytest.raises(UsageError, match=r"train\.steps: 2 in the run, 3 now"):
        vitlab.train(resume=folder, overrides=["train.steps=3"], **given)
    with pytest.raises(UsageError, match="the run's own recipe"):
        vitlab.train(resume=folder, model="ViT-S/16", **given)


def test_T11_changed_data_is_refused(tmp_path: Path, photos: Path) -> None:
    data = tmp_path / "data"
    for path in sorted(photos.rglob("*.png")):
        (data / path.relative_to(photos)).parent.mkdir(parents=True, exist_ok=True)
        (data / path.relative_to(photos)).write_bytes(path.read_bytes())
    given: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}
    settings = [*SETTINGS, "train.steps=4", "train.method=steps"]

    def stop(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "metrics.jsonl" and path.exists():
            raise Crash

    with pytest.raises(Crash), fsio.intercept(stop):
        vitlab.train(data, out=tmp_path / "run", model="ViT-w16d2m32h2/4", overrides=settings, **given)
    (data / "ants" / "another.png").write_bytes((data / "ants" / "0.png").read_bytes())
    with pytest.raises(UsageError, match=r"training.* images or labels changed"):
        vitlab.train(resume=tmp_path / "run", **given)
    (data / "ants" / "another.png").unlink()
    assert vitlab.train(resume=tmp_path / "run", **given).test["n"] > 0


def test_T12_other_number_of_threads_or_torch_is_reported_and_resumes(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "run", 3)
    path = folder / "run.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "versions": {**table["versions"], "torch": "2.0"}}))
    lines = work(folder, resume=True, threads=2)
    assert "threads is 2 now and was 1: the last bits may differ" in lines
    assert f"torch is {torch.__version__} now and was 2.0: the last bits may differ" in lines
    assert len(losses(folder)) == 6


def test_T13_odd_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(tmp_path / "plain")
    clock, calls = time.time, 0

    def jumping() -> float:
        nonlocal calls
        calls += 1
        return clock() + (-1) ** calls * 10**8 * calls

    monkeypatch.setattr(time, "time", jumping)
    work(tmp_path / "odd")
    assert left(tmp_path / "odd") == left(tmp_path / "plain")


@pytest.mark.slow
def test_T13_odd_zone_and_language_and_a_home_that_cannot_be_written_change_nothing(
    tmp_path: Path, photos: Path, run: Run
) -> None:
    settings = ("train.steps=3", "train.method=steps")
    code, _, err = Command(command(photos, tmp_path / "plain", *settings)[1:], tmp_path).end()
    assert code == 0, err
    odd = {"TZ": "Antarctica/Troll", "LC_ALL": "C", "LANG": "tr_TR", "HOME": "/proc", "PYTHONHASHSEED": "7"}
    run(command(photos, tmp_path / "odd", *settings), cwd=tmp_path, env=odd)
    first, second = (left(tmp_path / name) for name in ("plain", "odd"))
    assert (first["rows"], first["state"]) == (second["rows"], second["state"])
    weights = [fsio.hash_file(tmp_path / name / "bundle" / "model.safetensors") for name in ("plain", "odd")]
    assert weights[0] == weights[1]


def test_T14_log_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    """The file is one that the system lets nobody write to."""
    work(tmp_path / "whole")
    folder = tmp_path / "run"

    def plant(operation: fsio.Operation, path: Path) -> None:
        if operation == "append" and path.name == "metrics.jsonl" and not path.exists():
            path.symlink_to("/dev/full")

    with fsio.intercept(plant):
        lines = work(folder)
    reported = [line for line in lines if "training continues" in line]
    assert len(reported) == 1 and "metrics.jsonl" in reported[0] and "No space left on device" in reported[0]
    assert left(folder) == left(tmp_path / "whole"), "the rows too: they are written again at the end"


def test_T14_notes_that_cannot_be_written_at_the_end_cost_no_weights(tmp_path: Path) -> None:
    work(tmp_path / "whole")

    def refuse(operation: fsio.Operation, path: Path) -> None:
        if (operation, path.name) in {("append", "log.txt"), ("rename", "metrics.csv")}:
            raise OSError(28, os.strerror(28))

    with fsio.intercept(refuse):
        lines = work(tmp_path / "run")
    assert sum("cannot write" in line for line in lines) == 2
    assert left(tmp_path / "run") == left(tmp_path / "whole")


# --- what is found before any work ------------------------------------------------------------------------------------


def test_pairs_that_would_be_torn_apart_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.micro_batch 3 must be an even number"):
        work(tmp_path / "run", "data.mix.mixup=0.4", "train.micro_batch=3")
    assert not (tmp_path / "run").exists()


def test_choice_of_the_best_weights_is_in_the_log(tmp_path: Path) -> None:
    console = Console(quiet=True)
    runtime = prepare("cpu", seed=0, threads=1)
    recipe = recipe_from_dict(with_changes(TABLE, ["train.eval_every=17%", "optim.lr=1e-30"]), len(CLASSES))
    parts = Parts(noise("train", 24, 0), noise("val", 8, 2), None, ())
    given: dict[str, Any] = {"runtime": runtime, "world": World(0, 1, runtime.device), "console": console}
    run_recipe(recipe, parts, tmp_path / "run", **given, command="a test")
    assert (
        "kept: the weights of step 1, the best on the validation images" in (tmp_path / "run" / "log.txt").read_text()
    )


def test_folder_of_a_run_that_never_began_can_be_used(tmp_path: Path) -> None:
    """Whatever the last operation was: there is a run, which can be resumed, or there is nothing in the way."""
    for last in range(20):
        count = 0

        def stop(_operation: fsio.Operation, path: Path, last: int = last) -> None:
            nonlocal count
            if count == last or path.name == "metrics.jsonl":
                raise Crash
            count += 1

        folder = tmp_path / str(last)
        with pytest.raises(Crash), fsio.intercept(stop):
            work(folder, "train.steps=1")
        if folder.exists():
            break
        assert not math.isnan(losses_of(folder)[0])
    assert last > 5, "the premise: several operations come before there is a run"
    assert len(losses_of(folder, resume=True)) == 1


def losses_of(folder: Path, *, resume: bool = False) -> list[float]:
    work(folder, "train.steps=1", resume=resume)
    return losses(folder)
