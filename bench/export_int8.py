"""int8 against float32 on trained weights: what the default bounds of `vitlab export --precision int8` are taken from.

    python bench/export_int8.py --write docs/results/export-int8-cpu.md

Calibrated on 128 images, compared on others. Bodies are DINOv2 and the start weights of the package, with a linear head fitted
to 37 breeds of pets (ridge regression on 370 training images); a ViT and a ResNet are trained from scratch on digits.
"""

import argparse
import dataclasses
import os
import platform
import tempfile
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

import vitlab
from vitlab.data.sources.packed import open_packed
from vitlab.exporting.export_run import Export
from vitlab.models.build import build
from vitlab.models.names import with_size
from vitlab.weights.bundle import Bundle, save_bundle

DATA = Path(os.environ.get("VITLAB_DATA") or Path(__file__).parents[2] / "shared" / "data")
BODIES = {
    "DINOv2 ViT-S/14, head on pets": DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors",
    "start weights ViT-Ti/16, head on pets": "ViT-Ti/16@dinov2-distilled",
}
TRAINED = {"ViT trained on digits": "study-laptop-vit", "BiT trained on digits": "study-laptop-resnet"}
Row = tuple[str, str, Export]


def probed(source: str | Path, size: int, per_class: int) -> Bundle:
    """A body with a linear head for the pets: ridge regression to one-hot labels, scaled to scores of a few units."""
    body = vitlab.load(source, device="cpu", image_size=size, quiet=True)
    pets = open_packed({"train": DATA / "oxford_pets" / "pets_trainval.npz"}).parts["train"]
    labels = torch.as_tensor(pets.labels.values).flatten()
    chosen = [i for k in range(37) for i in (labels == k).nonzero().flatten()[:per_class].tolist()]
    features_ND = body.embed([pets.read(i) for i in chosen])
    mean_D = features_ND.mean(dim=0)
    x_ND, y_NK = features_ND - mean_D, torch.nn.functional.one_hot(labels[chosen].long(), 37).float()
    gram_DD = x_ND.mT @ x_ND + 0.1 * x_ND.pow(2).sum() / len(x_ND) * torch.eye(x_ND.shape[1])
    weight_KD = 10 * torch.linalg.solve(gram_DD, x_ND.mT @ y_NK).mT
    model = build(with_size(body.model.spec, num_classes=37), seed=0)
    model.load_state_dict(
        {**model.state_dict(), **{k: v for k, v in body.model.state_dict().items() if "head" not in k}}
    )
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.copy_(weight_KD)
        model.head.bias.copy_(-weight_KD @ mean_D)
    return dataclasses.replace(body.bundle, model=model.eval(), labels=tuple(map(str, range(37))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128, help="to compare on")
    parser.add_argument("--size", type=int, default=112, help="of the pets")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models: dict[str, tuple[Path, str | None]] = {}
        for number, (name, source) in enumerate(BODIES.items()):
            save_bundle(folder / f"probed-{number}", probed(source, given.size, 10))
            models[name] = folder / f"probed-{number}", str(DATA / "oxford_pets" / "pets_test.npz")
        for name, recipe in TRAINED.items():
            vitlab.train(recipe=recipe, out=folder / recipe, device="cpu", threads=given.threads, quiet=True)
            models[name] = folder / recipe, None
        for name, (model, check) in models.items():
            for to in ("onnx", "openvino"):
                out = folder / f"{model.name}-{to}{'.onnx' if to == 'onnx' else ''}"
                done = vitlab.export(
                    *(model, out),
                    to=to,  # pyright: ignore[reportArgumentType]
                    precision="int8",
                    check=check,
                    check_images=given.images,
                    limit=1e9,
                    agreement=0.0,
                    threads=given.threads,
                    quiet=True,
                )
                rows.append((name, to, done))
                print(_line(*rows[-1]), flush=True)
    if given.write:
        given.write.write_text(_report(rows, given), encoding="utf-8")


def _line(name: str, to: str, done: Export) -> str:
    found = done.parity
    worst = max(found.comparisons, key=lambda row: row.difference)
    return (
        f"| {name} | {to} | {worst.image_size[0]} | {found.images} | {found.difference:.2f} of {found.largest_score:.2f} "
        f"| {found.difference / max(1.0, found.largest_score):.3f} | {found.agreement:.1%} | {done.notes[0]} |"
    )


def _report(rows: list[Row], given: argparse.Namespace) -> str:
    names = ("torch", "onnxruntime", "openvino", "nncf")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    command = f"python bench/export_int8.py --images {given.images} --size {given.size}"
    return "\n".join(
        [
            "# int8 beside float32, on trained weights",
            "",
            f"{date.today()} · `{command}` · {os.cpu_count()} CPU cores · Python {platform.python_version()}, {versions}",
            "",
            "Compared on images that it was not calibrated on. Share: of the largest score.",
            "",
            "| model | format | pixels | images | largest difference of a score | share | equal first answers | |",
            "|---|---|---|---|---|---|---|---|",
            *(_line(*row) for row in rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
