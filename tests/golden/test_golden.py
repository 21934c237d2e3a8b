"""Numbers and names that a refactor must leave as they are. Changing one needs a *Numerics* line in the changelog.

python tests/golden/test_golden.py     # writes the names anew, and the numbers of this processor
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core.dist import World
from vitlab.core.runtime import generator
from vitlab.data.loader import Batch
from vitlab.models.build import allocate, build
from vitlab.models.names import parse_name
from vitlab.models.spec import ModelSpec, ViTSpec, changed
from vitlab.training.loop import StepRule, TrainState, fit
from vitlab.training.objective import softmax_losses
from vitlab.training.optim import OptimRule, make_optimizer
from vitlab.training.schedule import Schedule, rate_at

HERE = Path(__file__).parent
CURVES = HERE / "loss_curves.json"  # one for each kind of processor
CPUINFO = Path("/proc/cpuinfo")
STEPS = 20

# One spec per kind of part; the keys of the rest follow by counting.
KEYED: dict[str, ModelSpec] = {
    "vit": changed(parse_name("ViT-Ti/16"), {"depth": 2, "head": "mlp-tanh", "registers": 4, "layer_scale": 1e-5}),
    "vit-map": changed(parse_name("ViT-Ti/16"), {"depth": 1, "pool": "map"}),
    "vit-learned2d": changed(parse_name("ViT-Ti/16"), {"depth": 1, "pos": "learned2d"}),
    "vit-relative": changed(parse_name("ViT-Ti/16"), {"depth": 1, "pos": "relative"}),
    "hybrid": changed(parse_name("R26+ViT-S/32"), {"depth": 1, "stem": {"stages": [2, 1]}}),
    "bit": changed(parse_name("BiT-R26x1"), {"trunk": {"stages": [2, 1]}}),
}


def keys_of(spec: ModelSpec) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in allocate(spec).state_dict().items()}


@pytest.mark.parametrize("name", KEYED)
def test_parameter_names_and_shapes_are_frozen(name: str) -> None:
    """Saved weights outlive the code that saved them."""
    stored = json.loads((HERE / "keys.json").read_text())
    assert keys_of(KEYED[name]) == stored[name]


def noise_batches() -> Iterator[Batch]:
    draw = generator(7)
    x, y = torch.randn(64, 3, 16, 16, generator=draw), torch.randint(5, (64,), generator=draw)
    for step in range(STEPS):
        ids = torch.arange(16) + (step % 4) * 16
        yield Batch(x[ids], y[ids], torch.ones(16, dtype=torch.bool), ids, ids * 0, ids * 0, torch.arange(16))


def loss_curve() -> list[float]:
    """Twenty steps of a tiny ViT with every kind of noise on, on one thread, on images that are pure noise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spec = ViTSpec(
            width=32, depth=3, mlp_dim=64, heads=4, patch=4, image_size=(16, 16), num_classes=5,
            dropout=0.1, stochastic_depth=0.1,
        )  # fmt: skip
        model = build(spec, seed=0)
        optimizer = make_optimizer(model, OptimRule(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999)))
        state = TrainState(model, model, optimizer)
        schedule = Schedule(decay="cosine", warmup=4)
        rule = StepRule(
            prepare=lambda batch, _: (batch.images, batch.targets),
            losses=lambda _, logits, targets: softmax_losses(logits, targets),
            lr_at=lambda step: rate_at(schedule, step, base=1e-3, total_steps=STEPS),
            seed=0,
            max_grad_norm=1.0,
        )
        records = fit(state, noise_batches(), rule, World(0, 1, torch.device("cpu")))
        return [record.loss for record in records]
    finally:
        torch.set_num_threads(threads)


def where_measured() -> dict[str, str]:
    """What the last bits depend on: matrix products choose their kernel by the maker and the generation of the processor."""
    has = torch.cpu.get_capabilities()
    generation = [name for name in ("avx512_bf16", "amx_bf16") if has.get(name)]
    maker = re.search(r"vendor_id\s*: (\S+)", CPUINFO.read_text()) if CPUINFO.exists() else None
    cpu = [maker[1] if maker else "unknown", torch.backends.cpu.get_cpu_capability(), *generation]
    return {"torch": torch.__version__, "cpu": " ".join(cpu)}


def test_twenty_training_steps_are_frozen() -> None:
    """Bit for bit where torch and processor are those of a recording; to 0.1 % elsewhere, where kernels round differently.

    Any recording of this torch will do: a virtual machine may hide its model, and then computes as an older processor does.
    """
    recordings: list[dict[str, Any]] = json.loads(CURVES.read_text())
    curve = loss_curve()
    if where_measured() in [recording["measured"] for recording in recordings]:
        assert curve in [one["loss"] for one in recordings if one["measured"]["torch"] == torch.__version__]
    for recording in recordings:
        assert curve == pytest.approx(recording["loss"], rel=1e-3)
    assert curve == loss_curve()


if __name__ == "__main__":
    (HERE / "keys.json").write_text(json.dumps({name: keys_of(spec) for name, spec in KEYED.items()}, indent=1) + "\n")
    curves = [one for one in json.loads(CURVES.read_text()) if one["measured"] != where_measured()]
    CURVES.write_text(json.dumps([*curves, {"measured": where_measured(), "loss": loss_curve()}], indent=1) + "\n")
