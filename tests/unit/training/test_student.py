"""The recipe of a student is its teacher's with noise on top, and that of the finish has none."""

import dataclasses
from typing import Any

import pytest

from vitlab.core.errors import UsageError
from vitlab.models.families import family_of
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import changed
from vitlab.training.recipe import Recipe, recipe_from_dict, with_changes
from vitlab.training.rules import NoisyStudentRule
from vitlab.training.student import finish_recipe, student_recipe

TABLE: dict[str, Any] = {
    "title": "Base",
    "seed": 7,
    "data": {"source": "x", "image_size": [16, 16], "mode": "L", "augment": {"mirror": 0.0}, "mix": {"mixup": 0.2}},
    "model": {"name": "ViT-w16d4m32h2/4", "pool": "gap"},
    "train": {"epochs": 3, "batch_size": 8, "ema": 0.9},
    "optim": {"lr": 1e-2},
    "objective": {"label_smoothing": 0.3},
}
RULE = NoisyStudentRule(dropout=0.3, stochastic_depth=0.25, randaugment="augreg", layers=3, magnitude=12.0)


def base(*overrides: str) -> Recipe:
    return recipe_from_dict(with_changes(TABLE, overrides), 3)


def test_a_student_is_its_teacher_with_noise() -> None:
    recipe = base()
    student, notes, warnings = student_recipe(recipe, recipe.model, RULE, 1)
    assert (notes, warnings) == ((), ())
    assert student.model == dataclasses.replace(recipe.model, dropout=0.3, stochastic_depth=0.25)
    augment = student.data.augment
    assert (augment.randaugment, augment.layers, augment.magnitude, augment.mirror) == ("augreg", 3, 12.0, 0.0)
    assert student.objective.label_smoothing == 0.0  # the labelled images have theirs already
    assert student.seed not in range(7, 1000)
    assert student.data.mix == recipe.data.mix
    assert (student.train, student.optim, student.schedule) == (recipe.train, recipe.optim, recipe.schedule)


def test_generations_have_seeds_and_models_of_their_own() -> None:
    rule = dataclasses.replace(RULE, generations=2, students=("ViT-w16d4m32h2/4", "ViT-w32d4m64h2/4"))
    recipe = base()
    first = student_recipe(recipe, recipe.model, rule, 1).recipe
    second = student_recipe(recipe, first.model, rule, 2).recipe
    assert [format_name(one.model) for one in (first, second)] == list(rule.students)
    assert first.model.pool == "gap"  # type: ignore[union-attr]
    assert (second.model.image_size, second.model.num_classes, second.model.in_channels) == ((16, 16), 3, 1)
    assert len({recipe.seed, first.seed, second.seed}) == 3


def test_a_smaller_student_is_warned_of_and_trained() -> None:
    recipe = base()
    student = student_recipe(recipe, recipe.model, dataclasses.replace(RULE, students=("ViT-w8d2m16h2/4",)), 1)
    assert "smaller than its teacher" in student.warnings[0]
    assert format_name(student.recipe.model) == "ViT-w8d2m16h2/4"


def test_a_model_without_dropout_has_the_noise_of_the_images_alone() -> None:
    recipe = base()
    rule = dataclasses.replace(RULE, students=("BiT-R50x1",))
    student = student_recipe(recipe, recipe.model, rule, 1)
    assert "no dropout and no stochastic_depth" in student.notes[0]
    assert student.recipe.data.augment.randaugment == "augreg"


def test_a_teacher_of_another_size_gives_its_body() -> None:
    teacher = changed(parse_name("ViT-w32d2m64h2/4"), {"image_size": (32, 32), "num_classes": 3, "in_channels": 1})
    student = student_recipe(base(), teacher, RULE, 1).recipe
    assert format_name(student.model) == "ViT-w32d2m64h2/4"
    assert student.model.image_size == (16, 16)


def test_start_weights_of_another_model_are_not_used() -> None:
    recipe = base("init=some-run")
    same = student_recipe(recipe, recipe.model, RULE, 1)
    other = student_recipe(recipe, recipe.model, dataclasses.replace(RULE, students=("ViT-w32d4m64h2/4",)), 1)
    assert (same.recipe.init, same.notes) == ("some-run", ())
    assert other.recipe.init == "scratch"
    assert "some-run is of another model" in other.notes[0]


def test_a_student_from_scratch_trains_all_of_its_model() -> None:
    """A head on a random frozen body learns next to nothing."""
    for changes in (["optim.train=head"], ["train.method=probe", "optim.train=head"], ["optim.train=last:1"]):
        recipe = base("init=some-run", *changes)
        rule = dataclasses.replace(RULE, students=("ViT-w32d4m64h2/4",))
        other, _, warnings = student_recipe(recipe, recipe.model, rule, 1)
        assert (other.init, other.optim.train, other.train.method, warnings) == ("scratch", "full", "steps", ())
    asked = student_recipe(recipe, recipe.model, rule, 1, ["optim.train=last:2"]).recipe
    assert asked.optim.train == "last:2"


def test_a_student_that_trains_its_head_alone_is_warned_of() -> None:
    recipe = base("init=some-run", "optim.train=head")
    assert "trains its head alone" in student_recipe(recipe, recipe.model, RULE, 1).warnings[0]
    still = dataclasses.replace(RULE, dropout=0.0, stochastic_depth=0.0)
    assert student_recipe(recipe, recipe.model, still, 1).warnings == ()


def test_a_student_without_labels_is_refused() -> None:
    recipe = base()
    with pytest.raises(UsageError, match=r"objective\.kind=mae learns without labels"):
        student_recipe(recipe, recipe.model, RULE, 1, ["objective.kind=mae"])


def test_overrides_of_students_come_last() -> None:
    recipe = base()
    student = student_recipe(
        recipe, recipe.model, RULE, 1, ["train.steps=5", "model.dropout=0.01", "optim.lr=1"]
    ).recipe
    assert (student.train.steps, student.train.epochs, student.optim.lr) == (5, None, 1)
    assert student.model.dropout == 0.01  # type: ignore[union-attr]


def test_a_linear_probe_cannot_be_a_student() -> None:
    recipe = base("train.method=probe", "optim.train=head")
    with pytest.raises(UsageError, match="linear probe"):
        student_recipe(recipe, recipe.model, RULE, 1)


def test_the_finish_is_larger_unaugmented_and_at_a_lower_rate() -> None:
    recipe = base("model.patch_dropout=0.5", "model.attention_dropout=0.1")
    student = student_recipe(recipe, recipe.model, RULE, 1).recipe
    finish = finish_recipe(student, "out/generation-1", RULE, labelled=8000)
    assert finish.data.image_size == finish.model.image_size == (20, 20)
    assert (finish.init, finish.keep_head, finish.optim.train) == ("out/generation-1", True, "full")
    assert (finish.train.epochs, finish.train.ema) == (1.5, 0.0)
    assert finish.optim.lr == pytest.approx(student.optim.lr / 10)
    rates = (getattr(finish.model, name) for name in family_of(finish.model).dropout_fields)
    assert list(rates) == [0.0] * 4, "as they are tested"
    augment, mix = finish.data.augment, finish.data.mix
    assert (augment.randaugment, augment.mirror, mix.mixup, mix.cutmix) == ("none", 0.0, 0.0, 0.0)
    assert finish.data.crop.how == "whole"
    assert finish.objective.label_smoothing == RULE.label_smoothing
    assert finish_recipe(student, "x", dataclasses.replace(RULE, finish_size=32), 8).data.image_size == (32, 32)


def test_the_finish_of_few_images_has_its_least_steps() -> None:
    """1.5 epochs of 100 images in batches of 8 are 19 steps, in which a model cannot adapt to a new scale."""
    student = student_recipe(base(), base().model, RULE, 1).recipe
    few = finish_recipe(student, "x", RULE, labelled=100).train
    assert (few.steps, few.epochs) == (100, None)
    asked = finish_recipe(student, "x", dataclasses.replace(RULE, finish_steps=0), labelled=100).train
    assert (asked.steps, asked.epochs) == (None, 1.5)


def test_the_finish_of_a_convolutional_network_keeps_its_shallow_half() -> None:
    recipe = base()
    student = student_recipe(recipe, recipe.model, dataclasses.replace(RULE, students=("BiT-R50x1",)), 1).recipe
    finish = finish_recipe(student, "x", dataclasses.replace(RULE, finish_size=64), labelled=8)
    assert finish.optim.train == "last:2"


def test_a_finish_that_is_no_larger_is_refused() -> None:
    recipe = base()
    with pytest.raises(UsageError, match="16x16, not at 16x16"):
        finish_recipe(recipe, "x", dataclasses.replace(RULE, finish_size=16), 8)
