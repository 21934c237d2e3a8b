"""The choice as a table, every rung of it, each carried out once; and the reason tells what is really done."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import load
from vitlab.models.names import parse_name
from vitlab.models.spec import BiTSpec, ModelSpec, bit_trunk, changed
from vitlab.runs.recipe import Recipe, merged, read_data_config, recipe_from_dict, with_changes
from vitlab.runs.training.choice import Facts, asked_rung, choose, pick_rung, tell
from vitlab.runs.training.deciding import plan_train
from vitlab.runs.training.parts import Parts, arrange
from vitlab.runs.training.run import RunResult
from vitlab.runs.training.training_run import train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BODY = "ViT-w16d6m32h2/4"
VIT = changed(parse_name(BODY), {"image_size": (16, 16), "num_classes": 3})
BIT = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(16, 16), num_classes=2)


def facts(images: int, classes: int = 10, device: torch.device = CUDA, side: int = 16, **more: Any) -> Facts:
    return Facts(images, classes, side, 1.0, False, device, **{"memory": 2**40, **more})


@pytest.mark.parametrize(
    ("known", "spec", "rung", "because"),
    [
        (facts(60, device=CPU), VIT, "probe", "no GPU"),
        (facts(1_000_000, device=CPU), VIT, "probe", "no GPU"),
        (facts(1_000_000, device=CPU, memory=2**20), VIT, "head", "features do not fit"),
        (facts(60, device=CPU, processes=2), VIT, "head", "several processes"),
        (facts(60, device=CPU), BIT, "probe", "no GPU"),
        (facts(60_000), BIT, "probe", "a ResNet"),
        (facts(999), VIT, "probe", "so few"),
        (facts(1_000), VIT, "lora", "fewer than 10,000"),
        (facts(9_999), VIT, "lora", "fewer than 10,000"),
        (facts(10_000), VIT, "last", "fewer than 50,000"),
        (facts(49_999), VIT, "last", "fewer than 50,000"),
        (facts(50_000), VIT, "full", "enough"),
        (facts(19_000, classes=1_000), VIT, "probe", "19 of each"),
        (facts(20_000, classes=1_000), VIT, "last", "fewer than 50,000"),
        (facts(500, side=8), VIT, "probe", "so few"),
        (facts(500, side=7), VIT, "lora", "7 pixels are enlarged 2 times"),
        (facts(5_000, side=4), VIT, "last", "enlarged 4 times"),
        (facts(20_000, side=4), VIT, "full", "enlarged 4 times"),
        (facts(500, side=4, device=CPU), VIT, "probe", "no GPU"),
    ],
)
def test_rung_by_images_classes_size_start_and_machine(known: Facts, spec: ModelSpec, rung: str, because: str) -> None:
    found, why = pick_rung(known, spec, side=16)
    assert found == rung
    assert because in why


@pytest.mark.parametrize(
    ("known", "name", "side"),
    [
        (facts(60, device=CPU, side=500), "ViT-Ti/8", 64),
        (facts(60, device=CPU, side=28), "ViT-Ti/4", 32),
        (facts(60_000, side=32), "ViT-Ti/4", 32),
        (facts(60_000, side=64), "ViT-Ti/8", 64),
        (facts(60_000, side=500), "ViT-S/16", 224),
    ],
)
def test_model_without_start_weights(known: Facts, name: str, side: int) -> None:
    table, _, advice = choose(known, None)
    assert (table["model"]["name"], table["data"]["image_size"]) == (name, [side, side])
    assert ("--init" in advice) == (known.train_images < 50_000)


@pytest.mark.parametrize(
    ("known", "asked", "method", "trained", "lr"),
    [
        (facts(60, device=CPU), "optim.train=lora", "steps", "lora", 1e-3),
        (facts(60, device=CPU), "optim.train=full", "steps", "full", 3e-4),
        (facts(60, device=CPU), "optim.train='last:2'", "steps", "last:4", 3e-4),
        (facts(60, device=CPU), "optim.train=head", "probe", "head", 1.0),
        (facts(60, device=CPU), "train.method=steps", "steps", "head", 1e-3),
        (facts(5_000), "train.method=steps", "steps", "lora", 1e-3),
        (facts(5_000), "train.method=probe", "probe", "head", 1.0),
        (facts(60, device=CPU), "train.method=steps optim.train=head", "steps", "head", 1e-3),
        *((facts(n), "optim.train=head", "probe", "head", 1.0) for n in (500, 5_000, 20_000, 90_000)),
        *((facts(n), "train.method=steps optim.train=head", "steps", "head", 1e-3) for n in (500, 20_000, 90_000)),
        (facts(90_000, processes=2), "optim.train=head", "steps", "head", 1e-3),
        (facts(90_000, memory=2**20), "optim.train=head", "steps", "head", 1e-3),
        (facts(90_000), "train.method=steps optim.train=lora", "steps", "lora", 1e-3),
    ],
)
def test_rates_are_those_of_what_the_caller_wants_trained(
    known: Facts, asked: str, method: str, trained: str, lr: float
) -> None:
    rule = Preprocess(mode="RGB", image_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    table, _, _ = choose(known, (VIT, rule), asked_rung(asked.split()))
    assert table["train"].get("method", "steps") == method
    assert (table["optim"].get("train", "full"), table["optim"]["lr"]) == (trained, lr)


@pytest.mark.parametrize("images", [500, 5_000, 20_000, 90_000])
def test_everything_about_a_head_in_steps_is_a_heads_own_however_many_images(images: int) -> None:
    rule = Preprocess(mode="RGB", image_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    asked = asked_rung(["optim.train=head", "train.method=steps"])
    table, because, _ = choose(facts(images), (VIT, rule), asked)
    assert table["optim"] == {"lr": 1e-3, "train": "head"}, "no decay of another rung"
    assert (table["train"]["epochs"], because) == (5, "as asked")


def test_some_blocks_of_a_shallow_model_are_not_all_of_it() -> None:
    rule = Preprocess(mode="RGB", image_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    shallow = changed(VIT, {"depth": 4})
    assert "layer_decay" in choose(facts(20_000), (shallow, rule))[0]["optim"]
    assert "layer_decay" not in choose(facts(20_000), (shallow, rule), asked_rung(["optim.train=last:2"]))[0]["optim"]


# --- every rung, carried out ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three colours, twelve pictures of each."""
    root, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for k, name in enumerate(("green", "red", "sky")):
        (root / name).mkdir()
        for i in range(12):
            pixels = draw.integers(0, 100, (20, 24, 3), dtype=np.uint8)
            pixels[..., k] += 120
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def start(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("start") / "run"
    small = ["train.epochs=2", "data.image_size=[16,16]", "train.precision=fp32"]
    train(photos, out=out, model=BODY, overrides=small, device="cpu", threads=1, quiet=True)
    return out


RUNGS = {
    "probe": facts(60, device=CPU),
    "head": facts(60, device=CPU, processes=2),
    "lora": facts(5_000),
    "last": facts(20_000),
    "full": facts(90_000),
}
MOVES = {
    "probe": {"head"},
    "head": {"head"},
    "lora": {"head", "blocks"},
    "last": {"head", "blocks", "norm"},
    "full": {"head", "blocks", "norm", "embed", "pos"},
}


@pytest.mark.parametrize("rung", RUNGS)
def test_each_rung_trains_what_it_says(
    rung: str, photos: Path, start: Path, tmp_path: Path, run: Callable[..., RunResult]
) -> None:
    assert pick_rung(RUNGS[rung], VIT, side=16)[0] == rung
    began = load(start, device="cpu")
    table, because, _ = choose(RUNGS[rung], (began.model.spec, began.preprocess))
    given = {"title": rung, "init": str(start), "data": {"source": str(photos)}}
    small = ["train.epochs=2", "data.workers=0", "train.precision=fp32", "train.batch_size=8", "train.eval_every=100%"]
    table = with_changes(merged(table, given), small)
    parts = arrange(open_data(photos), read_data_config(table))
    recipe = recipe_from_dict(table, 3)
    result = run(recipe, tmp_path / "run", parts)
    before, after = began.model.state_dict(), result.classifier.model.state_dict()
    moved = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert moved == MOVES[rung]
    assert result.images_per_second > 0
    if rung == "last":
        blocks = {
            name.split(".")[1] for name in after if name.startswith("blocks") and (after[name] != before[name]).any()
        }
        assert blocks == {"2", "3", "4", "5"}
    words = {
        "probe": "fitted at once",
        "head": "in steps",
        "lora": "LoRA",
        "last": "last 4 blocks",
        "full": "all weights",
    }
    assert words[rung] in tell(recipe, len(parts.train), because)


# --- the sentence -----------------------------------------------------------------------------------------------------


def settle(data: Path, **settings: Any) -> tuple[Recipe, Parts, str, tuple[str, ...]]:
    given = {
        "recipe": None,
        "init": None,
        "model": None,
        "overrides": [],
        "seed": 0,
        "world": World(0, 1, CPU),
        **settings,
    }
    plan = plan_train(data, console=Console(quiet=True), **given)
    return plan.recipe, plan.parts, plan.reason, plan.said


def test_reason_counts_what_is_left_to_train_on(photos: Path, start: Path) -> None:
    _, parts, reason, _ = settle(photos, init=str(start))
    assert len(parts.train) < 36 * 0.8
    assert reason.startswith(
        f"{len(parts.train)} images of 3 classes to train on, and there is no GPU: {BODY} at 16x16"
    )
    _, parts, reason, _ = settle(photos, init=str(start), overrides=["data.test_frac=0.5", "data.val_frac=0"])
    assert len(parts.train) == 18
    assert reason.startswith("18 images")


def test_reason_names_the_model_that_was_asked_for(photos: Path) -> None:
    recipe, _, reason, said = settle(photos, model="ViT-mu/8")
    assert "ViT-mu/8 at 32x32 pixels, from nothing" in reason
    assert "ViT-Ti" not in " ".join(said)
    assert recipe.model.depth == parse_name("ViT-mu/8").depth


def test_reason_tells_the_method_that_was_asked_for(photos: Path, start: Path) -> None:
    _, _, reason, _ = settle(photos, init=str(start), overrides=["train.method=steps", "optim.train=last:2"])
    assert "its last 2 blocks are trained" in reason


def test_skewed_classes_are_weighed_and_that_is_said(tmp_path: Path) -> None:
    for name, count in (("much", 24), ("little", 4)):
        (tmp_path / name).mkdir()
        for i in range(count):
            shade = np.full((20, 20, 3), 3 * i + (100 if name == "much" else 0), np.uint8)
            Image.fromarray(shade).save(tmp_path / name / f"{i}.png")
    recipe, _, reason, _ = settle(tmp_path)
    assert recipe.objective.class_weights == "auto"
    assert "classes are weighed, since the largest has" in reason
    assert settle(tmp_path, overrides=["objective.class_weights=none"])[0].objective.class_weights == "none"


def test_size_of_a_large_set_is_looked_at_not_guessed(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    monkeypatch.setattr("vitlab.runs.training.deciding._AUDITED", 10)
    recipe, _, reason, said = settle(photos)
    assert "a large set: not audited" in " ".join(said)
    assert "20 pixels large" in reason
    assert recipe.data.image_size == (32, 32)
