"""How much of what is wrong with photos `vitlab data check` finds: wrong bytes, and wrong labels, planted on purpose.

    VITLAB_DATA=... python bench/audit_planted.py [--weights dinov2_vits14_fp16.safetensors]

Wrong bytes: 240 photos of ants and bees, 40 bytes behind the first 100 of each file replaced by others. Wrong labels: 1,000 pet
photos of 25 breeds, 40 of each, 50 of them with the label of another breed, compared with their nearest pictures by the model
of `--weights`. Prints a sentence for each.
"""

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import vitlab

DATA = Path(os.environ["VITLAB_DATA"])
PHOTOS, BYTES, HEADER = 240, 40, 100
BREEDS, EACH, WRONG = 25, 40, 50
Packed = dict[str, Any]


def read(path: Path) -> Packed:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def pieces(packed: Packed) -> list[bytes]:
    raw, ends = packed["data"].tobytes(), packed["offsets"]
    return [raw[start:stop] for start, stop in itertools.pairwise(ends)]


def save(path: Path, files: list[bytes], labels: Any, names: list[str], classes: Any) -> Path:
    offsets = np.cumsum([0, *map(len, files)])
    np.savez(
        path,
        data=np.frombuffer(b"".join(files), np.uint8),
        offsets=offsets,
        labels=labels,
        names=names,
        classes=classes,
    )
    return path


def named(data: Path, kinds: set[str], model: Path | None = None) -> set[str]:
    """The keys of the images that a finding of one of these kinds names."""
    found = vitlab.check_data(data, model=model, workers=1, device="cpu", quiet=True)
    return {item.key for finding in found.findings if finding.kind in kinds for item in finding.items}


def wrong_bytes(folder: Path) -> str:
    packed, draw = read(DATA / "hymenoptera" / "hymenoptera_train.npz"), np.random.default_rng(0)
    files: list[bytes] = []
    for raw in pieces(packed)[:PHOTOS]:
        content = bytearray(raw)
        for place in draw.choice(np.arange(HEADER, len(raw)), BYTES, replace=False):
            content[place] ^= int(draw.integers(1, 256))
        files.append(bytes(content))
    names = [f"{i:03d}.jpg" for i in range(PHOTOS)]
    data = save(folder / "bytes.npz", files, packed["labels"][:PHOTOS], names, packed["classes"])
    found = named(data, {"unreadable", "damaged"})
    return f"Of {PHOTOS} JPEG photos with {BYTES} wrong bytes each, {len(found)} are noticed."


def wrong_labels(folder: Path, weights: Path) -> str:
    packed, draw = read(DATA / "oxford_pets" / "pets_trainval.npz"), np.random.default_rng(0)
    chosen = np.concatenate([np.flatnonzero(packed["labels"] == breed)[:EACH] for breed in range(BREEDS)])
    files, labels = pieces(packed), packed["labels"][chosen].copy()
    wrong = draw.choice(len(chosen), WRONG, replace=False)
    labels[wrong] = (labels[wrong] + draw.integers(1, BREEDS, WRONG)) % BREEDS
    names = [f"{i:04d}.jpg" for i in range(len(chosen))]
    data = save(folder / "labels.npz", [files[i] for i in chosen], labels, names, packed["classes"][:BREEDS])
    found = named(data, {"label"}, weights)
    right = found & {names[i] for i in wrong}
    return (
        f"{WRONG} of {len(chosen):,} pet photos mislabelled: {len(found)} were named, {len(right)} of them correctly."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=DATA / "dinov2_vits14" / "dinov2_vits14_fp16.safetensors")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(wrong_bytes(Path(folder)), flush=True)
        print(wrong_labels(Path(folder), given.weights))


if __name__ == "__main__":
    main()
