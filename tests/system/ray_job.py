"""Run as a program: vectors and labels of images by two workers of a local Ray cluster, one of which is killed on the way.

MODEL and the folder with images.npz are given; prints one JSON document.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray

import vitlab


def main(model: str, folder: str) -> None:
    marker = Path(folder) / "killed"
    images = np.load(Path(folder) / "images.npz", allow_pickle=False)
    rows = [{"id": i, "bytes": images[str(i)].tobytes()} for i in range(len(images))]

    class Fragile(vitlab.Embedder):  # pickled whole, because no worker could import this program
        def __call__(self, batch: Any) -> Any:
            found = super().__call__(batch)
            if 11 in batch["id"] and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return {**found, "worker": np.full(len(batch["id"]), os.getpid())}

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, address="local")
    try:
        data = ray.data.from_items(rows, override_num_blocks=8)
        pool = ray.data.ActorPoolStrategy(size=2)
        settings = {"model": model, "device": "cpu"}
        vectors = data.map_batches(Fragile, fn_constructor_kwargs=settings, compute=pool, batch_size=4).take_all()
        labels = data.map_batches(vitlab.Predictor(model, device="cpu", top=2), batch_size=4).take_all()
    finally:
        ray.shutdown()
    print(
        json.dumps(
            {
                "killed": marker.exists(),
                "workers": len({row["worker"] for row in vectors}),
                "vectors": {row["id"]: [row["error"], np.asarray(row["vector"], float).tolist()] for row in vectors},
                "labels": {row["id"]: [row["error"], list(row["label"])] for row in labels},
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
