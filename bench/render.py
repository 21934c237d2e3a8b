"""How many images a second the drawn data sets give, at 64 and 224 pixels, and how long the search for categories takes.

On the CPU with one process and with two, each with one thread, as data workers are; on a GPU in one. The best of the rounds
counts, because noise only ever slows down. `--write FILE` records the table.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from vitlab.data.synthetic.fractals import Fractals, find_systems
from vitlab.data.synthetic.shapes import Shapes

CATEGORIES = 1000
PROCESSES = {"cpu": (1, 2), "cuda": (1,)}
BATCHES = {"cpu": {64: (64, 512), 224: (16, 128)}, "cuda": {64: (256, 4096), 224: (64, 1024)}}


def sets(side: int) -> dict[str, Fractals | Shapes]:
    size = (side, side)
    return {
        "fractals, grey": Fractals(CATEGORIES, 1000, size),
        "fractals, colour": Fractals(CATEGORIES, 1000, size, "colour"),
        "shapes, count": Shapes("count", 1_000_000, size),
    }


def rate(name: str, side: int, batch: int, device: str, rounds: int, start: Callable[[], object]) -> float:
    """Images per second in this process, the best of `rounds` after one to warm up. `start` is called before each."""
    torch.set_num_threads(1)
    data = sets(side)[name]
    if isinstance(data, Fractals):
        find_systems(data.seed, torch.arange(CATEGORIES))  # kept, so that it is not in the rate
    best = 0.0
    for round_ in range(rounds + 1):
        start()
        began = time.perf_counter()
        data.render(torch.arange(round_ * batch, (round_ + 1) * batch), device)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, batch / (time.perf_counter() - began)) if round_ else best
    return best


def measure(processes: int, *case: Any) -> float:
    """The sum over `processes` that work at the same time, and begin every round together."""
    if processes == 1:
        return rate(*case, start=int)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    workers = [context.Process(target=_put_rate, args=(case, barrier, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    found = sum(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    return found


def _put_rate(case: tuple[Any, ...], barrier: Any, results: Any) -> None:
    results.put(rate(*case, start=barrier.wait))


def table(device: str, rounds: int) -> list[str]:
    rows = ["| set | pixels | batch | processes | images/s |", "|---|---|---|---|---|"]
    for side, batches in BATCHES[device].items():
        for name in sets(side):
            for batch in batches:
                for processes in PROCESSES[device]:
                    found = measure(processes, name, side, batch, device, rounds)
                    rows.append(f"| {name} | {side} | {batch} | {processes} | {found:,.0f} |")
                    print(rows[-1], flush=True)
    return rows


def search_seconds() -> float:
    began = time.perf_counter()
    find_systems(1, torch.arange(CATEGORIES))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=list(BATCHES), default="cpu")
    parser.add_argument("--write", type=Path, help="record the table in this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    search = f"Searching {CATEGORIES:,} categories of fractals took {search_seconds():.2f} s, on one CPU thread."
    print(search)
    rows = table(arguments.device, arguments.rounds)
    if arguments.write:
        machine = f"{multiprocessing.cpu_count()} CPU cores, {torch.backends.cpu.get_cpu_capability()}"
        if arguments.device == "cuda":
            machine = torch.cuda.get_device_name()
        arguments.write.parent.mkdir(exist_ok=True)
        arguments.write.write_text(
            f"# Speed of the drawn data sets ({arguments.device})\n\n"
            f"{date.today()} · `python bench/render.py --device {arguments.device}` · best of {arguments.rounds} rounds · "
            f"{machine} · torch {torch.__version__}.\n{search}\n\n" + "\n".join(rows) + "\n"
        )


if __name__ == "__main__":
    main()
