"""A run leaves a folder that tells everything, can be run again, and is either whole or has no bundle."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.core import config, fsio
from vitlab.core.console import Console
from vitlab.core.errors import UsageError, VitlabError
from vitlab.core.runtime import Runtime
from vitlab.data.preprocess import Preprocess
from vitlab.engines.classifier import load
from vitlab.models.build import build
from vitlab.models.names import format_name
from vitlab.models.spec import BiTSpec, bit_trunk
from vitlab.runs.recipe import Recipe, load_recipe, recipe_from_dict
from vitlab.runs.run import RunResult, run_recipe
from vitlab.weights.bundle import Bundle, save_bundle

FILES = {"config.toml", "env.json", "split.csv", "metrics.jsonl", "metrics.csv", "bundle", "log.txt"}


def run(recipe: Recipe, folder: Path, runtime: Runtime) -> RunResult:
    return run_recipe(recipe, folder, runtime=runtime, console=Console(quiet=True), command="a test")


def tiny(*overrides: str) -> Recipe:
    return load_recipe("demo-letters", ["data.count=104", "train.steps=2", *overrides])


# --- what is in the folder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pretraining", "transfer"])
def test_folder_holds_the_promised_files(request: pytest.FixtureRequest, name: str) -> None:
    folder = request.getfixturevalue(name).result.folder
    assert {path.name for path in folder.iterdir()} == FILES


def test_metrics_have_one_row_per_step_in_both_forms(transfer: Any) -> None:
    folder = transfer.result.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = list(csv.DictReader(io.StringIO((folder / "metrics.csv").read_text())))
    assert [line["step"] for line in lines] == [1, 2]
    assert [{key: float(value) for key, value in row.items()} for row in rows] == lines
    assert set(lines[0]) == {"step", "loss", "lr", "grad_norm", "images_per_second", "data_wait_frac"}


def test_split_file_tells_where_every_image_went(transfer: Any) -> None:
    rows = list(csv.DictReader(io.StringIO((transfer.result.folder / "split.csv").read_text())))
    assert len({row["path"] for row in rows}) == 1797
    count = {part: sum(row["split"] == part for row in rows) for part in ("train", "test")}
    assert count == {"train": 1438, "test": 359}
    assert transfer.result.scores.n == 359


def test_environment_tells_what_the_bits_depend_on(transfer: Any) -> None:
    env = json.loads((transfer.result.folder / "env.json").read_text())
    assert {"command", "device", "threads", "seed", "vitlab", "python", "packages"} <= env.keys()
    assert (env["command"], env["device"], env["threads"], env["seed"]) == ("a test", "cpu", 1, 0)


def test_log_holds_what_was_said(transfer: Any) -> None:
    log = (transfer.result.folder / "log.txt").read_text()
    recipe = transfer.recipe
    assert f"{recipe.title}: {format_name(recipe.model)} on 1438 images, 10 classes" in log
    assert "replaced by a zero head, 26 -> 10; grid " in log
    assert "training   2/2" in log


def test_bundle_answers_like_the_run_and_knows_its_labels(transfer: Any) -> None:
    result = transfer.result
    clf = load(result.folder, device="cpu")
    assert clf.labels == tuple("0123456789")
    image = result.test.images[0, 0].numpy()
    assert clf(image)[0].p == pytest.approx(float(result.scores.probabilities_BK[0].max()), abs=1e-5)
    assert "test top-1" in clf.bundle.card


# --- again ------------------------------------------------------------------------------------------------------------


def test_stored_config_repeats_the_run_bit_for_bit(pretraining: Any, tmp_path: Path, runtime: Runtime) -> None:
    first = pretraining.result.folder
    again = recipe_from_dict(config.load_toml(first / "config.toml"))
    assert again == pretraining.recipe
    torch.rand(17)
    second = run(again, tmp_path / "again", runtime).folder
    for name in ("config.toml", "split.csv", "bundle/model.safetensors", "bundle/config.json"):
        assert fsio.hash_file(second / name) == fsio.hash_file(first / name), name


def test_another_seed_gives_other_bits(pretraining: Any, tmp_path: Path, runtime: Runtime) -> None:
    other = run(tiny("seed=1"), tmp_path / "other", runtime).folder
    for name in ("split.csv", "bundle/model.safetensors"):
        assert fsio.hash_file(other / name) != fsio.hash_file(pretraining.result.folder / name)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_existing_folder_is_refused_before_any_work(tmp_path: Path, runtime: Runtime) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        run(tiny(), tmp_path / "old", runtime)
    assert list((tmp_path / "old").iterdir()) == []


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("data.count=0", r"data\.count"),
        ("data.count=30", "two per class"),
        ("data.test_frac=0", r"data\.test_frac"),
        ("data.image_size=[7,8]", "patch 2 does not divide the 7x8 image"),
    ],
)
def test_data_that_cannot_work_is_refused_before_the_folder_is_made(
    tmp_path: Path, runtime: Runtime, override: str, complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        run(tiny(override), tmp_path / "run", runtime)
    assert list(tmp_path.iterdir()) == []


def test_run_that_leaves_the_numbers_leaves_no_bundle(tmp_path: Path, runtime: Runtime) -> None:
    with pytest.raises(VitlabError, match="training left the numbers at step"):
        run(tiny("optim.lr=1e30", "train.steps=9"), tmp_path / "run", runtime)
    assert not (tmp_path / "run" / "bundle").exists()
    assert (tmp_path / "run" / "config.toml").exists()


def test_transfer_from_a_resnet_is_refused(tmp_path: Path, runtime: Runtime) -> None:
    spec = BiTSpec(trunk=bit_trunk((1,), 1), image_size=(8, 8), in_channels=1, num_classes=2)
    rule = Preprocess(mode="L", image_size=(8, 8), mean=(0.5,), std=(0.5,))
    save_bundle(tmp_path / "resnet", Bundle(build(spec, seed=0), rule, ("a", "b"), "card", {}))
    with pytest.raises(UsageError, match="the start weights are a BiT-R"):
        run(tiny(f"init={tmp_path / 'resnet'}"), tmp_path / "run", runtime)
    assert not (tmp_path / "run").exists()
