"""Spread weights on a GPU: a group of one process goes through every part of it, and learns as the plain model does.

Several GPUs are used where there are several; NCCL does not let two processes share one.
"""

import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from vitlab.core.dist import World
from vitlab.models.build import Model, create_model
from vitlab.training import checkpoint
from vitlab.training.ema import ema_applied, local_state, start_ema, update_ema
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import OptimRule, load_optimizer_state, make_optimizer, optimizer_state
from vitlab.training.precision import Precision, autocast
from vitlab.training.sharding import full_state, full_tensor, load_rows, shard

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def world() -> Generator[World]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield World(0, 1, DEVICE)
    distributed.destroy_process_group()


def make() -> Model:
    return create_model("ViT-Ti/16", image_size=32, num_classes=5, overrides={"depth": 2}, seed=0)


def steps(model: Model, optimizer: torch.optim.Optimizer, precision: Precision, count: int) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    images_BCYX = torch.randn(16, 3, 32, 32, generator=draw).to(DEVICE)
    targets_BK = torch.nn.functional.one_hot(torch.arange(16) % 5, 5).float().to(DEVICE)
    found: list[float] = []
    for _ in range(count):
        with autocast(precision, DEVICE):
            logits_BK = model(images_BCYX)
        loss = softmax_losses(logits_BK, targets_BK).mean()
        loss.backward()
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found += [loss.item(), norm.item()]
    return found


@pytest.mark.parametrize("name", ["adamw", "adam-paper", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_spread_weights_learn_as_plain_ones(world: World, name: Any, precision: Precision, tmp_path: Path) -> None:
    rule = OptimRule(name=name, lr=1e-3, weight_decay=0.1)
    plain, spread = make().to(DEVICE), make()
    shard(spread, world, precision)
    spread.to(DEVICE)
    ours, theirs = make_optimizer(spread, rule), make_optimizer(plain, rule)
    tolerance = 1e-4 if precision == "fp32" else 2e-2  # bfloat16 has 8 bits; kernels add up in other orders
    assert steps(spread, ours, precision, 4) == pytest.approx(steps(plain, theirs, precision, 4), rel=tolerance)
    ema = start_ema(spread)
    update_ema(ema, local_state(spread), 0.5)
    with ema_applied(spread, ema), torch.inference_mode(), autocast(precision, DEVICE):
        spread(torch.zeros(1, 3, 32, 32, device=DEVICE))
    state = checkpoint.copied(spread.state_dict())
    snapshot = checkpoint.Snapshot(4, state, checkpoint.copied(optimizer_state(ours, spread)), None, {})
    path = checkpoint.store(tmp_path, snapshot, world)
    whole_again = make()
    whole_again.load_state_dict(full_state(spread))
    found = checkpoint.restore(path)
    load_rows(spread.state_dict(), found.model)
    load_optimizer_state(ours, spread, found.optimizer)
    for key, value in whole_again.state_dict().items():
        assert torch.equal(value, found.model[key]), key


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_one_run(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    command = [programs / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", programs / "vitlab"]
    options = ["--set", "train.steps=12", "--set", "train.sharded=true", "--set", "train.precision=bf16", "--quiet"]
    train = ["train", "digits", "--recipe", "laptop-digits", "--out", tmp_path / "run", *options]
    done = subprocess.run([*command, *train], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000000012" / "model-2-of-2.safetensors").exists()
