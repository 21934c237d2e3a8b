"""Where the time of a training step goes: the costliest operations, and how much of the time the device was busy.

    python bench/step_profile.py --recipe cifar10-plain-vit [--data cifar10] [--set key=value ...] [--write FILE]

Runs `vitlab train` for some steps and looks at the last of them. Every step writes one line of the log through `core/fsio`,
which announces it: that is how this program counts steps, without a hook in the loop.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import vitlab
from vitlab.core import fsio

ROWS = 25
CAPTURED = 20  # steps


class Enough(Exception):
    """The steps that were wanted have been seen."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a training step goes.")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--warm", type=int, default=60, help="steps before those that are looked at")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    told = measured(given.data, given.recipe, given.overrides, given.device, given.warm)
    print(told)
    if given.write:
        given.write.write_text(told, encoding="utf-8")


def measured(data: str, recipe: str, overrides: list[str], device: str, warm: int) -> str:
    profiler: Any = profile(activities=list(_activities()))
    seen, began = 0, 0.0

    def count(operation: fsio.Operation, path: Path) -> None:
        nonlocal seen, began
        if operation != "append" or path.name != "metrics.jsonl":
            return
        seen += 1
        if seen == warm:
            began = time.perf_counter()
            profiler.start()
        if seen == warm + CAPTURED:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.stop()
            raise Enough

    with tempfile.TemporaryDirectory() as place, fsio.intercept(count):
        steps = f"train.steps={warm + CAPTURED + 1}"
        with contextlib.suppress(Enough):
            vitlab.train(
                data, recipe=recipe, out=Path(place) / "run", overrides=[*overrides, steps], device=device, quiet=True
            )
    seconds = time.perf_counter() - began
    on_device = torch.cuda.is_available()
    table = profiler.key_averages()
    busy = sum(row.self_device_time_total if on_device else row.self_cpu_time_total for row in table) / 1e6
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    head = f"{CAPTURED} steps of {recipe} in {seconds:.3f} s, profiler included; kernels took {busy:.3f} s in all\n"
    return head + table.table(sort_by=order, row_limit=ROWS, max_name_column_width=70) + "\n"


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


if __name__ == "__main__":
    main()
