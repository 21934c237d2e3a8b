"""20-nearest-neighbour vote on Oxford Pets with the CLS features of real DINOv2 weights: does a loaded file really see?

python bench/knn_pets.py --weights dinov2_vits14_fp16.safetensors --pets FOLDER --write docs/results/dinov2-pets-knn.md
"""

import argparse
import itertools
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import vitlab
from vitlab.engines.classifier import Classifier

NEIGHBOURS = 20
CHUNK = 256


def read_images(path: Path) -> tuple[list[bytes], Tensor]:
    """The encoded images and labels of a packed archive."""
    with np.load(path) as archive:
        data, offsets = archive["data"].tobytes(), archive["offsets"]
        labels = torch.from_numpy(archive["labels"].astype(np.int64))
    return [data[a:b] for a, b in itertools.pairwise(offsets)], labels


def embed(clf: Classifier, images: list[bytes], name: str) -> Tensor:
    parts: list[Tensor] = []
    started = time.perf_counter()
    for start in range(0, len(images), CHUNK):
        parts.append(clf.embed(images[start : start + CHUNK]))
        done = min(start + CHUNK, len(images))
        print(f"{name} {done}/{len(images)}  {done / (time.perf_counter() - started):.0f} img/s", flush=True)
    return torch.nn.functional.normalize(torch.cat(parts), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--pets", type=Path, required=True, help="folder with pets_trainval.npz and pets_test.npz")
    parser.add_argument("--tests", type=int, help="only so many test images")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    clf = vitlab.load(arguments.weights)
    train_images, train_labels = read_images(arguments.pets / "pets_trainval.npz")
    test_images, test_labels = read_images(arguments.pets / "pets_test.npz")
    count = arguments.tests or len(test_images)
    train, test = embed(clf, train_images, "train"), embed(clf, test_images[:count], "test")
    nearest = (test @ train.T).topk(NEIGHBOURS, dim=1).indices
    votes = torch.nn.functional.one_hot(train_labels[nearest]).sum(dim=1)
    accuracy = (votes.argmax(dim=1) == test_labels[:count]).float().mean().item()
    text = (
        f"20-NN on Oxford Pets, {len(train)} train and {count} test images, CLS features of {clf}: **{accuracy:.2%}**"
    )
    print(text)
    if arguments.write:
        machine = torch.cuda.get_device_name() if clf.device.type == "cuda" else "CPU"
        command = "python bench/knn_pets.py --weights dinov2_vits14_fp16.safetensors --pets FOLDER"
        when = f"{date.today()} · `{command}` · {machine} · torch {torch.__version__}"
        arguments.write.write_text(f"# DINOv2 ViT-S/14 on Oxford Pets\n\n{when}\n\n{text}\n")


if __name__ == "__main__":
    main()
