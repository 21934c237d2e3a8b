"""Images per second of specialised attention beside its multiply-adds: axial and non-local models, ViTs and ResNets.

The paper's D.6 could not use AxialResNet at scale because it is very slow on TPUs, whatever its compute; Figure 13 shows both.
Here each model is timed at 224 pixels, forward and in a training step (forward and backward, without the optimiser),
at several batch sizes of which the fastest counts. `per MAC` is images/s times multiply-adds of an image, relative to ViT-B/16:
1 means that a multiply-add takes as long as there.

    python bench/attention.py [--device cuda] [--write docs/results/specialised-attention-cpu.md]

Needs torch and this repository alone (PYTHONPATH=src). On a GPU it takes two minutes.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vitlab

NAMES = (
    *("ViT-B/16", "Axial-ViT-B/16", "ViT-B/32", "Axial-ViT-B/32"),
    *("BiT-R50x1", "BiT-R50x1+NL", "AxialResNet-50-L"),
)
BATCHES = {"cpu": (1, 4), "cuda": (32, 128)}
PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "bf16")}
SECONDS = {"cpu": 10.0, "cuda": 0.8}  # for the repeats of one measurement
WARM_UP, FEWEST, MOST = 1, 3, 20  # repeats; the first of all also chooses kernels

Job = Callable[[nn.Module, Tensor], None]


class Speed(NamedTuple):
    """Images per second: the median of the repeats and their range, at the batch where the median is best."""

    median: float
    slowest: float
    fastest: float
    batch: int


def inference(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def training(model: nn.Module, x: Tensor) -> None:
    model(x).float().square().mean().backward()
    model.zero_grad(set_to_none=True)


JOBS: dict[str, Job] = {"inference": inference, "training": training}


def measure(model: nn.Module, job: Job, x: Tensor, precision: str, seconds: float) -> Speed:
    rates: list[float] = []
    stop = float("inf")
    for repeat in range(WARM_UP + MOST):
        if repeat == WARM_UP:
            stop = time.perf_counter() + seconds
        if len(rates) >= FEWEST and time.perf_counter() > stop:
            break
        _wait(x)
        started = time.perf_counter()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            job(model, x)
        _wait(x)
        if repeat >= WARM_UP:
            rates.append(len(x) / (time.perf_counter() - started))
    return Speed(statistics.median(rates), min(rates), max(rates), len(x))


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def best(name: str, device: str, precision: str, batches: Sequence[int], seconds: float) -> dict[str, Speed]:
    """The fastest batch size of each job; those that do not fit into memory are left out."""
    model = vitlab.create_model(name, seed=0).to(device)
    found: dict[str, Speed] = {}
    for title, job in JOBS.items():
        model.train(job is training)
        for batch in batches:
            with contextlib.suppress(torch.OutOfMemoryError):
                x = torch.randn(batch, 3, 224, 224, device=device)
                speed = measure(model, job, x, precision, seconds)
                if title not in found or speed.median > found[title].median:
                    found[title] = speed
            _release(device)
    return found


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def table(device: str, precision: str, batches: Sequence[int], seconds: float) -> list[str]:
    rows = [
        "| model | GMACs | params | inference img/s | per MAC | training img/s | per MAC |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    print(f"{device}, {precision}", *rows, sep="\n", flush=True)
    base: dict[str, float] = {}
    for name in NAMES:
        info = vitlab.model_info(name)
        speeds = best(name, device, precision, batches, seconds)
        cells: list[str] = []
        for title in JOBS:
            if title not in speeds:
                cells += ["out of memory", ""]
                continue
            used = speeds[title].median * info.macs
            base.setdefault(title, used)  # the first row is ViT-B/16
            cells += [_cell(speeds[title]), f"{used / base[title]:.2f}"]
        rows.append(f"| {name} | {info.macs / 1e9:.2f} | {info.params / 1e6:.1f}M | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def _cell(speed: Speed) -> str:
    digits = 0 if speed.median >= 100 else 2
    low, middle, high = (f"{rate:,.{digits}f}" for rate in (speed.slowest, speed.median, speed.fastest))
    return f"{middle} ({low}–{high}; {speed.batch})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(BATCHES), default="cpu")
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), help="as 1,4")
    parser.add_argument("--seconds", type=float, help="for the repeats of one measurement")
    parser.add_argument("--note", default="", help="what else the machine did, for the record")
    parser.add_argument("--write", type=Path, help="record the tables in this file")
    arguments = parser.parse_args()
    device: str = arguments.device
    batches, seconds = arguments.batches or BATCHES[device], arguments.seconds or SECONDS[device]
    torch.backends.cudnn.allow_tf32 = False  # as for matrix products, or fp32 would mean less to convolutions
    tables = {precision: table(device, precision, batches, seconds) for precision in PRECISIONS[device]}
    if not arguments.write:
        return
    threads = torch.get_num_threads()
    machine = f"{threads} CPU thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}"
    machine = torch.cuda.get_device_name() if device == "cuda" else machine
    sizes = ",".join(map(str, batches))
    command = f"python bench/attention.py --device {device} --batches {sizes} --seconds {seconds:g}"
    note = f" {arguments.note}." if arguments.note else ""
    page = [
        f"# Speed of specialised attention beside its compute ({device})",
        "",
        f"{date.today()} · `{command}` · {machine} · torch {torch.__version__}.{note}",
        "",
        "Images of 224 pixels. A training step is forward and backward, without the optimiser. Cells: the median of the",
        "repeats; in brackets their range, and the batch of those tried at which it is best. *per MAC*: images/s times",
        "multiply-adds of an image, relative to ViT-B/16 in the same column.",
    ]
    for precision, rows in tables.items():
        page += ["", f"## {precision}", "", *rows]
    arguments.write.parent.mkdir(exist_ok=True)
    arguments.write.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
