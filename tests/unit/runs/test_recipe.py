"""Recipes are strict on the way in, complete on the way out, and every shipped one is sound."""

from importlib import resources
from typing import Any

import pytest

from vitlab.core import config
from vitlab.core.errors import UnknownName, UsageError
from vitlab.models.names import format_name
from vitlab.models.spec import ViTSpec
from vitlab.runs.recipe import Recipe, load_recipe, recipe_from_dict, recipe_to_toml

SHIPPED = sorted(path.name.removesuffix(".toml") for path in (resources.files("vitlab.runs") / "recipes").iterdir())


def digits(*overrides: str) -> Recipe:
    return load_recipe("demo-digits", overrides)


# --- what ships -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_parses_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.title
    text = (resources.files("vitlab.runs") / "recipes" / f"{name}.toml").read_text()
    assert text.startswith("# "), "the first line says what the recipe is for"


def test_both_parts_of_the_demo_ship() -> None:
    assert {"demo-letters", "demo-digits"} <= set(SHIPPED)


def test_digits_recipe_says_what_to_expect() -> None:
    expect = digits().expect
    assert expect is not None
    assert 0.9 < expect.test_top1 < 1
    assert 0 < expect.tolerance < 0.05


def test_transfer_doubles_the_resolution_of_the_same_body() -> None:
    letters, numbers = load_recipe("demo-letters"), digits()
    assert [2 * side for side in letters.data.image_size] == list(numbers.data.image_size)
    assert format_name(letters.model) == format_name(numbers.model)


# --- strict on the way in ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "unknown", "nearest"),
    [
        ("data.imagesize=[8,8]", "data.imagesize", "data.image_size"),
        ("optim.weigth_decay=0", "optim.weigth_decay", "optim.weight_decay"),
        ("optim.warmup_steps=3", "optim.warmup_steps", "optim.warmup_frac"),
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
        load_recipe("demo-digit")
    assert caught.value.nearest[0] == "demo-digits"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("optim.lr=0", "lr must be positive"),
        ("optim.lr=fast", r"optim\.lr' wants a number"),
        ("optim.max_grad_norm=-1", "max_grad_norm must be positive"),
        ("optim.weight_decay=1", "weight_decay must be at least 0"),
        ("optim.weight_decay=nan", "weight_decay must be at least 0"),
        ("optim.label_smoothing=-0.1", "label_smoothing"),
        ("optim.warmup_frac=1.5", "warmup_frac"),
        ("optim.decay=cosin", "Allowed: cosine, linear, constant"),
        ("train.batch_size=0", "batch_size must be at least 1"),
        ("train.steps=0", r"train\.steps must be positive"),
        ("train.steps=2.5", r"train\.steps' wants a whole number"),
        ("data.name=digit", "Allowed: digits, letters"),
        ("data.image_size=[8]", "wants 2 values, not 1"),
        ("model.heads=5", "width 64 is not divisible by 5 heads"),
        ("model=5", "'model' wants a table of keys"),
        ("model.name=ViT-X/2", "unknown model"),
        ("model.name=7", r"model\.name' is missing"),
        ("model.kind=cnn", r"model\.kind must be one of vit, bit"),
        ("seed=x", "'seed' wants a whole number"),
        ("title=5", "'title' wants text"),
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
        *("data.image_size=[-8,8]", "data.image_size=[0,8]", "data.test_frac=0", "data.test_frac=1.5"),
    ],
)
def test_value_that_can_never_work_is_refused_when_the_recipe_is_read(override: str) -> None:
    with pytest.raises(UsageError):
        digits(override)


@pytest.mark.parametrize(
    "override", ["data.count=100", "model.image_size=[32,32]", "model.num_classes=7", "model.in_channels=3"]
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
    with pytest.raises(UsageError, match=r"exactly one unit, not 2 \(steps, epochs\)"):
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
    recipe = load_recipe(name, ["seed=3"])
    assert recipe_from_dict(config.parse_toml(recipe_to_toml(recipe), "text")) == recipe


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_any_model_written_out_reads_back_equal(model: dict[str, Any]) -> None:
    table = {
        "title": 'A "title" \\ with ü',
        "data": {"name": "digits", "image_size": [224, 224]},
        "model": model,
        "train": {"examples": 5, "batch_size": 2},
        "optim": {"lr": 1, "weight_decay": 0},
    }
    recipe = recipe_from_dict(table)
    text = recipe_to_toml(recipe)
    assert recipe_from_dict(config.parse_toml(text, "text")) == recipe
    assert text.startswith(f"# {model['name']}\n")


def test_written_recipe_can_still_be_overridden() -> None:
    table = config.parse_toml(recipe_to_toml(digits()), "text")
    changed = recipe_from_dict(table, ["train.steps=3", "model.depth=2", "optim.lr=1"])
    assert isinstance(changed.model, ViTSpec)
    assert (changed.train.steps, changed.model.depth, changed.optim.lr) == (3, 2, 1.0)


def test_every_key_is_written_out() -> None:
    recipe = digits()
    written = config.parse_toml(recipe_to_toml(recipe), "text")
    absent = {
        path
        for path in config.leaf_paths(recipe)
        if (table := written.get(path.split(".")[0])) is None or ("." in path and path.split(".", 1)[1] not in table)
    }
    assert absent == {"train.steps", "train.examples", "model.stem", "model.layer_scale"}, "only what is None"
