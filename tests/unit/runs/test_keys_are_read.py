"""A config key that nothing reads is a setting lost in silence: here it is a failing test.

The lists of exceptions are exact. A key that starts to be read, or stops, changes the set and fails.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from config_reads import leaf_paths, watch

from vitlab.models.build import build
from vitlab.models.spec import AxialResNetSpec, BiTSpec, ModelSpec, TrunkSpec, ViTSpec, bit_trunk
from vitlab.training.recipe import Recipe

VIT = ViTSpec(
    width=8, depth=2, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), in_channels=1, num_classes=3, registers=1
)

# What one run cannot use together; each line turns on what the others leave off.
SETTINGS = [
    (
        "train.steps=2",
        "optim.name=sgd-paper",
        "schedule.decay=staircase",
        "schedule.milestones=[0.5]",
        "data.cache=file",
    ),
    (
        "train.epochs=0.5",
        "optim.train=lora",
        "schedule.decay=rsqrt",
        "schedule.cooldown=1",
        "data.crop.how=squash",
    ),
    ("train.examples=10", "data.augment.randaugment=augreg", "data.augment.erase=1", "data.mix.mixup=0.2"),
    ("train.steps=1", "data.augment.turn_deg=5", "data.augment.hue=0.1"),
    ("train.steps=1", "objective.kind=masked-patches"),
    ("train.steps=1", "objective.kind=mae", "objective.mae.decoder_width=16"),
]


def test_training_reads_every_key(tmp_path: Path, tiny: Callable[..., Recipe], parts: Any, run: Any) -> None:
    teacher = run(tiny("train.steps=1"), tmp_path / "teacher").folder
    taught = ("train.steps=1", f"teacher={teacher}")
    learn = (*taught, "objective.distillation.weight=0.5", f"init={teacher}", "keep_head=true")
    features = (*taught, "objective.kind=feature-distillation")
    every, read = set[str](), set[str]()
    for number, overrides in enumerate([*SETTINGS, learn, features]):
        recipe = tiny(*overrides)
        run(watch(recipe, read), tmp_path / str(number), parts(val=True))
        every |= leaf_paths(recipe)
    assert every - read == {
        "data.test_frac",  # read where the data is opened, before the run
        "data.val_frac",
        "data.val_from",
        "data.split_seed",
        "data.min_images",
        "data.train_images",
        "data.columns",
        "data.also",
        "expect",  # the promise of a shipped recipe, read by who compares
        "sweep",  # several runs, made by whoever starts them
        "noisy_student",  # likewise
    }


def test_demo_recipes_read_what_they_set(pretraining: Any, transfer: Any) -> None:
    for run in (pretraining, transfer):
        assert {"init", "model.depth", "optim.lr", "data.crop.how", "data.augment.mirror", "train.steps"} <= run.read


@pytest.mark.parametrize(
    ("spec", "ignored"),
    [
        (VIT, set()),
        # Non-local blocks are refused in a stem, and so not looked for.
        (dataclasses.replace(VIT, patch=1, image_size=(16, 16), stem=TrunkSpec(stages=(1, 1))), {"stem.non_local"}),
        # A ResNet takes any image; its size is there for the cost and for the preprocessing.
        (BiTSpec(trunk=bit_trunk((1, 1), 1), image_size=(8, 8), in_channels=1, num_classes=3), {"image_size"}),
        (AxialResNetSpec(stages=(1, 1), width=8, image_size=(32, 32), in_channels=1, num_classes=3), set()),
    ],
    ids=["vit", "hybrid", "bit", "axial resnet"],
)
def test_model_reads_every_key_while_it_is_built_and_run(spec: ModelSpec, ignored: set[str]) -> None:
    read: set[str] = set()
    model = build(watch(spec, read), seed=0).train()
    model(torch.zeros(2, 1, 32, 32))  # another size than the spec's, so that positions are resized
    assert leaf_paths(spec) - read == ignored
