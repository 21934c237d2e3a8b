"""Runs without labels: they resume bit by bit, leave an encoder, say what neighbours know, and refuse what cannot be."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_runs import Crash, left
from PIL import Image
from run_jobs import plan_train
from slow_cases import slow_after

import vitlab
from vitlab.core import fsio
from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.errors import UsageError
from vitlab.data.dataset import from_arrays, join_without_labels
from vitlab.data.parts import Parts
from vitlab.evaluation.knn import nearest
from vitlab.report.charts import Chart
from vitlab.report.page import Gallery, Snippets
from vitlab.runs.training.live_run import best_of, brief_metric, describe_validation
from vitlab.runs.training.run_report import build_report
from vitlab.training.recipe import Recipe
from vitlab.weights.containers import read_arrays

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]
MASKED = ("objective.kind=masked-patches",)
MAE = ("objective.kind=mae", *(f"objective.mae.decoder_{name}" for name in ("width=16", "depth=1", "heads=2")))
SOAK = os.environ.get("VITLAB_SOAK") == "1"
ALONE = World(0, 1, torch.device("cpu"))


def stopped_after(steps: int, work: Callable[[], Any]) -> None:
    """`work` dies when the record of the next step is about to be written."""
    seen = 0

    def listener(_operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and seen == steps + 1:
            raise Crash

    with pytest.raises(Crash), fsio.intercept(listener):
        work()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, run: Call) -> Path:
    folder = tmp_path_factory.mktemp("taught") / "teacher"
    run(tiny("train.steps=2", "model.name=ViT-w24d1m32h2/2"), folder)
    return folder


@pytest.fixture(scope="module")
def kinds(teacher: Path) -> dict[str, tuple[str, ...]]:
    features = ("objective.kind=feature-distillation", f"teacher={teacher}")
    return {"masked": MASKED, "mae": MAE, "features": features}


@pytest.mark.parametrize("kind", slow_after(1, ["mae", "masked", "features"]))
def test_resumed_run_is_bit_equal_and_leaves_an_encoder(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, kinds: dict[str, tuple[str, ...]], kind: str
) -> None:
    recipe = tiny(*kinds[kind], "train.ema=0.9", "train.eval_every=50%", "model.dropout=0.1", "train.micro_batch=4")
    data = parts(val=True)
    whole = run(recipe, tmp_path / "whole", data)
    stopped_after(5, lambda: run(recipe, tmp_path / "again", data))
    again = run(recipe, tmp_path / "again", data, resume=True)
    assert left(tmp_path / "again") == left(tmp_path / "whole") and "bundle" in left(tmp_path / "whole")
    assert again.evaluations == whole.evaluations and again.knn == whole.knn
    assert [sorted(row) for row in whole.evaluations] == [["loss", "n", "step"]] * 2, "no accuracy without labels"
    assert whole.scores is None and whole.knn["k"] == 20 and whole.knn["n"] == 8
    loaded = vitlab.load(tmp_path / "whole")
    assert loaded.labels == () and loaded.model.head is None
    assert loaded.embed(np.zeros((16, 16), np.uint8)).shape[-1] == 16
    newest = sorted((tmp_path / "whole" / "checkpoints").iterdir())[-1]
    assert not any("held" in name or "teacher" in name for name in read_arrays(newest / "model.safetensors").arrays)


def test_neighbours_are_counted_on_what_the_bundle_gives(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    data: Parts = parts()
    result = run(tiny(*MAE), tmp_path / "run", data)
    model = vitlab.load(tmp_path / "run")
    vectors, labels = [], []
    for part in (data.train, data.test):
        assert part is not None
        vectors.append(torch.stack([torch.as_tensor(model.embed(part.read(i))).flatten() for i in range(len(part))]))
        labels.append(part.labels.single())
    similarity, index = nearest(vectors[1], [vectors[0]], 20)
    right = 0
    for near, weights, label in zip(labels[0][index], (similarity / 0.07).exp(), labels[1], strict=True):
        votes = torch.zeros(4).index_add(0, near, weights)
        right += int(votes.argmax() == label)
    assert result.knn["top1"] == right / 8


def test_lower_loss_is_the_better_evaluation_where_there_are_no_labels() -> None:
    low, high = {"step": 1, "loss": 0.5, "n": 4}, {"step": 2, "loss": 0.7, "n": 4}
    assert best_of([high, low]) == low
    assert describe_validation(low) == "loss 0.5000 on 4 validation images" and brief_metric(low) == "loss 0.500"


def test_validation_hides_the_same_patches_each_time(tmp_path: Path, tiny: Tiny, parts: Call, run: Call) -> None:
    result = run(tiny(*MAE, "optim.lr=1e-12", "train.eval_every=50%"), tmp_path / "run", parts(val=True))
    first, second = (row["loss"] for row in result.evaluations)
    assert first == pytest.approx(second, rel=1e-6)


@pytest.mark.slow
def test_two_runs_hide_other_patches_and_one_hides_the_same_again(tmp_path: Path, tiny: Tiny, run: Call) -> None:
    curves = [
        [record.loss for record in run(tiny(*MAE, f"seed={seed}"), tmp_path / str(i)).records]
        for i, seed in enumerate((0, 0, 1))
    ]
    assert curves[0] == curves[1] != curves[2]


def test_page_and_card_of_an_encoder_speak_of_neighbours_and_not_of_accuracy(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    result = run(tiny(*MASKED, "train.eval_every=50%"), tmp_path / "run", parts(val=True))
    page = build_report(result)
    assert "20 nearest neighbours" in page.headline and page.number.endswith("%")
    assert ("labels", "not used") in page.stats
    charts = {section.title: section for section in page.sections if isinstance(section, Chart)}
    assert charts["Validation"].y_label == "validation loss" and not charts["Validation"].percent
    assert "the loss of masked-patches" in charts["Training"].caption
    assert any(isinstance(section, Gallery) and section.title == "Hidden patches" for section in page.sections)
    (use,) = (section for section in page.sections if isinstance(section, Snippets))
    text = json.dumps(dataclasses.asdict(use))
    assert "--init" in text and "predict" not in text
    assert "20-NN test top-1" in (tmp_path / "run" / "bundle" / "card.md").read_text()
    assert "accuracy" not in " ".join(str(fact) for fact in page.facts)


@pytest.mark.slow
def test_images_of_further_sources_are_trained_on_without_their_labels(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    one: Parts = parts()
    more = dataclasses.replace(one, also=(one.train.subset(torch.arange(5), "more"),))
    assert len(more.learnt) == 29 and more.learnt.classes == () and more.num_fitted("steps") == 29
    assert np.array_equal(more.learnt.read(25), one.train.read(1)) and np.array_equal(
        more.learnt.read(3), one.train.read(3)
    )
    for cache in ("none", "device"):
        result = run(tiny(*MAE, f"data.cache={cache}"), tmp_path / cache, more)
        assert result.num_fitted == 29
    assert left(tmp_path / "none")["rows"] == left(tmp_path / "device")["rows"]
    split = (tmp_path / "none" / "split.csv").read_text().splitlines()
    assert sum(line.endswith(",also") for line in split) == 5
    with pytest.raises(UsageError, match="also"):
        run(tiny(*MAE), tmp_path / "none", one, resume=True)


def test_joined_sets_keep_the_order_of_their_images() -> None:
    first, second = (
        from_arrays(torch.full((n, 1, 2, 2), v, dtype=torch.uint8), [0] * n, ["a"], f"s{v}")
        for n, v in ((2, 1), (3, 2))
    )
    joined = join_without_labels([first, second])
    assert [int(np.asarray(joined.read(i)).flat[0]) for i in range(5)] == [1, 1, 2, 2, 2]
    assert joined.labels.targets(torch.arange(5), 0).shape == (5, 0)


# --- from a call ------------------------------------------------------------------------------------------------------


def photos(folder: Path, count: int = 12) -> Path:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (count, 20, 24, 3), dtype=np.uint8)
    for i in range(count):
        Image.fromarray(pixels[i]).save(folder / f"{i:02d}.png")
    return folder


SMALL = {
    "data.image_size": [16, 16],
    "data.mode": "RGB",
    "model.name": "ViT-w16d2m32h2/4",
    "train.epochs": 1,
    "train.batch_size": 4,
}
SMALL_TEXTS = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]


def test_loose_photos_train_and_nothing_is_held_out_for_a_test(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    result = vitlab.train(
        folder, recipe="laptop-mae-digits", out=tmp_path / "run", device="cpu", quiet=True, overrides=SMALL
    )
    assert result.test == {} and "Not tested" in result.sentences()[0]
    assert len(result.history) == 3, "an epoch of all twelve"
    assert vitlab.load(tmp_path / "run").model.head is None
    again = vitlab.train(resume=tmp_path / "run", device="cpu", quiet=True)
    assert again.run == result.run


def test_validation_images_of_loose_photos_are_held_out(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    job = plan_train(
        folder,
        "laptop-masked-digits",
        overrides=[*SMALL_TEXTS, "data.val_frac=0.25"],
        world=ALONE,
    )
    assert (len(job.parts.train), job.parts.val and len(job.parts.val), job.parts.test) == (9, 3, None)
    assert job.counts == {"train": 9, "val": 3}
    assert job.opening[0] == "no labels used: 9 to train on, 3 for validation"


def test_further_sources_are_opened_by_name_and_only_their_training_images_count(tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    for part, count in (("train", 3), ("test", 2)):
        for label in ("a", "b"):
            (tmp_path / "split" / part).mkdir(exist_ok=True)
            photos(tmp_path / "split" / part / label, count)
    also = json.dumps([str(tmp_path / "split"), str(photos(tmp_path / "loose", 4))])
    overrides = [*SMALL_TEXTS, f"data.also={also}"]
    job = plan_train(photos(tmp_path / "photos"), "laptop-mae-digits", overrides=overrides, world=ALONE)
    assert [len(part) for part in job.parts.also] == [6, 4] and len(job.parts.learnt) == 22


@pytest.mark.slow
def test_fine_tuning_starts_from_an_encoder_with_a_head_of_zeros(tmp_path: Path) -> None:
    common: dict[str, Any] = {"device": "cpu", "quiet": True}
    small = {"data.image_size": 8, "model.name": "ViT-w16d2m32h2/2"}
    first = vitlab.train(
        "digits", recipe="laptop-mae-digits", out=tmp_path / "first", **common, overrides={**small, "train.steps": 2}
    )
    assert 0 < first.test["knn"]["top1"] <= 1 and first.test["n"] == first.test["knn"]["n"] == 359
    assert first.to_json().keys() == {f.name for f in dataclasses.fields(first)} - {"photo", "encoder"}
    assert any("--init" in command for command in first.next_commands())
    still = {**small, "train.steps": 1, "optim.lr": 1e-9}
    second = vitlab.train(
        "digits",
        recipe="laptop-digits",
        init=first.run,
        out=tmp_path / "second",
        **common,
        overrides=still,
    )
    assert second.history[0]["loss"] == pytest.approx(np.log(10), abs=1e-4), "a head of zeros"
    ours, theirs = (vitlab.load(run).model.state_dict() for run in (first.run, second.run))
    torch.testing.assert_close(theirs["blocks.0.attn.qkv.weight"], ours["blocks.0.attn.qkv.weight"], rtol=0, atol=1e-6)
    measured = vitlab.evaluate(first.run, knn=True, quiet=True, device="cpu")
    assert measured.knn is not None and measured.knn["top1"] == first.test["knn"]["top1"]


@pytest.mark.parametrize(
    ("overrides", "printed"),
    [
        (("data.mix.mixup=0.2",), "has no labels to mix"),
        (("data.balanced=true",), "no classes to balance"),
        (("model.patch_dropout=0.5",), "excludes patch dropout"),
        (("objective.label_smoothing=0.1",), "no labels to smooth"),
        (("objective.class_weights=auto",), "no labels to smooth, weigh"),
        (("optim.train=last:1",), "trains the whole encoder"),
        (("train.method=probe",), "needs train.method=steps"),
        (("head_bias=-1",), "no head_bias"),
        (("model.name=BiT-R50x1",), "needs a Vision Transformer"),
        (("model.pos=relative",), "some patches alone"),
        (("model.name=Axial-ViT-w16d2m32h2/2",), "some patches alone"),
        (("model.pool=map",), "model.pool=map comes behind"),
        (("objective.masked.corrupt=0.3",), "objective.masked needs objective.kind=masked-patches"),
        (("objective.mae.mask=1.0",), "between 0 and 1"),
        (("objective.mae.decoder_width=18",), "divisible by 4"),
        (("model.name=ViT-w16d2m32h2/8",), "more than one patch"),
        (("teacher=runs/one",), "go together"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_a_sentence(tiny: Tiny, overrides: tuple[str, ...], printed: str) -> None:
    with pytest.raises(UsageError, match=printed):
        tiny(*MAE, *overrides)


@pytest.mark.parametrize(
    ("overrides", "printed"),
    [
        (("objective.masked.target=downsampled", "model.name=ViT-w16d2m32h2/2"), "patches of 4 pixels or more"),
        (("objective.masked.target=coloured",), "objective.masked.target"),
        (("objective.masked.corrupt=0",), "above 0"),
        (("model.head=mlp-tanh",), "model.head=mlp-tanh comes behind"),
        (("objective.kind=softmax", "data.also=['digits']"), "data.also adds images without their labels"),
        (("objective.kind=feature-distillation",), "needs a teacher"),
    ],
)
def test_what_masked_patches_cannot_do_is_refused_too(tiny: Tiny, overrides: tuple[str, ...], printed: str) -> None:
    with pytest.raises(UsageError, match=printed):
        tiny(*MASKED, *overrides)


def test_call_without_a_recipe_or_with_a_sweep_is_refused() -> None:
    with pytest.raises(UsageError, match="needs --recipe"):
        plan_train("digits", overrides=["objective.kind=mae"], world=ALONE)
    with pytest.raises(UsageError, match="chooses by accuracy"):
        plan_train("digits", "laptop-mae-digits", sweep="optim.lr=0.1,0.2", world=ALONE, console=Console(quiet=True))


def test_teacher_of_features_is_looked_at_before_anything_is_made(
    tmp_path: Path, kinds: dict[str, tuple[str, ...]]
) -> None:
    overrides = [*kinds["features"], "data.mode=RGB"]
    with pytest.raises(UsageError, match="1 channels, the student of 3"):
        plan_train("digits", "laptop-digits", overrides=[*overrides, "data.mix.mixup=0"], world=ALONE)


# --- it learns --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model", "steps"),
    [("laptop-masked-digits", "ViT-w64d2m128h4/2", 300), ("laptop-mae-digits", "ViT-w32d2m64h2/2", 400)][: 1 + SOAK],
)
def test_loss_falls_and_neighbours_know_more_than_those_of_an_untrained_encoder(
    tmp_path: Path, recipe: str, model: str, steps: int
) -> None:
    common: dict[str, Any] = {"recipe": recipe, "device": "cpu", "quiet": True}
    small: dict[str, Any] = {"data.image_size": 8}
    if not SOAK:
        small |= {"model.name": model, "train.batch_size": 32, "data.cache": "device"}
    length = {"train.epochs": 30} if SOAK else {"train.steps": steps}
    result = vitlab.train("digits", out=tmp_path / "run", **common, overrides={**small, **length})
    losses = [row["loss"] for row in result.history]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    still = {**small, "train.steps": 1, "optim.lr": 1e-12}
    untrained = vitlab.train("digits", out=tmp_path / "untrained", **common, overrides=still)
    assert result.test["knn"]["top1"] > untrained.test["knn"]["top1"] + 0.05 > 0.15, "chance is 0.1"
