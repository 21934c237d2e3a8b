"""Test accuracy of runs from scratch with one augmentation and another, over several seeds, as a Markdown table.

    python bench/augment_scratch.py cifar10 --seeds 0,1,2 --parallel 6 --runs FOLDER
    python bench/augment_scratch.py hymenoptera --side 64 --set train.epochs=100 --runs FOLDER

Each run is `vitlab.train` without a recipe, in a process of its own: `before` with AugReg's RandAugment (2, 10), whose shifts
and cutouts are in pixels, as the default once was, `after` with what is chosen today; `--variant NAME KEY=VALUE...` adds
others. `--side` gives another size than the chosen one, with its model; `--set` holds for all. Called again with the same
`--runs`, it resumes what was cut off and trains nothing twice. The data is looked for as everywhere in vitlab: in the folder
VITLAB_DATA, then in the cache.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

MODELS = {32: "ViT-Ti/4", 64: "ViT-Ti/8", 224: "ViT-S/16"}  # those that a run from scratch gets
VARIANTS = {
    "before": ["data.augment.randaugment=augreg", "data.augment.magnitude=10"],
    "after": [],
}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="cifar10, hymenoptera, or any data that vitlab opens")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--side", type=int, choices=sorted(MODELS), help="pixels; without it, as chosen")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--variant", action="append", nargs="+", default=[], metavar=("NAME", "KEY=VALUE"))
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of the variants to run, by commas")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of each run; without it, the cores are shared out")
    parser.add_argument("--write", type=Path, help="file for the table as well")
    return parser.parse_args()


def measure(folder: Path, data: str, options: dict[str, Any]) -> dict[str, Any]:
    """Trains, resumes, or only reads the result."""
    import vitlab  # here: a process that only waits for others need not load torch

    found = folder.with_suffix(".json")
    if not found.exists():
        begun = (folder / "config.toml").exists()
        same = {key: options[key] for key in ("device", "threads")} | {"quiet": True}
        result = vitlab.train(resume=folder, **same) if begun else vitlab.train(data, out=folder, **options, quiet=True)
        row = {"top1": result.test["top1"], "n": result.test["n"], "seconds": result.seconds}
        found.write_text(json.dumps(row))
    return json.loads(found.read_text())


def table(data: str, rows: dict[str, list[float]], seeds: list[int]) -> str:
    """Per cent; the spread is the standard deviation of a sample."""
    heads = [data, *(f"seed {seed}" for seed in seeds), "mean", "spread"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, tops in rows.items():
        spread = statistics.stdev(tops) if len(tops) > 1 else 0.0
        numbers = " | ".join(f"{100 * value:.2f}" for value in (*tops, statistics.fmean(tops), spread))
        lines.append(f"| {name} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    given = read_arguments()
    variants = VARIANTS | {name: keys for name, *keys in given.variant}
    names = given.only or list(variants)
    sized = [] if given.side is None else [f"data.image_size=[{given.side},{given.side}]"]
    options = {
        "model": None if given.side is None else MODELS[given.side],
        "device": given.device,
        "threads": given.threads or max(1, len(os.sched_getaffinity(0)) // given.parallel),
    }
    given.runs.mkdir(parents=True, exist_ok=True)
    # Fresh processes: a run leaves settings of torch behind, and a forked one could not use the GPU.
    spawn = multiprocessing.get_context("spawn")
    jobs: dict[Future[dict[str, Any]], tuple[str, int]] = {}
    with ProcessPoolExecutor(given.parallel, mp_context=spawn, max_tasks_per_child=1) as pool:
        for seed in given.seeds:
            for name in names:
                changes = [*sized, *given.set, *variants[name]]
                folder = given.runs / f"{Path(given.data).name}-{given.side or 'chosen'}-{name}-{seed}"
                own = {**options, "seed": seed, "overrides": changes}
                jobs[pool.submit(measure, folder, given.data, own)] = (name, seed)
        for job in as_completed(jobs):
            name, seed = jobs[job]
            row = job.result()
            print(f"{name}, seed {seed}: {row['top1']:.2%} of {row['n']:,} in {row['seconds']:.0f} s", flush=True)
    tops = {place: job.result()["top1"] for job, place in jobs.items()}
    made = table(given.data, {name: [tops[name, seed] for seed in given.seeds] for name in names}, given.seeds)
    print(f"\n{made}")
    if given.write is not None:
        given.write.write_text(made + "\n")


if __name__ == "__main__":
    sys.exit(main())
