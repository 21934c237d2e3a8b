"""`vitlab evaluate` by two processes: one document, the numbers of one process, and VTAB in the same call."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from forked_command import Command
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.evaluation.records import read_records
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

PROGRAMS = Path(sys.executable).parent
PATIENCE_S = 300  # for what takes seconds, on a machine that does other things too
SETTINGS = (
    "data.image_size=[16,16]",
    "train.steps=2",
    "train.batch_size=8",
    "train.precision=fp32",
    "schedule.warmup=1",
)
COPIES = Path(__file__).parents[1] / "unit" / "data" / "vtab_copies.py"


def lay_out(folder: Path) -> None:
    """A model, photos of its two classes, and the raw files of one VTAB task."""
    noise = np.random.default_rng(0)
    for name in ("ants", "bees"):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(9):
            Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(
                folder / "photos" / name / f"{i}.png"
            )
    model = create_model("ViT-w16d1m32h2/8", num_classes=2, image_size=16, seed=0)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(0)))
    save_bundle(folder / "model", Bundle(model, Preprocess(image_size=(16, 16)), ("ants", "bees"), "card", {}))
    found = importlib.util.spec_from_file_location("vtab_copies", COPIES)
    assert found and found.loader
    copies = importlib.util.module_from_spec(found)
    found.loader.exec_module(copies)
    copies.svhn(folder / "data")


def test_two_processes_give_one_answer_and_fine_tune_beside_it(tmp_path: Path) -> None:
    lay_out(tmp_path)
    words = ["evaluate", "model", "photos", "--json", "--device", "cpu", "--threads", "1"]
    tuned = ["--vtab", "--task", "svhn", *(word for setting in SETTINGS for word in ("--set", setting))]
    variables = {"VITLAB_DATA": "data", "VITLAB_CACHE": "cache", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def printed(command: list[str]) -> dict[str, object]:
        done = subprocess.run(
            command,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # an error where there are two documents

    vitlab = str(PROGRAMS / "vitlab")
    launched = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python", vitlab]
    code, out, err = Command(words, tmp_path, lambda: os.environ.update(variables)).end()
    assert code == 0, err
    alone, both = json.loads(out), printed([*launched, *words, *tuned, "--out", "out"])
    for name in ("n", "top1", "macro", "confused", "intervals"):
        assert both[name] == alone[name], name
    assert both["out"] == "out" and (tmp_path / "out" / "report.html").is_file()
    (record,) = read_records(tmp_path / "out-vtab" / "records")
    assert (
        record.data == "vtab:svhn" and isinstance(both["vtab"], dict) and both["vtab"]["tasks"]["svhn"] == record.value
    )
