"""What `vitlab data check` costs: time per file and memory of all its processes together, for growing folders.

    python bench/audit.py [--counts 10000 100000] [--workers 2]

Every file is a JPEG of its own, 64x64 pixels, one in a hundred a smaller copy of another. Memory is the proportional share
(PSS), summed over the command and its workers, looked at every tenth of a second; Linux only. The time that counts is that
of the processors, which a busy machine does not lengthen as it does the seconds. Prints a Markdown table.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.core.environment import processor_name


def make(folder: Path, count: int) -> None:
    """Ten classes. Blobs of seven by seven colours differ as photos do."""
    draw = np.random.default_rng(0)
    for label in range(10):
        (folder / f"class{label}").mkdir(parents=True)
    for i in range(count):
        colours = draw.integers(0, 256, (7, 7, 3), dtype=np.uint8)
        picture = Image.fromarray(colours).resize((64, 64), Image.Resampling.BICUBIC)
        picture.save(folder / f"class{i % 10}" / f"{i}.jpg")
        if i % 100 == 0:
            picture.resize((48, 48)).save(folder / f"class{i % 10}" / f"{i}-copy.jpg")


def memory(pid: int) -> int:
    """PSS in bytes of a process and its children; 0 for one that has just ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        own = sum(int(row.split()[1]) for row in rows if row.startswith("Pss:")) * 1024
        children = [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]
        return own + sum(memory(int(child)) for child in children)
    except (OSError, ValueError):
        return 0


def processor_seconds() -> float:
    """Of all children that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, workers: int) -> tuple[float, float, int, dict[str, int]]:
    """(seconds, processor seconds, peak bytes, findings by kind)."""
    command = [
        Path(sys.executable).with_name("vitlab"),
        "data",
        "check",
        folder,
        "--workers",
        str(workers),
        "--json",
        "-q",
    ]
    started, used, peak = time.perf_counter(), processor_seconds(), 0
    with tempfile.TemporaryFile() as out, subprocess.Popen(command, stdout=out) as process:
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - started
        out.seek(0)
        found = json.load(out)
    return seconds, processor_seconds() - used, peak, found["counts"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What `vitlab data check` costs.")
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    print(f"{given.workers} workers · {processor_name()} · Python {platform.python_version()}\n")
    print("| files | seconds | processor ms per file | peak MB | copies planted | found |\n|---|---|---|---|---|---|")
    for count in given.counts:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), count)
            files = count + len(range(0, count, 100))
            seconds, used, peak, found = measure(Path(folder), given.workers)
        row = (f"{files:,}", f"{seconds:.1f}", f"{1000 * used / files:.2f}", f"{peak / 1e6:.0f}")
        print("|", " | ".join((*row, f"{files - count:,}", f"{found.get('duplicate', 0):,}")), "|", flush=True)


if __name__ == "__main__":
    main()
