"""Speeds of a study: what is timed is what was computed."""

import time
from typing import Any

import pytest
import torch

from vitlab.core.errors import VitlabError
from vitlab.models.vit import ViT
from vitlab.studies import speed
from vitlab.studies.speed import measure_speed
from vitlab.studies.study import SpeedRule

CPU = torch.device("cpu")


def test_images_per_second_are_those_that_went_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    images, seconds, forward = 0, 0.0, ViT.forward

    def counted(model: ViT, x_BCYX: torch.Tensor, *given: Any) -> torch.Tensor:
        nonlocal images, seconds
        started = time.perf_counter()
        y_BK = forward(model, x_BCYX, *given)
        images, seconds = images + len(x_BCYX), seconds + time.perf_counter() - started
        return y_BK

    monkeypatch.setattr(ViT, "forward", counted)
    monkeypatch.setattr(speed, "_SECONDS_ELSEWHERE", 0.05)
    model, found = measure_speed(SpeedRule(model="ViT-w64d2m128h2/8", image_size=64, batch=2), CPU)
    assert isinstance(model, ViT) and set(found) == {"images_per_second", "milliseconds_per_image"}
    assert 0.4 < found["images_per_second"] / (images / seconds) < 2.5, "but for what the machine did meanwhile"
    assert found["images_per_second"] * found["milliseconds_per_image"] == pytest.approx(1000)


def test_a_model_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> float:
        raise MemoryError

    monkeypatch.setattr(speed, "_images_per_second", too_large)
    with pytest.raises(VitlabError, match="not even one image of 64 pixels fits"):
        measure_speed(SpeedRule(model="ViT-w8d1m8h1/4", image_size=64), CPU)
