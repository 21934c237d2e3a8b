"""Every family exported to ONNX and OpenVINO, against torch on real photos: two sizes, batches of 1, 3 and 8.

    python bench/export_parity.py --out parity.json --write docs/results/export-parity-cpu.md

Weights are random, the head is not zero; DINOv2's are the published ones. Each figure is over all images at every batch size.
One graph with an open size serves both sizes; AxialResNets, which have one size, are exported twice. Models whose rows are
in `--out` already are not measured again.
"""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.data.decode import decode
from vitlab.data.preprocess import Preprocess, normalise, resize
from vitlab.data.sources.packed import open_packed
from vitlab.engines.classifier import load
from vitlab.engines.exported import Run, compiled_openvino, hushed
from vitlab.exporting.graph import Graph, GraphRule, output_names, traced
from vitlab.exporting.onnx_file import onnx_run, to_onnx
from vitlab.exporting.openvino_file import to_openvino
from vitlab.models.batch_norm import BatchNorm
from vitlab.models.build import build, create_model
from vitlab.models.names import with_size
from vitlab.weights.bundle import Bundle

DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[2] / "shared" / "data")
PHOTOS = DATA / "imagenet_samples" / "imagenet_850.npz"
DINOV2 = DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors"
NAMES = (  # of each family a small member
    "ViT-Ti/16",
    "R26+ViT-Ti/16",
    "BiT-R26x1",
    "BiT-R26x1+NL",
    "AxialResNet-26-S",
    "Axial-ViT-Ti/32",
    "EfficientNet-B0",
    "ViT-S/14, DINOv2",
)
BATCHES = (1, 3, 8)
CLASSES = 100
_STATISTICS = 64  # photos that the running statistics of batch norms are taken from


def model_of(name: str, size: int) -> Bundle:
    torch.manual_seed(0)
    if name.endswith("DINOv2"):
        body = load(DINOV2, image_size=size, device="cpu", quiet=True)
        model = build(with_size(body.model.spec, num_classes=CLASSES), seed=0)
        model.load_state_dict({**model.state_dict(), **body.model.state_dict()})
        rule = body.preprocess
    else:
        model, rule = (
            create_model(name, num_classes=CLASSES, image_size=size, seed=0),
            Preprocess(image_size=(size, size)),
        )
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.1)
    for parameter_name, parameter in model.named_parameters():  # what starts at zero would hide faults of its branch
        if parameter.ndim == 1 and not parameter.any() and "head" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.05)
    return Bundle(model.eval(), rule, tuple(map(str, range(CLASSES))), "", {})


@torch.no_grad()
def centre(bundle: Bundle, x_NCYX: Tensor) -> None:
    """Without what all photos have in common: else most of them get one answer, which any graph would agree with."""
    head, norms = bundle.model.head, [m for m in bundle.model.modules() if isinstance(m, BatchNorm)]
    assert head is not None
    for norm in norms:  # with the statistics of a new model, what tells photos apart is lost in the last bits
        norm.momentum = 1.0
        norm.train()
    bundle.model(x_NCYX[:_STATISTICS])
    bundle.model.eval()
    logits_NK = torch.cat([bundle.model(part) for part in x_NCYX.split(BATCHES[-1])])
    head.bias -= logits_NK.mean(dim=0)
    for parameter in (head.weight, head.bias):
        parameter /= logits_NK.std(dim=0).mean()


def scores(run: Run, x_NCYX: Tensor, batch: int) -> Tensor:
    parts = [run(x_NCYX[i : i + batch].numpy())["logits"] for i in range(0, len(x_NCYX), batch)]
    return torch.from_numpy(np.concatenate(parts))


def measure(name: str, sizes: tuple[int, int], photos: list[Tensor], formats: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    is_fixed = name.startswith("AxialResNet")
    for size in sizes:
        if size == sizes[0] or is_fixed:
            bundle = model_of(name, size)
        rule = dataclasses.replace(bundle.preprocess, image_size=(size, size))
        x_NCYX = normalise(rule, torch.cat([resize(rule, photo[None]) for photo in photos])).contiguous()
        if size == sizes[0] or is_fixed:
            centre(bundle, x_NCYX)
            runs = exported(bundle, GraphRule(dynamic_size=not is_fixed), formats)
        with torch.inference_mode():
            expected_NK = torch.cat([bundle.model(part) for part in x_NCYX.split(BATCHES[-1])])
        for to, run in runs.items():
            for batch in BATCHES:
                found_NK = scores(run, x_NCYX, batch)
                row = {
                    "model": name,
                    "to": to,
                    "size": size,
                    "batch": batch,
                    "images": len(photos),
                    "same": int((found_NK.argmax(1) == expected_NK.argmax(1)).sum()),
                    "answers": len(set(expected_NK.argmax(1).tolist())),
                    "difference": float((found_NK - expected_NK).abs().max()),
                    "largest": float(expected_NK.abs().max()),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def exported(bundle: Bundle, rule: GraphRule, formats: Sequence[str]) -> dict[str, Run]:
    outputs = output_names(bundle.model, rule)
    with hushed():
        program = traced(Graph(bundle, rule), bundle, rule)
    make: dict[str, Callable[[], Run]] = {
        "onnx": lambda: onnx_run(to_onnx(program, outputs, rule, 20), outputs),
        "openvino": lambda: compiled_openvino(to_openvino(program, outputs), "fp32", outputs),
    }
    return {to: make[to]() for to in formats}


def report(rows: Sequence[dict[str, Any]], command: str) -> str:
    """One line for each model, format and size; the batches are joined."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "onnx", "onnxruntime", "openvino"))
    images = {row["images"] for row in rows}
    lines = [
        "# Exports beside their models, on real photos",
        "",
        f"{date.today()} · `{command}` · {os.cpu_count()} CPU cores · Python {platform.python_version()}, {versions}",
        "",
        f"{', '.join(map(str, sorted(images)))} photos of ImageNet classes (`imagenet_850.npz`), prepared by vitlab, through"
        " torch in batches of 8 and through the exported graph in batches of 1, 3 and 8. Random weights; DINOv2 has its own."
        " The head of 100 classes is random too, and scaled so that scores are 0 on average over the photos and deviate by 1."
        " Batch norms have the statistics of 64 of the photos."
        " All but AxialResNet have one graph with an open size for both sizes. OpenVINO computes in float32.",
        "",
        "| model | format | size | equal first answers, batches of 1, 3, 8 | largest difference | largest score"
        " | different answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, to, size in dict.fromkeys((row["model"], row["to"], row["size"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["to"], row["size"]) == (model, to, size)]
        same = ", ".join(f"{row['same']}/{row['images']}" for row in mine)
        difference, largest = max(row["difference"] for row in mine), mine[0]["largest"]
        lines.append(f"| {model} | {to} | {size} | {same} | {difference:.1e} | {largest:.2f} | {mine[0]['answers']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--to", nargs="*", default=("onnx", "openvino"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dataset = open_packed({"all": PHOTOS}).parts["all"]
    photos = [decode(dataset.read(i), "RGB") for i in range(given.images)]
    rows: list[dict[str, Any]] = json.loads(given.out.read_text()) if given.out and given.out.exists() else []
    for name in given.models:
        if not any(row["model"] == name for row in rows):
            rows += measure(name, (112, 140) if name.endswith("DINOv2") else (96, 128), photos, given.to)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))
    if given.write:
        given.write.write_text(report(rows, f"python bench/export_parity.py --images {given.images}"), encoding="utf-8")


if __name__ == "__main__":
    main()
