"""Noisy Student from call to report: who sees noise and who does not, what is never learnt, what is recorded, resuming."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.core import fsio
from vitlab.core.errors import FileProblem, UsageError
from vitlab.core.planned import Planned
from vitlab.data.sources.opening import open_data
from vitlab.engines import inference
from vitlab.engines.classifier import load
from vitlab.models import ops
from vitlab.models.build import create_model
from vitlab.models.vit import ViT
from vitlab.pipelines.noisy_student_run import NoisyStudentResult, _worse, noisy_student, noisy_student_config
from vitlab.report.noisy_student_page import build_noisy_student_page
from vitlab.report.page import render
from vitlab.runs.evaluation.evaluation_run import evaluate
from vitlab.runs.training.training_run import train
from vitlab.training import assemble
from vitlab.training.pseudo_labels import read_pseudo_labels
from vitlab.weights.hashing import hash_weights

SOAK = os.environ.get("VITLAB_SOAK") == "1"
CLASSES = ("left", "right", "top")
MODEL = "ViT-w16d2m32h2/4"
RECIPE = f"""
title = "Halves"
[data]
source = "set by the call"
image_size = [8, 8]
mode = "L"
crop.how = "whole"
augment.mirror = 0.0
[model]
name = "{MODEL}"
[train]
steps = 10
batch_size = 8
save_every = 5
[optim]
lr = 5e-3
"""
QUIETLY: dict[str, Any] = {"device": "cpu", "threads": 1, "quiet": True}


def pictures(count: int, seed: int) -> tuple[Any, Any]:
    """Noise with one half brighter: which half is the class."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % len(CLASSES)
    images = draw.integers(0, 120, (count, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        half = [np.s_[:, :4], np.s_[:, 4:], np.s_[:4, :]][label]
        image[half] += 100
    return images, labels


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled images to train and test on, and a folder of photos without labels, of which two are test images."""
    place = tmp_path_factory.mktemp("noisy")
    (train_images, train_labels), (test_images, test_labels) = pictures(30, 0), pictures(30, 1)
    np.savez(
        place / "labelled.npz",
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=list(CLASSES),
    )
    (place / "recipe.toml").write_text(RECIPE)
    (place / "photos").mkdir()
    for i, image in enumerate(pictures(60, 2)[0]):
        Image.fromarray(image).save(place / "photos" / f"{i:03}.png")
    for i in (0, 7):
        Image.fromarray(test_images[i]).save(place / "photos" / f"test-{i}.png")
    Image.fromarray(train_images[3]).save(place / "photos" / "train-3.png")
    return place


BRIEFLY: dict[str, Any] = {"overrides": ["train.steps=1"]}  # where it does not matter what teacher and student learn


def call(data: Path, out: Path, **more: Any) -> Any:
    given: dict[str, Any] = {"unlabelled": data / "photos", "recipe": str(data / "recipe.toml")}
    return noisy_student(data / "labelled.npz", out=out, **{**QUIETLY, **given, **more})


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> NoisyStudentResult:
    return call(data, tmp_path_factory.mktemp("done") / "out", generations=2, finish=True)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher") / "run"
    return train(data / "labelled.npz", out=out, recipe=str(data / "recipe.toml"), **QUIETLY).run


@pytest.fixture(scope="module")
def taught(data: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> NoisyStudentResult:
    """One generation of a teacher that was given."""
    return call(data, tmp_path_factory.mktemp("taught") / "out", teacher=trained, **BRIEFLY)


# --- a whole one ------------------------------------------------------------------------------------------------------


def test_every_generation_is_an_ordinary_run_with_its_report(done: NoisyStudentResult) -> None:
    for name in ("generation-0", "generation-1", "generation-2", "finish"):
        folder = done.out / name
        assert (folder / "report.html").is_file()
        assert json.loads((folder / "run.json").read_text())["progress"]["finished"]
        assert load(folder, device="cpu").labels == CLASSES
    assert (done.run, done.bundle) == (done.out / "finish", done.out / "finish" / "bundle")


def test_the_record_has_models_counts_thresholds_accuracies_and_margins(done: NoisyStudentResult) -> None:
    record = json.loads((done.out / "noisy_student.json").read_text())
    assert record["finished"]
    assert record["command"].startswith("vitlab noisy-student ")
    assert record["generations"] == json.loads(json.dumps(done.generations))
    first, second = record["generations"]
    assert [first["teacher"]["run"], second["teacher"]["run"]] == ["generation-0", "generation-1"]
    assert second["teacher"]["weights"] == first["weights"] == hash_weights(load(done.out / "generation-1").model.cpu())
    for row in (first, second):
        found = row["pseudo_labels"]
        assert (found["images"], found["left_out"], found["threshold"]) == (60, 3, 0.3)
        assert found["kept"] == sum(one["kept"] for one in found["classes"])
        assert row["test"]["n"] == row["margin"]["n"] == 30
        low, high = row["margin"]["interval"]
        assert low <= row["margin"]["difference"] <= high
        assert row["margin"]["difference"] == pytest.approx(row["test"]["top1"] - row["teacher"]["test"]["top1"])
        assert found["accuracy"] is None  # loose photos have no labels
        assert row["labelled_share"] == pytest.approx(0.25, abs=0.25)
    assert len({record["teacher"]["weights"], first["weights"], second["weights"]}) == 3


def test_the_json_has_the_promised_keys(done: NoisyStudentResult) -> None:
    shown = json.loads(json.dumps(dataclasses.asdict(done), default=str))
    assert {"out", "run", "bundle", "report", "teacher", "generations", "finish", "test", "seconds"} <= shown.keys()
    assert shown["test"]["top1"] == shown["finish"]["test"]["top1"]


def test_page_and_printed_lines_report_the_generations(done: NoisyStudentResult) -> None:
    page = done.report.read_text()
    for text in (
        "Generations",
        "Pseudo-labels 1",
        "Pseudo-labels 2",
        "Classes",
        "data:image/png",
        "generation-2/report.html",
    ):
        assert text in page
    printed = "\n".join(done.sentences())
    for text in (
        "Teacher",
        "Generation 1",
        "Generation 2",
        "Finish",
        "its teacher (",
        "the student that it came from (",
        str(done.report),
    ):
        assert text in printed


@pytest.mark.slow
def test_validation_images_decide_whether_the_finish_is_delivered(data: Path, tmp_path: Path) -> None:
    """At a rate ten thousand times too high, the finish forgets everything."""
    images, labels = pictures(150, 4)
    np.savez(tmp_path / "all.npz", images=images, labels=labels, classes=list(CLASSES))
    changes = ["noisy_student.finish_lr_frac=1e4", "noisy_student.finish_steps=5", "noisy_student.randaugment=none"]
    changes += ["optim.max_grad_norm=inf", "data.val_frac=0.4", "train.steps=20", "train.batch_size=16"]
    held_out = noisy_student(
        tmp_path / "all.npz",
        unlabelled=data / "photos",
        recipe=str(data / "recipe.toml"),
        out=tmp_path / "held-out",
        finish=True,
        overrides=changes,
        **QUIETLY,
    )
    assert held_out.finish is not None
    assert held_out.finish["validation"]["finish"] < held_out.finish["validation"]["student"]
    assert held_out.run == held_out.out / "generation-1"
    assert held_out.test["top1"] == held_out.generations[0]["test"]["top1"]
    assert f"so {held_out.run} is delivered" in "\n".join(held_out.warnings)
    assert json.loads((held_out.out / "noisy_student.json").read_text())["delivered"] == "generation-1"
    again = noisy_student(resume=held_out.out, **QUIETLY)
    assert again.warnings == held_out.warnings  # and not each of them twice
    assert again.run == held_out.run


def test_a_finish_without_validation_images_is_delivered_with_a_warning(done: NoisyStudentResult) -> None:
    assert any("no validation images show" in warning for warning in done.warnings)


def test_what_is_worse_beyond_chance_is_a_warning() -> None:
    margin = {"over": "generation-1", "difference": -0.2953, "interval": [-0.34, -0.25]}
    (printed,) = _worse({"run": "finish", "margin": margin})
    assert printed == "finish is worse than generation-1 on the test images: -29.53 points (-34.00 to -25.00)"
    assert _worse({"run": "finish", "margin": {**margin, "interval": [-0.34, 0.0]}}) == []
    assert _worse({"run": "finish", "margin": None}) == []


def test_the_page_links_all_runs_and_says_where_the_classes_are_cut(done: NoisyStudentResult) -> None:
    record = json.loads((done.out / "noisy_student.json").read_text())
    assert "generation-0/report.html" in done.report.read_text()
    found = record["generations"][-1]["pseudo_labels"]
    assert "These are the first" not in done.report.read_text()
    found["classes"] = [{**found["classes"][0], "label": f"class {i}"} for i in range(61)]
    page = render(build_noisy_student_page(record, [[], []], title="Many"))
    assert "These are the first 60 of 61 classes" in page
    record["teacher"]["run"] = "/elsewhere/run"
    assert "generation-0/report.html" not in render(build_noisy_student_page(record, [[], []], title="Given"))


def test_loading_the_folder_names_the_run_that_is_the_result(done: NoisyStudentResult, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="holds the runs of `vitlab noisy-student`") as caught:
        load(done.out)
    assert caught.value.hint == f"Load {done.run}."
    (tmp_path / "noisy_student.json").write_text("{}")
    with pytest.raises(FileProblem) as caught:
        load(tmp_path)
    assert f"--resume {tmp_path}" in str(caught.value.hint)
    for number in (0, 9, 10):
        (tmp_path / f"generation-{number}" / "bundle").mkdir(parents=True)
    with pytest.raises(FileProblem) as caught:
        load(tmp_path)
    assert caught.value.hint == f"Load {tmp_path / 'generation-10'}."


def test_pseudo_labels_are_the_teachers_probabilities_without_noise(done: NoisyStudentResult, data: Path) -> None:
    """The second teacher has dropout and stochastic depth: in train mode, its answers would differ."""
    for number in (1, 2):
        labels = read_pseudo_labels(done.out / f"pseudo_labels-{number}.npz")
        teacher = load(done.out / f"generation-{number - 1}", device="cpu")
        wanted = teacher.logits([Path(name) for name in labels.names]).softmax(dim=1)
        torch.testing.assert_close(labels.probabilities_NK, wanted, rtol=1e-4, atol=1e-5)
        assert labels.teacher == hash_weights(teacher.model)
        assert labels.classes == CLASSES
    spec = load(done.out / "generation-1", device="cpu").model.spec
    assert (spec.dropout, spec.stochastic_depth) == (0.1, 0.2)  # type: ignore[union-attr]


def test_test_images_among_the_unlabelled_are_neither_labelled_nor_learnt(done: NoisyStudentResult) -> None:
    left_out = json.loads((done.out / "left_out.json").read_text())
    shown = {Path(row["image"]).stem: row["shows"] for row in left_out}
    assert shown == {"test-0": "test", "test-7": "test", "train-3": "train"}
    for number in (1, 2):
        names = read_pseudo_labels(done.out / f"pseudo_labels-{number}.npz").names
        assert len(names) == 60
        assert not [name for name in names if Path(name).stem.startswith(("test", "train"))]
        rows = (done.out / f"generation-{number}" / "split.csv").read_text().splitlines()
        learnt = [row for row in rows if row.endswith(",train")]
        assert not [row for row in learnt if "/test-" in row or "/train-3" in row]
        assert [row for row in learnt if row.startswith("unlabelled/")]


def test_the_student_saw_noise_and_the_teacher_did_not(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    augmented, dropped = list[str](), list[float]()
    real_augment, real_drop = assemble.augment, ops.drop_path

    def augment(images: Any, ids: Any, rule: Any, **keys: Any) -> Any:
        made = real_augment(images, ids, rule, **keys)
        if not torch.equal(made, images):
            augmented.append(rule.randaugment)
        return made

    def drop_path(x: Any, rate: float) -> Any:
        dropped.extend([rate] if rate else [])
        return real_drop(x, rate)

    monkeypatch.setattr(assemble, "augment", augment)
    monkeypatch.setattr(ops, "drop_path", drop_path)
    teacher = call(data, tmp_path / "teacher", **BRIEFLY)
    seen = len([kind for kind in augmented if kind == "torchvision"]), len(dropped)
    assert seen == (1, 2)  # one step of the student: of two blocks, the second drops one of two branches or none
    assert "none" not in augmented
    assert teacher.generations[0]["noise"]["randaugment"].startswith("torchvision")


@pytest.mark.slow
def test_inference_runs_in_eval_mode(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = set[bool]()
    forward = inference.infer

    def infer(function: Any, *rest: Any) -> Any:
        for made in forward(function, *rest):
            modes.add(function.training)
            yield made

    monkeypatch.setattr(inference, "infer", infer)
    call(data, tmp_path / "out", **BRIEFLY)
    assert modes == {False}


@pytest.mark.slow
def test_labels_of_the_student_are_soft_unless_hard_is_asked_for(
    data: Path, trained: Path, taught: NoisyStudentResult, tmp_path: Path
) -> None:
    hard = call(data, tmp_path / "hard", teacher=trained, hard=True, **BRIEFLY)
    soft, firm = taught.generations[0], hard.generations[0]
    assert (soft["pseudo_labels"]["targets"], firm["pseudo_labels"]["targets"]) == ("soft", "hard")
    assert soft["weights"] != firm["weights"]


@pytest.mark.slow
def test_a_share_of_the_data_keeps_its_labels_and_the_rest_is_unlabelled(data: Path, tmp_path: Path) -> None:
    made = call(data, tmp_path / "out", unlabelled=None, labelled=9, **BRIEFLY)
    row = made.generations[0]
    assert (row["labelled_images"], row["pseudo_labels"]["images"] + row["pseudo_labels"]["left_out"]) == (9, 21)
    assert 0 <= row["pseudo_labels"]["accuracy"]["kept"] <= 1
    teacher = (tmp_path / "out" / "generation-0" / "split.csv").read_text().splitlines()
    assert sum(line.endswith(",train") for line in teacher) == 9
    assert sum(line.endswith(",,unlabelled") for line in teacher) == 21
    measured = evaluate(tmp_path / "out" / "generation-1", **QUIETLY)
    assert (measured.n, measured.top1) == (30, made.test["top1"])


@pytest.mark.slow
def test_evaluate_measures_on_what_no_generation_has_learnt(data: Path, tmp_path: Path) -> None:
    """Data without parts: held-out images are known by the split of the run alone."""
    images, labels = pictures(60, 3)
    np.savez(tmp_path / "all.npz", images=images, labels=labels, classes=list(CLASSES))
    made = noisy_student(
        tmp_path / "all.npz",
        labelled_per_class=4,
        threshold=0.4,
        recipe=str(data / "recipe.toml"),
        out=tmp_path / "out",
        **QUIETLY,
    )
    assert made.test["n"] == 12
    for number in (0, 1):
        measured = evaluate(tmp_path / "out" / f"generation-{number}", **QUIETLY)
        assert (measured.part, measured.n) == ("test", 12)


# --- a teacher that is given ------------------------------------------------------------------------------------------


def test_a_given_teacher_is_tested_and_labels(trained: Path, taught: NoisyStudentResult) -> None:
    assert not (taught.out / "generation-0").exists()
    assert taught.teacher["run"] == str(trained)
    assert taught.teacher["test"]["top1"] == evaluate(trained, **QUIETLY).top1
    assert taught.generations[0]["model"] == MODEL


def test_a_teacher_with_its_classes_in_another_order_answers_alike(
    data: Path, trained: Path, taught: NoisyStudentResult, tmp_path: Path
) -> None:
    known = load(trained, device="cpu")
    order = [2, 0, 1]
    model, state = known.model, dict(known.model.state_dict())
    state |= {name: state[name][order] for name in ("head.weight", "head.bias")}
    model.load_state_dict(state)
    labels = [CLASSES[k] for k in order]
    vitlab.save(model, tmp_path / "turned", labels=labels, preprocess=known.preprocess)
    made = [taught, call(data, tmp_path / "out", teacher=tmp_path / "turned", **BRIEFLY)]
    first, second = (read_pseudo_labels(one.out / "pseudo_labels-1.npz").probabilities_NK for one in made)
    torch.testing.assert_close(first, second)
    assert made[0].teacher["test"]["top1"] == made[1].teacher["test"]["top1"]


# --- resuming ---------------------------------------------------------------------------------------------------------


class Crash(Exception):
    """The end of a process, as far as a disk can tell."""


def crash_before(name: str, time: int = 1) -> Callable[[fsio.Operation, Path], None]:
    seen = 0

    def listener(operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += operation == "rename" and path.name == name
        if seen == time:
            raise Crash

    return listener


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "time"),
    [("step-000000005", 2), ("pseudo_labels-1.npz", 1), ("noisy_student.json", 2)][: 3 if SOAK else 1],
)
def test_resumed_anywhere_the_weights_are_those_of_one_go(
    data: Path, tmp_path: Path, done: NoisyStudentResult, name: str, time: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Crash), fsio.intercept(crash_before(name, time)):
        call(data, out, generations=2, finish=True)
    made = noisy_student(resume=out, **QUIETLY)
    for number in (0, 1):
        assert made.generations[number]["weights"] == done.generations[number]["weights"]
    assert made.finish is not None and done.finish is not None
    assert made.finish["weights"] == done.finish["weights"]
    assert made.test == done.test


def test_what_is_finished_is_not_trained_again(done: NoisyStudentResult, tmp_path: Path) -> None:
    shutil.copytree(done.out, tmp_path / "copy")
    steps = {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("model.safetensors")}
    made = noisy_student(resume=tmp_path / "copy", **QUIETLY)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "copy").rglob("model.safetensors")} == steps
    assert [row["weights"] for row in made.generations] == [row["weights"] for row in done.generations]


def test_an_inner_run_cannot_be_resumed_alone(done: NoisyStudentResult) -> None:
    for folder in (done.out / "generation-1", done.out):
        with pytest.raises(UsageError, match="noisy-student") as caught:
            train(resume=folder, **QUIETLY)
        assert caught.value.hint is not None
        assert f"vitlab noisy-student --resume {done.out}" in caught.value.hint


def copied(done: NoisyStudentResult, place: Path) -> Path:
    shutil.copytree(done.out, place)
    return place


def test_resuming_refuses_what_is_not_as_it_was(done: NoisyStudentResult, tmp_path: Path) -> None:
    out = copied(done, tmp_path / "recipe")
    (out / "recipe.toml").write_text((out / "recipe.toml").read_text().replace("threshold = 0.3", "threshold = 0.2"))
    with pytest.raises(UsageError, match=r"recipe\.toml was changed"):
        noisy_student(resume=out, **QUIETLY)
    out = copied(done, tmp_path / "state")
    (out / "noisy_student.json").write_text("{}")
    with pytest.raises(FileProblem, match=r"noisy_student\.json is damaged"):
        noisy_student(resume=out, **QUIETLY)
    (out / "noisy_student.json").write_text('{"format": 1}')
    with pytest.raises(FileProblem, match=r"format 1; this version reads \d"):
        noisy_student(resume=out, **QUIETLY)
    out = copied(done, tmp_path / "labels")
    shutil.copy(out / "pseudo_labels-2.npz", out / "pseudo_labels-1.npz")
    with pytest.raises(FileProblem, match=r"pseudo_labels-1\.npz.*another teacher"):
        noisy_student(resume=out, **QUIETLY)
    out = copied(done, tmp_path / "left-out")
    (out / "left_out.json").write_text('[{"number": 999, "image": "x", "shows": "test"}]')
    with pytest.raises(FileProblem, match=r"left_out\.json is damaged"):
        noisy_student(resume=out, **QUIETLY)
    with pytest.raises(UsageError, match="does not exist"):
        noisy_student(resume=tmp_path / "nowhere", **QUIETLY)
    with pytest.raises(UsageError, match="is not a folder of"):
        noisy_student(resume=tmp_path, **QUIETLY)
    with pytest.raises(UsageError, match="leave --recipe out"):
        noisy_student(resume=done.out, recipe="demo-digits", **QUIETLY)
    with pytest.raises(UsageError, match="leave other-data out"):
        noisy_student("other-data", resume=done.out, **QUIETLY)


@pytest.mark.slow
def test_resuming_elsewhere_says_where_it_began(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(data, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    given: dict[str, Any] = {"recipe": "recipe.toml", **BRIEFLY, **QUIETLY}
    noisy_student("labelled.npz", unlabelled="photos", out=tmp_path / "out", **given)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is not here any more") as caught:
        noisy_student(resume=tmp_path / "out", **QUIETLY)
    assert f"started in {tmp_path / 'here'}" in str(caught.value.hint)
    shutil.copy(data / "labelled.npz", tmp_path)
    with pytest.raises(UsageError) as caught:
        noisy_student(resume=tmp_path / "out", **QUIETLY)
    assert f"started in {tmp_path / 'here'}" in str(caught.value.hint)


def test_unlabelled_images_that_leave_nothing_to_label_are_refused_before_any_work(data: Path, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    shutil.copy(data / "photos" / "test-0.png", tmp_path / "copies")
    with pytest.raises(UsageError, match="all 1 unlabelled images are copies"):
        call(data, tmp_path / "out", unlabelled=tmp_path / "copies")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"not a picture")
    with pytest.raises(FileProblem, match=r"none of the 1 images .*\bread\b"):
        call(data, tmp_path / "out", unlabelled=tmp_path / "broken")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_hint_on_the_threshold_is_a_call_that_works(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"confidence of 0\.99 .*highest is 0\.\d{3}\n") as caught:
        call(data, tmp_path / "out", threshold=0.99, **BRIEFLY)
    assert f"--teacher {tmp_path / 'out' / 'generation-0'} and a lower --threshold" in str(caught.value.hint)
    made = call(data, tmp_path / "next", teacher=tmp_path / "out" / "generation-0", threshold=0.1, **BRIEFLY)
    assert made.generations[0]["pseudo_labels"]["confident"] == 60


@pytest.mark.slow
def test_resuming_refuses_other_images(data: Path, done: NoisyStudentResult, tmp_path: Path) -> None:
    moved = tmp_path / "data"
    shutil.copytree(data, moved)
    call(moved, tmp_path / "out", **BRIEFLY)
    (moved / "photos" / "000.png").unlink()
    with pytest.raises(UsageError, match="unlabelled images changed"):
        noisy_student(resume=tmp_path / "out", **QUIETLY)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_happen_and_does_nothing(data: Path, tmp_path: Path) -> None:
    planned: Any = call(data, tmp_path / "out", dry_run=True, generations=2, student=["ViT-w32d2m64h2/4"], finish=True)
    assert isinstance(planned, Planned)
    would = planned.would
    assert [text.split(",")[0] for text in would["students"]] == ["ViT-w32d2m64h2/4"] * 2
    assert "63 images" in str(would["unlabelled"])
    assert would["finish"] == "at 12x12 pixels"
    assert not (tmp_path / "out").exists()


def test_without_a_recipe_one_is_chosen_from_the_labelled_images(data: Path, tmp_path: Path) -> None:
    planned: Any = call(data, tmp_path / "out", dry_run=True, recipe=None, init="scratch", labelled=9, unlabelled=None)
    assert "9 to train on" in str(planned.would["images"]) or "6 to train on" in str(planned.would["images"])
    assert planned.would["teacher"].endswith("trained first")


def test_the_config_has_every_run(data: Path) -> None:
    table = noisy_student_config(
        data / "labelled.npz", unlabelled=data / "photos", recipe=str(data / "recipe.toml"), finish=True
    )
    assert list(table) == ["generation-0", "generation-1", "finish"]
    assert [one["model"].get("dropout") for one in table.values()] == [0.0, 0.1, 0.0]
    assert table["generation-1"]["noisy_student"]["threshold"] == 0.3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"unlabelled": None}, "no unlabelled images"),
        ({"unlabelled": "nowhere/at-all"}, "does not exist"),
        pytest.param(
            *({"threshold": 1.0, **BRIEFLY}, "no unlabelled image has a confidence of 1"),
            marks=pytest.mark.slow,
            id="threshold",
        ),
        ({"labelled": 2, "unlabelled": None}, "2 labelled images cannot be taken"),
        ({"student": ["ViT-w32d2m64h2/4"] * 3}, "3 models for 1 generations"),
        ({"student": ["ViT-nonsense"]}, "ViT-nonsense"),
        ({"generations": 0}, "at least 1"),
        ({"recipe": "laptop-mae-digits"}, "objective.kind=mae learns without labels"),
        ({"student_overrides": ["objective.kind=mae"]}, "objective.kind=mae learns without labels"),
        ({"overrides": ["noisy_student.confidence=1"]}, "confidence"),
    ],
    ids=str,
)
def test_a_bad_call_is_one_sentence(data: Path, tmp_path: Path, given: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        call(data, tmp_path / "out", **given)
    assert "\n" not in caught.value.what


def test_a_teacher_of_other_classes_is_refused_before_any_work(data: Path, tmp_path: Path) -> None:
    model = create_model(MODEL, num_classes=3, image_size=8, in_channels=1)
    vitlab.save(model, tmp_path / "other", labels=["x", "y", "z"])
    with pytest.raises(UsageError, match="knows other classes than the data"):
        call(data, tmp_path / "out", teacher=tmp_path / "other")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_data_and_unlabelled_images_may_be_given_in_python(data: Path, tmp_path: Path) -> None:
    given, others = open_data(data / "labelled.npz"), open_data(data / "labelled.npz").parts["test"]
    fresh = dataclasses.replace(others, read=_Turned(others.read))
    made = noisy_student(
        given, unlabelled=fresh, recipe=str(data / "recipe.toml"), out=tmp_path / "out", **BRIEFLY, **QUIETLY
    )
    assert made.generations[0]["pseudo_labels"]["accuracy"] is not None
    with pytest.raises(UsageError, match="given in Python"):
        noisy_student(resume=tmp_path / "out", **QUIETLY)
    again = noisy_student(given, unlabelled=fresh, resume=tmp_path / "out", **QUIETLY)
    assert again.generations[0]["weights"] == made.generations[0]["weights"]


@dataclasses.dataclass(frozen=True)
class _Turned:
    """Images upside down, so that they are others."""

    read: Any

    def __call__(self, i: int) -> Any:
        return np.ascontiguousarray(self.read(i)[::-1] ^ 3)


def test_spec_of_a_student_is_a_vit(done: NoisyStudentResult) -> None:
    assert isinstance(load(done.out / "generation-2", device="cpu").model, ViT)
