"""A config key that nothing reads is a setting lost in silence: here it is a failing test.

The lists of exceptions are exact. A key that starts to be read, or stops, changes the set and fails.
"""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.core import config
from vitlab.models.build import build
from vitlab.models.spec import BiTSpec, ModelSpec, TrunkSpec, ViTSpec, bit_trunk

VIT = ViTSpec(
    width=8, depth=2, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), in_channels=1, num_classes=3, registers=1
)


def unread(run: Any) -> set[str]:
    absent = {"expect"} if run.recipe.expect is None else set[str]()  # a table that is not there has no keys
    return config.leaf_paths(run.recipe) - run.read - absent


def test_pretraining_reads_every_key(pretraining: Any) -> None:
    assert unread(pretraining) == set()


def test_transfer_reads_every_key_but_those_of_other_parts(transfer: Any) -> None:
    assert unread(transfer) == {
        "data.count",  # the digits are all there is; only drawn sets have a count
        "expect.test_top1",  # read by the demo's last words, after the run
        "expect.tolerance",
    }


@pytest.mark.parametrize(
    ("spec", "ignored"),
    [
        (VIT, set()),
        (dataclasses.replace(VIT, patch=1, image_size=(16, 16), stem=TrunkSpec(stages=(1, 1))), set()),
        # A ResNet takes any image; its size is there for the cost and for the preprocessing.
        (BiTSpec(trunk=bit_trunk((1, 1), 1), image_size=(8, 8), in_channels=1, num_classes=3), {"image_size"}),
    ],
    ids=["vit", "hybrid", "bit"],
)
def test_model_reads_every_key_while_it_is_built_and_run(spec: ModelSpec, ignored: set[str]) -> None:
    read: set[str] = set()
    model = build(config.watch(spec, read), seed=0).train()
    model(torch.zeros(2, 1, 32, 32))  # another size than the spec's, so that positions are resized
    assert config.leaf_paths(spec) - read == ignored
