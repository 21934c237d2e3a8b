"""What a run reports of its test images is what `vitlab evaluate` finds for its bundle, to the last image."""

import os
from pathlib import Path

import pytest
from slow_cases import slow_after

import vitlab
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, read_bundle, save_bundle

STEPS = (
    "train.method=steps",
    "optim.train=full",
    "train.steps=4",
    "train.batch_size=32",
    "optim.lr=0.01",
    "train.eval_every=50%",
)
SOAK = os.environ.get("VITLAB_SOAK") == "1"
KINDS = {
    "steps": STEPS,
    "EMA": (*STEPS, "train.ema=0.5"),
    "LoRA": (*STEPS, "optim.train=lora"),
    "probe": ("train.method=probe",),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "bundle"
    model = create_model("ViT-w16d2m32h2/2", num_classes=2, image_size=8, in_channels=1, seed=0)
    save_bundle(
        folder, Bundle(model, Preprocess(mode="L", image_size=(8, 8), mean=(0.5,), std=(0.5,)), ("a", "b"), "card", {})
    )
    return folder


@pytest.mark.parametrize("kind", KINDS if SOAK else slow_after(1, ["EMA", "probe"]))
def test_evaluate_repeats_what_a_run_in_bfloat16_has_reported(kind: str, tmp_path: Path, start: Path) -> None:
    trained = vitlab.train(
        "digits",
        init=str(start),
        out=tmp_path / "run",
        overrides=[*KINDS[kind], "train.precision=bf16", "data.workers=0"],
        device="cpu",
        threads=1,
        quiet=True,
    )
    found = vitlab.evaluate(tmp_path / "run", device="cpu", threads=1, resamples=1, quiet=True)
    low, high = trained.test.pop("top1_interval")
    assert low <= found.top1 <= high
    assert trained.test == {name: getattr(found, name) for name in ("top1", "top5", "loss", "n", "ece")}
    assert f"| test top-1 | {found.top1:.4f} " in read_bundle(tmp_path / "run" / "bundle").card
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{100 * found.top1:.1f} %</span> of {found.n} held-out images right" in page
