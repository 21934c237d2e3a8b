"""What evaluating costs beside the model itself, when the images are decoded already: both in one process, turn by turn.

    python bench/evaluation.py --write docs/results/evaluation-speed-cpu.md
    python bench/evaluation.py --device cuda --batch 256 --images 20000 --write docs/results/evaluation-speed-gpu.md

"model" is the bare model on a batch of prepared floats, as often as the set has batches. "loop" is vitlab's evaluation of the
same number of images, cached as pixels: reading, stacking, moving, normalising, model, gathering. The ratio of the medians is
what must stay within 5 %. On a CPU without workers the process's own seconds count, which other work on the machine does not
change.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch

import vitlab
from vitlab.core.dist import World
from vitlab.core.environment import processor_name
from vitlab.data.dataset import from_arrays
from vitlab.data.loader import BadImages, eval_batches
from vitlab.data.preprocess import Preprocess
from vitlab.engines.inference import run_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ViT-S/16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    if given.images % given.batch:
        parser.error("--images must be a multiple of --batch, so that both do the same work")
    model = vitlab.create_model(given.model, num_classes=1000, image_size=given.side, seed=0).to(device).eval()
    rule = Preprocess(image_size=(given.side, given.side))
    pixels = np.random.default_rng(0).integers(0, 256, (given.images, 3, given.side, given.side), dtype=np.uint8)
    dataset = from_arrays(pixels, [0] * given.images, ["a", "b"])
    world = World(0, 1, device)

    @torch.inference_mode()
    def bare() -> None:
        x = torch.randn(given.batch, 3, given.side, given.side, device=device)
        for _ in range(given.images // given.batch):
            out = model(x)
        out.sum().item()  # the last word of the device

    def loop() -> None:
        batches = eval_batches(
            dataset,
            rule,
            batch_size=given.batch,
            bad=BadImages(0),
            workers=given.workers,
            pin=device.type == "cuda",
        )
        run_model(model, batches, rule, world)

    seconds: dict[str, list[float]] = {"model": [], "loop": []}
    jobs: dict[str, Callable[[], None]] = {"model": bare, "loop": loop}
    clock = time.process_time if device.type == "cpu" and not given.workers else time.perf_counter
    for job in jobs.values():
        job()
    for turn in range(given.rounds):
        for name in jobs if turn % 2 else reversed(jobs):  # in turn, so that what else the machine does meets both
            started = clock()
            jobs[name]()
            seconds[name].append(clock() - started)
    speed = {name: given.images / statistics.median(taken) for name, taken in seconds.items()}
    machine = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{processor_name()}, {given.threads} thread(s)"
    )
    head = f"{date.today()} · `python bench/evaluation.py{_options(given)}` · {machine} · torch {torch.__version__}"
    lines = [
        "# Evaluation beside the bare model",
        "",
        head,
        "",
        f"{given.model} at {given.side} pixels, {given.images:,} images cached as pixels, batches of {given.batch}, "
        f"median of {given.rounds} rounds.",
        "",
        "| | images/s | of the bare model |",
        "|---|---|---|",
        f"| bare model | {speed['model']:,.1f} | 1 |",
        f"| evaluation loop | {speed['loop']:,.1f} | {speed['loop'] / speed['model']:.3f} |",
        "",
    ]
    print("\n".join(lines))
    if given.write:
        given.write.write_text("\n".join(lines))


def _options(given: argparse.Namespace) -> str:
    usual = {"model": "ViT-S/16", "device": "cpu", "batch": 16, "images": 32, "side": 224, "rounds": 5}
    usual |= {"workers": 0, "threads": 1}
    return "".join(
        f" --{name} {getattr(given, name)}" for name, value in usual.items() if getattr(given, name) != value
    )


if __name__ == "__main__":
    main()
