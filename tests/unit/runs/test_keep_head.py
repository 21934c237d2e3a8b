"""`keep_head`: start weights go on with the head that they have, at another image size too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core.console import Console
from vitlab.core.errors import UsageError
from vitlab.engines.classifier import load
from vitlab.training.assemble import start_model
from vitlab.training.recipe import Recipe

CLASSES = ("a", "b", "c", "d")


def test_the_head_of_the_start_weights_stays(tmp_path: Path, tiny: Callable[..., Recipe], run: Any) -> None:
    first = run(tiny("train.steps=2"), tmp_path / "start").folder
    known = load(first, device="cpu").model
    assert known.head is not None and known.head.weight.abs().sum() > 0
    quiet = Console(quiet=True)
    new = start_model(tiny(f"init={first}"), quiet, CLASSES)
    kept = start_model(tiny(f"init={first}", "keep_head=true"), quiet, CLASSES)
    assert new.head is not None and kept.head is not None
    assert not new.head.weight.any()
    assert torch.equal(kept.head.weight, known.head.weight)
    assert torch.equal(kept.head.bias, known.head.bias)
    x_BCYX = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(kept.eval()(x_BCYX), known(x_BCYX))
    larger = start_model(tiny(f"init={first}", "keep_head=true", "data.image_size=[16,16]"), quiet, CLASSES)
    assert larger.head is not None and torch.equal(larger.head.weight, known.head.weight)


def test_other_classes_are_refused(tmp_path: Path, tiny: Callable[..., Recipe], run: Any) -> None:
    first = run(tiny("train.steps=1"), tmp_path / "start").folder
    with pytest.raises(UsageError, match="keep_head needs start weights"):
        start_model(tiny(f"init={first}", "keep_head=true"), Console(quiet=True), ("b", "a", "c", "d"))


def test_it_needs_start_weights(tiny: Callable[..., Recipe]) -> None:
    with pytest.raises(UsageError, match="keep_head keeps that of the start weights"):
        tiny("keep_head=true")
