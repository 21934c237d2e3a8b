"""The recipe of a Noisy Student and of its finish, from that of the teacher: the same but for the model and the noise."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitlab.core.errors import UsageError
from vitlab.data.rules import AugmentRule, MixRule
from vitlab.models.cost import count_params
from vitlab.models.families import family_of
from vitlab.models.names import format_name, parse_name
from vitlab.models.spec import ModelSpec, ViTSpec, changed
from vitlab.training.recipe import (
    SCRATCH,
    Recipe,
    for_other_data,
    is_pretext,
    recipe_from_dict,
    recipe_to_dict,
    with_changes,
)
from vitlab.training.rules import NoisyStudentRule

_LARGER = 1.25  # of the side, where nobody says
_SEEDS_APART = 1000  # between generations: calls with neighbouring seeds share no run


class Student(NamedTuple):
    recipe: Recipe
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def student_recipe(
    base: Recipe, teacher: ModelSpec, rule: NoisyStudentRule, generation: int, overrides: Sequence[str] = ()
) -> Student:
    """The recipe of one generation: `base` with the student's model, noise, seed, and what is overridden for students alone.

    Labelled images are smoothed with their labels, so that the loss itself smooths nothing.
    """
    name, notes, warnings = rule.student_of(generation), list[str](), list[str]()
    decided = {
        "image_size": base.data.image_size,
        "num_classes": base.model.num_classes,
        "in_channels": base.data.preprocess().channels,
    }
    spec = changed(teacher.with_linear_head() if name is None else parse_name(name), decided)
    if name is not None and format_name(spec) == format_name(base.model):
        spec = base.model  # with the fields that a name does not show
    noise = {
        key: value for key in ("dropout", "stochastic_depth") if hasattr(spec, key) for value in [getattr(rule, key)]
    }
    if lacking := [key for key in ("dropout", "stochastic_depth") if key not in noise]:
        notes.append(f"{format_name(spec)} has no {' and no '.join(lacking)}: its noise is that of the images alone")
    own, others = count_params(spec), count_params(teacher)
    if own < others:
        warnings.append(
            f"the student {format_name(spec)} is smaller than its teacher ({own / 1e6:.2f} and {others / 1e6:.2f} million "
            f"parameters): Noisy Student gains by one that is equal or larger"
        )
    init, train, optim = base.init, base.train, base.optim
    if init != SCRATCH and format_name(spec) != format_name(base.model):
        # Whatever the recipe keeps frozen is random here, and would stay so.
        init, train = SCRATCH, dataclasses.replace(train, method="steps")
        optim = dataclasses.replace(optim, train="full")
        notes.append(f"the student starts from scratch, and all of it is trained: {base.init} is of another model")
    augment = base.data.augment
    if rule.randaugment != "none" and base.data.mode != "array":  # whose operations are for colours
        augment = dataclasses.replace(
            augment, randaugment=rule.randaugment, layers=rule.layers, magnitude=rule.magnitude
        )
    recipe = dataclasses.replace(
        base,
        title=f"{base.title}: student {generation}",
        seed=base.seed + _SEEDS_APART * generation,
        init=init,
        model=changed(spec, noise),
        data=dataclasses.replace(base.data, augment=augment),
        train=train,
        optim=optim,
        objective=dataclasses.replace(base.objective, label_smoothing=0.0),
        expect=None,
    )
    recipe = _overridden(recipe, overrides)
    if recipe.train.method == "probe":
        raise UsageError(
            "a linear probe cannot be a noisy student: it sees images without noise",
            hint="Add --set train.method=steps.",
        )
    drops = [key for key in noise if getattr(recipe.model, key, 0.0)]
    if recipe.optim.train == "head" and drops:
        warnings.append(
            f"the student trains its head alone, which learns little from {' and '.join(drops)} in a body that stays as it "
            f"is; --student-set optim.train=full trains all of it"
        )
    return Student(recipe, tuple(notes), tuple(warnings))


def require_labels(table: Mapping[str, Any]) -> None:
    """An error for a recipe's table whose objective uses no labels: pseudo-labels would be of no use to it."""
    if is_pretext(table):
        raise UsageError(
            f"objective.kind={table['objective']['kind']} learns without labels, so it has no teacher and no student",
            hint="Pre-train with `vitlab train`, and give that run to --init with a recipe that learns from labels.",
        )


def _overridden(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    if not overrides:
        return recipe
    table = with_changes(for_other_data(recipe_to_dict(recipe)), overrides)
    require_labels(table)
    return recipe_from_dict(table, recipe.model.num_classes)


def finish_recipe(student: Recipe, start: str, rule: NoisyStudentRule, labelled: int) -> Recipe:
    """Fine-tune at a higher resolution on so many `labelled` images, as they are tested (FixRes).

    The shallow half stays frozen, as in the paper, but for a ViT: its patches and its interpolated positions are the first to
    meet the new scale, and while they stay as they were, the blocks behind them make up for little of it.
    """
    size = _finish_size(student, rule)
    data = dataclasses.replace(
        student.data,
        image_size=size,
        crop=dataclasses.replace(student.data.crop, how="whole"),
        augment=AugmentRule(mirror=0.0),
        mix=MixRule(),
    )
    off: dict[str, Any] = dict.fromkeys(family_of(student.model).dropout_fields, 0.0)
    length: dict[str, Any] = {"steps": None, "examples": None, "epochs": rule.finish_epochs}
    train = dataclasses.replace(student.train, **length, ema=0.0, patience=0)
    if train.in_steps(labelled * student.data.repeats, train.batch_size) < rule.finish_steps:
        train = dataclasses.replace(train, epochs=None, steps=rule.finish_steps)
    deep_half = f"last:{max(1, student.model.num_blocks // 2)}"
    trained = "full" if isinstance(student.model, ViTSpec) else deep_half
    lr = student.optim.lr * rule.finish_lr_frac
    return dataclasses.replace(
        student,
        title=f"{student.title}, finished at {size[0]}x{size[1]}",
        init=start,
        keep_head=True,
        head_bias=0.0,
        data=data,
        model=changed(student.model, {**off, "image_size": size}),
        train=train,
        optim=dataclasses.replace(student.optim, lr=lr, train=trained),
        objective=dataclasses.replace(student.objective, label_smoothing=rule.label_smoothing),
        noisy_student=None,
    )


def _finish_size(student: Recipe, rule: NoisyStudentRule) -> tuple[int, int]:
    """The side that was asked for; else about a quarter more, in whole patches."""
    stride, before = student.model.stride, student.data.image_size
    larger = [max(side + stride, round(side * _LARGER / stride) * stride) for side in before]
    rows, cols = [rule.finish_size] * 2 if rule.finish_size else larger
    if rows * cols <= before[0] * before[1]:
        raise UsageError(
            f"the finish is at a higher resolution than {before[0]}x{before[1]}, not at {rows}x{cols}",
            hint="Give a larger noisy_student.finish_size.",
        )
    return rows, cols
