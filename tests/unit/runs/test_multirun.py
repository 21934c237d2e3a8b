"""The runs of `--seeds` and `--sweep` resume together, and only as they were started. `system` tests that no bit is lost."""

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_jobs import plan_train

from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.core.runtime import Runtime
from vitlab.core.signals import Stopped
from vitlab.engines.classifier import load
from vitlab.runs.training.resolve import Job
from vitlab.runs.training.run_folder import resume_command
from vitlab.runs.training.training_run import TrainResult, train
from vitlab.training.memory import estimate_memory

SETTINGS = ("data.image_size=[8,8]", "data.workers=0", "train.precision=fp32", "train.epochs=1", "train.batch_size=8")
KINDS: dict[str, dict[str, Any]] = {"seeds": {"seeds": 3}, "sweep": {"sweep": "optim.lr=0.001,0.01"}}
RUNS = {"seeds": ["seed-0", "seed-1", "seed-2"], "sweep": ["try-1", "try-2", "final"]}
QUIET: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}


@pytest.mark.slow
def test_warnings_of_every_seed_are_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate so small that no weight moves in any of the runs; each is named by its seed, save the first."""
    paint(tmp_path / "photos", 10)
    monkeypatch.chdir(tmp_path)
    settings = [*SETTINGS, "optim.lr=1e-12", "schedule.warmup=0"]
    small: dict[str, Any] = {"init": "scratch", "model": "ViT-w16d2m32h2/4", "overrides": settings}
    alone = [train("photos", seed=seed, out=f"alone-{seed}", **small, **QUIET).warnings for seed in (0, 1)]
    found = train("photos", seeds=2, out="out", **small, **QUIET).warnings
    later = [f"seed 1: {line}" for line in alone[1] if line not in alone[0]]
    assert any("no weight has moved" in line for line in alone[0])
    assert found == [*alone[0], *later]


class Crash(BaseException):
    """Nothing in vitlab expects this."""


def crash_at(place: str) -> fsio.Listener:
    def listener(_operation: fsio.Operation, path: Path) -> None:
        if place in str(path):
            raise Crash

    return listener


def paint(root: Path, count: int) -> Path:
    draw = np.random.default_rng(0)
    for name in ("green", "red"):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def begin(folder: Path, kind: str) -> None:
    """Photos, and runs on them of which the second did not come to its first step."""
    paint(folder / "photos", 10)
    with pytest.raises(Crash), fsio.intercept(crash_at(f"{RUNS[kind][1]}/metrics.jsonl")):
        train(
            folder / "photos",
            out=folder / "out",
            model="ViT-w16d1m32h2/4",
            overrides=SETTINGS,
            **KINDS[kind],
            **QUIET,
        )


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> dict[str, Path]:
    places = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, place in places.items():
        begin(place, kind)
    return places


@pytest.fixture
def copied(begun: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """The folder of such runs, for one test alone; their photos stay where they are."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(begun[kind] / "out", tmp_path / "out"))

    return copy


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume(folder: Path, **more: Any) -> TrainResult:
    return train(resume=folder, **more, **QUIET)


@pytest.mark.parametrize("kind", KINDS)
def test_ended_runs_are_kept_and_the_others_follow(copied: Callable[[str], Path], kind: str) -> None:
    folder = copied(kind)
    first, second, third = RUNS[kind]
    assert not (folder / third).exists()
    before = (folder / first / "metrics.jsonl").read_bytes()
    result = resume(folder)
    assert (folder / first / "metrics.jsonl").read_bytes() == before
    assert "all steps are already done" in (folder / first / "log.txt").read_text()
    assert "all steps are already done" not in (folder / second / "log.txt").read_text()
    assert result.run == folder / (third if kind == "sweep" else first)
    assert f"Chosen: {result.reason}." in (folder / third / "log.txt").read_text().splitlines()
    command = json.loads((folder / first / "run.json").read_text())["command"]
    assert json.loads((folder / third / "run.json").read_text())["command"] == command
    with pytest.raises(FileProblem, match=", ".join(sorted(RUNS[kind]))):
        load(folder, device="cpu", quiet=True)
    again = resume(folder, **KINDS[kind])  # what was asked for at first may be asked for again
    assert (again.test, again.seeds, again.sweep) == (result.test, result.seeds, result.sweep)
    assert len(list(folder.rglob("records/*.json"))) == 1, "one measurement, one record"


@pytest.mark.parametrize(
    ("kind", "asked", "printed"),
    [
        ("seeds", {"seeds": 5}, "--seeds 3,.*--seeds 5"),
        ("seeds", {"sweep": "optim.lr=1,2"}, "--seeds 3,.*--sweep optim.lr=1,2"),
        (
            "sweep",
            {"sweep": "optim.lr=0.001,0.02"},
            "--sweep optim.lr=0.001,0.01,.*--sweep optim.lr=0.001,0.02",
        ),
        ("seeds", {"overrides": ["optim.lr=0.5"]}, "optim.lr: .*0.5 now"),
        ("sweep", {"overrides": ["train.epochs=2"]}, "train.epochs: 1.0.* 2.0 now"),
    ],
)
def test_other_runs_than_those_started_are_refused_with_the_difference(
    copied: Callable[[str], Path], kind: str, asked: dict[str, Any], printed: str
) -> None:
    folder = copied(kind)
    before = files(folder)
    with pytest.raises(UsageError, match=printed):
        resume(folder, **asked)
    assert files(folder) == before


def test_other_images_are_refused(begun: dict[str, Path], copied: Callable[[str], Path]) -> None:
    folder, photo = copied("seeds"), begun["seeds"] / "photos" / "red" / "more.png"
    Image.new("RGB", (8, 8)).save(photo)
    try:
        with pytest.raises(UsageError, match="test, training, validation images or labels"):
            resume(folder)
    finally:
        photo.unlink()


def test_without_resume_the_folder_is_taken(begun: dict[str, Path], copied: Callable[[str], Path]) -> None:
    folder = copied("seeds")
    with pytest.raises(UsageError, match="exists"):
        train(begun["seeds"] / "photos", out=folder, seeds=3, **QUIET)


@pytest.mark.slow
def test_launcher_that_starts_the_same_command_again_resumes(
    begun: dict[str, Path], copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("sweep")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    given = {"model": "ViT-w16d1m32h2/4", "overrides": SETTINGS, **KINDS["sweep"], **QUIET}
    result = train(begun["sweep"] / "photos", out=folder, **given)
    assert result.run == folder / "final"
    assert "all steps are already done" in (folder / "try-1" / "log.txt").read_text()


def test_run_of_a_sweep_alone_is_sent_to_the_whole(copied: Callable[[str], Path]) -> None:
    folder = copied("sweep")
    with pytest.raises(UsageError, match="one run of a sweep") as caught:
        resume(folder / "try-2")
    assert str(caught.value).endswith(f"vitlab train --resume {folder}")


def test_run_of_a_seed_alone_can_go_on_and_several_cannot_be_made_of_it(copied: Callable[[str], Path]) -> None:
    folder = copied("seeds")
    with pytest.raises(UsageError, match=r"one run.*--seeds 2"):
        resume(folder / "seed-1", seeds=2)
    assert resume(folder / "seed-1").run == folder / "seed-1"
    assert not (folder / "seed-2").exists()


@pytest.mark.parametrize("runs", [{}, {"sweep": {}}, {"seeds": "x"}, {"seeds": 7}])
def test_changed_list_of_runs_is_refused(copied: Callable[[str], Path], runs: dict[str, Any]) -> None:
    folder = copied("seeds")
    table = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**table, "runs": runs}))
    with pytest.raises(FileProblem, match=r"run\.json.*runs"):
        resume(folder)


def test_second_process_is_refused_and_what_it_writes_in_a_run_of_its_own_is_let_be(
    copied: Callable[[str], Path], held: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsio, "_PAUSE_S", 0.001)  # nobody lets go of it here
    folder = copied("seeds")
    for place, half in ((folder, None), (folder / "seed-1", folder / "seed-1" / ".bundle.0123abcd.tmp")):
        with held(place):
            if half is not None:
                half.mkdir()
            with pytest.raises(FileProblem, match=f"{place}.*in use") as caught:
                resume(folder)
            assert caught.value.hint == "Wait for it, or stop it."
            assert half is None or half.exists()


@pytest.mark.slow
def test_signal_between_two_runs_says_how_to_resume(copied: Callable[[str], Path]) -> None:
    folder = copied("seeds")

    def stop(_operation: fsio.Operation, path: Path) -> None:
        if path.name == "plots":
            raise Stopped(signal.SIGINT)

    with pytest.raises(Stopped) as caught, fsio.intercept(stop):
        resume(folder)
    assert caught.value.advice == f"Resume with:  vitlab train --resume {folder}"


@pytest.mark.slow
def test_trial_with_non_finite_loss_has_failed_and_the_others_continue(tmp_path: Path, runtime: Runtime) -> None:
    photos, model = paint(tmp_path / "photos", 20), "ViT-w16d1m32h2/4"
    sweep = "optim.lr=1e30,0.001,0.01"
    found = train(photos, out=tmp_path / "out", model=model, overrides=SETTINGS, sweep=sweep, **QUIET)
    first, *others = found.sweep
    assert first["value"] == "1e+30" and first["top1"] is None and "non-finite loss or gradient" in first["failed"]
    assert all(row["failed"] is None and 0 <= row["top1"] <= 1 for row in others)
    assert found.run == tmp_path / "out" / "final" and found.test["n"] == 8
    assert any("1e+30 failed: non-finite loss or gradient" in line for line in found.sentences())
    assert json.loads((tmp_path / "out" / "sweep.json").read_text()) == found.sweep
    assert "not finite" in found.report.read_text()
    again = resume(tmp_path / "out")
    assert (again.sweep, again.test) == (found.sweep, found.test)


@pytest.mark.slow
def test_seeds_without_a_test_part_and_with_several_labels_are_reported(tmp_path: Path, runtime: Runtime) -> None:
    given: dict[str, Any] = {"model": "ViT-w16d1m32h2/4", "overrides": (*SETTINGS, "data.test_frac=0"), "seeds": 2}
    found = train(paint(tmp_path / "photos", 10), out=tmp_path / "out", **given, **QUIET)
    assert found.test == {} and found.sentences()[0].startswith("Not tested, ")
    tests = [{"top1": 0.9, "mean_ap": 0.25, "n": 8}, {"top1": 0.9, "mean_ap": 0.5, "n": 8}]
    several = dataclasses.replace(found, test=tests[0], seeds=[{"test": test} for test in tests])
    assert "2 seeds: precision in the mean 0.375, 0.250 to 0.500." in several.sentences()


@pytest.fixture
def fitted(tmp_path: Path, runtime: Runtime) -> dict[str, Any]:
    """What a linear probe is fitted with."""
    photos = paint(tmp_path / "photos", 20)
    train(photos, out=tmp_path / "first", model="ViT-w16d1m32h2/4", overrides=SETTINGS, **QUIET)
    return {"data": photos, "init": str(tmp_path / "first"), "out": tmp_path / "out", **QUIET}


def page(found: TrainResult) -> str:
    return found.report.read_text()


@pytest.mark.slow
def test_sweep_whose_final_run_has_started_resumes_with_what_was_chosen(tmp_path: Path, fitted: dict[str, Any]) -> None:
    """Trials that would be run again, on another machine say, could choose otherwise."""
    found = train(sweep="objective.label_smoothing=0.0,0.1", **fitted)
    shutil.rmtree(tmp_path / "out" / "try-1")
    again = resume(tmp_path / "out")
    assert (again.sweep, again.test) == (found.sweep, found.test)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["progress"] == {"finished": True}
    (tmp_path / "out" / "sweep.json").write_text("[]")
    with pytest.raises(FileProblem, match=r"sweep\.json.*chosen"):
        resume(tmp_path / "out")


@pytest.mark.slow
def test_sweep_of_which_every_value_fails_is_an_error(tmp_path: Path, runtime: Runtime) -> None:
    photos, given = paint(tmp_path / "photos", 20), {"model": "ViT-w16d1m32h2/4", "overrides": SETTINGS}
    with pytest.raises(VitlabError, match=r"none of the 2 values.*optim\.lr.*1e\+30.*non-finite"):
        train(photos, out=tmp_path / "out", sweep="optim.lr=1e30,1e31", **given, **QUIET)
    with pytest.raises(VitlabError, match="none of the 2 values"):
        resume(tmp_path / "out")


def test_class_too_small_for_a_sweep_is_refused_without_the_hint_to_hold_none_out(
    tmp_path: Path, runtime: Runtime
) -> None:
    photos, given = paint(tmp_path / "photos", 2), {"model": "ViT-w16d1m32h2/4", "sweep": "optim.lr=0.1,0.2"}
    with pytest.raises(UsageError, match=r"too few.*2 parts") as caught:
        train(photos, out=tmp_path / "out", overrides=(*SETTINGS, "data.val_frac=0"), **given, **QUIET)
    assert caught.value.hint is not None
    assert "A sweep needs validation images." in caught.value.hint and "val_frac" not in caught.value.hint


def test_share_that_the_caller_holds_out_for_a_sweep_counts_before_that_of_the_recipe(
    tmp_path: Path, runtime: Runtime
) -> None:
    photos, recipe = paint(tmp_path / "photos", 20), tmp_path / "mine.toml"
    recipe.write_text('extends = "laptop-shapes"\n[sweep]\nlr = [0.001, 0.01]\nval_frac = 0.5\n')
    world = World(0, 1, torch.device("cpu"))
    for settings, tuned in (((), 16), (("data.val_frac=0.25",), 8), (("sweep.val_frac=0.25",), 8)):
        plan = plan_train(photos, str(recipe), None, None, settings, 0, world, Console(quiet=True), sweep="optim.lr")
        assert plan.parts.val is not None and len(plan.parts.val) == tuned


def test_recipe_that_names_a_share_chooses_on_training_images_also_beside_a_validation_part(
    tmp_path: Path, runtime: Runtime
) -> None:
    for part in ("train", "val", "test"):
        paint(tmp_path / "photos" / part, 10)
    recipe, world = tmp_path / "mine.toml", World(0, 1, torch.device("cpu"))
    recipe.write_text('extends = "laptop-shapes"\n[sweep]\nlr = [0.001, 0.01]\nval_frac = 0.2\n')

    def planned(name: str | None) -> Job:
        small = [*SETTINGS, *([] if name else ["model.name=ViT-w16d1m32h2/4"])]
        sweep = "optim.lr" if name else "optim.lr=0.001,0.01"
        console = Console(quiet=True)
        return plan_train(tmp_path / "photos", name, None, None, small, 0, world, console, sweep=sweep)

    plan = planned(str(recipe))
    assert plan.parts.val is not None and all(key.startswith("train/") for key in plan.parts.val.keys)
    assert (len(plan.parts.train), len(plan.parts.val)) == (16, 4)
    assert plan.sweep is not None and len(plan.sweep.final.train) == 20, "trained again on all"
    assert any("own validation part is not used" in note for note in plan.notes)
    plain = planned(None)
    assert plain.parts.val is not None and all(key.startswith("val/") for key in plain.parts.val.keys)
    assert len(plain.parts.train) == 20


def test_file_of_the_same_name_beside_a_run_does_not_make_it_one_of_several(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    alone = shutil.copytree(copied("seeds") / "seed-0", tmp_path / "mine" / "run")
    (tmp_path / "mine" / "run.json").write_text("my notes")
    assert resume(alone).run == alone
    assert resume_command(alone).endswith(f"--resume {alone}")


def test_all_runs_of_a_sweep_fit_into_the_memory_that_is_free(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, world, models = (
        paint(tmp_path / "photos", 10),
        World(0, 1, runtime.device),
        ("ViT-w16d1m32h2/4", "ViT-Ti/4"),
    )

    def micro_batches() -> list[int]:
        sweep = f"model.name={','.join(models)}"
        plan = plan_train(photos, None, None, models[0], SETTINGS, 0, world, Console(quiet=True), sweep=sweep)
        assert plan.sweep is not None
        most = estimate_memory(plan.sweep.recipes[1]).peak(8, accumulates=False)
        monkeypatch.setattr("vitlab.training.microbatch.free_memory", lambda _device: most - 1)
        return [recipe.train.micro_batch for recipe in (plan.recipe, *plan.sweep.recipes)]

    assert micro_batches() == [0, 0, 0]
    whole, small, large = micro_batches()
    assert 2 <= whole == small == large < 8


def test_run_of_a_sweep_is_sent_to_the_whole_from_inside_too(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("sweep")
    monkeypatch.chdir(folder / "try-2")
    with pytest.raises(UsageError, match="one run of a sweep") as caught:
        resume(Path())
    assert str(caught.value).endswith(f"vitlab train --resume {folder}")


def test_folder_that_is_not_there_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*not exist"):
        resume(tmp_path / "nowhere")


@pytest.mark.slow
def test_images_that_were_left_out_are_reported_at_the_end(tmp_path: Path, runtime: Runtime) -> None:
    photos = paint(tmp_path / "photos", 10)
    (photos / "green" / "0.png").write_bytes(b"")
    given = {"model": "ViT-w16d1m32h2/4", "overrides": SETTINGS}
    found = train(photos, out=tmp_path / "out", **given, **QUIET)
    assert found.left_out == {"green/0.png": "is not a readable image: it is empty"}
    assert "Images that could not be read and were left out: 1; the report names them." in found.sentences()
    assert "green/0.png" in found.report.read_text()
    (photos / "green" / "0.png").unlink()
    whole = train(photos, out=tmp_path / "whole", **given, **QUIET)
    assert whole.left_out == {} and not any("left out" in line for line in whole.sentences())
