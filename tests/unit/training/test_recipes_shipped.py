"""The recipes that ship are sound, and cost and compute what is published; `test_recipe_values.py` has their numbers."""

from pathlib import Path

import pytest

from vitlab.core import config
from vitlab.core.duration import read_interval
from vitlab.core.errors import UnknownName, UsageError
from vitlab.data.sources.named import find_named
from vitlab.models.build import allocate
from vitlab.models.cost import count_params
from vitlab.models.names import format_name
from vitlab.training.recipe import (
    Recipe,
    extended,
    list_recipes,
    read_recipe,
    recipe_from_dict,
    recipe_text,
)
from vitlab.training.recipe_book import known_data, show_recipe
from vitlab.training.schedule import rate_at
from vitlab.weights.catalogue import list_pretrained


def recipe(name: str) -> Recipe:
    return show_recipe(name).recipe


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_is_sound_and_reads_back_equal(name: str) -> None:
    shown = show_recipe(name)
    text = shown.toml()
    assert recipe_text(name).startswith("# ")
    verb = "noisy-student" if name.startswith("noisy-student-") else "train"
    assert text.startswith(f"# {name}: {shown.about}\n# run it:   vitlab {verb} ")
    assert recipe_from_dict(config.parse_toml(text, name), shown.recipe.model.num_classes) == shown.recipe
    assert shown.steps is not None and shown.steps > 0
    assert "\n# compute:  " in text
    if shown.recipe.schedule.warmup:
        number, unit = read_interval("schedule.warmup", shown.recipe.schedule.warmup)
        assert number < {"%": 100, "step": shown.steps}[unit]


@pytest.mark.parametrize("name", list_recipes("noisy-student-*"))
def test_noisy_student_counts_in_steps_and_its_command_names_unlabelled_images(name: str) -> None:
    """Epochs of a student hold its pseudo-labelled images too: 23.8 million steps where 218,950 are meant."""
    shown = show_recipe(name)
    rule = shown.recipe.noisy_student
    assert rule is not None and shown.recipe.train.steps == shown.steps
    assert ("--unlabelled SOURCE" in shown.command) == (not rule.labelled)
    assert "; of the teacher alone\n" in shown.toml()


@pytest.mark.parametrize("name", list_recipes())
def test_expectation_has_a_source_and_names_a_recipe_that_ships(name: str) -> None:
    expect = recipe(name).expect
    if expect is not None:
        assert expect.source
        assert expect.after in ("", *list_recipes("transfer-*"))


@pytest.mark.parametrize("name", [name for name in list_recipes() if "@" in read_recipe(name).get("init", "")])
def test_start_weights_are_published_for_this_model(name: str) -> None:
    init = recipe(name).init
    assert init in list_pretrained()
    assert init.partition("@")[0] == format_name(recipe(name).model)


def test_extending_goes_one_level_deep() -> None:
    assert extended({"extends": "paper-vit-b16-jft", "seed": 3})["seed"] == 3
    with pytest.raises(UsageError, match="paper-vit-b32-jft extends"):
        extended({"extends": "paper-vit-b32-jft"})
    with pytest.raises(UnknownName):
        extended({"extends": "paper-vit-b17-jft"})


def test_what_a_row_changes_is_all_that_changes() -> None:
    below, above = read_recipe("paper-vit-b16-jft"), read_recipe("paper-vit-l32-jft")
    differing = {key for key in below if below[key] != above[key]}
    assert differing == {"title", "model", "optim", "expect"}
    assert {**below["optim"], "lr": 6e-4} == above["optim"]


def test_a_file_may_extend_a_recipe_that_ships(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "better-vit-s16-90"\n[data.mix]\nmixup = 0.0\n')
    mine, below = read_recipe(str(tmp_path / "mine.toml")), read_recipe("better-vit-s16-90")
    del below["expect"]
    assert mine == {**below, "data": {**below["data"], "mix": {"mixup": 0.0}}}


def test_the_number_of_the_recipe_below_is_nobodys_after_a_change() -> None:
    below = read_recipe("better-vit-s16-90")["expect"]
    changed = {"extends": "better-vit-s16-90", "data": {"mix": {"mixup": 0.0}}}
    for own in ({}, {"expect": {}}, {"expect": {"hours": 3.0}}, {"expect": "none"}):
        assert extended({**changed, **own}).get("expect") == own.get("expect")
    assert extended({**changed, "expect": {"test_top1": 0.7}})["expect"] == {**below, "test_top1": 0.7}


def test_file_that_is_not_a_recipe_is_a_wrong_call(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = ")
    (tmp_path / "child.toml").write_text('extends = "bad.toml"')
    for name, printed in (
        ("other", r"other\.toml.*not exist"),
        ("bad", r"bad\.toml.*TOML"),
        ("child", r"bad\.toml"),
    ):
        with pytest.raises(UsageError, match=printed):
            read_recipe(str(tmp_path / f"{name}.toml"))


def test_a_length_in_another_unit_replaces_the_one_below() -> None:
    train = extended({"extends": "paper-vit-b16-jft", "train": {"steps": 7}})["train"]
    assert (train["steps"], "epochs" in train) == (7, False)


# --- the paper --------------------------------------------------------------------------------------------------------


# With 21,843 classes and the hidden layer of the pre-training head.
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("paper-vit-b16-i21k", 103_186_515),
        ("paper-vit-b32-i21k", 104_843_091),
        ("paper-vit-l16-i21k-90ep", 326_740_307),
        ("paper-vit-l32-i21k-90ep", 328_949_075),
        ("transfer-imagenet", 86_859_496),
        ("transfer-imagenet-512", 305_174_504),
        ("augreg-vit-s16-i21k", 22_050_664 + 385 * (21_843 - 1000)),
    ],
)
def test_model_has_the_published_number_of_parameters(name: str, params: int) -> None:
    spec = recipe(name).model
    assert count_params(spec) == params == sum(p.numel() for p in allocate(spec).parameters())


@pytest.mark.parametrize("name", list_recipes("paper-*-jft*"))
def test_compute_is_that_of_table_6(name: str) -> None:
    shown = show_recipe(name)
    assert shown.recipe.expect is not None and shown.recipe.train.epochs is not None
    published = float(shown.recipe.expect.source.removeprefix("Table 6: ").partition(" ")[0].replace(",", ""))
    found = shown.exaflops
    assert found == pytest.approx(published, rel=0.035), "R50+ViT-L/16 is published 3 % too high"


def test_hours_on_paper_are_the_compute_at_the_speed_that_is_named() -> None:
    line = next(line for line in show_recipe("paper-vit-h14-jft").toml().splitlines() if line.startswith("# compute:"))
    assert line.endswith("hours of one H100 or H200, if 40% of its 989 TFLOP/s are reached")
    exaflops, hours = [float(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit()][:2]
    assert hours == pytest.approx(exaflops * 1e18 / (0.4 * 989e12) / 3600, rel=1e-3)


@pytest.mark.parametrize("name", [*list_recipes("better-*"), *list_recipes("augreg-*")])
def test_images_are_prepared_as_in_big_vision(name: str) -> None:
    """Its configs: `decode_jpeg_and_inception_crop(224)`, and `resize_small(256)|central_crop(224)`, with their defaults."""
    data = recipe(name).data
    tested = data.preprocess()
    assert (tested.resize, tested.crop_frac, tested.filter) == ("shorter-side", 0.875, "area")
    assert (data.crop.how, data.crop.filter, data.crop.antialias) == ("inception", "bilinear", False)
    assert (data.crop.area, data.crop.aspect) == ((0.05, 1.0), (0.75, 1.33))


# --- its relatives ----------------------------------------------------------------------------------------------------


# The released code: end of the warm-up, the drops of the rate and the last step; then MixUp, the resized side and the crop's.
HYPERRULE = {
    "imagenet": ((500, 6_000, 12_000, 18_000, 20_000), 0.1, 448, 384),  # half a million images or more
    "cifar10": ((500, 3_000, 6_000, 9_000, 10_000), 0.1, 160, 128),  # 20,000 or more, below 96x96 pixels
    "pets": ((100, 200, 300, 400, 500), 0.0, 448, 384),
}


@pytest.mark.parametrize("name", HYPERRULE)
def test_bit_recipes_are_the_hyperrule(name: str) -> None:
    (warmup, *drops, end), mixup, resize, crop = HYPERRULE[name]
    found = recipe(f"bit-hyperrule-{name}")

    def rate(step: int) -> float:
        return rate_at(found.schedule, step, base=found.optim.lr, total_steps=end)

    assert (found.train.steps, found.train.batch_size) == (end, 512)
    assert (found.optim.momentum, found.optim.weight_decay, found.data.mix.mixup) == (0.9, 0.0, mixup)
    assert rate(warmup // 2 - 1) == pytest.approx(0.0015)
    assert rate(warmup - 1) == rate(drops[0] - 1) == pytest.approx(0.003)
    for count, drop in enumerate(drops, 1):
        assert rate(drop) == rate((*drops, end)[count] - 1) == pytest.approx(0.003 / 10**count)
    assert (found.data.image_size, round(crop / found.data.crop.crop_frac)) == ((crop, crop), resize)


LEVELS = {"none": (None, 0), "light1": (0, 0), "medium1": (15, 0.2), "medium2": (15, 0.5), "strong1": (20, 0.5)}


@pytest.mark.parametrize("name", list_recipes("augreg-*"))
def test_augreg_recipes_say_their_level_and_have_it(name: str) -> None:
    shown = show_recipe(name)
    level = next(level for level in LEVELS if level in shown.about)
    augment, found = shown.recipe.data.augment, shown.recipe
    magnitude = augment.magnitude if augment.randaugment == "augreg" else None
    assert (magnitude, found.data.mix.mixup) == LEVELS[level]
    assert (found.train.epochs, found.train.batch_size, found.optim.lr) == (300, 4096, 1e-3)
    if name.endswith("i21k"):
        assert f"weight decay {found.optim.weight_decay}" in shown.about
    assert found.head_bias == {"imagenet": -6.9, "imagenet21k": -10.0}[found.data.source]


# --- data that is not here --------------------------------------------------------------------------------------------


def test_published_sizes_of_data() -> None:
    assert known_data("shards/jft") == (18_291, 303_000_000, {"train"})
    assert known_data("i21k") == (find_named("i21k").classes, 14_197_122, set())
    assert known_data("vtab:svhn") == (10, 800, {"train", "val", "test"})
    assert known_data("vtab:svhn/800") == (10, 800, {"train", "val"})
    assert known_data("vtab:svhn/1000") == (10, 1000, {"train", "test"})
    assert known_data("fractals:categories=7,instances=10,image_size=16") == (7, 70, {"train", "test"})
    assert known_data("some/folder") is None
    with pytest.raises(UnknownName, match="VTAB task"):
        known_data("vtab:mnist")


def test_what_is_held_out_is_not_trained_on() -> None:
    assert show_recipe("laptop-digits").images == round(0.8 * 1797)
    assert show_recipe("better-vit-s16-90").images == round(0.99 * 1_281_167)
