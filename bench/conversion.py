"""How long a conversion of ViT-L/16 takes and how much memory, beside copying its bytes and beside timm at the same job.

Run by `make bench` in the peers' environment. The yardstick is what no converter can do without: read the file, hash it, write
it and have it synced. Every job runs in a process of its own, after its imports, with the threads that torch takes by itself;
rounds are interleaved, so that a busy moment hits everybody, and the median counts. `--write FILE` records the table.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

NAME, TIMM_NAME = "ViT-L/16", "vit_large_patch16_224"
SUFFIXES = {"google-npz": ".npz", "timm": ".safetensors"}
Job = Callable[[Path, Path], None]  # from the folder of sources to a new place


def copy(sources: Path, out: Path) -> None:
    shutil.copyfile(sources / "google.npz", out)
    with out.open("rb") as file:
        os.fsync(file.fileno())
        hashlib.file_digest(file, "sha256")


def convert(source: str, to: str) -> Job:
    def job(sources: Path, out: Path) -> None:
        import vitlab

        vitlab.convert(sources / source, out.with_suffix(SUFFIXES.get(to, "")), to=to)

    return job


def timm_convert(sources: Path, out: Path) -> None:
    """As timm's user would: its own loader of such files, then safetensors. Nothing is hashed, checked or synced."""
    import safetensors.torch
    import timm

    model = timm.create_model(TIMM_NAME, num_classes=1000, checkpoint_path=str(sources / "google.npz"))
    safetensors.torch.save_file(model.state_dict(), out)


JOBS: dict[str, Job] = {
    "copy, hash and sync": copy,
    "Google .npz → vitlab": convert("google.npz", "vitlab"),
    "vitlab → Google .npz": convert("vitlab", "google-npz"),
    "timm .safetensors → vitlab": convert("timm.safetensors", "vitlab"),
    "vitlab → transformers": convert("vitlab", "hf"),
    "Google .npz → timm .safetensors": convert("google.npz", "timm"),
    "Google .npz → timm .safetensors, by timm": timm_convert,
}


def prepare(sources: Path) -> None:
    """The same random weights in three formats; the `.npz` with the names of the published files, which timm's loader knows."""
    import torch

    import vitlab
    from vitlab.data.preprocess import Preprocess
    from vitlab.weights.bundle import Bundle, save_bundle

    model = vitlab.create_model(NAME, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)  # the head too, which starts as zeros
    labels = tuple(str(i) for i in range(model.spec.num_classes))
    origin = {"format": "google-npz", "dialect": {"pre_linen": True}}
    save_bundle(sources / "vitlab", Bundle(model, Preprocess(image_size=model.spec.image_size), labels, "", origin))
    vitlab.convert(sources / "vitlab", sources / "google.npz", to="google-npz")
    vitlab.convert(sources / "vitlab", sources / "timm.safetensors", to="timm")


def measure(job: Job, sources: Path, out: Path) -> dict[str, float]:
    """Seconds and peak bytes of one job in this process, beyond what the imports took."""
    import vitlab.engines.conversion  # noqa: F401 (vitlab itself imports it late)

    if job is timm_convert:
        import models  # noqa: F401 (declares what torchvision needs, before timm imports it)
        import timm  # noqa: F401

    before, started = memory("VmRSS"), time.perf_counter()
    job(sources, out)
    return {"seconds": time.perf_counter() - started, "bytes": memory("VmHWM") - before}


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def child(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def table(rounds: int) -> list[str]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in JOBS}
    with tempfile.TemporaryDirectory(prefix="conversion-") as place:
        child("--prepare", place)
        size = (Path(place) / "google.npz").stat().st_size
        for _ in range(rounds):
            for name, seen in found.items():
                with tempfile.TemporaryDirectory(dir=place) as new:
                    seen.append(json.loads(child("--job", name, place, f"{new}/out")))
    median = {
        name: {key: statistics.median(one[key] for one in seen) for key in seen[0]} for name, seen in found.items()
    }
    yardstick = median["copy, hash and sync"]["seconds"]
    rows = ["| job | seconds | of the copy | peak memory, MB | of the file |", "|---|---|---|---|---|"]
    for name, got in median.items():
        ratios = f"{got['seconds'] / yardstick:.2f} | {got['bytes'] / 1e6:.0f} | {got['bytes'] / size:.2f}"
        rows.append(f"| {name} | {got['seconds']:.1f} | {ratios} |")
        print(rows[-1], sorted(round(one["seconds"], 1) for one in found[name]), flush=True)
    return [f"{NAME}, float32, a file of {size / 1e6:.0f} MB.", "", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="record the table in this file")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
    elif arguments.job:
        name, sources, out = arguments.job
        print(json.dumps(measure(JOBS[name], Path(sources), Path(out))))
    else:
        rows = table(arguments.rounds)
        if arguments.write:
            record(arguments.write, rows, arguments.rounds)


def record(path: Path, rows: list[str], rounds: int) -> None:
    import models  # noqa: F401 (as above)
    import timm
    import torch

    versions = f"torch {torch.__version__}, timm {timm.__version__}"
    machine = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "# Conversion beside copying, and beside timm (CPU)\n\n"
        f"{date.today()} · `python bench/conversion.py --rounds {rounds}` · median of {rounds} interleaved rounds, "
        f"each job in a new process · {machine} · {versions}.\n"
        "Memory is the peak beyond what stands there after the imports. vitlab checks its bundles' hashes on reading, looks\n"
        "for NaN, and syncs what it writes. timm does none of these, and draws random weights before it loads real ones.\n\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
