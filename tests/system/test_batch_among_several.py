"""`predict` and `embed` by several processes: the bytes of one process, also after a kill and with another number of them."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import waiting_worlds
from batch_worlds import run_world
from forked_work import in_child
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import create_model
from vitlab.weights.bundle import Bundle, save_bundle

PROGRAMS = Path(sys.executable).parent
PATIENCE_S = 300  # for what takes seconds, on a machine that does other things too
BAD = 13  # the number of the image that is none
IMAGES = 60  # 8 chunks, the last of them not full


def add_images(path: Path, numbers: range) -> None:
    """A tar of tiny pictures without labels, one of which is none."""
    with tarfile.open(path, "w") as tar:
        for i in numbers:
            picture = io.BytesIO(b"" if i != BAD else b"no picture")
            if i != BAD:
                pixels = np.random.default_rng(i).integers(0, 256, (12, 14, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(picture, "PNG")
            about = tarfile.TarInfo(f"{i:05d}.png")
            about.size = len(picture.getvalue())
            tar.addfile(about, io.BytesIO(picture.getvalue()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two shards, and the files that one process makes of them."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "shards").mkdir()
    add_images(folder / "shards" / "a.tar", range(25))
    add_images(folder / "shards" / "b.tar", range(25, IMAGES))
    model = create_model("ViT-w16d2m32h2/8", num_classes=7, image_size=16, seed=0)
    with torch.no_grad():
        assert model.head is not None
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(0)))
    save_bundle(folder / "model", Bundle(model, Preprocess(image_size=(16, 16)), tuple("abcdefg"), "card", {}))
    for verb, out in (("predict", "alone.csv"), ("predict", "alone.parquet"), ("embed", "alone.npz")):
        assert json.loads(run_world(folder, 1, verb, out).out)["bad"].keys() == {f"{BAD:05d}"}
    shutil.rmtree(folder / "cache")
    return folder


@pytest.fixture
def fresh(place: Path, tmp_path: Path) -> Path:
    """The same without anything computed."""
    return Path(shutil.copytree(place, tmp_path / "place"))


def start(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    variables = {"VITLAB_CACHE": "cache", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def chunks(folder: Path) -> int:
    return len(list((folder / "cache").glob("*/*.npy")))


@pytest.mark.parametrize(("verb", "out"), [("predict", "csv"), ("predict", "parquet"), ("embed", "npz")])
def test_two_processes_write_the_file_of_one(fresh: Path, verb: str, out: str) -> None:
    done = run_world(fresh, 2, verb, f"both.{out}")
    assert done.codes == [0, 0], done.err
    result = json.loads(done.out)
    assert result["computed"] == IMAGES
    assert "not a readable image" in result["bad"][f"{BAD:05d}"], "the reason, whichever process met it"
    assert (fresh / f"both.{out}").read_bytes() == (fresh / f"alone.{out}").read_bytes()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_killed_job_is_gone_on_with_by_any_number_of_processes(fresh: Path, before: int, after: int) -> None:
    killed = run_world(fresh, before, "predict", "answers.csv", kill=(before - 1, 2))
    assert killed.codes[before - 1] == -9
    assert not (fresh / "answers.csv").exists()
    kept = chunks(fresh)
    assert 2 <= kept < 8, "what was whole before the kill"
    done = run_world(fresh, after, "predict", "answers.csv")
    assert done.codes == [0] * after, done.err
    rows = [len(np.load(path)) for path in (fresh / "cache").glob("*/*.npy")]
    assert sum(rows) == IMAGES
    result = json.loads(done.out)
    assert IMAGES - 8 * kept <= result["computed"] <= IMAGES - 8 * (kept - 1) - 4, "whole chunks are not computed again"
    assert result["bad"].keys() == {f"{BAD:05d}"} and "not a readable image" in result["bad"][f"{BAD:05d}"]
    assert (fresh / "answers.csv").read_bytes() == (fresh / "alone.csv").read_bytes()


@pytest.mark.slow
def test_command_line_reports_once_what_both_have_done(fresh: Path) -> None:
    add_images(fresh / "shards" / "c.tar", range(IMAGES, 1100))  # more than a chunk of the usual size
    words = ["predict", "model", "shards", "--device", "cpu", "--threads", "1", "--workers", "1", "--cache", "cache"]
    vitlab = str(PROGRAMS / "vitlab")
    torchrun = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python", vitlab]
    alone = start(fresh, [vitlab, *words, "--out", "one.parquet"])
    shutil.rmtree(fresh / "cache")
    both = start(fresh, [*torchrun, *words, "--out", "two.parquet"])
    assert alone.returncode == both.returncode == 0, both.stderr
    assert both.stdout.count("1,099 images in two.parquet") == 1
    assert (fresh / "one.parquet").read_bytes() == (fresh / "two.parquet").read_bytes()
    nowhere = start(fresh, [*torchrun, *words])
    assert nowhere.returncode != 0 and "--out" in nowhere.stderr


def test_group_for_long_waits_outlasts_the_usual_patience(tmp_path: Path) -> None:
    """A group of its own has its own time-out, longer or shorter than that of the first."""
    assert in_child(waiting_worlds.main, tmp_path) == [0, 0]
