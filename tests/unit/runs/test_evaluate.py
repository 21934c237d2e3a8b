"""`vitlab.evaluate` on small pictures and a small model: every number, every refusal, every file it leaves."""

import csv
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow_cases import slow_after

import vitlab
from vitlab.core.errors import FileProblem, UsageError, VitlabError
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.evaluation.measures import MEASURES
from vitlab.evaluation.metrics import wilson_interval
from vitlab.evaluation.records import read_records
from vitlab.evaluation.result import EvaluationResult
from vitlab.evaluation.scoring import Scored, score_images
from vitlab.models.build import create_model
from vitlab.runs.training import run_folder
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle

CLASSES = ("clover", "poppy", "sky")
TINTS = {"clover": (20, 110, 20), "poppy": (120, 20, 20), "sky": (20, 60, 130)}
SIZE = 16


def draw(folder: Path, counts: dict[str, int], seed: int) -> None:
    noise = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            colours = noise.integers(0, 120, (4, 5, 3)) + np.array(TINTS.get(name, (60, 60, 60)))
            picture = Image.fromarray(colours.clip(0, 255).astype(np.uint8)).resize((24, 20), Image.Resampling.BICUBIC)
            picture.save(folder / name / f"{i:02d}.png")


def bundle(labels: tuple[str, ...] = CLASSES, *, zero: bool = False, scale: float = 6.0, seed: int = 0) -> Bundle:
    model = create_model("ViT-w16d1m32h2/8", num_classes=len(labels), image_size=SIZE, seed=seed).eval()
    if labels and not zero:
        with torch.no_grad():
            assert model.head is not None
            draws = torch.Generator().manual_seed(seed)
            model.head.weight.copy_(scale * torch.randn(model.head.weight.shape, generator=draws))
    return Bundle(model, Preprocess(image_size=(SIZE, SIZE)), labels, "# card\n", {"format": "test"})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    draw(root / "train", dict.fromkeys(CLASSES, 6), 0)
    draw(root / "val", dict.fromkeys(CLASSES, 9), 1)
    draw(root / "test", {"clover": 13, "poppy": 11, "sky": 9}, 2)
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "bundle"
    save_bundle(path, bundle())
    return path


Evaluate = Callable[..., EvaluationResult]


@pytest.fixture
def evaluate() -> Evaluate:
    def call(*given: Any, **options: Any) -> EvaluationResult:
        return vitlab.evaluate(*given, **{"device": "cpu", "threads": 1, "quiet": True, "resamples": 20, **options})

    return call


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_asking_the_classifier_image_by_image(
    evaluate: Evaluate, model: Path, photos: Path
) -> None:
    found = evaluate(model, photos)
    classifier = vitlab.load(model, device="cpu")
    files = sorted((photos / "test").rglob("*.png"))
    answers = [classifier(file) for file in files]
    right = [rows[0].label == file.parent.name for rows, file in zip(answers, files, strict=True)]
    p_truth = [
        next(row.p for row in rows if row.label == file.parent.name) for rows, file in zip(answers, files, strict=True)
    ]
    assert (found.part, found.n, found.top5) == ("test", 33, 1.0)
    assert found.top1 == pytest.approx(np.mean(right))
    assert found.loss == pytest.approx(-np.log(p_truth).mean(), rel=1e-4)
    recalls = [np.mean([r for r, f in zip(right, files, strict=True) if f.parent.name == name]) for name in CLASSES]
    assert [row["recall"] for row in found.per_class] == pytest.approx(recalls)
    assert found.macro is not None and found.macro["recall"] == pytest.approx(np.mean(recalls))
    assert sum(row["count"] for row in found.confused) == 33 - sum(right)


def test_keys_that_others_rely_on_are_in_the_json(evaluate: Evaluate, model: Path, photos: Path) -> None:
    found = json.loads(json.dumps(evaluate(model, photos).to_json(), allow_nan=False))
    assert {"top1", "top5", "n", "loss", "ece", "few_shot", "knn", "probe"} <= found.keys()
    assert all(
        low <= found[name] <= high for name, (low, high) in found["intervals"].items() if name in ("top1", "loss")
    )


@pytest.mark.parametrize(("batch_size", "workers"), slow_after(2, [(7, 0), (7, 2), (1, 0), (64, 2), (33, 0)]))
def test_batches_and_workers_change_no_number(
    evaluate: Evaluate, model: Path, photos: Path, batch_size: int, workers: int
) -> None:
    plain, other = evaluate(model, photos), evaluate(model, photos, batch_size=batch_size, workers=workers)
    assert (other.n, other.top1, other.top5, other.macro, other.confused) == (
        plain.n,
        plain.top1,
        plain.top5,
        plain.macro,
        plain.confused,
    )
    # Matrix kernels of another shape may round another last bit.
    assert (other.loss, other.ece) == pytest.approx((plain.loss, plain.ece), abs=1e-5)


def test_part_can_be_named_and_training_images_are_reported(evaluate: Evaluate, model: Path, photos: Path) -> None:
    assert (evaluate(model, photos, part="val").n, evaluate(model, photos, part="train").n) == (27, 18)
    assert any("training part" in note for note in evaluate(model, photos, part="train").notes)


def test_image_that_cannot_be_read_is_left_out_and_named(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    draw(tmp_path / "d", dict.fromkeys(CLASSES, 3), 0)
    (tmp_path / "d" / "sky" / "01.png").write_bytes(b"no picture")
    found = evaluate(model, tmp_path / "d")
    assert (found.n, list(found.left_out)) == (8, ["sky/01.png"])


def test_mean_over_classes_is_reported_first_where_classes_are_skewed(
    evaluate: Evaluate, model: Path, tmp_path: Path
) -> None:
    draw(tmp_path / "d", {"clover": 9, "poppy": 3, "sky": 2}, 0)
    found = evaluate(model, tmp_path / "d", out=tmp_path / "out")
    assert found.skew == 4.5 and any("skewed" in line for line in found.sentences())
    assert "as a mean over classes" in (tmp_path / "out" / "report.html").read_text()


# --- calibration ------------------------------------------------------------------------------------------------------


def test_temperature_is_fitted_on_val_and_never_on_what_is_measured(
    evaluate: Evaluate, model: Path, photos: Path
) -> None:
    found = evaluate(model, photos).calibration
    assert found is not None and found["fitted_on"] == "val" and found["temperature"] > 0
    assert evaluate(model, photos, fit_on="train").calibration != found
    alone = evaluate(model, photos / "test")
    assert alone.calibration is not None and alone.calibration["temperature"] is None
    assert any("no temperature" in note for note in alone.notes)
    with pytest.raises(UsageError, match="cannot be measured"):
        evaluate(model, photos, fit_on="test")


def test_saved_temperature_is_what_the_classifier_then_uses(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    found = evaluate(model, photos, save_temperature=tmp_path / "calm")
    assert found.calibration is not None and found.temperature_bundle == str(tmp_path / "calm")
    calm, plain = vitlab.load(tmp_path / "calm", device="cpu"), vitlab.load(model, device="cpu")
    fitted = found.calibration["temperature"]
    assert calm.bundle.temperature == fitted
    picture = next((photos / "test").rglob("*.png"))
    expected = (plain.logits([picture])[0] / fitted).softmax(0)
    assert {row.label: row.p for row in calm(picture)} == pytest.approx(
        dict(zip(CLASSES, expected.tolist(), strict=True))
    )
    assert torch.equal(calm.logits([picture]), plain.logits([picture]))
    assert f"{fitted:.4f}, fitted on the val part" in calm.bundle.card
    again = evaluate(tmp_path / "calm", photos)
    assert again.top1 == found.top1
    assert again.ece == pytest.approx(found.calibration["ece_after"])
    assert again.loss == pytest.approx(found.calibration["loss_after"])


def test_temperature_without_images_to_fit_on_is_refused_before_the_work(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"nothing.*temperature"):
        evaluate(model, photos / "test", save_temperature=tmp_path / "calm")
    with pytest.raises(UsageError, match="restricted"):
        evaluate(model, photos, restrict=True, save_temperature=tmp_path / "calm")
    assert not (tmp_path / "calm").exists()


# --- classes ----------------------------------------------------------------------------------------------------------


def test_labels_that_the_model_does_not_know_are_named(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    draw(tmp_path / "d", {"sky": 2, "tulip": 2, "rose": 2}, 0)
    with pytest.raises(UsageError, match=r"2 of the 3 classes.*rose, tulip"):
        evaluate(model, tmp_path / "d")


def test_class_without_images_need_not_be_known(evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos / "test", tmp_path / "d")
    (tmp_path / "d" / "a new folder").mkdir()
    plain, found = evaluate(model, photos / "test"), evaluate(model, tmp_path / "d")
    assert (found.n, found.top1, found.loss, found.macro) == (plain.n, plain.top1, plain.loss, plain.macro)
    assert {row["label"]: row["n"] for row in found.per_class}["a new folder"] == 0


def test_data_with_some_of_the_models_classes_counts_other_answers_as_wrong(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    for name in ("clover", "sky"):
        shutil.copytree(photos / "test" / name, tmp_path / "d" / name)
    some, whole = evaluate(model, tmp_path / "d"), evaluate(model, photos)
    rows = {row["label"]: row["recall"] for row in whole.per_class}
    assert {row["label"]: row["recall"] for row in some.per_class} == {name: rows[name] for name in ("clover", "sky")}
    assert any(row["answer"] == "something else" for row in some.confused)
    restricted = evaluate(model, tmp_path / "d", restrict=True)
    assert not any(row["answer"] == "something else" for row in restricted.confused)
    assert restricted.top1 is not None and some.top1 is not None and restricted.top1 >= some.top1


def test_label_map_joins_the_models_classes_and_leaves_data_classes_out(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    draw(tmp_path / "d", {"plant": 4, "air": 3, "cave": 2}, 0)
    (tmp_path / "map.json").write_text(json.dumps({"plant": ["clover", "poppy"], "air": 2}))
    found = evaluate(model, tmp_path / "d", label_map=tmp_path / "map.json")
    classifier = vitlab.load(model, device="cpu")
    right = sum(classifier(file)[0].label != "sky" for file in (tmp_path / "d" / "plant").iterdir())
    right += sum(classifier(file)[0].label == "sky" for file in (tmp_path / "d" / "air").iterdir())
    assert (found.n, found.top1) == (7, pytest.approx(right / 7))
    assert any("2 of 3 classes" in note for note in found.notes)


def test_model_of_numbers_takes_classes_in_order_and_reports_it(
    evaluate: Evaluate, photos: Path, tmp_path: Path
) -> None:
    save_bundle(tmp_path / "numbers", bundle(("0", "1", "2")))
    found = evaluate(tmp_path / "numbers", photos)
    assert found.n == 33 and any("numbers only" in note for note in found.notes)


def test_real_labels_are_counted_beside_the_plain_ones(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    files = sorted((photos / "test").rglob("*.png"))
    classifier = vitlab.load(model, device="cpu")
    names = list(open_data(photos).part("test").keys)
    labels: dict[str, list[int]] = {name: [0, 1, 2] for name in names}
    labels[names[0]] = []
    labels[names[1]] = [k for k in range(3) if CLASSES[k] != classifier(files[1])[0].label]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    found = evaluate(model, photos, real=tmp_path / "real.json").real
    assert found is not None
    assert (found["n"], found["excluded"], found["top1"]) == (32, 1, pytest.approx(31 / 32))


# --- several labels ---------------------------------------------------------------------------------------------------


@pytest.fixture
def several(photos: Path, tmp_path: Path) -> Path:
    rows = ["path,label,split"]
    for part in ("val", "test"):
        for i, file in enumerate(sorted((photos / part).rglob("*.png"))):
            extra = CLASSES[i % 3]
            labels = sorted({file.parent.name, extra}) if i % 4 else []
            rows.append(f"{file},{';'.join(labels)},{part}")
    (tmp_path / "several.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "several.csv"


def test_several_labels_have_precision_thresholds_and_a_page(
    evaluate: Evaluate, model: Path, several: Path, tmp_path: Path
) -> None:
    found = evaluate(model, several, out=tmp_path / "out")
    assert found.n == 33 and found.mean_ap is not None and found.micro_f1 is not None
    assert {"average_precision", "threshold", "f1"} <= found.per_class[0].keys()
    assert {row["threshold"] for row in found.per_class} != {0.5}
    assert found.calibration is not None and found.calibration["temperature"] is not None
    page = (tmp_path / "out" / "report.html").read_text()
    assert "average precision" in page.lower() and "from its threshold on (fitted on val)" in page
    assert {"ece", "macro_f1", "micro_f1", "mean_ap"} <= found.intervals.keys()
    assert {record.measure for record in read_records(tmp_path / "out" / "records")} >= {"mean_ap", "macro_f1"}


def test_saved_thresholds_say_which_labels_an_image_has(
    evaluate: Evaluate, model: Path, several: Path, tmp_path: Path
) -> None:
    found = evaluate(model, several, out=tmp_path / "out", save_temperature=tmp_path / "calm")
    calm = vitlab.load(tmp_path / "calm", device="cpu")
    assert found.calibration is not None and calm.bundle.temperature == found.calibration["temperature"]
    p_of_scores = torch.tensor(calm.bundle.thresholds).sigmoid().tolist()  # the first bundle has the temperature 1
    assert p_of_scores == pytest.approx([row["threshold"] for row in found.per_class])
    with (tmp_path / "out" / "answers.csv").open() as file:
        truth = {row["path"]: set(filter(None, row["labels"].split(";"))) for row in csv.DictReader(file)}
    answers = vitlab.predict(tmp_path / "calm", list(truth), top=1, device="cpu", quiet=True)
    printed = {row.path: {answer.label for answer in row.top if answer.has} for row in answers.rows}
    for row in found.per_class:  # the same F1 as the evaluation counted with them
        name = row["label"]
        hits = sum(name in printed[path] and name in truth[path] for path in truth)
        given, there = (sum(name in labels for labels in table.values()) for table in (printed, truth))
        assert row["f1"] == pytest.approx(2 * hits / (given + there))
    assert "one for each label, fitted on the val part" in calm.bundle.card


def test_thresholds_of_the_model_are_used_where_there_are_no_images_to_fit_new_ones(
    evaluate: Evaluate, model: Path, several: Path, tmp_path: Path
) -> None:
    fitted = evaluate(model, several, save_temperature=tmp_path / "calm")
    rows = [row for row in several.read_text().splitlines() if not row.endswith(",val")]
    (tmp_path / "tested.csv").write_text("\n".join(rows) + "\n")
    own = evaluate(tmp_path / "calm", tmp_path / "tested.csv", out=tmp_path / "out")
    plain = evaluate(model, tmp_path / "tested.csv")
    assert [row["f1"] for row in own.per_class] == [row["f1"] for row in fitted.per_class]
    assert [row["f1"] for row in plain.per_class] != [row["f1"] for row in fitted.per_class]
    assert "from its threshold on (those of the model)" in (tmp_path / "out" / "report.html").read_text()


def test_label_that_no_measured_image_has_must_be_known_where_images_have_several(
    evaluate: Evaluate, model: Path, several: Path
) -> None:
    several.write_text(several.read_text().replace(",val\n", ";moss,val\n", 1).replace(",;moss", ",moss"))
    with pytest.raises(UsageError, match=r"1 of the 4 classes.*moss"):
        evaluate(model, several)


def test_images_of_one_label_fit_no_temperature_for_a_model_of_several(
    evaluate: Evaluate, model: Path, photos: Path, several: Path, tmp_path: Path
) -> None:
    evaluate(model, several, save_temperature=tmp_path / "calm")
    with pytest.raises(UsageError, match="one label each"):
        evaluate(tmp_path / "calm", photos, save_temperature=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_labels_that_the_data_has_not_keep_an_even_chance(evaluate: Evaluate, several: Path, tmp_path: Path) -> None:
    save_bundle(tmp_path / "wide", bundle(("moss", *CLASSES)))
    evaluate(tmp_path / "wide", several, save_temperature=tmp_path / "calm")
    moss, *others = vitlab.load(tmp_path / "calm", device="cpu").bundle.thresholds
    assert moss == 0 and 0 not in others


def test_temperature_is_refused_beside_features_where_the_head_cannot_answer(
    evaluate: Evaluate, photos: Path, tmp_path: Path
) -> None:
    save_bundle(tmp_path / "zero", bundle(zero=True))
    with pytest.raises(UsageError, match=r"head.*zeros"):
        evaluate(tmp_path / "zero", photos, knn=True, save_temperature=tmp_path / "calm")
    assert not (tmp_path / "calm").exists()


def test_images_without_any_label_are_reported(evaluate: Evaluate, model: Path, several: Path, tmp_path: Path) -> None:
    head, *rows = several.read_text().splitlines()
    bare = [",".join([row.split(",")[0], "", "test"]) if row.endswith("test") else row for row in rows]
    (tmp_path / "bare.csv").write_text("\n".join([head, *bare]) + "\n")
    with pytest.raises(UsageError, match=r"no image.*label"):
        evaluate(model, tmp_path / "bare.csv")


# --- features ---------------------------------------------------------------------------------------------------------


def test_features_are_of_the_layers_and_tokens_that_were_asked_for(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    found = evaluate(model, photos, few_shot=[1], layers=[0], tokens="patches", out=tmp_path / "out")
    assert found.features is not None
    assert (found.features["features"]["layers"], found.features["features"]["width"]) == ([0], 4 * 16)
    (record,) = [one for one in read_records(tmp_path / "out" / "records") if one.measure == "few-shot-1"]
    assert (record.settings["tokens"], record.settings["pos"]) == ("patches", "learned")
    assert "--few-shot 1 --layers 0 --tokens patches" in record.command
    with pytest.raises(UsageError, match=r"--few-shot, --knn.*--probe"):
        evaluate(model, photos, layers=[0])


def test_what_features_cannot_give_is_refused_before_the_head_is_run(
    evaluate: Evaluate, model: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []

    def noting(*given: Any) -> Scored:
        labels.append(given[-1])
        return score_images(*given)

    monkeypatch.setattr("vitlab.runs.evaluation.evaluation_run.score_images", noting)
    evaluate(model, photos)
    assert labels == ["evaluate", "val"]
    labels.clear()
    with pytest.raises(UsageError, match="9 shots"):
        evaluate(model, photos, few_shot=[9])
    assert not labels


@pytest.mark.parametrize("option", [{"knn": True}, {"few_shot": [1]}, {"part": "test"}, {"restrict": True}], ids=str)
def test_vtab_alone_refuses_what_needs_other_data(evaluate: Evaluate, model: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"VTAB.*data"):
        evaluate(model, vtab=True, **option)


def test_record_of_a_run_says_what_its_start_was_trained_on(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_folder.start(run, 'init = "ViT-B/16@i21k"\n', "", run_folder.RunFile("a test", ""), [])
    shutil.copytree(model, run / "bundle")
    evaluate(run, photos, knn=False, few_shot=[1], out=tmp_path / "out")
    assert {record.pretrained_on for record in read_records(tmp_path / "out" / "records")} == {"imagenet21k"}


# --- what it leaves ---------------------------------------------------------------------------------------------------


def test_folder_holds_numbers_page_tables_card_and_records(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    found = evaluate(model, photos, out=tmp_path / "out")
    folder = tmp_path / "out"
    stored = json.loads((folder / "evaluation.json").read_text())
    assert stored == json.loads(json.dumps(found.to_json()))
    with (folder / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 33 and sum(row["right"] == "1" for row in rows) == round(33 * float(found.top1 or 0))
    records = {record.measure: record for record in read_records(folder / "records")}
    assert records["top1"].value == found.top1 and records["top1"].interval == found.intervals["top1"]
    assert {measure.key for measure in MEASURES if measure.one_label is not None} == set(records)
    assert records["top1"].fingerprint == open_data(photos).part("test").fingerprint()
    card = (folder / "card.md").read_text()
    assert card.startswith("# card") and f"{found.top1:.4f}" in card and "vitlab evaluate" in card


def test_page_is_one_file_that_loads_nothing_and_escapes_names(evaluate: Evaluate, tmp_path: Path) -> None:
    draw(tmp_path / "d", {"<b>x": 3, "y&z": 3}, 0)
    save_bundle(tmp_path / "m", bundle(("<b>x", "y&z")))
    evaluate(tmp_path / "m", tmp_path / "d", out=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<b>" not in page and "&lt;b&gt;x" in page and "y&amp;z" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#|\./)""", page)
    assert page.count("<script") == 1


def test_folder_that_is_taken_is_refused_before_the_work(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    with pytest.raises(VitlabError, match="out"):
        evaluate(model, tmp_path / "no data", out=tmp_path / "out")


# --- a run's own parts ------------------------------------------------------------------------------------------------


def test_run_is_tested_on_what_it_held_out_and_not_on_what_it_has_learnt(evaluate: Evaluate, tmp_path: Path) -> None:
    draw(tmp_path / "flat", dict.fromkeys(CLASSES, 10), 4)
    trained = vitlab.train(
        tmp_path / "flat",
        out=tmp_path / "run",
        model="ViT-w16d1m32h2/8",
        overrides=["train.epochs=1", "train.precision=fp32", "data.image_size=[16,16]", "data.val_frac=0.2"],
        device="cpu",
        threads=1,
        quiet=True,
    )
    found = evaluate(tmp_path / "run")
    assert (found.n, found.part, found.top1) == (trained.test["n"], "test", trained.test["top1"])
    assert found.loss == pytest.approx(trained.test["loss"], rel=1e-4)
    assert any("split.csv" in note for note in found.notes)
    assert found.calibration is not None and found.calibration["fitted_on"] == "val"
    draw(tmp_path / "other", dict.fromkeys(CLASSES, 2), 5)
    assert evaluate(tmp_path / "run", tmp_path / "other").n == 6


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_head_of_zeros_is_refused_without_force(evaluate: Evaluate, photos: Path, tmp_path: Path) -> None:
    save_bundle(tmp_path / "zero", bundle(zero=True))
    with pytest.raises(UsageError, match="all zeros"):
        evaluate(tmp_path / "zero", photos)
    assert evaluate(tmp_path / "zero", photos, force=True).top1 == pytest.approx(13 / 33)  # always the first class


def test_model_without_classes_is_refused_with_what_can_be_measured(
    evaluate: Evaluate, photos: Path, tmp_path: Path
) -> None:
    save_bundle(tmp_path / "body", bundle(()))
    with pytest.raises(UsageError, match="no classes") as caught:
        evaluate(tmp_path / "body", photos)
    assert "--knn" in str(caught.value.hint)


def test_model_that_answers_nan_is_an_error_that_names_an_image(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path
) -> None:
    """Finite weights so large that scores overflow."""
    broken = read_bundle(model)
    with torch.no_grad():
        assert broken.model.head is not None
        broken.model.head.weight.fill_(3e38)
    save_bundle(tmp_path / "nan", broken)
    with pytest.raises(VitlabError, match=r"NaN.*33 of 33.*clover/00\.png"):
        evaluate(tmp_path / "nan", photos)


def test_one_class_and_one_image_are_measured(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    draw(tmp_path / "d", {"sky": 1}, 0)
    found = evaluate(model, tmp_path / "d", out=tmp_path / "out")
    assert (
        found.n == 1 and found.top1 in (0.0, 1.0) and found.intervals["top1"] == wilson_interval(round(found.top1), 1)
    )


def test_one_image_of_each_class_is_measured(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    draw(tmp_path / "d", dict.fromkeys(CLASSES, 1), 0)
    assert evaluate(model, tmp_path / "d", out=tmp_path / "out").n == 3


@pytest.mark.parametrize(
    ("options", "error", "printed"),
    [
        ({"part": "dev"}, UsageError, "no dev part"),
        ({"fit_on": "tune"}, UsageError, "no tune part"),
        ({"batch_size": 0}, UsageError, "--batch-size"),
        ({"workers": -1}, UsageError, "--workers"),
        ({"resamples": 0}, UsageError, "--resamples"),
        ({"as_published": "ViT-X/16@x"}, UsageError, "unknown checkpoint"),
        ({"as_published": "ViT-B/16@i21k"}, UsageError, "no accuracy is published"),
        ({"as_published": "ViT-B/16@augreg-i21k-i1k-224", "preprocess": "imagenet"}, UsageError, "--preprocess"),
        ({"label_map": "none.json"}, FileProblem, "none.json"),
        ({"real": "none.json"}, FileProblem, "none.json"),
        ({"threads": 0}, UsageError, "--threads"),
    ],
    ids=str,
)
def test_wrong_call_is_refused_in_a_sentence(
    evaluate: Evaluate, model: Path, photos: Path, options: dict[str, Any], error: type[Exception], printed: str
) -> None:
    with pytest.raises(error, match=printed):
        evaluate(model, photos, **options)


def test_no_data_and_empty_data_are_reported(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give the data"):
        evaluate(model)
    with pytest.raises(UsageError, match="give the model"):
        evaluate()
    (tmp_path / "empty" / "sky").mkdir(parents=True)
    with pytest.raises(VitlabError, match="empty"):
        evaluate(model, tmp_path / "empty")


# --- published --------------------------------------------------------------------------------------------------------

CATALOGUE = """
[[family]]
tag = "tiny"
title = "A tiny one"
format = "google-npz"
sources = ["a test"]
preprocess = {{ image_size = [{size}, {size}], antialias = false }}
measured_with = {{ image_size = [{size}, {size}], resize = "shorter-side", crop_frac = 0.8, filter = "bicubic" }}
settings = "shorter side, bicubic, the middle"
measured = "a/test results.md"
checkpoints = [{{ model = "ViT-B/16", file = "x.npz", top1 = 60.0 }}]
"""


def test_published_row_is_measured_with_its_settings_and_compared(
    evaluate: Evaluate, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text(CATALOGUE.format(size=SIZE))
    monkeypatch.setenv("VITLAB_CATALOGUE", str(tmp_path / "own.toml"))
    found = evaluate(model, photos, as_published="ViT-B/16@tiny")
    rule = Preprocess(image_size=(SIZE, SIZE), resize="shorter-side", crop_frac=0.8, filter="bicubic")
    save_bundle(tmp_path / "so", dataclasses.replace(read_bundle(model), preprocess=rule))
    expected = evaluate(tmp_path / "so", photos)
    assert (found.top1, found.loss) == (expected.top1, expected.loss)
    assert found.loss != evaluate(model, photos).loss
    assert found.published is not None
    assert found.published["difference"] == pytest.approx((found.top1 or 0) - 0.6)
    assert found.published["settings"] == "shorter side, bicubic, the middle"


def test_published_row_without_its_data_says_what_is_missing(
    evaluate: Evaluate, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path))
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own.toml").write_text(CATALOGUE.format(size=SIZE))
    monkeypatch.setenv("VITLAB_CATALOGUE", str(tmp_path / "own.toml"))
    with pytest.raises(VitlabError, match=r"(?i)imagenet"):
        evaluate(model, as_published="ViT-B/16@tiny")


def test_data_before_the_model_is_reported(evaluate: Evaluate, model: Path, photos: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)no bundle.*\nThe model comes first, and .* holds one"):
        evaluate(photos, model)


def test_broken_link_is_reported_in_plain_words(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    draw(tmp_path / "data", dict.fromkeys(CLASSES, 2), seed=0)
    (tmp_path / "data" / CLASSES[0] / "link.png").symlink_to("nowhere.png")
    found = evaluate(model, tmp_path / "data")
    assert found.left_out == {f"{CLASSES[0]}/link.png": "no longer exists"}


def test_top5_is_reported_only_where_there_are_more_classes(evaluate: Evaluate, model: Path, tmp_path: Path) -> None:
    draw(tmp_path / "data", dict.fromkeys(CLASSES, 2), seed=0)
    few = evaluate(model, tmp_path / "data")
    assert few.labels == len(CLASSES) <= 5 and not any("top-5" in line for line in few.sentences())
    save_bundle(tmp_path / "many", bundle((*CLASSES, *"uvwxyz")))
    many = evaluate(tmp_path / "many", tmp_path / "data")
    assert any("top-5" in line for line in many.sentences())
    restricted = evaluate(tmp_path / "many", tmp_path / "data", restrict=True)
    assert not any("top-5" in line for line in restricted.sentences())
