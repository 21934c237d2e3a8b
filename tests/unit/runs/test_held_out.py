"""Test images are seen once, at the end; validation images are kept apart from them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core.errors import UsageError
from vitlab.data.dataset import Opened, from_arrays
from vitlab.data.parts import arrange
from vitlab.training.recipe import DataConfig, Recipe

Tiny = Callable[..., Recipe]
Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Noted:
    """Reads on, and notes how many steps were done by then."""

    read: Any
    metrics: Path
    seen: list[int]

    def __call__(self, i: int) -> Any:
        self.seen.append(len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0)
        return self.read(i)


@pytest.mark.parametrize(
    "settings", [(), ("train.patience=1", "train.eval_every=12.5%")], ids=["whole", "stopped early"]
)
def test_no_test_image_is_read_before_the_last_step(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call, settings: tuple[str, ...]
) -> None:
    given, metrics = parts(val=True), tmp_path / "run" / "metrics.jsonl"
    test, val = Noted(given.test.read, metrics, []), Noted(given.val.read, metrics, [])
    noted = dataclasses.replace(
        given,
        test=dataclasses.replace(given.test, read=test),
        val=dataclasses.replace(given.val, read=val),
    )
    result = run(tiny("train.eval_every=50%", *settings), tmp_path / "run", noted)
    assert test.seen == [len(result.records)] * len(given.test)
    assert min(val.seen) < len(result.records), "the premise of this test: the other part is read on the way"


def test_no_test_image_is_read_before_a_linear_probe_is_fitted(
    tmp_path: Path, tiny: Tiny, parts: Call, run: Call
) -> None:
    given, order = parts(val=True), []
    given = dataclasses.replace(given, train=given.train.subset(torch.arange(4)))  # one of each class: no more folds
    noted = {
        name: dataclasses.replace(part, read=_Ordered(part.read, name, order))
        for name, part in (("train", given.train), ("val", given.val), ("test", given.test))
    }
    run(tiny("train.method=probe"), tmp_path / "run", dataclasses.replace(given, **noted))
    assert order[:12] == ["train"] * 4 + ["val"] * 8
    assert order.count("test") == 8, "and a part of the others once more, for the statistics of the bundle"


@dataclasses.dataclass(frozen=True)
class _Ordered:
    read: Any
    name: str
    order: list[str]

    def __call__(self, i: int) -> Any:
        self.order.append(self.name)
        return self.read(i)


@pytest.mark.parametrize(
    ("images", "settings", "printed", "key"),
    [
        (1, {"test_frac": 0.5}, "(train and test)", "test_frac"),
        (2, {"test_frac": 0.5, "val_frac": 0.5}, "besides the test images", "val_frac"),
    ],
    ids=["test", "val"],
)
def test_class_too_small_to_hold_some_out_is_reported_with_the_key_that_holds_none_out(
    images: int, settings: dict[str, float], printed: str, key: str
) -> None:
    labels = [0] * 8 + [1] * images
    data = from_arrays(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels, ("many", "few"))
    with pytest.raises(UsageError, match="few has 1 image") as reported:
        arrange(Opened({"all": data}), DataConfig(source="x", image_size=(2, 2), **settings))
    assert printed in reported.value.what
    assert f"--set data.{key}=0 holds none out" in str(reported.value)
    parts = arrange(Opened({"all": data}), DataConfig(source="x", image_size=(2, 2), **{**settings, key: 0.0}))
    assert len(parts.train) > 0


def test_val_without_test_is_the_test_set_and_is_not_used_for_validation() -> None:
    labels = [0, 1] * 20
    data = from_arrays(torch.zeros(40, 1, 2, 2, dtype=torch.uint8), labels, ("a", "b"))
    settings = {"source": "x", "image_size": (2, 2)}
    parts = arrange(Opened({"train": data, "val": data}), DataConfig(**settings))
    assert (parts.train, parts.val, parts.test) == (data, None, data)
    held_out = arrange(Opened({"train": data, "val": data}), DataConfig(**settings, val_frac=0.1)).val
    assert held_out is not None and len(held_out) == 4
