"""What the training behind a published table costs: exaFLOPs and chip days.

By formula, with measured speeds. Nothing here is a measurement of the run itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.core.errors import UnknownName, UsageError
from vitlab.evaluation.published import Cell, Pretraining, PublishedTable, published_tables
from vitlab.models.cost import count_macs, training_exaflops
from vitlab.models.names import parse_name, with_size
from vitlab.models.spec import ModelSpec
from vitlab.training.recipe_book import known_data

TPU_CORE_TFLOPS = 61.5  # bfloat16; 123 for a TPUv3 chip of two cores: cloud.google.com/tpu/docs/v3
TPU_SHARE = 0.4  # of that, taken as usual: the paper's own ViT-L/16 and ViT-H/14 come to 0.43 and 0.32
GPU = "H200"
# Images per second, forward and backward, batch 128, bfloat16: docs/results/model-speed-h200-bf16.md.
_GPU_SPEEDS = {"vit": ("ViT-L/16", 1130.2), "hybrid": ("R50+ViT-B/16", 1369.7), "bit": ("BiT-R50x1", 2934.3)}
_TRAIN_FLOPS_PER_MAC = 6  # two for the product, and a backward pass costs two forward ones
_DAY_S = 86_400
_EXA, _TERA = 1e18, 1e12
_SOURCES = {"jft": "shards/jft"}  # what `known_data` calls it; the others have their own names there


@dataclasses.dataclass(frozen=True)
class CostRow:
    """One pre-training run; None for what is not printed or cannot be counted."""

    model: str
    pretrained_on: str
    epochs: int | None
    exaflops: float | None
    printed_exaflops: str
    core_days: float | None  # at `TPU_SHARE` of the peak
    printed_core_days: Mapping[str, str]
    implied_share: float | None  # of the peak, if formula and print are both right
    gpu_days: float | None
    gpu_tflops: float | None  # the speed that these days rest on


def cost_rows(versions: Sequence[PublishedTable], gpu_tflops: float | None = None) -> list[CostRow]:
    """The runs behind a table, newest version first, at `gpu_tflops` or our speed."""
    if gpu_tflops is not None and not 0 < gpu_tflops < float("inf"):
        raise UsageError(f"--gpu-tflops must be positive, not {gpu_tflops}")
    entries = dict.fromkeys(entry for version in versions for entry in version.cost)
    return [_cost_row(entry, gpu_tflops) for entry in entries]


def count_exaflops(entry: Pretraining) -> float | None:
    """By the formula of the paper's Table 6; None for a model without one."""
    if entry.epochs is None:
        return None
    try:
        spec = parse_name(entry.model)
    except UnknownName:
        return None
    facts = known_data(_SOURCES.get(entry.pretrained_on, entry.pretrained_on))
    if facts is None or facts.images is None:
        return None
    return training_exaflops(with_size(spec, num_classes=facts.classes), entry.epochs, facts.images)


def gpu_speed(spec: ModelSpec) -> float | None:
    """TFLOP/s that our training sustains on one GPU, by the most similar model."""
    kind = "hybrid" if getattr(spec, "stem", None) else spec.kind
    if kind not in _GPU_SPEEDS:
        return None
    name, images_per_second = _GPU_SPEEDS[kind]
    return _TRAIN_FLOPS_PER_MAC * count_macs(parse_name(name), padding_taps=False) * images_per_second / _TERA


def _cost_row(entry: Pretraining, gpu_tflops: float | None) -> CostRow:
    exaflops, cells = count_exaflops(entry), _printed(entry, "tpuv3-core-days")
    printed_days = next((cell.values[0] for cell in cells.values() if cell.values), None)
    speed = None if exaflops is None else gpu_tflops or gpu_speed(parse_name(entry.model))
    peak_days = None if exaflops is None else _days(exaflops, TPU_CORE_TFLOPS)
    return CostRow(
        model=entry.model,
        pretrained_on=entry.pretrained_on,
        epochs=entry.epochs,
        exaflops=exaflops,
        printed_exaflops=next((cell.text for cell in _printed(entry, "exaflops").values()), ""),
        core_days=None if peak_days is None else peak_days / TPU_SHARE,
        printed_core_days={version: cell.text for version, cell in cells.items()},
        implied_share=None if peak_days is None or printed_days is None else peak_days / printed_days,
        gpu_days=None if exaflops is None or speed is None else _days(exaflops, speed),
        gpu_tflops=speed,
    )


def _days(exaflops: float, tflops: float) -> float:
    return exaflops * _EXA / (tflops * _TERA) / _DAY_S


def _printed(entry: Pretraining, measure: str) -> dict[str, Cell]:
    """By version, what any table prints of that run; Table 2's runs are its cost."""
    wanted: dict[str, Any] = {"model": entry.model, "pretrained_on": entry.pretrained_on, "measure": measure}
    cells: dict[str, Cell] = {}
    for table in (table for versions in published_tables().values() for table in versions):
        for row, column, cell in table.claims():
            about = table.about(row, column)
            epochs = about.get("pretrain_epochs")
            same_run = entry in table.cost if epochs is None else epochs == entry.epochs
            if same_run and all(about.get(key) == value for key, value in wanted.items()):
                cells.setdefault(table.version, cell)
    return cells
