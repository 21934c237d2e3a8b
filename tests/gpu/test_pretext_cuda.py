"""Tasks without labels on a GPU: compiled, from images that lie there, in half precision; the same bits after a stop."""

import hashlib
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.core import fsio

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SETTINGS = ["data.cache=device", "train.compiled=true", "train.precision=bf16", "train.steps=24", "train.save_every=8"]


class Crash(BaseException):
    """Nothing in vitlab expects this."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught") / "teacher"
    vitlab.train("digits", recipe="laptop-digits", out=folder, overrides=["train.steps=8"], quiet=True)
    return folder


def settings_of(kind: str, teacher: Path) -> tuple[str, list[str]]:
    if kind == "features":
        taught = [f"teacher={teacher}", "objective.kind=feature-distillation", "model.name=ViT-w32d2m64h2/4"]
        return "laptop-masked-digits", [*SETTINGS, *taught]
    return f"laptop-{kind}-digits", SETTINGS


def bits_of(folder: Path) -> str:
    (weights,) = (folder / "bundle").glob("*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.filterwarnings("default")  # the compiler warns about its own past
@pytest.mark.parametrize("kind", ["masked", "mae", "features"])
def test_compiled_task_learns_and_resumes_bit_by_bit(tmp_path: Path, teacher: Path, kind: str) -> None:
    recipe, overrides = settings_of(kind, teacher)
    whole = vitlab.train("digits", recipe=recipe, out=tmp_path / "whole", overrides=overrides, quiet=True)
    losses = [row["loss"] for row in whole.history]
    assert losses[-1] < losses[0]
    seen = 0

    def listener(_operation: fsio.Operation, path: Path) -> None:
        nonlocal seen
        seen += path.name == "metrics.jsonl"
        if path.name == "metrics.jsonl" and seen == 14:
            raise Crash

    with pytest.raises(Crash), fsio.intercept(listener):
        vitlab.train("digits", recipe=recipe, out=tmp_path / "again", overrides=overrides, quiet=True)
    vitlab.train(resume=tmp_path / "again", quiet=True)
    assert bits_of(tmp_path / "again") == bits_of(tmp_path / "whole")
