"""Which recipe fits this data, these start weights and this machine, and why: a rule of thumb that is printed, not hidden.

Owns the thresholds. Whatever it chooses can be overridden, key by key or by naming a recipe.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from vitlab.core import config
from vitlab.data.dataset import Dataset
from vitlab.data.preprocess import Preprocess
from vitlab.models.spec import ModelSpec, ViTSpec, spec_to_dict

_SKEWED = 3.0  # times as many images in the largest class as in the smallest: then classes are weighed
_FEW, _SOME, _MANY = 1_000, 10_000, 50_000  # training images
_STEPS_FROM_SCRATCH = 20_000  # at most; fewer where the data is small


class Choice(NamedTuple):
    table: dict[str, Any]
    reason: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the choice rests on."""

    train_images: int
    classes: int
    median_side: int
    skew: float
    several_labels: bool
    device: torch.device


def gather_facts(train: Dataset, median_side: int, device: torch.device) -> Facts:
    counts_K = train.labels.counts(len(train.classes))
    present_K = counts_K[counts_K > 0]
    skew = float(present_K.max() / present_K.min()) if len(present_K) else 1.0
    return Facts(len(train), len(train.classes), median_side, skew, train.labels.multi, device)


def choose(facts: Facts, start: tuple[ModelSpec, Preprocess] | None) -> Choice:
    """A recipe's table without its data source, and the sentence that says why this one."""
    table, reason = _from_scratch(facts) if start is None else _from_start(facts, *start)
    objective = table.setdefault("objective", {})
    if facts.several_labels:
        objective["kind"] = "sigmoid"
    elif facts.skew > _SKEWED:
        objective["class_weights"] = "auto"
        reason += f"; classes weighed, since the largest has {facts.skew:.0f} times the images of the smallest"
    return Choice(table, reason)


def _from_start(facts: Facts, spec: ModelSpec, rule: Preprocess) -> Choice:
    data = {key: value for key, value in config.to_dict(rule).items() if key != "decoder"}
    fixed = ("image_size", "num_classes", "in_channels", "head")
    model = {key: value for key, value in spec_to_dict(spec).items() if key not in fixed}
    model |= {"head": "linear"} if isinstance(spec, ViTSpec) else {}
    table: dict[str, Any] = {"data": data, "model": model, "schedule": {"warmup_frac": 0.1}}
    count = f"{facts.train_images:,} images"
    if facts.device.type == "cpu" or facts.train_images < _FEW or not isinstance(spec, ViTSpec):
        why = "there is no GPU" if facts.device.type == "cpu" else "so few images change no large model well"
        table["train"] = {"method": "probe", "epochs": 1, "batch_size": 64, "precision": _fast(facts.device)}
        table["optim"] = {"lr": 1.0, "train": "head"}
        table["data"]["val_frac"] = 0.2
        return Choice(table, f"{count}, and {why}: a linear head on frozen features")
    epochs = 20 if facts.train_images < _SOME else 10
    table["train"] = {"epochs": epochs, "batch_size": 128, "precision": _fast(facts.device), "average": 0.999}
    table["train"] |= {"eval_every": 1 / epochs, "save_every": 1 / epochs}
    table["data"] |= {"val_frac": 0.1, "workers": 8, "crop": {"area": [0.3, 1.0]}}
    if facts.train_images < _SOME:
        table["optim"] = {"lr": 1e-3, "weight_decay": 0.01, "train": "lora"}
        return Choice(table, f"{count}: adapters (LoRA) in a frozen body")
    if facts.train_images < _MANY:
        table["optim"] = {"lr": 3e-4, "weight_decay": 0.05, "train": "last:4"}
        return Choice(table, f"{count}: the last four blocks are trained, the others stay")
    table["optim"] = {"lr": 3e-4, "weight_decay": 0.05, "layer_decay": 0.75}
    return Choice(table, f"{count}: all weights are trained, the early ones more slowly")


def _from_scratch(facts: Facts) -> Choice:
    large = facts.median_side > 96 and facts.device.type != "cpu"
    side = 224 if large else 64 if facts.median_side > 48 else 32
    name = {224: "ViT-S/16", 64: "ViT-Ti/8", 32: "ViT-Ti/4"}[side]
    batch = min(256, max(16, facts.train_images // 20))
    epochs = max(10.0, min(300.0, _STEPS_FROM_SCRATCH * batch / facts.train_images))
    table: dict[str, Any] = {
        "data": {"image_size": [side, side], "val_frac": 0.1, "crop": {"area": [0.3, 1.0]}, "mix": {"mixup": 0.2}},
        "model": {"name": name, "pool": "gap", "stochastic_depth": 0.1},
        "train": {"epochs": epochs, "batch_size": batch, "precision": _fast(facts.device), "eval_every": 0.1},
        "optim": {"lr": 1e-3 * (batch / 256) ** 0.5, "weight_decay": 0.1},
        "schedule": {"warmup_frac": 0.1},
    }
    table["data"]["augment"] = {"randaugment": "augreg", "magnitude": 10.0}
    told = f"{facts.train_images:,} images of {facts.median_side} pixels and no start weights: {name} at {side} pixels"
    if facts.train_images < _MANY:
        told += "; a Vision Transformer wants more images than these, so --init WEIGHTS would do far better"
    return Choice(table, told)


def _fast(device: torch.device) -> str:
    """The fastest precision that keeps the range of float32 here."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # Where the processor multiplies bfloat16 itself; elsewhere it would be emulated, slowly.
    itself = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
    return "bf16" if itself else "fp32"
