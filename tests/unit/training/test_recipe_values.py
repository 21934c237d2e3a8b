"""Every published number of every recipe that ships, beside its source: written from the tables, not from the recipes.

Sources: the paper (arXiv 2010.11929v2) and its released code; BiT (arXiv 1912.11370 and the README of big_transfer); AugReg
(the README of vision_transformer, big_vision's vit_i1k.py and vit_i21k.py); the better plain ViT (arXiv 2205.01580).
"""

from pathlib import Path
from typing import Any

import pytest

from vitlab.models.names import format_name
from vitlab.training.recipe import list_recipes, read_recipe, recipe_to_dict
from vitlab.training.recipe_book import show_recipe

Row = dict[str, Any]
ROOT = Path(__file__).parents[3]

# What no source has anything of, and so is left as it is without.
PLAIN: Row = {
    "data.mean": [0.5],
    "data.std": [0.5],
    "data.augment.mirror": 0.5,
    "data.augment.erase": 0.0,
    "data.mix.mixup": 0.0,
    "data.mix.cutmix": 0.0,
    "head_bias": 0.0,
    "schedule.end": 0.0,
    "schedule.cooldown": 0,
    "objective.kind": "softmax",
    "objective.label_smoothing": 0.0,
    "optim.layer_decay": 1.0,
    "train.ema": 0.0,
}
NO_DROPOUT: Row = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "model.stochastic_depth": 0.0}
INCEPTION: Row = {"data.crop.how": "inception", "data.crop.area": [0.05, 1.0], "data.crop.aspect": [0.75, 1.33]}
ADAM: Row = {"optim.name": "adam-paper", "optim.betas": [0.9, 0.999], "optim.eps": 1e-8}
MULTI_LABEL: Row = {"head_bias": -10.0, "objective.kind": "sigmoid"}  # big_vision's, for JFT and ImageNet-21k
NO_LIMIT = float("inf")

# --- Table 3, with Tables 5 and 6 for what comes out after the transfer to ImageNet -------------------------------------

PRETRAINED: Row = {
    **PLAIN,
    **INCEPTION,
    **ADAM,
    "train.batch_size": 4096,
    "schedule.warmup": 10_000,
    "data.image_size": [224, 224],
    "expect.after": "transfer-imagenet",
}
VIT: Row = {**NO_DROPOUT, "model.head": "mlp-tanh", "model.pool": "cls", "model.pos": "learned"}


def on_jft(name: str, epochs: int, lr: float, top1: float, exaflops: str) -> Row:
    body = {} if name.startswith("BiT") else VIT
    return {
        **PRETRAINED,
        **MULTI_LABEL,
        **body,
        "model.name": name,
        "train.epochs": epochs,
        "optim.lr": lr,
        "optim.weight_decay": 0.1,
        "optim.max_grad_norm": NO_LIMIT,
        "schedule.decay": "linear",
        "expect.test_top1": top1,
        "expect.source": f"Table 6: {exaflops} exaFLOPs",
    }


def on_i21k(name: str, epochs: int, top1: float | None, **more: Any) -> Row:
    row = {
        **PRETRAINED,
        **VIT,
        "model.name": name,
        "model.dropout": 0.1,
        "train.epochs": epochs,
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.03,
        "optim.max_grad_norm": NO_LIMIT,
        "schedule.decay": "linear",
        "expect.test_top1": top1,
        **more,
    }
    return row if top1 is not None else {**without_expectation(row), "expect": None}


def on_imagenet(name: str, top1: float) -> Row:
    return {
        **PRETRAINED,
        **VIT,
        "model.name": name,
        "model.dropout": 0.1,
        "train.epochs": 300,
        "optim.lr": 3e-3,
        "optim.weight_decay": 0.3,
        "optim.max_grad_norm": 1.0,
        "schedule.decay": "cosine",
        "expect.test_top1": top1,
    }


def without_expectation(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.startswith("expect.")}


TABLE_3: dict[str, Row] = {
    "paper-vit-b16-jft": on_jft("ViT-B/16", 7, 8e-4, 0.8415, "224"),
    "paper-vit-b32-jft": on_jft("ViT-B/32", 7, 8e-4, 0.8073, "55"),
    "paper-vit-l32-jft": on_jft("ViT-L/32", 7, 6e-4, 0.8437, "196"),
    "paper-vit-l16-jft-7ep": on_jft("ViT-L/16", 7, 4e-4, 0.8630, "783"),
    "paper-vit-l16-jft-14ep": on_jft("ViT-L/16", 14, 4e-4, 0.8712, "1,567"),
    "paper-vit-h14-jft": on_jft("ViT-H/14", 14, 3e-4, 0.8808, "4,262"),
    "paper-bit-r50x1-jft": on_jft("BiT-R50x1", 7, 1e-3, 0.7754, "50"),
    "paper-bit-r50x2-jft": on_jft("BiT-R50x2", 7, 1e-3, 0.8212, "199"),
    "paper-bit-r101x1-jft": on_jft("BiT-R101x1", 7, 8e-4, 0.8067, "96"),
    "paper-bit-r152x1-jft": on_jft("BiT-R152x1", 7, 6e-4, 0.8188, "141"),
    "paper-bit-r152x2-jft": on_jft("BiT-R152x2", 7, 6e-4, 0.8497, "563"),
    "paper-r50-vit-b16-jft": on_jft("R50+ViT-B/16", 7, 8e-4, 0.8558, "274"),
    "paper-r50-vit-b32-jft": on_jft("R50+ViT-B/32", 7, 8e-4, 0.8490, "106"),
    "paper-r50-vit-l32-jft": on_jft("R50+ViT-L/32", 7, 2e-4, 0.8568, "246"),
    "paper-r50-vit-l16-jft-7ep": on_jft("R50+ViT-L/16", 7, 4e-4, 0.8660, "859"),
    "paper-r50-vit-l16-jft-14ep": on_jft("R50+ViT-L/16", 14, 4e-4, 0.8712, "1,668"),
    "paper-vit-b16-i21k": on_i21k("ViT-B/16", 90, 0.8397),
    "paper-vit-b32-i21k": on_i21k("ViT-B/32", 90, 0.8128),
    "paper-vit-l16-i21k-30ep": on_i21k("ViT-L/16", 30, None),
    # Section 4.2: about 30 days of a TPUv3 with 8 cores.
    "paper-vit-l16-i21k-90ep": on_i21k(
        "ViT-L/16", 90, 0.8515, **{"expect.hours": 30 * 24, "expect.hardware": "TPUv3, 8 cores"}
    ),
    "paper-vit-l32-i21k-30ep": on_i21k("ViT-L/32", 30, None),
    "paper-vit-l32-i21k-90ep": on_i21k("ViT-L/32", 90, 0.8099),
    "paper-vit-b16-imagenet": on_imagenet("ViT-B/16", 0.7791),
    "paper-vit-b32-imagenet": on_imagenet("ViT-B/32", 0.7338),
    "paper-vit-l16-imagenet": on_imagenet("ViT-L/16", 0.7653),
    "paper-vit-l32-imagenet": on_imagenet("ViT-L/32", 0.7116),
}

# --- Table 4; warm-up and bfloat16 momentum are the released code's -----------------------------------------------------

TRANSFER: Row = {
    **PLAIN,
    **NO_DROPOUT,
    "model.head": "linear",
    "train.batch_size": 512,
    "data.image_size": [384, 384],
    "data.crop.how": "squash",
    "data.crop.crop_frac": 384 / 448,
    "data.val_frac": 0.0,  # the published numbers come from all training images
    "optim.name": "sgd-paper",
    "optim.momentum": 0.9,
    "optim.nesterov": False,
    "optim.momentum_dtype": "bfloat16",
    "optim.weight_decay": 0.0,
    "optim.max_grad_norm": 1.0,
    "schedule.decay": "cosine",
    "schedule.warmup": 500,
}
SMALL_RATES = [0.001, 0.003, 0.01, 0.03]
# The rates are big_vision's transfer.py, Table 5 has the results: ViT-B/16 from ImageNet-21k.
B16: Row = {**TRANSFER, "model.name": "ViT-B/16", "init": "ViT-B/16@i21k", "expect.source": "Table 5"}
L16: Row = {**TRANSFER, "model.name": "ViT-L/16", "init": "ViT-L/16@i21k", "model.dropout": 0.1}


def to(base: Row, steps: int, lr: float, rates: list[float], share: float, top1: float, **more: Any) -> Row:
    choice = {"optim.lr": lr, "sweep.lr": rates, "sweep.val_frac": share}
    return {**base, "train.steps": steps, **choice, "expect.test_top1": top1, **more}


ON_IMAGENET = (20_000, 0.03, [0.003, 0.01, 0.03, 0.06], 0.01)
TABLE_4: dict[str, Row] = {
    "transfer-imagenet": to(B16, *ON_IMAGENET, 0.8397, **{"expect.hours": 6.5}),
    "transfer-imagenet-512": {  # section 4.1 and Table 2
        **to(L16, *ON_IMAGENET, 0.8530),
        "data.image_size": [512, 512],
        "train.ema": 0.9999,
        "train.ema_warmup": False,
        "expect.source": "Table 2",
    },
    "transfer-cifar10": to(B16, 10_000, 0.003, SMALL_RATES, 0.02, 0.9895),
    "transfer-cifar100": to(B16, 10_000, 0.01, SMALL_RATES, 0.02, 0.9167),
    "transfer-pets": to(B16, 500, 0.003, SMALL_RATES, 0.1, 0.9443, **{"schedule.warmup": 100}),
    "transfer-flowers": to(B16, 500, 0.003, SMALL_RATES, 0.1, 0.9938, **{"schedule.warmup": 100}),
    # Table 9 has the result of Caltech101.
    "transfer-vtab": {**L16, "train.steps": 2_500, "optim.lr": 0.01, "sweep": None, "expect.test_top1": 0.908},
}

# --- BiT-HyperRule ------------------------------------------------------------------------------------------------------

HYPERRULE: Row = {
    **PLAIN,
    "model.name": "BiT-R50x1",
    "init": "BiT-R50x1@bit-m",
    "data.image_size": [384, 384],
    "data.crop.how": "squash",
    "data.crop.crop_frac": 384 / 448,
    "data.mix.mixup": 0.1,
    "train.batch_size": 512,
    "optim.name": "sgd-paper",
    "optim.lr": 0.003,
    "optim.momentum": 0.9,
    "optim.weight_decay": 0.0,
    "optim.max_grad_norm": NO_LIMIT,
    "schedule.decay": "staircase",
    "schedule.factor": 0.1,
    "schedule.warmup": 500,
    "schedule.milestones": [0.3, 0.6, 0.9],
}
BIT: dict[str, Row] = {
    "bit-hyperrule-imagenet": {**HYPERRULE, "train.steps": 20_000, "expect.test_top1": 0.8068},
    "bit-hyperrule-cifar10": {
        **HYPERRULE,
        "train.steps": 10_000,
        "data.image_size": [128, 128],
        "data.crop.crop_frac": 128 / 160,
        "expect.test_top1": 0.973,
    },
    "bit-hyperrule-pets": {
        **HYPERRULE,
        "train.steps": 500,
        "data.mix.mixup": 0.0,
        "schedule.warmup": 100,
        "schedule.milestones": [0.4, 0.6, 0.8],
        "expect": None,
    },
}

# --- AugReg and the better plain ViT ------------------------------------------------------------------------------------

BIG_VISION: Row = {
    **PLAIN,
    **NO_DROPOUT,
    **INCEPTION,
    **ADAM,
    "data.image_size": [224, 224],
    "data.resize": "shorter-side",
    "data.crop_frac": 224 / 256,
    "data.augment.layers": 2,
    "optim.lr": 1e-3,
    "optim.momentum_dtype": "bfloat16",
    "optim.max_grad_norm": 1.0,
    "schedule.decay": "cosine",
    "schedule.warmup": 10_000,
}
# Operations per image and their magnitude, and MixUp's alpha.
LEVELS: dict[str, Row] = {
    "none": {"data.augment.randaugment": "none", "data.mix.mixup": 0.0},
    "light1": {"data.augment.magnitude": 0.0, "data.mix.mixup": 0.0},
    "medium1": {"data.augment.magnitude": 15.0, "data.mix.mixup": 0.2},
    "medium2": {"data.augment.magnitude": 15.0, "data.mix.mixup": 0.5},
    "strong1": {"data.augment.magnitude": 20.0, "data.mix.mixup": 0.5},
}


def augreg(name: str, level: str, weight_decay: float = 0.1) -> Row:
    length = {"train.epochs": 300, "train.batch_size": 4096, "optim.weight_decay": weight_decay}
    randaugment = {"data.augment.randaugment": "augreg"}
    sigmoid = {"objective.kind": "sigmoid", "head_bias": -6.9, "model.head": "mlp-tanh", "data.val_frac": 0.01}
    return {**BIG_VISION, **length, **sigmoid, "model.name": name, **randaugment, **LEVELS[level]}


def augreg_i21k(name: str, level: str, weight_decay: float, top1: float, dropout: float = 0.0) -> Row:
    drops = {"model.dropout": dropout, "model.stochastic_depth": dropout}
    judged = {"expect.test_top1": top1, "expect.after": "transfer-imagenet"}
    other = {**MULTI_LABEL, **drops, "model.head": "linear", "data.val_frac": 0.0, **judged}
    return {**augreg(name, level, weight_decay), **other}


AUGREG: dict[str, Row] = {
    "augreg-vit-ti16-imagenet": augreg("ViT-Ti/16", "light1"),
    "augreg-vit-s32-imagenet": augreg("ViT-S/32", "medium1"),
    "augreg-vit-s16-imagenet": augreg("ViT-S/16", "medium2"),
    "augreg-vit-b32-imagenet": augreg("ViT-B/32", "medium2"),
    "augreg-vit-b16-imagenet": augreg("ViT-B/16", "medium2"),
    "augreg-vit-l16-imagenet": augreg("ViT-L/16", "medium2"),
    "augreg-vit-l16-i21k": augreg_i21k("ViT-L/16", "strong1", 0.1, 0.8559),
    "augreg-vit-b16-i21k": augreg_i21k("ViT-B/16", "medium1", 0.1, 0.8549),
    "augreg-vit-s16-i21k": augreg_i21k("ViT-S/16", "light1", 0.03, 0.8373),
    "augreg-r50-vit-l32-i21k": augreg_i21k("R50+ViT-L/32", "medium1", 0.1, 0.8599, dropout=0.1),
    "augreg-r26-vit-s32-i21k": augreg_i21k("R26+ViT-S/32", "light1", 0.1, 0.8385),
    "augreg-vit-ti16-i21k": augreg_i21k("ViT-Ti/16", "none", 0.03, 0.7822),
    "augreg-vit-b32-i21k": augreg_i21k("ViT-B/32", "light1", 0.1, 0.8359),
    "augreg-vit-s32-i21k": augreg_i21k("ViT-S/32", "none", 0.1, 0.7958),
    "augreg-r-vit-ti16-i21k": augreg_i21k("R+ViT-Ti/16", "none", 0.03, 0.7540),
}


def better(epochs: int, top1: float, hours: float | None) -> Row:
    randaugment = {"data.augment.randaugment": "augreg", "data.augment.magnitude": 10.0, "data.mix.mixup": 0.2}
    model = {"model.name": "ViT-S/16", "model.pool": "gap", "model.pos": "sincos2d", "model.head": "mlp-tanh"}
    length = {"train.epochs": epochs, "train.batch_size": 1024, "optim.weight_decay": 0.1, "data.val_frac": 0.01}
    return {**BIG_VISION, **randaugment, **model, **length, "expect.test_top1": top1, "expect.hours": hours}


BETTER: dict[str, Row] = {
    "better-vit-s16-90": better(90, 0.765, 6.5),
    "better-vit-s16-150": better(150, 0.785, None),
    "better-vit-s16-300": better(300, 0.800, None),
}

PUBLISHED: dict[str, Row] = {**TABLE_3, **TABLE_4, **BIT, **AUGREG, **BETTER}
OURS = {"data.test_frac"}  # numbers in those recipes that nobody has published


def flat(table: Row, prefix: str = "") -> Row:
    """Every value, by its dotted key. A table that is left out is `None` under its own."""
    found: Row = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | list) and not isinstance(value, bool)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_has_the_published_values(name: str) -> None:
    recipe = show_recipe(name).recipe
    found = {**flat(recipe_to_dict(recipe)), "model.name": format_name(recipe.model)}
    assert {key: found.get(key) for key in PUBLISHED[name]} == PUBLISHED[name]
    written = {key for key, value in flat(read_recipe(name)).items() if is_number(value)}
    idle = {"data.augment.magnitude"} if found["data.augment.randaugment"] == "none" else set[str]()
    assert written - PUBLISHED[name].keys() - idle <= OURS, "a number without its source"


@pytest.mark.parametrize(("data", "images"), [("jft", 303e6), ("i21k", 14_197_122), ("imagenet", 1_281_167)])
def test_epochs_are_those_of_the_whole_set(data: str, images: float) -> None:
    for name, row in TABLE_3.items():
        if f"-{data}" in name:
            assert show_recipe(name).steps == pytest.approx(row["train.epochs"] * images / 4096, rel=1e-3)


def test_every_recipe_after_a_publication_is_in_the_tables() -> None:
    after = [
        name for family in ("paper", "transfer", "bit", "augreg", "better") for name in list_recipes(f"{family}-*")
    ]
    assert set(after) == set(PUBLISHED)


# --- measured here ------------------------------------------------------------------------------------------------------

CIFAR_10: Row = {"data.mean": [0.4914, 0.4822, 0.4465], "data.std": [0.247, 0.2435, 0.2616]}
IMAGENET: Row = {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]}
MEASURED: dict[str, Row] = {
    "cifar10-plain-vit": CIFAR_10,
    "cifar10-plain-vit-long": CIFAR_10,
    "tiny-imagenet-plain-vit": IMAGENET,
    "cifar10-after-fractals": CIFAR_10,
    "fractals-plain-vit": CIFAR_10,
    "finetune-cifar10": IMAGENET,
}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_recipe_expects_what_its_page_says(name: str) -> None:
    recipe = show_recipe(name).recipe
    found = flat(recipe_to_dict(recipe))
    assert {key: found[key] for key in MEASURED[name]} == MEASURED[name]
    assert recipe.expect is not None
    page = ROOT / recipe.expect.source.rpartition(": ")[2]
    digits = 3 if name == "fractals-plain-vit" else 2
    assert f"{100 * recipe.expect.test_top1:.{digits}f} %" in page.read_text()
