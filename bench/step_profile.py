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

ROWS = 40
CAPTURED = 60  # steps: images on the device are prepared for some thirty at once


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
    text = measured(given.data, given.recipe, given.overrides, given.device, given.warm)
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")


def measured(data: str, recipe: str, overrides: list[str], device: str, warm: int) -> str:
    profiler: Any = profile(activities=list(_activities()))
    moments: dict[int, float] = {}  # when so many steps had been done
    alone, watched = warm + CAPTURED, warm + 2 * CAPTURED  # as many steps without the profiler first

    def count(operation: fsio.Operation, path: Path) -> None:
        if operation != "append" or path.name != "metrics.jsonl":
            return
        done = len(moments) + 1
        if done == watched and torch.cuda.is_available():
            torch.cuda.synchronize()
        moments[done] = time.perf_counter()
        if done == alone:
            profiler.start()
            moments[done] = time.perf_counter()
        if done == watched:
            profiler.stop()
            raise Enough

    with tempfile.TemporaryDirectory() as place, fsio.intercept(count):
        steps = [f"train.steps={watched + 1}", f"train.save_every={watched + 1}"]  # no step that saves
        with contextlib.suppress(Enough):
            vitlab.train(
                data, recipe=recipe, out=Path(place) / "run", overrides=[*overrides, *steps], device=device, quiet=True
            )
    on_device = torch.cuda.is_available()
    rows = [row for row in profiler.key_averages() if not on_device or _is_kernel(row)]
    busy = sum(row.self_device_time_total if on_device else row.self_cpu_time_total for row in rows) / 1e3 / CAPTURED
    free, profiled = ((moments[end] - moments[end - CAPTURED]) * 1e3 / CAPTURED for end in (alone, watched))
    head = f"{recipe}: {free:.2f} ms a step, {profiled:.2f} under the profiler; its kernels took {busy:.2f}\n"
    order = "self_device_time_total" if on_device else "self_cpu_time_total"
    return head + profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=70) + "\n"


def _is_kernel(row: Any) -> bool:
    """Work of a GPU itself, not what stands for it: an operation on the CPU, or a name that somebody gave to a range."""
    return row.device_type == torch.autograd.DeviceType.CUDA and not row.is_user_annotation


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


if __name__ == "__main__":
    main()
