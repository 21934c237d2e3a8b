"""A GPU that is too small for a batch cuts it up by itself, and learns the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_jobs import run_recipe

from vitlab.core.console import Console
from vitlab.core.dist import World
from vitlab.core.runtime import generator, prepare, restored_torch_globals
from vitlab.data.dataset import from_arrays
from vitlab.data.parts import Parts
from vitlab.runs.training.finish import RunResult
from vitlab.training.recipe import recipe_from_dict

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TABLE: dict[str, Any] = {
    "title": "Noise",
    "data": {"source": "noise", "image_size": [64, 64], "mode": "L"},
    "model": {"name": "ViT-w192d6m768h3/4"},
    "train": {"steps": 4, "batch_size": 256},
    "optim": {"lr": 1e-3},
}


def _run(folder: Path, console: Console) -> RunResult:
    images = torch.randint(0, 256, (256, 1, 64, 64), dtype=torch.uint8, generator=generator(0))
    data = from_arrays(images, torch.arange(256) % 4, tuple("abcd"), "train")
    with restored_torch_globals():
        runtime = prepare("cuda", 0, 1)
        recipe, world = recipe_from_dict(TABLE, 4), World(0, 1, runtime.device)
        parts = Parts(data, None, None, ())
        return run_recipe(recipe, parts, folder, runtime=runtime, world=world, console=console, command="a test")


def test_too_large_a_batch_is_cut_up_and_learns_the_same(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = _run(tmp_path / "whole", Console(quiet=True))
    needed = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    share = 0.45 * needed / torch.cuda.get_device_properties(0).total_memory
    console = Console(quiet=True)
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        cut = _run(tmp_path / "cut", console)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (printed,) = (line for line in console.lines if line.startswith("micro-batches of"))
    assert printed.split()[2].rstrip(":") in ("128", "64", "32")
    assert [record.loss for record in cut.records] == pytest.approx([r.loss for r in whole.records], rel=1e-3)
