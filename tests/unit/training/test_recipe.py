"""Recipes are strict on the way in, complete on the way out, and every shipped one is sound."""

import operator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from config_reads import leaf_paths

from vitlab.core import config
from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ViTSpec, changed
from vitlab.training.recipe import (
    Recipe,
    list_recipes,
    merged,
    model_by_name,
    read_recipe,
    recipe_from_dict,
    recipe_to_toml,
    with_changes,
)
from vitlab.training.recipe_book import show_recipe

SHIPPED = list_recipes()


def recipe_of(name: str, *overrides: str) -> Recipe:
    return recipe_from_dict(with_changes(read_recipe(name), overrides), 10)


def digits(*overrides: str) -> Recipe:
    return recipe_of("demo-digits", *overrides)


# --- what ships -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_parses_and_says_what_it_is(name: str) -> None:
    assert recipe_of(name).title
    text = (resources.files("vitlab.training") / "recipes" / f"{name}.toml").read_text()
    assert text.startswith("# "), "the first line says what the recipe is for"


def test_both_parts_of_the_demo_ship() -> None:
    assert {"demo-fractals", "demo-digits"} <= set(SHIPPED)


def test_transfer_raises_the_resolution_of_the_same_body() -> None:
    before, after = recipe_of("demo-fractals").data.image_size, digits().data.image_size
    assert before[0] < after[0] and before[1] < after[1]
    assert format_name(recipe_of("demo-fractals").model) == format_name(digits().model)


# --- strict on the way in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("data.imagesize=[8,8]", "data.imagesize", "data.image_size"),
        ("optim.weigth_decay=0", "optim.weigth_decay", "optim.weight_decay"),
        ("schedule.warmupp=3", "schedule.warmupp", "schedule.warmup"),
        ("data.augment.miror=1", "data.augment.miror", "data.augment.mirror"),
        ("objective.distillation.weigth=1", "objective.distillation.weigth", "objective.distillation.weight"),
        ("train.step=3", "train.step", "train.steps"),
        ("model.stochastic_dept=0.1", "model.stochastic_dept", "model.stochastic_depth"),
        ("tittle=x", "tittle", "title"),
        ("expect.test_top=1", "expect.test_top", "expect.test_top1"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(override: str, unknown: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"'{unknown}'") as caught:
        digits(override)
    assert caught.value.nearest[0] == nearest


def test_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        read_recipe("demo-digit")
    assert caught.value.nearest[0] == "demo-digits"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("optim.lr=0", "lr must be positive"),
        ("optim.lr=fast", r"optim\.lr' must be a number"),
        ("optim.max_grad_norm=-1", "max_grad_norm"),
        ("optim.weight_decay=-1", "weight_decay must not be negative"),
        ("optim.weight_decay=nan", "weight_decay must not be negative"),
        ("optim.train=some", "some"),
        ("objective.label_smoothing=-0.1", "label_smoothing"),
        ("objective.kind=hinge", "Allowed: softmax, sigmoid"),
        ("schedule.warmup=150%", "more than the whole run"),
        ("schedule.decay=cosin", "Allowed: cosine, linear, staircase"),
        ("data.crop.how=middle", "Allowed: inception"),
        ("data.augment.mirror=2", r"augment\.mirror"),
        ("data.mix.mixup=-1", "mix.mixup"),
        ("data.workers=-1", r"data\.workers"),
        ("data.max_bad=-1", r"data\.max_bad"),
        ("data.repeats=0", r"data\.repeats"),
        ("data.cache=disk", "Allowed: none, memory, file"),
        ("data.mean=[0.5,0.5]", "mean and std"),
        ("data.source=5", r"data\.source' must be text"),
        ("lora.rank=0", r"lora\.rank"),
        (
            "teacher=x",
            r"teacher.*\n.*--set objective\.distillation\.weight=",
        ),
        (
            "objective.distillation.weight=0.5",
            r"objective\.distillation.*\n.*--set teacher=",
        ),
        ("expect.test_top1=90", r"expect\.test_top1 is a fraction"),
        ("train.micro_batch=-1", r"train\.micro_batch"),
        ("train.ema=1", r"train\.ema"),
        ("train.save_every=0.1", r"train\.save_every.*0\.1"),
        ("train.eval_every=0", r"train\.eval_every"),
        ("train.keep=0", r"train\.keep"),
        ("train.precision=fp8", "Allowed: fp32, bf16, fp16"),
        ("seed=-1", "seed must be"),
        ("train.batch_size=0", "batch_size"),
        ("train.steps=0", r"train\.steps"),
        ("train.steps=2.5", r"train\.steps' must be a whole number"),
        ("data.image_size=[8]", "must have 2 values, not 1"),
        ("model.heads=5", "64.*5 heads"),
        ("model=5", "'model' must be a table"),
        ("model.name=ViT-X/2", "unknown model"),
        ("model.name=7", r"'model\.name' must be text, not 7"),
        ("model.kind=cnn", r"model\.kind.*vit, bit"),
        ("seed=x", "'seed' must be a whole number"),
        ("title=5", "'title' must be text"),
        ("lr=0.1", r"unknown config key 'lr'\nIs it optim\.lr or sweep\.lr\?"),
        ("batch_size=4", r"Is it train\.batch_size\?"),
        ("learning_rate=4", r"Allowed: title, .*optim"),
    ],
)
def test_value_that_cannot_work_is_refused(override: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        digits(override)


@pytest.mark.parametrize(
    "override",
    [
        *("optim.lr=nan", "optim.lr=inf", "optim.max_grad_norm=nan", "train.epochs=nan", "train.epochs=inf"),
        *("optim.betas=[2.0,0.9]", "optim.betas=[0.9,-1]", "optim.betas=[nan,0.9]"),
        *("data.image_size=[-8,8]", "data.image_size=[0,8]", "data.test_frac=1", "data.test_frac=1.5"),
    ],
)
def test_value_that_can_never_work_is_refused_when_the_recipe_is_read(override: str) -> None:
    with pytest.raises(UsageError):
        digits(override)


@pytest.mark.parametrize(
    "override", ["data.count=100", "model.image_size=[99,99]", "model.num_classes=7", "model.in_channels=3"]
)
def test_key_that_would_be_ignored_is_refused(override: str) -> None:
    with pytest.raises(UsageError):
        digits(override)


# --- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        *("train.steps=7", "train.epochs=0.5", "train.examples=99"),
        pytest.param("train.steps = 7"),
    ],
)
def test_length_on_the_command_line_replaces_the_recipes_whatever_its_unit(override: str) -> None:
    train = digits(override).train
    unit, value = (part.strip() for part in override.removeprefix("train.").split("="))
    given = {name: getattr(train, name) for name in ("steps", "epochs", "examples")}
    assert given == {**dict.fromkeys(given), unit: float(value)}


def test_two_lengths_on_the_command_line_are_refused() -> None:
    with pytest.raises(UsageError, match=r"one unit.*2.*steps, epochs"):
        digits("train.steps=1", "train.epochs=1")


# --- complete on the way out ------------------------------------------------------------------------------------------

MODELS: list[dict[str, Any]] = [
    {"name": "ViT-S/16"},
    {"name": "R50+ViT-B/16", "head": "mlp-tanh"},
    {"name": "R+ViT-Ti/16"},
    {"name": "BiT-R50x1"},
    {"name": "Axial-ViT-B/16"},
    {"name": "ViT-Ti/16", "layer_scale": 1e-5, "registers": 4, "pool": "map", "pos": "sincos2d"},
]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_written_out_reads_back_equal(name: str) -> None:
    recipe = recipe_of(name, "seed=3")
    assert recipe_from_dict(config.parse_toml(recipe_to_toml(recipe), "text"), 10) == recipe


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_any_model_written_out_reads_back_equal(model: dict[str, Any]) -> None:
    table = {
        "title": 'A "title" \\ with ü',
        "data": {"source": "digits", "image_size": [224, 224]},
        "model": model,
        "train": {"examples": 5, "batch_size": 2},
        "optim": {"lr": 1, "weight_decay": 0},
    }
    recipe = recipe_from_dict(table, 7)
    text = recipe_to_toml(recipe)
    assert recipe_from_dict(config.parse_toml(text, "text"), 7) == recipe
    assert text.startswith(f"# {model['name']}\n")


def test_written_recipe_can_still_be_overridden() -> None:
    table = config.parse_toml(recipe_to_toml(digits()), "text")
    changed = recipe_from_dict(with_changes(table, ["train.steps=3", "model.depth=2", "optim.lr=1"]), 10)
    assert isinstance(changed.model, ViTSpec)
    assert (changed.train.steps, changed.model.depth, changed.optim.lr) == (3, 2, 1.0)


def test_every_key_is_written_out() -> None:
    recipe = digits("train.steps=1")
    written = config.parse_toml(recipe_to_toml(recipe), "text")

    def has(path: str) -> bool:
        table: Any = written
        for key in path.split("."):
            if key not in table:
                return False
            table = table[key]
        return True

    absent = {path for path in leaf_paths(recipe) if not has(path)}
    assert {"train.epochs", "train.examples", "objective.distillation"} <= absent
    assert {operator.attrgetter(path)(recipe) for path in absent} == {None}, "only what is None"


# --- one on top of another --------------------------------------------------------------------------------------------


def test_table_on_top_changes_what_it_names_and_replaces_a_length_of_another_unit() -> None:
    below = {"train": {"epochs": 3, "batch_size": 4}, "optim": {"lr": 1.0}, "title": "below"}
    above = {"train": {"steps": 5}, "title": "above"}
    assert merged(below, above) == {"train": {"steps": 5, "batch_size": 4}, "optim": {"lr": 1.0}, "title": "above"}
    assert below["train"] == {"epochs": 3, "batch_size": 4}


def test_one_number_is_a_square() -> None:
    table = with_changes(read_recipe("demo-digits"), ["data.image_size=12"])
    assert recipe_from_dict(table, 10) == recipe_from_dict(with_changes(table, ["data.image_size=[12,12]"]), 10)
    for wrong in ("true", "12.5", "0", "wide"):
        with pytest.raises(UsageError, match=r"data\.image_size"):
            recipe_from_dict(with_changes(table, [f"data.image_size={wrong}"]), 10)


def test_recipe_extends_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(recipe_to_toml(digits()))
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[optim]\nlr = 0.5\n')
    assert recipe_from_dict(read_recipe(str(tmp_path / "mine.toml")), 10).optim.lr == 0.5
    assert show_recipe(str(tmp_path / "mine.toml")).recipe.optim.lr == 0.5
    (tmp_path / "third.toml").write_text('extends = "mine.toml"\n')
    with pytest.raises(UsageError, match=r"mine\.toml extends"):
        read_recipe(str(tmp_path / "third.toml"))


def test_model_by_name_is_the_model() -> None:
    for name in ("ViT-B/16", "ViT-w16d2m32h2/4", "BiT-R50x1", "R50+ViT-B/16"):
        spec = changed(parse_name(name), {"num_classes": 7, **({"pool": "gap"} if "ViT" in name else {})})
        table = model_by_name(spec)
        assert table.pop("name") == name
        assert changed(parse_name(name), {**table, "num_classes": 7}) == spec
