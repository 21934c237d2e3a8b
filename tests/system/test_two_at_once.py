"""Two runs that are started at the same moment, without --out, in the same folder: each gets a name of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

# Waits, where the run's folder is about to be made, until the other process is there too: both have found the name free.
PROGRAM = """
import sys, time
from pathlib import Path
import vitlab
from vitlab.core import fsio

def wait_for_the_other(operation, path):
    if operation == "mkdir" and path.name.startswith(".train-"):
        Path(f"ready-{sys.argv[1]}").touch()
        while len(list(Path().glob("ready-*"))) < 2:
            time.sleep(0.01)

small = ["data.image_size=[8,8]", "data.workers=0", "train.precision=fp32", "train.steps=1", "train.batch_size=4"]
with fsio.intercept(wait_for_the_other):
    print(vitlab.train("photos", model="ViT-w16d1m32h2/4", overrides=small, device="cpu", threads=1, quiet=True).run)
"""


def test_the_second_takes_the_next_number(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for name in ("green", "red"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(5):
            pixels = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name in "ab"
    ]
    said = [one.communicate(timeout=300) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert sorted(out.strip() for out, _ in said) == ["runs/train-1", "runs/train-2"]
    for number in (1, 2):
        run = tmp_path / "runs" / f"train-{number}"
        assert (run / "bundle" / "manifest.json").is_file()
        assert f"--out runs/train-{number}" in json.loads((run / "env.json").read_text())["command"]
