"""A model as a stage of Ray Data: two workers, one of them killed on the way, give what one process gives."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

pytestmark = [
    pytest.mark.slow,  # Ray starts many programs, each of which imports torch
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra 'ray' is not installed"),
]

COUNT, BAD = 32, 5
PATIENCE_S = 600  # Ray starts five programs, on a machine that does other things too


def test_two_workers_give_the_answers_of_one_process_though_one_was_killed(tmp_path: Path) -> None:
    model = create_model("ViT-w16d1m32h2/8", num_classes=3, image_size=16, seed=0)
    model.head.weight.data.normal_(0, 1)  # pyright: ignore
    save_bundle(tmp_path / "model", Bundle(model, Preprocess(image_size=(16, 16)), ("ant", "bee", "cat"), "card", {}))
    images = list[bytes]()
    for i in range(COUNT):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (18, 20, 3), dtype=np.uint8)).save(file, "PNG")
        images.append(file.getvalue() if i != BAD else b"no picture")
    np.savez(tmp_path / "images.npz", **{str(i): np.frombuffer(data, np.uint8) for i, data in enumerate(images)})  # pyright: ignore
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_job.py")), str(tmp_path / "model"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["killed"] and result["workers"] >= 2
    good = [i for i in range(COUNT) if i != BAD]
    clf = vitlab.load(tmp_path / "model", device="cpu", quiet=True)
    wanted = clf.embed([images[i] for i in good]).numpy()
    assert set(result["vectors"]) == set(result["labels"]) == {str(i) for i in range(COUNT)}, "each row once"
    for name in ("vectors", "labels"):
        assert [i for i in range(COUNT) if result[name][str(i)][0] is not None] == [BAD]
        assert "not a readable image" in result[name][str(BAD)][0]
    np.testing.assert_allclose([result["vectors"][str(i)][1] for i in good], wanted, rtol=0, atol=1e-5)
    answers = clf([images[i] for i in good], top=2)
    assert [result["labels"][str(i)][1] for i in good] == [[each.label for each in row] for row in answers]
