"""Training from images on the GPU: prepared by another thread, compiled, updated before anybody looks. The same bits."""

import hashlib
import typing
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.core.dist import World
from vitlab.data import resident
from vitlab.data.loader import Batch
from vitlab.models.build import create_model
from vitlab.training import loop
from vitlab.training.loop import NonFinite, StepRule, TrainState, fit
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import make_optimizer, optimizer_state
from vitlab.training.rules import OptimName, OptimRule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SETTINGS = [
    *("data.cache=device", "data.augment.randaugment=torchvision", "data.mix.mixup=0.8", "data.mix.cutmix=1.0"),
    *("train.compiled=true", "train.steps=40", "train.batch_size=64", "train.ema=0.99", "train.precision=bf16"),
]


def bits_of_a_run(folder: Path, *settings: str) -> str:
    vitlab.train("digits", recipe="demo-digits", out=folder, overrides=[*SETTINGS, *settings], quiet=True)
    (weights,) = (folder / "bundle").glob("*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.filterwarnings("default")  # the compiler warns about its own past
@pytest.mark.parametrize("settings", [(), ("optim.name=muon", "optim.momentum=0.95", "optim.nesterov=true")], ids=str)
def test_neither_another_thread_nor_the_order_of_sending_changes_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    monkeypatch.setattr(
        resident, "_PREPARED_AT_ONCE", 64 * 16 * 16 * 3
    )  # three steps at once, and not all of the forty
    # What was compiled before is of no matter.
    bits_of_a_run(tmp_path / "other sizes", "data.image_size=24", "train.batch_size=32", "train.steps=3")
    beside = bits_of_a_run(tmp_path / "beside", *settings)
    assert bits_of_a_run(tmp_path / "again", *settings) == beside
    monkeypatch.setattr(resident, "_one_ahead", lambda prepared, runs, _: map(prepared, runs))
    assert bits_of_a_run(tmp_path / "in turn", *settings) == beside
    monkeypatch.setattr(loop, "_update_ahead", lambda *_: None)
    assert bits_of_a_run(tmp_path / "read first", *settings) == beside


@pytest.mark.parametrize("name", typing.get_args(OptimName))
def test_update_that_was_sent_ahead_leaves_the_weights_alone_where_gradients_are_not_numbers(name: OptimName) -> None:
    device = torch.device("cuda")
    model = create_model("ViT-Ti/16", image_size=32, num_classes=5, overrides={"depth": 2}, seed=0).to(device)
    state = TrainState(model, model, make_optimizer(model, OptimRule(name=name, lr=0.01)))
    rule = StepRule(
        prepare=lambda batch, _: (batch.images.to(device), batch.targets.to(device)),
        losses=lambda _, logits, targets: softmax_losses(logits, targets),
        lr_at=lambda _: 0.01,
        seed=0,
        max_grad_norm=1.0,
        eval_every=10**9,
    )
    ids = torch.arange(8)
    good = Batch(torch.randn(8, 3, 32, 32), ids % 5, ids >= 0, ids, ids * 0, ids * 0, ids)
    bad = good._replace(images=good.images * torch.nan)
    kept: list[torch.Tensor] = []
    with pytest.raises(NonFinite, match="step 3"):
        for _ in fit(state, [good, good, bad], rule, World(0, 1, device)):
            kept = [value.clone() for value in _all_values(state)]
    assert len(kept) > 2 * len(list(model.parameters()))
    assert all(torch.equal(now, then) for now, then in zip(_all_values(state), kept, strict=True))


def _all_values(state: TrainState) -> list[torch.Tensor]:
    return [*state.model.state_dict().values(), *optimizer_state(state.optimizer, state.model).values()]
