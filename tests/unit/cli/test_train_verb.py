"""`vitlab train` as a user meets it: what it says, what it leaves, and the wrong calls that begin nothing."""

import csv
import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

from vitlab.core import config, fsio

Call = Callable[..., Any]
BODY = "ViT-w16d2m32h2/4"
QUICK = [
    *("--threads", "1", "--device", "cpu", "--quiet", "--model", BODY),
    *("--set", "data.image_size=[16,16]", "--set", "train.epochs=1", "--set", "train.precision=fp32"),
]


@pytest.fixture(autouse=True)
def torch_settings() -> Generator[None]:
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def paint(root: Path, classes: dict[str, int], side: int = 20) -> Path:
    """Pictures that differ, a colour for each class."""
    draw = np.random.default_rng(0)
    for k, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 100, (side, side, 3), dtype=np.uint8)
            pixels[..., k % 3] += 120
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return paint(tmp_path / "photos", {"green": 10, "red": 10})


def start(call: Call, photos: Path, *more: str) -> str:
    code, _, err = call("train", str(photos), *QUICK, "--out", "start", *more)
    assert code == 0, err
    return "start"


# --- wrong calls ------------------------------------------------------------------------------------------------------


def empty(root: Path) -> None:
    (root / "photos").mkdir()


def empty_classes(root: Path) -> None:
    for name in ("green", "red"):
        (root / "photos" / name).mkdir(parents=True)


def one_class(root: Path) -> None:
    paint(root / "photos", {"green": 4})


def two_classes(root: Path) -> None:
    paint(root / "photos", {"green": 4, "red": 4})


def unseen_in_val(root: Path) -> None:
    paint(root / "photos" / "train", {"green": 4, "red": 4})
    paint(root / "photos" / "val", {"green": 2, "blue": 2})


def only_val(root: Path) -> None:
    paint(root / "photos" / "val", {"green": 2, "red": 2})


def nothing(root: Path) -> None: ...


TEACHER = ("--set", "teacher=nowhere", "--set", "objective.distillation.weight=0.5")
BAD = [
    (nothing, [], "photos"),
    (empty, [], "photos"),
    (empty_classes, [], "photos"),
    (one_class, [], "has one class, and training needs at least two: green"),
    (unseen_in_val, [], "has classes that"),
    (only_val, [], "nothing to train on"),
    (two_classes, ["--out", "taken"], "taken exists already"),
    (two_classes, ["--out", "taken", "--dry-run"], "taken exists already"),
    (two_classes, ["--set", "optim.name=adamm"], "unknown value for optim.name: 'adamm'\nAllowed: adamw"),
    (two_classes, ["--set", "optim.lr=-1"], "optim.lr must be positive"),
    (two_classes, ["--set", "optim.betas=[2,3]"], "optim.betas must lie in 0 to 1"),
    (two_classes, ["--set", "train.batch_size=0"], "train.batch_size must be at least 1"),
    (two_classes, ["--set", "train.batch_size=1.5"], "'train.batch_size' must be a whole number"),
    (two_classes, ["--set", "train.micro_batch=-1"], "train.micro_batch must not be negative"),
    (two_classes, ["--init", "scratch", "--set", "train.micro_batch=3"], "train.micro_batch 3 must be an even number"),
    (two_classes, ["--set", "train.save_every=10 percent"], "train.save_every: '10 percent' is not an interval of a run"),
    (two_classes, ["--set", "train.save_every=0%"], "train.save_every must be positive"),
    (two_classes, ["--set", "train.eval_every=120%"], "more than the whole run"),
    (two_classes, ["--set", "train.eval_every=1.5"], "must be a whole number or text, not 1.5"),
    (two_classes, ["--set", "schedule.warmup=5 minutes"], "schedule.warmup: '5 minutes' is not an interval"),
    (two_classes, ["--set", "train.epochs=0"], "train.epochs must be positive"),
    (two_classes, ["--set", "train.steps=3", "--set", "train.epochs=3"], "exactly one unit, not 2"),
    (two_classes, ["--set", "train.log=[\"tensorbord\"]"], "unknown value for train.log[0]: 'tensorbord'"),
    (two_classes, ["--set", "data.test_frac=1"], "data.test_frac must be at least 0 and below 1"),
    (two_classes, ["--set", "data=3"], "data"),
    (two_classes, ["--set", "model.num_classes=7"], "is decided by the data"),
    (two_classes, ["--set", "data.image_size=[30,30]"], "does not divide the 30x30 image"),
    (two_classes, ["--set", "objective.kind=hinge"], "Allowed: softmax, sigmoid"),
    (two_classes, ["--set", "objective.label_smoothing=2"], "objective.label_smoothing must be"),
    (two_classes, ["--set", "schedule.end=2"], "schedule.end must lie in 0 to 1"),
    (two_classes, ["--model", "ViT-X/16"], "Nearest: ViT-S/16"),
    (two_classes, ["--recipe", "demo-digit"], "Nearest: demo-digits"),
    (two_classes, ["--recipe", "laptop-digits", "--model", "BiT-R26x1"], "laptop-digits sets model.pool"),
    (two_classes, ["--recipe", "laptop-digits", "--set", "model.name=BiT-R26x1"], "which BiT-R26x1 does not have"),
    (two_classes, ["--recipe", "laptop-digits", "--set", "model.pol=gap"], "unknown config key 'model.pol'"),
    (two_classes, ["--recipe", "photos/nope.toml"], "photos/nope.toml does not exist"),
    (two_classes, ["--recipe", "photos/green/0.png/x.toml"], "x.toml cannot be read: Not a directory"),
    (two_classes, ["--out", "photos/run"], "inside the data folder photos"),
    (two_classes, ["--out", "photos/../photos/run", "--dry-run"], "Give --out a folder elsewhere"),
    (two_classes, ["--init", "nowhere"], "nowhere"),
    (two_classes, ["--init", "nowhere", "--model", "ViT-S/16"], "not both"),
    (two_classes, ["--seeds", "0"], "--seeds must be at least 1"),
    (two_classes, ["--resume", "run"], "run does not exist, so there is no run to resume"),
    (two_classes, ["--sweep", "optim.lr"], "'optim.lr' is not a sweep"),
    (two_classes, ["--sweep", "optim.lr=0.1"], "two different values or more"),
    (two_classes, ["--sweep", "optim.lr=0.1,0.1"], "two different values or more"),
    (two_classes, ["--init", "scratch", "--sweep", "optim.lr=0.1,-0.1"], "optim.lr must be positive"),
    (two_classes, ["--init", "scratch", "--sweep", "optim.lrr=1,2"], "unknown config key 'optim.lrr'"),
    (two_classes, ["--sweep", "data.val_frac=0.1,0.2"], "decides which images are held out"),
    (two_classes, ["--sweep", "optim.lr=1,2", "--seeds", "2"], "--sweep makes several runs of its own; leave --seeds out"),
    (two_classes, ["--seeds", "0", "--dry-run"], "--seeds must be at least 1"),
    (two_classes, ["--seeds", "2", "--sweep", "optim.lr=1,2", "--dry-run"], "leave --seeds out"),
    (two_classes, ["--resume", "run", "--dry-run"], "cannot be combined with --resume"),
    (two_classes, ["--model", "ViT-Ti/16", *TEACHER], "nowhere does not exist"),
    (two_classes, ["--device", "gpu"], "'gpu' is not a device"),
    (two_classes, ["--threads", "0"], "--threads must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "arguments", "printed"),
    BAD,
    ids=lambda value: value.__name__ if callable(value) else " ".join(value)[-50:] if isinstance(value, list) else "",
)
def test_wrong_call_is_refused_before_any_work(
    call: Call, tmp_path: Path, data: Callable[[Path], None], arguments: list[str], printed: str
) -> None:
    data(tmp_path)
    (tmp_path / "taken").mkdir()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call("train", "photos", "--threads", "1", "--device", "cpu", "--quiet", *arguments)
    assert (code, out) == (2, "")
    assert printed in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 4
    assert sorted(tmp_path.rglob("*")) == before


def test_recipe_that_starts_from_another_says_how_to_make_it(call: Call, tmp_path: Path) -> None:
    code, _, err = call("train", "--recipe", "laptop-transfer-digits")
    assert code == 2
    assert "vitlab: the recipe starts from runs/laptop-fractals, which is not here\n" in err
    assert "`vitlab train --recipe laptop-fractals --out runs/laptop-fractals`" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["optim.name=adamm", "train.batch_size=0", "train.micro_batch=3"])
def test_wrong_setting_is_reported_before_the_images_are_looked_at(call: Call, photos: Path, key: str) -> None:
    loud = ["train", str(photos), *(word for word in QUICK if word != "--quiet")]
    assert "checking" in call(*loud).err
    code, _, err = call(*loud, "--set", key)
    assert code == 2
    assert "checking" not in err


RESUMED = [
    (["nowhere"], "nowhere does not exist, so there is no run to resume\n"),
    (
        ["several"],
        "several is not a run: it has no config.toml\nIt has several, each of which can be resumed: seed-0.\n",
    ),
    (["several/seed-0", "--out", "other"], "own recipe, model, start weights, seed and folder; leave yours out"),
    (["several/seed-0", "--seed", "5"], "leave yours out"),
    (["several/seed-0", "--init", "x"], "leave yours out"),
]


@pytest.mark.parametrize(
    ("arguments", "printed"), RESUMED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_resumed_is_a_wrong_call(call: Call, tmp_path: Path, arguments: list[str], printed: str) -> None:
    (tmp_path / "several" / "seed-0").mkdir(parents=True)
    (tmp_path / "several" / "seed-0" / "config.toml").write_text("")
    code, out, err = call("train", "--resume", *arguments)
    assert (code, out) == (2, "")
    assert printed in err


def test_run_resumes_where_it_was_started_and_elsewhere_is_refused_with_that_folder(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call("train", photos.name, *QUICK, "--out", "run")
    assert code == 0, err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = call("train", "--resume", "../run", "--threads", "1", "--quiet")
    assert code == 2
    assert f"The run was started in {tmp_path}" in err
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "run" / "bundle")
    assert call("train", "--resume", "run", "--threads", "1", "--quiet").code == 0
    command = json.loads((tmp_path / "run" / "env.json").read_text())["command"]
    assert command in (tmp_path / "run" / "bundle" / "card.md").read_text(), (
        "how it was started, not how it was resumed"
    )


def test_data_may_be_named_again_beside_resume_and_others_may_not(call: Call, photos: Path, tmp_path: Path) -> None:
    code, _, err = call("train", photos.name, *QUICK, "--out", "run")
    assert code == 0, err
    shutil.copytree(photos, tmp_path / "others")
    code, _, err = call("train", "others", "--resume", "run", "--threads", "1", "--quiet")
    printed = "vitlab: the run in run was started with photos, not with others\n"
    assert (code, err) == (2, f"{printed}Leave others out to resume the run, or --resume to start a new one.\n")
    for same in ("photos", "./photos", str(photos)):
        shutil.rmtree(tmp_path / "run" / "bundle")
        assert call("train", same, "--resume", "run", "--threads", "1", "--quiet").code == 0


def test_data_missing_on_resume_is_reported_as_such(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call("train", photos.name, *QUICK, "--out", "run")
    assert code == 0, err
    photos.rename(tmp_path / "moved")
    again = ("train", "--resume", str(tmp_path / "run"), "--threads", "1", "--quiet")
    gone = f"vitlab: the data of {tmp_path / 'run'} is not here any more: photos\n"
    assert call(*again) == (2, "", f"{gone}Put it back where it was: a run resumes with the images it started with.\n")
    monkeypatch.chdir(tmp_path / "moved")
    code, _, err = call(*again)
    assert code == 2
    assert err.startswith(f"{gone}The run was started in {tmp_path}"), (
        "the way back, where that may be all that is wrong"
    )


@pytest.mark.parametrize("data", ["nope.csv", "nowhere/photos", "nowhere"])
def test_data_that_is_not_there_is_a_wrong_call(call: Call, tmp_path: Path, data: str) -> None:
    for verb in (["train"], ["data", "check"]):
        code, _, err = call(*verb, data)
        assert (code, data in err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_results_do_not_go_among_the_photos_and_those_that_did_do_no_harm(
    call: Call, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    code, _, err = call("train", ".", *QUICK)
    assert code == 2
    assert (
        "runs/train-1, inside the data folder ., which would then hold more than data\n" in err
        and "Give --out a folder elsewhere." in err
    )
    assert sorted(path.name for path in photos.iterdir()) == ["green", "red"]
    code, _, err = call("train", ".", *QUICK, "--out", "../run")
    assert code == 0, err
    (photos / "runs").mkdir()
    (tmp_path / "run").rename(photos / "runs" / "train-1")
    shutil.rmtree(photos / "runs" / "train-1" / "bundle")
    code, _, err = call("train", "--resume", "runs/train-1", "--threads", "1", "--quiet")
    assert code == 0, err
    code, out, err = call("train", ".", *QUICK, "--out", "../again", "--dry-run")
    assert code == 0, err
    assert "ignored, because they hold runs of vitlab: runs" in out


# --- what it does -----------------------------------------------------------------------------------------------------


def test_dry_run_reports_and_writes_nothing(call: Call, photos: Path, tmp_path: Path) -> None:
    code, out, _ = call("train", str(photos), *QUICK, "--dry-run", "--set", "model.patch=8")
    assert code == 0
    rows = {line[:10].strip(): line[11:] for line in out.splitlines()}
    assert rows["out"] == "runs/train-1"
    assert rows["images"] == "2 classes: 14 to train on, 2 for validation, 4 to test on"
    assert rows["chosen"].startswith("14 images of 2 classes to train on")
    assert "2x2 patches" in rows["warnings"]
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_copies_stay_in_one_part_also_when_the_run_resumes(call: Call, photos: Path, tmp_path: Path) -> None:
    for path in list(photos.rglob("*.png")):
        shutil.copy(path, path.with_stem(f"{path.stem} (1)"))
    code, out, err = call("train", str(photos), *QUICK, "--out", "run", "--json")
    assert code == 0, err
    assert not [line for line in json.loads(out)["warnings"] if "two parts" in line or "trained on, too" in line]
    parts: dict[str, set[str]] = {}
    for row in csv.DictReader((tmp_path / "run" / "split.csv").read_text().splitlines()):
        parts.setdefault(row["path"].replace(" (1)", ""), set()).add(row["split"])
    assert len(parts) == 20 and {len(found) for found in parts.values()} == {1}
    shutil.rmtree(tmp_path / "run" / "bundle")
    code, _, err = call("train", "--resume", "run", "--threads", "1", "--quiet")
    assert code == 0, err


@pytest.mark.slow
def test_copies_in_a_given_split_are_kept_and_also_in_the_report(call: Call, photos: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(photos, tmp_path / "given" / part)
    code, out, err = call("train", "given", *QUICK, "--out", "run", "--json")
    assert code == 0, err
    reported = json.loads(out)["warnings"]
    assert reported[0].startswith("The same in two parts: 20")
    assert reported[1].startswith("18 test or validation images are trained on, too"), "2 were held out for validation"
    assert "The same in two parts" in (tmp_path / "run" / "report.html").read_text()


def test_more_bad_files_than_are_allowed_are_reported_before_training(call: Call, photos: Path, tmp_path: Path) -> None:
    for name in "ab":
        (photos / "red" / f"{name}.jpg").write_bytes(b"no picture")
    code, _, err = call("train", str(photos), *QUICK, "--out", "run", "--set", "data.max_bad=1")
    assert code == 2
    assert "2 files cannot be used, and data.max_bad allows 1\n" in err and "--set data.max_bad=2." in err
    assert not (tmp_path / "run").exists()


def test_data_named_twice_are_refused(call: Call, photos: Path) -> None:
    code, _, err = call("train", str(photos), *QUICK, "--set", "data.source=other")
    assert code == 2
    assert f"the data were named twice: {photos}, and data.source=other" in err


@pytest.mark.slow
def test_recipe_brings_its_data_where_none_is_given(call: Call, photos: Path, tmp_path: Path) -> None:
    short = ["--set", "train.steps=2", "--set", "train.epochs=none", *QUICK[:5]]
    code, _, err = call("train", "--recipe", "laptop-digits", *short, "--out", "run")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "env.json").read_text())["command"].startswith("vitlab train digits ")
    text = 'title = "mine"\n[model]\nname = "ViT-Ti/16"\n[train]\nsteps = 1\n'
    for data in ("", "[data]\nsource = 3\n"):
        (tmp_path / "mine.toml").write_text(text + data)
        for dry in ([], ["--dry-run"]):
            code, _, err = call("train", "--recipe", "mine.toml", *dry)
            assert code == 2
            assert "give the data to train on, a --recipe that names some" in err


def test_model_of_another_family_than_the_chosen_one_is_planned(call: Call, photos: Path) -> None:
    found = call("train", str(photos), "--model", "BiT-R26x1", "--dry-run", "--json", "--device", "cpu")
    assert found.code == 0 and json.loads(found.out)["model"] == "BiT-R26x1"


@pytest.mark.parametrize(
    "recipe", [[], ["--recipe", "laptop-digits", "--set", "data.mode=RGB"]], ids=["chosen", "named"]
)
def test_learning_rate_kept_while_the_batch_changes_is_reported(call: Call, photos: Path, recipe: list[str]) -> None:
    def notes(*more: str) -> list[str]:
        start = recipe or ["--init", "scratch"]
        printed = call("train", str(photos), *start, "--device", "cpu", "--dry-run", "--json", *more)
        assert printed.code == 0, printed.err
        return [note for note in json.loads(printed.out)["notes"] if "learning rate stays" in note]

    (note,) = notes("--batch-size", "4")
    found = re.fullmatch(
        r"the batch is 4 instead of (\d+), and the learning rate stays (\S+); in proportion it would be --lr (\S+)",
        note,
    )
    assert found is not None, note
    before, rate, scaled = map(float, found.groups())
    assert scaled == pytest.approx(rate * 4 / before, rel=0.06), "two digits are shown"
    assert notes() == notes("--batch-size", f"{before:.0f}") == notes("--batch-size", "4", "--lr", "0.001") == []


def test_dry_run_reports_what_was_found_and_what_is_held_out(call: Call, photos: Path) -> None:
    (photos / "red" / "broken.jpg").write_bytes(b"no picture")
    found = json.loads(call("train", str(photos), *QUICK, "--dry-run", "--json").out)
    assert "Files that cannot be used: 1 (red/broken.jpg)" in found["warnings"]
    assert "test and validation images: held out of the training images by a stratified split" in found["notes"]
    out = call("train", str(photos), *QUICK, "--dry-run").out
    assert all(note in out for note in found["notes"])


@pytest.mark.slow
def test_command_that_is_kept_makes_the_same_run(call: Call, photos: Path, tmp_path: Path) -> None:
    code, _, err = call("train", str(photos), *QUICK, "--out", "of two", "--seeds", "2", "--seed", "3")
    assert code == 0, err
    kept = json.loads((tmp_path / "of two" / "seed-3" / "env.json").read_text())["command"]
    words = shlex.split(kept)
    assert words[:3] == ["vitlab", "train", str(photos)]
    again = [{"of two": "again"}.get(word, word) for word in words[1:]]
    code, _, err = call(*again, "--quiet")
    assert code == 0, err
    for seed in ("seed-3", "seed-4"):
        first, second = (tmp_path / name / seed / "bundle" / "model.safetensors" for name in ("of two", "again"))
        assert first.read_bytes() == second.read_bytes()


def test_printed_config_is_the_one_that_is_run(call: Call, photos: Path, tmp_path: Path) -> None:
    code, out, _ = call("train", str(photos), *QUICK, "--print-config")
    assert code == 0
    start(call, photos)
    stored = config.load_toml(tmp_path / "start" / "config.toml")
    assert config.parse_toml(out, "printed") == stored
    as_json = json.loads(call("train", str(photos), *QUICK, "--print-config", "--json").out)
    assert as_json["optim"] == stored["optim"]


@pytest.mark.slow
def test_seeds_give_mean_and_range(call: Call, photos: Path, tmp_path: Path) -> None:
    code, out, err = call("train", str(photos), *QUICK, "--out", "three", "--seeds", "3", "--seed", "5", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [row["seed"] for row in found["seeds"]] == [5, 6, 7]
    assert len({(tmp_path / row["run"] / "split.csv").read_bytes() for row in found["seeds"]}) == 1
    code, out, _ = call("train", str(photos), *QUICK, "--out", "again", "--seeds", "3", "--seed", "5")
    values = [row["test"]["top1"] for row in found["seeds"]]
    assert f"3 seeds: mean {sum(values) / 3:.1%}, {min(values):.1%} to {max(values):.1%}." in out


def test_run_without_test_images_reports_that_at_the_end(call: Call, photos: Path) -> None:
    code, out, err = call("train", str(photos), *QUICK, "--out", "run", "--set", "data.test_frac=0")
    assert code == 0, err
    printed = "Not tested, for no images were kept to test on; `vitlab evaluate run DATA` does it with others."
    assert out.splitlines()[0] == printed


def test_resolution_is_raised_from_a_start_of_fewer_pixels(call: Call, photos: Path, tmp_path: Path) -> None:
    """Positions of the old grid are resized, all other weights kept; the new model sees more patches."""
    from vitlab.engines.classifier import load

    first = start(call, photos, "--set", "model.pos=learned")
    more = [
        "--init",
        first,
        "--set",
        "data.image_size=[32,32]",
        "--set",
        "train.method=steps",
        "--set",
        "optim.lr=1e-9",
        "--set",
        "train.epochs=1",
    ]
    code, _, err = call("train", str(photos), "--threads", "1", "--device", "cpu", "--out", "larger", *more)
    assert code == 0, err
    old, new = (load(tmp_path / name, device="cpu").model for name in (first, "larger"))
    assert (old.spec.grid, new.spec.grid) == ((4, 4), (8, 8))
    assert "grid 4x4 -> 8x8" not in err  # a detail, for the log
    assert "grid 4x4 -> 8x8" in (tmp_path / "larger" / "log.txt").read_text("utf-8")
    assert new.state_dict()["pos.table"].numel() == 4 * old.state_dict()["pos.table"].numel()
    name = "blocks.0.mlp.fc1.weight"
    torch.testing.assert_close(old.state_dict()[name], new.state_dict()[name], atol=1e-5, rtol=0)


def test_sweep_chooses_on_held_out_training_images_and_tests_once(call: Call, photos: Path, tmp_path: Path) -> None:
    code, out, err = call("train", str(photos), *QUICK, "--out", "swept", "--sweep", "optim.lr=1e-9,0.02", "--json")
    assert code == 0, err
    found = json.loads(out)
    swept = tmp_path / "swept"
    assert sorted(path.name for path in swept.iterdir() if path.is_dir()) == ["final", "try-1", "try-2"]
    assert json.loads((swept / "sweep.json").read_text()) == found["sweep"]
    best = max(found["sweep"], key=lambda row: (row["top1"], -row["loss"]))["value"]
    assert config.load_toml(swept / "final" / "config.toml")["optim"]["lr"] == float(best)
    parts = {name: _parts(swept / name) for name in ("try-1", "try-2", "final")}
    assert parts["try-1"] == parts["try-2"]
    assert set(parts["try-1"]) == {"train", "val"}, "no try has seen a test image"
    assert set(parts["final"]) == {"train", "test"}
    assert parts["final"]["train"] == parts["try-1"]["train"] | parts["try-1"]["val"]
    assert found["run"].endswith("final")
    assert "Sweep" in (swept / "final" / "report.html").read_text()
    assert not (swept / "try-1" / "report.html").exists()


def _parts(folder: Path) -> dict[str, set[str]]:
    rows = [line.split(",") for line in (folder / "split.csv").read_text().splitlines()[1:]]
    return {part: {row[0] for row in rows if row[2] == part} for part in {row[2] for row in rows}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "key", "values"),
    [
        ("model.name=ViT-w16d1m32h2/4,ViT-w16d2m32h2/4", "depth", [1, 2]),
        ("data.image_size=8,16", "image_size", [[8, 8], [16, 16]]),
    ],
)
def test_sweep_over_models_and_image_sizes_trains_each_of_them(
    call: Call, photos: Path, tmp_path: Path, sweep: str, key: str, values: list[Any]
) -> None:
    code, _, err = call("train", str(photos), *QUICK, "--out", "swept", "--sweep", sweep)
    assert code == 0, err
    tried = [config.load_toml(tmp_path / "swept" / f"try-{number}" / "config.toml")["model"] for number in (1, 2)]
    assert [model[key] for model in tried] == values
    assert tried[0]["pool"] == tried[1]["pool"] == "gap", "what was chosen beside the name stays"
    code, _, err = call("train", "--resume", "swept", "--quiet")
    assert code == 0, err


def test_full_disk_says_how_to_resume(call: Call, photos: Path) -> None:
    def full(_operation: fsio.Operation, path: Path) -> None:
        if "step-" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with fsio.intercept(full):
        code, _, err = call("train", str(photos), *QUICK, "--out", "out")
    assert (code, "No space left" in err, "vitlab train --resume out" in err) == (1, True, True), err
    assert call("train", "--resume", "out", "--quiet")[0] == 0


def test_what_a_linear_probe_would_ignore_is_reported_or_refused(call: Call, photos: Path) -> None:
    place = ("train", str(photos), "--init", start(call, photos), "--device", "cpu", "--dry-run")
    code, out, err = call(*place, "--set", "optim.lr=3")
    assert (code, "optim.lr: of no effect on a linear probe" in out) == (0, True), err
    refused = {
        ("--sweep", "optim.lr=1,2"): "optim.lr changes nothing where a linear probe is fitted",
        ("--set", "train.method=probe", "--set", "optim.train=lora"): "optim.train=lora needs train.method=steps",
        ("--set", "teacher=start", "--set", "objective.distillation.weight=1"): "a teacher needs train.method=steps",
        ("--set", "model.name=ViT-Ti/4"): "model.name=ViT-Ti/4 would be ignored",
        ("--set", "model.depth=3"): "the start weights have model.depth = 2",
        ("--sweep", "model.depth=2,3"): "the start weights have model.depth = 2",
    }
    for wrong, printed in refused.items():
        code, _, err = call(*place, *wrong)
        assert (code, printed in err) == (2, True), err
    code, _, err = call(*place, "--set", f"model.name={BODY}")  # the model that it is
    assert code == 0, err


FRACTALS = "ViT-w64d4m128h4/2"  # of laptop-fractals, which sees grey images
SHORT = [
    *("--threads", "1", "--device", "cpu", "--set", "train.steps=2", "--set", "train.batch_size=4"),
    *("--set", "schedule.warmup=1", "--set", "train.precision=fp32"),
]


def pretrain(call: Call, photos: Path) -> str:
    """By one recipe, to be transferred by another that was written for a ViT-B/16 and colours."""
    made = ("--recipe", "laptop-fractals", "--set", "model.pool=gap", "--set", "model.dropout=0.1", "--quiet")
    code, _, err = call("train", str(photos), *made, *SHORT, "--out", "pretrained")
    assert code == 0, err
    return "pretrained"


@pytest.mark.slow
def test_recipe_takes_the_body_of_start_weights_and_reports_it(call: Call, photos: Path, tmp_path: Path) -> None:
    place = ("train", str(photos), "--recipe", "transfer-pets", "--init", pretrain(call, photos), *SHORT)
    place = (*place, "--set", "data.image_size=16")
    model = f"{FRACTALS} with pool=gap, as the start weights have it; the recipe says ViT-B/16 with pool=cls"
    pixels = "pixels: mode=L, as the start weights have it; the recipe says mode=RGB"
    code, out, err = call(*place, "--dry-run", "--json")
    assert code == 0, err
    reported = json.loads(out)
    assert (reported["model"], reported["started"]) == (FRACTALS, model)
    assert pixels in reported["notes"]
    code, _, err = call(*place, "--out", "run")
    assert code == 0, err
    assert f"model: {model}\n" in err and pixels in err
    stored = config.load_toml(tmp_path / "run" / "config.toml")
    body = {"width": 64, "depth": 4, "patch": 2, "pool": "gap", "in_channels": 1}
    recipes_own = {"image_size": [16, 16], "num_classes": 2, "head": "linear", "dropout": 0.0}
    assert {key: stored["model"][key] for key in {**body, **recipes_own}} == {**body, **recipes_own}
    assert (stored["optim"]["name"], stored["data"]["crop"]["crop_frac"]) == ("sgd-paper", 0.8571428571428571)
    code, _, err = call("train", "--resume", "run")
    assert (code, "all steps are already done" in err) == (0, True), err


def test_what_contradicts_start_weights_is_refused_with_advice(call: Call, photos: Path, tmp_path: Path) -> None:
    init = pretrain(call, photos)
    place = ("train", str(photos), "--recipe", "transfer-pets", *SHORT, "--set", "data.image_size=16", "--dry-run")
    leave = "The start weights decide the model: leave out what says otherwise."
    refused = {
        ("--init", init, "--set", "model.depth=3"): ("the start weights have model.depth = 4, but", leave),
        ("--init", init, "--set", "model.pos=none"): ("the start weights have model.pos = learned, but", leave),
        ("--init", init, "--set", "model.head=mlp-tanh"): ("start weights get a linear head", leave),
        ("--init", init, "--set", "model.name=ViT-S/2"): ("model.name=ViT-S/2 would be ignored", "Leave the name out;"),
        ("--init", init, "--set", "model.pol=gap"): ("unknown config key 'model.pol'", "Nearest: "),
        ("--init", init, "--set", "data.image_size=15"): (
            f"the images do not fit the start weights, {FRACTALS}: patch 2 does not divide the 15x15 image",
            "Nearest image size that works: 16,16. Give it with --set data.image_size.",
        ),
        ("--init", "nowhere"): ("nowhere does not exist", ""),
        ("--init", "ViT-S/16@augreg-i12k"): ("unknown checkpoint 'ViT-S/16@augreg-i12k'", "Nearest: "),
        # What the recipe starts from itself must fit it.
        ("--set", f"init={init}"): (
            "the start weights have model.width = 64, but the recipe says 768",
            f"With --init {init} the start weights decide the model, and the recipe all else.",
        ),
    }
    for wrong, (printed, hint) in refused.items():
        code, out, err = call(*place, *wrong)
        assert (code, out) == (2, ""), wrong
        reported, *advice = err.splitlines()
        assert reported.startswith(f"vitlab: {printed}"), err
        assert " ".join(advice).startswith(hint), err
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "transfer-imagenet"\nmodel.pol = "gap"\n')
    code, _, err = call(*place[:2], "--recipe", "mine.toml", *place[4:], "--init", init)
    assert (code, "unknown config key 'model.pol'" in err) == (2, True), err


PROBE = ("--set", "train.method=probe")
RECIPE = """
title = "mine"
data.image_size = 16
model.name = "ViT-w16d2m32h2/4"
train = {method = "probe", epochs = 1, batch_size = 8}
optim.lr = 1.0
"""


@pytest.mark.parametrize("what", slow_after(1, ["full", "last:1", "lora"]))
def test_linear_probe_trains_no_more_than_a_head(call: Call, photos: Path, tmp_path: Path, what: str) -> None:
    place = ("train", str(photos), "--device", "cpu", "--threads", "1", "--out", "run")
    more = ("--set", f"optim.train={what}")
    (tmp_path / "mine.toml").write_text(f'{RECIPE}optim.train = "{what}"\n')
    (tmp_path / "open.toml").write_text(RECIPE)
    calls = [
        (*PROBE, *more),
        (*PROBE, *more, "--dry-run"),
        ("--init", start(call, photos), *PROBE, *more),
        ("--recipe", "mine.toml"),
        ("--recipe", "open.toml", *more),
        ("--sweep", "train.method=steps,probe", *more, "--model", BODY, "--set", "data.image_size=16"),
        ("--sweep", "objective.label_smoothing=0.0,0.1", *PROBE, *more),
    ]
    for wrong in calls:
        code, out, err = call(*place, *wrong)
        assert (code, out) == (2, ""), wrong
        reported, hint = err.splitlines()
        assert reported == f"vitlab: optim.train={what} needs train.method=steps: train.method=probe fits a head alone"
        assert hint.startswith(f"For {what}, drop train.method=probe or write steps; for a head, ")
        assert not (tmp_path / "run").exists()
    for right in ("train.method=steps", "optim.train=head"):
        code, _, err = call(*place, "--recipe", "mine.toml", "--set", right, "--dry-run")
        assert code == 0, err


@pytest.fixture
def fitted_once(call: Call, photos: Path, tmp_path: Path) -> tuple[str, ...]:
    """A head fitted by `open.toml`, which does not say what to train, in `run`; gives the call without its recipe."""
    (tmp_path / "open.toml").write_text(RECIPE)
    place = ("train", str(photos), "--device", "cpu", "--threads", "1", "--quiet")
    code, _, err = call(*place, "--recipe", "open.toml", "--out", "run")
    assert code == 0, err
    return place


def test_recipe_without_trained_parts_is_a_linear_probe_and_its_config_is_a_recipe(
    call: Call, fitted_once: tuple[str, ...], tmp_path: Path
) -> None:
    place = fitted_once
    assert config.load_toml(tmp_path / "run" / "config.toml")["optim"]["train"] == "head"
    code, _, err = call(*place, "--recipe", "run/config.toml", "--dry-run")
    assert code == 0, err
    swept = ("--recipe", "open.toml", "--sweep", "train.method=steps,probe", "--dry-run")
    assert call(*place, *swept).code == 0, "nobody has said what the probe should train"


@pytest.mark.slow
def test_sweep_of_a_linear_probe_ends_with_the_regularisation_that_was_best(
    call: Call, photos: Path, tmp_path: Path
) -> None:
    swept = ("--sweep", "objective.label_smoothing=0.0,0.1", "--out", "swept", "--device", "cpu", "--quiet")
    code, _, err = call("train", str(photos), "--init", start(call, photos), *swept)
    assert code == 0, err
    log = (tmp_path / "swept" / "final" / "log.txt").read_text()
    assert re.search(r"cross-validation: .* validation images right with l2 .*; fitted again on all", log)


def test_config_of_a_run_is_a_recipe_for_other_data_and_sizes_but_not_for_another_name(
    call: Call, photos: Path, tmp_path: Path
) -> None:
    recipe = ("--recipe", f"{start(call, photos)}/config.toml", "--dry-run", "--device", "cpu")
    other = paint(tmp_path / "other", {"green": 10, "red": 10, "sky": 10})
    code, out, err = call("train", str(other), *recipe, "--set", "data.image_size=24")
    assert (code, "3 classes" in out) == (0, True), err
    code, _, err = call("train", str(photos), *recipe, "--model", "ViT-S/16")
    assert (code, "model.name=ViT-S/16 would be ignored" in err) == (2, True)


def test_sweep_of_a_recipe_takes_its_own_rates_and_its_own_share(call: Call, photos: Path) -> None:
    settings = [*QUICK, "--recipe", "transfer-pets", "--init", "scratch", "--set", "train.precision=fp32"]
    code, out, err = call("train", str(photos), *settings, "--sweep", "optim.lr", "--dry-run")
    assert code == 0, err
    assert "optim.lr = 0.001, 0.003, 0.01, 0.03: 4 runs" in out


def test_val_without_test_is_tested_on_and_never_used_for_validation(call: Call, tmp_path: Path) -> None:
    paint(tmp_path / "photos" / "train", {"green": 12, "red": 12})
    paint(tmp_path / "photos" / "val", {"green": 4, "red": 4}, side=24)
    code, _, err = call("train", "photos", *(word for word in QUICK if word != "--quiet"), "--out", "run")
    assert code == 0, err
    assert "val/ is the test set, since there is no test/; it is not used for validation" in err
    found = _parts(tmp_path / "run")
    assert len(found["test"]) == 8 and all("val/" in name for name in found["test"])
    assert found["val"] and all("train/" in name for name in found["val"] | found["train"])


def test_json_is_one_document_and_the_reason_is_in_the_log(call: Call, photos: Path, tmp_path: Path) -> None:
    code, out, _ = call("train", str(photos), *QUICK, "--out", "run", "--json")
    assert code == 0
    found = json.loads(out)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert [f"warning: {line}" for line in found["warnings"]] == [
        x for x in log.splitlines() if x.startswith("warning")
    ]
    assert f"Chosen: {found['reason']}." in (tmp_path / "run" / "log.txt").read_text().splitlines()
    page = (tmp_path / "run" / "report.html").read_text()
    for title in ("Training", "Confusion", "Classes", "What the model attended to"):
        assert f"<h2>{title}</h2>" in page


def test_batch_beside_a_recipe_that_leaves_it_open_is_taken(call: Call, photos: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'title = "mine"\n[data]\nimage_size = [16, 16]\n[model]\nname = "ViT-mu/4"\n[train]\nsteps = 2\n[optim]\nlr = 0.001\n'
    )
    code, out, err = call("train", str(photos), "--recipe", str(recipe), "--batch-size", "8", "--dry-run")
    assert code == 0, err
    assert "mine" in out


@pytest.mark.slow
def test_comparison_knows_the_columns_that_a_run_was_trained_with(call: Call, photos: Path, tmp_path: Path) -> None:
    table = tmp_path / "odd.csv"
    files = sorted(photos.rglob("*.png"))
    table.write_text("file,kind\n" + "".join(f"{path},{path.parent.name}\n" for path in files))
    quick = ["--model", "ViT-mu/4", "--epochs", "1", "--image-size", "16", "--device", "cpu", "--threads", "1"]
    for name in ("one", "two"):
        more = ["--columns", "path=file,label=kind", "--out", name, "--seed", str((name == "two" and 1) or 0)]
        code, _, err = call("train", str(table), *quick, *more)
        assert code == 0, err
    code, _, err = call("compare", "one", "two", "--out", "judged", "--threads", "1", "--device", "cpu")
    assert code == 0, err
    assert (tmp_path / "judged" / "curves.html").is_file()
