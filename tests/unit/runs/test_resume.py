"""A run that was stopped resumes at the exact step, from the newest checkpoint that is whole, or says why it cannot."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_after

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.signals import Stopped
from vitlab.runs.training.live_run import rank_key
from vitlab.training import checkpoint
from vitlab.training.recipe import Recipe

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]
TIMES = {"images_per_second", "data_wait_frac", "memory_gb", "seconds_left"}

# One of each: what keeps a state, what draws at random, what looks beyond one image.
EVERYTHING = (
    *("optim.name=adam-paper", "optim.momentum_dtype=bfloat16", "train.ema=0.9"),
    *("model.dropout=0.2", "data.augment.erase=0.5", "data.mix.mixup=0.4", "data.mix.cutmix=1.0"),
    *("data.repeats=2", "train.eval_every=37.5%", "schedule.warmup=25%"),
)


class Crash(BaseException):
    """Nothing in vitlab expects this."""


def crash_after(steps: int) -> fsio.Listener:
    """Raises when the record of the next step is about to be written."""
    seen = 0

    def listener(_operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and seen == steps + 1:
            raise Crash

    return listener


def stopped_run(work: Callable[[], Any], steps: int) -> None:
    with pytest.raises(Crash), fsio.intercept(crash_after(steps)):
        work()


def left(folder: Path) -> dict[str, Any]:
    """All that a resumed run must have in common with one that was never stopped."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    newest = checkpoint.list_checkpoints(folder / "checkpoints")[-1]
    return {
        "rows": [{name: value for name, value in row.items() if name not in TIMES} for row in rows],
        "state": json.loads((newest / "manifest.json").read_text()),
        "bundle": json.loads((folder / "bundle" / "manifest.json").read_text()),
        "evaluations": json.loads((newest / checkpoint.PROGRESS).read_text())["evaluations"],
    }


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, parts: Call, run: Call) -> Any:
    """A run of everything that was never stopped."""
    return run(tiny(*EVERYTHING), tmp_path_factory.mktemp("everything") / "run", parts(val=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, run: Call) -> dict[str, Any]:
    """What is left of a plain run that was never stopped."""
    return left(run(tiny(), tmp_path_factory.mktemp("whole") / "run").folder)


@pytest.mark.parametrize("after", slow_after(2, [5, 1, 0, 2, 7]))
def test_resumed_run_is_bit_equal_to_one_that_was_never_stopped(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, everything: Any, after: int
) -> None:
    recipe, data, folder = tiny(*EVERYTHING), parts(val=True), tmp_path / "run"
    assert len(left(everything.folder)["evaluations"]) == 3
    stopped_run(lambda: run(recipe, folder, data), after)
    resumed = run(recipe, folder, data, resume=True)
    assert left(folder) == left(everything.folder)
    assert resumed.scores.summary() == everything.scores.summary()
    assert [record.step for record in resumed.records] == list(range(1, 9))
    assert list(folder.rglob("*.tmp")) == []


def test_run_that_had_ended_is_left_as_it_is(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    first = left(run(tiny(), tmp_path / "run").folder)
    assert left(run(tiny(), tmp_path / "run", resume=True).folder) == first


def test_seconds_of_a_run_are_those_of_its_steps_before_too(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    """Eight steps of eight images, each of which took 100 seconds, by its record."""
    stopped_run(lambda: run(tiny(), tmp_path / "run"), 6)
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({**row, "images_per_second": 0.08}) + "\n" for row in rows))
    assert 600 < run(tiny(), tmp_path / "run", resume=True).seconds < 700


def test_signal_saves_at_the_step_it_meets_and_the_run_resumes_from_there(
    tmp_path: Path, tiny: Tiny, run: Call
) -> None:
    recipe = tiny("train.save_every=100%")

    def request_stop(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "metrics.jsonl" and path.exists() and len(path.read_text().splitlines()) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as caught, fsio.intercept(request_stop):
        run(recipe, tmp_path / "run")
    assert caught.value.exit_code == 143
    assert caught.value.advice == f"Saved at step 3. Resume with:  vitlab train --resume {tmp_path / 'run'}"
    assert signal.getsignal(signal.SIGTERM) == before
    assert checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-000000003"
    whole = run(recipe, tmp_path / "whole")
    assert left(run(recipe, tmp_path / "run", resume=True).folder) == left(whole.folder)


@pytest.mark.slow
def test_signal_outside_of_steps_says_how_to_resume_too(
    tmp_path: Path, tiny: Tiny, run: Call, whole: dict[str, Any]
) -> None:
    folder = tmp_path / "my run"

    def stop(_operation: fsio.Operation, path: Path) -> None:
        if "bundle" in str(path):
            raise Stopped(signal.SIGINT)

    with pytest.raises(Stopped) as caught, fsio.intercept(stop):
        run(tiny(), folder)
    assert caught.value.advice == f"Resume with:  vitlab train --resume '{folder}'"
    assert left(run(tiny(), folder, resume=True).folder) == whole


def test_log_of_before_is_kept(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    stopped_run(lambda: run(tiny(), tmp_path / "run"), 3)
    first = (tmp_path / "run" / "log.txt").read_text()
    run(tiny(), tmp_path / "run", resume=True)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "training   3/8" in first
    assert log.startswith(first)
    assert "resuming at step 2 of 8" in log and "training   8/8" in log


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, run: Call) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    stopped_run(lambda: run(tiny(), folder), 5)
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A run that was stopped after five steps, in a folder that a test may change."""
    return shutil.copytree(stopped_once, tmp_path / "run")


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    file = path / checkpoint.MODEL
    file.write_bytes(file.read_bytes()[:-1])


def _flip(path: Path) -> None:
    file = path / checkpoint.OPTIMIZER
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _unmanifest(path: Path) -> None:
    (path / fsio.MANIFEST).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit flipped": (_flip, "optimizer.safetensors is damaged"),
    "truncated": (_truncate, "model.safetensors is damaged"),
    "no manifest": (_unmanifest, "has no manifest.json"),
}


@pytest.mark.parametrize("kind", slow_after(1, DAMAGES))
def test_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, tiny: Tiny, run: Call, whole: dict[str, Any], kind: str
) -> None:
    damage, complaint = DAMAGES[kind]
    recipe = tiny("train.keep=2")
    assert recipe == tiny(), "the premise of this test"
    stopped_run(lambda: run(recipe, tmp_path / "run"), 7)
    damage(tmp_path / "run" / "checkpoints" / "step-000000006")
    console = Console(quiet=True)
    resumed = run(recipe, tmp_path / "run", resume=True, console=console)
    (reported,) = (line for line in console.lines if "cannot be used" in line)
    assert reported.startswith("step-000000006") and complaint in reported
    assert "resuming at step 4 of 8" in console.lines
    assert left(resumed.folder) == whole
    for path in checkpoint.list_checkpoints(resumed.folder / "checkpoints"):
        checkpoint.restore(path)  # what was damaged has been written anew


def test_when_all_are_damaged_the_run_starts_again(stopped: Path, tiny: Tiny, run: Call, whole: dict[str, Any]) -> None:
    for path in checkpoint.list_checkpoints(stopped / "checkpoints"):
        _truncate(path)
    console = Console(quiet=True)
    resumed = run(tiny(), stopped, resume=True, console=console)
    assert sum("cannot be used" in line for line in console.lines) == 2
    assert any("starting at the first step" in line for line in console.lines)
    assert left(resumed.folder) == whole


def test_checkpoint_that_the_system_withholds_is_an_error_and_stays(
    tmp_path: Path, stopped: Path, tiny: Tiny, run: Call, whole: dict[str, Any]
) -> None:
    """It may be whole: no rights, a network that is gone. To start again would throw it away."""
    newest = checkpoint.list_checkpoints(stopped / "checkpoints")[-1]
    (newest / "model.safetensors").rename(tmp_path / "kept")
    (newest / "model.safetensors").mkdir()  # which nobody can read, not even root
    with pytest.raises(FileProblem, match=r"model\.safetensors is a folder"):
        run(tiny(), stopped, resume=True)
    (newest / "model.safetensors").rmdir()
    (tmp_path / "kept").rename(newest / "model.safetensors")
    assert left(run(tiny(), stopped, resume=True).folder) == whole


@pytest.mark.slow
def test_best_checkpoint_that_the_system_withholds_is_not_given_up(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    recipe = tiny("optim.lr=0.3", "train.eval_every=12.5%", "train.keep=2", "train.steps=16")
    first = run(recipe, tmp_path / "run", parts(val=True))
    best = first.folder / "checkpoints" / f"step-{int(max(first.evaluations, key=rank_key)['step']):09d}"
    shutil.rmtree(first.folder / "bundle")
    (best / "model.safetensors").rename(tmp_path / "kept")
    (best / "model.safetensors").mkdir()
    with pytest.raises(FileProblem, match="is a folder"):
        run(recipe, tmp_path / "run", parts(val=True), resume=True)
    assert not (first.folder / "bundle").exists()


@pytest.mark.parametrize("damage", slow_after(1, [_truncate, _unmanifest, shutil.rmtree]))
def test_damaged_best_checkpoint_leaves_the_next_best(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, damage: Callable[[Path], None]
) -> None:
    recipe = tiny("optim.lr=0.3", "train.eval_every=12.5%", "train.keep=2", "train.steps=16")
    first = run(recipe, tmp_path / "run", parts(val=True))
    best = max(first.evaluations, key=rank_key)
    assert best["step"] < 14, "the premise of this test"
    damage(first.folder / "checkpoints" / f"step-{int(best['step']):09d}")
    shutil.rmtree(first.folder / "bundle")
    console = Console(quiet=True)
    again = run(recipe, tmp_path / "run", parts(val=True), resume=True, console=console)
    assert sum("the next best are taken" in line for line in console.lines) == 1
    names = (path.name for path in checkpoint.list_checkpoints(first.folder / "checkpoints"))
    there = {int(name.removeprefix("step-")) for name in names} - {int(best["step"])}
    second = max((row for row in first.evaluations if row["step"] in there), key=rank_key)
    stored = checkpoint.restore(first.folder / "checkpoints" / f"step-{int(second['step']):09d}")
    assert all(torch.equal(value, stored.model[name]) for name, value in again.classifier.model.state_dict().items())


@pytest.mark.slow
def test_run_resumes_without_its_start_weights_and_not_with_another_teacher(
    tmp_path: Path, tiny: Tiny, run: Call
) -> None:
    begun, other = (run(tiny(f"seed={seed}"), tmp_path / str(seed)).folder for seed in (5, 6))
    start = f"init={tmp_path / 'start'}"
    learn = (start, f"teacher={other}", "objective.distillation.weight=0.5")
    shutil.copytree(begun, tmp_path / "start")
    whole = left(run(tiny(*learn), tmp_path / "whole").folder)
    stopped_run(lambda: run(tiny(*learn), tmp_path / "run"), 5)
    (tmp_path / "start").rename(tmp_path / "gone")
    shutil.copytree(other, tmp_path / "kept")
    shutil.rmtree(other)
    shutil.copytree(begun, other)
    with pytest.raises(UsageError, match="teacher is not"):
        run(tiny(*learn), tmp_path / "run", resume=True)
    shutil.rmtree(other)
    shutil.copytree(tmp_path / "kept", other)
    console = Console(quiet=True)
    assert left(run(tiny(*learn), tmp_path / "run", resume=True, console=console).folder) == whole
    assert f"{tmp_path / 'start'} does not exist; continuing from the checkpoint instead" in console.lines
    shutil.rmtree(other)
    shutil.rmtree(tmp_path / "run" / "bundle")
    run(tiny(*learn), tmp_path / "run", resume=True)  # its steps are done: nobody needs the teacher any more
    stopped_run(lambda: run(tiny("init=" + str(tmp_path / "gone")), tmp_path / "early"), 0)
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(FileProblem, match=r"gone.*not exist"):
        run(tiny("init=" + str(tmp_path / "gone")), tmp_path / "early", resume=True)


def test_damaged_checkpoint_does_not_push_good_ones_out(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    """It has the highest number, so a rule that keeps the newest would keep it alone."""
    recipe = tiny("train.keep=1", "train.steps=8")
    stopped_run(lambda: run(recipe, tmp_path / "run"), 7)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000000006").rename(folder / "step-000000099")
    stopped_run(lambda: run(recipe, tmp_path / "run", resume=True), 3)
    assert checkpoint.newest_valid(folder)[0] is not None


def test_truncated_last_line_of_the_metrics_is_repaired(
    stopped: Path, tiny: Tiny, run: Call, whole: dict[str, Any]
) -> None:
    metrics = stopped / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert left(run(tiny(), stopped, resume=True).folder) == whole


# --- what must be the same --------------------------------------------------------------------------------------------


def test_changed_config_is_refused_with_the_difference(stopped: Path, tiny: Tiny, run: Call) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="config differs") as caught:
        run(tiny("optim.lr=0.5", "train.steps=9"), stopped, resume=True)
    _, *lines, hint = str(caught.value).splitlines()
    assert lines == ["train.steps: 8 in the run, 9 now", "optim.lr: 0.01 in the run, 0.5 now"]
    assert hint == "Start a new run for it."
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_config_from_before_a_key_was_added_is_the_same_config(stopped: Path, tiny: Tiny, run: Call) -> None:
    lines = (stopped / "config.toml").read_text().splitlines()
    older = "\n".join(line for line in lines if not line.startswith(("max_bad", "nesterov"))) + "\n"
    (stopped / "config.toml").write_text(older)
    table = json.loads((stopped / "run.json").read_text())
    table["sha256"]["config.toml"] = hashlib.sha256(older.encode()).hexdigest()
    (stopped / "run.json").write_text(json.dumps(table))
    assert len(run(tiny(), stopped, resume=True).records) == 8
    with pytest.raises(UsageError, match="config differs"):
        run(tiny("optim.nesterov=true"), stopped, resume=True)


def test_config_file_that_was_edited_is_refused(stopped: Path, tiny: Tiny, run: Call) -> None:
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.5"))
    with pytest.raises(UsageError, match=r"config\.toml was changed"):
        run(tiny("optim.lr=0.5"), stopped, resume=True)


@pytest.mark.parametrize(("part", "words"), [("train", "training"), ("test", "test")])
def test_changed_data_is_refused_by_its_part(
    stopped: Path, tiny: Tiny, parts: Call, run: Call, part: str, words: str
) -> None:
    given = parts()
    own = getattr(given, part)
    other = dataclasses.replace(own, keys=[*own.keys[:-1], "another"])
    with pytest.raises(UsageError, match=f"{words} images or labels changed") as caught:
        run(tiny(), stopped, dataclasses.replace(given, **{part: other}), resume=True)
    label = own.classes[own.labels.values[-1]]
    assert f"\nno longer there: {own.keys[-1]},{label},{part}\nnew: another,{label},{part}\n" in str(caught.value)
    with pytest.raises(UsageError, match="validation images or labels changed"):
        run(tiny(), stopped, parts(val=True), resume=True)


def test_other_code_torch_threads_or_device_is_a_note(stopped: Path, tiny: Tiny, run: Call) -> None:
    run_file = json.loads((stopped / "run.json").read_text())
    versions = run_file["versions"]
    other = {**versions, "code": "0a", "torch": "1.0", "threads": 7}
    (stopped / "run.json").write_text(json.dumps({**run_file, "versions": other}))
    console = Console(quiet=True)
    run(tiny(), stopped, resume=True, console=console)
    assert any(line.startswith("torch is ") and "was 1.0" in line for line in console.lines)
    assert f"code is {versions['code']} now and was 0a: the last bits may differ" in console.lines
    assert "threads is 1 now and was 7: the last bits may differ" in console.lines


@pytest.mark.parametrize(
    ("drops", "printed"),
    slow_after(
        2,
        [
            ("dropout=0.0", "the last bits may differ"),
            *(
                (f"{key}=0.1", "dropout draws others")
                for key in ("dropout", "attention_dropout", "stochastic_depth", "patch_dropout")
            ),
        ],
    ),
)
def test_batch_that_is_cut_up_anew_is_a_note(tmp_path: Path, tiny: Tiny, run: Call, drops: str, printed: str) -> None:
    stopped_run(lambda: run(tiny(f"model.{drops}"), tmp_path / "run"), 5)
    console = Console(quiet=True)
    run(tiny(f"model.{drops}", "train.micro_batch=4"), tmp_path / "run", resume=True, console=console)
    assert f"train.micro_batch is 4 now and was 0: {printed}" in console.lines


@pytest.mark.parametrize("what", ["nothing", "empty folder", "no config", "bad run file"])
def test_what_is_not_a_run_is_refused_in_plain_words(tmp_path: Path, tiny: Tiny, run: Call, what: str) -> None:
    folder = tmp_path / "run"
    if what != "nothing":
        folder.mkdir()
    if what == "no config":
        (folder / "run.json").write_text("{}")
    if what == "bad run file":
        (folder / "config.toml").write_text("")
        (folder / "run.json").write_text("[1]")
    with pytest.raises((FileProblem, UsageError), match=str(folder)):
        run(tiny(), folder, resume=True)


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_second_process_on_a_run_is_refused_and_changes_nothing(
    stopped: Path, tiny: Tiny, run: Call, held: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(stopped), monkeypatch.context() as quick:
        quick.setattr(fsio, "_PAUSE_S", 0.001)  # nobody lets go of it here
        before = (stopped / "metrics.jsonl").read_bytes()
        with pytest.raises(FileProblem, match="in use"):
            run(tiny(), stopped, resume=True)
        assert (stopped / "metrics.jsonl").read_bytes() == before
    run(tiny(), stopped, resume=True)  # a killed holder holds nothing
