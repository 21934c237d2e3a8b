"""Where a moving average of the weights is kept, it is what is evaluated, tested and stored, not the raw weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.models.build import allocate
from vitlab.training import checkpoint
from vitlab.training.recipe import Recipe
from vitlab.weights.bundle import load_state


def loss_of(weights: dict[str, Tensor], recipe: Recipe, part: Dataset) -> float:
    """Written out: the images as the recipe prepares them, the model, the cross-entropy."""
    images_BCYX = torch.stack([torch.as_tensor(part.read(i)).permute(2, 0, 1) for i in range(len(part))])
    scaled = F.interpolate(images_BCYX, size=recipe.data.image_size, mode="bilinear", antialias=True)
    model = load_state(allocate(recipe.model), weights, "the checkpoint").eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(scaled.float() / 127.5 - 1), part.labels.single()))


def test_ema_is_what_is_evaluated_tested_and_stored(
    tmp_path: Path, tiny: Callable[..., Recipe], parts: Callable[..., Any], run: Callable[..., Any]
) -> None:
    recipe = tiny("train.ema=0.9", "train.eval_every=4", "train.save_every=4", "train.keep=2")
    data = parts(val=True)
    result = run(recipe, tmp_path / "run", data)
    for row in result.evaluations:
        stored = checkpoint.restore(tmp_path / "run" / "checkpoints" / f"step-{int(row['step']):09d}")
        assert stored.ema is not None
        assert row["loss"] == pytest.approx(loss_of(stored.ema, recipe, data.val), rel=1e-5)
        assert row["loss"] != pytest.approx(loss_of(stored.model, recipe, data.val), rel=1e-3), "the premise"
    kept = result.classifier.model.state_dict()
    assert result.scores.loss == pytest.approx(loss_of(kept, recipe, data.test), rel=1e-5)
    best = min(result.evaluations, key=lambda row: (-row["top1"], row["loss"]))
    stored = checkpoint.restore(tmp_path / "run" / "checkpoints" / f"step-{int(best['step']):09d}")
    assert stored.ema is not None and all(torch.equal(kept[name], value) for name, value in stored.ema.items())
    assert result.scores.loss != pytest.approx(loss_of(stored.model, recipe, data.test), rel=1e-3), "the premise"


def test_young_ema_forgets_the_start_only_where_the_recipe_says(
    tmp_path: Path, tiny: Callable[..., Recipe], run: Callable[..., Any]
) -> None:
    heads = [
        run(tiny("train.ema=0.9999", f"train.ema_warmup={warmup}"), tmp_path / warmup).classifier.model.head
        for warmup in ("true", "false")
    ]
    moved = [float(head.weight.detach().abs().max()) for head in heads]
    assert moved[0] > 1e-3, "the head starts from zeros"
    assert moved[1] < 0.01 * moved[0]
