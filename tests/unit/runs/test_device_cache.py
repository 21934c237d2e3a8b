"""Where the images lie changes no bit of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_after

STRONG = ("data.augment.shift_px=1", "data.augment.randaugment=torchvision", "data.augment.layers=1")
WAYS: list[list[str]] = [
    ["data.crop.how=torchvision", "data.filter=bicubic", "data.mix.mixup=0.5", "data.repeats=2"],
    ["data.crop.how=shorter-side", *STRONG],
    ["data.crop.how=inception"],
    ["data.crop.how=squash", "data.balanced=true"],
    ["data.crop.how=whole", *STRONG, "data.augment_in=workers"],
]


@pytest.mark.parametrize("changes", slow_after(1, WAYS), ids=str)
def test_run_from_the_device_has_the_losses_of_the_loader(
    tmp_path: Path, tiny: Callable[..., Any], run: Callable[..., Any], changes: list[str]
) -> None:
    curves: list[list[float]] = []
    for cache in ("none", "device"):
        run(tiny(*changes, f"data.cache={cache}"), tmp_path / cache)
        lines = (tmp_path / cache / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert len(curves[0]) == 8
    assert curves[0] == curves[1]
