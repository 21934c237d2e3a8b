"""Two runs that are started at the same moment, without --out, in the same folder: each gets a name of its own."""

import json
import time
from pathlib import Path

import numpy as np
from forked_work import end_of, start_child
from PIL import Image

import vitlab
from vitlab.core import fsio

PATIENCE_S = 300
SMALL = ["data.image_size=[8,8]", "data.workers=0", "train.precision=fp32", "train.steps=1", "train.batch_size=4"]


def train(name: str) -> int:
    """Waits, where the run's folder is about to be made, until the other process is there too: both have found it free."""

    def wait_for_the_other(operation: fsio.Operation, path: Path) -> None:
        if operation == "mkdir" and path.name.startswith(".train-"):
            Path(f"ready-{name}").touch()
            until = time.monotonic() + PATIENCE_S
            while len(list(Path().glob("ready-*"))) < 2:
                assert time.monotonic() < until, "the other never came"
                time.sleep(0.01)

    with fsio.intercept(wait_for_the_other):
        made = vitlab.train("photos", model="ViT-w16d1m32h2/4", overrides=SMALL, device="cpu", threads=1, quiet=True)
    Path(f"run-{name}").write_text(str(made.run))
    return 0


def test_the_second_takes_the_next_number(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for name in ("green", "red"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(5):
            pixels = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    with (tmp_path / "printed").open("w") as printed:
        both = [start_child(lambda name=name: train(name), tmp_path, printed.fileno()) for name in "ab"]
        assert [end_of(one) for one in both] == [0, 0], (tmp_path / "printed").read_text()
    assert sorted((tmp_path / f"run-{name}").read_text() for name in "ab") == ["runs/train-1", "runs/train-2"]
    for number in (1, 2):
        run = tmp_path / "runs" / f"train-{number}"
        assert (run / "bundle" / "manifest.json").is_file()
        assert f"--out runs/train-{number}" in json.loads((run / "env.json").read_text())["command"]
