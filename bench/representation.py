"""How well published features tell classes apart: k-NN, few-shot and linear probe on whole test sets, on CPU or GPU alike.

    python bench/representation.py --data oxford-pets --model dinov2_vits14_fp16.safetensors --out FOLDER

Everything is float32 without TF32; the fits are float64. Features are kept in `--cache`, so that a second run starts behind
them. `--check-subset N` runs N training and N test images on the CPU and on the GPU in one process, and fails where an accuracy
differs by more than 0.05 point. The data is looked for as everywhere in vitlab: in the folder VITLAB_DATA, then in the cache.
"""

import argparse
import dataclasses
import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from vitlab.runs.evaluation.representation import RepresentationRule, make_records, measure

import vitlab
from vitlab.core.console import Console
from vitlab.core.environment import cache_folder
from vitlab.data.dataset import Opened
from vitlab.data.sources.opening import open_data
from vitlab.engines.classifier import Classifier
from vitlab.evaluation.features import FeatureRule, features_of
from vitlab.evaluation.few_shot import L2
from vitlab.evaluation.knn import TEMPERATURE
from vitlab.evaluation.records import write_record

MOST_POINTS = 0.05  # of accuracy, between CPU and GPU


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="cifar10, oxford-pets, or any data that vitlab opens")
    parser.add_argument("--model", required=True, help="weights, a bundle or a name")
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shots", type=lambda text: tuple(map(int, text.split(","))), default=(1, 5, 10, 25))
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--cache", type=Path, default=cache_folder() / "features")
    parser.add_argument("--records", type=Path, help="also write one record per measure into this folder")
    parser.add_argument("--limit", type=int, metavar="N", help="only N images of each part, evenly spaced")
    parser.add_argument("--check-subset", type=int, metavar="N", help="compare CPU and GPU on N images of each part")
    return parser.parse_args()


def thinned(opened: Opened, count: int) -> Opened:
    """At most `count` images of each part, evenly spaced, so that no class is left behind by the order."""
    parts = {
        name: part.subset(torch.arange(min(count, len(part))) * len(part) // min(count, len(part)))
        for name, part in opened.parts.items()
    }
    return dataclasses.replace(opened, parts=parts)


def accuracies(found: dict[str, Any]) -> dict[str, float]:
    rows = {
        f"{shots}-shot, seed {seed}": value
        for shots, row in found["few_shot_detail"].items()
        for seed, value in zip(row["seeds"], row["values"], strict=True)
    }
    rows |= {f"{row['k']}-NN, {how}": row[how] for row in found["knn"]["grid"] for how in ("plain", "weighted")}
    return rows | {"probe": found["probe"]["top1"]}


def table(found: dict[str, Any], clf: Classifier, arguments: argparse.Namespace, command: str) -> str:
    features = found["features"]
    machine = torch.cuda.get_device_name() if clf.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    speed = f"{features['computed'] / features['seconds']:.0f} img/s" if features["computed"] else "from the cache"
    lines = [
        f"# {Path(arguments.model).stem} on {arguments.data}",
        "",
        f"{date.today()} · `{command}` · {machine} · torch {torch.__version__}",
        "",
        f"{features['train']:,} training and {features['test']:,} test images, {features['classes']} classes; vectors of "
        f"{features['width']} numbers from {clf!r}, float32 without TF32 ({speed}).",
        "",
        "| measure | top-1 | range or 95 % interval | setting |",
        "|---|---|---|---|",
    ]
    for shots, row in found["few_shot_detail"].items():
        mean = found["few_shot"][shots]
        setting = f"mean and range of seeds {', '.join(map(str, row['seeds']))}; ridge, λ = {L2:g}"
        lines.append(f"| {shots}-shot linear | {mean:.2%} | {row['low']:.2%} – {row['high']:.2%} | {setting} |")
    near, probe = found["knn"], found["probe"]
    low, high = near["interval"]
    setting = f"cosine, votes exp(s / {TEMPERATURE})"
    lines.append(f"| {near['k']}-NN | {near['top1']:.2%} | {low:.2%} – {high:.2%} | {setting} |")
    low, high = probe["interval"]
    setting = f"L-BFGS, l2 = {probe['l2']:.2g} from {len(probe['sweep'])} tried on held-out training images"
    lines.append(f"| linear probe | {probe['top1']:.2%} | {low:.2%} – {high:.2%} | {setting} |")
    lines += ["", "Nearest neighbours by number and vote:", "", "| k | plain | weighted |", "|---|---|---|"]
    lines += [f"| {row['k']} | {row['plain']:.2%} | {row['weighted']:.2%} |" for row in near["grid"]]
    notes = [f"- {note}" for note in features["notes"]]
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def check(opened: Opened, rule: RepresentationRule, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same images on the CPU and on the other device: how far features and accuracies lie apart."""
    part = thinned(opened, arguments.check_subset)
    console = Console()
    vectors: dict[str, torch.Tensor] = {}
    scores: dict[str, dict[str, float]] = {}
    devices = list(
        dict.fromkeys(("cpu", vitlab.load(arguments.model, device=arguments.device, quiet=True).device.type))
    )
    for device in devices:
        clf = vitlab.load(arguments.model, device=device, quiet=True)
        shared = {"console": console, "cache": arguments.cache, "workers": arguments.workers}
        scores[device] = accuracies(measure(clf, part, rule, **shared))
        kept = [features_of(clf, dataset, FeatureRule(), **shared) for dataset in part.parts.values()]
        vectors[device] = torch.cat([chunk for features in kept for chunk in features.chunks])
    one, other = devices[0], devices[-1]
    points = {name: 100 * abs(scores[one][name] - scores[other][name]) for name in scores[one]}
    return {
        "devices": devices,
        "images": {name: len(dataset) for name, dataset in part.parts.items()},
        "largest_feature_difference": float((vectors[one] - vectors[other]).abs().max()),
        "feature_scale": float(vectors[one].abs().max()),
        "lowest_cosine": float(torch.cosine_similarity(vectors[one].double(), vectors[other].double()).min()),
        "largest_difference_in_points": max(points.values()),
        "points": points,
        "scores": scores,
    }


def main() -> None:
    arguments = read_arguments()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    # As another machine would type it: the place of the weights there is not the one here.
    command = (
        f"python bench/representation.py --data {arguments.data} --model {Path(arguments.model).name} --out FOLDER"
    )
    command += f" --limit {arguments.limit}" if arguments.limit else ""
    opened = open_data(arguments.data)
    if arguments.limit:
        opened = thinned(opened, arguments.limit)
    rule = RepresentationRule(shots=arguments.shots, knn=arguments.k, probe=True, seeds=arguments.seeds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.data.replace("_", "-").replace("/", "-")
    if arguments.check_subset:
        found = check(opened, rule, arguments)
        (arguments.out / f"representation-{name}-check.json").write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found, indent=2))
        if found["largest_difference_in_points"] > MOST_POINTS + 1e-9:  # rounding of the quotients
            sys.exit(f"accuracies differ by {found['largest_difference_in_points']:.3f} points")
        return
    clf = vitlab.load(arguments.model, device=arguments.device, quiet=True)
    started = time.perf_counter()
    found = measure(
        clf,
        opened,
        rule,
        console=Console(),
        workers=arguments.workers,
        batch_size=arguments.batch_size,
        cache=arguments.cache,
    )
    found["seconds"] = time.perf_counter() - started
    stem = f"representation-{name}-{clf.device.type}"
    (arguments.out / f"{stem}.json").write_text(json.dumps({"command": command, **found}, indent=2) + "\n")
    text = table(found, clf, arguments, command)
    (arguments.out / f"{stem}.md").write_text(text)
    print(text)
    for record in make_records(found, clf, opened, data=arguments.data, command=command) if arguments.records else ():
        print(write_record(arguments.records, record))


if __name__ == "__main__":
    main()
