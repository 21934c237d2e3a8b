"""The same training on real digits by one process and by several, in float64 and in float32.

Drives `fit`, the optimiser, the batches and the checkpoints directly, because a run has no float64. `main` returns the losses
and the images of every step for each way to share the work, also where the number of processes changes on the way.
"""

import json
import os
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # it and the next are here, so that those who are forked need not wait for them
import torch.distributed.fsdp
import torch.nn.functional as F
from forked_runs import ended, world_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vitlab.core import dist
from vitlab.core.dist import World
from vitlab.data.augmentation.crops import CropRule
from vitlab.data.batches import Order
from vitlab.data.dataset import Dataset
from vitlab.data.loader import BadImages, Batch, TrainInputs, train_batches
from vitlab.data.preprocess import normalise
from vitlab.data.sources.opening import open_data
from vitlab.models.build import build
from vitlab.models.names import parse_name
from vitlab.models.spec import changed
from vitlab.training import checkpoint
from vitlab.training.loop import StepRule, TrainState, fit
from vitlab.training.optim import OptimRule, load_optimizer_state, make_optimizer, optimizer_state
from vitlab.training.recipe import DataConfig
from vitlab.training.sharding import load_rows, shard

DATA = DataConfig(source="digits", image_size=(8, 8), mode="L", crop=CropRule(how="squash"))
SPEC = changed(parse_name("ViT-w16d2m32h2/2"), {"image_size": (8, 8), "in_channels": 1, "num_classes": 10})
BATCH = 24  # whole numbers of images for 1, 2, 3 and 4 processes
Leg = tuple[int, bool, int]  # processes, whether the weights are spread over them, the step to stop after


def legs(place: Path, dataset: Dataset, dtype: torch.dtype, way: Sequence[Leg]) -> dict[str, Any]:
    """One run, passed on from leg to leg through its checkpoints."""
    found: dict[str, list[Any]] = {"losses": [], "ids": []}
    for number, (size, spread, until) in enumerate(way):
        note = place / f"leg-{number}.json"
        place.mkdir(exist_ok=True)
        children = world_of(size, lambda _, s=spread, u=until, n=note: member(place, dataset, dtype, s, u, n))
        codes = [ended(child) for child in children]
        assert codes == [0] * size, codes
        for key, values in json.loads(note.read_text()).items():
            found[key] += values
    return found


def member(place: Path, dataset: Dataset, dtype: torch.dtype, sharded: bool, until: int, note: Path) -> int:
    with dist.join(torch.device("cpu")) as world:
        spread = sharded and world.size > 1
        model = build(SPEC, seed=0).to(dtype)
        if spread:
            shard(model, world, "fp32")
        optimizer = make_optimizer(model, OptimRule(lr=3e-3, weight_decay=0.1))
        forward = DistributedDataParallel(model) if world.size > 1 and not spread else model
        state = TrainState(model, forward, optimizer)
        share = (world.rank, world.size) if spread else checkpoint.ALL
        before, _ = checkpoint.newest_valid(place, world, share)
        if before is not None:
            load_rows(model.state_dict(), before.model)
            load_optimizer_state(optimizer, model, before.optimizer)
            state.step = before.step
        ids: list[list[int]] = []
        order = Order(len(dataset), BATCH, seed=0)
        batches = train_batches(
            TrainInputs(dataset, DATA.preprocess(), DATA.crop, order, rank=world.rank, world=world.size),
            range(state.step, until),
            bad=BadImages(0),
        )
        losses = [record.loss for record in fit(state, noted(batches, world, ids), rule(dtype), world)]
        snapshot = checkpoint.Snapshot(
            state.step,
            checkpoint.copied(model.state_dict()),
            checkpoint.copied(optimizer_state(optimizer, model)),
            None,
            {},
        )
        if spread:
            checkpoint.store(place, snapshot, world)
        elif world.is_main:
            checkpoint.store(place, snapshot)
        if world.is_main:
            note.write_text(json.dumps({"losses": losses, "ids": ids}))
        world.barrier()
    return 0


def rule(dtype: torch.dtype) -> StepRule:
    def prepare(batch: Batch, _step: int) -> tuple[Tensor, Tensor]:
        return normalise(DATA.preprocess(), batch.images).to(dtype), batch.targets

    def losses(_images: Tensor, logits_BK: Tensor, targets_B: Tensor) -> Tensor:
        return F.cross_entropy(logits_BK, targets_B, reduction="none")

    def lr_at(step: int) -> float:
        return 3e-3 * min(1.0, (step + 1) / 10)

    return StepRule(prepare=prepare, losses=losses, lr_at=lr_at, seed=0, max_grad_norm=1.0)


def noted(batches: Iterable[Batch], world: World, ids: list[list[int]]) -> Generator[Batch]:
    """The same batches; the images of all processes are written down, by their place in the whole batch."""
    for batch in batches:
        positions_B, ids_B = world.all_gather(batch.positions), world.all_gather(batch.ids)
        ids.append(ids_B[positions_B.argsort()].tolist())
        yield batch


STEPS, FIRST, FEW = 50, 10, 20  # what is promised in float64, and in float32; enough to change hands
WAYS: dict[str, Sequence[Leg]] = {
    "1": [(1, False, STEPS)],
    "2": [(2, False, STEPS)],
    "2 sharded": [(2, True, STEPS)],
    "2 1 2": [(2, False, 7), (1, False, 14), (2, False, FEW)],
    "sharded 3, plain 2, sharded 2, sharded 4": [(3, True, 5), (2, False, 10), (2, True, 15), (4, True, FEW)],
}
if os.environ.get("VITLAB_SOAK") == "1":
    WAYS["2 1 2 sharded"] = [(2, True, 7), (1, True, 14), (2, True, FEW)]


def main(root: Path, names: Sequence[str]) -> dict[str, Any]:
    root.mkdir()
    dataset = open_data(DATA.source).parts["all"]  # once, for all who are forked
    found: dict[str, Any] = {"float64": {}, "float32": {}}
    for number, (name, way) in enumerate((name, WAYS[name]) for name in names):
        found["float64"][name] = legs(root / f"64-{number}", dataset, torch.float64, way)
        if len(way) == 1:
            first = [(size, spread, FIRST) for size, spread, _ in way]
            found["float32"][name] = legs(root / f"32-{number}", dataset, torch.float32, first)
    return found
