"""A model with batch norm trained by one process and by two, each of which sees its half of a batch.

`main` returns what each process has after its steps: hashes of all statistics and of their average, and the first mean.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, so that those who are forked need not wait for it
from forked_runs import ended, world_of
from torch import Tensor

from vitlab.core import dist
from vitlab.core.runtime import generator
from vitlab.data.loader import Batch
from vitlab.models.build import build
from vitlab.training.assemble import assemble
from vitlab.training.loop import StepRule, fit
from vitlab.training.objective import softmax_losses
from vitlab.training.recipe import recipe_from_dict

BATCH, STEPS = 8, 3
TABLE: dict[str, Any] = {
    "title": "Noise",
    "data": {"source": "noise", "image_size": [16, 16]},
    "model": {
        "kind": "efficientnet",
        "stem_width": 4,
        "widths": [4, 4, 8, 8, 8, 8, 8],
        "depths": [1, 1, 1, 1, 1, 1, 1],
        "last_width": 16,
    },
    "train": {"steps": STEPS, "batch_size": BATCH, "ema": 0.9},
    "optim": {"lr": 1e-2},
}


def hashed(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in sorted(tensors.items()))).hexdigest()


def member(note: Path) -> int:
    with dist.join(torch.device("cpu")) as world:
        recipe = recipe_from_dict(TABLE, 4)
        state = assemble(recipe, build(recipe.model, seed=0), world)
        own = BATCH // world.size
        shares = slice(world.rank * own, (world.rank + 1) * own)
        places = torch.arange(own)
        batches = [
            Batch(
                torch.randn(BATCH, 3, 16, 16, generator=generator(0, step))[shares] + 1,
                torch.arange(BATCH)[shares] % 4,
                torch.ones(own, dtype=torch.bool),
                *[places] * 4,
            )
            for step in range(STEPS)
        ]
        rule = StepRule(
            prepare=lambda batch, _: (batch.images, batch.targets),
            losses=lambda _, logits, targets: softmax_losses(logits, targets),
            lr_at=lambda _: 0.01,
            seed=0,
            max_grad_norm=1.0,
            ema_decay=0.9,
        )
        first: list[float] = []
        for record in fit(state, batches, rule, world):
            if record.step == 1:
                first = state.model.get_buffer("stem_norm.running_mean").tolist()
        statistics = dict(state.model.named_buffers())
        assert state.ema is not None
        average = {name: state.ema[name] for name in statistics}
        found = {"statistics": hashed(statistics), "average": hashed(average), "first": first}
        (note / f"{world.size}-{world.rank}.json").write_text(json.dumps(found))
        world.barrier()
    return 0


def main(place: Path) -> dict[str, Any]:
    for size in (1, 2):
        codes = [ended(child) for child in world_of(size, lambda _: member(place))]
        assert codes == [0] * size, codes
    return {path.stem: json.loads(path.read_text()) for path in place.glob("*.json")}
