"""A batch that does not fit is cut up, and the update stays that of the whole batch."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.training.memory import estimate_memory
from vitlab.training.microbatch import estimate_microbatch
from vitlab.training.recipe import Recipe

Tiny = Callable[..., Recipe]
LARGE = ("train.batch_size=64", "data.image_size=[64,64]", "model.name=ViT-w64d8m256h4/4")

SYSTEM = str(Path(__file__).parents[2] / "system")

# In a process of its own, whose address space ends shortly above what it has.
TRIAL = """
import dataclasses, json, resource, sys

sys.path.insert(0, sys.argv[3])  # tests/system
import torch
from pathlib import Path
from vitlab.core.dist import World
from vitlab.core.console import Console
from vitlab.core.runtime import prepare
from vitlab.data.dataset import from_arrays
from run_jobs import batches_of, live_run, rule_of
from vitlab.training.microbatch import estimate_microbatch
from vitlab.training.loop import fit
from vitlab.data.parts import Parts
from vitlab.training.recipe import recipe_from_dict

table = json.loads(sys.argv[1])
recipe = recipe_from_dict(table, 4)
runtime = prepare("cpu", 0, 1)
images = torch.randint(0, 256, (64, 1, 64, 64), dtype=torch.uint8)
parts = Parts(from_arrays(images, torch.arange(64) % 4, tuple("abcd"), "train"), None, None, ())
world = World(0, 1, torch.device("cpu"))
live = live_run(recipe, parts, Path("none"))
rule = rule_of(live)
batch = next(batches_of(live))
few = type(batch)(*(field[:2] for field in batch))
next(fit(live.state, [few], rule, world))  # now threads and their heaps are there
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), resource.RLIM_INFINITY))
cut, said = estimate_microbatch(recipe, world.device, 1)

def runs(micro_batch):
    try:
        next(fit(live.state, [batch], dataclasses.replace(rule, micro_batch=micro_batch), world))
    except RuntimeError as error:
        return str(error)

print(json.dumps({"micro_batch": cut.train.micro_batch, "printed": said, "cut": runs(cut.train.micro_batch), "whole": runs(0)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited on Linux only")
def test_process_with_little_memory_runs_what_was_estimated_to_fit_and_not_the_whole_batch(tiny: Tiny) -> None:
    from vitlab.training.recipe import recipe_to_dict

    recipe = tiny(*LARGE)
    memory = estimate_memory(recipe)
    room = memory.peak(25, accumulates=True)
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, json.dumps(recipe_to_dict(recipe)), str(room), SYSTEM],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # the same vitlab as in this process
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",  # a heap full of holes would be counted
        },
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["micro_batch"] == 16
    assert found["printed"].startswith("micro-batches of 16: 64 images at once would need about")
    assert found["cut"] is None
    assert "memory" in found["whole"] or "primitive" in found["whole"], "the premise of this test"


def test_batch_that_fits_is_left_whole(tiny: Tiny) -> None:
    assert estimate_microbatch(tiny(), torch.device("cpu"), 1) == (tiny(), None)


def test_number_that_was_asked_for_is_kept(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.training.microbatch.free_memory", lambda _device: 1)
    recipe = tiny("train.micro_batch=4")
    assert estimate_microbatch(recipe, torch.device("cpu"), 1) == (recipe, None)
    assert estimate_microbatch(tiny(), torch.device("cpu"), 1)[0].train.micro_batch == 2, "a pair at least"
    probe = tiny("train.method=probe")
    assert estimate_microbatch(probe, torch.device("cpu"), 1) == (probe, None), "it has no backward pass"


def test_estimated_number_is_in_the_config_so_that_a_resumed_run_has_it(tmp_path: Path, tiny: Tiny, run: Any) -> None:
    recipe = tiny()
    cut = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, micro_batch=4))
    folder = run(cut, tmp_path / "run").folder
    assert "micro_batch = 4" in (folder / "config.toml").read_text()


@pytest.mark.parametrize("stored", [0, 4])
def test_number_that_was_tried_is_in_the_checkpoint(tmp_path: Path, tiny: Tiny, run: Any, stored: int) -> None:
    folder = run(tiny(f"train.micro_batch={stored}"), tmp_path / "run").folder
    progress = json.loads((folder / "checkpoints" / "step-000000008" / "progress.json").read_text())
    assert progress["micro_batch"] == stored
