"""The choice as a table, every mode of it, each carried out once; and the reason names what is really done."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from run_jobs import plan_train
from slow_cases import slow_after

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.environment import CACHE_VARIABLE, DATA_VARIABLE
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset, from_arrays
from vitlab.data.loader import BadImages, TrainInputs, train_batches
from vitlab.data.parts import Parts, arrange
from vitlab.data.preprocess import Preprocess
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import load
from vitlab.models.names import parse_name
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, ViTSpec, bit_trunk, changed
from vitlab.runs.training.finish import RunResult
from vitlab.runs.training.resolve import resolve
from vitlab.runs.training.training_run import train
from vitlab.training.call import TrainCall
from vitlab.training.choice import Facts, choose, describe_choice, pick_tuning_mode, requested_mode, start_from
from vitlab.training.recipe import (
    SCRATCH,
    Recipe,
    list_recipes,
    merged,
    read_data_config,
    read_recipe,
    recipe_from_dict,
    with_changes,
)
from vitlab.training.start import SHIPPED
from vitlab.weights.surgery import require_same_body

DATA = Path(os.environ.get(DATA_VARIABLE, Path(__file__).parents[4] / "shared" / "data"))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BODY = "ViT-w16d6m32h2/4"
VIT = changed(parse_name(BODY), {"image_size": (16, 16), "num_classes": 3})
BIT = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(16, 16), num_classes=2)


def facts(images: int, classes: int = 10, device: torch.device = CUDA, side: int = 16, **more: Any) -> Facts:
    return Facts(images, classes, side, 1.0, False, device, **{"memory": 2**40, **more})


@pytest.mark.parametrize(
    ("known", "spec", "mode", "because"),
    [
        (facts(60, device=CPU), VIT, "probe", "no GPU"),
        (facts(1_000_000, device=CPU), VIT, "probe", "no GPU"),
        (facts(1_000_000, device=CPU, memory=2**20), VIT, "head", "features do not fit"),
        (facts(60, device=CPU, processes=2), VIT, "head", "several processes"),
        (facts(60, device=CPU), BIT, "probe", "no GPU"),
        (facts(60_000), BIT, "probe", "BiT"),
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
def test_tuning_mode_by_images_classes_size_start_and_machine(
    known: Facts, spec: ModelSpec, mode: str, because: str
) -> None:
    found, why = pick_tuning_mode(known, spec, side=16)
    assert found == mode
    assert because in why


def test_crops_for_weights_that_are_tested_by_area_are_those_of_big_vision() -> None:
    rule = Preprocess(image_size=(16, 16), resize="shorter-side", crop_frac=0.875, filter="area")
    data = choose(facts(50_000), (VIT, rule)).table["data"]
    assert (data["filter"], data["crop"]["filter"], data["crop"]["antialias"]) == ("area", "bilinear", False)
    assert "filter" not in choose(facts(50_000), (VIT, RULE)).table["data"]["crop"]


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


def photos_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Noise on smooth patches, or photos where they are."""
    if name != "synthetic":
        if not (DATA / name).is_dir():
            pytest.skip(f"needs {name} in VITLAB_DATA")
        monkeypatch.setenv(DATA_VARIABLE, str(DATA))
        return open_data(name).parts["train"]
    draw = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(60, 3, 5, 5, generator=draw), size=(64, 64), mode="bilinear")
    images = (smooth * 180 + torch.rand(smooth.shape, generator=draw) * 60).to(torch.uint8)
    return from_arrays(images, torch.arange(60) % 10, tuple("abcdefghij"), "synthetic")


@pytest.mark.parametrize("name", slow_after(1, ["synthetic", "hymenoptera", "cifar10"]))
@pytest.mark.parametrize("side", slow_after(1, [32, 64]))
def test_augmentation_without_start_weights_leaves_something_to_see(
    name: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a caller asks for another size than the one that was chosen."""
    train = photos_of(name, monkeypatch)
    for known in (facts(60_000, side=side), facts(60_000, side=500)):
        table, _, _ = choose(known, None)
        data = read_data_config(merged(table, {"data": {"source": "", "image_size": [side, side]}}))
        loaded = train_batches(
            TrainInputs(train, data.preprocess(), data.crop, Order(len(train), 50, seed=0), augmentation=data.augment),
            range(8),
            bad=BadImages(0),
        )
        images_BCYX = torch.cat([batch.images for batch in loaded])
        flat_B = (images_BCYX.amax(dim=(2, 3)) == images_BCYX.amin(dim=(2, 3))).all(dim=1)
        assert int(flat_B.sum()) <= 1, f"{int(flat_B.sum())} of {len(flat_B)} images are one flat colour"


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
    table, _, _ = choose(known, (VIT, rule), requested_mode(asked.split()))
    assert table["train"].get("method", "steps") == method
    assert (table["optim"].get("train", "full"), table["optim"]["lr"]) == (trained, lr)


@pytest.mark.parametrize(
    "spec", [BIT, AxialResNetSpec(stages=(1,), width=16, image_size=(16, 16)), VIT], ids=lambda s: s.kind
)
def test_features_for_a_probe_are_in_half_precision_only_where_they_stay_alike(spec: ModelSpec) -> None:
    """The fitted head is tested on features in float32."""
    table = choose(facts(500), (spec, RULE)).table
    assert table["train"]["method"] == "probe"
    assert (table["train"]["precision"] == "fp32") == (spec is not VIT)


@pytest.mark.parametrize("images", [500, 5_000, 20_000, 90_000])
def test_everything_about_a_head_in_steps_is_a_heads_own_however_many_images(images: int) -> None:
    rule = Preprocess(mode="RGB", image_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    asked = requested_mode(["optim.train=head", "train.method=steps"])
    table, because, _ = choose(facts(images), (VIT, rule), asked)
    assert table["optim"] == {"lr": 1e-3, "train": "head"}, "no decay of another mode"
    assert (table["train"]["epochs"], because) == (5, "as asked")


def test_some_blocks_of_a_shallow_model_are_not_all_of_it() -> None:
    rule = Preprocess(mode="RGB", image_size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)
    shallow = changed(VIT, {"depth": 4})
    assert "layer_decay" in choose(facts(20_000), (shallow, rule))[0]["optim"]
    assert (
        "layer_decay" not in choose(facts(20_000), (shallow, rule), requested_mode(["optim.train=last:2"]))[0]["optim"]
    )


# --- every mode, carried out ------------------------------------------------------------------------------------------


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


MODES = {
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


@pytest.mark.parametrize("mode", slow_after(1, sorted(MODES, key=("lora", "last", "probe", "head", "full").index)))
def test_each_tuning_mode_trains_what_it_names(
    mode: str, photos: Path, start: Path, tmp_path: Path, run: Callable[..., RunResult]
) -> None:
    assert pick_tuning_mode(MODES[mode], VIT, side=16)[0] == mode
    began = load(start, device="cpu")
    table, because, _ = choose(MODES[mode], (began.model.spec, began.preprocess))
    given = {"title": mode, "init": str(start), "data": {"source": str(photos)}}
    small = ["train.epochs=2", "data.workers=0", "train.precision=fp32", "train.batch_size=8", "train.eval_every=100%"]
    table = with_changes(merged(table, given), small)
    parts = arrange(open_data(photos), read_data_config(table))
    recipe = recipe_from_dict(table, 3)
    result = run(recipe, tmp_path / "run", parts)
    before, after = began.model.state_dict(), result.classifier.model.state_dict()
    moved = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert moved == MOVES[mode]
    assert result.images_per_second > 0
    if mode == "last":
        blocks = {
            name.split(".")[1] for name in after if name.startswith("blocks") and (after[name] != before[name]).any()
        }
        assert blocks == {"2", "3", "4", "5"}
    words = {
        "probe": "linear probe",
        "head": "in steps",
        "lora": "LoRA",
        "last": "last 4 blocks",
        "full": "all weights",
    }
    assert words[mode] in describe_choice(recipe, len(parts.train), because)


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
    return plan.recipe, plan.parts, plan.reason, plan.opening


def test_reason_counts_what_is_left_to_train_on(photos: Path, start: Path) -> None:
    _, parts, reason, _ = settle(photos, init=str(start))
    assert len(parts.train) < 36 * 0.8
    assert reason.startswith(
        f"{len(parts.train)} images of 3 classes to train on, and there is no GPU: {BODY} at 16x16"
    )
    _, parts, reason, _ = settle(photos, init=str(start), overrides=["data.test_frac=0.5", "data.val_frac=0"])
    assert len(parts.train) == 18
    assert reason.startswith("18 images")


@pytest.mark.slow
def test_copies_between_validation_and_test_count_where_the_head_is_fitted_to_both(
    photos: Path, start: Path, tmp_path: Path
) -> None:
    pictures = sorted(photos.rglob("*.png"))
    for i, path in enumerate(pictures):
        part = ("train", "train", "val", "test")[i % 4]
        target = tmp_path / part / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
        if i % 12 == 2:  # one validation image of each class
            copy = tmp_path / "test" / path.parent.name
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy / f"again {path.name}")
            shutil.copy(path, copy / f"thrice {path.name}")
    reported = "6 test or validation images are trained on, too"
    assert any(reported in line for line in settle(tmp_path, init=str(start))[3])
    steps = settle(tmp_path, init=str(start), overrides=["train.method=steps"])[3]
    assert not any("trained on, too" in line for line in steps)
    assert any("The same in two parts: 3" in line for line in steps)


def test_reason_names_the_model_that_was_asked_for(photos: Path) -> None:
    recipe, _, reason, printed = settle(photos, model="ViT-mu/8")
    assert "ViT-mu/8 at 32x32 pixels, from scratch" in reason
    assert "ViT-Ti" not in " ".join(printed)
    assert recipe.model.depth == parse_name("ViT-mu/8").depth


def test_reason_names_the_method_that_was_asked_for(photos: Path, start: Path) -> None:
    _, _, reason, _ = settle(photos, init=str(start), overrides=["train.method=steps", "optim.train=last:2"])
    assert "its last 2 blocks are trained" in reason


def test_skewed_classes_are_weighted_and_that_is_reported(tmp_path: Path) -> None:
    for name, count in (("much", 24), ("little", 4)):
        (tmp_path / name).mkdir()
        for i in range(count):
            shade = np.full((20, 20, 3), 3 * i + (100 if name == "much" else 0), np.uint8)
            Image.fromarray(shade).save(tmp_path / name / f"{i}.png")
    recipe, _, reason, _ = settle(tmp_path)
    assert recipe.objective.class_weights == "auto"
    assert "classes are weighted, since the largest has" in reason
    assert settle(tmp_path, overrides=["objective.class_weights=none"])[0].objective.class_weights == "none"


def test_size_of_a_large_set_is_looked_at_not_guessed(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    monkeypatch.setattr("vitlab.data.auditing.preflight._AUDITED", 10)
    recipe, _, reason, printed = settle(photos, init="scratch")
    assert "a large set: not audited" in " ".join(printed)
    assert "20 pixels large" in reason
    assert recipe.data.image_size == (32, 32)


def test_start_that_nobody_asked_for_gives_way_to_a_model_or_a_size_that_it_cannot_have(photos: Path) -> None:
    assert settle(photos)[0].init == SHIPPED
    assert settle(photos, overrides=["model.name=ViT-w16d1m32h2/4"])[0].init == SCRATCH
    recipe, _, _, printed = settle(photos, overrides=["data.image_size=20"])
    assert recipe.init == SCRATCH and any("patch 16 does not divide the 20x20 image" in line for line in printed)
    assert settle(photos, overrides=["data.image_size=32"])[0].init == SCRATCH, "2x2 patches show nothing"
    assert settle(photos, overrides=["data.image_size=96"])[0].init == SHIPPED


@pytest.mark.parametrize("given", [{"model": "ViT-w16d1m32h2/4"}, {"recipe": "laptop-shapes"}])
def test_auto_beside_a_model_or_a_recipe_asks_for_nothing(photos: Path, given: dict[str, str]) -> None:
    assert settle(photos, init="auto", **given)[0].init == SCRATCH


def test_synthetic_images_are_not_searched_for_copies() -> None:
    """Instances of a category are near-copies by construction."""
    call = TrainCall("fractals:categories=4,instances=12,image_size=16", init="scratch")
    job = resolve(call, World(0, 1, torch.device("cpu")), Console(quiet=True))
    printed = " ".join((*job.notes, *job.warnings))
    assert job.warnings == () and "same" not in printed and "audited" not in printed


# --- a recipe and other start weights ---------------------------------------------------------------------------------

RULE = Preprocess(image_size=(16, 16))
LATER = "{}, as the start weights have it; the recipe says {}"


@pytest.mark.parametrize(
    ("spec", "written", "printed"),
    [
        (parse_name("ViT-S/16"), {"name": "ViT-S/16"}, ""),
        (parse_name("ViT-S/16"), {"name": "vit-s-16", "pool": "cls", "dropout": 0.1, "layer_scale": "none"}, ""),
        (parse_name("ViT-S/16"), {}, ""),
        (VIT, {"name": "ViT-B/16"}, LATER.format(BODY, "ViT-B/16")),
        (parse_name("BiT-R50x1"), {"name": "ViT-B/16"}, LATER.format("BiT-R50x1", "ViT-B/16")),
        (VIT, {"name": "BiT-R50x1"}, LATER.format(BODY, "BiT-R50x1")),
        (
            changed(parse_name("ViT-S/16"), {"pool": "gap", "pos": "sincos2d"}),
            {"name": "ViT-S/16"},
            LATER.format("ViT-S/16 with pool=gap, pos=sincos2d", "ViT-S/16 with pool=cls, pos=learned"),
        ),
        (
            changed(parse_name("ViT-S/16"), {"layer_scale": 1.0}),
            {"name": "ViT-B/16", "depth": 6},
            LATER.format("ViT-S/16 with layer_scale=1.0", "ViT-B/16 with depth=6, layer_scale=none"),
        ),
        (VIT, {"kind": "vit", "width": 16, "depth": 4}, LATER.format(BODY, "depth=4")),
    ],
)
def test_model_of_start_weights_is_reported_where_the_recipe_has_another(
    spec: ModelSpec, written: dict[str, Any], printed: str
) -> None:
    assert start_from({"model": written}, spec, RULE).model == printed


def test_recipe_keeps_what_regularises_and_start_weights_the_rest() -> None:
    used = changed(VIT, {"dropout": 0.1, "stochastic_depth": 0.2, "pos_resize": "bicubic", "pool": "gap"})
    table = {
        **read_recipe("transfer-pets"),
        "model": {"name": "ViT-B/16", "attention_dropout": 0.3, "head": "mlp-tanh"},
    }
    recipe = recipe_from_dict(start_from(table, used, RULE).table, 7)
    wanted = {"image_size": (384, 384), "num_classes": 7, "dropout": 0.0, "stochastic_depth": 0.0}
    assert recipe.model == changed(used, {**wanted, "attention_dropout": 0.3})
    asked = {**table, "model": {"name": "ViT-B/16", "pos_resize": "bilinear"}}
    assert start_from(asked, used, RULE).table["model"]["pos_resize"] == "bilinear"
    dropped = {**table, "model": {"name": "ViT-B/16", "dropout": 0.1}}
    resnet = recipe_from_dict(start_from(dropped, BIT, RULE).table, 7)
    assert resnet.model == changed(BIT, {"image_size": (384, 384), "num_classes": 7}), "a ResNet has no dropout"


def test_pixels_of_start_weights_are_used_and_reported_where_the_recipe_has_others() -> None:
    other = Preprocess(image_size=(16, 16), filter="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))
    table = read_recipe("transfer-pets")
    started = start_from(table, VIT, other)
    data = read_data_config(started.table)
    assert (data.mean, data.std, data.filter, data.image_size) == (other.mean, other.std, "bilinear", (384, 384))
    assert started.pixels == "pixels: " + LATER.format("mean=[0.4, 0.5, 0.6], std=0.2", "mean=0.5, std=0.5")
    for same in ({}, {"mean": [0.5], "std": [0.5, 0.5, 0.5]}):
        assert start_from(merged(table, {"data": same}), VIT, RULE).pixels == ""


@pytest.mark.parametrize(
    ("name", "side", "wanted"),
    [
        ("ViT-Ti/16@augreg-i21k", 32, {}),
        ("ViT-S/14@dinov2", 28, {"gelu": "exact", "layer_scale": 1.0, "pos_resize": "bicubic-offset"}),
    ],
)
def test_published_body_is_known_without_a_download(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, side: int, wanted: dict[str, Any]
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "empty"))
    monkeypatch.setattr("vitlab.training.draft.load", None)
    recipe, _, _, printed = settle(
        photos, recipe="transfer-pets", init=name, overrides=[f"data.image_size={side}", "train.batch_size=4"]
    )
    assert recipe.init == name
    given = {"image_size": (side, side), "num_classes": 3, **wanted}
    assert recipe.model == changed(parse_name(name.partition("@")[0]), given)
    assert any(line.startswith(f"model: {name.partition('@')[0]}") for line in printed)


PRETRAINING = [name for name in list_recipes() if "after" in str(read_recipe(name).get("expect"))]


@pytest.mark.parametrize("name", PRETRAINING)
def test_what_a_recipe_pretrains_can_start_the_one_that_gives_its_number(name: str) -> None:
    first = recipe_from_dict(read_recipe(name), 1000)
    assert first.expect is not None
    # The only patches that do not divide the 384 pixels of the transfer.
    size = {"data": {"image_size": [378, 378]}} if isinstance(first.model, ViTSpec) and first.model.patch == 14 else {}
    table = merged(read_recipe(first.expect.after), size)
    recipe = recipe_from_dict(start_from(table, first.model, first.data.preprocess()).table, 37)
    require_same_body(first.model, recipe.model)
    assert not isinstance(recipe.model, ViTSpec) or (recipe.model.head, recipe.model.dropout) == ("linear", 0.0)
